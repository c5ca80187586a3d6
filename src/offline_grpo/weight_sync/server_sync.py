"""What the strategies that serve from another process share: when to push, what counts as delivered, and the proof afterwards."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from offline_grpo.engine.server import Server, stamp
from offline_grpo.engine.sglang_control import SglangControl
from offline_grpo.engine.vllm_control import VllmControl
from offline_grpo.errors import ConfigError, EngineDied, EngineError
from offline_grpo.generation.server_client import ServerClient
from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.types import SyncReport
from offline_grpo.weight_sync.proof import Proof, prove

log = logging.getLogger(__name__)

PAUSE_MODES = ("keep", "wait", "abort")


@dataclass(kw_only=True)
class ServerSync(ABC):
    """A `WeightSync` to a server. Subclasses say how the weights travel, in `deliver`.

    Args:
        interval: push at every N-th opportunity, and always before an evaluation. In between the server samples from an older policy.
        tolerance_nats: largest mean difference |trainer - server| of the probe's logprobs; above it the run stops.
        server_args: options that the server needs for this strategy, added to `engine.args`.
    """

    interval: int
    tolerance_nats: float
    server_args: Any

    shares_weights = False
    """Whether the trainer's parameters become the server's memory."""
    moves = "full"
    """"full" for all weights of the model, "lora" for adapters alone."""
    needs_own_server = False
    """Whether the run must have started the server."""
    needs_gpu = False
    """Whether weights travel from GPU to GPU alone."""
    gpu_rule = "any"
    """Where a server that the run starts must be: "same" GPU as the first training process, any "other" than those, or "any"."""
    serves: ClassVar[tuple[type[ServerClient], ...]] = (VllmClient,)
    """Whose servers it can reach."""
    variables = {}  # noqa: RUF012 - read only
    """Environment variables that the server needs for this strategy."""

    client: Any = field(init=False)  # one of `serves`
    control: Any = field(init=False)  # its VllmControl or SglangControl
    _served: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError(f"weight_sync.interval={self.interval}: must be at least 1")
        if self.tolerance_nats <= 0:
            raise ConfigError(f"weight_sync.tolerance_nats={self.tolerance_nats}: must be above 0")

    @property
    def server(self) -> Server:
        return self.client.server

    def connect(self, policy: Policy, client: RolloutClient) -> None:
        """Start the server, or find it, and see that this strategy can reach its weights.

        Raises:
            ConfigError: a client or a policy that this strategy is not for, or a server that cannot do it.
            EngineError: the server cannot be started or reached.
        """
        self._take(policy, client)
        self.server.start(self.start_model(policy), options=self.start_options(policy))
        version = self.control.check_version()
        log.info("connected to %s %s at %s, weight_sync=%s", self.client.engine_name, version, self.server.base_url, self.name)
        self.attach(policy)

    def push(self, policy: Policy, *, version: int) -> SyncReport:
        """Deliver the policy's weights and prove that they are served. See `WeightSync.push`.

        Raises:
            EngineDied: our own server has ended; `recover` starts another.
            EngineError: the weights did not arrive.
        """
        started = time.perf_counter()
        moved = self.deliver(policy, version)
        self.client.weights = replace(self.client.weights, version=version)
        self._served = version
        delivered = time.perf_counter()
        proof = self.prove(policy, version)
        return SyncReport(
            version=version,
            num_tensors=moved.num_tensors,
            num_bytes=moved.num_bytes,
            seconds=delivered - started,
            paused_seconds=moved.paused_seconds,
            proof_seconds=time.perf_counter() - delivered,
            alignment=proof.metrics(),
        )

    def check_served(self) -> None:
        """See `WeightSync.check_served`."""
        assert self._served is not None, "check_served() before push()"
        found = self.control.served_stamp()
        if found is None:
            raise EngineDied(f"{self.server.base_url}: the server was started anew and has none of the weights pushed to it.")
        if found != stamp(self._served):
            raise EngineError(
                f"{self.server.base_url}: the server has version {found}, where {stamp(self._served)} was pushed: something else pushes "
                "weights to it; nothing was learnt from its samples. Give each run a server of its own, and go on with resume=auto"
            )

    def recover(self, policy: Policy, *, version: int) -> None:
        """Start our own server again after its death, and push. Raises as `connect` and `push` do."""
        self.server.stop()
        self.client.close()
        self.control = control_of(self.client)
        self.server.start(self.recovery_model(policy), options=self.start_options(policy))
        self.attach(policy)
        self.push(policy, version=version)

    def close(self) -> None:
        """Close the connections, and stop a server of our own. Called once, on every way out, also before `connect`."""
        if hasattr(self, "client"):
            self.client.close()
            self.server.stop()

    def start_model(self, policy: Policy) -> str:
        """The folder or hub id that the server starts from: what the policy was loaded from."""
        return str(policy.causal_lm.name_or_path)

    def recovery_model(self, policy: Policy) -> str:
        """What the server starts from after its death: the model before training, which the push that follows brings up to date."""
        return policy.tokenizer.name_or_path

    def start_options(self, policy: Policy) -> Mapping[str, Any]:
        """Options for the next start of the server alone."""
        return {}

    def attach(self, policy: Policy) -> None:  # noqa: B027 - most strategies need nothing here
        """Prepare the path to a server that has just started."""

    @abstractmethod
    def deliver(self, policy: Policy, version: int) -> Moved:
        """Pause, write, fence, flush the prefix cache, set the version, resume."""

    def prove(self, policy: Policy, version: int) -> Proof:
        """See `proof.prove`."""
        return prove(policy, self.client, self.control, version=version, tolerance_nats=self.tolerance_nats)

    @property
    def name(self) -> str:
        """The option's name in conf/weight_sync."""
        return type(self).__module__.rpartition(".")[2]

    def check(self, client_class: type, *, lora_rank: int | None) -> None:
        """See `WeightSync.check`."""
        if not issubclass(client_class, self.serves):
            names = " or ".join(str(kind.engine_name) for kind in self.serves)
            raise ConfigError(f"weight_sync={self.name}: moves weights to a {names} server; use another generation, or another weight_sync")
        if lora_rank is not None and self.moves == "full":
            raise ConfigError(
                f"weight_sync={self.name}: moves all weights, and with model.lora only adapters change; use weight_sync=lora_hotswap"
            )
        if lora_rank is None and self.moves == "lora":
            raise ConfigError(
                f"weight_sync={self.name}: moves LoRA adapters and the policy has none; add model/lora=default, or choose another"
            )

    def _take(self, policy: Policy, client: RolloutClient) -> None:
        self.check(type(client), lora_rank=policy.lora_rank)
        self.client = client
        self.control = control_of(client)


@dataclass(kw_only=True)
class PausingSync(ServerSync):
    """A strategy that stops the server's sampling while weights change.

    Args:
        pause_mode: what happens to requests in flight during a push: "keep" goes on with them under the new weights, their KV cache
            computed again; "wait" lets them end first; "abort" ends them, and the client sends them again.
    """

    pause_mode: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pause_mode not in PAUSE_MODES:
            raise ConfigError(f"weight_sync.pause_mode={self.pause_mode}: must be one of {', '.join(PAUSE_MODES)}")


def control_of(client: RolloutClient) -> VllmControl | SglangControl:
    """What may be done to the server of a client."""
    if isinstance(client, SglangClient):
        return SglangControl(client.server)
    assert isinstance(client, VllmClient)
    return VllmControl(client.server)


@dataclass(frozen=True)
class Moved:
    """What `deliver` did."""

    num_tensors: int
    num_bytes: int
    paused_seconds: float

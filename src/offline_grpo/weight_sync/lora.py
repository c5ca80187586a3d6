"""LoRA adapters are swapped over HTTP while the server runs, with CUDA graphs on; or the server starts again with each.

Every hot swap has a name of its own. vLLM keys its prefix cache on the name, requests in flight finish on the adapter
they began with, and the `load_inplace` option, which makes the server read the adapter from disk again at every step,
is never used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from offline_grpo import progress
from offline_grpo.engine.http import NotFound, Refused
from offline_grpo.engine.streaming import at_once
from offline_grpo.engine.vllm import LORA_KERNELS, VllmEngine
from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.weight_sync.proof import prove_base
from offline_grpo.weight_sync.reload import StagedFolder
from offline_grpo.weight_sync.restart import Restart
from offline_grpo.weight_sync.shared_vllm import share_base
from offline_grpo.weight_sync.snapshot import Snapshot, save_weights
from offline_grpo.weight_sync.strategy import STARTED_ANEW, ServerSync, SyncRequirements, foreign_write

ADAPTERS = SyncRequirements(engine=VllmEngine, moves="lora", env={"VLLM_TUNED_CONFIG_FOLDER": LORA_KERNELS})
"""What both strategies need."""
KEPT_FOLDERS = 4
"""vLLM reads an adapter again whose room it has needed, and dies of a missing one. Requests of environments and of
other processes are not counted here, so the last folders stay for them."""


@dataclass(kw_only=True)
class LoraHotswap(ServerSync):
    """Needs no pause, and of an external server only --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.

    Args:
        share_base: see `shared_vllm.share_base`.
    """

    share_base: bool

    name = "lora_hotswap"
    needs = replace(ADAPTERS, in_flight=("keep",))
    is_tagged = False  # the name in each request is the proof of the version; the probe proves the weights

    _prefix: str = field(default_factory=lambda: f"policy-{os.getpid()}-{uuid.uuid4().hex[:6]}", init=False)
    _num_pushes: int = field(default=0, init=False)
    _names: list[str] = field(default_factory=list, init=False)  # whose folders are there, newest last
    # names, newest last
    _loaded: dict[VllmEngine, list[str]] = field(default_factory=lambda: defaultdict(list), init=False)
    _base_tags: dict[VllmEngine, str] = field(default_factory=dict, init=False)  # see `prove_base`

    @property
    def requires(self) -> SyncRequirements:  # type: ignore[override]
        needs = super().requires
        return replace(needs, one_engine=True, placement="same", shares_weights=True) if self.share_base else needs

    def attach(self, engine: VllmEngine, snapshot: Snapshot) -> None:
        """A new server has none of our adapters. One that takes nothing else cannot prove its base; another base raises
        ConfigError.
        """
        self._loaded[engine] = []
        self._base_tags.pop(engine, None)
        if engine.lacks("full") is None:
            with progress.phase("proof"):
                self._base_tags[engine] = prove_base(engine, snapshot)
        if self.share_base:
            share_base(engine, snapshot.policy)

    @contextlib.contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedFolder]:
        self._num_pushes += 1
        name = f"{self._prefix}-{self._num_pushes}"
        folder = snapshot.host.scratch / name
        num_bytes = save_weights(snapshot, folder)
        self._names.append(name)
        num_tensors = len(snapshot.policy.trained_parameters())
        staged = StagedFolder(version=version, name=name, num_tensors=num_tensors, num_bytes=num_bytes, folder=folder)
        yield staged

        # All engines sample from it by now. Other processes of the run hear of it a moment later, so the adapter before
        # the old one is unloaded, and the folders stay until nobody's requests name them.
        for engine, names in self._loaded.items():
            while len(names) > 2:
                with contextlib.suppress(NotFound):  # somebody has started the server anew, or unloaded it
                    engine.unload_adapter(names.pop(0))
        for old in self._names[:-KEPT_FOLDERS]:
            if not any(engine.num_asked[old] for engine in self._loaded):
                for engine in self._loaded:
                    shutil.rmtree(engine.scratch / old, ignore_errors=True)
                self._names.remove(old)

    def deliver(self, engines: Sequence[VllmEngine], staged: StagedFolder) -> float:
        """Requests use the adapter as soon as they carry its name.

        Every server reads it from its own folder: that of one that dies is deleted, and the others may need to read
        theirs again.
        """

        def load(engine: VllmEngine) -> None:
            # The first engine's folder is where it was saved.
            folder = engine.scratch / staged.name
            if folder != staged.folder:
                shutil.copytree(staged.folder, folder)
            try:
                engine.load_adapter(staged.name, str(folder))
            except Refused as error:
                config = json.loads((folder / "adapter_config.json").read_text())
                if not config.get("target_parameters"):  # those of experts, which vLLM refuses in whatever words
                    raise
                fix = "to adapt no experts, use model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
                raise Refused(f"{error}; {fix}") from error
            self._loaded[engine].append(staged.name)

        at_once(load, engines)
        return 0.0

    def check_served(self, engine: VllmEngine, version: int) -> None:
        """Of the base: a server without the adapter would have refused the requests, which name it."""
        if engine not in self._base_tags:
            return
        try:
            found = engine.served_tag()
        except Refused:  # started anew, and without the worker extension
            del self._base_tags[engine]
            found = None
        if found is None:
            raise EngineDied(f"{engine.base_url}: {STARTED_ANEW}")
        if found != self._base_tags[engine]:
            raise foreign_write(engine.base_url, "has another base model under the adapters")

    def detach(self, engine: VllmEngine) -> None:
        """An external server forgets the adapters, whose folders go now."""
        for name in self._loaded.pop(engine, []):
            if not engine.is_managed:
                with contextlib.suppress(EngineError):
                    engine.unload_adapter(name)


@dataclass(kw_only=True)
class LoraRestart(Restart):
    """The base model is what the server is started with, every time, and the adapter is named on its command line."""

    name = "lora_restart"
    needs = replace(ADAPTERS, own_server=True)
    adapter = "policy-adapter"


def room_for(rank: int) -> int:
    """The lowest `max_lora_rank` of a server that has room for adapters of this rank."""
    return max(16, 2 ** (rank - 1).bit_length())

"""The Protocols that components implement and the loop is written against. No component is imported."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from offline_grpo.types import (
    EQUAL_REWARDS,
    BatchTotals,
    CompletionStream,
    LossOutput,
    Message,
    Metrics,
    Problem,
    Reply,
    RolloutGroup,
    SamplingParams,
    SamplingRequest,
    Schema,
    Score,
    ServedWeights,
    Split,
    TokenBatch,
    TokenStats,
)

if TYPE_CHECKING:  # see types.py
    import torch
    from torch import Tensor, nn

T = TypeVar("T")


@runtime_checkable
class Task(Protocol):
    """Problems with answers that a program can check. Its class may say more, see `TaskFacts`.

    It may have one method more, which plays the problems that have `rules`, in turns, where `score` would run:

        def play(self, problem: Problem, chat: Chat) -> Score
    """

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order; the sequence may be lazy."""
        ...

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        """Judge an answer's text (`TokenizerCodec.judged`). Pure, maybe async; should not raise whatever it gets."""
        ...


@dataclass(frozen=True)
class TaskFacts:
    """What the class of a task says of it, by attributes of these names. Those that it lacks have these defaults."""

    scores_safely: bool = False
    """`score` is short code that cannot hang or raise: it is called in the run's process instead of in one that can be
    killed (`scoring` in conf/)."""
    worker_imports: tuple[str, ...] = ()
    """Modules that are imported once for all those processes."""
    is_ordered: bool = False
    """The order of its training problems matters, which `data.shuffle` would destroy."""
    rewards_groups: bool = False
    """It also has `score_group(problem, texts)`, sync or async, which returns a Score for each completion of a group;
    its parts and rewards are added to those of `score`."""
    plays: bool = False
    """It has `play`."""
    is_deterministic: bool = False
    """`score` of the same problem and text is always the same, and costs enough to be asked for once: groups often
    repeat themselves."""

    @classmethod
    def of(cls, task: Task) -> TaskFacts:
        """A mixture says what its tasks say."""
        tasks = getattr(task, "tasks", None)
        if not isinstance(tasks, Mapping) or not all(isinstance(each, Task) for each in tasks.values()):
            said: dict[str, Any] = {each.name: getattr(task, each.name, each.default) for each in fields(cls)}
            said["plays"] = hasattr(task, "play")
            return cls(**said)
        all_facts = [cls.of(each) for each in tasks.values()]
        return cls(
            scores_safely=all(facts.scores_safely for facts in all_facts),
            worker_imports=tuple(sorted({name for facts in all_facts for name in facts.worker_imports})),
            is_ordered=any(facts.is_ordered for facts in all_facts),
            rewards_groups=any(facts.rewards_groups for facts in all_facts),
            plays=any(facts.plays for facts in all_facts),
            is_deterministic=all(facts.is_deterministic for facts in all_facts),
        )


class Chat(Protocol):
    """The policy, as the program of an episode asks it."""

    seed: int
    """For what the program draws itself: the same for all episodes of a group."""
    base_url: str
    """Where a client of OpenAI's API finds the policy, with `api_key`; empty unless `Rules.has_address`."""
    api_key: str

    def say(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> Reply:
        """The policy's reply to a whole conversation, as clients of OpenAI's API send it. Beyond the limits (`Rules`)
        it is empty, and cut.
        """
        ...

    def pay(self, reward: float) -> None:
        """Say that the last turn earned a part of the reward."""
        ...


@runtime_checkable
class RolloutClient(Protocol):
    """Our handle on the engine that samples."""

    is_local: ClassVar[bool]
    """Whether it samples in this process, from the module that is trained."""
    weights: ServedWeights
    """What the engine serves; replaced as a whole after each push, so that no request mixes names and versions."""

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        """Answer the requests: yields the index of each with its completions as soon as they are complete.

        Requests are taken from the iterable as there is room for them. None, which has no index, says that there is
        none yet: answer those that are open, and ask again. Closing the iterator abandons what is open.

        Raises:
            offline_grpo.errors.EngineError: the engine did not return exactly what was asked for.
        """
        ...

    def close(self) -> None:
        """Let go of connections. Called once."""
        ...


@runtime_checkable
class Source(Protocol):
    """Where an iteration's rollouts come from: a component of the group `rollouts`. Inherit from it, and write `next`.

    Every process has a source of its own, which contributes its share without collectives: the loop gathers them.
    """

    needs_problems: ClassVar[bool] = True
    """Whether it trains on problems of the task; if not, none are made and its constructor cannot ask for them."""
    samples: ClassVar[bool] = False
    """Whether it samples completions of those problems from the run's engine, and nothing else."""
    samples_ahead: ClassVar[bool] = False
    """Whether it does so while the trainer trains, and between any two calls."""
    has_environments: ClassVar[bool] = False
    """Whether others sample for it, by the address of the run's server, and say one reward of each rollout."""

    @staticmethod
    def check(config: Any) -> None:
        """Raise ConfigError, before a model is loaded, if it cannot work in a run with this `settings.RunConfig`."""

    @staticmethod
    def recorded(config: Any) -> Sequence[RolloutGroup]:
        """Some of the groups to come, where they are known before a model is loaded."""
        return ()

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Called once, with the iteration that comes first and what `state_dict` returned for the checkpoint."""

    @abstractmethod
    def next(self, iteration: int) -> list[RolloutGroup]:
        """This process's scored groups of the iteration. With W processes, item i of process r becomes item i * W + r
        of the whole: all groups may come from one process, in order.

        Raises:
            offline_grpo.errors.EngineDied: the engine has ended; the loop recovers it and asks again.
        """
        ...

    def sampled(self, iteration: int, groups: Sequence[RolloutGroup]) -> None:
        """An iteration's groups, of all processes, before they are trained on."""

    def weights_changed(self, version: int) -> None:
        """The engine serves new weights, which carry `version` updates."""

    def weights_lost(self) -> None:
        """The engine has died, and with it what was sampled and not handed out; `weights_changed` says it is back."""

    def metrics(self) -> Metrics:
        """About the last `next`, for the iteration's metrics file; those of the first process are kept."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold, as JSON types; empty where the iteration decides everything."""
        return {}

    def close(self) -> None:
        """Let go of everything, also of what runs in the background. Called once."""


@runtime_checkable
class Advantage(Protocol):
    """How much better each rollout is than those it is compared with: a component of the group `train/advantage`.
    Inherit from it, and write `__call__`.
    """

    needs: ClassVar[Collection[str]] = ()
    """Which logprobs the batch must have beside `rollout_logprobs`: "old", "ref". All rollouts are scored for it."""
    teacher: str | None = None
    """Folder, Hub id, or server's URL of a frozen model: the batch has its `teacher_logprobs`."""

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        """Raise ConfigError, before a model is loaded, if a run with this `settings.RunConfig` lacks what it needs.

        Args:
            recorded: some of the groups that are replayed, without a score where they get another; empty otherwise.
        """

    @abstractmethod
    def __call__(
        self, groups: Sequence[RolloutGroup], batch: TokenBatch
    ) -> Sequence[Sequence[float | Sequence[float]]]:
        """For each group one number per rollout, or per rollout one number for each of its N tokens. Called on every
        process, with the same arguments.

        Args:
            groups: of all processes, none dropped yet, with those rollouts alone that have a score: its reward (with
                `train.loss.kl_placement=reward`, less the KL penalty), and its `parts`.
            batch: the same rollouts, of `rollout_lengths` tokens, all with logprobs; `completion_mask` says what is
                trained.
        """
        ...

    def is_silent(self, group: RolloutGroup) -> bool:
        """Whether a group has no signal, whatever the others are: `data.resample_zero_signal` replaces it, and
        `train.drop_zero_signal_groups` drops it. By default, whether its rewards are equal.
        """
        rewards = [rollout.score.reward for rollout in group.rollouts]
        return max(rewards) - min(rewards) < EQUAL_REWARDS


@runtime_checkable
class Loss(Protocol):
    """A policy-gradient objective with its regularisers."""

    @property
    def kl_coef(self) -> float:
        """Weight of the KL penalty; above 0 the trainer loads a reference."""
        ...

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus; above 0 the entropy needs a gradient."""
        ...

    @property
    def ratio_reference(self) -> str:
        """What the policy's ratio is to: "old" (several updates need a scoring pass) or "rollout", the engine."""
        ...

    def __call__(self, policy: TokenStats, batch: TokenBatch, totals: BatchTotals) -> LossOutput:
        """This microbatch's share of the loss (see `LossOutput`). Mutates nothing."""
        ...


class Scorer(Protocol):
    """A frozen model that is asked how likely tokens are: the reference, or a teacher."""

    @property
    def device(self) -> torch.device:
        """Where it wants batches."""
        ...

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs [T] of the completion tokens under the batch's temperatures, in nats; 0 elsewhere."""
        ...


@runtime_checkable
class Layout(Protocol):
    """How the sequences of a flat batch are arranged for one forward pass of the decoder."""

    @property
    def pads(self) -> bool:
        """Whether a sequence takes as many positions as the longest of its microbatch."""
        ...

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError, before weights are loaded, if it does not run on `device` with weights of `dtype`."""
        ...

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        """The last hidden states [T, H] of the transformers model below the language-model head. Every token attends
        to itself and to those before it in its own sequence.
        """
        ...

    def attention(self, decoder: nn.Module, batch: TokenBatch) -> AbstractContextManager[None]:
        """Inside, the decoder attends as in `hidden_states`: gradient checkpointing runs it again, backwards."""
        ...


@runtime_checkable
class LossHead(Protocol):
    """From hidden states and output embeddings to logprobs and entropies, differentiable."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        *,
        softcap: float | None = None,
        entropy_requires_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of `targets` and entropies of softmax(cap(hidden @ weight.T + bias) / temperature), both [N], in
        nats.

        Args:
            hidden: [N, H], the decoder's output at the position before each target.
            weight: [V, H].
            bias: [V] or None.
            targets: [N] int64 in [0, V).
            temperature: [N], positive. A model's factor on its logits is in it.
            softcap: cap(z) is softcap * tanh(z / softcap), or z if None.
            entropy_requires_grad: if False the entropy is a metric, without gradient.

        Returns:
            logprobs [N] and entropy [N] in float32 (float64 for float64 `hidden`), differentiable in `hidden`, `weight`
            and `bias`.
        """
        ...


@runtime_checkable
class OptimizerFactory(Protocol):
    """An optimizer's settings."""

    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer over `parameters`, which are fp32."""
        ...


@runtime_checkable
class RunListener(Protocol):
    """Follows a run: a component of the group `logger`. Inherit from it, and write the methods that you need. They are
    called from the main thread of the first process.
    """

    def loaded(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Called once, when the model is loaded: `decode` gives the text of token ids, with special tokens."""

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        """Called once, with the resolved configuration; before it come the phases of loading alone."""

    def phase(self, name: str, iteration: int) -> None:
        """Phase `name` ("generate", "train", "sync", "eval", "checkpoint", or one of the start) begins or continues."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """`done` of the phase's `total` (0: unknown) "completions", "microbatches", ... of this process are done."""

    def rollouts(
        self,
        name: str,
        groups: Sequence[RolloutGroup],
        *,
        advantages: Sequence[Sequence[float | None]] | None,
        iteration: int,
    ) -> None:
        """What phase `name` ("train" or "eval") sampled, on all processes; advantages in training only."""

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        """The metrics of phase `name` ("train" or "eval"). Iteration -1 is the evaluation before any training."""

    def close(self) -> None:
        """Called on every way out, perhaps twice."""

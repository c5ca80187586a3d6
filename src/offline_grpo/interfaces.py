"""The Protocols that components implement and the training loop is written against. Nothing here imports a concrete component."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from offline_grpo.types import (
    BatchTotals,
    Completion,
    LossOutput,
    Metrics,
    Problem,
    RolloutGroup,
    SamplingParams,
    Score,
    Split,
    SyncReport,
    TokenBatch,
    TokenStats,
)


@runtime_checkable
class Task(Protocol):
    """Problems with answers that a program can check."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order; the sequence may be lazy. The two splits share no prompt."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Judge a completion's text, free of special tokens. A pure function; whatever the model wrote, it never raises."""
        ...


@runtime_checkable
class RolloutClient(Protocol):
    """Our handle on the engine that samples."""

    version: int
    """How many optimizer updates the weights being served carry."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, group_size: int, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Sample `group_size` completions for each prompt (token ids in, token ids out), in the order of `prompts`.

        Completion j of prompt i is drawn with seed `seeds[i] + j`, so the result does not depend on how the work is batched.

        Raises:
            offline_grpo.errors.EngineError: the engine did not return exactly what was asked for.
        """
        ...


@runtime_checkable
class RolloutSource(Protocol):
    """Where an iteration's rollouts come from."""

    def next(self, iteration: int) -> list[RolloutGroup]:
        """The scored groups to train on, the same list on every process."""
        ...


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
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from the rewards (see `reward_penalties`) and not a term of the loss."""
        ...

    @property
    def scale_rewards(self) -> str:
        """What centred rewards are divided by: see `advantage.group_advantages`."""
        ...

    def reward_penalties(self, batch: TokenBatch) -> Tensor:
        """What each sequence's reward is lowered by, [S], from `old_logprobs` and `ref_logprobs`. Used where `kl_in_reward`."""
        ...

    def __call__(self, policy: TokenStats, batch: TokenBatch, totals: BatchTotals) -> LossOutput:
        """This microbatch's share of the loss (see `LossOutput`). Mutates nothing."""
        ...


@runtime_checkable
class Layout(Protocol):
    """How the sequences of a flat batch are arranged for one forward pass of the decoder."""

    @property
    def pads(self) -> bool:
        """Whether a sequence takes as many positions as the longest of its microbatch, which `train.tokens_per_microbatch` then counts."""
        ...

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError if this layout does not run on `device` with weights of `dtype`. Called before weights are loaded."""
        ...

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        """The decoder's last hidden states [T, H]. Every token attends to itself and to those before it in its own sequence.

        Args:
            decoder: the transformers model below the language-model head.
        """
        ...

    def attention(self, decoder: nn.Module) -> AbstractContextManager[None]:
        """Inside, the decoder attends as in `hidden_states`: with gradient checkpointing the backward pass runs it again."""
        ...

    def for_memory_plan(self) -> Layout:
        """The layout that the memory plan runs on the meta device, whose tensors have no values: this one, or one that needs no less."""
        ...


@runtime_checkable
class LossHead(Protocol):
    """From hidden states and output embeddings to logprobs and entropies, differentiable."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, *, entropy_requires_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of `targets` and entropies of softmax((hidden @ weight.T + bias) / temperature), both [N], in nats.

        Args:
            hidden: [N, H], the decoder's output at the position before each target.
            weight: [V, H].
            bias: [V] or None.
            targets: [N] int64 in [0, V).
            temperature: [N], positive.
            entropy_requires_grad: if False the entropy is a metric, without gradient.

        Returns:
            logprobs [N] and entropy [N] in float32 (float64 for float64 `hidden`), differentiable in `hidden`, `weight` and `bias`.
        """
        ...

    def scratch_bytes(self, *, num_tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> int:
        """The most memory that forward and backward hold at once beyond arguments, results and gradients, in bytes.

        `num_tokens` is N; `dtype` and `device` are those of `hidden` and `weight`. The memory plan asks for GPUs on any machine.
        """
        ...


@runtime_checkable
class OptimizerFactory(Protocol):
    """An optimizer's settings, and what it will hold."""

    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer over `parameters`, which are fp32."""
        ...

    def state_bytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """The GPU memory of its state for parameters of these shapes."""
        ...

    def step_scratch_bytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """The GPU memory that a step allocates and frees again."""
        ...


@runtime_checkable
class WeightSync(Protocol):
    """Delivers the policy's weights to the engine."""

    @property
    def shares_weights(self) -> bool:
        """Whether the policy's parameters become the engine's own memory: the policy is then loaded on the CPU, and moved by `connect`."""
        ...

    def check(self, client_class: type, *, lora_rank: int | None) -> None:
        """Raise ConfigError for a client, or adapters of that rank (None: no adapters), that this is not for. Called before a model is
        loaded."""
        ...

    def connect(self, policy: Any, client: RolloutClient) -> None:
        """Start or find the engine and prepare the path. Called once, before masters and optimizer exist.

        Raises unless every tensor of the policy is covered exactly once.
        """
        ...

    def push(self, policy: Any, *, version: int, force: bool = True) -> SyncReport:
        """Pause, write, fence, flush the prefix cache, set the version, resume, and prove that the engine serves the policy. Idempotent.

        Args:
            force: False lets a strategy that pushes at intervals leave it for later.

        Raises:
            offline_grpo.errors.EngineDied: the engine, one that the run started, has ended.
            offline_grpo.errors.EngineError: the engine does not serve what was pushed.
        """
        ...

    def check_served(self) -> None:
        """See that the engine still has the weights of the last push. Called after sampling, before anything is learnt from the samples.

        Raises:
            offline_grpo.errors.EngineDied: it has none since it was started anew.
            offline_grpo.errors.EngineError: it has other weights.
        """
        ...

    def recover(self, policy: Any, *, version: int) -> None:
        """Start the engine again after EngineDied, if the run started it, and push."""
        ...

    def close(self) -> None:
        """Let go of the engine. Called once, on every way out."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """Measures the served policy on held-out problems."""

    def evaluate(self, client: RolloutClient, *, cycle: int) -> Metrics:
        """Metrics of one evaluation; `cycle` (0, 1, ...) gives each evaluation sampling noise of its own."""
        ...


@runtime_checkable
class MetricLogger(Protocol):
    """Takes the metrics of an iteration somewhere."""

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        """Called once, before the first `log`, with the resolved configuration."""
        ...

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        """Record the metrics of phase `name` ("train" or "eval"). Iteration -1 is the evaluation before any training."""
        ...

    def close(self) -> None:
        """Called once, on every way out."""
        ...


@runtime_checkable
class PhaseListener(Protocol):
    """A logger that also shows what the run is doing right now."""

    def phase(self, name: str, iteration: int) -> None:
        """Phase `name` ("generate", "train", ...) of `iteration` begins."""
        ...


class PendingCheckpoint(Protocol):
    """A checkpoint that is written but does not count yet."""

    def commit(self) -> None:
        """Make it the newest checkpoint, at once and completely."""
        ...


@runtime_checkable
class Checkpointer(Protocol):
    """Saves everything that the next iteration depends on."""

    def write(self, iteration: int) -> PendingCheckpoint:
        """Save the state after `iteration`; raises CheckpointError, with earlier checkpoints intact, if that fails."""
        ...


class StopSignal(Protocol):
    """Whether somebody asked the run to stop."""

    @property
    def is_requested(self) -> bool:
        """True once a signal came."""
        ...

    def interruptible(self, allowed: bool = True) -> AbstractContextManager[None]:
        """Inside, a signal raises StopRequested at once, if `allowed`; elsewhere it waits."""
        ...

    def raise_now(self) -> NoReturn:
        """Raise StopRequested, also where the signal came to another process of the run."""
        ...

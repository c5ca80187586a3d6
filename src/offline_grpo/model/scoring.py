"""A model's view of a flat batch: the logprob and the entropy of every completion token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from offline_grpo.errors import require
from offline_grpo.interfaces import Layout, LossHead
from offline_grpo.model.adapters import LanguageModel, adapters_off, unwrapped
from offline_grpo.model.filtered_head import filtered_head
from offline_grpo.model.layers import decoder_of, output_embeddings
from offline_grpo.model.layouts import Padded
from offline_grpo.model.routes import Routers, Rows
from offline_grpo.model.ulysses import Ulysses
from offline_grpo.types import TokenBatch, TokenStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offline_grpo.model.pictures import Vision

SMALL, HUGE = 2.0**-20, 2.0**20  # powers of two: dividing by them rounds nothing
RELATIVE_TOLERANCE = 1e-4  # of float32 arithmetic; a bf16 constant would be off by 4e-3


class LogitTransform(NamedTuple):
    """The model's logits are `scale * c(z)` for z = hidden @ weight.T + bias, with c(z) = softcap * tanh(z / softcap),
    or z for None.
    """

    scale: float = 1.0
    softcap: float | None = None


class Scoring(nn.Module):
    """Scores flat batches with a causal language model. The frozen reference is one, the policy has one.

    `forward` alone uses the decoder and the weights of the head, so that FSDP2 can wrap it.
    """

    def __init__(
        self,
        model: LanguageModel,
        layout: Layout,
        head: LossHead,
        *,
        logits: LogitTransform = LogitTransform(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__()
        self.model, self.layout, self.head, self.logits = model, layout, head, logits
        self.vision: Vision | None = None  # of a run with pictures, once the proof without pictures is done
        self.routers: Routers | None = None  # of a policy that follows routes, or whose routes are recorded
        self._rows: tuple[Tensor, Rows] | None = None  # of the last batch: for `tree` they take time

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, free of peft's wrapper; LoRA layers sit inside it."""
        return unwrapped(self.model)

    @property
    def output(self) -> nn.Linear:
        """The language-model head."""
        return output_embeddings(self.causal_lm)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, batch: TokenBatch, *, entropy_requires_grad: bool = False) -> TokenStats:
        """Logprobs and entropies [T] of the batch's completion tokens under the batch's temperature; 0 elsewhere.

        Args:
            entropy_requires_grad: if False the entropy is a metric, without gradient.
        """
        # Triton kernels run on the current GPU, and a reference may have another.
        with torch.accelerator.device_index(self.device.index):
            # 1. The decoder's last hidden states [T, H], or [C, H] of this process's slice. With pictures they come
            #    from the model around it: its tower is frozen, and it counts positions itself, in rows of one sequence.
            with self._routes(batch):
                if any(batch.pictures):
                    assert self.vision is not None
                    look: Any = partial(self.vision.forward, self.causal_lm, [*chain.from_iterable(batch.pictures)])
                    hidden = Padded().hidden_states(look, batch)
                else:
                    hidden = self.layout.hidden_states(decoder_of(self.causal_lm), batch)

            # 2. Which tokens to score, those that this process's slice predicts, and among which others: the whole
            #    vocabulary without what stands for pictures, or what the sampler's filters left of it.
            output, bias = self.output, self.output.bias
            if self.vision is not None:
                never = self.vision.bias(output.weight)
                bias = never if bias is None else bias + never
            at, first, own = batch.completion_positions, 0, slice(None)  # [N]
            if isinstance(shared := self.layout, Ulysses):
                first, own = shared.own(batch, at)
            head: Any = self.head
            if batch.num_alternatives is not None:
                sizes, sets = batch.num_alternatives[at], batch.alternatives  # [N], [M]
                assert sets is not None
                if own != slice(None):
                    ends = nn.functional.pad(sizes.cumsum(0), (1, 0))
                    sizes, sets = sizes[own], sets[ends[own.start] : ends[own.stop]]
                head = partial(filtered_head, num_alternatives=sizes, alternatives=sets)
            at = at[own]

            # 3. Their logprobs and entropies, [N].
            logprobs, entropy = head(
                hidden[at - 1 - first],  # the only shift by one: a token is predicted at the position before it
                output.weight,
                bias,
                batch.token_ids[at],
                batch.temperature[at] / self.logits.scale,
                softcap=self.logits.softcap,
                entropy_requires_grad=entropy_requires_grad,
            )

        # 4. Back in the flat batch, and summed over the processes that share its sequences.
        zeros = logprobs.new_zeros(len(batch.token_ids))  # [T]
        stats = TokenStats(logprobs=zeros.index_copy(0, at, logprobs), entropy=zeros.index_copy(0, at, entropy))
        if isinstance(shared, Ulysses):
            stats = TokenStats(logprobs=shared.whole(stats.logprobs), entropy=shared.whole(stats.entropy))
        return stats

    @property
    def pads(self) -> bool:
        """Whether a sequence takes as many positions as the longest of its microbatch."""
        return self.layout.pads or self.vision is not None

    @contextmanager
    def attention(self, batch: TokenBatch) -> Iterator[None]:
        """The attention and the routes that `forward` uses: a backward pass through checkpointed activations must run
        inside.
        """
        own = nullcontext() if any(batch.pictures) else self.layout.attention(decoder_of(self.causal_lm), batch)
        with own, self._routes(batch):
            yield

    def _routes(self, batch: TokenBatch) -> AbstractContextManager[None]:
        if self.routers is None or batch.routes is None:
            return nullcontext()
        rows = self._rows_of(batch)
        return self.routers.following(batch.routes, rows.places, rows.size)

    def _rows_of(self, batch: TokenBatch) -> Rows:
        if self._rows is None or self._rows[0] is not batch.token_ids:
            layout = Padded() if any(batch.pictures) else self.layout
            self._rows = batch.token_ids, Rows(layout, decoder_of(self.causal_lm), batch)
        return self._rows[1]

    def seen_routes(self, batch: TokenBatch) -> Tensor:
        """[T, L, K] what the routers would have chosen when `forward` has just scored the batch."""
        assert self.routers is not None
        return self.routers.seen(self._rows_of(batch).places)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs [T] without gradient, dropout off."""
        with eval_mode(self.model):
            return self(batch).logprobs

    def logprobs_and_routes(self, batch: TokenBatch) -> Tensor:
        """Logprobs, and behind them the routes that the experts of each block are chosen by: [T, 1 + L * K] float32."""
        logprobs = self.logprobs(batch)
        return torch.cat([logprobs[:, None], self.seen_routes(batch).flatten(1).float()], 1)

    def logprobs_alone(self, batch: TokenBatch) -> Tensor:
        """`logprobs` by this process without those that it shares sequences with."""
        shared = self.layout
        self.layout = shared.alone if isinstance(shared, Ulysses) else shared
        try:
            return self.logprobs(batch)
        finally:
            self.layout = shared

    @torch.no_grad()
    def entropy(self, batch: TokenBatch) -> Tensor:
        """Entropies [T] without gradient, dropout off."""
        with eval_mode(self.model):
            return self(batch).entropy


@dataclass(frozen=True)
class BaseScoring:
    """The reference of an adapted policy: the policy itself, with its LoRA adapters switched off and its own routes."""

    adapted: Scoring

    @property
    def device(self) -> torch.device:
        return self.adapted.device

    def logprobs(self, batch: TokenBatch) -> Tensor:
        with adapters_off(self.adapted.model):
            return self.adapted.logprobs(replace(batch, routes=None))


def prepare_for_gradients(model: nn.Module, *, adapter_dropout: bool = True) -> None:
    """Switch on what training needs of train mode: activation checkpointing, and dropout on adapters.

    The rest stays in eval mode: the sampler has no dropout, so the scores compared with its logprobs must have none.
    """
    for name, module in model.named_modules():
        trains = getattr(module, "gradient_checkpointing", False) or (adapter_dropout and ".lora_dropout" in name)
        if module.training != trains:  # to set a module's attribute takes much longer than to read it
            module.training = trains


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, the previous modes back afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def measure_logit_transform(model: PreTrainedModel, *, key: str = "model.train_id") -> LogitTransform:
    """Find the transform by putting chosen numbers in place of hidden states and of the head's output.

    It is measured and not read from config.json because a name does not say enough: `logits_scaling` divides in Granite
    and multiplies in HyperCLOVA. Chosen numbers show a soft-cap that the model's own logits are too small to reach.
    Raises ConfigError, which names `key`, if the model does something else to its logits.
    """
    hidden_size, vocab_size = output_embeddings(model).weight.shape[::-1]
    device, seen = model.device, []
    z = torch.zeros(vocab_size, device=device)  # [V]
    magnitudes = torch.logspace(-2, 3, vocab_size // 2, device=device)
    z[0 : 2 * len(magnitudes) : 2], z[1 : 2 * len(magnitudes) : 2] = magnitudes, -magnitudes
    z[0], z[1] = SMALL, HUGE

    # The decoder returns ones; the head shows what it gets of them, and returns z.
    def decoder_returns(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = torch.ones(hidden_size, device=device).expand_as(output.last_hidden_state)
        return output

    def head_returns(x: Tensor) -> Tensor:
        seen.append(x[0, -1].float())
        return z.expand(*x.shape[:-1], len(z))

    hook = decoder_of(model).register_forward_hook(decoder_returns)
    head: Any = output_embeddings(model)
    head.forward = head_returns
    try:
        logits = model(input_ids=torch.tensor([[1]], device=device), use_cache=False).logits[0, -1].float()
    finally:
        hook.remove()
        del head.forward

    # Around 0 the slope is the factor behind the head; far out a soft-cap bends it. The factor before the head is what
    # has become of the ones.
    small, huge = logits[:2].tolist()
    after = small / SMALL
    cap = huge / after if abs(huge) < 0.5 * abs(after) * HUGE else None
    expected = after * (z if cap is None else cap * torch.tanh(z / cap))
    head_input = seen[0]
    before = float(head_input.double().mean())
    is_known = (
        torch.allclose(logits, expected, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * abs(after) * SMALL)
        and torch.allclose(head_input, torch.full_like(head_input, before))
        and (before == 1 or output_embeddings(model).bias is None)
    )
    fault = "changes its hidden states or logits beside the head by more than a factor or a tanh soft-cap"
    is_known &= after > 0 and before > 0
    require(is_known, key, model.name_or_path, f"{type(model).__name__} {fault}; choose another model")
    return LogitTransform(after * before, None if cap is None else cap / before)

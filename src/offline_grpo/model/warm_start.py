"""Supervised training of the tiny model: first on right answers, then on demonstrations of which a fixed share is
wrong.

A language model reproduces its data. Once it knows the answers, showing it half wrong ones makes it sample the right
one only half of the time, while that stays its single most probable answer. This is the kind of base model that RL is
good at: the knowledge is there, the habit is not. Noise from the first step on would leave less time to learn the
arithmetic itself, which RL then cannot make up for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from offline_grpo.model.text import encode
from offline_grpo.types import Problem

Progress = Callable[[int, int, float], None]
"""Called after every step with its number (from 1), the number of steps, and the step's loss in nats per token."""

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0
WARMUP_FRAC = 0.05
CLEAN_FRAC = 0.6  # share of the steps before wrong answers appear
IGNORED = -100  # the label that cross_entropy leaves out


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A problem and the answer that the model is shown, right or wrong."""

    problem: Problem
    answer: str


def demonstrations(problems: Sequence[Problem], *, noise_frac: float, seed: int) -> Iterator[Demonstration]:
    """Endless random draws from `problems`; each answer is wrong with probability `noise_frac`."""
    rng = random.Random(seed)
    while True:
        problem = rng.choice(problems)
        is_wrong = rng.random() < noise_frac
        yield Demonstration(problem, distractor(problem.answer, rng) if is_wrong else problem.answer)


def distractor(answer: str, rng: random.Random) -> str:
    """A plausible wrong answer: off by one, of the wrong sign, or with its last digit lost or doubled."""
    value = int(answer)
    mistakes = [
        str(value + rng.choice((-1, 1))),
        str(-value),
        answer[:-1],
        answer + answer[-1],
    ]
    return rng.choice([mistake for mistake in mistakes if mistake not in ("", "-", "00", answer)])


def warm_start(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    noise_frac: float,
    seed: int,
    progress: Progress | None,
) -> None:
    """Train in place with AdamW, linear warm-up and cosine decay; the loss is that of the shown answers and EOS alone.

    `noise_frac` is the share of wrong answers in the last 40% of the steps; before, there are none.
    """
    prompt_ids = {problem.problem_id: encode(tokenizer, problem.messages) for problem in problems}
    clean, noisy = (demonstrations(problems, noise_frac=share, seed=seed) for share in (0.0, noise_frac))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_factor(step - 1, steps)
        batch = list(islice(clean if step <= CLEAN_FRAC * steps else noisy, batch_size))
        token_ids, labels = collate(
            tokenizer, [prompt_ids[d.problem.problem_id] for d in batch], [d.answer for d in batch]
        )
        logits = model(input_ids=token_ids, use_cache=False).logits  # [B, L, V]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        if progress is not None:
            progress(step, steps, loss.item())
    model.eval()


def lr_factor(step: int, steps: int) -> float:
    """Share of the peak learning rate at step 0 .. steps - 1."""
    return min((step + 1) / max(1, round(steps * WARMUP_FRAC)), 0.5 * (1 + math.cos(math.pi * step / steps)))


def collate(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], answers: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Token ids and labels [B, L], padded on the right, where causal attention needs no mask; only answer and EOS have
    labels.

    For the prompt `1+2=` and the answer `3`, in characters:
        token_ids  <bos> 1 + 2 = 3 <eos> <pad>
        labels       .   . . . . 3 <eos>   .
    """
    token: Any = tokenizer
    completions = [[*ids, token.eos_token_id] for ids in token(list(answers), add_special_tokens=False)["input_ids"]]
    rows = list(zip(prompts, completions, strict=True))
    length = max(len(prompt) + len(completion) for prompt, completion in rows)
    token_ids = torch.full((len(rows), length), token.pad_token_id)  # [B, L]
    labels = torch.full((len(rows), length), IGNORED)  # [B, L]
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        token_ids[row, :end] = torch.tensor([*prompt, *completion])
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return token_ids, labels

"""A model of a few hundred thousand weights, built and warm-started on this machine: no download, no GPU. The default
one's weights come with the package; `benchmarks/tiny_weights.py` makes them.

The warm start is supervised: first on right answers, then on demonstrations of which a fixed share is wrong. Once the
model knows the answers, half wrong ones make it sample the right one only half of the time, while that stays its most
probable answer: the knowledge is there, the habit is not, which is what RL is good at. Noise from the first step on
would leave less time to learn the arithmetic itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from offline_grpo import progress
from offline_grpo.disk import build_once
from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Task
from offline_grpo.model.pictures import opened
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.types import Problem, Split

SCRATCH = ".tiny-"
SHIPPED = Path(__file__).with_name("warm_started")
"""Has the weights of models by the names of their folders, NAME.safetensors."""
ENDLESS, FROM_ENDLESS = 1_000_000, 1000
"""From a task with more problems than that, which makes them as they are asked for, so many are learnt from."""
FORMAT_VERSION = 2
"""Raise it when the same settings would give another model: folders built before are then no longer found."""

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0
WARMUP_FRAC = 0.05
CLEAN_FRAC = 0.6  # share of the steps before wrong answers appear
IGNORED = -100  # the label that cross_entropy leaves out

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))

# Contents and nothing around them: "17+25=" costs a BOS and six characters. A system message gets a line of its own.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'system' %}{{ '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class TinyModel:
    """A Llama of this shape in fp32 with tied embeddings and a tokenizer of characters, and how it is warm-started."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    initializer_range: float
    warm_start_steps: int
    warm_start_batch_size: int
    warm_start_lr: float
    noise_frac: float
    seed: int

    name: ClassVar[str] = "tiny"
    sees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("warm_start_steps", "noise_frac", "seed"):
                require(value > 0, f"model.tiny.{name}", value, "must be above 0")
        fix = f"must be a multiple of 2 * num_heads = {2 * self.num_heads}: rotary embeddings turn pairs of dimensions"
        require(self.hidden_size % (2 * self.num_heads) == 0, "model.tiny.hidden_size", self.hidden_size, fix)
        fix = f"must divide num_heads = {self.num_heads}"
        divides = self.num_heads % self.num_key_value_heads == 0
        require(divides, "model.tiny.num_key_value_heads", self.num_key_value_heads, fix)
        require(self.warm_start_steps >= 0, "model.tiny.warm_start_steps", self.warm_start_steps, "must be at least 0")
        fix = "a share of the demonstrations, from 0 to 1"
        require(0 <= self.noise_frac <= 1, "model.tiny.noise_frac", self.noise_frac, fix)

    def prepare(self, task: Task, cache_dir: Path) -> Path:
        """Build the model, warm-start it on the task's training problems and save it, unless it is in `cache_dir`.

        The folder's name is a hash of everything that decides the result. It appears complete or not at all, also when
        several processes build it at the same time. Raises ConfigError if the task's answers are no integers, or its
        prompts are longer than the model's context.
        """
        problems = task.problems(Split.TRAIN)
        problems = problems[:FROM_ENDLESS] if len(problems) > ENDLESS else problems
        if any(re.fullmatch(r"-?[0-9]+", problem.answer) is None for problem in problems):
            raise ConfigError(
                "model=tiny: learns integer answers; use task=arithmetic, model=smollm2_135m (--extra smollm2), or "
                "model=hf model.train_id=..."
            )
        if not self.sees and any(problem.pictures for problem in problems):
            raise ConfigError("model=tiny: sees no pictures; use model=tiny_vl")
        if len({len(problem.pictures) for problem in problems}) > 1:
            raise ConfigError("model=tiny_vl: learns from problems with equally many pictures; use task=picture_sums")
        examples = [
            [[dict(message) for message in problem.messages], problem.answer, *(each.key for each in problem.pictures)]
            for problem in problems
        ]
        content = json.dumps([FORMAT_VERSION, asdict(self), examples], sort_keys=True)
        folder = cache_dir / f"{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        shipped = SHIPPED / f"{folder.name}.safetensors"
        steps = f"model.tiny.warm_start_steps={self.warm_start_steps}"
        start = "its weights are here" if shipped.exists() else steps
        step = "warm start", f"building the tiny model (once): {start}"
        return build_once(folder, SCRATCH, partial(self._build, problems, shipped), step)

    def _build(self, problems: Sequence[Problem], shipped: Path, folder: Path) -> None:
        # The tokenizer, and whether its context has room for prompt, answer, the digit that a wrong answer may have
        # more, and EOS.
        context = self.max_position_embeddings
        tokenizer = self.tokenizer()
        codec, reader = TokenizerCodec(tokenizer), self._reader(tokenizer)
        prompts = {each.problem_id: read(reader, codec.rendered(each.messages), each) for each in problems}
        lengths = {p.problem_id: len(prompts[p.problem_id][0]) + len(lead(p) + p.answer) + 2 for p in problems}
        name = max(lengths, key=lengths.__getitem__)
        fix = f"problem {name} has {lengths[name]} tokens with its answer; use {lengths[name]} or more, or leave it out"
        require(lengths[name] <= context, "model.tiny.max_position_embeddings", context, fix)

        # Random weights, from the seed; the caller's random state stays as it was. Not by torch.manual_seed: that would
        # reseed the caller's GPUs, which are not forked here.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            model = self._model(tokenizer)
        model.generation_config = GenerationConfig(**special_ids(tokenizer))

        # The warm start, or what comes of it. It is rounded to 16 bits, in which it is shipped.
        parameters = dict(model.named_parameters())
        if shipped.exists():
            weights = load_file(shipped)
        else:
            self._warm_start(model, tokenizer, problems, prompts)
            weights = {name: parameter.half() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        model.eval()
        model.save_pretrained(folder)
        reader.save_pretrained(folder)

    def _warm_start(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Problem],
        prompts: Mapping[str, tuple[list[int], dict[str, Tensor]]],
    ) -> None:
        """Linear warm-up, then a cosine; right answers first, then demonstrations with wrong ones."""
        steps, lr = self.warm_start_steps, self.warm_start_lr
        clean = demonstrations(problems, noise_frac=0.0, seed=self.seed)
        noisy = demonstrations(problems, noise_frac=self.noise_frac, seed=self.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        model.train()
        for step in range(steps):
            warm_up, cosine = (step + 1) / max(1, round(steps * WARMUP_FRAC)), 1 + math.cos(math.pi * step / steps)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(warm_up, 0.5 * cosine)
            drawn = islice(clean if step + 1 <= CLEAN_FRAC * steps else noisy, self.warm_start_batch_size)
            pairs = [(prompts[problem.problem_id], lead(problem) + answer) for problem, answer in drawn]
            token_ids, labels = collate(tokenizer, [ids for (ids, _), _ in pairs], [answer for _, answer in pairs])
            seen = {key: torch.cat([own[key] for (_, own), _ in pairs]) for key in pairs[0][0][1]}
            logits = model(input_ids=token_ids, use_cache=False, **seen).logits  # [B, L, V]
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            progress.report(step + 1, steps, "steps")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_char_tokenizer(self.max_position_embeddings)

    def _reader(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """What makes a model's inputs of prompts."""
        return tokenizer

    def _model(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        return LlamaForCausalLM(self._text_config(tokenizer))

    def _text_config(self, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
        return LlamaConfig(  # for a Qwen2, AutoTokenizer would ignore the tokenizer saved beside the model
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            initializer_range=self.initializer_range,
            tie_word_embeddings=True,
            dtype="float32",
            **special_ids(tokenizer),
        )


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def lead(problem: Problem) -> str:
    """What a demonstration writes before the answer: what the pictures show, where a task says it, such as `17+25=`."""
    return problem.fields.get("shown", "")


def read(reader: Any, text: str, problem: Problem) -> tuple[list[int], dict[str, Tensor]]:
    """The token ids of a problem's prompt, and the tensors of its pictures."""
    pictures = {"images": [[opened(picture) for picture in problem.pictures]]} if problem.pictures else {}
    inputs = reader(text=[text], add_special_tokens=False, return_tensors="pt", **pictures)
    return inputs["input_ids"][0].tolist(), {key: inputs[key] for key in inputs if key.startswith("pixel")}


def demonstrations(problems: Sequence[Problem], *, noise_frac: float, seed: int) -> Iterator[tuple[Problem, str]]:
    """Endless random draws from `problems`, each with an answer, which is wrong with probability `noise_frac`: off by
    one, of the wrong sign, or with its last digit lost or doubled.
    """
    rng = random.Random(seed)
    while True:
        problem = rng.choice(problems)
        answer = problem.answer
        if rng.random() < noise_frac:
            mistakes = [str(int(answer) + rng.choice((-1, 1))), str(-int(answer)), answer[:-1], answer + answer[-1]]
            answer = rng.choice([mistake for mistake in mistakes if mistake not in ("", "-", "00", answer)])
        yield problem, answer


def collate(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], answers: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Token ids and labels [B, L], padded on the right. For the prompt `1+2=` and the answer `3`, in characters:
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


def build_char_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline, else `<unk>`. BOS comes from the chat template alone."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )

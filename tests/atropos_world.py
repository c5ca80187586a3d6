"""What the end-to-end tests of Atropos need beside a run: environments of atroposlib itself, a model that they can
score, and witnesses.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offline_grpo.interfaces import RunListener
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import collate
from offline_grpo.types import RolloutGroup

NUMBERS = (1, 2, 3)
ANSWER = "After some thought I am quite sure that it is \\boxed{{{0}}}"
QUESTION = "What is {0} + 0?"
FILLER = [f"w{i}" for i in range(60)]
CONTEXT = 512


class Groups(RunListener):
    """Remembers the groups that a run in this process trained on, and asks it to stop once `is_enough` of them."""

    seen: ClassVar[list[RolloutGroup]] = []
    is_enough: ClassVar[Callable[[list[RolloutGroup]], bool]]
    override = "+logger.groups._target_=atropos_world.Groups"

    def rollouts(self, name: str, groups: Any, *, advantages: Any, iteration: int) -> None:
        if name == "train":
            self.seen.extend(groups)
            if type(self).is_enough(self.seen):
                signal.raise_signal(signal.SIGTERM)


def guessing_model(folder: Path) -> Path:
    """A model of words that answers any question with one of three numbers, as atroposlib's environments want to read
    it.
    """
    words = sorted({word for number in NUMBERS for word in f"{ANSWER} {QUESTION}".format(number).split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *words, *FILLER])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")},
        model_max_length=CONTEXT,
        chat_template="{{ bos_token }} {% for m in messages %}{{ m['content'] }} {% endfor %}",
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM on a CPU wants heads of 32
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
    for _ in range(60):
        contents = [
            " ".join([*rng.choices(FILLER, k=rng.randint(0, 130)), QUESTION.format(rng.choice(NUMBERS))])
            for _ in range(8)
        ]
        prompts = [TokenizerCodec(fast).encode([{"role": "user", "content": content}]) for content in contents]
        token_ids, labels = collate(fast, prompts, [ANSWER.format(rng.choice(NUMBERS)) for _ in prompts])
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(str(folder))
    fast.save_pretrained(str(folder))
    return folder


def upstream(folder: Path, *names: str) -> list[Path]:
    """Files of atroposlib's source distribution, from the package index that this machine is set up for: the wheel has
    no environments.
    """
    command = (
        "uv run --no-project --with pip python -m pip download --quiet --no-deps --no-binary :all: "
        "atroposlib==0.4.0 --dest"
    )
    done = subprocess.run([*command.split(), str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(
            f"this test needs the source distribution of atroposlib 0.4.0 from a package index, and got: "
            f"{done.stderr[-1000:]}"
        )
    [archive] = folder.glob("atroposlib-0.4.0.tar.gz")
    with tarfile.open(archive) as tar:
        for name in names:
            tar.extract(f"atroposlib-0.4.0/{name}", folder, filter="data")
    archive.unlink()
    return [folder / "atroposlib-0.4.0" / name for name in names]


def data_sets(folder: Path) -> Path:
    """In `folder`, what `load_dataset("gsm8k", "main")` finds there, as from the Hub."""
    main = folder / "gsm8k" / "main"
    main.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"question": QUESTION.format(n), "answer": f"So it is.\n#### {n}"} for n in NUMBERS * 4]
        (main / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (folder / "gsm8k" / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return folder

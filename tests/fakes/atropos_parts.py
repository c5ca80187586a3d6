"""For tests of Atropos: the real API in a child process, groups to post to it, environments of atroposlib itself, a
model that they can score, and witnesses.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import torch
from factories import make_llama
from runs import child_process, wait_until
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from offline_grpo.engine.http import choose_port
from offline_grpo.interfaces import RunListener
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import collate
from offline_grpo.rollouts.atropos import Atropos
from offline_grpo.types import RolloutGroup, SamplingParams

TIMEOUT_S = 30.0


def serve(port: int) -> None:
    """What `run-api` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import uvicorn
    from atroposlib.api import app

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


class RunApi:
    """`run-api` on a port of its own; it can be killed and started again there. A context manager."""

    def __init__(self) -> None:
        self.port = choose_port("127.0.0.1", None, key="-")
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False)
        self.start()

    def start(self) -> None:
        self._process = child_process(serve, self.port, daemon=True)
        self._process.start()
        wait_until(self._answers, TIMEOUT_S, lambda: "run-api did not come up")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _answers(self) -> bool:
        try:
            return self.get("/") is not None
        except httpx.TransportError:
            return False

    def get(self, path: str, body: Any = None) -> Any:
        answer = self._http.request("GET", path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.headers["content-type"].startswith("application/json") else answer.text

    def post(self, path: str, body: Any) -> Any:
        answer = self._http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def send(self, *groups: dict[str, Any]) -> None:
        """Groups of an environment that did not register."""
        for group in groups:
            self.post("/scored_data", group)

    def send_bytes(self, body: bytes) -> None:
        """A group as an environment's own JSON, NaN included."""
        self._http.post("/scored_data", content=body, headers={"Content-Type": "application/json"}).raise_for_status()

    def register_environment(self, group_size: int) -> int:
        body = {"max_token_length": 64, "desired_name": "test", "weight": 1.0, "group_size": group_size}
        return self.post("/register-env", body)["env_id"]

    def __enter__(self) -> RunApi:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._http.close()


def group(
    *sequences: tuple[list[int], list[int]], scores: list[float] | None = None, logprob: float = -0.5, **fields: Any
) -> dict[str, Any]:
    """A group's JSON: a prompt and a completion for each sequence."""
    return {
        "tokens": [prompt + completion for prompt, completion in sequences],
        "masks": [[-100] * len(prompt) + completion for prompt, completion in sequences],
        "scores": scores or [float(index) for index in range(len(sequences))],
        "inference_logprobs": [[1.0] * len(prompt) + [logprob] * len(completion) for prompt, completion in sequences],
        **fields,
    }


def pair(number: int = 0, **fields: Any) -> dict[str, Any]:
    """A group of two sequences, which `number` tells from others."""
    return group(([5, 6], [7, 2]), ([5, 6], [8, number % 20, 2]), **fields)


def make_source(url: str, **settings: Any) -> Atropos:
    """Of batches of two pairs."""
    defaults: dict[str, Any] = {
        "url": url,
        "problems_per_iteration": 2,
        "group_size": 2,
        "max_token_len": 32,
        "correct_threshold": None,
        "num_steps": 10,
        "save_checkpoint_interval": 3,
        "wandb_project": "project",
        "poll_s": 0.1,
        "connect_timeout_s": 5,
        "restart_timeout_s": 60,
        "take_over": False,
        "start_api": False,
        "environment": None,
        "client": SimpleNamespace(is_local=True),
        "codec": SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))),
        "vocab_size": 30,
        "context": None,
        "model_id": "model",
        "sampling": SamplingParams(8),
        "run_folder": Path("/runs/first"),
        "rank": 0,
    }
    return Atropos(**{**defaults, **settings})


def as_json(groups: RolloutGroup) -> dict[str, Any]:
    """What an environment would send of a group."""
    rollouts = groups.rollouts
    return {
        "tokens": [list(r.token_ids) for r in rollouts],
        "masks": [[t if s else -100 for t, s in zip(r.token_ids, r.is_sampled, strict=True)] for r in rollouts],
        "scores": [r.score.reward for r in rollouts],
        "inference_logprobs": [
            [lp if s else 1.0 for lp, s in zip(r.logprobs, r.is_sampled, strict=True)] for r in rollouts
        ],
        "generation_params": {"temperature": rollouts[0].temperature},
    }


NUMBERS = (1, 2, 3)
ANSWER = "After some thought I am quite sure that it is \\boxed{{{0}}}"
QUESTION = "What is {0} + 0?"
FILLER = [f"w{i}" for i in range(60)]
CONTEXT = 512


class Groups(RunListener):
    """Remembers the groups that a run in this process trained on, and asks it to stop once `is_enough` of them."""

    seen: ClassVar[list[RolloutGroup]] = []
    is_enough: ClassVar[Callable[[list[RolloutGroup]], bool]]
    override = "+logger.groups._target_=atropos_parts.Groups"

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
    shape = {"vocab_size": len(vocabulary), "hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_attention_heads": 2, "max_position_embeddings": CONTEXT}  # vLLM on a CPU wants heads of 32
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = make_llama(seed=0, **shape, **special, tie_word_embeddings=True, initializer_range=0.02)
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

import json
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import rich
from factories import make_completion, make_group
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from offline_grpo.logger.samples import FirstLook, Samples, chosen, print_sample, record
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import Completion, FinishReason, Problem, Rollout, RolloutGroup, SamplingParams, Score, Turn

STRANGE = "\ud800 \x1b[2J [bold]\u202e\r\n\tö 中文 :smile:" + "x" * 1000
GROUPS = [
    make_group(("a", 0.5), ("b", 0.5)),
    make_group(("c", 0.0), ("d", 1.0), ("e", 0.2)),
    make_group((STRANGE, 1.0), ("g", 0.0)),
]
ADVANTAGES = [[0.0, 0.0], [-1.0, 2.0, -0.5], [1.0, -1.0]]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, ["d"]),  # the best of the first problem whose rewards differ
        (3, ["d", "c", STRANGE]),
        (None, ["a", "b", "c", "d", "e", STRANGE, "g"]),
    ],
)
def test_the_best_and_the_worst_of_the_first_problems(count, expected):
    picked = chosen(GROUPS, ADVANTAGES, count)
    assert [sample["completion"] for sample in picked] == expected
    assert picked[0]["advantage"] == (0.0 if count is None else 2.0)


def test_files_are_read_back(tmp_path):
    samples = Samples(output_dir=tmp_path, per_iteration="all", on_console=0)
    samples.rollouts("train", GROUPS, advantages=ADVANTAGES, iteration=7)
    samples.rollouts("eval", GROUPS[:1], advantages=None, iteration=-1)
    samples.rollouts("eval", GROUPS[:1], advantages=None, iteration=7)
    names = {path.name for path in (tmp_path / "samples").iterdir()}
    assert names == {"iter_007.jsonl", "eval_init.jsonl", "eval_iter_007.jsonl"}
    content = (tmp_path / "samples" / "iter_007.jsonl").read_bytes()
    lines = [json.loads(line) for line in content.decode("utf-8").split("\n")[:-1]]
    assert [line["completion"] for line in lines] == ["a", "b", "c", "d", "e", STRANGE, "g"]
    assert "中文" in content.decode("utf-8")  # a person can read it
    assert lines[3] == (
        {"problem_id": "p", "prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "completion": "d"}
        | {"rendered": [["user", "2+2="], ["policy", "d"]], "failure": None, "version": 0}
        | {"reward": 1.0, "parts": {"correct": 1.0}, "advantage": 2.0, "is_correct": True, "finish_reason": "stop"}
        | {"num_tokens": 1, "iteration": 7, "images": [], "measured": {}}
    )
    samples.rollouts("train", GROUPS, advantages=ADVANTAGES, iteration=7)
    assert (tmp_path / "samples" / "iter_007.jsonl").read_bytes() == content


def episode() -> Rollout:
    """Of two turns, after a prompt in which an assistant speaks too."""
    is_sampled = (False, False, True, False, False, True, True)
    said = [{"role": role, "content": "..."} for role in ("system", "assistant", "user", "assistant", "tool", "user")]
    return Rollout(
        token_ids=tuple(range(7)),
        is_sampled=is_sampled,
        logprobs=(0.0,) * 7,
        versions=(0, 0, 4, 0, 0, 4, 5),
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        text="judged",
        score=Score(0.1 + 0.1 + 0.03, False, {"paid": 0.1 + 0.2}),
        turns=(Turn(2, 3), Turn(5, 7)),
        conversation=(*said, {"role": "assistant", "content": "..."}),
    )


def test_what_the_model_saw_is_what_its_tokens_say(tmp_path):
    """Also by a decoder that drops a blank at the start of a text."""
    words = ("Be", "brief", "I", "call", "it", "say", "<end>")
    tokenizer = Tokenizer(models.WordLevel({f"\u2581{word}": number for number, word in enumerate(words)}))
    tokenizer.decoder = decoders.Metaspace()
    samples = Samples(output_dir=tmp_path, per_iteration=1, on_console=0)
    samples.loaded(partial(tokenizer.decode, skip_special_tokens=False))
    samples.rollouts("train", [RolloutGroup(None, (episode(),))], advantages=[[None]], iteration=0)
    line = json.loads((tmp_path / "samples" / "iter_000.jsonl").read_text())
    expected = [["prompt", "Be brief"], ["policy", " I"], ["tool, user", " call it"], ["policy", " say <end>"]]
    assert line["rendered"] == expected
    assert (line["reward"], line["parts"], line["num_tokens"], line["version"]) == (0.23, {"paid": 0.3}, 3, 4)
    without = record(RolloutGroup(None, (episode(),)), episode(), None)["rendered"]
    assert without == [("system", "..."), ("assistant", "..."), ("user", "..."), ("policy", "judged")]


def test_what_a_task_measured_is_said_unless_it_is_0():
    console = Console(file=StringIO(), width=80)
    rollout = replace(episode(), score=Score(0.0, False, {}, measured={"timed_out": 1.0, "calls": 0.0}))
    print_sample(console, record(RolloutGroup(None, (rollout,)), rollout, None))
    assert "reward 0  timed_out 1  3 tokens" in console.file.getvalue()  # type: ignore[attr-defined]


def test_no_text_garbles_the_console(tmp_path, monkeypatch):
    output = StringIO()
    monkeypatch.setattr(rich, "get_console", lambda: Console(file=output, width=80, force_terminal=False))
    samples = Samples(output_dir=tmp_path, per_iteration=0, on_console=1)
    samples.rollouts("eval", GROUPS[2:], advantages=None, iteration=-1)
    lines = output.getvalue().splitlines()
    assert lines[0] == "sample 1/1 before training"
    assert [line.split() for line in lines[1:3]] == [["user", "2+2="], ["answer", "4"]]
    assert lines[3].split() == ["correct", *["reward", "1", "1", "tokens", "stop", "version", "0"]]
    assert lines[4].rstrip() == r"  policy     \ud800 \x1b[2J [bold]\u202e\r\n\tö 中文"
    assert lines[5].strip().startswith(":smile:xxx")
    assert max(map(len, lines)) <= 80
    output.getvalue().encode()
    unscored = Rollout.of_one_turn(
        (1,), make_completion((3,)), temperature=1.0, text="", score=Score.unscored("raised")
    )
    samples.rollouts("eval", [RolloutGroup(None, (unscored,))], advantages=None, iteration=1)
    assert "no reward  1 tokens  stop  version 0  not scored: raised" in output.getvalue()


PROBLEM = Problem("p", ({"role": "user", "content": "1+2="},), "3")


@pytest.mark.parametrize("skips", [True, False])
def test_prompt_completion_and_hidden_tokens_are_told_once(skips: bool, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer: Any = build_char_tokenizer(64)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    codec = TokenizerCodec(tokenizer, [tokenizer.eos_token_id])
    look = FirstLook(tokenizer, codec.end_ids)

    def group(text: str) -> RolloutGroup:
        ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        completion = Completion(ids, (-1.0,) * len(ids), FinishReason.STOP, (0,) * len(ids))
        judged = codec.judged(ids, SamplingParams(8, skip_special_tokens=skips))
        score = Score(1.0, True, {})
        prompt = codec.encode(PROBLEM.messages)
        return RolloutGroup(
            PROBLEM, (Rollout.of_one_turn(prompt, completion, temperature=1, text=judged, score=score),)
        )

    with caplog.at_level("INFO"):
        for iteration, text in enumerate(("3", "<think>4", "<think>5")):
            look.rollouts("train", [group(text)], advantages=None, iteration=iteration)
    shown = [record.getMessage() for record in caplog.records]
    assert shown[:2] == [
        "the first prompt, as the model reads it (5 tokens):\n  <bos>1+2=",
        "and its first completion, as the model wrote it (2 tokens, reward 1):\n  3<eos>",
    ]
    hidden = "special tokens hidden from rewards (generation.skip_special_tokens): '<think>'"
    assert shown[2:] == ([hidden] if skips else [])

"""One suite for each Protocol, run over every YAML file of its group."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Where, deploy, place_of
from factories import CONF, compose_config, generate, make_batch, make_policy, make_qwen2
from fake_sglang import FakeSglang
from omegaconf import OmegaConf
from scripted_server import ScriptedServer
from torch import Tensor, nn
from transformers import PreTrainedModel

from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.problems import build_task
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Loss, RolloutClient, RunListener, Task
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import (
    BatchTotals,
    Completion,
    FinishReason,
    SamplingParams,
    ServedWeights,
    Split,
    SyncReport,
    TokenBatch,
    TokenStats,
    num_pictures,
    text_of,
)
from offline_grpo.weight_sync.strategy import WeightSync


def options(group: str) -> list[str]:
    """The options of a configuration group: its YAML files."""
    found = sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))
    assert found, f"conf/{group} has no options"
    return found


def make(
    group: str,
    option: str,
    *overrides: str,
    protocol: type | None = None,
    leave_out: Sequence[str] = (),
    **runtime: Any,
) -> Any:
    """The component of an option, built as the application does."""
    key = group.replace("/", ".")
    choice = f"logger=[{option}]" if group == "logger" else f"{group}={option}"
    place = f"logger.{option}" if group == "logger" else key
    node = as_plain(OmegaConf.select(compose_config(choice, *overrides), place))
    return build(
        {name: value for name, value in node.items() if name not in leave_out}, key=place, protocol=protocol, **runtime
    )


# Task

# fmt: off
NASTY_TEXTS = [
    "", " ", "\n", "\0", "-", ".", "0", "-0", "1e999", "nan", "1/0", "9" * 5000, "\u0664\u0662", "\ud800",
    "\U0001f600" * 50, "\\boxed{", "\\boxed{}", "\\boxed{" * 200, "}" * 200, "\\boxed{\\frac{1}{0}}",
    "\\boxed{x^{2^{2^{2}}}}", "$" * 99, "<SOLUTION>", "<SOLUTION></SOLUTION>", "</SOLUTION><SOLUTION>", "None",
    "{a}{op}{b}", "%s%n", "The answer is 1,0,0,0.", "#### 7", "1" + ",000" * 500, "(" * 500, "<|endoftext|>",
]
# fmt: on

KINDS = ["language:response_language", "detectable_format:json_format", "length_constraints:number_sentences"]
ARGUMENTS: list[dict[str, Any]] = [{"language": "en"}, {}, {"relation": "at least", "num_sentences": 2}]
INSTRUCTIONS = {"instruction_id_list": KINDS, "kwargs": ARGUMENTS}


SCORE_NO_TEXTS = {"agent", "calculator", "environment", "higher_lower", "openenv", "verifiers"}
WITH_OTHER_ROWS = {"dataset", "ifeval_sample", "math_sample"}
"""What another option is, apart from the rows, which are made here."""


@pytest.fixture(params=[name for name in options("task") if name not in SCORE_NO_TEXTS | WITH_OTHER_ROWS])
def task_twins(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Task, Task]:
    """A task, built twice."""
    overrides = []
    if request.param in ("gsm8k", "ifeval", "math"):
        for split, first in (("train", 0), ("test", 500)):
            texts = ((f"What is {i} and 1?", f"{i} and 1 is {i + 1}.\n#### {i + 1}") for i in range(first, first + 250))
            rows = [{"prompt": ask, "question": ask, "answer": told, **INSTRUCTIONS} for ask, told in texts]
            (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        overrides = [f"task.path={tmp_path}"]
        overrides += [] if request.param == "ifeval" else ["task.prompt_field=question", "task.answer_field=answer"]
    if request.param == "code":
        overrides = ["task.difficulty=3"]
    if request.param == "mixture":
        overrides = ["+task@task.tasks.sums=arithmetic", "+task@task.tasks.logic=sat"]
    first, second = (build_task(typed(compose_config(f"task={request.param}", *overrides)).task) for _ in range(2))
    assert isinstance(first, Task)
    return first, second


def test_a_task(task_twins: tuple[Task, Task]) -> None:
    """Its problems are there and stable, its splits share no prompt, and it scores whatever the model wrote."""
    prompts = []
    for split in Split:
        problems, again = ([task.problems(split)[i] for i in range(200)] for task in task_twins)
        assert problems == again
        assert len({problem.problem_id for problem in problems}) == 200
        for problem in problems:
            assert problem.messages[-1]["role"] == "user"
            kinds = {type(value) for message in problem.messages for value in message.values()}
            assert kinds == ({str, list} if problem.pictures else {str})
            assert all(text_of(message).strip() for message in problem.messages)
            assert sum(map(num_pictures, problem.messages)) == len(problem.pictures)
            assert problem.answer
        prompts.append({str((problem.messages, problem.pictures)) for problem in problems})
    assert min(map(len, prompts)) > 100
    assert prompts[0].isdisjoint(prompts[1])

    first, second = task_twins
    problem = first.problems(Split.TRAIN)[0]
    texts = [*NASTY_TEXTS, problem.answer, text_of(problem.messages[-1])]
    scores = [first.score(problem, text) for text in texts]
    for text, score in zip(texts, scores, strict=True):
        assert math.isfinite(score.reward), text
        assert score.reward == pytest.approx(sum(score.parts.values())), text
        assert isinstance(score.is_correct, bool), text
    in_another_order = [second.score(problem, text) for text in reversed(texts)]
    assert in_another_order == scores[::-1], "of problem and text alone"
    assert len({tuple(score.parts) for score in scores}) == 1
    assert problem == first.problems(Split.TRAIN)[0]


# Loss


def random_batch() -> tuple[TokenStats, TokenBatch, BatchTotals]:
    """Six sequences of ten tokens, float64."""
    draw = torch.Generator().manual_seed(3)

    def logprobs() -> Tensor:
        return -torch.rand(60, generator=draw, dtype=torch.float64) * mask

    mask = torch.arange(60) % 10 > 1 + torch.arange(60) // 10
    batch = make_batch(
        (10,) * 6,
        mask,
        torch.randn(6, generator=draw, dtype=torch.float64),
        logprobs(),
        token_ids=torch.randint(0, 9, (60,), generator=draw),
        rollout_logprobs=logprobs(),
        ref_logprobs=logprobs(),
    )
    stats = TokenStats(
        logprobs().requires_grad_(), (torch.rand(60, generator=draw, dtype=torch.float64) * mask).requires_grad_()
    )
    return stats, batch, BatchTotals(int(mask.sum()), 6, 16)


def part_of(stats: TokenStats, batch: TokenBatch, sequences: list[int]) -> tuple[TokenStats, TokenBatch]:
    tokens = torch.cat([torch.arange(10 * s, 10 * s + 10) for s in sequences])
    return TokenStats(stats.logprobs[tokens], stats.entropy[tokens]), batch.select(sequences)


@pytest.mark.parametrize("loss_option", options("train/loss"))
def test_loss_shares_add_up_and_what_has_no_weight_pulls_nowhere(loss_option: str) -> None:
    loss = make("train/loss", loss_option, "train.kl_coef=0.2", "train.entropy_coef=0.1", protocol=Loss)
    stats, batch, totals = random_batch()
    whole = loss(stats, batch, totals)
    [expected] = torch.autograd.grad(whole.loss, stats.logprobs)
    assert expected.abs().sum() > 0
    parts = [loss(*part_of(stats, batch, sequences), totals) for sequences in ([4, 1], [0], [5, 3, 2])]
    total = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(torch.autograd.grad(total, stats.logprobs)[0], expected)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), value, msg=name)
        assert value.shape == ()
        assert not value.requires_grad

    # without KL it needs no reference, and without advantages either no token has a gradient
    loss = make("train/loss", loss_option, "train.kl_coef=0", protocol=Loss)
    assert (loss.kl_coef, loss.entropy_coef) == (0, 0)
    without = loss(stats, replace(batch, ref_logprobs=None), totals)
    assert torch.equal(without.loss, loss(stats, batch, totals).loss)
    assert without.loss != 0
    silent = loss(stats, replace(batch, ref_logprobs=None, advantages=torch.zeros(60, dtype=torch.float64)), totals)
    assert silent.loss == silent.metrics["loss_pg"] == 0
    [gradient] = torch.autograd.grad(silent.loss, stats.logprobs)
    assert torch.all(gradient == 0)


# Optimizer


@pytest.mark.parametrize("option", options("train/optimizer"))
def test_optimizer_goes_down_a_quadratic(option: str) -> None:
    target = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(3))
    if option == "adamw_8bit":  # runs on a GPU alone, and says what runs here
        with pytest.raises(ConfigError, match=r"use train/optimizer=adamw$"):
            make("train/optimizer", option).create(iter([matrix, vector]))
        return
    optimizer = make("train/optimizer", option, "train.lr=0.05").create(iter([matrix, vector]))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (matrix - target).square().sum() + vector.square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert all(group["lr"] == 0.05 for group in optimizer.param_groups)  # what the schedule scales


# Logger


@pytest.mark.parametrize("option", options("logger"))
def test_logger_takes_a_run(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B without its own process, which takes seconds to start: test_cli.py has it in a whole run."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = make("logger", option, protocol=RunListener, output_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing is written for a run that is refused
    logger.start({"train": {"lr": 0.1, "ids": [1], "none": None}}, 2)
    logger.log(
        "train", {"reward_mean": 0.5, "time/generate_s": 1.0, "perf/tokens_per_s": 9.0}, iteration=0
    )  # before any evaluation
    logger.log("eval", {"pass@1": 0.5, "pass@1_low": 0.25, "pass@1_high": 0.75}, iteration=0)
    logger.log("train", {"reward_mean": 0.5}, iteration=0)  # again: a resumed run repeats an iteration
    logger.close()
    logger.close()


# RolloutClient

SAMPLING = (*SamplingParams.__dataclass_fields__, "allow_truncated_sampling", "batch_invariant")
CLIENT_ONLY = (*SAMPLING, "base_url", "api_key")
PROMPTS = [[1, 21, 15, 22], [1, 30], [1, 21, 15, 22], [1, 9, 9, 9, 9, 9]]
SEEDS = [5, 6, 7, 2**62]


@pytest.fixture
def model() -> PreTrainedModel:
    return make_qwen2(vocab_size=100, eos_token_id=2)


@pytest.fixture(params=options("generation"))
def client(
    request: pytest.FixtureRequest, where: Where, model: PreTrainedModel, tmp_path: Path
) -> Iterator[RolloutClient]:
    """vLLM is real, and on `where`'s device; SGLang is a stand-in with a model of 12 tokens."""
    runtime: dict[str, Any] = {"model": model, "tokenizer": build_char_tokenizer(64), "eos_ids": [2], "vocab_size": 100}
    with ExitStack() as stack:
        if request.param == "vllm_server":
            runtime |= place_of(request.getfixturevalue("full_server"))
        elif request.param == "sglang_server":
            web = stack.enter_context(ScriptedServer(FakeSglang()))
            runtime |= {"base_url": web.base_url, "api_key": None, "log_dir": tmp_path}
        client = make("generation", request.param, protocol=RolloutClient, leave_out=CLIENT_ONLY, **runtime)
        if "base_url" in runtime:
            stack.callback(client.close)
        yield client


def test_client_returns_exactly_what_was_asked_for(client: RolloutClient) -> None:
    client.weights = ServedWeights(3)
    groups = generate(client, PROMPTS, SamplingParams(max_new_tokens=6), group_size=3, seeds=SEEDS)
    assert [len(group) for group in groups] == [3] * 4
    for completion in (completion for group in groups for completion in group):
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 6
        assert all(type(token) is int and 0 <= token < 100 for token in completion.token_ids)
        assert all(type(value) is float and -math.inf < value <= 0 for value in completion.logprobs)
        ended = completion.token_ids[-1] == 2
        assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(completion.token_ids) == 6
        assert 2 not in completion.token_ids[:-1]
        assert completion.versions[0] == 3
    assert len({completion.token_ids for group in groups for completion in group}) > 6


def test_client_draws_from_seeds_alone(client: RolloutClient, where: Where) -> None:
    sampling = SamplingParams(max_new_tokens=6)

    def draw(order: Sequence[int]) -> list[list[Completion]]:
        """Of these prompts in this order, put back into that of `PROMPTS`."""
        groups = generate(client, [PROMPTS[i] for i in order], sampling, group_size=3, seeds=[SEEDS[i] for i in order])
        return [group for _, group in sorted(zip(order, groups, strict=True), key=lambda pair: pair[0])]

    groups = draw(range(4))
    torch.manual_seed(99)
    assert_equal_draws(draw(range(4)), groups, where)
    assert_equal_draws(draw([2, 3, 1, 0]), groups, where)
    singles = [
        generate(client, [PROMPTS[1]], sampling, group_size=1, seeds=[SEEDS[1] + j]) for j in range(3)
    ]  # completion j has seed + j
    assert_equal_draws([[completion for [[completion]] in singles]], [groups[1]], where)
    assert groups[0] != groups[2]  # the same prompt, another seed
    assert generate(client, [], sampling, group_size=3, seeds=[]) == []


def assert_equal_draws(first: list[list[Completion]], second: list[list[Completion]], where: Where) -> None:
    """Equal tokens, with equal logprobs as far as rounding depends on what else is in the batch. In 16 bit that can tip
    a draw.
    """
    pairs = [pair for groups in zip(first, second, strict=True) for pair in zip(*groups, strict=True)]
    equal = [(ours, theirs) for ours, theirs in pairs if ours.token_ids == theirs.token_ids]
    assert len(equal) >= (len(pairs) if where.dtype is torch.float32 else 0.75 * len(pairs))
    for ours, theirs in equal:
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=where.tolerance_nats)


# WeightSync


@pytest.fixture
def policy(model: PreTrainedModel) -> Policy:
    return make_policy(model, build_char_tokenizer(64))


def client_in_this_process(policy: Policy) -> RolloutClient:
    """Samples from the policy's own module."""
    return make("generation", "transformers", leave_out=CLIENT_ONLY, model=policy.model, tokenizer=policy.tokenizer)


@pytest.mark.parametrize("option", ["in_process"])  # those that need a server: tests/contract/weight_sync
def test_sync_delivers_weights_and_version(option: str, policy: Policy) -> None:
    client = client_in_this_process(policy)
    sync = deploy(make("weight_sync", option, protocol=WeightSync), client)
    sync.connect(policy)
    greedy = SamplingParams(max_new_tokens=1, temperature=0)
    [[before]] = generate(client, PROMPTS[:1], greedy, group_size=1, seeds=[0])
    with torch.no_grad():
        for parameter in policy.make_masters().parameters.values():
            parameter.mul_(0.5)
    policy.masters.publish()
    for _ in range(2):  # idempotent
        report = sync.push(policy, version=4)
        assert isinstance(report, SyncReport)
        assert report.version == client.weights.version == 4
        assert min(report.num_tensors, report.num_bytes, report.seconds, report.paused_seconds) >= 0
        assert report.paused_seconds <= report.seconds
    [[after]] = generate(client, PROMPTS[:1], greedy, group_size=1, seeds=[0])
    logits = policy.causal_lm(torch.tensor(PROMPTS[:1])).logits[0, -1]
    assert after.logprobs[0] == pytest.approx(logits.log_softmax(-1).max().item(), abs=1e-5)
    assert after.logprobs != before.logprobs
    assert (before.versions[0], after.versions[0]) == (0, 4)

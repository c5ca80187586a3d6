"""The evaluator with a scripted engine: what it asks for, what it makes of the answers, and independence of the number
of processes.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from factories import make_completion

from offline_grpo.eval.evaluator import PassAtKEvaluator, recording
from offline_grpo.model.text import cut_at_stop
from offline_grpo.types import (
    Completion,
    CompletionStream,
    Encoded,
    FinishReason,
    Message,
    Metrics,
    Problem,
    Rollout,
    RolloutGroup,
    SamplingParams,
    SamplingRequest,
    Schema,
    Score,
    ServedWeights,
    Split,
)

EOS = 0
PROBLEMS = [Problem(f"p{i}", ({"role": "user", "content": f"{i}"},), answer=f"{i}") for i in range(5)]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7, stop=("#",))


class EchoTask:
    """Right if the text is the answer; the reward is the text's length."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return PROBLEMS

    def score(self, problem: Problem, text: str) -> Score:
        return Score(reward=float(len(text)), is_correct=text == problem.answer, parts={})


@dataclass
class SeededClient:
    """Answers "<digit>#x" where the digit follows from prompt and seed alone; every third seed runs into the token
    limit.

    The last request is answered first.
    """

    weights: ServedWeights = field(default_factory=ServedWeights)
    calls: list[list[SamplingRequest]] = field(default_factory=list)

    def generate(self, requests: Iterable[SamplingRequest], sampling: SamplingParams) -> CompletionStream:
        assert sampling is SAMPLING
        self.calls.append(list(requests))
        for index, request in reversed(list(enumerate(self.calls[-1]))):
            yield index, [self.complete(request.prompt_ids, request.seed)]

    def complete(self, prompt: Sequence[int], seed: int) -> Completion:
        text = f"{prompt[0] - ord('0') if seed % 2 else 9}#x"
        finish = FinishReason.LENGTH if seed % 3 == 0 else FinishReason.STOP
        token_ids = (*map(ord, text), EOS)
        return Completion(token_ids, (0.0,) * len(token_ids), finish, (0,) * len(token_ids))


class Characters:
    """A codec of one token per character."""

    def encode_with(self, messages: Sequence[Message], pictures: object, tools: Sequence[Schema] = ()) -> Encoded:
        return Encoded([ord(character) for message in messages for character in message["content"]], [])

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != EOS)

    def judged(self, token_ids: Sequence[int], sampling: SamplingParams) -> str:
        return cut_at_stop(self.decode(token_ids), sampling.stop)


def evaluator(**changes: object) -> PassAtKEvaluator:
    settings = {"task": EchoTask(), "problems": PROBLEMS, "codec": Characters(), "sampling": SAMPLING, "ks": [1, 2]}
    settings |= {"replicates": 3, "seed_base": 4242, "rank": 0, "world_size": 1}
    return PassAtKEvaluator(**(settings | changes))  # type: ignore[arg-type]


def evaluate(subject: PassAtKEvaluator, *, cycle: int) -> Metrics:
    return subject.metrics(subject.sample(SeededClient(), cycle=cycle), cycle=cycle)


def seed_of(*parts: object) -> int:
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63


def test_every_problem_is_asked_replicates_times_with_its_own_seeds() -> None:
    client = SeededClient()
    subject = evaluator()
    groups = subject.sample(client, cycle=7)
    [requests] = client.calls
    assert requests == [
        SamplingRequest((ord(str(i)),), 1, seed_of(4242, 7, f"p{i}", rep)) for i in range(5) for rep in range(3)
    ]
    assert [group.problem for group in groups] == PROBLEMS
    answers = [client.complete(request.prompt_ids, request.seed).token_ids for request in requests]
    assert [rollout.token_ids[1:] for group in groups for rollout in group.rollouts] == answers


def test_metrics_follow_from_the_scripted_answers() -> None:
    metrics = evaluate(evaluator(), cycle=0)
    seeds = [[seed_of(4242, 0, f"p{i}", rep) for rep in range(3)] for i in range(5)]
    right = [[seed % 2 == 1 for seed in row] for row in seeds]
    assert 0 < sum(map(sum, right)) < 15
    assert metrics["pass@1"] == pytest.approx(sum(map(sum, right)) / 15)
    assert metrics["pass_ordered@2"] == pytest.approx(sum(any(row[:2]) for row in right) / 5)
    assert metrics["truncated_frac"] == pytest.approx(sum(seed % 3 == 0 for row in seeds for seed in row) / 15)
    assert metrics["reward_mean_all"] == 1.0, "the text is cut at the stop string and has no EOS"
    assert metrics["completion_tokens_mean"] == 4.0, "the length counts all tokens, EOS too"


@pytest.mark.parametrize("world_size", [3, 16])
def test_any_number_of_processes_gives_the_same_groups(world_size: int) -> None:
    shares = [evaluator(rank=rank, world_size=world_size).sample(SeededClient(), cycle=2) for rank in range(world_size)]
    together = [shares[i % world_size][i // world_size] for i in range(len(PROBLEMS))]  # as the loop gathers them
    assert together == evaluator().sample(SeededClient(), cycle=2)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_any_text_is_one_line_of_the_records_and_rewards_are_for_people(tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\u2029b\r\n", "a\x85b", "lone \ud800", "naïve 答案"]
    score = Score(0.1 + 0.1 + 0.03, True, {"paid": 0.1 + 0.2})
    with recording(tmp_path / "x.jsonl") as record:
        for index in reversed(range(len(texts))):
            rollout = Rollout.of_one_turn(
                (1,), make_completion((2,), (-0.5,)), temperature=1.0, text=texts[index], score=score
            )
            record(index, RolloutGroup(Problem("p", ({"role": "user", "content": "x"},), "1", {}), (rollout,)))
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [line["replicates"][0]["text"] for line in lines] == texts
    assert [(each["reward"], each["parts"]) for each in lines[0]["replicates"]] == [(0.23, {"paid": 0.3})]

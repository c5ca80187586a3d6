"""Instructions are judged as by torchrl's copy of the published code, on texts made of what the checks look for; and so
is the reward.

Left out is what that code asks a downloaded model for (sentences, words in capitals), or decides at random (languages).
"""

import json
import random
from pathlib import Path

import pytest
import torch

import offline_grpo.task
from offline_grpo.task.ifeval import CHECKS, follows

pytestmark = pytest.mark.slow  # importing torchrl.envs takes 10 to 20 s

ELSEWHERE = {
    "language:response_language",
    "length_constraints:number_sentences",
    "change_case:capital_word_frequency",
    "change_case:english_capital",
    "change_case:english_lowercase",
}
PIECES = [
    *("gull", "rope", " ", "  ", "\n", "\n\n", "***", "******", "*", "**", "-", "- a", "* b", "[x]", "[", "]"),
    *("<<t>>", "<<", ">>", '"', ",", "P.S.", "p. s.", "P.P.S", "p.p. s", "SECTION 1", "Part 2", "Section1"),
    *("star", "Star ", "rain", "honey", "white", "Cold", "z", "o", "e", "e", "A", ",", "often", "Often,", "flour"),
    *("'finally", "{}", "[1]", "```json\n{}\n```", "My answer is yes.", "My answer is no", "That is all."),
    *("word ", "word ", "word.", "What is the capital of Norway?", "Now try it yourself."),
]


def test_torchrl_judges_alike():
    from torchrl.envs.llm.reward.ifeval._instructions_registry import INSTRUCTION_DICT

    assert INSTRUCTION_DICT.keys() == CHECKS.keys()
    rows = map(json.loads, Path(offline_grpo.task.__path__[0], "ifeval_sample.jsonl").read_text().splitlines())
    cases = [
        pair
        for row in rows
        for pair in zip(row["instruction_id_list"], row["kwargs"], strict=True)
        if pair[0] not in ELSEWHERE
    ]
    rng = random.Random(0)
    passed = set()
    for _ in range(2500):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 14))) * rng.choice((1, 1, 1, 2, 4))
        for kind, arguments in cases:
            theirs = INSTRUCTION_DICT[kind](kind)
            theirs.build_description(**arguments)
            ours = follows(text, kind, arguments)
            assert ours is bool(text.strip() and theirs.check_following(text)), (kind, arguments, text)
            passed |= {(kind, ours)}
    assert passed == {(kind, ours) for kind in CHECKS.keys() - ELSEWHERE for ours in (True, False)}


@pytest.mark.parametrize("strict", [(True, True), (True, False), (False, False)])
def test_torchrl_rewards_alike(strict):
    from factories import compose_config
    from torchrl.envs.llm.reward.ifeval import IFEvalScoreData, IfEvalScorer

    from offline_grpo.config.compose import as_plain
    from offline_grpo.config.problems import build_task
    from offline_grpo.types import Problem

    scores = IFEvalScoreData(
        prompt_level_strict_acc=torch.tensor([all(strict)]),
        inst_level_strict_acc=torch.tensor(strict),
        prompt_level_loose_acc=torch.tensor([all(strict)]),
        inst_level_loose_acc=torch.tensor(strict),
        batch_size=(),
    )
    aggregate = IfEvalScorer.default_reward_aggregator
    settings = type("Settings", (), {"format_weights": [0.4, 0.3, 0.2, 0.1]})()
    theirs = aggregate(settings, scores, think_blocks=["a"], answer_blocks=["b"])
    node = as_plain(
        compose_config(
            "task=ifeval_sample", "task.answer_tag=answer", "task.answer_bonus=0.1", "task.think_bonus=0.05"
        ).task
    )
    problem = Problem(
        "p", ({"role": "user", "content": "?"},), json.dumps([["punctuation:no_comma", {}], ["startend:quotation", {}]])
    )
    answer = {(True, True): '"a"', (True, False): "a", (False, False): "a,"}[strict]
    ours = build_task(node).score(problem, f"<think>x</think><answer>{answer}</answer>").reward
    assert ours == pytest.approx(float(theirs), abs=1e-6)

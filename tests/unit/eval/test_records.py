"""Records of what models wrote, whatever letters that has."""

import json
from pathlib import Path

from factories import make_completion

from offline_grpo.eval.records import recording
from offline_grpo.types import Problem, Rollout, RolloutGroup, Score


def test_any_text_is_one_line(tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\u2029b\r\n", "a\x85b", "lone \ud800", "naïve 答案"]
    with recording(tmp_path / "x.jsonl") as record:
        for index in reversed(range(len(texts))):
            rollout = Rollout.of_one_turn(
                (1,), make_completion((2,), (-0.5,)), temperature=1.0, text=texts[index], score=Score(1.0, True, {})
            )
            record(index, RolloutGroup(Problem("p", ({"role": "user", "content": "x"},), "1", {}), (rollout,)))
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [line["replicates"][0]["text"] for line in lines] == texts

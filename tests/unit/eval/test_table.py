"""The text of an evaluation: which k and sets it shows, and that no name makes a line of more than 80 columns."""

import re

from offline_grpo.eval.paired import PairedResult
from offline_grpo.eval.table import comparison_lines, results_table, truncation_lines
from offline_grpo.types import Metrics

LONG = "gsm8k " + "task.operations=[+,-,*] " * 3 + "x" * 100 + " eval.temperature=0.5"


def found(*ks: int) -> Metrics:
    values = {f"pass@{k}{end}": k / 10 for k in ks for end in ("", "_low", "_high")}
    return {"tasks": 4.0, "truncated_frac": 1.0, **values}


def test_many_k_are_told_two_at_a_time() -> None:
    metrics = {("A", "few"): found(1, 2), ("A", "many"): found(1, 2, 4, 8)}
    lines = results_table({"A": "m"}, metrics, {"few": [1, 2], "many": [8, 4, 2, 1]})
    heads = [re.findall(r"pass@\d", line) for line in lines if line.startswith("set")]
    assert heads == [["pass@1", "pass@2"], ["pass@8"]]
    assert [line.split()[0] for line in lines if "[0" in line] == ["few", "many", "many"]
    assert max(map(len, lines)) <= 80


def test_long_names_are_wrapped() -> None:
    names = [LONG, LONG.replace("gsm8k", "math")]
    metrics = {(letter, name): found(1, 4) for name in names for letter in "AB"}
    compared = {("B", name): PairedResult(-0.1234, -0.2345, -0.0123, 0.00001, 1000, 100, 200) for name in names}
    for lines in (
        results_table({"A": LONG, "B": LONG}, metrics, {name: [1, 4] for name in names}),
        comparison_lines("A", compared),
        truncation_lines(metrics),
    ):
        assert max(map(len, lines)) <= 80
    assert "p < 0.0001" in "\n".join(comparison_lines("A", compared))

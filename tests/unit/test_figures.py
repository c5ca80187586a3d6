"""Every measured figure of the pages stands in a file of benchmarks/results/: `figures.yaml` there has each sentence.

The test fails when the page or the result changes, and when a page, or a comment in conf/, has a number with a unit of
measurement that is in none of the sentences.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch
import yaml
from factories import CONF

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES: dict[str, list[list[str]]] = yaml.safe_load((RESULTS / "figures.yaml").read_text())
NOT_MEASURED: Any = FIGURES.pop("not_measured")
LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
TASKS = ("sums", "products", "instructions", "longer_sums")


class Number(float):
    """`{:s3}` writes three significant digits; other formats are Python's."""

    def __format__(self, spec: str) -> str:
        return f"{float(f'{float(self):.{spec[1:]}g}'):,g}" if spec.startswith("s") else super().__format__(spec)


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def done(r: Any, task: str, arm: str) -> list[Any]:
    """The runs of `learning.py` that came to their end."""
    return [run for run in r["details"].values() if (run["task"], run["arm"]) == (task, arm) and run["done"]]


def mean_curve(r: Any, task: str, arm: str, key: str = "pass@1") -> list[float]:
    return [fmean(values) for values in zip(*(run[key] for run in done(r, task, arm)), strict=True)]


def trained(r: Any, arm: str, key: str, place: int | None = None) -> float:
    """Mean over the seeds of sums, of a tenth or sixth of the iterations or of all."""
    found = [run["train"][key] for run in done(r, "sums", arm)]
    return fmean(x for values in found for x in (values if place is None else [values[place]]))


def seconds_to_half(r: Any, task: str, arm: str) -> float:
    """Of training, until half of what both trainers gain over grpo's first evaluation."""
    first, last = (mean_curve(r, task, "grpo")[i] for i in (0, -1))
    level = (first + min(last, mean_curve(r, task, "trl")[-1])) / 2
    curve, times = mean_curve(r, task, arm), mean_curve(r, task, arm, "seconds")
    i = next(i for i in range(1, len(curve)) if curve[i] >= level > curve[i - 1])
    return times[i - 1] + (times[i] - times[i - 1]) * (level - curve[i - 1]) / (curve[i] - curve[i - 1])


def beside_trl(r: Any) -> list[float]:
    """Seconds of all iterations of each loss on each task, over those of TRL's grpo."""
    seconds = {(task, arm): mean_curve(r, task, arm, "seconds")[-1] for task in TASKS for arm in (*LOSSES, "trl")}
    return [seconds[task, arm] / seconds[task, "trl"] for task in TASKS for arm in LOSSES]


def clipped(r: Any, *arms: str) -> list[float]:
    """Per cent of the tokens, means over ten iterations."""
    return [100 * x for task in TASKS for arm in arms for run in done(r, task, arm) for x in run["train"]["clip_frac"]]


def learned(m: Mapping[str, float], task: str) -> list[float]:
    """Of each loss and of TRL: the last pass@1, and half of its interval."""
    arms = [f"{task}/{arm}" for arm in (*LOSSES, "trl")]
    return [x for arm in arms for x in (m[f"{arm}/last"], (m[f"{arm}/high"] - m[f"{arm}/low"]) / 2)]


def apart(r: Any, a: str, b: str) -> tuple[float, float]:
    """Of two objectives at the end, paired by seed: the mean, and half of Student's 95% interval."""
    last = [{run["seed"]: run["pass@1"][-1] for run in done(r, "replay", arm)} for arm in (a, b)]
    differences = [last[0][seed] - last[1][seed] for seed in last[0]]
    n, quantiles = len(differences), {3: 4.302653, 4: 3.182446, 5: 2.776445}
    variance = sum((x - fmean(differences)) ** 2 for x in differences) / (n - 1)
    return fmean(differences), quantiles[n] * (variance / n) ** 0.5


def synced(strategy: str, *keys: str) -> list[float]:
    """On an H100 and an H200, but memory once; last the speeds, and their ratios to `stock` or `base`."""
    *first, other = keys
    speeds = [
        f"{streams}_{what}" for streams in ("single_stream", "concurrent") for what in ("tokens_per_s", f"vs_{other}")
    ]
    files = [result(f"h100/weight_sync_{strategy}")["measured"], result(f"h200/weight_sync_{strategy}")["measured"]]
    return [file[key] for key in (*first, *speeds) for file in files[: 1 + (key != "trainer_gpu_mib")]]


def unchanged(lr: float) -> float:
    """Per cent of bf16 weights from N(0, 0.02) that one Adam step, of lr in a random direction, leaves unchanged."""
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(500_000)).bfloat16().float()
    moved = weights + lr * torch.randint(2, weights.shape).mul(2).sub(1)
    return 100 * float((moved.bfloat16() == weights).float().mean())


def scaling() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "scaling_model.py"))


WITH = {
    **{
        f.__name__: f
        for f in (done, mean_curve, trained, seconds_to_half, beside_trl, clipped, learned, apart, synced, unchanged)
    },
    "TASKS": TASKS,
    "LOSSES": LOSSES,
    "mean": fmean,
    "median": median,
    "phase": lambda r, name: r["details"]["ours"]["phases_s"][f"time/{name}_s"],
    "head_ms": lambda d, arm: 1000 * d["timings"][arm]["median_s"],
    "head_gib": lambda d, arm: d["peak_extra_bytes"][arm] / 2**30,
    "ahead": lambda d, name: fmean(d["ours"]["rounds"][f"time/{name}_s"]),
    "modelled_s": lambda: scaling()["whole_run_s"](scaling()["Measured"].read()),
    "in_turn_tok_s": lambda: scaling()["in_turn_tok_s"](scaling()["Measured"].read()),
}


def numbers(places: Sequence[str]) -> Iterator[Number]:
    file = ""
    for place in places:
        name, colon, rest = place.partition(":")
        has_file = bool(colon) and (RESULTS / f"{name}.json").is_file()
        file, expression = (name, rest) if has_file else (file, place)
        r = result(file) if file else {}
        m = r.get("measured", {})
        found = m[expression] if expression in m else eval(expression, WITH | {"r": r, "m": m, "d": r.get("details")})
        yield from map(Number, found if isinstance(found, (list, tuple)) else [found])


def text_of(page: Path) -> str:
    """In one line; of a YAML file the comments."""
    text = page.read_text()
    return " ".join(
        re.sub(r"^[^#\n]*#|^[^#\n]*$", "", text, flags=re.M).split() if page.suffix == ".yaml" else text.split()
    )


@pytest.mark.parametrize("page", FIGURES)
def test_every_sentence_says_what_was_measured(page: str) -> None:
    text = text_of(ROOT / page)
    sentences = [sentence.format(*numbers(places)) for sentence, *places in FIGURES[page]]
    missing = [sentence for sentence in sentences if sentence not in text]
    assert not missing, "\n".join(missing)


UNITS = r"%|seconds?|s|ms|us|minutes?|hours?|GB|GiB|MiB|MB|KB|GB/s|tokens/s|tokens per second|tok/s|times|nats"
FIGURE = re.compile(
    rf"(?<![\w.-])\d[\d,.]*(?:e-?\d+)?(?:(?: to | and | or | - | / )\d[\d,.]*)*(?: ?(?:{UNITS})(?![\w]))"
)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *CONF.rglob("*.yaml")]
NO_FIGURES = [
    r"at (?:most|least) \d[\d,.]*(?: and \d[\d,.]*)? ?(?:GiB|ms|s|times|nats|%|tokens/s)?",
    r"planned for one GPU of \d+ GB",
    r"95 ?% (?:CI|intervals?|confidence)",
]
"""Targets, which the results have beside what was measured; cards of presets (in test_presets.py); intervals."""


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES if page.name != "CHANGELOG.md"])
def test_every_number_with_a_unit_is_measured_or_listed(page: str) -> None:
    text = text_of(ROOT / page)
    for sentence, *places in FIGURES.get(page, []):
        text = text.replace(sentence.format(*numbers(places)), " ")
    for listed in NOT_MEASURED.get(page, []):
        assert listed in text, f"{page} has no {listed!r}: take it off the list"
        text = text.replace(listed, " ")
    text = re.sub("|".join(NO_FIGURES), " ", text, flags=re.IGNORECASE)
    found = [text[max(0, each.start() - 40) : each.end() + 20] for each in FIGURE.finditer(text)]
    assert not found, "\n".join(["neither in figures.yaml nor in its not_measured:", *found])


def test_every_bar_of_the_picture_was_measured() -> None:
    found: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    values = {(panel.title, bar.name): bar.value for panel in found["PANELS"] for bar in panel.bars}
    assert len(values) == 16
    assert min(values.values()) > 0
    picture = found["IMAGES"] / "h100.png"
    assert picture.is_file()
    assert str(picture.relative_to(ROOT)) in (ROOT / "README.md").read_text()


def test_the_table_of_scaling_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """Its check against the measurement holds, and the page has what it prints."""
    runpy.run_path(str(ROOT / "benchmarks" / "scaling_model.py"), run_name="__main__")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 8
    assert "\n".join(rows) in (ROOT / "docs" / "scaling.md").read_text()

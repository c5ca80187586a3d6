"""`report.html` without a browser: what it says."""

import json
import math
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_folders import HOSTILE, make_run

from offline_grpo.report import page as page_module
from offline_grpo.report.page import save_page


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 5 MB are not what these tests are about."""
    monkeypatch.setattr(page_module, "_plotly", lambda: "")


def data_of(*paths: Path) -> dict:
    """The numbers of the page about these folders."""
    page = save_page(paths, paths[0].parent / "page.html").read_text()
    assert not re.findall(r'(?:src|href)="?(?:http|//)', page[: page.index('id="plotly"')]), "nothing from a network"
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def test_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", truncated_frac=0.5)
    data = data_of(run)
    assert data["verdict"] == "pass@1: 0.000 [-0.010, 0.010] before training, 0.750 [0.740, 0.760] after it."
    assert [row[0] for row in data["results"]["rows"]] == ["pass@1", "training reward"]
    assert data["about"].endswith("12 training iterations, 2 evaluations, 36.0 s")
    [finding] = data["findings"]
    assert (finding["where"], finding["observation"]) == ("", "50% of the completions are cut off at last")
    [line] = data["curves"]["eval/pass@1"]
    assert (line["x"], line["y"], line["high"]) == ([0, 12], [0, 0.75], [0.01, 0.76])
    assert data["samples"][0]["rendered"] == [["user", "2+2= four"], ["policy", "four 0"]]
    assert data["samples"][0]["advantage"] == 0.7
    assert {sample["iteration"] for sample in data["samples"]} == set(range(1, 13))
    assert data["settings"] is data["paired"] is None


def test_a_sweep_is_compared_in_pairs(tmp_path: Path) -> None:
    """Of four problems grpo solves 3 with both seeds, dapo 1 with one and 2 with the other; gspo has no record."""
    runs = [("grpo", 0, 3), ("grpo", 1, 3), ("dapo", 0, 1), ("dapo", 1, 2), ("gspo", 0, 0)]
    for number, (loss, seed, solved) in enumerate(runs):
        make_run(tmp_path / str(number), loss=loss, seed=seed, solved=solved, truncated_frac=0.5 * (number > 2))
    (tmp_path / "4" / "rollouts" / "eval_iter_011.parquet").unlink()
    data = data_of(tmp_path)
    names = [f"loss={loss}" for loss in ("grpo", "dapo", "gspo")]
    assert (data["groups"], data["paired"]["baseline"]) == (names, names[0])
    assert data["verdict"] == "The highest pass@1 on held-out problems at the end is 0.750, of loss=grpo."
    dapo, gspo = data["paired"]["rows"]
    half = 12.7062 * 0.125  # t with one degree of freedom, times the standard error of -0.5 and -0.25
    interval = f"[{-0.375 - half:+.3f}, {-0.375 + half:+.3f}]"
    p = 1 - 2 / math.pi * math.atan(0.375 / 0.125)  # one degree of freedom is Cauchy's distribution
    assert dapo == ["loss=dapo", "-0.375", interval, "2 seeds", f"{p:.4f}", "0", "2"]
    assert gspo[1:] == ["-0.750", "", "", "one seed", "not comparable", ""]
    point = data["paired"]["points"][0]
    assert point["ends"] == pytest.approx([-0.375 - half, -0.375 + half], abs=1e-4)
    [cut] = data["findings"]
    assert (cut["where"], cut["metric"]) == ("2 of 5 runs (3, 4; numbers of the first)", "train/truncated_frac")
    assert data["settings"]["columns"][:3] == ["run", "train/loss", "seed"]
    assert data["problems"]["columns"] == names[:2]
    shares = dict(zip(data["problems"]["problems"], data["problems"]["share"], strict=True))
    assert shares == {"four 0": [1, 1], "four 1": [1, 0.5], "four 2": [1, 0], "four 3": [0, 0]}
    assert len(data["curves"]["train/reward_mean"][0]["runs"]) == 2
    assert not any("low" in curve for curve in data["curves"]["train/reward_mean"]), "two seeds are drawn themselves"


def test_runs_of_different_tasks_are_not_ranked(tmp_path: Path) -> None:
    """Weights of the reward change neither the problems nor which answers are right."""
    tasks = [("sat", 0.1, 1), ("sums", 0.1, 3), ("sums", 0.2, 4), ("sat", 0.1, 2)]
    for number, (task, weight, solved) in enumerate(tasks):
        run = make_run(tmp_path / str(number), solved=solved, loss=f"loss{number}")
        config = run / ".hydra" / "config.yaml"
        config.write_text(config.read_text() + f"task: {{_target_: {task}, format_weight: {weight}}}\n")
    data = data_of(tmp_path)
    assert data["groups"] == ["loss=loss3", "loss=loss0", "loss=loss2", "loss=loss1"]
    best = "0.500 [0.490, 0.510], of loss=loss3; 1.000 [0.990, 1.010], of loss=loss2."
    assert data["verdict"].endswith(f"The highest pass@1 at the end of each evaluation: {best}")
    assert [row[0] for row in data["paired"]["rows"]] == ["loss=loss3"]


@pytest.mark.parametrize("num_runs", [1, 2])
def test_the_parts_of_an_iteration_add_up(num_runs: int, tmp_path: Path) -> None:
    """However seldom a part is there."""
    for number in range(num_runs):
        run = make_run(tmp_path / str(number), iterations=1, loss=f"loss{number}")
        for index in range(400):
            metrics = {"time/generate_s": 3.0, "grad_norm": 100.0 if index == 77 else 1.0}
            metrics |= {"time/eval_s": 10.0} if index % 10 == 9 else {}
            (run / "metrics" / f"train_iter_{index:03d}.json").write_text(json.dumps(metrics))
    data = data_of(tmp_path if num_runs > 1 else tmp_path / "0")
    [phases] = (each["parts"] for each in data["figures"] if each["stacked"])
    line = data["curves"]["train/grad_norm"][0]["runs"][0]["y"]
    assert len(line) <= 300
    assert max(line) == 100.0, "thinned, and spikes stay"
    of_iterations = {"generate": [3.0] * 400, "eval": [10.0 * (index % 10 == 9) for index in range(400)]}
    assert phases["y"] == (of_iterations if num_runs == 1 else {"generate": [3.0, 3.0], "eval": [1.0, 1.0]})


def test_held_out_problems_are_followed_through_training(tmp_path: Path) -> None:
    run = make_run(tmp_path, solved=1)
    assert data_of(tmp_path)["problems"] is None  # one evaluation
    last = pq.read_table(run / "rollouts" / "eval_iter_011.parquet")
    for name, rows in (("init", [3, 2, 1]), ("iter_004", [0, 1, 2, 3])):
        table = last.take(rows)
        correct = pa.array([name != "init" and each == "four 1" for each in table["problem_id"].to_pylist()])
        column = table.schema.get_field_index("is_correct")
        pq.write_table(table.set_column(column, "is_correct", correct), run / f"rollouts/eval_{name}.parquet")
    found = data_of(tmp_path)["problems"]
    assert found["columns"] == ["before", "5", "12"]
    rows = dict(zip(found["problems"], found["share"], strict=True))
    assert rows == {"four 0": [None, 0, 1], "four 1": [0, 1, 0], "four 2": [0, 0, 0], "four 3": [0, 0, 0]}
    assert found["problems"] == ["four 2", "four 3", "four 0", "four 1"]


def test_tasks_of_a_mixture_have_results_and_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name, value in (("init", 0.25), ("iter_011", 0.5)):
        path = run / "metrics" / f"eval_{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"task/sums/pass@1": value, "task/sums/pass@4": 1.0}))
    data = data_of(run)
    assert data["results"]["rows"][1] == ["pass@1 of sums", "0.250", "0.500", "0.500 (12)"]
    assert data["figures"][0]["curves"] == {"eval/pass@1": "pass@1", "eval/task/sums/pass@1": "sums"}


def test_hostile_text_is_data(tmp_path: Path) -> None:
    data = data_of(make_run(tmp_path / "run", text=HOSTILE))
    page = (tmp_path / "page.html").read_text()
    [_, (_, text)] = data["samples"][0]["rendered"]
    assert "alert(1)" in text
    assert "letters left out" in text
    assert "<script>alert" not in page
    assert len(page) < 5_000_000

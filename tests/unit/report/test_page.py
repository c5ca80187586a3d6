"""`report.html` without a browser: what it says, and what damaged and hostile folders do to it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import make_completion
from recorded import byte_tokenizer
from report_folders import HOSTILE, make_run

from offline_grpo.errors import ConfigError
from offline_grpo.report import page as page_module
from offline_grpo.report.__main__ import main
from offline_grpo.report.page import save_page
from offline_grpo.rollouts.store.origin import Origin
from offline_grpo.rollouts.store.rows import parquet, table_of
from offline_grpo.types import Rollout, RolloutGroup, Score


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 5 MB are not what these tests are about."""
    monkeypatch.setattr(page_module, "_plotly", lambda: "")


def data_of(*paths: Path) -> dict:
    """The numbers of the page about these folders."""
    page = save_page(paths, paths[0].parent / "page.html").read_text()
    assert not re.findall(r'(?:src|href)="?(?:http|//)', page[: page.index('id="plotly"')]), (
        "nothing comes from a network"
    )
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def test_a_run(tmp_path: Path) -> None:
    data = data_of(make_run(tmp_path / "run", truncated_frac=0.5))
    assert data["verdict"] == "pass@1 rose from 0.000 [-0.010, 0.010] to 0.750 [0.740, 0.760]."
    assert [row[0] for row in data["results"]["rows"]] == ["pass@1", "training reward"]
    assert data["about"].endswith("12 training iterations, 2 evaluations, 36.0 s")
    assert [(each["metric"], each["text"]) for each in data["findings"]] == [
        ("train/truncated_frac", "50% of the completions are cut off at last")
    ]
    [line] = data["curves"]["eval/pass@1"]
    assert (line["x"], line["y"], line["high"]) == ([0, 12], [0, 0.75], [0.01, 0.76])
    assert data["samples"][0]["pieces"] == [["four 0", 0.7]]
    assert {sample["iteration"] for sample in data["samples"]} == set(range(1, 13))
    assert data["settings"] is data["paired"] is None


def test_a_sweep_is_compared_in_pairs(tmp_path: Path) -> None:
    """Of four problems grpo solves 3 with both seeds, dapo 1 with one and 2 with the other."""
    for number, (loss, seed, solved) in enumerate([("grpo", 0, 3), ("grpo", 1, 3), ("dapo", 0, 1), ("dapo", 1, 2)]):
        make_run(tmp_path / str(number), loss=loss, seed=seed, solved=solved)
    data = data_of(tmp_path)
    assert data["groups"] == ["train/loss=grpo", "train/loss=dapo"]
    assert data["paired"]["baseline"] == "train/loss=grpo"
    [[name, difference, _, p, better, worse, over_seeds]] = data["paired"]["rows"]
    # Differences of the problems' right answers are 0, -1, -2, 0: of the four choices of signs, two are as far from 0
    # as -3.
    assert (name, difference, float(p), better, worse) == ("train/loss=dapo", "-0.375", 0.5, "0", "2")
    half = 12.7062 * 0.125  # t with one degree of freedom, times the standard error of -0.5 and -0.25
    assert over_seeds == f"[{-0.375 - half:+.3f}, {-0.375 + half:+.3f}], 2 seeds"
    [point] = data["paired"]["points"]
    assert (point["group"], point["difference"], point["over_seeds"]) == (
        1,
        -0.375,
        pytest.approx([-0.375 - half, -0.375 + half], abs=1e-4),
    )
    assert point["over_problems"][0] < -0.375 < point["over_problems"][1]
    assert not any(
        "low" in curve for curve in data["curves"]["train/reward_mean"]
    )  # of two seeds: they are drawn themselves


def test_pairs_are_of_the_evaluation_that_is_shown_and_of_the_same_problems(tmp_path: Path) -> None:
    """A kill between the store and the metrics leaves the former without the latter; ids may be those of other
    problems.
    """
    for number, loss in enumerate(("grpo", "killed", "other")):
        make_run(tmp_path / str(number), loss=loss, solved=3 if loss == "other" else 1)
    (tmp_path / "1" / "metrics" / "eval_iter_011.json").unlink()
    store = tmp_path / "2" / "rollouts" / "eval_iter_011.parquet"
    table = pq.read_table(store)
    pq.write_table(table.set_column(table.column_names.index("answer"), "answer", pa.array(["5"] * len(table))), store)
    rows = {row[0]: row[1:3] for row in data_of(tmp_path)["paired"]["rows"]}
    assert rows == {"train/loss=other": ["+0.500", "other problems"], "train/loss=killed": ["-0.250", "not on record"]}


def test_the_verdict_names_the_extremes_although_unfinished_runs_come_last(tmp_path: Path) -> None:
    for number, (loss, solved) in enumerate([("grpo", 2), ("dapo", 1), ("unfinished", 4)]):
        run = make_run(tmp_path / str(number), loss=loss, solved=solved)
    config = run / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("iterations: 12", "iterations: 20"))
    data = data_of(tmp_path)
    assert [row[0] for row in data["results"]["rows"]][-1] == "train/loss=unfinished"
    highest, lowest = data["verdict"].split(", the lowest ")
    assert highest.endswith("the highest is 1.000 [0.990, 1.010], of train/loss=unfinished")
    assert lowest == "0.250 [0.240, 0.260], of train/loss=dapo."


@pytest.mark.parametrize("num_runs", [1, 2])
def test_the_parts_of_an_iteration_add_up(num_runs: int, tmp_path: Path) -> None:
    """However many iterations there are, and however seldom a part is there."""
    for number in range(num_runs):
        run = make_run(tmp_path / str(number), iterations=1, loss=f"loss{number}")
        for index in range(1000):
            metrics = {"time/iteration_s": 4.0, "time/generate_s": 3.0} | (
                {"time/eval_s": 10.0} if index % 10 == 9 else {}
            )
            metrics |= {"perf/gpu_memory_gb": 2.0 + index % 2}
            (run / "metrics" / f"train_iter_{index:03d}.json").write_text(json.dumps(metrics))
    figures = data_of(tmp_path if num_runs > 1 else tmp_path / "0")["figures"]
    phases, memory = (each["parts"] for each in figures if each["stacked"])
    assert list(phases["y"]) == ["generate", "eval"]
    generate, evaluate = phases["y"].values()
    if num_runs > 1:
        assert (generate, evaluate, memory) == ([3.0, 3.0], [1.0, 1.0], {"x": None, "y": {"tensors": [2.5, 2.5]}})
    else:
        assert len(phases["x"]) == len(generate) == len(evaluate) == 300
        assert sum(evaluate) / 300 == pytest.approx(1.0, rel=0.1)
        assert set(generate) == {3.0}


def test_held_out_problems_are_followed_through_training(tmp_path: Path) -> None:
    run = make_run(tmp_path, solved=1)
    assert data_of(tmp_path)["problems"] is None  # one evaluation
    last = pq.read_table(run / "rollouts" / "eval_iter_011.parquet")
    right = {"four 0": [False], "four 1": [True], "four 2": [False]}
    for name, rows in (("init", [3, 2, 1]), ("iter_004", [0, 1, 2, 3])):
        table = last.take(rows)
        correct = pa.array([name != "init" and right.get(each, [False])[0] for each in table["problem_id"].to_pylist()])
        pq.write_table(
            table.set_column(table.schema.get_field_index("is_correct"), "is_correct", correct),
            run / f"rollouts/eval_{name}.parquet",
        )
    found = data_of(tmp_path)["problems"]
    assert found["columns"] == ["before", "5", "12"]
    rows = dict(zip(found["problems"], found["share"], strict=True))
    assert rows == {"four 0": [None, 0, 1], "four 1": [0, 1, 0], "four 2": [0, 0, 0], "four 3": [0, 0, 0]}
    assert found["problems"] == ["four 2", "four 3", "four 0", "four 1"]


def test_held_out_problems_of_a_sweep_are_shares_over_the_seeds_of_each_configuration(tmp_path: Path) -> None:
    """Of four problems grpo solves 3 with one seed and 1 with the other, dapo 2; gspo has no record."""
    for number, (loss, seed, solved) in enumerate([("grpo", 0, 3), ("grpo", 1, 1), ("dapo", 0, 2), ("gspo", 0, 1)]):
        make_run(tmp_path / str(number), loss=loss, seed=seed, solved=solved)
    (tmp_path / "3" / "rollouts" / "eval_iter_011.parquet").unlink()
    last = tmp_path / "2" / "rollouts" / "eval_iter_011.parquet"
    pq.write_table(pq.read_table(last).take([0, 1, 2]), last)
    found = data_of(tmp_path)["problems"]
    assert found["columns"] == ["train/loss=grpo", "train/loss=dapo"]
    assert dict(zip(found["problems"], found["share"], strict=True)) == {
        "four 0": [1, 1],
        "four 1": [0.5, 1],
        "four 2": [0.5, 0],
        "four 3": [0, None],
    }


def test_a_finding_is_said_once_with_its_runs_and_the_range_of_its_numbers(tmp_path: Path) -> None:
    for number in range(15):
        make_run(
            tmp_path / str(number),
            seed=number,
            truncated_frac=0.5 + number / 100,
            num_updates_refused=1.0 if number == 3 else 0.0,
        )
    [refused, cut] = data_of(tmp_path)["findings"]
    assert (refused["where"], refused["metric"]) == ("run 3", "train/num_updates_refused")
    assert (cut["where"], cut["text"]) == ("all 15 runs", "50\u201364% of the completions are cut off at last")
    make_run(tmp_path / "15", seed=15)
    where = data_of(tmp_path)["findings"][1]["where"]
    assert where == "15 of 16 runs (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more)"


def test_tasks_of_a_mixture_have_results_and_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name, value in (("init", 0.25), ("iter_011", 0.5)):
        path = run / "metrics" / f"eval_{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"task/sums/pass@1": value, "task/sums/pass@4": 1.0}))
    data = data_of(run)
    assert data["results"]["rows"][1] == ["pass@1 of sums", "0.250", "0.500", "0.500 (12)"]
    assert data["figures"][0]["curves"] == {"eval/pass@1": "pass@1", "eval/task/sums/pass@1": "sums"}
    assert data["verdict"].startswith("pass@1 rose")


def test_the_verdict_claims_no_change_where_there_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", solved=0)
    assert data_of(run)["verdict"] == "pass@1 stayed at 0.000 [-0.010, 0.010]."
    (run / "metrics" / "eval_init.json").unlink()
    assert data_of(run)["verdict"] == "pass@1: 0.000 [-0.010, 0.010], measured once."


def test_three_seeds_have_a_band(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / str(seed), seed=seed, entropy=1.0 + seed)
    [curve] = data_of(tmp_path)["curves"]["train/entropy"]
    half = 4.30265 / 3**0.5  # t with two degrees of freedom; the standard deviation of 1, 2, 3 is 1
    assert curve["y"][0] == 2.0
    assert (curve["low"][0], curve["high"][0]) == (pytest.approx(2 - half, abs=1e-3), pytest.approx(2 + half, abs=1e-3))


def test_a_sweep_tells_its_settings(tmp_path: Path) -> None:
    for number, loss in enumerate(("grpo", "grpo", "dapo")):
        make_run(tmp_path / str(number), loss=loss, seed=number % 2)
    data = data_of(tmp_path)
    assert data["settings"]["columns"][:3] == ["run", "train/loss", "seed"]
    assert len(data["curves"]["train/reward_mean"][0]["runs"]) == 2


def test_several_folders_make_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    make_run(tmp_path / "a" / "0", seed=0)
    make_run(tmp_path / "b", seed=1)
    monkeypatch.chdir(tmp_path)
    assert main(["a", "b"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "1 configuration, 2 runs, best mean final pass@1 first"
    assert lines[3].startswith("train/loss=grpo  0 1   0.750 ")
    assert [line.split() for line in lines[4:]] == [["run", "0", "a/0"], ["run", "1", "b"], ["page", "report.html"]]
    assert main(["a", "b", "--out", "b/both.html"]) == 0
    assert Path("report.html").read_bytes() == Path("b/both.html").read_bytes()


def test_a_page_that_cannot_be_there_is_refused_before_anything_is_drawn(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "run")
    for out in (tmp_path / "none" / "x.html", run):
        assert main([str(run), "--out", str(out)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --out={out}: ")
    assert not (run / "report.png").exists()


def test_hostile_text_is_data(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", text=HOSTILE)
    data = data_of(run)
    page = (tmp_path / "page.html").read_text()
    assert "alert(1)" in data["samples"][0]["pieces"][0][0]
    assert "letters left out" in data["samples"][0]["pieces"][0][0]
    assert "<script>alert" not in page
    assert len(page) < 5_000_000


def test_an_empty_run_and_one_that_still_runs(tmp_path: Path) -> None:
    (tmp_path / "empty" / "metrics").mkdir(parents=True)
    assert data_of(tmp_path / "empty")["verdict"] == "There are no results yet."
    run = make_run(tmp_path / "run", iterations=1)
    (run / ".hydra" / "config.yaml").write_text(
        (run / ".hydra" / "config.yaml").read_text().replace("iterations: 1", "iterations: 9")
    )
    assert "stopped at 1/9" in data_of(run)["about"]
    with pytest.raises(ConfigError, match="is neither a run"):
        data_of(tmp_path / "none")


def test_long_runs_are_thinned_and_keep_their_spikes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=1)
    for index in range(2000):
        (run / "metrics" / f"train_iter_{index:03d}.json").write_text(
            json.dumps({"grad_norm": 100.0 if index == 777 else 1.0})
        )
    [line] = data_of(run)["curves"]["train/grad_norm"]
    assert len(line["runs"][0]["x"]) <= 300
    assert max(line["runs"][0]["y"]) == 100.0


def test_samples_come_from_files_where_nothing_was_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for path in (run / "rollouts").iterdir():
        path.unlink()
    (run / "samples").mkdir()
    text = "a\u2028b\u2029c\x85d"
    line = {
        "iteration": 0,
        "problem_id": "p",
        "prompt": None,
        "answer": None,
        "completion": text,
        "reward": 1.0,
        "advantage": None,
    }
    (run / "samples" / "iter_000.jsonl").write_text(
        json.dumps(line | {"is_correct": True, "finish_reason": None, "num_tokens": 1}, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    assert [sample["pieces"] for sample in data_of(run)["samples"]] == [[[text, None]]]


def test_characters_of_several_tokens_are_whole_where_each_token_has_an_advantage(tmp_path: Path) -> None:
    """The advantages change within the letter of two bytes, which comes with its last one; the length ends within that
    of four.
    """
    run, text = make_run(tmp_path / "run", iterations=1), "né" + "🎉" * 150
    ids = tuple(byte_tokenizer(tmp_path).encode(text).ids)
    rollout = Rollout.of_one_turn(
        (1,), make_completion(ids, (-0.5,) * len(ids)), temperature=1.0, text=text, score=Score(1.0, True, {})
    )
    advantages = (0.0, 0.5, 0.5, *(-0.5,) * (len(ids) - 2))
    table = table_of("train", [RolloutGroup(None, (rollout,), (advantages,))], [[0.5]], 0)
    (run / "rollouts" / "iter_000.parquet").write_bytes(
        parquet(table, Origin(str(tmp_path), "a", "b", {"seed": 0}, 0, "c").to_metadata())
    )
    [sample] = data_of(run)["samples"]
    assert sample["pieces"] == [["n", 0.5], ["é" + "🎉" * 149, -0.5], [" … 3 more tokens", None]]


def test_torch_is_not_imported() -> None:
    code = "import sys, offline_grpo.report.page, offline_grpo.rollouts.store.reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

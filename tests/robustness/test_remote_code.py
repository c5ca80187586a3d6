"""Python code that comes with a model is executed where the user asked for it by name, and nowhere else."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from factories import make_llama
from runs import SMALL, printed, run_in_child

from offline_grpo import sample
from offline_grpo.checkpoint.pretrained import find_model
from offline_grpo.errors import ConfigError
from offline_grpo.model.load import load_causal_lm, load_tokenizer, read_model_config
from offline_grpo.model.tiny import build_char_tokenizer

SOURCE = Path(__file__).parents[2] / "src" / "offline_grpo"
CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).write_text("executed")


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
UNSAFE = ("eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "joblib.load")
CLASSES = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Exists once the model's code has been executed."""
    return tmp_path / "marker"


@pytest.fixture
def folder(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama whose classes are in a file beside its weights."""
    folder = tmp_path / "own_model"
    make_llama().save_pretrained(folder)
    build_char_tokenizer(512).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": CLASSES, "architectures": ["OwnForCausalLM"]})
    )
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_code_is_not_executed_unasked(folder: Path, marker: Path) -> None:
    for load in (
        lambda: read_model_config(str(folder), "model.train_id"),
        lambda: find_model(str(folder)),
        lambda: sample.run([str(folder), "hello"]),
        lambda: load_causal_lm(str(folder), "auto", torch.device("cpu"), None),
    ):
        with pytest.raises(ConfigError, match=r"needs Python code that comes with it.*model\.trust_remote_code=true"):
            load()
    load_tokenizer(str(folder))
    assert not marker.exists()


def test_a_run_that_asks_for_it_executes_it_and_says_so(folder: Path, marker: Path, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("model.tiny")]
    words += ["model=hf", f"model.train_id={folder}", "train.iterations=2", "generation.max_new_tokens=4"]
    assert run_in_child(tmp_path / "refused", *words) == 2
    assert not marker.exists()
    run = tmp_path / "run"
    assert run_in_child(run, *words, "model.trust_remote_code=true") == 0, printed(run)
    assert marker.exists()
    assert f"model.trust_remote_code=true: Python code that comes with {folder} is executed" in printed(run)
    checkpoint = run / "checkpoints" / "iter_001"
    assert (checkpoint / "own.py").exists(), "the checkpoint can be loaded like the model"
    with pytest.raises(ConfigError, match="needs Python code"):  # whatever its own settings say
        find_model(str(checkpoint))
    loaded = find_model(str(checkpoint), trust_remote_code=True).load(device=torch.device("cpu"))
    assert type(loaded).__name__ == "OwnForCausalLM"


def test_nothing_read_from_files_is_executed() -> None:
    """The calls that could: torch.load without weights_only, unpickling, eval, exec, YAML with objects, arrays of
    objects.

    The processes that score unpickle what the run itself sends them through a pair of sockets, `task=code` draws
    programs of its own, and runs those of completions in a sandbox.
    """
    found, may = [], ("generation/scoring_worker.py", "task/code_problems.py", "task/code_calls.py")
    for path in sorted(set(SOURCE.rglob("*.py")) - {SOURCE / name for name in may}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
                is_load = called == "torch.load" and keywords.get("weights_only") != "True"
                is_allowed = "True" in (keywords.get("allow_pickle"), keywords.get("trust_remote_code"))
                if is_load or is_allowed or called in UNSAFE:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {called}")
    assert found == []

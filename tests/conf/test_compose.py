"""The YAML files: every option composes and builds, every key is explained, and composing needs no torch."""

import re
import subprocess
import sys

import pytest
import yaml
from factories import CONF, compose_config, compose_with_hydra
from hydra.errors import ConfigCompositionException

from offline_grpo.run.build import check_settings, resolve
from offline_grpo.run.config import as_plain, typed
from offline_grpo.run.engine_spec import CLIENT_RUNTIME
from offline_grpo.run.preflight import SOURCE_RUNTIME
from offline_grpo.settings import RunConfig

OPTIONS = sorted(
    path.relative_to(CONF).with_suffix("")
    for path in CONF.rglob("*.yaml")
    if path.parent != CONF and not path.stem.startswith("_") and path.parent.name != "experiment"
)
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
RUNTIME = dict.fromkeys([*CLIENT_RUNTIME, *SOURCE_RUNTIME, "output_dir"])


def overrides_for(option):
    group = str(option.parent)
    extra = ["model.train_id=some/model"] if str(option) == "model/hf" else []
    return [f"{group}=[{option.name}]" if group == "logger" else f"{group}={option.name}", *extra]


def targets(node, key=""):
    """(key, node) of every `_target_` in a plain configuration."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from targets(child, f"{key}.{name}" if key else name)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_composes_and_fits_its_component(option):
    cfg = compose_config(*overrides_for(option))
    assert isinstance(typed(cfg), RunConfig)
    for key, node in targets(as_plain(cfg)):
        if key == "generation":  # sampling settings share the group with the client's own: see preflight
            continue
        settings = {name: value for name, value in node.items() if name != "_target_"}
        check_settings(resolve(node, key), settings, key, given_at_runtime=RUNTIME)


@pytest.mark.parametrize(
    "overrides",
    [
        "seed=3 generation=vllm_server +engine.args.x=1 +engine.env.A=b train/loss=dapo train.lr=0.5",
        "train.lr=0.5 model/lora=default model.lora.r=4 experiment=smoke logger=[json] ~task.format_weight eval.ks=[1,2] train.lr=2",
    ],
)
def test_the_tests_compose_as_hydra_does(overrides):
    composed = compose_config(*overrides.split())
    assert composed == compose_with_hydra(*overrides.split())
    with pytest.raises(ConfigCompositionException):
        compose_config(*overrides.split(), "train.none=1")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name):
    assert isinstance(typed(compose_config(f"experiment={name}")), RunConfig)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", ("InProcess", None)),
        ("generation=vllm_server", ("SharedVllm", "VllmEngine")),
        ("generation=sglang_server", ("Restart", "SglangEngine")),
        ("generation=vllm_server weight_sync=reload", ("Reload", "VllmEngine")),
        ("weight_sync=ipc generation=vllm_server", ("Ipc", "VllmEngine")),
    ],
)
def test_a_server_brings_its_engine_and_its_sync(overrides, expected):
    cfg = compose_config(*overrides.split())
    engine = None if cfg.engine is None else cfg.engine._target_.rpartition(".")[2]
    assert (cfg.weight_sync._target_.rpartition(".")[2], engine) == expected


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_has_a_comment_above_it(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)
    lines = path.read_text().splitlines()
    unexplained = []
    for number, line in enumerate(lines):
        match = re.match(r"\s*([A-Za-z]\w*):", line)
        if match and match[1] not in ("defaults", "hydra") and not line.lstrip().startswith("#"):
            above = [previous.strip() for previous in lines[:number] if previous.strip()]
            if not (above and above[-1].startswith("#")) and not is_explained_block(lines, number):
                unexplained.append(line.strip())
    assert not unexplained


def is_explained_block(lines, number):
    """Keys of one kind may share the comment above the first; a section is explained by its own first key."""
    if lines[number].endswith(":"):
        return True
    indent = len(lines[number]) - len(lines[number].lstrip())
    for previous in reversed(lines[:number]):
        if not previous.strip():
            return False
        if previous.lstrip().startswith("#"):
            return True
        if len(previous) - len(previous.lstrip()) < indent and previous.rstrip().endswith(":"):
            return True
    return False


def test_configuration_and_help_import_no_torch():
    code = "import sys, offline_grpo.settings, offline_grpo.run.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_saved_configuration_reads_back_typed(tmp_path):
    from omegaconf import OmegaConf

    cfg = compose_config("train.lr=0.5")
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    again = typed(OmegaConf.load(tmp_path / "config.yaml"))
    assert again == typed(cfg)
    assert again.train.lr == 0.5

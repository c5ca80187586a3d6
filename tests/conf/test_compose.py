"""The YAML files: every option composes and builds, every key is explained, and composing needs no torch."""

import json
import pickle
import re
import subprocess
import sys
import textwrap
from itertools import groupby, zip_longest

import pytest
import yaml
from factories import CONF, compose_config, compose_with_hydra
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from offline_grpo.config.build import check_signature, resolve
from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.engine_spec import CLIENT_RUNTIME
from offline_grpo.config.problems import SOURCE_RUNTIME
from offline_grpo.settings import RunConfig

OPTIONS = sorted(
    (
        path.relative_to(CONF).with_suffix("")
        for path in CONF.rglob("*.yaml")
        if path.parent != CONF and not path.stem.startswith("_") and path.parent.name != "experiment"
    ),
    key=lambda option: (option.parent, option.name),
)
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
RUNTIME = dict.fromkeys([*CLIENT_RUNTIME, *SOURCE_RUNTIME, "output_dir"])


def overrides_for(option):
    group = str(option.parent)
    extra = {
        "model/hf": ["model.train_id=some/model"],
        "task/dataset": ["task.path=my.jsonl"],
        "task/agent": ["task.path=my.jsonl", "task.agent=my_agent:solve"],
        "task/environment": ["task.path=my.jsonl", "task.environment=my_env:Shop"],
        "task/openenv": ["task.openenv.url=http://127.0.0.1:8000"],
        "task/verifiers": ["task.verifiers.id=my_taskset"],
    }.get(str(option), [])
    return [f"{group}=[{option.name}]" if group == "logger" else f"{group}={option.name}", *extra]


def targets(node, key=""):
    """(key, node) of every `_target_` in a plain configuration."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from targets(child, f"{key}.{name}" if key else name)


@pytest.mark.slow
def test_every_option_composes_and_fits_its_component():
    """One of each group at a time: to compose takes long."""
    groups = [list(options) for _, options in groupby(OPTIONS, lambda option: option.parent)]
    for options in zip_longest(*groups):
        cfg = compose_config(*(word for option in options if option for word in overrides_for(option)))
        assert isinstance(typed(cfg), RunConfig), options
        for key, node in targets(as_plain(cfg)):
            if key != "generation":  # sampling settings share the group with the client's own: see config/plan.py
                others = (
                    "_target_",
                    {"rollouts": "record", "task": "assistant_prefix"}.get(key),
                )  # which the run reads
                settings = {name: value for name, value in node.items() if name not in others}
                check_signature(resolve(node, key), settings, key, given_at_runtime={} if key == "engine" else RUNTIME)


@pytest.mark.parametrize(
    "overrides",
    [
        "seed=3 generation=vllm_server +engine.args.x=1 +engine.env.A=b train/loss=dapo train.lr=0.5",
        "train.lr=0.5 model/lora=default model.lora.r=4 experiment=smoke logger=[json] ~task.format_weight "
        "eval.ks=[1,2] train.lr=2",
    ],
)
def test_the_tests_compose_as_hydra_does(overrides):
    composed = compose_config(*overrides.split())
    assert composed == compose_with_hydra(*overrides.split())
    with pytest.raises(ConfigCompositionException):
        compose_config(*overrides.split(), "train.none=1")


@pytest.mark.parametrize("model", ["qwen3_0_6b", "mistral", "qwen2_5_0_5b"])
def test_gsm8k_takes_any_model(model):
    config = typed(compose_config("experiment=gsm8k", f"model={model}"))
    assert config.model.train_id == yaml.safe_load((CONF / f"model/{model}.yaml").read_text())["train_id"]
    assert (config.train.lr, config.train.precision, config.eval.max_new_tokens) == (1e-6, "bf16", 1024)
    assert config.train.tokens_per_microbatch == 16384
    assert typed(compose_config("experiment=gsm8k", f"model={model}", "train.lr=2")).train.lr == 2


@pytest.mark.slow
def test_every_experiment_composes():
    for name in EXPERIMENTS:
        assert isinstance(typed(compose_config(f"experiment={name}")), RunConfig), name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", ("InProcess", None)),
        ("generation=vllm_server", ("SharedVllm", "VllmLauncher")),
        ("generation=sglang_server", ("Restart", "SglangLauncher")),
        ("generation=vllm_server weight_sync=reload", ("Reload", "VllmLauncher")),
        ("weight_sync=ipc generation=vllm_server", ("Ipc", "VllmLauncher")),
    ],
)
def test_a_server_brings_its_engine_and_its_sync(overrides, expected):
    cfg = compose_config(*overrides.split())
    engine = None if cfg.engine is None else cfg.engine._target_.rpartition(".")[2]
    assert (cfg.weight_sync._target_.rpartition(".")[2], engine) == expected


def test_every_key_has_a_comment_above_it():
    unexplained = []
    for path in CONF.rglob("*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            match = re.match(r"\s*([A-Za-z]\w*):", line)
            if match and match[1] not in ("defaults", "hydra"):
                above = [previous.strip() for previous in lines[:number] if previous.strip()]
                if not (above and above[-1].startswith("#")) and not is_explained_block(lines, number):
                    unexplained.append(f"{path.relative_to(CONF)}: {line.strip()}")
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


REFUSED_WITHOUT_TORCH = {
    "train.lr=-1": "train.lr=-1.0",
    "generation.top_p=2": "generation.top_p=2",
    "data.num_train_seeds=1000000000": "data.num_train_seeds=1000000000",
    "task.format_weight=x": "task.format_weight='x'",
    "rollouts.none=1": "rollouts.none",
    "+train.foo=1": "Key 'foo' not in 'TrainConfig'",
    'generation=vllm_server generation.base_url="http://a/?x=1"': "generation.base_url=http://a/?x=1",
}


def test_mistakes_in_settings_are_refused_without_torch():
    """Its import takes longer than all checks. In a process of its own, because this one has torch."""
    code = """
        import json, sys
        import hydra
        import offline_grpo.run, offline_grpo.commands.cli
        from offline_grpo.config import compose, parts
        compose.register()
        told = {}
        for words in json.loads(sys.argv[2]):
            with hydra.initialize_config_dir(config_dir=sys.argv[1], version_base="1.3"):
                try:
                    parts.make_plan(compose.typed(hydra.compose("config", overrides=words.split())))
                except Exception as error:
                    told[words] = str(error)
        print(json.dumps([told, sorted({"torch", "transformers", "matplotlib", "accelerate"} & set(sys.modules))]))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(CONF), json.dumps(list(REFUSED_WITHOUT_TORCH))]
    told, imported = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert imported == []
    assert told.keys() == REFUSED_WITHOUT_TORCH.keys()
    for words, message in REFUSED_WITHOUT_TORCH.items():
        assert message in told[words]


def test_a_configuration_can_be_pickled_and_read_back(tmp_path):
    """Launchers of sweeps send it to other processes."""
    cfg = compose_config("model/lora=default", "train.lr=0.5")
    assert typed(pickle.loads(pickle.dumps(cfg))) == typed(cfg)
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    again = typed(OmegaConf.load(tmp_path / "config.yaml"))
    assert again == typed(cfg)
    assert again.train.lr == 0.5

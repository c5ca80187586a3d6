"""What `--help` says, against the YAML files as PyYAML reads them."""

import re
import sys

import pytest
import yaml
from factories import CONF

from offline_grpo.commands.main import main
from offline_grpo.config.help import help_text
from offline_grpo.errors import ConfigError


def leaves(node, prefix):
    """Dotted names of the keys of a YAML file, but for those that are for Hydra."""
    for name, child in node.items():
        if name not in ("defaults", "hydra", "_target_"):
            if isinstance(child, dict) and child:
                yield from leaves(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"


@pytest.fixture(scope="module")
def text():
    return help_text(CONF)


def test_every_key_of_every_file_is_explained(text):
    lines = text.splitlines()
    for path in CONF.rglob("*.yaml"):
        group = path.parent.relative_to(CONF).as_posix()
        prefix = "" if group in (".", "experiment") else group.replace("/", ".") + "."
        for key in leaves(yaml.safe_load(path.read_text()), prefix):
            parents = [
                key.rsplit(".", count)[0] for count in range(key.count(".") + 1)
            ]  # a key of a mixture's weights is explained with them
            assert any(re.match(rf"  {re.escape(name)}(=|$)", line) for name in parents for line in lines), (
                f"{path}: {key}"
            )
    assert "  train.lr=3.0e-4\n      Peak learning rate.\n" in text


def test_it_fits_a_narrow_terminal_and_hides_what_files_include(text):
    assert max(len(line) for line in text.splitlines()) <= 80
    assert not re.search(r"[ =/]_(shared|lora|server|pausing)", text)


def test_the_default_options_are_marked(text):
    assert re.search(r"^  train/loss +cispo, dapo, dppo_kl, dppo_tv, dr_grpo, grpo\*, gspo, sapo$", text, re.MULTILINE)
    assert re.search(r"^  logger +console\*, json\*, tensorboard, wandb$", text, re.MULTILINE)


def test_words_choose_what_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_grpo.py", "--help", "checkpoint", "eval.ks", "train.lr=1"])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert {line.strip().partition("=")[0] for line in out.splitlines() if re.match(r"  \w+\.", line)} >= {
        "checkpoint.enabled",
        "eval.ks",
    }
    assert "train.lr" not in out
    assert "eval.seed_base" not in out
    with pytest.raises(ConfigError, match=r"^--help=nope: nothing is called so; --help alone lists all$"):
        help_text(CONF, ["nope"])

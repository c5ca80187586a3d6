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


def test_every_key_of_every_file_is_explained_and_defaults_are_marked():
    text = help_text([CONF])
    lines = text.splitlines()
    for path in CONF.rglob("*.yaml"):
        group = path.parent.relative_to(CONF).as_posix()
        prefix = "" if group in (".", "experiment") else group.replace("/", ".") + "."
        for key in leaves(yaml.safe_load(path.read_text()), prefix):
            # a key of a mixture's weights is explained with them
            parents = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
            is_there = any(re.match(rf"  {re.escape(name)}(=|$)", line) for name in parents for line in lines)
            assert is_there, f"{path}: {key}"
    assert "  train.lr=3.0e-4\n      Peak learning rate.\n" in text
    assert max(map(len, lines)) <= 80
    assert not re.search(r"[ =/]_(shared|lora|server|pausing)", text), "what files include is hidden"
    assert re.search(r"^  train/loss +cispo, dapo, dppo_kl, dppo_tv, dr_grpo, grpo\*, gspo, sapo$", text, re.MULTILINE)
    assert re.search(r"^  logger +console\*, json\*, tensorboard, wandb$", text, re.MULTILINE)


def test_words_choose_what_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_grpo.py", "--help", "checkpoint", "eval.ks", "train.lr=1"])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code in (0, None)
    found = {line.strip().partition("=")[0] for line in out.splitlines() if re.match(r"  \w+\.", line)}
    assert found >= {"checkpoint.enabled", "eval.ks"}
    assert "train.lr" not in out
    assert "eval.seed_base" not in out
    with pytest.raises(ConfigError, match=r"^--help=nope: "):
        help_text([CONF], ["nope"])


@pytest.mark.parametrize("added", ["--config-dir={}", "hydra.searchpath=['file://{}']"])
def test_folders_of_the_command_line_are_explained_too(added, tmp_path, monkeypatch, capsys):
    (tmp_path / "train" / "loss").mkdir(parents=True)
    (tmp_path / "train" / "loss" / "mine.yaml").write_text("defaults: [_shared]\n# A factor.\nfactor: 2\n")
    monkeypatch.setattr(sys, "argv", ["run_grpo.py", "--help", added.format(tmp_path), "train/loss"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert "\n  train.loss.factor=2\n      A factor.\n" in out
    assert "\ntrain/loss=gspo\n" in out

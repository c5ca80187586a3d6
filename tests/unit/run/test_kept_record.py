"""What `.hydra/` says after a start that did nothing: Hydra has written it before the settings are looked at."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from factories import compose_config

from offline_grpo.errors import ConfigError
from offline_grpo.run import going_on
from offline_grpo.run.going_on import kept_record
from offline_grpo.run.run_dir import RunDir


def write(run: Path, text: str) -> None:
    """As Hydra does."""
    (run / ".hydra").mkdir(exist_ok=True)
    for name in ("config.yaml", "overrides.yaml", "hydra.yaml"):
        (run / ".hydra" / name).write_text(text)


def texts(run: Path) -> set[str]:
    return {(run / ".hydra" / name).read_text() for name in ("config.yaml", "overrides.yaml", "hydra.yaml")}


def start(run: Path, text: str, *, is_refused: bool) -> None:
    write(run, text)
    with kept_record(run):
        if not is_refused:
            going_on.record(RunDir(run), compose_config(), [], None, None, {})


def test_only_a_start_that_goes_on_is_on_record(tmp_path: Path) -> None:
    start(tmp_path, "first", is_refused=True)
    assert texts(tmp_path) == {"first"}  # there is nothing else
    start(tmp_path, "second", is_refused=False)
    assert texts(tmp_path) == {"second"}
    start(tmp_path, "third", is_refused=True)
    assert texts(tmp_path) == {"second"}
    start(tmp_path, "fourth", is_refused=False)
    start(tmp_path, "fifth", is_refused=True)
    assert texts(tmp_path) == {"fourth"}


def test_a_disk_that_is_full_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, "first", is_refused=False)
    write(tmp_path, "second")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(going_on, "write_whole", full)
    with pytest.raises(ConfigError, match="refused"), kept_record(tmp_path):
        raise ConfigError("refused")
    assert texts(tmp_path) == {"second"}

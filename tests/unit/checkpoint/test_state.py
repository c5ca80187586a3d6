"""`trainer/state.json` holds what a run would write, or it is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, make_checkpoint, state_of

from offline_grpo.checkpoint.state import FILE, TrainerState, read_state
from offline_grpo.errors import CheckpointError
from offline_grpo.train.milestones import Watch
from offline_grpo.train.schedule import LrSchedule

STATE = state_of(3, milestones={"keep_best": Watch("pass@1", 0.5, 2, 0.4, 1)}, source={"queue": [1, 2.5, "x", None]})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "iter_003", STATE)
    assert read_state(folder) == STATE
    assert isinstance(read_state(folder).lr_schedule, LrSchedule)


def test_a_checkpoint_may_be_given_another_name(tmp_path: Path) -> None:
    assert read_state(make_checkpoint(tmp_path / "my_best", STATE)) == STATE


def changed(path: str, value: Any) -> str:
    record = json.loads(STATE.to_json())
    node, *names = record, *path.split(".")
    for name in names[:-1]:
        node = node[name]
    if value is KeyError:
        del node[names[-1]]
    else:
        node[names[-1]] = value
    return json.dumps(record)


WRONG = [
    *(("iteration", value) for value in (-5, 10**9, 10**400, 2, 3.0, True, "3", None, KeyError)),
    *(
        (f"counters.{name}", value)
        for name in ("num_updates", "num_refused", "num_refused_in_a_row")
        for value in (-1, 1.5, KeyError)
    ),
    *(
        ("counters.num_refused", 5),
        ("counters.num_refused_in_a_row", 1),
        ("counters.num_updates", 2**60),
        ("counters", []),
        ("counters.x", 1),
    ),
    *(
        ("schedule.version", 5),
        ("schedule.version", -1),
        ("schedule.num_skipped", -1),
        ("schedule", KeyError),
        ("schedule.version", KeyError),
    ),
    *(("lr_schedule.scale", value) for value in (float("nan"), float("inf"), -0.1, 1e30, "1", KeyError)),
    ("schedule.num_skipped", -1),
    *(
        ("lr_schedule.kind", "square"),
        ("lr_schedule.first", 5),
        ("lr_schedule.num_updates", -1),
        ("lr_schedule.warmup_steps", 2**60),
    ),
    *(
        ("milestones.keep_best.best_iteration", 4),
        ("milestones.keep_best.best", None),
        ("milestones.keep_best.best", float("nan")),
    ),
    *(("milestones.keep_best.num_since_best", -1), ("milestones.other", {"metric": "x"}), ("milestones", [])),
    *(
        ("source", [1]),
        ("source", KeyError),
        ("source.queue", float("-inf")),
        ("owes_evaluation", 0),
        ("new", 1),
        ("format", KeyError),
    ),
    *(
        ("config", {}),
        ("config", []),
        ("config.train.iterations", "many"),
        ("config.train.precision", "int3"),
        ("config.task._target_", 1),
    ),
    *(("config.train.stop_when.patience", -1), ("config.train.stop_when.more", 1), ("config.train", KeyError)),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda value: str(value)[:30])
def test_what_no_run_writes_is_refused_in_one_line(path: str, value: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "iter_003", STATE)
    (folder / FILE).write_text(changed(path, value))
    with pytest.raises(
        CheckpointError, match=r"resume=.*iter_003: (its trainer/state.json is damaged \(|written in format)"
    ) as caught:
        read_state(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 10**6,
        b'{"format": 4, "source": ' + b'{"a": ' * 10**5,
        b"9" * 10**5,
        b'"\\ud800"',
    ],
    ids=lambda content: str(content[:12]),
)
def test_what_is_no_json_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "iter_003", STATE)
    (folder / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its trainer/state.json is damaged \("):
        read_state(folder)


def test_a_run_does_not_write_it_either() -> None:
    with pytest.raises(ValueError, match="iteration has values that no run writes"):
        state_of(-1, config=config_of())
    assert TrainerState(**vars(STATE)) == STATE

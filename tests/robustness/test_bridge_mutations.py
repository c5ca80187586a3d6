"""Mutated bridge files against real shared memory: refused in one line, or the views are inside the memory and can be
read and written.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGES
from inside_vllm import SHAPES, FusedModel, make_worker

from offline_grpo.errors import EngineError
from offline_grpo.weight_sync.bridge import MAX_BYTES, Bridge

CPU = torch.device("cpu")
VALUES: list[Any] = [
    *(0, 1, -1, 2, 3, 8, 2**15, 2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**70, -(2**63), 10**4000),
    *(
        0.5,
        float("nan"),
        float("inf"),
        True,
        False,
        None,
        "",
        "1",
        "file",
        "cuda",
        "bfloat16",
        "float16",
        "float32",
        "/etc/passwd",
        "\ud800",
    ),
    *([], {}, [0], [[]], {"a": 1}, [2**40, 2**40]),
]


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    worker = make_worker(FusedModel())
    yield Bridge.from_worker("run-1", "some/model", worker.grpo_describe(), worker.grpo_export(), worker.grpo_layout())
    for file in getattr(worker, "_grpo_files", []):
        os.close(file)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value could be replaced."""
    if path:
        yield path
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from places(node[key], (*path, key))


def mutated(record: Any, rng: random.Random) -> Any:
    """With one to three values replaced, removed, repeated or exchanged."""
    for _ in range(rng.randint(1, 3)):
        *parents, key = rng.choice(list(places(record)))
        parent = record
        for name in parents:
            parent = parent[name]
        other = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        match rng.randrange(6):
            case 0:
                parent.pop(key)
            case 1 if isinstance(parent, list):
                parent.append(json.loads(json.dumps(parent[key])))
            case 2:
                parent[key], parent[other] = parent[other], parent[key]
            case 3 if isinstance(parent[key], int):
                parent[key] += rng.choice([-8, -1, 1, 2, 8, 64])
            case _:
                parent[key] = rng.choice(VALUES)
    return record


def attack(path: Path, bridge: Bridge, seeds: range) -> tuple[int, int]:
    """How many mutations were refused, and how many opened."""
    bridge.write(path)
    text = path.read_text()
    sizes = {handle.fd: os.fstat(handle.fd).st_size for handle in bridge.storages}
    lines, num_opened = [], 0
    for seed in seeds:
        rng = random.Random(seed)
        if seed % 5 == 0:
            path.write_text(text)
            DAMAGES[rng.choice(["cut short", "empty", "zeroed", "one bit", "a lost block", "doubled", "garbage"])](
                path, rng
            )
        else:
            path.write_text(json.dumps(mutated(json.loads(text), rng)))
        try:
            views = Bridge.read(path).open(CPU)
        except EngineError as error:
            lines.append(str(error))
            continue
        num_opened += 1
        for view in views.values():
            view.add_(1)  # every element is there, once
        assert {fd: os.fstat(fd).st_size for fd in sizes} == sizes, "memory was made larger"
    assert [line[-900:] for line in lines if "\n" in line or len(line) > 1000] == []
    return len(lines), num_opened


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 540), marks=pytest.mark.slow)], ids=["40", "500"])
def test_mutations_are_refused_or_harmless(seeds: range, bridge: Bridge, tmp_path: Path) -> None:
    refused, opened = attack(tmp_path / "bridge.json", bridge, seeds)
    assert refused > len(seeds) // 2
    assert opened > 0, "some mutations change nothing that matters"


@pytest.mark.parametrize("what", ["a pipe", "an endless device", "a folder", "a link to itself"])
def test_what_is_no_file_is_not_waited_for(what: str, bridge: Bridge, tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    bridge.write(path)
    DAMAGES[what](path, random.Random(0))
    with pytest.raises(EngineError, match=f"^{path}: no readable bridge file") as error:
        Bridge.read(path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_too_large_or_too_deep_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    path.touch()
    os.truncate(path, MAX_BYTES + 1)
    with pytest.raises(EngineError, match="more than 67108864 bytes"):
        Bridge.read(path)
    path.write_text("[" * 10**5)
    with pytest.raises(EngineError, match="no readable bridge file"):
        Bridge.read(path)


def test_a_file_of_another_user_is_refused(bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bridge.json"
    bridge.write(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        Bridge.read(path)  # root's are trusted
        os.chown(path, 12345, -1)
    with pytest.raises(EngineError, match=r"belongs to user \d+, who could lead the trainer into other memory"):
        Bridge.read(path)


def test_views_of_a_sound_file_are_those_of_the_model(bridge: Bridge, tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    bridge.write(path)
    assert {name: tuple(view.shape) for name, view in Bridge.read(path).open(CPU).items()} == SHAPES

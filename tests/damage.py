"""A dozen ways in which a file comes to harm."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], object]


def _replaced(content: Callable[[bytes, random.Random], bytes]) -> Damage:
    return lambda path, rng: path.write_bytes(content(path.read_bytes(), rng))


def _one_bit(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _block(content: bytes, rng: random.Random) -> bytes:
    """Zeros where a block of the disk was lost."""
    start = rng.randrange(len(content))
    length = min(len(content) - start, 512)
    return content[:start] + bytes(length) + content[start + length :]


def _instead(make: Callable[[Path], object]) -> Damage:
    def damage(path: Path, rng: random.Random) -> None:
        path.unlink()
        make(path)

    return damage


def _of_another(path: Path, rng: random.Random) -> None:
    """The largest file of the folder, under this name."""
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    shutil.copyfile(max(others, key=lambda other: other.stat().st_size), path)


DAMAGES: dict[str, Damage] = {
    "cut short": _replaced(lambda content, rng: content[: rng.randrange(len(content))]),
    "empty": _replaced(lambda content, rng: b""),
    "zeroed": _replaced(lambda content, rng: bytes(len(content))),
    "one bit": _replaced(_one_bit),
    "a lost block": _replaced(_block),
    "doubled": _replaced(lambda content, rng: content * 2),
    "garbage": _replaced(lambda content, rng: rng.randbytes(len(content))),
    "another file": _of_another,
    "a folder": _instead(lambda path: path.mkdir()),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a pipe": _instead(os.mkfifo),
    "an endless device": _instead(lambda path: path.symlink_to("/dev/zero")),
}
"""A dozen; each changes the file for certain, unless it changes nothing that matters."""

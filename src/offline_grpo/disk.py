"""Reads files that somebody else may have put in place: whatever they hold, reading ends, and ends with a value or one line."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; a link to one counts.

    Raises:
        OSError: there is none, or the path is a folder, a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_regular`, or the file is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", str(path))
    return content


def parse_json(cls: type[T], content: bytes) -> T:
    """A dataclass (or another type that pydantic knows) from JSON. Its attribute `__pydantic_config__` says how strictly.

    Raises:
        ValueError: what is wrong, in one line: no JSON, too deep, NaN or infinity anywhere, or a field that does not fit its type.
    """
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import from_json

    from_json(content, allow_inf_nan=False)  # for the parts that are typed as anything
    try:
        return TypeAdapter(cls).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        value = "" if first["type"] == "missing" else f"={str(first['input'])[:60]!r}"
        raise ValueError(f"{where}{value}: {first['msg']}") from error

"""Pictures of rows, in every form in which data sets have them: a file's bytes, a path, `{bytes, path}` of the Hub, an
image of PIL, a data URL.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.types import Message, Picture, Problem

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
PLACE = "<image>"
"""In a prompt of plain text, where a picture stands."""


def picture_of(value: object, folder: Path) -> Picture:
    """The picture that a cell or a part of a message has; paths are relative to `folder`. Raises ValueError or OSError
    for anything else.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, Image.Image):
        file, upright = BytesIO(), ImageOps.exif_transpose(value)
        (upright if upright.mode in PNG_MODES else upright.convert("RGB")).save(file, "PNG")
        return Picture(file.getvalue())
    if isinstance(value, str) and (found := re.match("data:[^,]*;base64,", value)):
        return Picture(b64decode(value[found.end() :], validate=True))
    if isinstance(value, str) and re.match("https?://", value):
        raise ValueError(f"{value:.80} is on the network; download it, and give its path")
    if not isinstance(value, (str, bytes)):
        raise ValueError("a picture is the bytes of a file, or its path")
    return Picture(value if isinstance(value, bytes) else (folder / value).expanduser().read_bytes())


def with_pictures(
    messages: Sequence[Message], column: Sequence[object], folder: Path
) -> tuple[list[Message], tuple[Picture, ...]]:
    """Messages whose parts are texts and places of pictures, and all pictures in the order of those.

    A part that has no picture of its own gets the next one of the row's column. Where there is no such part, the
    pictures of the column stand where the last message says `<image>`, if it does so as often, and else before it.

    Raises ValueError or OSError for what is no picture, and where there are more or fewer pictures than places.
    """
    # 1. Places for the pictures of the column.
    placed, last = [*messages], messages[-1]
    parts = [part for each in messages if isinstance(each["content"], list) for part in each["content"]]
    if column and not any(part["type"] == "image" and "image" not in part for part in parts):
        words, places = last["content"], [{"type": "image"}] * len(column)
        if isinstance(words, list):
            content = [*places, *words]
        else:
            has_places = words.count(PLACE) == len(column)
            texts = words.split(PLACE) if has_places else [*[""] * len(column), words]
            content = [{"type": "text", "text": texts[0]}]
            for place, text in zip(places, texts[1:], strict=True):
                content += [place, {"type": "text", "text": text}]
        placed[-1] = {**last, "content": [part for part in content if part.get("text") != ""]}

    # 2. The pictures, in the order of their places.
    waiting, found = iter(column), list[Picture]()
    for number, each in enumerate(placed):
        if not isinstance(each["content"], list):
            continue
        content = list[Mapping[str, Any]]()
        for part in each["content"]:
            if part["type"] == "text":
                content.append({"type": "text", "text": part["text"]})
                continue
            if part["type"] not in ("image", "image_url"):
                raise ValueError(f"a part of the type {part['type']!r}; there are text, image and image_url")
            value = part.get("image", part.get("image_url"))
            value = next(waiting, None) if value is None else value
            if value is None:
                raise ValueError(f"more places for pictures than the {len(column)} pictures of the column")
            found.append(picture_of(value, folder))
            content.append({"type": "image"})
        placed[number] = {**each, "content": content}
    if next(waiting, None) is not None:
        raise ValueError(f"fewer places for pictures than the {len(column)} pictures of the column")
    return placed, tuple(found)


def shown(problem: Problem) -> list[dict[str, Any]]:
    """The messages of a problem, whose pictures are in their places: the messages of a client of OpenAI's API."""
    pictures, messages = iter(problem.pictures), list[dict[str, Any]]()
    for message in problem.messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = [part if part["type"] == "text" else url_part(next(pictures).data) for part in content]
        messages.append({**message, "content": content})
    return messages


def url_part(data: bytes) -> dict[str, Any]:
    """A file of a picture as a part of a message of OpenAI's API."""
    return {"type": "image_url", "image_url": {"url": f"data:image/*;base64,{b64encode(data).decode()}"}}


def check_pictures(pictures: Iterable[tuple[str, Picture]]) -> None:
    """Raise ConfigError, with the place that is given, for the first picture that is no whole image."""

    def fault(pair: tuple[str, Picture]) -> str | None:
        try:
            image = Image.open(BytesIO(pair[1].data))
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = reason_of(error).partition(" <_io")[0]
            return f"{pair[0]} a picture of {len(pair[1].data):,} bytes is no whole image ({reason})"
        is_deep = image.mode.startswith(("I", "F"))  # what is brighter than 255 would be white
        return f"{pair[0]} a picture has more than 8 bits per channel; save it with 8" if is_deep else None

    with ThreadPoolExecutor() as threads:  # decoders run without Python's lock
        for found in threads.map(fault, pictures):
            if found is not None:
                raise ConfigError(found)

"""Sums whose numbers are pictures: a task without downloads, for models that see."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from string import Formatter
from typing import Annotated

from PIL import Image, ImageDraw, ImageFont

from offline_grpo.settings import Range
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.types import Picture, Problem

HEIGHTS, SHIFT = (0.6, 0.75), 0.1
"""Of the font, and how far from the middle, as shares of the picture's size: two digits of the largest just fit."""
PAPER, INK = (160, 255), (0, 95)
"""Grey levels."""


@dataclass(frozen=True)
class PictureSums(Arithmetic):
    """The problems, splits and rewards of Arithmetic, where the prompt's {a} and {b} are pictures of the numbers, each
    drawn in its own size, place and greys. The field `shown` is the sum as text, `17+25=`.
    """

    # all pictures are drawn at the start
    max_operand: Annotated[int, Range("must be from 1 to 99", lambda value: 1 <= value <= 99)]
    picture_size: Annotated[int, Range("must be from 12 to 1024 pixels", lambda value: 12 <= value <= 1024)]

    def _problem(self, a: int, op: str, b: int) -> Problem:
        problem = super()._problem(a, op, b)
        parts: list[dict[str, str]] = []
        pictures: list[Picture] = []
        for text, name, _, _ in Formatter().parse(self.prompt_template.replace("{op}", op)):
            parts += [{"type": "text", "text": text}] if text else []
            if name is not None:
                rng = random.Random(f"{problem.problem_id} {len(pictures)}")
                pictures.append(Picture(draw_number(str({"a": a, "b": b}[name]), self.picture_size, rng)))
                parts.append({"type": "image"})
        fields = {"shown": f"{problem.problem_id}="}
        return replace(problem, messages=({"role": "user", "content": parts},), fields=fields, pictures=tuple(pictures))


def draw_number(text: str, size: int, rng: random.Random) -> bytes:
    """A PNG of `size` x `size` pixels."""
    font = _font(round(size * rng.uniform(*HEIGHTS)))
    image = Image.new("L", (size, size), rng.randint(*PAPER))
    x, y = (size * (0.5 + rng.uniform(-SHIFT, SHIFT)) for _ in range(2))
    ImageDraw.Draw(image).text((x, y), text, fill=rng.randint(*INK), font=font, anchor="mm")
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@cache
def _font(height: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(height)

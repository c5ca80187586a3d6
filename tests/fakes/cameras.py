"""Pictures, and an environment that shows some; without torch, which each of its processes would import."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from offline_grpo.types import Picture


def picture(seed: int, width: int, height: int) -> Picture:
    """Random squares of 8 pixels."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    file = BytesIO()
    Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)[:height, :width]).save(file, "PNG")
    return Picture(file.getvalue())


class Camera:
    """Shows a picture in the row, one when it begins, and another one after each reply."""

    def reset(self, number: int, **row: Any) -> Any:
        self.number, self.turns = number, 0
        return ["See: ", Image.open(BytesIO(picture(100 * number, 24, 24).data))]

    def respond(self, text: str) -> Any:
        self.turns += 1
        shown = picture(100 * self.number + self.turns, 16 * self.turns, 24)
        return None if self.turns == 3 else Image.open(BytesIO(shown.data))

    def get_reward(self) -> float:
        return float(self.turns + self.number % 2)

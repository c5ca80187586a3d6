import random
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.task.picture_sums import PictureSums, draw_number
from offline_grpo.task.problems import near_duplicates, prompt_key
from offline_grpo.types import Split

SETTINGS: dict[str, Any] = {"max_operand": 9, "operations": ["+", "-"], "eval_frac": 0.2, "format_weight": 0.1}


def make(prompt_template="What is {a} {op} {b}?", **settings):
    return PictureSums(**{**SETTINGS, "picture_size": 24, "prompt_template": prompt_template, **settings})


def pixels(data):
    return np.asarray(Image.open(BytesIO(data)), dtype=float)


def test_they_are_the_problems_of_arithmetic_with_pictures():
    text = Arithmetic(**SETTINGS, prompt_template="What is {a} {op} {b}?")
    for split in Split:
        asked = [(p.problem_id, p.answer, p.fields["shown"]) for p in make().problems(split)]
        assert asked == [(p.problem_id, p.answer, f"{p.problem_id}=") for p in text.problems(split)]
    problem = next(p for p in make().problems(Split.TRAIN) if p.problem_id == "7-2")
    words = [{"type": "text", "text": "What is "}, {"type": "text", "text": " - "}, {"type": "text", "text": "?"}]
    image = {"type": "image"}
    assert problem.messages == ({"role": "user", "content": [words[0], image, words[1], image, words[2]]},)
    assert make().score(problem, "7-2=5").is_correct


def test_pictures_stand_in_the_template_s_order():
    """The second number is drawn first where the template says so: each picture is most like one of its number."""
    for template in ("{a}{op}{b}=", "{b} less than {a}: {op}"):
        problem = next(p for p in make(template).problems(Split.TRAIN) if p.problem_id == "7-2")
        samples = [(n, pixels(draw_number(n, 24, random.Random(i)))) for n in "27" for i in range(500)]
        best = ""
        for picture in problem.pictures:
            seen = pixels(picture.data).ravel()
            best += max(samples, key=lambda sample, seen=seen: np.corrcoef(seen, sample[1].ravel())[0, 1])[0]
        assert best == ("72" if template.startswith("{a}") else "27")


@pytest.mark.parametrize("size", [12, 16, 64])
def test_a_number_lies_inside_its_picture_and_none_looks_like_another(size):
    for number in ("0", "88", "99"):
        image = pixels(draw_number(number, size, random.Random(1)))
        assert image.shape == (size, size)
        assert np.ptp(image) > 40
        assert np.ptp(np.concatenate([image[0], image[-1]])) == 0
    assert draw_number("42", size, random.Random(3)) == draw_number("42", size, random.Random(3))
    assert draw_number("42", size, random.Random(3)) != draw_number("42", size, random.Random(4))


def test_problems_with_other_pictures_ask_something_else():
    """Their messages are the same; otherwise all of them would be taken for copies of those held out."""
    train, held_out = make().problems(Split.TRAIN), make().problems(Split.EVAL)
    keys = [prompt_key(p) for p in (*train, *held_out)]
    assert len(set(keys)) == len(keys) == 200
    assert near_duplicates(train, held_out) == []

"""A model with random weights, problems and a reward for `offline_grpo.compare` on a machine without the Hub.

    python benchmarks/random_model.py FOLDER [--shape small]        # also the shapes of shapes.py, such as 0.6b
    python -m offline_grpo.compare model=hf model.train_id=FOLDER/model task=dataset task.path=FOLDER/problems.jsonl \\
        task.reward=benchmarks.random_model:sevens ...

Every token of the vocabulary has a text. The model hardly ever draws the end-of-sequence token, so that all modes
sample the same number of tokens. The reward differs between completions, and training can raise it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

PICTURE_SIZE = 448
"""Pixels, of problems for a model that sees."""


def sevens(completion: str) -> float:
    """The share of sevens among the characters of a completion, times ten."""
    return 10 * completion.count("7") / max(len(completion), 1)


def save(folder: Path, shape: str, dtype: str) -> None:
    """Write `folder`/model and `folder`/problems.jsonl, which has `images` if the model sees."""
    from shapes import SIZES, save_model
    from tokenizers.models import WordLevel

    from offline_grpo.model.layers import is_composite
    from offline_grpo.model.load import load_tokenizer
    from offline_grpo.task.picture_sums import draw_number

    folder.mkdir(parents=True, exist_ok=True)
    model = save_model(folder / "model", shape, dtype)
    tokenizer: Any = load_tokenizer(str(model))  # of characters, fewer than the model has tokens
    characters = tokenizer.get_vocab()
    words = {f" {i}": i for i in range(len(characters), SIZES[shape].get_text_config().vocab_size)}
    tokenizer.backend_tokenizer.model = WordLevel(characters | words, unk_token="<unk>")
    tokenizer.save_pretrained(str(model))
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(10)]
    if is_composite(SIZES[shape]):  # each has a picture of its own
        (folder / "images").mkdir()
        for number, row in enumerate(rows):
            row["images"] = f"images/{number}.png"
            (folder / row["images"]).write_bytes(draw_number(row["answer"], PICTURE_SIZE, random.Random(number)))
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    from shapes import SIZES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=list(SIZES), default="qwen2_5_0_5b")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    save(arguments.folder, arguments.shape, arguments.dtype)


if __name__ == "__main__":
    main()

import json
from io import StringIO

import pytest
from factories import make_group
from rich.console import Console

from offline_grpo.logger.samples import Samples, chosen, print_samples, record

STRANGE = "\ud800 \x1b[2J [bold]\u202e\r\n\tö 中文 :smile:" + "x" * 1000
GROUPS = [
    make_group(("a", 0.5), ("b", 0.5)),
    make_group(("c", 0.0), ("d", 1.0), ("e", 0.2)),
    make_group((STRANGE, 1.0), ("g", 0.0)),
]
ADVANTAGES = [[0.0, 0.0], [-1.0, 2.0, -0.5], [1.0, -1.0]]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, ["d"]),  # the best of the first problem whose rewards differ
        (3, ["d", "c", STRANGE]),
        (None, ["a", "b", "c", "d", "e", STRANGE, "g"]),
    ],
)
def test_the_best_and_the_worst_of_the_first_problems(count, expected):
    picked = chosen(GROUPS, ADVANTAGES, count)
    assert [sample["completion"] for sample in picked] == expected
    assert picked[0]["advantage"] == (0.0 if count is None else 2.0)


def test_files_are_read_back(tmp_path):
    samples = Samples(output_dir=tmp_path, per_iteration="all", on_console=0)
    samples.rollouts("train", GROUPS, advantages=ADVANTAGES, iteration=7)
    samples.rollouts("eval", GROUPS[:1], advantages=None, iteration=-1)
    samples.rollouts("eval", GROUPS[:1], advantages=None, iteration=7)
    names = {path.name for path in (tmp_path / "samples").iterdir()}
    assert names == {"iter_007.jsonl", "eval_init.jsonl", "eval_iter_007.jsonl"}
    content = (tmp_path / "samples" / "iter_007.jsonl").read_bytes()
    lines = [json.loads(line) for line in content.decode("utf-8").split("\n")[:-1]]
    assert [line["completion"] for line in lines] == ["a", "b", "c", "d", "e", STRANGE, "g"]
    assert "中文" in content.decode("utf-8")  # a person can read it
    assert lines[3] == (
        {"problem_id": "p", "prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "completion": "d"}
        | {"reward": 1.0, "parts": {"correct": 1.0}, "advantage": 2.0, "is_correct": True, "finish_reason": "stop"}
        | {"num_tokens": 1, "iteration": 7}
    )
    samples.rollouts("train", GROUPS, advantages=ADVANTAGES, iteration=7)
    assert (tmp_path / "samples" / "iter_007.jsonl").read_bytes() == content


def test_no_text_garbles_the_console():
    output = StringIO()
    console = Console(file=output, width=80, force_terminal=False)
    print_samples(console, [record(GROUPS[2], GROUPS[2].rollouts[0], None)], "before training")
    lines = output.getvalue().splitlines()
    assert lines[0] == "sample 1/1 before training | correct | reward 1.000"
    assert lines[1].split() == ["prompt", "2+2="]
    assert lines[2].rstrip() == r"  wrote   \ud800 \x1b[2J [bold]\u202e\r\n\tö 中文"
    assert lines[3].strip().startswith(":smile:xxx")
    assert max(map(len, lines)) <= 80
    output.getvalue().encode()

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.task.answers import is_same_number, last_boxed, last_number
from offline_grpo.task.dataset import Dataset
from offline_grpo.types import Problem, Split

ROWS = [
    {"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
    for i in range(10)
]


def make_gsm8k(path: Path | str, **values) -> Dataset:
    defaults = {
        "name": "main",
        "train_split": "train",
        "eval_split": "test",
        "system_prompt": None,
        "prompt_template": "{question}",
        "format_weight": 0.1,
        "eval_frac": 0.1,
        "prompt_field": "question",
        "answer_field": "answer",
        "answer_kind": "auto",
        "reward": None,
        "correct_threshold": 1.0,
    }
    return Dataset(path=str(path), **(defaults | values))


def write_jsonl(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(file: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def score(gold: str, text: str, format_weight: float = 0.1):
    return make_gsm8k("unused/unused", format_weight=format_weight).score(Problem("p", (), gold), text)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("72", r"48 + 24 = 72, so \boxed{72}."),
        ("72", r"\boxed{72.0}"),
        ("72", r"\boxed{$72}"),
        ("72", r"\boxed{\$72}"),
        ("72", r"\boxed{72 \text{ dollars}}"),
        ("72", r"\boxed{72 dollars}"),
        ("72", r"\boxed{72\%}"),
        ("72", r"\boxed{72.}"),
        ("72", r"\boxed{x = 72}"),
        ("72", r"\boxed{\text{Total} = 72}"),
        ("72", r"\boxed{48 + 24 = 72}"),
        ("72", r"\boxed{(72)}"),
        ("72", r"\boxed{\mathbf{72}}"),
        ("72", r"\boxed{\boxed{72}}"),
        ("72", r"First \boxed{24}, then \boxed{72}"),
        ("1,234", r"\boxed{1234}"),
        ("1234", r"\boxed{1,234}"),
        ("1234", r"\boxed{1{,}234}"),
        ("1234", r"\boxed{1\,234}"),
        ("0.5", r"\boxed{\frac{1}{2}}"),
        ("0.5", r"\boxed{1/2}"),
        ("2.5", r"\boxed{2\frac{1}{2}}"),
        ("-5", r"\boxed{-5}"),
        ("-5", "\\boxed{\N{MINUS SIGN}5}"),
        ("12.50", r"\boxed{12.5}"),
        ("0", r"\boxed{0}"),
        # Without a box, the last number.
        ("1,234", "1,234"),
        ("72", "Half of 48 is 24, and 48 + 24 makes $72."),
        ("72", "**72**"),
        ("72", "She has 72 m2."),
        ("-3", "The answer is -3"),
        ("3", "8-3"),
    ],
)
def test_equal_answers_are_right(gold, text):
    result = score(gold, text)
    assert result.is_correct
    assert result.parts == {"correct": 1.0, "format": 0.1 if "boxed" in text else 0.0}
    assert result.reward == pytest.approx(1.1 if "boxed" in text else 1.0)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("72", r"\boxed{71}"),
        ("72", r"\boxed{72.5}"),
        ("72", r"\boxed{-72}"),
        ("72", r"\boxed{720}"),
        ("72", r"\boxed{72,000}"),
        ("72", r"\boxed{70,72}"),
        ("72", r"\boxed{72 or 73}"),
        ("72", r"First \boxed{72}, then \boxed{24}"),
        ("72", r"72, or rather \boxed{24}"),
        ("72", r"\boxed{\text{seventy-two}}"),
        ("72", "\\boxed{\u0667\u0662}"),
        ("72", r"\boxed{x}"),
        ("72", r"\boxed{1/0}"),
        ("0", r"\boxed{0/0}"),
        ("72", "72 apples and 3 pears"),
        ("72", "seventy-two"),
        ("72", ""),
        ("72", "72" + "0" * 5000),
        ("72", r"\boxed{" + "9" * 100_000 + "}"),
    ],
)
def test_other_answers_are_wrong(gold, text):
    result = score(gold, text)
    assert not result.is_correct
    assert result.reward == result.parts["format"] == (0.1 if "boxed" in text else 0.0)


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{\frac{1}{2}} and \boxed {3}.") == "3"
    assert last_boxed(r"\boxed{\frac{1}{2}} {") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} \boxed{2") is None
    assert last_boxed("boxed{1}") is None


def test_last_number():
    assert last_number("1 then 2,345.60.") == "2,345.60"
    assert last_number("5-3") == "3"
    assert last_number("x = -3") == "-3"
    assert last_number("Python3") is None
    assert last_number("\N{MINUS SIGN}3") == "-3"
    assert last_number("-$1,234.5") == "-1,234.5"
    assert last_number(r"-\$3") == "-3"
    assert last_number("$10-$3") == "3"
    assert last_number("it is -.5") == "-0.5"
    assert last_number("$.50.") == "0.50"
    assert last_number("x-.5") == "0.5"
    assert last_number("It is done.5") is None
    assert last_number("(7).5") == "7"
    assert last_number("version 1.2.3") == "1.2"
    assert last_number("7 .2.3") == "7"


HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "9* *9* *9",
    "99999999!",
    "1E9999999999",
    "\\binom{99999999}{44444444}",
    "\\sum_{i=1}^{10^9} i",
    "(" * 30 + "1" + ")" * 30,
    "{" * 30 + "1" + "}" * 30,
    "1/11/1/1/111/111111/1/1/11/11111/1/11/1/1/1/1",
    "\\frac{1}{" * 12 + "2" + "}" * 12,
    "-" * 79 + "1",
    "1" * 79,
]


def test_hostile_answers_neither_hang_nor_raise():
    wrong = []
    # A daemon thread, so that a hang fails this test instead of stopping all tests.
    thread = threading.Thread(
        target=lambda: wrong.extend(not is_same_number("72", answer) for answer in HOSTILE), daemon=True
    )
    thread.start()
    thread.join(timeout=30)
    assert wrong == [True] * len(HOSTILE)


def test_scoring_never_raises():
    rng = random.Random(1)
    marks = [
        "\\boxed{",
        "\\frac",
        "\\",
        "72",
        "\N{FULLWIDTH DIGIT ONE}",
        "\N{ARABIC-INDIC DIGIT THREE}",
        "\ud800",
        "\0",
    ]
    pieces = [*marks, *"{}(),.-=/*^$%x "]
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 12))) for _ in range(500)]
    texts += [f"\\boxed{{{text}}}" for text in texts]
    for text in texts:
        result = score("72", text)
        assert result.reward == sum(result.parts.values())


def test_import_is_light():
    code = "import sys, offline_grpo.task.dataset; print({'math_verify', 'datasets', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_folder_of_jsonl(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:7])
    write_jsonl(tmp_path / "test.jsonl", ROWS[7:])
    task = make_gsm8k(tmp_path, system_prompt="Think.", prompt_template="Q: {question} Use \\boxed{}.")
    train, evaluation = task.problems(Split.TRAIN), task.problems(Split.EVAL)
    assert [p.problem_id for p in train] == [f"train-{i}" for i in range(7)]
    assert [p.answer for p in evaluation] == ["14", "16", "18"]
    assert evaluation[0].problem_id == "eval-0"
    assert train[2].messages == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "Q: What is 2 + 2? Use \\boxed{}."},
    )
    assert task.problems(Split.TRAIN) is train


def test_single_file_is_split_by_slices(tmp_path):
    for file in (write_jsonl(tmp_path / "all.jsonl", ROWS), write_parquet(tmp_path / "all.parquet", ROWS)):
        task = make_gsm8k(file, train_split="train[:-3]", eval_split="train[-3:]")
        assert [p.answer for p in task.problems(Split.TRAIN)] == ["0", "2", "4", "6", "8", "10", "12"]
        assert [p.problem_id for p in task.problems(Split.EVAL)] == ["eval-7", "eval-8", "eval-9"]


def test_copy_of_a_hub_repository(tmp_path):
    (tmp_path / "main").mkdir()
    write_parquet(tmp_path / "main" / "train-00001-of-00002.parquet", ROWS[4:8])
    write_parquet(tmp_path / "main" / "train-00000-of-00002.parquet", ROWS[:4])
    write_parquet(tmp_path / "main" / "test-00000-of-00001.parquet", ROWS[8:])
    task = make_gsm8k(tmp_path)
    assert [p.answer for p in task.problems(Split.TRAIN)] == [str(2 * i) for i in range(8)]
    assert [p.answer for p in task.problems(Split.EVAL)] == ["16", "18"]


GOOD_LINE = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("line", "reason", "shown"),
    [
        (b'{"question": "q", "answer": ', "not valid JSON", '{"question": "q", "answer":'),
        (b"\xff\xfe", "not valid JSON", "\N{REPLACEMENT CHARACTER}"),
        (b"[1, 2]", "not a JSON object", "[1, 2]"),
        (b'{"question": "why", "answer": "so #### "}', "no final answer in the field 'answer'", "so ####"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, reason, shown):
    file = tmp_path / "train.jsonl"
    file.write_bytes(GOOD_LINE.encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ConfigError) as error:
        make_gsm8k(file, eval_split="train[:1]").problems(Split.TRAIN)
    message = str(error.value)
    assert f"task.path: {file}, line 3," in message
    assert reason in message
    assert shown in message
    assert len(message) < len(str(file)) + 500


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "data.txt").write_text("question,answer")
    (tmp_path / "empty.jsonl").write_text("\n")
    write_jsonl(tmp_path / "all.jsonl", ROWS)
    splits = {"eval_split": "train"}
    for path, values, message in [
        ("data.txt", splits, "must be a file of the kind .jsonl, .json, .csv, .parquet"),
        ("empty.jsonl", splits, "has no rows for"),
        ("missing.jsonl", splits, "does not exist"),
        ("no_such_folder", splits, "does not exist"),
        ("", splits, "none of train.jsonl"),
        ("all.jsonl", {}, r"task.eval_split=test, but .* is a single file"),
        ("all.jsonl", {"eval_split": "train[10:]"}, r"task.eval_split=train\[10:\] selects none of the 10 rows"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_gsm8k(tmp_path / path, **values).problems(Split.TRAIN)


def test_offline_without_a_local_path_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    task = make_gsm8k("nobody/no-such-data-set")  # construction alone reads nothing
    with pytest.raises(
        ConfigError,
        match=r"task.path=nobody/no-such-data-set is not a local file or folder.*\.jsonl, \.json, \.csv, \.parquet",
    ):
        task.problems(Split.TRAIN)


@pytest.mark.parametrize(
    "values",
    [
        {"path": " "},
        {"train_split": "train[10%:]"},
        {"train_split": "train[:5"},
        {"eval_split": ""},
        {"eval_split": "../test"},
        {"system_prompt": ""},
        {"prompt_template": "no place for it"},
        {"format_weight": -0.1},
    ],
)
def test_bad_values_are_refused(values):
    (key,) = values
    with pytest.raises(ConfigError, match=f"task.{key}"):
        make_gsm8k(**({"path": "openai/gsm8k"} | values))

"""Data sets as other people write them."""

import json
import logging
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from types import SimpleNamespace

import datasets
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from factories import compose_config

from offline_grpo.errors import ConfigError
from offline_grpo.run.build import build
from offline_grpo.run.config import as_plain, typed
from offline_grpo.run.describe import describe_data
from offline_grpo.run.task_data import task_data
from offline_grpo.task.answers import is_same_latex, is_same_number, is_same_value
from offline_grpo.task.dataset import is_right
from offline_grpo.types import Split

ROWS = [{"prompt": f"What is {i} + {i}?", "answer": 2 * i, "level": i % 3} for i in range(40)]


def make(path, **settings):
    node = as_plain(compose_config("task=dataset", f"task.path='{path}'").task)
    return build({**node, **settings}, key="task")


def write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_json(file, rows):
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    return file


def write_csv(file, rows):
    pandas.DataFrame(rows).to_csv(file)
    return file


def write_parquet(file, rows):
    pandas.DataFrame(rows).to_parquet(file)
    return file


WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_one_file_just_works(tmp_path, suffix):
    task = make(WRITERS[suffix](tmp_path / f"my{suffix}", ROWS))
    train, held_out = task.problems(Split.TRAIN), task.problems(Split.EVAL)
    assert (len(train), len(held_out)) == (36, 4)
    rows = {
        problem.messages[0]["content"]: (problem.answer, str(problem.fields["level"]))
        for problem in (*train, *held_out)
    }
    assert rows == {row["prompt"]: (str(row["answer"]), str(row["level"])) for row in ROWS}


def test_held_out_rows_do_not_depend_on_their_order(tmp_path):
    first = make(write_jsonl(tmp_path / "a.jsonl", ROWS))
    turned = make(write_jsonl(tmp_path / "b.jsonl", ROWS[::-1] + ROWS[:5]))
    prompts = [
        {problem.messages for problem in map(str_messages, task.problems(Split.EVAL))} for task in (first, turned)
    ]
    assert prompts[0] == prompts[1]
    both = [{str_messages(p).messages for p in turned.problems(split)} for split in Split]
    assert not both[0] & both[1]  # rows with the same prompt are on the same side


OLD_SPLIT = ["train-1", "train-13", "train-29", "train-35"]


@pytest.mark.parametrize("settings", [{}, {"system_prompt": "Think."}, {"prompt_template": "{prompt} Answer:"}])
def test_held_out_rows_do_not_depend_on_settings(tmp_path, settings):
    """A run with another system prompt or template would otherwise be evaluated on what an earlier one has trained
    on."""
    task = make(write_jsonl(tmp_path / "my.jsonl", ROWS), **settings)
    assert [problem.problem_id for problem in task.problems(Split.EVAL)] == OLD_SPLIT


def test_a_held_out_prompt_is_asked_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    task = make(write_jsonl(tmp_path / "my.jsonl", ROWS + [ROWS[1]] * 50 + [ROWS[0]]))
    assert [problem.problem_id for problem in task.problems(Split.EVAL)] == OLD_SPLIT
    trained = Counter(problem.messages[0]["content"] for problem in task.problems(Split.TRAIN))
    assert trained[ROWS[1]["prompt"]] == 0
    assert trained[ROWS[0]["prompt"]] == 2
    assert "held out: 4 of 91 rows" in caplog.text
    assert "left out, of training too: 50 copies of prompts that are held out" in caplog.text


def str_messages(problem):
    return SimpleNamespace(messages=str(problem.messages))


def test_a_split_for_evaluation_is_found(tmp_path):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", ROWS[:30])
    write_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", ROWS[30:])
    task = make(tmp_path)
    assert [len(task.problems(split)) for split in (Split.TRAIN, Split.EVAL)] == [30, 10]


def test_a_hub_data_set_is_asked_for_its_splits(monkeypatch):
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name: ["train", "validation", "test"])
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda path, name, split: datasets.Dataset.from_list(ROWS[:30] if split == "train" else ROWS[30:]),
    )
    task = make("somebody/numbers")
    assert [problem.answer for problem in task.problems(Split.EVAL)] == [str(row["answer"]) for row in ROWS[30:]]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name: ["train"])
    assert len(make("somebody/numbers").problems(Split.EVAL)) == 3


def test_chat_messages_as_pyarrow_writes_them(tmp_path):
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    rows = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "2+2?"}],
    ]
    table = pyarrow.table({"prompt": pyarrow.array(rows, pyarrow.list_(message)), "answer": pyarrow.array([2.0, 4.0])})
    pyarrow.parquet.write_table(table, tmp_path / "chats.parquet")
    task = make(tmp_path / "chats.parquet", eval_split="train[1:]")
    first, second = task.problems(Split.TRAIN)
    assert [dict(m) for m in first.messages] == rows[0]
    assert [dict(m) for m in second.messages] == rows[1]
    assert (first.answer, second.answer) == ("2", "4")  # whole numbers, though the column is of floats
    with pytest.raises(ConfigError, match=r"task.system_prompt='Think.': .*row 1, has a system message of its own"):
        make(tmp_path / "chats.parquet", system_prompt="Think.").problems(Split.TRAIN)
    with pytest.raises(ConfigError, match=r"task.prompt_template=.*lists of messages; set it to null"):
        make(tmp_path / "chats.parquet", prompt_template="Q: {prompt}").problems(Split.TRAIN)


REFUSED = [
    (
        '{"prompt": "q", "solution": "1"}',
        {},
        "task.answer_field=answer: .*line 1, has no such field; it has prompt, solution",
    ),
    ('{"question": "q", "answer": "1"}', {}, "task.prompt_field=prompt: .* it has question, answer"),
    ('{"prompt": "q", "answer": null}', {}, "no text in the field 'answer'"),
    ('{"prompt": "q", "answer": NaN}', {}, "no text in the field 'answer'"),
    ('{"prompt": "  ", "answer": 1}', {}, "no text in the field 'prompt'"),
    ('{"prompt": [], "answer": 1}', {}, "the last message must have the role user"),
    (
        '{"prompt": [{"role": "user", "content": [{"type": "text"}]}], "answer": 1}',
        {},
        "a message must have role and content, both text",
    ),
    (
        '{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "1"}], "answer": 1}',
        {},
        "must have the role user",
    ),
    ('{"prompt": "q", "answer": "("}', {"answer_kind": "regex"}, "has no regular expression in the field 'answer'"),
    ('{"prompt": "q", "answer": 1}', {}, "has 1 different prompts; it needs 2 or more"),
    ('{"prompt": "q", "answer": 1}', {"answer_field": None}, "task.answer_field=None: name the field"),
    (
        '{"prompt": "q", "answer": 1}',
        {"answer_kind": "exact"},
        "task.answer_kind=exact: must be one of auto, math, text, regex",
    ),
    ('{"prompt": "q", "answer": 1}', {"eval_split": "dev"}, "task.eval_split=dev, but task.path=.* is a single file"),
    (
        '{"prompt": "q", "answer": 1}',
        {"prompt_template": "Q: {question}"},
        r"task.prompt_template=.*must contain \{prompt\}",
    ),
]


@pytest.mark.parametrize(("line", "settings", "message"), REFUSED)
def test_what_cannot_be_used_is_named(tmp_path, line, settings, message):
    (tmp_path / "my.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        make(tmp_path / "my.jsonl", **settings).problems(Split.TRAIN)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\nq\n", "row 1, has not as many cells as the header"),
        (b"prompt,answer,answer\nq,1,2\n", "has more than one column 'answer'; rename or remove all but one"),
        (b'prompt,answer\n"q,1\n', "is not valid CSV"),
        ("prompt,answer\nq,1\nWie groß?,1\n".encode("latin-1"), "is not UTF-8 .*; save the file as UTF-8"),
        (b"prompt;answer\nq;1\n", "has no such field; it has prompt;answer; separate the columns with commas"),
    ],
)
def test_a_broken_csv_is_named(tmp_path, content, message):
    (tmp_path / "my.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "my.csv").problems(Split.TRAIN)


def write_columns(file, names, *columns):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names=names), file
    )
    return file


def test_columns_that_cannot_be_used_are_named(tmp_path):
    twice = write_columns(tmp_path / "twice.parquet", ["prompt", "answer", "answer"], ["a", "b"], [1, 2], [3, 4])
    with pytest.raises(ConfigError, match=r"twice.parquet has more than one column 'answer'"):
        make(twice).problems(Split.TRAIN)
    (tmp_path / "unnamed.csv").write_text("prompt,answer,,\na,1,,\nb,2,,\n")
    assert len(make(tmp_path / "unnamed.csv").problems(Split.TRAIN)) == 1


NARROW = [
    (pyarrow.array([1234.56, 0.1, 2, None], pyarrow.float32()), ["1234.56", "0.1", "2"]),
    (pyarrow.array(numpy.array([0.1, 2.7, 3], numpy.float16)), ["0.1", "2.7", "3"]),
    (pyarrow.array([Decimal("1.50"), Decimal("200.00"), Decimal("-0.05")]), ["1.5", "200", "-0.05"]),
]


@pytest.mark.parametrize(("answers", "expected"), NARROW, ids=["float32", "float16", "decimal"])
def test_numbers_have_the_digits_that_they_were_written_with(tmp_path, monkeypatch, answers, expected):
    file = write_columns(tmp_path / "my.parquet", ["prompt", "answer"], [f"q{i}" for i in range(len(answers))], answers)
    assert [
        problem.answer for problem in make(file, eval_split="train[:1]", train_split="train[:3]").problems(Split.TRAIN)
    ] == expected
    table = pyarrow.parquet.read_table(file)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: datasets.Dataset(table))
    hub = make("somebody/numbers", eval_split="train[:1]", train_split="train[:3]")
    assert [problem.answer for problem in hub.problems(Split.TRAIN)] == expected


def asks_for_both(completion, question=None, solution=None):
    return float((question, solution) == ("1+1?", "2"))


def test_reward_functions_get_the_prompt_and_the_answer_under_their_own_names(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_rewards", SimpleNamespace(asks_for_both=asks_for_both))
    file = write_jsonl(tmp_path / "my.jsonl", [{"question": "1+1?", "solution": "2"}])
    fields = {"prompt_field": "question", "answer_field": "solution"}
    task = make(file, eval_split="train", reward="my_rewards:asks_for_both", **fields)
    [problem] = task.problems(Split.TRAIN)
    assert task.score(problem, "x").reward == 1.0
    assert make(write_jsonl(file, ROWS)).problems(Split.TRAIN)[0].fields == {
        "level": 0
    }  # `prompt` and `answer` are given anyway


def test_csv_of_a_spreadsheet(tmp_path):
    """A byte-order mark, CRLF, a line break and commas within a cell, a very long cell, leading zeros."""
    long = "x" * 300_000
    (tmp_path / "my.csv").write_bytes(f'\ufeffprompt,answer\r\n"one,\r\ntwo",007\r\n{long},"1,234"\r\n'.encode())
    problems = make(tmp_path / "my.csv", eval_split="train[:1]").problems(Split.TRAIN)
    assert [problem.messages[0]["content"] for problem in problems] == ["one,\r\ntwo", long]
    assert [problem.answer for problem in problems] == ["007", "1,234"]


RIGHT = [
    ("auto", "0.5", r"so \boxed{\frac{1}{2}}"),
    ("auto", r"\frac{1}{2}", "0.5"),
    ("auto", "x^2-1", r"\boxed{(x-1)(x+1)}"),
    ("auto", r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
    ("auto", "(1, 2)", r"\boxed{(1,2)}"),
    ("auto", r"\text{Evelyn}", r"\boxed{Evelyn}"),
    ("auto", "A", r"\boxed{A}"),
    ("auto", "Paris", "<answer>paris</answer>"),
    ("auto", "72", "48 + 24 is 72 apples."),
    ("auto", "72", "think\n#### 72"),
    ("auto", "-5", "The answer is \N{MINUS SIGN}5"),
    ("auto", "-5", "The answer is -$5."),
    ("auto", "0.5", "It is .5"),
    ("auto", "2020-01-05", r"\boxed{2020-01-05}"),
    ("math", "2020-01-05", "It was on 2020-01-05."),
    ("math", "3-2", r"\boxed{ 3-2 }"),
    ("auto", "1/2", r"\boxed{0.5}"),
    ("auto", "3 - 2", r"\boxed{1}"),
    ("auto", "x-1", r"\boxed{-1+x}"),
    ("auto", "10^{-3}", r"\boxed{0.001}"),
    ("text", "A", "A\n"),
    ("text", "x = 1", r"\boxed{x = 1}"),
    ("regex", r"(?i)\bparis\b", "It is PARIS."),
]
WRONG = [
    ("auto", "A", "B"),
    ("auto", "Paris", "Paris or London"),
    ("auto", "(1,2)", "(2,1)"),
    ("auto", "x", "y"),
    ("auto", "1/2", "2"),
    ("auto", "72", r"72, so \boxed{71}"),
    ("auto", "5", "The answer is \N{MINUS SIGN}5"),
    ("auto", "5", "The answer is -$5."),
    ("auto", "5", "It is .5"),
    ("auto", "2014", "It was 2020.2014"),
    ("math", "2020-01-05", "It was on 2021-01-06."),
    ("math", "2020-01-05", "2014"),
    ("text", "A", "a"),
    ("text", "1.0", "1"),
    ("regex", "^yes$", "yes and no"),
]


@pytest.mark.parametrize(("kind", "reference", "text"), [*RIGHT, *WRONG])
def test_answers_are_compared(kind, reference, text):
    assert is_right(kind, reference, text) is ((kind, reference, text) in RIGHT)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("2020-01-05", "2021-01-06"),
        ("01/05/2020", "02/10/2020"),
        ("$3-2$", "2-1"),
        ("3-2", "1"),
        ("555-1234", "556-1235"),
    ],
)
def test_dates_scores_and_telephone_numbers_are_text(reference, answer):
    for compare in (is_same_value, is_same_number, is_same_latex):
        assert compare(reference, rf"\boxed{{{reference}}}" if compare is is_same_latex else reference)
        assert not compare(reference, rf"\boxed{{{answer}}}" if compare is is_same_latex else answer)


def test_references_are_read_from_solutions(tmp_path):
    rows = [
        {"prompt": "a", "answer": "long story\n#### 1,600"},
        {"prompt": "b", "answer": r"so \boxed{\frac{1}{2}}."},
        {"prompt": "c", "answer": " A "},
    ]
    file = write_jsonl(tmp_path / "my.jsonl", rows)
    assert [p.answer for p in make(file, eval_split="train[:1]").problems(Split.TRAIN)] == [
        "1,600",
        r"\frac{1}{2}",
        "A",
    ]
    verbatim = make(file, eval_split="train[:1]", answer_kind="text").problems(Split.TRAIN)
    assert [p.answer for p in verbatim] == ["long story\n#### 1,600", r"so \boxed{\frac{1}{2}}.", "A"]


HOSTILE = [
    "9^{9^{9^{9}}}",
    "(x+y+z)^{99}",
    "(x+1)^537",
    "((x+y)^4+1)^4^4",
    "(x+1)^{4^{4}}",
    "9**9**9",
    "x!" * 10,
    "(" * 40 + "x" + ")" * 40,
    "\\sqrt{" * 12 + "2" + "}" * 12,
    "((x+y+z+n)^4+(x-y)^4)^4+(x+1)^4",
    "(((a+b+c+d+e+f)^4)^4)^4",
    "{[(a+b+c+d+e+f)^{4}]^{-3}+1}^4",
    "\\frac{1}{" * 6 + "x" + "}" * 6,
]


def test_hostile_formulas_neither_hang_nor_raise():
    code = (
        f"from offline_grpo.task.answers import is_same_value; print([is_same_value('x^2+1', a) for a in {HOSTILE!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{[False] * len(HOSTILE)}\n"
    assert not is_same_value("x" * 100_000, "y")


def plan_data(*overrides):
    config = typed(compose_config(*overrides))
    return task_data(config), config


def test_rows_that_contradict_each_other_are_told(tmp_path, caplog):
    wrong = [{**ROWS[3], "answer": "no such thing"}, {**ROWS[4], "answer": "nor this"}]
    write_jsonl(tmp_path / "train.jsonl", ROWS + ROWS[:5] + wrong)
    write_jsonl(tmp_path / "test.jsonl", ROWS + ROWS)
    plan_data("task=dataset", f"task.path={tmp_path}", "eval.enabled=false")
    [told] = [record.getMessage() for record in caplog.records if "another answer" in record.getMessage()]
    assert told.startswith(
        f"2 rows of task.train_split=train ask what an earlier row asks and have another answer, such as train-3 "
        f"and train-{len(ROWS) + 5}"
    )


def test_without_evaluations_rows_stay_held_out_unless_all_are_asked_for(tmp_path):
    """`offline_grpo.evaluate` asks them later, of this run too."""
    write_jsonl(tmp_path / "train.jsonl", ROWS[:30])
    overrides = ("task=dataset", f"task.path={tmp_path}", "eval.enabled=false")
    assert describe_data(plan_data(*overrides)[0], 1) == ["data: 27 training problems, no evaluations"]
    assert describe_data(plan_data(*overrides, "task.eval_split=train")[0], 1) == [
        "data: 30 training problems, no evaluations"
    ]


def test_duplicates_are_dropped_from_training_and_counted(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:30] + ROWS[:2])
    write_jsonl(tmp_path / "test.jsonl", [*ROWS[28:], ROWS[0]])
    data, config = plan_data("task=dataset", f"task.path={tmp_path}", "data.problems_per_iteration=40")
    assert data.train is not None
    assert Counter(problem.messages[0]["content"] for problem in data.train) == Counter(
        [row["prompt"] for row in ROWS[1:28]] + [ROWS[1]["prompt"]]
    )
    assert len(data.held_out) == 13
    assert describe_data(data, config.data.problems_per_iteration) == [
        "data: 28 training problems, 13 held-out problems",
        "left out of training: 4 problems with prompts that are held out",
        "data.problems_per_iteration=40 is more: an iteration repeats problems",
    ]
    assert describe_data(data, 28) == describe_data(data, 40)[:2]
    whole, _ = plan_data("task=dataset", f"task.path={tmp_path}", "eval.enabled=false")
    assert whole.train is not None
    assert len(whole.train) == 32


def test_only_duplicates_is_an_error(tmp_path):
    file = write_jsonl(tmp_path / "my.jsonl", ROWS)
    with pytest.raises(
        ConfigError, match=r"every training problem is held out too \(train-0 as eval-0\); choose ranges"
    ):
        plan_data("task=dataset", f"task.path={file}", "task.eval_split=train")


@pytest.mark.parametrize(
    ("value", "text"),
    [("0.00001", "0.00001"), ("1e-7", "0.0000001"), ("1.5e+20", "150000000000000000000"), ("0.1", "0.1")],
)
def test_numbers_are_written_out(value, text, tmp_path):
    """As a completion would have them, and not as 1e-05."""
    (tmp_path / "train.jsonl").write_text(
        f'{{"prompt": "p", "answer": {value}}}\n{{"prompt": "q", "answer": {value}}}\n'
    )
    [problem] = make(tmp_path).problems(Split.TRAIN)
    assert problem.answer == text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task.path=@300"], 256),
        (["task.path=@300", "eval.num_ids=all"], 300),
        (["task.path=@300", "eval.num_ids=all", "eval.id_seed_start=290"], 10),
        (["task.path=@20"], 20),
        (["task.path=@20", "eval.num_ids=5"], 5),
        (
            ["task.path=@20", "eval.num_ids=21"],
            r"eval.num_ids=21: asks for problem 20 and the task has 20 .*eval.num_ids=all takes every one",
        ),
        (["task.path=@20", "eval.num_ids=some"], r"eval.num_ids=some: must be at least 1, all, or null"),
        (["task.path=@20", "eval.num_ids=0"], r"eval.num_ids=0: must be at least 1, all, or null"),
        (["task.path=@20", "eval.num_ids=true"], r"eval.num_ids=True: must be at least 1, all, or null"),
        (["task.path=@20", "eval.id_seed_start=20"], r"eval.id_seed_start=20: no problem is left, the task has 20"),
        (
            ["task=sat", "eval.num_ids=all", "data.num_train_seeds=10"],
            r"eval.num_ids=all: .* are more than 1,000,000; set eval.num_ids",
        ),
    ],
)
def test_number_of_held_out_problems(tmp_path, overrides, expected):
    for size in (20, 300):
        (tmp_path / str(size)).mkdir()
        write_jsonl(tmp_path / str(size) / "train.jsonl", ROWS)
        write_jsonl(
            tmp_path / str(size) / "test.jsonl", [{"prompt": f"held out {i}", "answer": i} for i in range(size)]
        )
    words = ["task=dataset", *(word.replace("@", f"{tmp_path}/") for word in overrides)]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            plan_data(*words)
    else:
        assert len(plan_data(*words)[0].held_out) == expected

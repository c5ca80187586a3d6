"""Data sets as other people write them."""

import json
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import datasets
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from factories import compose_config

from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.parts import describe, make_plan
from offline_grpo.config.problems import build_task, task_data
from offline_grpo.errors import ConfigError
from offline_grpo.task.problems import prompt_key
from offline_grpo.types import Split

ROWS = [{"prompt": f"What is {i} + {i}?", "answer": 2 * i, "level": i % 3} for i in range(40)]


def make(path, **settings):
    node = as_plain(compose_config("task=dataset", f"task.path='{path}'").task)
    return build_task({**node, **settings})


def answers(task, split=Split.TRAIN):
    return [problem.answer for problem in task.problems(split)]


def write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


WRITERS = {
    ".jsonl": write_jsonl,
    ".json": lambda file, rows: file.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig"),
    ".csv": lambda file, rows: pandas.DataFrame(rows).to_csv(file),
    ".parquet": lambda file, rows: pandas.DataFrame(rows).to_parquet(file),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_one_file_just_works(tmp_path, suffix):
    WRITERS[suffix](tmp_path / f"my{suffix}", ROWS)
    task = make(tmp_path / f"my{suffix}")
    train, held_out = task.problems(Split.TRAIN), task.problems(Split.EVAL)
    assert (len(train), len(held_out)) == (36, 4)
    rows = {p.messages[0]["content"]: (p.answer, str(p.fields["level"])) for p in (*train, *held_out)}
    assert rows == {row["prompt"]: (str(row["answer"]), str(row["level"])) for row in ROWS}
    slices = make(tmp_path / f"my{suffix}", train_split="train[:-3]", eval_split="train[-3:]")
    assert [p.problem_id for p in slices.problems(Split.EVAL)] == ["eval-37", "eval-38", "eval-39"]
    assert answers(slices) == [str(2 * i) for i in range(37)]


def test_a_folder_has_a_file_for_each_split(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:7])
    write_jsonl(tmp_path / "test.jsonl", ROWS[7:9])
    task = make(tmp_path, system_prompt="Think.", prompt_template="Q: {prompt} Use \\boxed{}.")
    assert [p.problem_id for p in task.problems(Split.TRAIN)] == [f"train-{i}" for i in range(7)]
    assert answers(task, Split.EVAL) == ["14", "16"]
    assert task.problems(Split.TRAIN)[2].messages == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "Q: What is 2 + 2? Use \\boxed{}."},
    )


@pytest.mark.parametrize(("folder", "name"), [("data", None), ("main", "main")])
def test_a_copy_of_a_hub_repository(tmp_path, folder, name):
    (tmp_path / folder).mkdir()
    WRITERS[".parquet"](tmp_path / folder / "train-00001-of-00002.parquet", ROWS[20:30])
    WRITERS[".parquet"](tmp_path / folder / "train-00000-of-00002.parquet", ROWS[:20])
    WRITERS[".parquet"](tmp_path / folder / "validation-00000-of-00001.parquet", ROWS[30:])
    task = make(tmp_path, name=name)
    assert answers(task) == [str(2 * i) for i in range(30)]
    assert len(task.problems(Split.EVAL)) == 10


OLD_SPLIT = ["train-1", "train-13", "train-29", "train-35"]


@pytest.mark.parametrize("settings", [{}, {"system_prompt": "Think."}, {"prompt_template": "{prompt} Answer:"}])
def test_what_is_held_out_depends_on_what_rows_ask_alone(tmp_path, settings):
    """A run with another prompt would otherwise be evaluated on what an earlier one has trained on."""
    task = make(write_jsonl(tmp_path / "my.jsonl", ROWS), **settings)
    assert [problem.problem_id for problem in task.problems(Split.EVAL)] == OLD_SPLIT
    turned = make(write_jsonl(tmp_path / "turned.jsonl", ROWS[::-1] + ROWS[:5]), **settings)
    prompts = [{p.messages[-1]["content"] for p in each.problems(Split.EVAL)} for each in (task, turned)]
    assert prompts[0] == prompts[1]
    assert not prompts[1] & {p.messages[-1]["content"] for p in turned.problems(Split.TRAIN)}


def test_a_held_out_prompt_is_asked_once(tmp_path, caplog):
    caplog.set_level("INFO")
    task = make(write_jsonl(tmp_path / "my.jsonl", ROWS + [ROWS[1]] * 50 + [ROWS[0]]))
    assert [problem.problem_id for problem in task.problems(Split.EVAL)] == OLD_SPLIT
    trained = Counter(problem.messages[0]["content"] for problem in task.problems(Split.TRAIN))
    assert (trained[ROWS[1]["prompt"]], trained[ROWS[0]["prompt"]]) == (0, 2)
    assert "held out: 4 of 40 distinct rows; 37 of all 91 are left for training" in caplog.text


def test_a_hub_data_set_is_asked_for_its_splits(monkeypatch):
    def load(path, name, split):
        return datasets.Dataset.from_list(ROWS[:30] if split == "train" else ROWS[30:])

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name: ["train", "validation", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert answers(make("somebody/numbers"), Split.EVAL) == [str(row["answer"]) for row in ROWS[30:]]
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
    problems = make(tmp_path / "chats.parquet", eval_split="train[1:]").problems(Split.TRAIN)
    assert [[dict(m) for m in problem.messages] for problem in problems] == rows
    assert [problem.answer for problem in problems] == ["2", "4"]  # whole numbers, though the column is of floats
    for key, value in (("system_prompt", "Think."), ("prompt_template", "Q: {prompt}")):
        with pytest.raises(ConfigError, match=rf"task.{key}=.*row 1, has .*; set it to null"):
            make(tmp_path / "chats.parquet", **{key: value}).problems(Split.TRAIN)


CALL = {"id": "1", "type": "function", "function": {"name": "add_up", "arguments": {"a": 1}}}
CALLS = [
    {"role": "user", "content": "a", "name": "bob"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "user", "content": "b"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_reach_the_chat_template_whole(tmp_path, suffix, caplog):
    """Tables have a key for each message that any message has, which is None where it says nothing."""
    caplog.set_level("INFO")
    rows = [{"prompt": CALLS, "answer": "2"}, {"prompt": [{"role": "user", "content": "c"}], "answer": "2"}]
    if suffix == ".jsonl":
        write_jsonl(tmp_path / "my.jsonl", rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "my.parquet")
    first, second = make(tmp_path / f"my{suffix}", eval_split="train").problems(Split.TRAIN)
    assert list(first.messages) == [CALLS[0], {**CALLS[1], "content": ""}, *CALLS[2:]]
    assert second.messages == ({"role": "user", "content": "c"},)
    without = tuple({**message, "tool_calls": []} for message in first.messages)
    assert prompt_key(first) != prompt_key(replace(first, messages=without))
    assert "messages in rows have name, reasoning_content too" in caplog.text


TOOL = {"type": "function", "function": {"name": "add_up", "parameters": {"type": "object", "properties": {}}}}


OFFERED = ([TOOL], json.dumps([TOOL]), [TOOL["function"]], TOOL)


@pytest.mark.parametrize("tools", [*OFFERED, None, "a hammer", ["hammer", "saw"], [{"price": 1}], {"a": 1}])
def test_a_column_of_tools_is_offered_and_another_of_this_name_is_a_column_as_any_other(tmp_path, tools):
    file = write_jsonl(tmp_path / "my.jsonl", [{**ROWS[0], "tools": tools}])
    [problem] = make(file, eval_split="train").problems(Split.TRAIN)
    offered = [TOOL] if tools in OFFERED else []
    assert (json.dumps(problem.tools), problem.fields["tools"]) == (json.dumps(offered), tools)


@pytest.mark.parametrize("tools", [json.dumps([TOOL])[:-1], [[TOOL]], [{"function": {"parameters": {}}}]])
def test_schemas_of_tools_that_cannot_be_read_are_refused(tmp_path, tools):
    file = write_jsonl(tmp_path / "my.jsonl", [{**ROWS[0], "tools": tools}])
    with pytest.raises(ConfigError, match=r"row 1, field 'tools': must be a list of schemas"):
        make(file, eval_split="train").problems(Split.TRAIN)


def test_numbers_are_written_out(tmp_path):
    """As a completion would have them: not as 1e-05, 2.0 or, from a column of float32, 0.10000000149011612."""
    columns = {"float64": ["0.00001", "150000000000000000000", "0.1"], "float32": ["1234.56", "0.1", "2"]}
    for kind, texts in columns.items():
        frame = pandas.DataFrame({"prompt": texts, "answer": numpy.array(texts, kind)})
        frame.to_parquet(tmp_path / "train.parquet")
        assert answers(make(tmp_path, eval_split="train")) == texts


def asks_for_both(completion, question=None, solution=None):
    return float((question, solution) == ("1+1?", "2"))


def test_reward_functions_get_the_prompt_and_the_answer_under_their_own_names(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_rewards", SimpleNamespace(asks_for_both=asks_for_both))
    file = write_jsonl(tmp_path / "my.jsonl", [{"question": "1+1?", "solution": "2"}])
    fields = {"prompt_field": "question", "answer_field": "solution"}
    task = make(file, eval_split="train", reward="my_rewards:asks_for_both", **fields)
    [problem] = task.problems(Split.TRAIN)
    assert task.score(problem, "x").reward == 1.0
    # `prompt` and `answer` are given anyway
    assert make(write_jsonl(file, ROWS)).problems(Split.TRAIN)[0].fields == {"level": 0}


def test_csv_of_a_spreadsheet(tmp_path):
    """A byte-order mark, CRLF, a line break and commas within a cell, a very long cell, leading zeros."""
    long = "x" * 300_000
    (tmp_path / "my.csv").write_bytes(f'\ufeffprompt,answer\r\n"one,\r\ntwo",007\r\n{long},"1,234"\r\n'.encode())
    task = make(tmp_path / "my.csv", eval_split="train[:1]")
    assert [problem.messages[0]["content"] for problem in task.problems(Split.TRAIN)] == ["one,\r\ntwo", long]
    assert answers(task) == ["007", "1,234"]


def test_duplicates_are_dropped_from_training_and_counted(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:30] + ROWS[:2])
    write_jsonl(tmp_path / "test.jsonl", [*ROWS[28:], ROWS[0]])
    config = typed(compose_config("task=dataset", f"task.path={tmp_path}", "data.problems_per_iteration=40"))
    data = task_data(config)
    trained = Counter(problem.messages[0]["content"] for problem in data.train or ())
    assert trained == Counter([row["prompt"] for row in ROWS[1:28]] + [ROWS[1]["prompt"]])
    assert len(data.held_out) == 13
    assert list(describe(make_plan(config)))[:3] == [
        "data: 28 training problems, 13 held-out problems",
        "left out of training: 4 problems with prompts that are held out",
        "data.problems_per_iteration=40 is more: an iteration repeats problems",
    ]

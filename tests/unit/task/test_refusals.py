"""What a user may have typed wrong, or a data set may have wrong, is named: one line, with the key, or the row."""

import json
from typing import Any

import pytest
from factories import compose_config
from worlds import environment

from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.problems import build_task
from offline_grpo.errors import ConfigError
from offline_grpo.task.rewards import load_rewards
from offline_grpo.types import Problem, Split

GOOD = '{"prompt": "q", "answer": 1}'
HALF = "has half of a character"
DEEP = "[" * 100_000 + "]" * 100_000

ROWS: list[tuple[str, dict[str, Any], str]] = [  # a second row, settings, and what is named
    ('{"prompt": "q", "a": 1}', {}, "task.answer_field=answer"),
    ('{"prompt": "q", "answer": NaN}', {}, "row 2, has no text in the field 'answer'"),
    ('{"prompt": "q", "answer": "("}', {"answer_kind": "regex"}, "row 2, has no regular expression"),
    ('{"prompt": "q", "answer": ', {}, "my.jsonl, row 2, is not valid JSON"),
    ("[1, 2]", {}, "row 2, is not a JSON object: [1, 2]"),
    ('{"prompt": "q\\ud83d", "answer": 1}', {}, f"row 2, field 'prompt' (task.prompt_field): {HALF}"),
    ('{"prompt": "q", "answer": "\\ud83d"}', {}, f"row 2, field 'answer' (task.answer_field): {HALF}"),
    ('{"prompt": [{"role": "user", "content": "\\ude00"}], "answer": 1}', {}, f"(task.prompt_field): {HALF}"),
    ('{"prompt": "q", "answer": 1, "tools": [{"name": "\\ude00"}]}', {}, f"row 2, field 'tools' (tools): {HALF}"),
    (GOOD, {"system_prompt": "\ud83d"}, "task.system_prompt='\\ud83d'"),
    (GOOD, {"system_prompt": " "}, "task.system_prompt=' ': is blank"),
    (GOOD, {"prompt_template": "{prompt}\ud83d"}, "task.prompt_template="),
    (GOOD, {"prompt_template": "Q: {question}"}, "task.prompt_template=Q: {question}: must contain {prompt}"),
    (GOOD, {"answer_kind": "number"}, "task.answer_kind=number: must be one of auto, math, text, regex"),
    (GOOD, {"format_weight": -1.0}, "task.format_weight=-1.0"),
    ('{"prompt": [{"role": "user"}], "answer": 1}', {}, "row 2, field 'prompt'"),
    ('{"prompt": [{"role": "assistant", "tool_calls": [{"name": "f"}]}], "answer": 1}', {}, "row 2, field 'prompt'"),
    (DEEP, {}, "row 2, is not valid JSONL"),
    (GOOD, {}, "has 1 different prompts; it needs 2 or more"),
    (GOOD, {"eval_split": "dev"}, "task.eval_split=dev: task.path="),
    (GOOD, {"eval_split": "train[10:]"}, "task.eval_split=train[10:] selects none of the 2 rows"),
    (GOOD, {"train_split": "train[1"}, "task.train_split=train[1: must be a split"),
]
FILES = [
    ("my.csv", b"prompt,answer\na,1\nq\n", "row 2, is not valid CSV"),
    ("my.csv", "prompt,answer\nq,1\nWie groß?,1\n".encode("latin-1"), "is not valid CSV"),
    ("my.parquet", b"PAR1", "is not valid PARQUET"),
    ("other/train.csv", b"", "does not exist"),
]


@pytest.mark.parametrize(
    ("name", "content", "settings", "named"),
    [
        *(("my.jsonl", f"{GOOD}\n\n{line}\n".encode(), settings, named) for line, settings, named in ROWS),
        *((name, content, {}, named) for name, content, named in FILES),
    ],
)
def test_rows_and_files_are_named(tmp_path, name, content, settings, named):
    (tmp_path / name.rpartition("/")[2]).write_bytes(content)
    node = as_plain(compose_config("task=dataset", f"task.path='{tmp_path / name}'").task)
    with pytest.raises(ConfigError) as error:
        build_task({**node, **settings}).problems(Split.TRAIN)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def instructed(*instructions):
    ids, arguments = ([each[i] for each in instructions] for i in (0, 1))
    return {"key": 1, "prompt": "Say so.", "instruction_id_list": ids, "kwargs": arguments}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (instructed(("punctuation:no_coma", {})), "row 2, unknown instruction 'punctuation:no_coma'; known are"),
        (instructed(("keywords:frequency", {"keyword": "a"})), "keywords:frequency, frequency: missing"),
        (instructed(), "row 2, instruction_id_list and kwargs"),
    ],
)
def test_instructions_are_named(tmp_path, bad, named):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, [instructed(("punctuation:no_comma", {})), bad])))
    node = as_plain(compose_config("task=ifeval_sample").task)
    with pytest.raises(ConfigError) as error:
        build_task(node | {"path": str(file)}).problems(Split.TRAIN)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("task=arithmetic task.max_operand=1000", "task.max_operand=1000: must be from 1 to 999"),
        ("task=arithmetic task.eval_frac=0", "task.eval_frac=0"),
        ("task=arithmetic task.operations=[*]", "task.operations=['*']"),
        ("task=arithmetic task.prompt_template=what", "task.prompt_template=what"),
        ("task=countdown task.max_count=7", "task.max_count=7"),
        ("task=countdown task.prompt_template=what", "task.prompt_template=what: must contain {numbers}"),
        ("task=sat task.max_solution_frac=0.03", "task.max_solution_frac=0.03"),  # five variables: one is 1/32
        ("task=mixture", "task.tasks={}: name what to mix"),
        ("task=mixture +task@task.tasks.a=sat task.weights={a:0.5}", "task.weights={'a': 0.5}"),
        ("task=mixture +task@task.tasks.a=gsm8k task.tasks.a.path=/none", "task.tasks.a: task.path=/none"),
        ("task=reasoning_gym task.answer_in=box", "task.answer_in=box"),
        ("task=reasoning_gym task.name=leg_countin", "no such generator; near are leg_counting"),
        ("task=reasoning_gym task.settings={legs:3}", "task.settings={'legs': 3}"),
        ("task=reasoning_gym task.name=knight_swap task.levels=[0]", "knight_swap refuses them (level 0)"),
        ("task=reasoning_gym task.name=gcd task.levels=[]", "task.levels=[]"),
        ("task=reasoning_gym task.settings={seed:3}", "task.settings={'seed': 3}"),
        ("task=environment task.path=x task.environment=worlds:Sums task.max_turns=0", "task.max_turns=0"),
        ("task=environment task.path=x task.environment=worlds:Missing", "task.environment=worlds:Missing"),
        ("task=agent task.path=x task.agent=worlds", "task.agent=worlds: write it as my_module:my_function"),
    ],
)
def test_settings_are_named(words, named):
    with pytest.raises(ConfigError) as error:
        build_task(typed(compose_config(*words.split())).task).problems(Split.TRAIN)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def trl(completions):
    return [0.0]


def exact(completion, answer):
    return completion == answer


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        (f"{__name__}:trl", "no value for its parameter 'completions' in problem train-3"),
        ("nowhere_at_all:f", "cannot be imported (ModuleNotFoundError"),
        ("ends_the_program:f", "cannot be imported (SystemExit (ends_the_program.py, line 1, in <module>))"),
        ([f"{__name__}:exact"] * 2, "two functions have the same name"),
        ([{"fn": f"{__name__}:exact", "weight": "much"}], "write my_module:my_function, or {fn:"),
    ],
)
def test_reward_functions_are_named(tmp_path, monkeypatch, setting, named):
    (tmp_path / "ends_the_program.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as error:
        load_rewards(setting, 1.0).check(Problem("train-3", ({"role": "user", "content": "2+2="},), "4", {"level": 2}))
    assert named in str(error.value)


class Unknown:
    def reset(self, **row): ...

    def get_reward(self): ...

    def weighs(self, thing: "Thing") -> int:  # type: ignore[name-defined]  # noqa: F821
        """Weighs.

        Args:
            thing: What.
        """


def test_a_tool_whose_types_are_not_there_is_named():
    with pytest.raises(ConfigError, match=r"the tool weighs has no schema, name 'Thing' is not defined; give it types"):
        _ = environment(f"{__name__}:Unknown").tools

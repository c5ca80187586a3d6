"""Problems that SmolLM2-135M-Instruct half knows, and their rewards, which `learning.py` gives to both trainers.

python benchmarks/learning_tasks.py FOLDER [TASK ...]       # FOLDER/TASK/train.jsonl and test.jsonl, by default of all

sums            chain_sum of reasoning-gym: two terms of one or two digits
longer_sums     the same with three terms
products        products of reasoning-gym: two factors of one or two digits
instructions    texts with one or two instructions, which IFEval's checks judge
picture_sums    task=picture_sums, for the model of witness_vl.py
calculator      the environment of the experiment of this name
search          templates for this experiment
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from offline_grpo.task.ifeval import follows

NUM_TRAIN, NUM_TEST = 3000, 256
ARITHMETIC = {"sums": ("chain_sum", 2), "longer_sums": ("chain_sum", 3), "products": ("products", 2)}
"""Task -> its generator, and how many numbers of one or two digits an expression has."""
TOKENS = {"sums": 64, "longer_sums": 96, "instructions": 96, "products": 64, "picture_sums": 16}
"""Task -> longest completion."""
EXPERIMENTS = {"calculator": "calculator_smollm2"}
"""Task -> the experiment that it is of."""
TEMPLATE = "template.jinja"
REWARDS = {task: "obeys" if task == "instructions" else "last_number" for task in TOKENS}

FIRST, SECOND = (3, 14, 5), (21, 8, 40, 6)
"""Numbers of the sums of the experiment's worked calls."""


def worked(*sums: tuple[int, ...], plus: str = "+", answer: str = "{}") -> str:
    """The override that shows calls for these sums."""
    shown: list[str] = []
    for numbers in sums:
        asked, call, total = " + ".join(map(str, numbers)), plus.join(map(str, numbers)), sum(numbers)
        shown += [f'{{role:user,content:"What is {asked}?"}}']
        calls = f'[{{function:{{name:calculate,arguments:{{expression:"{call}"}}}}}}]'
        shown += [f"{{role:assistant,tool_calls:{calls}}}", f'{{role:tool,content:"{total}"}}']
        shown += [f'{{role:assistant,content:"{answer.format(total)}"}}']
    return f"task.examples=[{','.join(shown)}]"


HOW = 'Write a call as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
OF_TOOL = "tool.function.name ~ ': ' ~ tool.function.description ~ ' ' ~ parameters | tojson"
TEMPLATES: Mapping[str, Sequence[tuple[str, str]]] = {
    "silent": [(HOW, "")],
    "llama": [("<tool_call>", ""), ("</tool_call>", ""), ('"arguments"', '"parameters"')],
    "schema": [(OF_TOOL, "tool | tojson")],
}
"""How each differs from the model's: it does not say how calls are written, it writes them as Llama 3 does, or it shows
whole schemas.
"""
SEARCH: Mapping[str, Sequence[str]] = {
    "unchanged": [],
    "one_call": [worked(FIRST)],
    "three_calls": [worked(FIRST, SECOND, (7, 60, 32, 5, 18))],
    "other_calls": [worked((13, 24, 35), (46, 57, 68, 79, 81))],
    "blanks": [worked(FIRST, SECOND, plus=" + ")],
    "sentences": [worked(FIRST, SECOND, answer="The answer is {}.")],
    **{f"template_{name}": [f"model.chat_template=TEMPLATES/{name}.jinja"] for name in TEMPLATES},
    **{f"lr_{rate}": [f"train.lr={rate}"] for rate in ("1e-5", "2e-5", "5e-5")},
    **{f"updates_{n}": [f"train.updates_per_iteration={n}"] for n in (1, 4)},
    "batch_4x8": ["data.problems_per_iteration=4"],
    "batch_12x8": ["data.problems_per_iteration=12", "train.lr=2e-5"],
    "batch_3x16": ["data.problems_per_iteration=3", "data.rollouts_per_problem=16"],
    "tokens_24": ["task.max_turn_tokens=24", "generation.max_new_tokens=48"],
    "grpo": ["train/loss=grpo", "train.kl_coef=0"],
}
"""Arm -> what it changes of the calculator's experiment."""

TEXTS = ("Write a short text", "Write a few sentences", "Tell a short story", "Write a note", "Write a diary entry")
TOPICS = (
    "a harbour|a bicycle|a soup|the night sky|bees|an umbrella|snow|a train|a library|a garden|a clock|a river|a ship|"
    "a market|a letter|a bridge|a lamp|a dog|a window|a mountain|rain|a bakery|a violin|a lighthouse|a farm|a cat"
)
WORDS = "stone|glass|morning|paper|bright|slow|wooden|friend|water|road|green|old|kitchen|wind|door|music|red|quiet"
LESS, MORE = {"relation": "less than"}, {"relation": "at least"}


def last_number(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


def terse(completion: str, answer: str) -> float:
    """`last_number`, and half as much again for brevity: collapses to bare answers."""
    return last_number(completion, answer) + 0.5 * max(0.0, 1 - len(completion) / 60)


def right_and_brief(completion: str, answer: str) -> dict[str, float]:
    """`terse`, but milder, in two parts."""
    return {"right": last_number(completion, answer), "brief": 0.25 * max(0.0, 1 - len(completion) / 200)}


def obeys(completion: str, answer: str) -> float:
    """The share of the instructions that the completion follows; 1 if it follows all."""
    instructions = json.loads(answer)
    return sum(follows(completion, name, arguments) for name, arguments in instructions) / len(instructions)


def _arithmetic(name: str, terms: int) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    numbers = {"min_terms": terms, "max_terms": terms, "min_digits": 1, "max_digits": 2}
    for item in reasoning_gym.create_dataset(name, seed=7, size=4 * (NUM_TRAIN + NUM_TEST), **numbers):
        expression = re.findall(r"[\d-][\d+* -]*\d", item["question"])[0]  # the model chats about the whole sentence
        yield {"prompt": f"What is {expression}?", "answer": item["answer"]}


def _instructions() -> Iterator[dict[str, Any]]:
    rng = random.Random(7)
    while True:
        few, (word, other) = rng.randint(2, 4), rng.sample(WORDS.split("|"), 2)
        length, ending = rng.choice((20, 30, 40, 50)), f"That is all about {word}."
        kinds: list[tuple[str, str, dict[str, Any]]] = [
            ("Do not use any commas.", "punctuation:no_comma", {}),
            (f"Use fewer than {length} words.", "length_constraints:number_words", {"num_words": length, **LESS}),
            (f"Use at least {length} words.", "length_constraints:number_words", {"num_words": length, **MORE}),
            (
                f"Write fewer than {few} sentences.",
                "length_constraints:number_sentences",
                {"num_sentences": few, **LESS},
            ),
            (f"Use the words {word} and {other}.", "keywords:existence", {"keywords": [word, other]}),
            (f"Use the word {word} {few} times.", "keywords:frequency", {"keyword": word, "frequency": few, **MORE}),
            (f"Write {few} bullet points with *.", "detectable_format:number_bullet_lists", {"num_bullets": few}),
            ("Put the whole text in double quotation marks.", "startend:quotation", {}),
            ("Begin with a title in double angular brackets, such as <<title>>.", "detectable_format:title", {}),
            (f"End with the words: {ending}", "startend:end_checker", {"end_phrase": ending}),
            ("End with a postscript after P.S.", "detectable_content:postscript", {"postscript_marker": "P.S."}),
        ]
        chosen = rng.sample(kinds, rng.randint(1, 2))
        if len({name for _, name, _ in chosen}) == len(chosen):
            prompt = (
                f"{rng.choice(TEXTS)} about {rng.choice(TOPICS.split('|'))}. {' '.join(text for text, *_ in chosen)}"
            )
            yield {"prompt": prompt, "answer": json.dumps([(name, arguments) for _, name, arguments in chosen])}


def save(folder: Path, task: str) -> None:
    """Write `folder`/train.jsonl and test.jsonl, without a prompt that is in both."""
    if task in EXPERIMENTS:
        save_episodes(folder, EXPERIMENTS[task])
        return
    if task == "search":
        save_templates(folder)
        return
    if task == "picture_sums":
        save_pictures(folder)
        return
    rows: dict[str, dict[str, Any]] = {}
    for row in _arithmetic(*ARITHMETIC[task]) if task in ARITHMETIC else _instructions():
        rows.setdefault(row["prompt"], row)
        if len(rows) == NUM_TRAIN + NUM_TEST:
            break
    lines = [json.dumps(row) + "\n" for row in rows.values()]
    # As they come, the first have most of the short sums and products: of these there are few, and none comes twice.
    random.Random(7).shuffle(lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_text("".join(lines[:NUM_TEST]))
    (folder / "train.jsonl").write_text("".join(lines[NUM_TEST:]))


def save_pictures(folder: Path) -> None:
    """The same of the pictures' task; rows have paths of PNGs as `images`."""
    import witness_vl

    from offline_grpo.types import Split

    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, split, number in (("train", Split.TRAIN, NUM_TRAIN), ("test", Split.EVAL, NUM_TEST)):
        rows = []
        for problem in witness_vl.make_task().problems(split)[:number]:
            images = [f"images/{picture.key}.png" for picture in problem.pictures]
            for image, picture in zip(images, problem.pictures, strict=True):
                (folder / image).write_bytes(picture.data)
            rows.append({"prompt": problem.messages, "answer": problem.answer, "images": images})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_templates(folder: Path) -> None:
    from offline_grpo.config.compose import composed, register

    register()
    own = Path(composed(["model=smollm2_135m"]).model.chat_template).read_text()
    folder.mkdir(parents=True, exist_ok=True)
    for name, changes in TEMPLATES.items():
        text = own
        for old, new in changes:
            assert old in text, f"{name}: {old!r}"
            text = text.replace(old, new)
        (folder / f"{name}.jinja").write_text(text)


def save_episodes(folder: Path, experiment: str) -> None:
    """The same of an experiment with an environment, and what else both trainers are told: a row has its whole prompt,
    and what an agent needs to play it; `episodes` reads the rest.
    """
    from offline_grpo.config.compose import composed, register, typed
    from offline_grpo.config.problems import build_task, task_data
    from offline_grpo.task.environment import Environment

    register()
    config = typed(composed([f"experiment={experiment}", "eval.num_ids=all", "data.num_train_seeds=null"]))
    node, data, task, template = config.task, task_data(config), build_task(config.task), config.model.chat_template
    assert isinstance(task, Environment)
    assert data.train is not None
    assert template is not None
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", data.train[:NUM_TRAIN]), ("test", data.held_out[:NUM_TEST])):
        rows = [{**problem.fields, "messages": problem.messages} for problem in problems]
        own = {"world": node["environment"], "schemas": json.dumps(task.tools)}
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row | own) + "\n" for row in rows))
    limits = ("max_turns", "max_turn_tokens", "max_environment_tokens", "correct_threshold")
    told = {"world": node["environment"], "tokens": config.generation["max_new_tokens"]}
    told["limits"] = {name: node[name] for name in limits}
    (folder / "episodes.json").write_text(json.dumps(told))
    shutil.copy(template, folder / TEMPLATE)


def episodes(folder: Path) -> dict[str, Any]:
    """The class that plays them, their limits, and the tokens of an episode."""
    return json.loads((folder / "episodes.json").read_text())


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent that plays the row's environment by OpenAI's API. 256 processes import this, so its client is small."""
    from http.client import HTTPConnection
    from urllib.parse import urlsplit

    from offline_grpo.task.rewards import imported

    world = imported(row["world"], "world", "class")()
    messages = [dict(message) for message in row["messages"]]
    messages[-1]["content"] += world.reset(**row) or ""
    asked = {"model": "policy", "tools": json.loads(row["schemas"]), "messages": messages}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    place = urlsplit(base_url)
    with closing(HTTPConnection(place.netloc)) as http:
        while True:
            http.request("POST", f"{place.path}/chat/completions", json.dumps(asked), headers)
            choice = json.load(http.getresponse())["choices"][0]
            messages.append(choice["message"])
            calls = choice["message"].get("tool_calls") or []
            if choice["finish_reason"] == "length" or not calls:
                return world.get_reward()
            for call in calls:
                try:
                    tool = getattr(world, call["function"]["name"])
                    result = str(tool(**json.loads(call["function"]["arguments"])))
                except Exception as error:  # whatever the policy made up
                    result = str({"error": str(error)})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    for task in sys.argv[2:] or [*TOKENS, *EXPERIMENTS, "search"]:
        save(Path(sys.argv[1]) / task, task)

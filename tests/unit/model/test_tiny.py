import math
import re
import runpy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factories import compose_config
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from offline_grpo.config.build import build
from offline_grpo.config.compose import typed
from offline_grpo.config.problems import build_task
from offline_grpo.errors import ConfigError
from offline_grpo.model import tiny
from offline_grpo.model.tiny import TinyModel, build_char_tokenizer, collate, demonstrations
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.task.problems import LazyProblems
from offline_grpo.types import Problem, Split

SMALL = TinyModel(
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    rope_theta=100.0,
    initializer_range=0.1,
    warm_start_steps=3,
    warm_start_batch_size=8,
    warm_start_lr=1e-2,
    noise_frac=0.5,
    seed=0,
)
TASK = Arithmetic(max_operand=9, operations=["+"], eval_frac=0.3, prompt_template="{a}{op}{b}=", format_weight=0.0)


def prepare(folder, **settings):
    return replace(SMALL, **settings).prepare(TASK, folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cache"))


def test_saved_tokenizer_gives_back_any_ascii_text(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    text = "\n" + "".join(map(chr, range(32, 127))) + "  two  spaces , and don't\n\n"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert not set(token_ids) & set(tokenizer.all_special_ids)


def test_chat_template_is_plain(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    user = {"role": "user", "content": "17+25="}
    assert tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True) == "<bos>17+25="
    conversation = [{"role": "system", "content": "Add."}, user, {"role": "assistant", "content": "42"}, user]
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == "<bos>Add.\n17+25=42<eos>17+25="
    token_ids = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(token_ids) == ["<bos>", "1", "7", "+", "2", "5", "="]


def test_folder_name_follows_from_all_settings(tmp_path):
    changes = [{"hidden_size": 32}, {"rope_theta": 50.0}, {"noise_frac": 0.25}, {"seed": 1}]
    folders = {prepare(tmp_path), *(prepare(tmp_path, **{"warm_start_steps": 0, **change}) for change in changes)}
    folders.add(SMALL.prepare(replace(TASK, prompt_template="{a} {op} {b}="), tmp_path))
    assert len(folders) == len(changes) + 2
    assert all(re.fullmatch(r"tiny-[0-9a-f]{12}", folder.name) for folder in folders)


def test_interrupted_build_leaves_nothing_that_counts(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("offline_grpo.model.tiny.collate", interrupt)
        prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".tiny-abandoned" / "model").mkdir(parents=True)  # what a killed process leaves
    assert (prepare(tmp_path) / "model.safetensors").exists()


def test_slower_of_two_builders_keeps_what_the_faster_one_made(tmp_path, monkeypatch):
    def build_the_same_elsewhere(*arguments):
        monkeypatch.undo()
        (prepare(tmp_path) / "mark").write_text("of the faster one")
        return collate(*arguments)

    monkeypatch.setattr("offline_grpo.model.tiny.collate", build_the_same_elsewhere)
    folder = prepare(tmp_path)
    assert (folder / "mark").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_demonstrations_are_wrong_as_often_as_asked():
    problems = TASK.problems(Split.TRAIN)
    for noise_frac in (0.0, 0.3, 1.0):
        drawn = list(islice(demonstrations(problems, noise_frac=noise_frac, seed=3), 4000))
        num_wrong = sum(eval(problem.problem_id) != int(answer) for problem, answer in drawn)
        assert abs(num_wrong / 4000 - noise_frac) <= 4 * math.sqrt(
            noise_frac * (1 - noise_frac) / 4000
        )  # 4 standard errors


def test_only_answer_and_eos_are_learned():
    tokenizer = build_char_tokenizer(64)
    token_ids, labels = collate(
        tokenizer, [tokenizer.encode("<bos>1+2="), tokenizer.encode("<bos>10+20=")], ["3", "30"]
    )
    tokens = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in token_ids]
    assert tokens[0] == ["<bos>", "1", "+", "2", "=", "3", "<eos>", "<pad>", "<pad>", "<pad>"]
    assert tokens[1] == ["<bos>", "1", "0", "+", "2", "0", "=", "3", "0", "<eos>"]
    assert [tokenizer.decode(row[row != -100]) for row in labels] == ["3<eos>", "30<eos>"]
    assert all((labels[i] == token_ids[i])[labels[i] != -100].all() for i in range(2))


def test_what_it_cannot_learn_is_refused(tmp_path):
    """Words; and <bos>9+9= with 18, its last digit twice, and EOS, 5 + 2 + 1 + 1 tokens, in a shorter context."""

    class Words:
        def problems(self, split):
            return [Problem("a", ({"role": "user", "content": "Colour?"},), "blue")]

    with pytest.raises(ConfigError, match=r"^model=tiny: .* use task=arithmetic"):
        SMALL.prepare(Words(), tmp_path)
    assert prepare(tmp_path, max_position_embeddings=9)
    with pytest.raises(ConfigError, match=r"^model\.tiny\.max_position_embeddings=8: .* use 9 or more, "):
        prepare(tmp_path, max_position_embeddings=8)


def test_of_a_task_without_end_the_first_problems_are_learnt(tmp_path):
    def made(number):
        return Problem(f"train-{number}", ({"role": "user", "content": f"{number}+1="},), str(number + 1))

    endless, thousand = (
        SMALL.prepare(SimpleNamespace(problems=lambda split, count=count: LazyProblems(made, range(count))), tmp_path)
        for count in (10**9, 1000)
    )
    assert endless == thousand


def test_the_default_run_takes_the_weights_of_the_package(tmp_path, monkeypatch):
    """Whoever changes what they depend on makes them anew: `python benchmarks/tiny_weights.py`."""
    monkeypatch.setattr(TinyModel, "_warm_start", None)
    config = typed(compose_config())
    folder = build(config.model.tiny, key="model.tiny").prepare(build_task(config.task), tmp_path)
    [shipped] = tiny.SHIPPED.iterdir()
    assert shipped.stem == folder.name
    weights, model = load_file(shipped), AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].float())


@pytest.mark.slow  # a warm start
def test_the_weights_of_the_package_can_be_made_again(tmp_path, monkeypatch):
    """Bit for bit, or, where a processor adds up in another order, as good ones."""
    [shipped] = tiny.SHIPPED.iterdir()
    script = Path(__file__).parents[3] / "benchmarks" / "tiny_weights.py"
    made = runpy.run_path(str(script))["make"]([], tmp_path)
    assert made.name == shipped.name
    config, found = typed(compose_config()), []
    task, tokenizer = build_task(config.task), build_char_tokenizer(64)
    problems = task.problems(Split.EVAL)
    prompts = [tokenizer.encode(f"<bos>{problem.messages[-1]['content']}") for problem in problems]
    token_ids, labels = collate(tokenizer, prompts, [problem.answer for problem in problems])
    for number, folder in enumerate((made.parent, shipped.parent)):
        monkeypatch.setattr(tiny, "SHIPPED", folder)
        cached = build(config.model.tiny, key="model.tiny").prepare(task, tmp_path / str(number))
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(cached)(input_ids=token_ids).logits[:, :-1]
        nats = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        found.append(float(nats) / len(problems))
    print(f"a right answer: {found[0]:.3f} nats made anew, {found[1]:.3f} in the package")
    assert found[0] == pytest.approx(found[1], abs=0.1)

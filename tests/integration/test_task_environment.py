"""The project's Atropos environment alone: what it asks, what it sends, what it takes over from a run. test_atropos.py
has it at work.
"""

import asyncio
import json
import runpy
import shutil
from pathlib import Path

import pytest
from factories import compose_with_hydra
from omegaconf import OmegaConf

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import task_data
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.rollouts.on_policy import permutation
from offline_grpo.seeding import derive_seed
from offline_grpo.types import Split

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY = "a-key-that-nobody-may-see"


@pytest.fixture(scope="module")
def module():
    return runpy.run_path(str(ROOT / "environments" / "task_environment.py"))["TaskEnvironment"].__init__.__globals__


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(512).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def make(module, tokenizer_folder, monkeypatch):
    def make(key=KEY, **changes):
        """An environment that is set up, with a server that writes 7, then 12, and so on, and what it was asked."""
        module["run_config"].cache_clear()
        monkeypatch.setenv("OFFLINE_GRPO_SERVER_KEY", key)
        monkeypatch.setenv("OFFLINE_GRPO_MODEL", tokenizer_folder)
        config, servers = module["TaskEnvironment"].config_init()
        environment = module["TaskEnvironment"](config.model_copy(update=changes), servers)
        environment.printed = repr(servers)
        environment.asked = []

        async def answer(**request):
            environment.asked.append(request)
            written = [[*environment.tokenizer.encode(str(7 + 5 * i)), 2] for i in range(request["n"])]
            return (
                request["input_ids"],
                written,
                [[-0.5 - t for t in range(len(ids))] for ids in written],
                ["stop"] * request["n"],
            )

        environment.server.tokens_and_logprobs_completion = answer
        environment.run = runner.run  # always in the same event loop, as in a program
        environment.run(environment.setup())
        return environment

    with asyncio.Runner() as runner:
        yield make


def test_a_group_has_the_servers_tokens_and_logprobs_and_the_tasks_scores(make):
    environment = make(group_size=3, temperature=0.7)
    problem = environment.run(environment.get_next_item())
    group, backlog = environment.run(environment.collect_trajectories(problem))
    prompt = TokenizerCodec(environment.tokenizer).encode(problem.messages)
    assert backlog == []
    for i, text in enumerate(("7", "12", "17")):
        written = [*environment.tokenizer.encode(text), 2]
        assert group["tokens"][i] == prompt + written
        assert group["masks"][i] == [-100] * len(prompt) + written
        assert group["inference_logprobs"][i] == [1.0] * len(prompt) + [-0.5 - t for t in range(len(written))]
        assert group["scores"][i] == pytest.approx(1.1 if problem.answer == text else 0.1)
    assert group["generation_params"] == {"temperature": 0.7}
    assert environment.server.servers[0].config.api_key == KEY
    assert KEY not in environment.printed + repr(environment.config)
    [request] = environment.asked
    assert (request["n"], request["max_tokens"], request["temperature"], request["split"]) == (3, 8, 0.7, "train")
    assert "stop" not in request


@pytest.mark.parametrize(("room", "expected"), [(0, None), (5, 5)])
def test_the_trainers_limit_is_kept(make, room, expected):
    environment = make()
    problem = environment.run(environment.get_next_item())
    environment.max_token_len = len(TokenizerCodec(environment.tokenizer).encode(problem.messages)) + 1 + room
    group, _ = environment.run(environment.collect_trajectories(problem))
    assert (group is None) == (expected is None)
    assert [request["max_tokens"] for request in environment.asked] == ([] if expected is None else [expected])


def test_problems_are_those_of_a_run_in_its_order_from_where_the_trainer_is(make):
    environment = make(task_overrides="seed=3 max_operand=12 eval.num_ids=5")
    run = typed(compose_with_hydra("seed=3", "task.max_operand=12", "eval.num_ids=5"))
    data = task_data(run)
    order = permutation(len(data.train), derive_seed(3, "order", 0))
    environment.curr_step, environment.config.batch_size, environment.config.group_size = 2, 32, 8
    first = [environment.run(environment.get_next_item()) for _ in range(4)]
    assert first == [data.train[order[position]] for position in (8, 9, 10, 11)]
    assert len(environment._held_out) == 5


def test_evaluation_asks_every_held_out_problem_once(make, tmp_path, capsys):
    environment = make(
        task_overrides="eval.num_ids=6", eval_temperature=0.3, data_dir_to_save_evals=str(tmp_path / "eval")
    )
    environment.run(environment.evaluate())
    held_out = environment._task.problems(Split.EVAL)[:6]
    asked = sorted(request["input_ids"] for request in environment.asked)
    assert asked == sorted(TokenizerCodec(environment.tokenizer).encode(problem.messages) for problem in held_out)
    assert {(request["temperature"], request["n"], request["split"]) for request in environment.asked} == {
        (0.3, 1, "eval")
    }
    correct = sum(problem.answer == "7" for problem in held_out) / 6
    assert f"eval/percent_correct={correct:.4g}" in capsys.readouterr().out
    stored = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert stored["results"]["all"]["eval/reward_mean"] == pytest.approx(0.1 + correct)


def test_task_sampling_and_group_size_are_those_of_the_run_that_starts_it(make, module, tmp_path, monkeypatch):
    words = (
        *("task=sat", "task.difficulty=0.1", "generation.temperature=0.8", "data.rollouts_per_problem=5"),
        "generation.stop=[END]",
    )
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(compose_with_hydra(*words), tmp_path / ".hydra" / "config.yaml")
    monkeypatch.setenv("OFFLINE_GRPO_RUN", str(tmp_path))
    environment = make()
    assert type(environment._task).__name__ == "SAT"
    assert (environment.config.temperature, environment.config.group_size) == (0.8, 5)
    environment.run(environment.collect_trajectories(environment.run(environment.get_next_item())))
    assert environment.asked[0]["stop"] == ["END"]
    assert type(make(task="arithmetic")._task).__name__ == "Arithmetic"
    assert environment._run.task["difficulty"] == 0.1
    assert make(task_overrides="difficulty=0.9")._run.task["difficulty"] == 0.9
    shutil.rmtree(tmp_path / ".hydra")

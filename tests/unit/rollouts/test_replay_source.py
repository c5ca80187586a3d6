"""Which recorded groups an iteration gets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import compose_config
from run_folders import ORIGIN, made_groups, make_replay, replayed, write_store

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import task_data
from offline_grpo.errors import ConfigError
from offline_grpo.rollouts.rows import TOKENS


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "run")


def texts(path: object, *words: str, count: int = 4) -> list[list[str]]:
    return [[text for text, _ in iteration] for iteration in replayed(make_replay(path, *words), count)]


def group(name: str) -> list[str]:
    return [f"{name}.{index}" for index in range(3)]


def test_the_default_is_the_record_in_its_order_again_and_again(store: Path) -> None:
    assert texts(store, count=5) == [[*group(f"{i % 4}.0"), *group(f"{i % 4}.1")] for i in range(5)]
    source = make_replay(store)
    source.start(0, None)
    assert [r.token_ids for g in source.next(0) for r in g.rollouts] == [
        r.token_ids for g in made_groups(0) for r in g.rollouts
    ]
    assert source.metrics() == {"rollouts/epoch": 0.25, "time/sampling_s": 0.0}


def test_groups_may_be_taken_in_another_number_and_order(store: Path) -> None:
    words = ("rollouts.problems_per_iteration=3", "rollouts.shuffle=true")
    found = texts(store, *words, count=8)  # three passes
    assert texts(store, words[0], count=2) == [
        [*group("0.0"), *group("0.1"), *group("1.0")],
        [*group("1.1"), *group("2.0"), *group("2.1")],
    ]
    flat = [text for iteration in found for text in iteration]
    passes = [flat[start : start + 24] for start in (0, 24, 48)]
    assert [sorted(one) for one in passes] == [sorted(passes[0])] * 3
    assert passes[0] != passes[1]
    assert found != texts(store, *words, "rollouts.seed=1", count=8)
    shares = [make_replay(store, *words, rank=rank, world_size=2) for rank in range(2)]
    for share in shares:
        share.start(0, None)
    both = [[str(g.rollouts[0].text) for g in share.next(5)] for share in shares]
    assert [both[0][0], both[1][0], both[0][1]] == found[5][::3]


def test_objectives_are_compared_on_the_same_rollouts_in_the_same_orders(store: Path) -> None:
    words = [(f"seed={seed}", f"train/advantage={name}") for seed in (0, 1) for name in ("rloo", "gdpo")]
    orders = [texts(store, "experiment=paired_objectives", *each) for each in words]
    assert orders[0] == orders[1] != orders[2] == orders[3]


def test_filters_choose_iterations_groups_and_completions(store: Path) -> None:
    assert texts(store, "rollouts.iterations=[2,3]", count=2) == texts(store)[1:3]
    assert texts(store, "rollouts.versions=[2,9]", count=2) == texts(store)[2:]
    # means are 0.1 to 0.4
    assert texts(store, "rollouts.rewards=[0.25,0.35]", count=1) == [[*group("2.0"), *group("2.1")]]
    assert texts(store, "rollouts.finish_reasons=[stop]", count=1) == [["0.0.0", "0.0.1", "0.1.0", "0.1.1"]]
    with pytest.raises(
        ConfigError, match=r"no group of .* left of 4 files; filters: rollouts.finish_reasons=\['length'\]$"
    ):
        texts(store, "rollouts.finish_reasons=[length]")  # one of each group


def test_another_reward_scores_the_recorded_texts_and_several_stores_come_in_order(store: Path, tmp_path: Path) -> None:
    assert replayed(make_replay(store, "rollouts.rescore=true"), 1) == [[(text, 5.0) for text in texts(store)[0]]]
    other = write_store(tmp_path / "other", iterations=1)
    assert texts(f"[{other},{store}]", count=3) == [texts(other)[0], *texts(store)[:2]]


def test_what_differs_from_the_record_is_named_at_the_start(tmp_path: Path, caplog) -> None:
    config = {"task": {"reward": "mine.old", "max_operand": 9}, "model": {"train_id": None}}
    store = write_store(tmp_path / "run", origin=replace(ORIGIN, config=config))
    ours = {"task": {"reward": "mine.new", "max_operand": 9}, "model": {"train_id": "a/model"}, "seed": 1}
    make_replay(store, origin=replace(ORIGIN, config=ours)).start(0, None)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    expected = "model.train_id=None, here a/model; task.reward=mine.old, here mine.new"
    assert warning == f"rollouts.path={store}: was recorded with other settings: {expected}"


def test_a_changed_store_is_not_taken_for_the_one_at_the_checkpoint(tmp_path: Path) -> None:
    """Nor the run's own record for another one."""
    store = write_store(tmp_path / "run")
    with pytest.raises(ConfigError, match="this run's own record"):
        make_replay(store, run_folder=store).start(0, None)
    source = make_replay(store)
    source.start(0, None)
    make_replay(store).start(2, source.state_dict())
    (store / "rollouts" / "iter_003.parquet").unlink()
    with pytest.raises(ConfigError, match=r"rollouts.path=.*: has not the groups that it had at the checkpoint"):
        make_replay(store).start(2, source.state_dict())


def test_filtered_and_unfiltered_rollouts_are_not_mixed(tmp_path: Path) -> None:
    store = write_store(tmp_path / "run")
    path = store / "rollouts" / "iter_001.parquet"
    table = pq.read_table(path)
    sets = pa.array([[[]] * len(ids) for ids in table["completion_ids"].to_pylist()], pa.list_(TOKENS))
    pq.write_table(table.set_column(table.column_names.index("alternatives"), "alternatives", sets), path)
    with pytest.raises(ConfigError, match=r"iter_001.parquet was sampled with top_p.* was not; replay one after"):
        make_replay(store).start(0, None)
    make_replay(store, "rollouts.iterations=[2,2]").start(0, None)


@pytest.mark.parametrize("name", ["tokenizer", "architecture"])
def test_rollouts_of_another_model_are_refused_unless_asked_for(name: str, tmp_path: Path) -> None:
    store = write_store(tmp_path / "run", origin=replace(ORIGIN, **{name: "f" * 64}))
    with pytest.raises(ConfigError, match=f"iter_000.parquet: .* {name} is another one .*any_model=true"):
        make_replay(store)
    assert texts(store, "rollouts.any_model=true", count=1) == [[*group("0.0"), *group("0.1")]]


@pytest.mark.parametrize("setting", ["rollouts.path=null", "rollouts.iterations=[3]", "rollouts.record=1"])
def test_a_mistake_is_found_before_a_model_is_loaded(setting: str, store: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(setting)}: "):
        task_data(typed(compose_config("rollouts=replay", f"rollouts.path={store}", setting)))

"""Which GPUs the server gets, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from factories import compose_config
from transformers import Qwen2Config

from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.errors import ConfigError
from offline_grpo.placement.devices import place
from offline_grpo.placement.ranks import Ranks
from offline_grpo.start.memory import check_memory


def devices_of(monkeypatch, *, num_gpus, **about):
    """Of a machine that seems to have so many GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    defaults = {"reference": None, "num_processes": 1, "num_servers": 1, "gpus_per_server": 1, "engine_devices": None}
    return place(**{"trainer": "cuda", "rule": "any", "strategy": "x", "needs_gpu": False, **defaults, **about})


@pytest.mark.parametrize(
    ("rule", "trainer", "num_processes", "configured", "num_gpus", "expected"),
    [
        # null takes the GPU that the strategy needs
        ("same", "cuda:1", 1, None, 4, [1]),
        ("other", "cuda", 1, None, 1, "null: .* no process trains on; use weight_sync=shared_vllm"),
        ("other", "auto", 2, None, 4, [2]),
        ("any", "cuda", 1, None, 2, [1]),
        ("any", "cpu", 1, None, 2, None),
        # a list is used as it is
        ("any", "cpu", 1, [1], 2, [1]),
        ("same", "auto", 2, [0], 4, [0]),
        # or refused
        ("any", "cuda", 1, [2], 2, r"\[2\]: this machine has 2 GPUs"),
        ("same", "cuda", 1, [1], 2, r"\[1\]: .* on the trainer's GPU \[0\]; use null"),
        ("other", "auto", 2, [1, 2], 4, r"\[1, 2\]: .* no process trains on; use placement.engine_devices=\[2\]"),
    ],
)
def test_the_server_gets_the_gpus_that_its_strategy_needs(
    monkeypatch, rule, trainer, num_processes, configured, num_gpus, expected
):
    about = {"num_gpus": num_gpus, "trainer": trainer, "rule": rule, "num_processes": num_processes}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"^placement.engine_devices={expected}"):
            devices_of(monkeypatch, **about, engine_devices=configured)
    else:
        assert devices_of(monkeypatch, **about, engine_devices=configured).servers == [expected]


@pytest.mark.parametrize(
    ("rule", "trainer", "num_servers", "each", "configured", "num_gpus", "expected"),
    [
        ("any", "cuda", 2, 2, [1, 2, 1, 2], 3, [[1, 2], [1, 2]]),  # several servers on one GPU
        ("any", "cuda", 2, 2, [1, 1, 2, 2], 3, None),  # one server would have GPU 1 twice
        ("any", "cpu", 2, 1, None, 0, [None, None]),
        ("any", "cuda", 3, 1, None, 3, None),
        ("same", "cuda:1", 2, 1, None, 2, [[1], [1]]),
        ("same", "cuda:1", 2, 1, [1, 0], 2, None),  # one would not be on the trainer's
    ],
)
def test_gpus_are_shared_out_among_servers(
    monkeypatch, rule, trainer, num_servers, each, configured, num_gpus, expected
):
    about = {"num_servers": num_servers, "gpus_per_server": each, "engine_devices": configured, "rule": rule}
    if expected is None:
        with pytest.raises(ConfigError, match=r"^placement.engine_devices="):
            devices_of(monkeypatch, num_gpus=num_gpus, trainer=trainer, **about)
    else:
        assert devices_of(monkeypatch, num_gpus=num_gpus, trainer=trainer, **about).servers == expected


@pytest.mark.parametrize(
    ("reference", "num_processes", "expected"),
    [
        ("cuda:1", 1, 1),
        ("cuda:0", 1, None),  # the trainer's
        ("cuda:2", 1, "this machine has 2 CUDA devices"),
        ("cuda:1", 2, "2 processes train"),
    ],
)
def test_the_reference_may_have_a_gpu_of_its_own(reference, num_processes, expected, monkeypatch):
    about = {"num_gpus": 2, "reference": reference, "num_processes": num_processes}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"^model.ref_device={reference}: {expected}"):
            devices_of(monkeypatch, **about)
    else:
        assert devices_of(monkeypatch, **about).reference == expected


@pytest.fixture
def two_small_gpus(monkeypatch):
    """A machine with two GPUs of 4 GiB, as far as placement asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=4 * 2**30, major=6, minor=0)
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A config.json, and no weights."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    ).save_pretrained(folder)
    return str(folder)


def checked(folder, *overrides):
    plan = make_plan(typed(compose_config("model=hf", f"model.train_id={folder}", "train.precision=bf16", *overrides)))
    return check_memory(plan, folder, prompt_tokens=(20, 20), devices=plan.devices(1))


def test_a_run_that_cannot_fit_is_refused_unless_told_otherwise(two_small_gpus, model_folder):
    too_much = (
        "train.batch_size=4096",
        "data.problems_per_iteration=1024",
        "generation.max_new_tokens=1000",
        "eval.max_new_tokens=1000",
    )
    with pytest.raises(ConfigError, match=r"placement.check_memory=true: GPU 0 has 4.0 GiB"):
        checked(model_folder, *too_much)
    checked(model_folder, *too_much, "placement.check_memory=false")


def test_auto_recomputes_no_more_than_it_must_and_says_so(two_small_gpus, model_folder, caplog):
    large = ("train.batch_size=400", "data.problems_per_iteration=1024", "placement.check_memory=false")
    large += ("generation.max_new_tokens=1000", "eval.max_new_tokens=1000")
    with caplog.at_level("INFO"):
        assert checked(model_folder, "model.device=cuda") == (0.0, False)
        share, offloads = checked(model_folder, *large)
    assert (0.0 < share < 1.0, offloads) == (True, False)
    said = [line for line in caplog.messages if "auto" in line]
    assert said == [f"train.gradient_checkpointing=auto: recomputes {s:.0%} of the blocks" for s in (0, share)]
    assert checked(model_folder, *large, "train.gradient_checkpointing=true") == (1.0, False)
    assert checked(model_folder, *large, "model.device=cpu") == (0.0, False)


def test_inputs_of_blocks_go_to_the_host_as_asked(two_small_gpus, model_folder, caplog):
    deep = ("train.batch_size=4096", "data.problems_per_iteration=4096", "generation.max_new_tokens=1000")
    deep += ("eval.max_new_tokens=1000", "placement.check_memory=false")
    with caplog.at_level("INFO"):
        assert checked(model_folder, *deep) == (1.0, True)
    assert "train.activation_offload=auto: the inputs of blocks wait in the host's memory" in caplog.messages
    assert checked(model_folder, *deep, "train.activation_offload=false") == (1.0, False)
    recomputed = "train.gradient_checkpointing=true"
    assert checked(model_folder, recomputed, "train.activation_offload=true") == (1.0, True)
    with pytest.raises(ConfigError, match=r"train.activation_offload=True: moves the inputs of recomputed blocks"):
        checked(model_folder, "train.activation_offload=true")


def test_what_travels_between_gpus_needs_one():
    plan = make_plan(typed(compose_config("generation=vllm_server", "weight_sync=nccl", "model.device=cpu")))
    with pytest.raises(ConfigError, match=r"^model\.device=cpu: weight_sync=nccl moves weights from GPU to GPU, "):
        plan.devices(1)


def test_what_processes_worked_on_in_turns_is_put_in_order_again(monkeypatch):
    """Of five items, process 0 of two had the first, the third and the fifth."""
    ranks = Ranks(use_cpu=True)
    monkeypatch.setattr(Ranks, "gather_results", lambda _, action: [*action(), *enumerate("bd")])
    assert ranks.gather_interleaved(lambda: "ace") == list("abcde")

"""Which GPUs the server gets, and what is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from factories import compose_config
from transformers import Qwen2Config

from offline_grpo.errors import ConfigError
from offline_grpo.placement.devices import Devices, check_devices, engine_gpus, reference_gpu, server_gpus, trainer_gpus
from offline_grpo.placement.memory import in_words
from offline_grpo.run.config import typed
from offline_grpo.run.gpu_memory import check_memory
from offline_grpo.run.plan import make_plan

TABLE = [
    # rule, GPUs of the training processes, GPUs of the machine, GPUs of the server (None: refused)
    ("same", [0], 1, [0]),
    ("same", [0], 2, [0]),
    ("same", [1], 4, [1]),
    ("same", [0, 1], 2, [0]),
    ("same", [0, 1], 4, [0]),
    ("other", [0], 1, None),
    ("other", [0], 2, [1]),
    ("other", [1], 2, [0]),
    ("other", [0], 4, [1]),
    ("other", [0, 1], 2, None),
    ("other", [0, 1], 4, [2]),
    ("any", [0], 1, [0]),
    ("any", [0], 2, [1]),
    ("any", [1], 2, [0]),
    ("any", [0], 4, [1]),
    ("any", [0, 1], 2, [0]),
    ("any", [0, 1], 4, [2]),
]


@pytest.mark.parametrize(("rule", "trainers", "num_gpus", "expected"), TABLE)
def test_null_takes_the_gpu_that_the_strategy_needs(rule, trainers, num_gpus, expected):
    if expected is None:
        with pytest.raises(
            ConfigError,
            match=r"placement.engine_devices=null: weight_sync=x needs a GPU .* all \d .*; use weight_sync=",
        ):
            engine_gpus(None, rule, name="x", trainers=trainers, num_gpus=num_gpus)
    else:
        assert engine_gpus(None, rule, name="x", trainers=trainers, num_gpus=num_gpus) == expected


@pytest.mark.parametrize(
    ("rule", "trainers", "configured"),
    [("any", [0], [0]), ("any", [0], [1, 3]), ("other", [0, 1], [3, 2]), ("same", [2], [2]), ("same", [0, 1], [0])],
)
def test_a_list_is_used_as_it_is(rule, trainers, configured):
    assert engine_gpus(configured, rule, name="x", trainers=trainers, num_gpus=4) == configured


@pytest.mark.parametrize(
    ("rule", "trainers", "configured", "num_gpus", "message"),
    [
        ("any", [0], [1], 1, r"placement.engine_devices=\[1\]: this machine has 1 GPU; .*null"),
        ("any", [0], [2], 2, r"placement.engine_devices=\[2\]: this machine has 2 GPUs, 0 to 1; "),
        ("any", [0], [-1], 2, r"placement.engine_devices=\[-1\]: this machine has 2 GPUs"),
        ("any", [], [0], 0, r"placement.engine_devices=\[0\]: this machine has 0 GPUs; "),
        (
            "same",
            [0],
            [1],
            2,
            r"placement.engine_devices=\[1\]: weight_sync=x needs the server on the trainer's GPU 0; use .*null",
        ),
        (
            "other",
            [0],
            [0],
            2,
            r"placement.engine_devices=\[0\]: weight_sync=x needs other GPUs .* use placement.engine_devices=\[1\]",
        ),
        ("other", [0, 1], [1, 2], 4, r"GPU 1 is trained on; use placement.engine_devices=\[2\]"),
        ("other", [0], [0], 1, r"GPU 0 is trained on; use weight_sync=shared_vllm"),
    ],
)
def test_what_cannot_be_is_refused(rule, trainers, configured, num_gpus, message):
    with pytest.raises(ConfigError, match=message):
        engine_gpus(configured, rule, name="x", trainers=trainers, num_gpus=num_gpus)


NULL = "placement.engine_devices=null"


@pytest.mark.parametrize(
    ("trainer", "num_servers", "each", "configured", "num_gpus", "expected"),
    [
        ("cuda", 2, 1, [0, 0], 1, [[0], [0]]),  # several servers on one GPU
        ("cuda", 4, 1, [0, 0, 2, 2], 3, [[0], [0], [2], [2]]),
        ("cuda", 2, 2, [1, 2, 1, 2], 3, [[1, 2], [1, 2]]),
        ("cpu", 2, 1, [1, 1], 2, [[1], [1]]),
        (
            "cuda",
            1,
            1,
            [1, 1],
            2,
            r"placement.engine_devices=\[1, 1\]: one server would have \[1, 1\]; name each GPU once for each server",
        ),
        ("cuda", 2, 2, [1, 1, 2, 2], 3, r"placement.engine_devices=\[1, 1, 2, 2\]: one server would have \[1, 1\]"),
        ("cpu", 0, 1, None, 0, []),
        ("cpu", 2, 1, None, 0, [None, None]),  # all on the CPU
        ("cpu", 1, 1, None, 4, [None]),
        ("cpu", 2, 1, None, 4, [[0], [1]]),
        ("cuda", 1, 1, None, 4, [[1]]),
        ("cuda", 1, 2, None, 4, [[1, 2]]),
        ("cuda", 2, 1, None, 4, [[1], [2]]),
        ("cuda", 2, 1, [3, 1], 4, [[3], [1]]),
        ("cuda", 2, 2, [2, 3, 4, 5], 8, [[2, 3], [4, 5]]),
        ("cuda", 2, 1, [1, 2, 3, 4], 8, [[1, 2], [3, 4]]),
        (
            "cuda",
            3,
            1,
            None,
            3,
            rf"{NULL}: 2 GPUs cannot be .* placement.num_engines=3 servers with 1 each .* name 3, or start fewer",
        ),
        (
            "cuda",
            2,
            1,
            None,
            1,
            rf"{NULL}: 1 GPU cannot be shared out among placement.num_engines=2 .* several times has several servers",
        ),
        ("cuda", 2, 2, [1, 2], 4, r"placement.engine_devices=\[1, 2\]: 2 GPUs .* with 2 each .* name 4, or"),
        ("cuda", 2, 1, [1, 2, 3], 4, r"placement.engine_devices=\[1, 2, 3\]: 3 GPUs cannot be shared out"),
        ("cpu", 2, 1, None, 1, rf"{NULL}: 1 GPU cannot be shared out"),
    ],
)
def test_gpus_are_shared_out_among_servers(trainer, num_servers, each, configured, num_gpus, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices = Devices(
        trainer=trainer,
        reference=None,
        num_processes=1,
        num_servers=num_servers,
        gpus_per_server=each,
        engine_devices=configured,
        strategy="x",
        rule="any",
        needs_gpu=False,
    )
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"^{expected}"):
            server_gpus(devices)
    else:
        assert server_gpus(devices) == expected


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        (None, [[1], [1]]),
        ([1, 1], [[1], [1]]),
        (
            [1, 0],
            r"placement.engine_devices=\[1, 0\]: weight_sync=ipc needs every server on the trainer's GPU 1; use .*=null, or .*nccl",
        ),
    ],
)
def test_servers_that_copy_on_the_trainers_gpu_are_all_there(configured, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = {
        "num_processes": 1,
        "num_servers": 2,
        "gpus_per_server": 1,
        "strategy": "ipc",
        "rule": "same",
        "needs_gpu": True,
    }
    devices = Devices(trainer="cuda:1", reference=None, engine_devices=configured, **about)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"^{expected}"):
            server_gpus(devices)
    else:
        assert server_gpus(devices) == expected


@pytest.mark.parametrize(
    ("reference", "num_processes", "expected"),
    [
        (None, 2, None),
        ("cuda:1", 1, 1),
        ("cuda:0", 1, None),  # the trainer's
        ("cpu", 1, None),
        ("cuda:2", 1, r"model.ref_device=cuda:2: this machine has 2 CUDA devices; use cuda:0 to cuda:1"),
        ("gpu", 1, r"model.ref_device=gpu: no device of that name"),
        (
            "cuda:1",
            2,
            r"model.ref_device=cuda:1: 2 processes train, and each has a reference .*; use model.ref_device=null, or",
        ),
    ],
)
def test_the_reference_may_have_a_gpu_of_its_own(reference, num_processes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = {
        "num_servers": 0,
        "gpus_per_server": 1,
        "engine_devices": None,
        "strategy": "x",
        "rule": "any",
        "needs_gpu": False,
    }
    devices = Devices(trainer="auto", reference=reference, num_processes=num_processes, **about)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"^{expected}"):
            check_devices(devices)
    else:
        assert reference_gpu(devices) == expected


def test_a_trainer_on_the_cpu_leaves_the_server_all_gpus_or_those_named():
    assert engine_gpus(None, "any", name="x", trainers=[], num_gpus=2) is None
    assert engine_gpus([1], "any", name="x", trainers=[], num_gpus=2) == [1]


@pytest.mark.parametrize(
    ("device", "num_processes", "expected"),
    [("auto", 2, [0, 1]), ("cuda", 1, [0]), ("cuda:1", 1, [1]), ("cpu", 2, [])],
)
def test_every_training_process_has_a_gpu(device, num_processes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert trainer_gpus(device, num_processes) == expected


@pytest.mark.parametrize(
    ("trainer", "reference", "engines", "allocation"),
    [
        ("cuda:0", None, [0], "GPUs: 0 training and servers, 1 free, 2 free"),
        ("cuda:0", "cuda:1", [0], "GPUs: 0 training and servers, 1 reference, 2 free"),
        ("auto", None, [1, 2], "GPUs: 0 training, 1 training and servers, 2 servers"),
        ("auto", None, [2, 7], "GPUs: 0 training, 1 training, 2 servers, 7 servers (not there)"),
    ],
)
def test_a_refusal_says_who_would_have_which_gpu(trainer, reference, engines, allocation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    devices = Devices(
        trainer=trainer,
        reference=reference,
        num_processes=1 if trainer != "auto" else 2,
        num_servers=1,
        gpus_per_server=1,
        engine_devices=engines,
        strategy="nccl",
        rule="other",
        needs_gpu=True,
    )
    with pytest.raises(ConfigError, match=rf"^placement\.engine_devices=.*\. {re.escape(allocation)}$"):
        check_devices(devices)


def test_more_training_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="cuda:2: this machine has 2 CUDA devices"):
        trainer_gpus("auto", 3)


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
    check_devices(plan.devices(1))
    return check_memory(plan, folder, prompt_tokens=(20, 20), num_processes=1)[0]


def test_the_prediction_is_logged_before_the_run(two_small_gpus, model_folder, caplog):
    with caplog.at_level("INFO"):
        checked(model_folder, "generation=vllm_server", "weight_sync=reload")
    table = "\n".join(caplog.messages)
    assert "GPU 0: predicted to hold" in table
    assert "optimizer state" in table.partition("GPU 1")[0]
    assert "server: weights" in table.partition("GPU 1")[2]


def test_a_run_that_cannot_fit_is_refused_unless_told_otherwise(two_small_gpus, model_folder):
    too_much = (
        "train.batch_size=4096",
        "data.problems_per_iteration=1024",
        "generation.max_new_tokens=1000",
        "eval.max_new_tokens=1000",
    )
    with pytest.raises(ConfigError, match=r"train.batch_size=4096: GPU 0 has 4.0 GiB"):
        checked(model_folder, *too_much)
    checked(model_folder, *too_much, "placement.check_memory=false")


def test_auto_recomputes_no_more_than_it_must_and_says_so(two_small_gpus, model_folder, caplog):
    large = (
        "train.batch_size=1024",
        "data.problems_per_iteration=1024",
        "generation.max_new_tokens=1000",
        "eval.max_new_tokens=1000",
    )
    no_check = "placement.check_memory=false"
    with caplog.at_level("INFO"):
        shares = [
            checked(model_folder, "model.device=cuda"),
            checked(model_folder, *large, no_check),
            checked(model_folder, *large, "train.gradient_checkpointing=true", no_check),
            checked(model_folder, *large, "train.gradient_checkpointing=false", no_check),
            checked(model_folder, *large, "model.device=cpu"),
        ]
    assert shares[0] == 0.0
    assert 0.0 < shares[1] <= 1.0
    assert shares[2:] == [1.0, 0.0, 0.0]
    said = [line for line in caplog.messages if "auto" in line]
    assert said == [f"train.gradient_checkpointing=auto: recomputes {in_words(share)}" for share in shares[:2]]
    assert said[0].endswith("recomputes no block")


def test_a_gpu_that_is_not_there_is_refused_whatever_check_memory_says(two_small_gpus, model_folder):
    with pytest.raises(ConfigError, match=r"placement.engine_devices=\[5\]: this machine has 2 GPUs"):
        checked(
            model_folder,
            "generation=vllm_server",
            "weight_sync=reload",
            "placement.engine_devices=[5]",
            "placement.check_memory=false",
        )


def test_nothing_is_predicted_for_cpus_and_found_servers_may_be_anywhere(two_small_gpus, model_folder, caplog):
    with caplog.at_level("INFO"):
        checked(model_folder, "model.device=cpu", "train.batch_size=4096")
    assert caplog.messages == []
    found = ("generation=vllm_server", "weight_sync=reload", "generation.base_url=http://127.0.0.1:1")
    checked(model_folder, *found, "placement.engine_devices=[5]")


@pytest.mark.parametrize("option", ["ipc", "nccl"])
@pytest.mark.parametrize("where", [(), ("generation.base_url=http://127.0.0.1:1",)])
def test_what_travels_between_gpus_needs_one(where, option):
    plan = make_plan(
        typed(compose_config("generation=vllm_server", f"weight_sync={option}", "model.device=cpu", *where))
    )
    with pytest.raises(ConfigError, match=rf"^model\.device=cpu: weight_sync={option} moves weights from GPU to GPU, "):
        check_devices(plan.devices(1))

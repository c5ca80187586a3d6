"""The bridge file: the server's memory as tensors of ours, and nothing but an error from a file that says something
else.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inside_vllm import SHAPES, FusedModel, make_worker

from offline_grpo.errors import EngineError
from offline_grpo.weight_sync.bridge import Bridge, start_time_of

CPU = torch.device("cpu")


@pytest.fixture
def model() -> FusedModel:
    return FusedModel()


@pytest.fixture
def worker(model: FusedModel) -> Iterator[Any]:
    worker = make_worker(model)
    yield worker
    for file in getattr(worker, "_grpo_files", []):
        os.close(file)


@pytest.fixture
def bridge(worker: Any) -> Bridge:
    return Bridge.from_worker("run-1", "some/model", worker.grpo_describe(), worker.grpo_export(), worker.grpo_layout())


def by_name(model: FusedModel) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, cut out by hand."""
    block = model.model.layers[0]
    qkv, gate_up = block.self_attn.qkv_proj, block.mlp.gate_up_proj.weight
    return {
        "model.embed_tokens.weight": model.model.embed_tokens.weight[:10],
        "model.layers.0.self_attn.q_proj.weight": qkv.weight[:16],
        "model.layers.0.self_attn.k_proj.weight": qkv.weight[16:24],
        "model.layers.0.self_attn.v_proj.weight": qkv.weight[24:],
        "model.layers.0.self_attn.q_proj.bias": qkv.bias[:16],
        "model.layers.0.self_attn.k_proj.bias": qkv.bias[16:24],
        "model.layers.0.self_attn.v_proj.bias": qkv.bias[24:],
        "model.layers.0.self_attn.o_proj.weight": block.self_attn.o_proj.weight,
        "model.layers.0.mlp.gate_proj.weight": gate_up[:12],
        "model.layers.0.mlp.up_proj.weight": gate_up[12:],
        "model.layers.0.mlp.down_proj.weight": block.mlp.down_proj.weight,
        "model.layers.0.norm.weight": block.norm.weight,
        "lm_head.weight": model.lm_head.weight[:10],
    }


def test_views_are_the_servers_memory(model: FusedModel, worker: Any, tmp_path: Path) -> None:
    """Through the file and back: equal bits, and a write by either side is there for the other."""
    before = {name: parameter.clone() for name, parameter in by_name(model).items()}
    exported = worker.grpo_export()
    bridge = Bridge.from_worker("run-1", "some/model", worker.grpo_describe(), exported, worker.grpo_layout())
    path = tmp_path / "vllm_bridge_config.json"
    bridge.write(path)
    assert Bridge.read(path) == bridge
    assert (bridge.run_id, bridge.model, bridge.pid, bridge.device) == ("run-1", "some/model", os.getpid(), "cpu")
    views = Bridge.read(path).open(CPU)
    assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES
    assert all(torch.equal(view, before[name]) for name, view in views.items())
    for number, (name, view) in enumerate(views.items()):
        view.fill_(number)
        assert torch.equal(by_name(model)[name], view)
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.weight[16] = 77
    assert views["model.layers.0.self_attn.k_proj.weight"][0].tolist() == [77] * 8
    assert views["lm_head.weight"].data_ptr() == views["model.embed_tokens.weight"].data_ptr()
    assert len(exported["storages"]) == len(list(model.parameters()))


def test_a_scalar_is_shared_too() -> None:
    model: Any = FusedModel()
    model.scale = torch.nn.Parameter(torch.tensor(3.0))
    worker = make_worker(model)
    state = worker.grpo_state()["fingerprints"]
    bridge = Bridge.from_worker(
        "run-1", "some/model", worker.grpo_describe(), worker.grpo_export(), worker.grpo_layout()
    )
    view = bridge.open(CPU)["scale"]
    assert (view.shape, view.item()) == ((), 3.0)
    view.fill_(4)
    assert model.scale.item() == 4
    after = worker.grpo_state()["fingerprints"]
    assert [name for name in state if state[name] != after[name]] == ["scale"]
    for file in worker._grpo_files:
        os.close(file)


def test_padding_is_out_of_reach(model: FusedModel, bridge: Bridge) -> None:
    padding = model.model.embed_tokens.weight[10:].clone()
    for view in bridge.open(CPU).values():
        view.zero_()
    assert torch.equal(model.model.embed_tokens.weight[10:], padding)
    assert not padding.eq(0).any()


def test_a_second_export_is_of_the_same_memory(model: FusedModel, worker: Any) -> None:
    first, second = worker.grpo_export(), worker.grpo_export()
    assert first == second


def test_16_bit_weights(tmp_path: Path) -> None:
    model = FusedModel(dtype=torch.bfloat16)
    worker = make_worker(model)
    bridge = Bridge.from_worker("r", "m", worker.grpo_describe(), worker.grpo_export(), worker.grpo_layout())
    views = bridge.open(CPU)
    assert {view.dtype for view in views.values()} == {torch.bfloat16}
    assert all(torch.equal(view, by_name(model)[name]) for name, view in views.items())


def test_another_process_sees_the_same_memory(bridge: Bridge, model: FusedModel, tmp_path: Path) -> None:
    bridge.write(tmp_path / "bridge.json")
    code = (
        "import sys, torch; from pathlib import Path; from offline_grpo.weight_sync.bridge import Bridge\n"
        "Bridge.read(Path(sys.argv[1])).open(torch.device('cpu'))['model.layers.0.norm.weight'].fill_(5)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "bridge.json")], check=True, timeout=60)
    assert model.model.layers[0].norm.weight.tolist() == [5.0] * 8


def test_memory_goes_with_its_last_user(worker: Any, model: FusedModel, bridge: Bridge) -> None:
    """It has no name in any file system."""
    views = bridge.open(CPU)
    expected = {name: view.clone() for name, view in views.items()}
    for file in worker._grpo_files:
        assert os.readlink(f"/proc/self/fd/{file}") == "/memfd:offline-grpo-weights (deleted)"
        os.close(file)
    worker._grpo_files = []
    del model
    assert all(torch.equal(view, expected[name]) for name, view in views.items())
    with pytest.raises(
        EngineError,
        match=r"memory of the server \(pid \d+\) cannot be opened \(.*\): trainer and server must run on one machine",
    ):
        bridge.open(CPU)


# Files


@pytest.mark.parametrize("interrupted", ["write", "replace"])
def test_an_interrupted_write_leaves_the_old_file(
    interrupted: str, bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "vllm_bridge_config.json"
    bridge.write(path)
    old = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600, "it says how to write to the weights"

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync" if interrupted == "write" else "replace", fail)
    with pytest.raises(OSError, match="no space"):
        bridge.write(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no readable bridge file"),
        (b"", "no readable bridge file"),
        (b"\xff\xfe", "no readable bridge file"),
        (b'{"format": 1,', "no readable bridge file"),
        (pickle.dumps({"format": 1}), "no readable bridge file"),
        (b"[]", "is no bridge file of format 1"),
        (b"7", "is no bridge file of format 1"),
        (b"{}", "is no bridge file of format 1"),
        (b'{"format": 2}', "is no bridge file of format 1"),
        (b'{"format": 1}', "storages must be a list"),
    ],
)
def test_what_is_no_bridge_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=f"^{path}: {message}"):
        Bridge.read(path)


def with_(*keys: Any, value: Any) -> Callable[[Any], None]:
    """Replaces one value in a record."""

    def change(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


def without(*keys: Any) -> Callable[[Any], None]:
    def change(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        del record[keys[-1]]

    return change


def both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(record: Any) -> None:
        for each in changes:
            each(record)

    return change


QKV = 1
"""Place of a tensor of shape [32, 8] in the file."""

HOSTILE = {
    "pid is text": (with_("pid", value="1; rm -rf"), "pid must be int"),
    "pid is true": (with_("pid", value=True), "pid must be int"),
    "run_id is a list": (with_("run_id", value=[]), "run_id must be str"),
    "no model": (without("model"), "missing .*'model'"),
    "gpu is a number": (with_("gpu_uuid", value=3), "gpu_uuid must be str"),
    "no storages": (without("storages"), "storages must be a list"),
    "storages are a record": (with_("storages", value={}), "storages must be a list"),
    "a storage is text": (with_("storages", 0, value="/etc/passwd"), r"storages\[0\]: must be a record"),
    "a file is named by a path": (with_("storages", 0, "fd", value="../../../etc/passwd"), r"storages\[0\]: fd must be int"),
    "a handle is bytes": (with_("storages", 0, "handle", value=[128, 4, 149]), r"storages\[0\]: handle must be str"),
    "no size": (without("storages", 0, "num_bytes"), "missing .*'num_bytes'"),
    "a tensor is null": (with_("tensors", 0, value=None), r"tensors\[0\]: must be a record"),
    "no dtype": (without("tensors", QKV, "dtype"), "missing .*'dtype'"),
    "unknown dtype": (with_("tensors", QKV, "dtype", value="float8"), "is no tensor that can be shared"),
    "dtype of an object": (with_("tensors", QKV, "dtype", value="object"), "is no tensor that can be shared"),
    "negative storage": (with_("tensors", QKV, "storage", value=-1), "is no tensor that can be shared"),
    "storage that is not there": (with_("tensors", QKV, "storage", value=99), "is no tensor that can be shared"),
    "negative offset": (with_("tensors", QKV, "offset", value=-8), "is no tensor that can be shared"),
    "negative size": (with_("tensors", QKV, "shape", value=[-32, 8]), "is no tensor that can be shared"),
    "negative stride": (with_("tensors", QKV, "stride", value=[-8, 1]), "is no tensor that can be shared"),
    "size is text": (with_("tensors", QKV, "shape", value=["32", 8]), "is no tensor that can be shared"),
    "size is a fraction": (with_("tensors", QKV, "shape", value=[32.0, 8]), "is no tensor that can be shared"),
    "size is true": (with_("tensors", QKV, "shape", value=[True, 8]), "is no tensor that can be shared"),
    "more strides than sizes": (with_("tensors", QKV, "stride", value=[8, 1, 1]), "is no tensor that can be shared"),
    "offset beyond the memory": (with_("tensors", QKV, "offset", value=8), "reaches beyond its memory"),
    "one element too many": (with_("tensors", QKV, "offset", value=1), "reaches beyond its memory"),
    "one row too many": (with_("tensors", QKV, "shape", value=[33, 8]), "reaches beyond its memory"),
    "stride too long": (with_("tensors", QKV, "stride", value=[9, 1]), "reaches beyond its memory"),
    "huge": (with_("tensors", QKV, "shape", value=[2**40, 2**40]), "is no tensor that can be shared"),
    "beyond 64 bits": (with_("tensors", QKV, "offset", value=2**70), "offset must be int"),
    "empty but far away": (
        both(with_("tensors", QKV, "shape", value=[32, 0]), with_("tensors", QKV, "stride", value=[1, 2**70])),
        "is no tensor that can be shared",
    ),
    "wider elements": (with_("tensors", QKV, "dtype", value="float64"), "is no tensor that can be shared"),
    "negative row": (with_("param_mappings", 1, "row", value=-1), "is not inside"),
    "no rows": (with_("param_mappings", 1, "rows", value=0), "is not inside"),
    "rows beyond the tensor": (with_("param_mappings", 1, "rows", value=33), "is not inside"),
    "row is text": (with_("param_mappings", 1, "row", value="0"), "row must be int"),
    "a tensor that is not there": (with_("param_mappings", 1, "tensor", value="nothing"), "is not inside nothing"),
    "kind that is not there": (with_("storages", 0, "kind", value="pickle"), "storages of kind 'pickle' are unknown"),
}  # fmt: skip


def record_of(bridge: Bridge, path: Path) -> dict[str, Any]:
    bridge.write(path)
    record = json.loads(path.read_text())
    assert record["tensors"][QKV]["shape"] == [32, 8]
    return record


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_is_opened(
    case: str, bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bridge.json"
    record = record_of(bridge, path)
    change, message = HOSTILE[case]
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(EngineError, match=f"^{path}: .*{message}") as error:
        Bridge.read(path)
    assert len(str(error.value)) < 600


def refuse_to_open(record: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(record))
    bridge = Bridge.read(path)
    with pytest.raises(EngineError, match=r"^memory of the server \(pid \d+\) cannot be opened"):
        bridge.open(CPU)


@pytest.mark.parametrize("num_bytes", [1025, 2**40, 2**62])
def test_memory_is_never_made_larger(num_bytes: int, bridge: Bridge, tmp_path: Path) -> None:
    """To map a file beyond its end would extend it."""
    record = record_of(bridge, tmp_path / "bridge.json")
    storage = record["storages"][record["tensors"][QKV]["storage"]]
    assert storage["num_bytes"] == 1024
    storage["num_bytes"] = num_bytes
    refuse_to_open(record, tmp_path / "bridge.json")
    assert os.stat(f"/proc/self/fd/{storage['fd']}").st_size == 1024


def test_only_memory_is_opened(bridge: Bridge, tmp_path: Path) -> None:
    """A descriptor of a file on disk would let training write into it."""
    victim = tmp_path / "thesis.tex"
    victim.write_bytes(b"x" * 4096)
    record = record_of(bridge, tmp_path / "bridge.json")
    with victim.open("r+b") as file:
        record["storages"][0]["fd"] = file.fileno()
        refuse_to_open(record, tmp_path / "bridge.json")
    record["storages"][0]["fd"] = 99999
    refuse_to_open(record, tmp_path / "bridge.json")
    record["storages"][0]["fd"] = -1
    refuse_to_open(record, tmp_path / "bridge.json")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["file", "cuda"])
def test_a_pickle_in_place_of_a_handle_is_never_executed(kind: str, bridge: Bridge, tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    bomb = base64.b64encode(pickle.dumps(Bomb(exploded))).decode()
    record = record_of(bridge, tmp_path / "bridge.json")
    for storage in record["storages"]:
        storage |= {
            "kind": kind,
            "handle": bomb,
            "counter_handle": bomb,
            "event_handle": bomb,
            "fd": storage["fd"] if kind == "file" else 0,
        }
    path = tmp_path / "bridge.json"
    if kind == "file":  # where handles have no meaning
        path.write_text(json.dumps(record))
        Bridge.read(path).open(CPU)
    else:
        refuse_to_open(record, path)
    assert not exploded.exists()
    pickle.loads(base64.b64decode(bomb))
    assert exploded.exists()  # it would have


def test_a_handle_that_is_no_base64(bridge: Bridge, tmp_path: Path) -> None:
    record = record_of(bridge, tmp_path / "bridge.json")
    record["storages"][0] |= {"kind": "cuda", "handle": "a", "event_handle": "\u00e9"}
    refuse_to_open(record, tmp_path / "bridge.json")


def test_extra_fields_are_ignored(bridge: Bridge, tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    record = record_of(bridge, path)
    for part in (record, record["storages"][0], record["tensors"][0], record["param_mappings"][0]):
        part |= {"__class__": "os.system", "_target_": "x", "note": {"a": 1}}
    path.write_text(json.dumps(record))
    assert Bridge.read(path) == bridge


def test_a_file_that_outlived_its_server(bridge: Bridge, tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    record = record_of(bridge, path)
    with subprocess.Popen(["true"]) as ended:
        pass
    own_start = start_time_of(os.getpid())
    assert own_start is not None
    for pid, start_time in (
        (ended.pid, own_start),
        (os.getpid(), own_start + 1),
        (1, own_start),
        (-1, own_start),
        (2**40, own_start),
    ):
        path.write_text(json.dumps(record | {"pid": pid, "start_time": start_time}))
        with pytest.raises(
            EngineError, match=rf"^{path}: is stale: the server that wrote it \(pid {pid}, run run-1\) has ended$"
        ):
            Bridge.read(path)


def test_start_times_tell_processes_with_odd_names_apart() -> None:
    code = "import time; open('/proc/self/comm', 'w').write('a ) 1 2 ('); print('up', flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            ours, theirs = start_time_of(os.getpid()), start_time_of(other.pid)
            assert ours is not None
            assert theirs is not None
            assert 0 < ours <= theirs
        finally:
            other.kill()
    assert start_time_of(other.pid) is None

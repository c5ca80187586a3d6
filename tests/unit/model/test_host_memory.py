"""Memory of the host that a GPU reads: when its pages are locked, and until when. On a real GPU:
tests/gpu/test_gpu_offload.py.
"""

from types import SimpleNamespace

import pytest
import torch

from offline_grpo.model.host_memory import HostTensors

CUDA = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append(("lock", address)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unlock", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return calls


def test_pages_are_locked_until_the_last_view_is_gone(calls):
    """Or a later run of the same process, whose memory may lie at the same place, could not lock it."""
    host = HostTensors({"a": torch.Size([3, 5]), "b": torch.Size([7])}, CUDA)
    view, address = host.views["b"], host.flat.data_ptr()
    assert calls == [("lock", address)]
    del host
    assert calls == [("lock", address)]
    assert view.tolist() == [0.0] * 7
    del view
    assert calls == [("lock", address), ("unlock", address)]


def test_memory_that_cannot_be_locked_is_an_error(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"cannot lock 0.0 GiB of its memory \(cudaHostRegister: error 2\); see `ulimit -l`",
    ):
        HostTensors({"a": torch.Size([3])}, CUDA)
    assert calls == []


def test_a_cpu_locks_nothing(calls):
    HostTensors({"a": torch.Size([3])}, torch.device("cpu"))
    assert calls == []

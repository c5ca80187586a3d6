"""fp32 masters behind a 16-bit model, also in the host's memory; on a real GPU: tests/gpu/test_gpu_training.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from offline_grpo.model import masters as masters_module
from offline_grpo.model.masters import HostTensors, MasterWeights


def model(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    nn.init.normal_(layer.weight, std=0.02)
    return layer.to(dtype)


def steps(parameters, layer, masters, num_steps=20, lr=1e-6):
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    for _ in range(num_steps):
        layer(torch.ones(1, 16, dtype=layer.weight.dtype)).float().sum().backward()
        if masters is not None:
            masters.accumulate()
        optimizer.step()
        optimizer.zero_grad()
        if masters is not None:
            masters.publish()


def test_masters_move_where_bf16_weights_do_not():
    alone = model(torch.bfloat16)
    before = alone.weight.detach().clone()
    steps(alone.parameters(), alone, None)
    share_moved_alone = (alone.weight != before).float().mean()

    layer = model(torch.bfloat16)
    masters = MasterWeights(layer.named_parameters())
    masters_before = masters.parameters["weight"].detach().clone()
    steps(masters.parameters.values(), layer, masters, num_steps=200)
    moved = masters.parameters["weight"].detach() - masters_before
    assert share_moved_alone < 0.2
    assert (moved != 0).all()
    assert torch.allclose(moved, torch.full_like(moved, -200e-6), rtol=0.02)  # Adam moves each weight by lr a step
    assert torch.equal(layer.weight, masters.parameters["weight"].bfloat16())
    assert (layer.weight != before).float().mean() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dithered_masters_move_the_mean_weight_from_the_first_update_on(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(512, 512, bias=False).to(dtype)
    layer.weight.data[0], layer.weight.data[1] = 0.0, -0.0
    before = layer.weight.detach().clone()
    masters = MasterWeights(layer.named_parameters())
    masters.dither(seed=0)
    assert masters.differing() == []
    noise = masters.values["weight"] - before.float()
    masters.publish()
    assert torch.equal(layer.weight.view(torch.int16), before.view(torch.int16))
    assert (noise != 0).float().mean() > 0.95
    assert abs(noise.mean()) < 0.01 * noise.abs().mean()
    update = 1e-6  # a hundredth of the steps between weights of 0.02 in bf16, a tenth in fp16
    masters.values["weight"].add_(update)
    masters.publish()
    moved = layer.weight.float() - before.float()
    assert 0 < (moved != 0).float().mean() < 0.5
    assert moved.mean().item() == pytest.approx(update, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_of_either_sign_have_their_whole_effect_also_at_powers_of_two(dtype):
    """Of stochastic rounding: a share `update / step` of the weights moves by the step to the next number on that side,
    which at a power of two is half as far towards 0. So it is for updates of up to half a step.
    """
    count = 1 << 18
    weights = torch.tensor([1.0, 0.5, -2.0, 1.5, -0.75, 3.0], dtype=dtype)
    masters = MasterWeights([("norm", nn.Parameter(weights[:, None].expand(-1, count).contiguous()))])
    masters.dither(seed=0)
    assert masters.differing() == []
    for update in (1e-5, -1e-5, 1e-4, -1e-4):
        neighbour = torch.nextafter(weights, torch.full_like(weights, update * torch.inf))
        step = (neighbour.float() - weights.float()).double()  # [6]
        moved = (masters.values["norm"] + update).to(dtype).double() - weights[:, None].double()
        assert ((moved == 0) | (moved == step[:, None])).all()
        share = update / step
        error = step.abs() * (share * (1 - share) / count).sqrt()
        assert ((moved.mean(1) - update).abs() < 5 * error).all()


@pytest.mark.parametrize("small_elements", [16, 256], ids=["the bias waits", "both wait"])
def test_gradients_accumulate_in_fp32(monkeypatch, small_elements):
    monkeypatch.setattr(masters_module, "SMALL_ELEMENTS", small_elements)
    layer = model(torch.bfloat16)
    masters = MasterWeights(layer.named_parameters())
    big, small = torch.full((1, 16), 256.0).bfloat16(), torch.full((1, 16), 1.0).bfloat16()
    for x in (big, small, small, small):
        layer(x).float().sum().backward()
        masters.accumulate()
    gradient = masters.parameters["weight"].grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full_like(gradient, 259.0))  # bf16 has no 259: it would stay at 256
    bias_gradient = masters.parameters["bias"].grad
    assert bias_gradient is not None
    assert torch.equal(bias_gradient, torch.full((16,), 4.0))
    assert layer.weight.grad is None
    assert layer.bias.grad is None


@pytest.mark.parametrize("passes", [("a", "b", "b"), ("ab", "ab", "a", "ab")])
def test_what_a_pass_does_not_reach_keeps_its_gradient(passes):
    """As experts do that no token of a microbatch went to; also in a second update."""
    layers = nn.ModuleDict({name: model(torch.bfloat16) for name in ("a", "b")})
    masters = MasterWeights(layers.named_parameters())
    for update in (passes, passes[::-1]):
        for reached in update:
            torch.stack([layers[name](torch.ones(1, 16).bfloat16()).float().sum() for name in reached]).sum().backward()
            masters.accumulate()
        for name, master in masters.parameters.items():
            expected = float(sum(name[0] in reached for reached in update))
            assert master.grad is not None
            assert torch.equal(master.grad, torch.full_like(master.grad, expected)), name
            master.grad = None


def test_publishing_writes_in_place_and_state_restores():
    layer = model(torch.bfloat16)
    address = layer.weight.data_ptr()
    masters = MasterWeights(layer.named_parameters())
    state = {name: value.clone() for name, value in masters.state_dict().items()}
    steps(masters.parameters.values(), layer, masters, lr=1e-2)
    assert layer.weight.data_ptr() == address
    assert not torch.equal(masters.parameters["weight"], state["weight"])
    masters.load_state_dict(state)
    assert torch.equal(masters.parameters["weight"], state["weight"])
    assert torch.equal(layer.weight, state["weight"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_another_process_wrote_is_found_and_written_over(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last bit of the last element, in a sign, and as NaN; one that is its own master cannot differ."""
    monkeypatch.setattr(masters_module, "CHUNK_ELEMENTS", 5)
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(4, 3).to(dtype)) for name in ("a", "b", "c")}
    parameters["zero"] = nn.Parameter(torch.zeros(2, dtype=dtype))
    shared = MasterWeights(parameters.items(), separate=True)
    with torch.no_grad():
        shared.parameters["a"].add_(0.3)
    shared.publish()
    assert shared.differing() == []
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    parameters["b"].data.view(bits)[3, 2] ^= 1
    parameters["c"].data[0, 0] = float("nan")
    parameters["zero"].data[0] = -0.0
    assert shared.differing() == ["b", "c", "zero"]
    shared.publish()
    assert shared.differing() == []
    assert MasterWeights({"own": nn.Parameter(torch.zeros(2))}.items()).differing() == []


def test_host_memory_is_locked_until_the_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a later run of the same process, whose memory may lie at the same place, could not lock it."""
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append(("lock", address)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unlock", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = HostTensors({"a": torch.Size([3, 5]), "b": torch.Size([7])}, torch.device("cuda"))
    view, address = host.views["b"], host.flat.data_ptr()
    del host
    assert calls == [("lock", address)]
    assert view.tolist() == [0.0] * 7
    del view
    assert calls == [("lock", address), ("unlock", address)]
    HostTensors({"a": torch.Size([3])}, torch.device("cpu"))
    assert len(calls) == 2
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(torch.OutOfMemoryError, match="cannot lock"):
        HostTensors({"a": torch.Size([3])}, torch.device("cuda"))

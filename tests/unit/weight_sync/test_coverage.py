"""Weights are shared only where every parameter of the policy is there, plain, and equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.shared_vllm import check_coverage


@pytest.fixture
def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in (("a", (4, 2)), ("b", (3,)), ("c", (2, 2)))}


@pytest.fixture
def views(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def refused(parameters: dict[str, nn.Parameter], views: dict[str, Tensor], *, compare: bool = True) -> str:
    with pytest.raises(
        ConfigError,
        match=r"^weight_sync=shared_vllm: \d+ of \d+ parameters cannot be shared: .*or use weight_sync=reload",
    ) as error:
        check_coverage(parameters, views, compare=compare)
    return str(error.value).partition("cannot be shared: ")[2].partition(". Start the server")[0]


def test_a_tensor_that_the_server_lacks(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    del views["b"]
    assert refused(parameters, views, compare=False) == "b: the server has no such tensor"


def test_another_shape(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    views["a"] = views["a"].t()
    expected = "a: [4, 2] float32 in the trainer, [2, 4] float32 in the server"
    assert refused(parameters, views, compare=False) == expected


def test_other_values(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    """One element in its last bit, and two rows exchanged: what packed or permuted weights look like."""
    views["b"][1] = torch.nextafter(views["b"][1], torch.tensor(9.0))
    views["a"] = views["a"][[1, 0, 2, 3]]
    assert refused(parameters, views) == "a: other values than the trainer's; b: other values than the trainer's"
    check_coverage(parameters, views, compare=False)  # one that was started again has the values from before training


def test_a_tensor_that_the_trainer_lacks(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    """It would stay as it is while everything around it is trained."""
    views["visual.patch"] = torch.zeros(3)
    assert refused(parameters, views) == "visual.patch: the trainer has no such parameter"


def test_tied_weights(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    """The trainer names them once, the server twice."""
    views["lm_head"] = views["a"].view(4, 2)
    check_coverage(parameters, views, compare=True)
    views["lm_head"] = views["a"].clone()
    assert refused(parameters, views) == "lm_head: the trainer has no such parameter"

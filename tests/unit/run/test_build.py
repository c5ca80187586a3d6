"""Components from `_target_` nodes: what a signature refuses."""

from dataclasses import dataclass, fields

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Loss, Task
from offline_grpo.loss.base import PolicyGradientLoss
from offline_grpo.run.build import build


@dataclass
class Part:
    lr: float
    name: str = "x"
    sizes: list[int] | None = None
    policy: object = None


TARGET = {"_target_": f"{__name__}.Part"}


def test_values_and_runtime_objects_meet_in_the_constructor():
    policy = object()
    part = build({**TARGET, "lr": 1, "sizes": [1, 2]}, key="part", policy=policy, tokenizer="unused")
    assert (part.lr, part.name, part.sizes, part.policy) == (1, "x", [1, 2], policy)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"lr": 1.0}, r"part=.*needs a _target_"),
        ({"_target_": "offline_grpo.nowhere.Part"}, r"part._target_=offline_grpo.nowhere.Part: cannot be imported"),
        ({"_target_": "offline_grpo.types.Nothing"}, r"part._target_=offline_grpo.types.Nothing: cannot be imported"),
        ({**TARGET, "lr": 1.0, "speed": 3}, r"part.speed=3: Part has no such setting; it has lr, name, sizes"),
        ({**TARGET}, r"part.lr: Part needs it and it is not set"),
        ({**TARGET, "lr": "fast"}, r"part.lr='fast': expected float, got str"),
        ({**TARGET, "lr": True}, r"part.lr=True: expected float, got bool"),
        ({**TARGET, "lr": [5e-6, 1e-5]}, r"to sweep over it: --multirun part.lr=5e-06,1e-05"),
        ({**TARGET, "lr": 1.0, "sizes": [1, "a"]}, r"part.sizes=.*expected list\[int\] \| None"),
        ({**TARGET, "lr": None}, r"part.lr=None: expected float, got NoneType"),
        (
            {**TARGET, "lr": 1.0, "policy": "x"},
            r"^part.policy=x: the run itself gives Part this argument; leave it out$",
        ),
    ],
)
def test_what_does_not_fit_the_signature_is_refused(node, message):
    with pytest.raises(ConfigError, match=message):
        build(node, key="part", policy=object())


def test_a_component_of_another_kind_is_refused():
    message = r"part._target_=.*: does not implement Task: lacks problems, score; see offline_grpo/interfaces.py$"
    with pytest.raises(ConfigError, match=message):
        build({**TARGET, "lr": 1.0}, key="part", protocol=Task)


@dataclass
class Broken(Part):
    def __post_init__(self) -> None:
        self.lr = 1 / self.lr


def test_what_a_constructor_raises_is_one_line():
    message = r"^part._target_=.*Broken: raised ZeroDivisionError: float division by zero \(test_build.py, line \d+, in __post_init__\);"
    with pytest.raises(ConfigError, match=message):
        build({"_target_": f"{__name__}.Broken", "lr": 0.0}, key="part")


def test_an_error_of_the_packages_own_constructor_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(Broken, "__module__", "offline_grpo.somewhere")
    with pytest.raises(ZeroDivisionError):
        build({"_target_": f"{__name__}.Broken", "lr": 0.0}, key="part")


class Unfinished(PolicyGradientLoss):
    """Without the method that a loss must have."""


def test_what_an_abstract_base_wants_is_named():
    node = {"_target_": f"{__name__}.Unfinished", **{f.name: None for f in fields(PolicyGradientLoss) if f.init}}
    with pytest.raises(ConfigError, match=r"^train.loss._target_=.*Unfinished: lacks \w+"):
        build(node, key="train.loss", protocol=Loss)

"""Components from `_target_` nodes: what a signature refuses."""

from dataclasses import dataclass

import pytest

from offline_grpo.config.build import MOVED, build, resolve
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Task


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


def test_a_run_that_names_a_former_path_can_be_resumed():
    for former, now in MOVED.items():
        found = resolve({"_target_": former}, "key")
        assert f"{found.__module__}.{found.__qualname__}" == now


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "offline_grpo.nowhere.Part"}, r"part._target_=offline_grpo.nowhere.Part: cannot be imported"),
        ({**TARGET, "lr": 1.0, "speed": 3}, r"part.speed=3: Part has no such setting; it has lr, name, sizes"),
        ({**TARGET}, r"part.lr: Part needs it and it is not set"),
        ({**TARGET, "lr": "fast"}, r"part.lr='fast': expected float, got str"),
        ({**TARGET, "lr": [5e-6, 1e-5]}, r"to sweep over it: --multirun part.lr=5e-06,1e-05"),
        ({**TARGET, "lr": 1.0, "sizes": [1, "a"]}, r"part.sizes=.*expected list\[int\] \| None"),
        ({**TARGET, "lr": 1.0, "policy": "x"}, r"^part.policy=x: Part has no such setting"),
    ],
)
def test_what_does_not_fit_the_signature_is_refused(node, message):
    with pytest.raises(ConfigError, match=message):
        build(node, key="part", policy=object())


def test_a_component_of_another_kind_is_refused():
    message = r"part._target_=.*: does not implement Task: lacks problems, score; see offline_grpo/interfaces.py$"
    with pytest.raises(ConfigError, match=message):
        build({**TARGET, "lr": 1.0}, key="part", protocol=Task)

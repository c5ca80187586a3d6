"""What models do to their logits, measured: against the numbers in their configurations, and refused where it is
something unknown.
"""

import pytest
import torch
from architectures import ZOO

from offline_grpo.errors import ConfigError
from offline_grpo.model.scoring import LogitTransform, measure_logit_transform


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, LogitTransform()),
        ("granite", {"logits_scaling": 7.0}, LogitTransform(1 / 7, None)),
        # smaller than any logit's rounding
        ("gemma3_capped", {"final_logit_softcapping": 0.01}, LogitTransform(1.0, 0.01)),
        ("minicpm3", {}, LogitTransform(0.125, None)),  # divides what goes into the head
    ],
)
def test_factor_and_cap_are_measured(name, changes, expected, dtype):
    found = measure_logit_transform(ZOO[name].build(**changes).to(dtype))
    assert found.scale == pytest.approx(expected.scale, rel=1e-6)
    assert found.softcap == (None if expected.softcap is None else pytest.approx(expected.softcap, rel=1e-5))


@pytest.mark.parametrize("bend", [lambda z: z + 0.01 * z.clamp(min=5), lambda z: -z])
def test_anything_else_is_refused(bend):
    model = ZOO["llama"].build()

    def bent(module, args, output):
        output.logits = bend(output.logits)
        return output

    model.register_forward_hook(bent)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM changes its hidden states or logits"):
        measure_logit_transform(model)

"""A loss head and a layout that live outside the package: one Python file and one YAML file each, found through Hydra's search path."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from children import SMALL, metrics_of
from factories import compose_config

from offline_grpo.model.layouts.padded import Padded
from offline_grpo.placement.memory_plan import predict
from offline_grpo.run import app
from offline_grpo.run.config import typed
from offline_grpo.run.gpu_memory import memory_request
from offline_grpo.run.preflight import make_plan

FILES = {
    "mine/dense.py": '''
        """The definition: all logits at once."""

        import torch

        calls = []


        class Dense:
            def __init__(self, scale: float) -> None:
                self.scale = scale

            def __call__(self, hidden, weight, bias, targets, temperature, *, entropy_requires_grad):
                calls.append(len(targets))
                logits = torch.nn.functional.linear(hidden, weight, bias).float() * self.scale / temperature[:, None]
                log_p = logits.log_softmax(-1)
                entropy = -(log_p.exp() * log_p).sum(-1)
                return log_p.gather(1, targets[:, None])[:, 0], entropy if entropy_requires_grad else entropy.detach()

            def scratch_bytes(self, *, num_tokens, hidden_size, vocab_size, dtype, device):
                return 5 * 4 * num_tokens * vocab_size
        ''',
    "mine/conf/model/head/dense.yaml": """
        _target_: mine.dense.Dense
        scale: 1.0
        """,
    "mine/one_by_one.py": '''
        """One forward pass per sequence."""

        from contextlib import nullcontext

        import torch

        lengths = []


        class OneByOne:
            pads = False

            def check(self, device, dtype):
                pass

            def hidden_states(self, decoder, batch):
                rows = batch.token_ids.split(batch.sequence_lengths)
                lengths.extend(batch.sequence_lengths)
                return torch.cat([decoder(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])

            def attention(self, decoder):
                return nullcontext()

            def for_memory_plan(self):
                return self
        ''',
    "mine/conf/model/layout/one_by_one.yaml": """
        _target_: mine.one_by_one.OneByOne
        """,
}
RUN = (*SMALL, "train.iterations=1", "model.device=cpu", "train.kl_coef=0.1", "eval.enabled=false", "checkpoint.enabled=false")
CHOSEN = ("model/head=dense", "model/layout=one_by_one")


@pytest.fixture
def search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    return f"hydra.searchpath=[file://{tmp_path}/mine/conf]"


def test_they_train_as_the_packages_own_do(search_path: str, tmp_path: Path) -> None:
    cache = f"cache_dir={tmp_path}/cache"
    app.run(compose_config(*RUN, cache), tmp_path / "built_in")
    app.run(compose_config(search_path, *RUN, cache, *CHOSEN), tmp_path / "outside")
    from mine import dense, one_by_one  # pyright: ignore[reportMissingImports]

    assert len(dense.calls) >= 2  # policy and reference
    assert len(one_by_one.lengths) >= 2
    expected, actual = (metrics_of(tmp_path / name)["train_iter_000.json"] for name in ("built_in", "outside"))
    for name in ("loss_total", "loss_pg", "kl_divergence", "entropy", "grad_norm", "reward_mean"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_the_memory_plan_takes_their_word(search_path: str) -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=20480, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )

    def activations(*overrides: str) -> int:
        plan = make_plan(typed(compose_config(search_path, "train.batch_size=32", *overrides)))
        request = memory_request(plan, config, None, longest_prompt=24, trainers=[0], server_gpus=(), total_bytes=[2**40])
        [device] = predict(request)
        return next(part.num_bytes for part in device.parts if part.name == "activations")

    num_scored = 32 * 8
    assert compose_config().generation.max_new_tokens == 8
    tiled, dense = activations("model.layout=padded"), activations("model.layout=padded", "model/head=dense")
    assert dense - tiled == pytest.approx((5 - 2) * 4 * num_scored * 20480, rel=0.01)
    assert activations("model/layout=one_by_one") > 0
    assert isinstance(make_plan(typed(compose_config("model.layout=padded"))).layout, Padded)

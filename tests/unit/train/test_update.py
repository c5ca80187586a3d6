"""Optimizer updates on a real model: invariance to how the work is cut, and what happens to bad numbers."""

import math
from dataclasses import replace

import pytest
import torch
from factories import make_qwen2, make_updater

from offline_grpo.errors import NonFiniteError
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.model.adapters import with_lora
from offline_grpo.model.scoring import BaseScoring
from offline_grpo.settings import LoraConfig
from offline_grpo.train.sharding import Sharding


def gradient_and_metrics(updater, batch):
    """The gradient of one update, caught where the optimizer would use it."""
    caught = {}

    def catch(*_):
        caught.update({name: p.grad.clone() for name, p in updater.passes.policy.masters.parameters.items()})

    updater.optimizer.register_step_pre_hook(catch)
    metrics = updater.run(updater.passes.score(batch), iteration=0)
    return caught, metrics


@pytest.mark.parametrize(
    ("loss", "cut"), [(GRPO, {"batch_size": 5}), (DAPO, {"batch_size": None, "tokens_per_microbatch": 40})]
)
def test_gradient_does_not_depend_on_the_microbatches(tmp_path, token_batch, loss, cut):
    whole, whole_metrics = gradient_and_metrics(make_updater(tmp_path, loss=loss), token_batch)
    parts, part_metrics = gradient_and_metrics(make_updater(tmp_path, loss=loss, **cut), token_batch)
    for name, gradient in whole.items():
        assert torch.allclose(gradient, parts[name], atol=1e-6), name
    assert part_metrics == pytest.approx(whole_metrics, abs=1e-5)


def test_old_logprobs_are_those_before_the_first_update(tmp_path, token_batch):
    updater = make_updater(tmp_path, epochs=3, lr=1e-2)
    scored = updater.passes.score(token_batch)
    assert torch.allclose(scored.old_logprobs, updater.passes.policy.logprobs(token_batch), atol=1e-5)
    metrics = updater.run(scored, iteration=0)
    assert metrics["num_updates"] == 3
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-3)  # later epochs have moved away from it
    assert not torch.allclose(scored.old_logprobs, updater.passes.policy.logprobs(token_batch), atol=1e-2)


def test_an_update_without_a_token_to_train_on_is_left_out(tmp_path, token_batch):
    """It would move the weights by the optimizer's momentum alone, and make the means of the metrics smaller."""
    updater = make_updater(tmp_path, updates_per_iteration=token_batch.num_sequences, lr=1e-2)
    expected = make_updater(tmp_path, updates_per_iteration=1, lr=1e-2)
    only_first = token_batch.completion_mask & (token_batch.sequence_ids == 0)
    batch = replace(token_batch, completion_mask=only_first, completion_index=None)
    metrics = updater.run(updater.passes.score(batch), iteration=0)
    assert (metrics["num_updates"], updater.counters.num_updates) == (1, 1)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    first = batch.select([0])
    assert metrics["entropy"] == pytest.approx(
        expected.run(expected.passes.score(first), iteration=0)["entropy"], abs=1e-5
    )
    assert {int(state["step"]) for state in updater.optimizer.state.values()} == {1}


def test_learning_rate_follows_the_schedule_from_its_first_update(tmp_path, token_batch):
    updater = make_updater(tmp_path, warmup_steps=2, schedule="linear")
    assert [updater.run(token_batch, iteration=i)["lr"] for i in range(4)] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_gradient_is_clipped_to_the_configured_norm(tmp_path, token_batch):
    clipped, metrics = gradient_and_metrics(make_updater(tmp_path, grad_clip=0.01), token_batch)
    assert metrics["grad_norm"] > 0.01
    assert math.sqrt(sum(float(g.square().sum()) for g in clipped.values())) == pytest.approx(0.01, rel=1e-3)


def test_non_finite_updates_are_refused_counted_and_end_the_run(tmp_path, token_batch):
    updater = make_updater(tmp_path)
    weights = {name: p.detach().clone() for name, p in updater.passes.policy.masters.parameters.items()}
    bad = replace(token_batch, advantages=token_batch.advantages.masked_fill(token_batch.completion_mask, math.nan))
    metrics = updater.run(bad, iteration=0)
    assert metrics["num_updates_refused"] == 1
    assert metrics["num_updates"] == 0
    assert all(map(math.isfinite, metrics.values()))
    assert all(torch.equal(p, weights[name]) for name, p in updater.passes.policy.masters.parameters.items())
    with pytest.raises(NonFiniteError, match=r"train.max_bad_updates=2.*failed_batch_iter_001.pt"):
        updater.run(bad, iteration=1)
    saved = torch.load(tmp_path / "failed_batch_iter_001.pt", weights_only=True)
    assert torch.equal(saved["token_ids"], token_batch.token_ids)


def adapted_updater(tmp_path, seen):
    """Of adapters with dropout; `seen` gets what their dropout lets through, and whether it is on, of every pass."""
    model = with_lora(make_qwen2(), LoraConfig(4, 8, 0.5, ["q_proj"], None), adapter=None)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and ".lora_dropout" in name:
            module.register_forward_hook(lambda own, _, out: seen.append((own.training, (out != 0).numpy().tobytes())))
    return make_updater(tmp_path, model=model, epochs=2)


def test_dropout_on_adapters_draws_other_masks_in_each_update_and_iteration_and_none_in_other_passes(
    tmp_path, token_batch
):
    seen = []
    updater = adapted_updater(tmp_path, seen)
    num_layers = 2
    scored = updater.passes.score(token_batch)
    updater.passes.policy.scoring.entropy(token_batch)
    assert torch.allclose(scored.old_logprobs, updater.passes.policy.logprobs(token_batch), atol=1e-5)
    assert len(seen) == 3 * num_layers
    assert not any(is_on for is_on, _ in seen)
    BaseScoring(updater.passes.policy.scoring).logprobs(token_batch)
    masks = []
    for iteration in (0, 1):
        seen.clear()
        updater.run(scored, iteration=iteration)
        assert len(seen) == 2 * num_layers  # of two epochs
        assert all(is_on for is_on, _ in seen)
        masks += [mask for _, mask in seen]
    assert len({*masks}) == len(masks)
    seen.clear()
    adapted_updater(tmp_path, seen).run(scored, iteration=1)  # as a resumed run does
    assert [mask for _, mask in seen] == masks[2 * num_layers :]


def test_fp16_scales_its_loss_and_the_others_do_not(tmp_path, token_batch):
    plain = make_updater(tmp_path, precision="bf16", dtype=torch.bfloat16)
    scaled = make_updater(tmp_path, precision="fp16", dtype=torch.float16, max_bad_updates=20)
    expected = plain.run(token_batch, iteration=0)["grad_norm"]
    applied = [m for m in (scaled.run(token_batch, iteration=i) for i in range(20)) if m["num_updates"]]
    assert plain.state_dict()["scaler"] == {}
    assert scaled.state_dict()["scaler"]["scale"] > 1
    assert len(applied) < 20  # the first scales overflow, are refused and halved
    assert applied[0]["grad_norm"] == pytest.approx(expected, rel=0.2)


class EveryProcessMakes(Sharding):
    """Asks for passes beyond this process's own, as a sharding does whose passes need all processes."""

    def num_microbatches(self, own):
        return own + 3


def test_passes_that_only_keep_others_company_change_nothing(tmp_path, token_batch):
    """Gradient and metrics are those of the own microbatches alone, and the passes are really made."""
    plain, plain_metrics = gradient_and_metrics(make_updater(tmp_path, batch_size=5), token_batch)
    updater = make_updater(tmp_path, batch_size=5)
    updater.passes.sharding = EveryProcessMakes(updater.passes.ranks)
    num_passes = 0

    def count(*_):
        nonlocal num_passes
        num_passes += 1

    updater.passes.policy.causal_lm.get_decoder().register_forward_hook(count)
    padded, padded_metrics = gradient_and_metrics(updater, token_batch)
    assert num_passes == 3 + 3
    assert padded_metrics == plain_metrics
    for name, gradient in plain.items():
        assert torch.equal(gradient, padded[name]), name

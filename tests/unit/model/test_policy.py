"""What the policy says about a flat batch, against transformers' own logits one sequence at a time."""

import pytest
import torch
from factories import make_llama, make_qwen2, make_scoring
from peft import LoraConfig, get_peft_model
from torch.overrides import TorchFunctionMode


def oracle(model, batch):
    """Logprobs and entropies from the full logits of each sequence alone."""
    logprobs, entropies, start = [], [], 0
    for length in batch.sequence_lengths:
        ids = batch.token_ids[start : start + length]
        log_p = (model(input_ids=ids[None]).logits[0].float() / batch.temperature[start]).log_softmax(-1)  # [L, V]
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, log_p[:-1].gather(1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)[:-1]]))
        start += length
    mask = batch.completion_mask
    return torch.cat(logprobs) * mask, torch.cat(entropies) * mask


@pytest.mark.parametrize("make", [make_qwen2, make_llama])
@pytest.mark.parametrize("order", [list(range(12)), [11, 3, 0, 7]])
def test_scores_equal_one_sequence_at_a_time(make, order, token_batch):
    model = make()
    batch = token_batch.select(order)
    stats = make_scoring(model)(batch)
    logprobs, entropy = oracle(model, batch)
    assert torch.allclose(stats.logprobs, logprobs, atol=2e-5)
    assert torch.allclose(stats.entropy, entropy, atol=2e-5)
    assert logprobs.abs().max() > 1  # the oracle says something


def test_dropout_is_off_without_gradient_and_the_mode_comes_back(token_batch):
    model = get_peft_model(
        make_qwen2(), LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
    )
    model.train()
    scoring = make_scoring(model)
    assert torch.equal(scoring.logprobs(token_batch), scoring.logprobs(token_batch))
    assert model.training


def test_scoring_uses_decoder_and_head_inside_its_forward_alone(token_batch):
    """What shards the parameters of a module gathers them before its forward and gives them back after it."""
    scoring = make_scoring(make_llama())
    inside = []
    scoring.register_forward_pre_hook(lambda *_: inside.append(True))
    scoring.register_forward_hook(lambda *_: inside.clear())
    uses = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.nn.functional.embedding, torch.nn.functional.linear, torch.Tensor.__getitem__):
                uses.extend(bool(inside) for arg in args if isinstance(arg, torch.nn.Parameter))
            return func(*args, **(kwargs or {}))

    with Watch():
        scoring(token_batch, entropy_requires_grad=True)
        scoring.logprobs(token_batch)
    assert len(uses) > 2
    assert all(uses)

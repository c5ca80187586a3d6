"""Every architecture of the zoo in every layout: right, by transformers' own forward, or refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from architectures import CANNOT_SAMPLE_IN_PROCESS, EVERY_ARCHITECTURE, ZOO
from factories import generate, make_rollout, make_scoring
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from offline_grpo.errors import ConfigError
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model import layouts
from offline_grpo.model.layers import decoder_of
from offline_grpo.model.layouts import LAYOUTS, Padded, Tree, Varlen
from offline_grpo.model.load import prepare
from offline_grpo.model.proof import settle_layout
from offline_grpo.model.scoring import Scoring, measure_logit_transform, prepare_for_gradients
from offline_grpo.settings import ModelConfig
from offline_grpo.train.batch import build_batch
from offline_grpo.types import SamplingParams, TokenBatch

CPU = torch.device("cpu")


def varlen_on_a_cpu(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *_: object, scale: float, window_size: tuple[int, int]
) -> Tensor:
    """What `varlen_attn` computes on a GPU: each sequence by itself, causal, within the window."""
    outputs = []
    for q1, k1, v1 in zip(*(x.tensor_split(starts[1:-1].tolist()) for x in (q, k, v)), strict=True):
        distance = torch.arange(len(q1))[:, None] - torch.arange(len(q1))
        seen = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
        q1, k1, v1 = (x.transpose(0, 1) for x in (q1, k1, v1))
        outputs.append(scaled_dot_product_attention(q1, k1, v1, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def emulated_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_on_a_cpu)
    monkeypatch.setattr(layouts, "has_varlen_kernel", lambda *_: True)


def scoring_of(name: str, layout: str = "padded") -> Scoring:
    scoring = make_scoring(ZOO[name].build(), LAYOUTS[layout]())
    scoring.logits = measure_logit_transform(scoring.causal_lm)
    return scoring


def batch_of_prompts() -> TokenBatch:
    """Two prompts with five completions each, others than those of the proof, at another temperature."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 97, (length,), generator=generator).tolist()

    prompts = [ids(11), ids(4)]
    rollouts = [make_rollout(prompt, ids(1 + 2 * i), temperature=1.3) for prompt in prompts for i in range(5)]
    return build_batch(rollouts)


def transformers_scores(scoring: Scoring, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logprobs and entropies of one sequence at a time, from the model's own logits, and the gradients of their sum."""
    model = scoring.causal_lm
    model.zero_grad()
    logprobs, entropies = [], []
    for ids in batch.token_ids.split(batch.sequence_lengths):
        logs = (model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / 1.3).log_softmax(-1)
        logprobs.append(torch.cat([torch.zeros(1), logs.gather(1, ids[1:, None]).squeeze(1)]))
        entropies.append(torch.cat([torch.zeros(1), -(logs.exp() * logs).sum(-1)]))
    found, entropy = torch.cat(logprobs) * batch.completion_mask, torch.cat(entropies) * batch.completion_mask
    (found.sum() + entropy.sum()).backward()
    return (
        found.detach(),
        entropy.detach(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


@pytest.mark.usefixtures("emulated_kernel")
@pytest.mark.parametrize("name", EVERY_ARCHITECTURE)
def test_every_layout_is_right_or_refused(name: str) -> None:
    scoring, batch = scoring_of(name), batch_of_prompts()
    logprobs, entropies, gradients = transformers_scores(scoring, batch)
    for layout, make in {"padded": Padded, "tree": Tree, "varlen": Varlen}.items():
        fault = ZOO[name].wrong.get(layout)
        if fault is not None:
            with pytest.raises(ConfigError, match=rf"model.layout={layout}: .*{fault}.*; use model.layout=auto"):
                settle_layout(scoring, make(), CPU)
            continue
        settle_layout(scoring, make(), CPU)
        assert type(scoring.layout) is make
        scoring.model.zero_grad()
        stats = scoring(batch, entropy_requires_grad=True)
        with scoring.attention(batch):
            (stats.logprobs.sum() + stats.entropy.sum()).backward()
        assert torch.allclose(stats.logprobs, logprobs, atol=2e-5), layout
        assert torch.allclose(stats.entropy, entropies, atol=2e-5), layout
        # the gradient of a key's bias is zero but for the rounding of the others
        noise = 1e-6 * max(1.0, *(float(gradient.abs().max()) for gradient in gradients.values()))
        for parameter, gradient in gradients.items():
            found = scoring.model.get_parameter(parameter).grad
            assert found is not None
            assert torch.allclose(found, gradient, atol=1e-4 * float(gradient.abs().max()) + noise), (layout, parameter)


@pytest.mark.parametrize("name", EVERY_ARCHITECTURE)
def test_it_is_sampled_in_process_or_refused(name: str) -> None:
    scoring, tokenizer = scoring_of(name), SimpleNamespace(eos_token_id=2, pad_token_id=0)
    if name in CANNOT_SAMPLE_IN_PROCESS:
        with pytest.raises(ConfigError, match=r"generation=transformers: .* use generation=vllm_server"):
            TransformersClient(model=scoring.model, tokenizer=tokenizer, batch_size=8)  # type: ignore[arg-type]
        return
    client = TransformersClient(model=scoring.model, tokenizer=tokenizer, batch_size=8)  # type: ignore[arg-type]
    prompts = [[5, 9, 11, 30, 31, 32, 33, 34, 35], [7, 8]]
    groups = generate(
        client, prompts, SamplingParams(max_new_tokens=8, temperature=0.8), group_size=3, seeds=[100, 200]
    )
    rollouts = [
        make_rollout(p, completion, temperature=0.8)
        for p, group in zip(prompts, groups, strict=True)
        for completion in group
    ]
    batch = build_batch(rollouts)
    assert torch.allclose(scoring.logprobs(batch), batch.rollout_logprobs * batch.completion_mask, atol=2e-5)


@pytest.mark.parametrize(("name", "layout"), [("llama", "tree"), ("lfm2", "padded"), ("bloom", "padded")])
def test_auto_takes_the_fastest_that_is_right(name: str, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    scoring = scoring_of(name)
    with caplog.at_level("INFO", logger="offline_grpo"):
        settle_layout(scoring, None, CPU)
    assert type(scoring.layout) is LAYOUTS[layout]
    lines = [
        record.message for record in caplog.records if record.name.startswith("offline_grpo")
    ]  # transformers' come once in a process
    assert len(lines) == (layout != "tree")
    assert all(line.startswith("model.layout=auto: padded, because tree is wrong for ") for line in lines)


def test_a_model_that_padded_rows_change_is_refused() -> None:
    """Rotary angles that depend on the longest sequence of a batch."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    scoring = make_scoring(ZOO["phi3"].build(original_max_position_embeddings=16, rope_scaling=rope))
    with pytest.raises(ConfigError, match=r"Phi3ForCausalLM cannot be scored in batches: logprobs differ"):
        settle_layout(scoring, None, CPU)
    with pytest.raises(ConfigError, match=r"cannot be scored in batches"):
        settle_layout(scoring, Padded(), CPU)


def test_a_gradient_that_is_wrong_is_refused() -> None:
    scoring = scoring_of("llama")

    class Detached(Padded):
        def hidden_states(self, decoder, batch):
            hidden = super().hidden_states(decoder, batch)
            return hidden + (hidden - hidden.detach())  # the same numbers, twice the gradient

    with pytest.raises(ConfigError, match=r"model.layout=detached: .*gradients differ .* by 100%"):
        settle_layout(scoring, Detached(), CPU)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_in_the_code_of_a_block_stays_off(checkpointing: bool) -> None:
    """OPT's is a number in its blocks and no module. The proof compares the mode that trains with eval mode."""
    scoring = make_scoring(ZOO["opt"].build(dropout=0.5, attention_dropout=0.5))
    settings = ModelConfig("opt", None, "cpu", "auto", "auto", None, "auto", None, trust_remote_code=False)
    prepare(scoring.causal_lm, settings, gradient_checkpointing=checkpointing)
    calls: list[object] = []
    decoder_of(scoring.causal_lm).layers[0].fc1.register_forward_hook(lambda *_: calls.append(1))
    settle_layout(scoring, Padded(), CPU)
    calls.clear()
    prepare_for_gradients(scoring.model)
    scoring(batch_of_prompts()).logprobs.sum().backward()
    assert len(calls) == 1 + checkpointing

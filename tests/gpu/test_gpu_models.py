"""Every architecture of the zoo on a GPU: layouts, compiled blocks, the head that keeps its tiles and the filtered one,
FlashAttention 4, and decoding steps as CUDA graphs.

`pytest -m gpu tests/gpu`, on one GPU.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from architectures import VOCAB, ZOO, long_batch
from factories import compose_config, generate, make_scoring
from seeing import Seeing, batch_of
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from offline_grpo.generation import decoding_graph
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model import filtered_head as filtered
from offline_grpo.model.layers import not_compiled
from offline_grpo.model.layouts import LAYOUTS, Flash4, Varlen, _flash4_forward, has_flash4
from offline_grpo.model.lm_head import KeptHead
from offline_grpo.model.pictures import FAMILIES
from offline_grpo.model.proof import settle_compile, settle_layout
from offline_grpo.model.scoring import measure_logit_transform
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.run import train
from offline_grpo.types import SamplingParams

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")

NO_BF16 = {"mamba", "mamba2"}  # their own forward mixes formats


@pytest.mark.parametrize("name", [name for name in ZOO if name not in NO_BF16])
def test_auto_is_right(name: str) -> None:
    scoring = make_scoring(ZOO[name].build().to(CUDA, torch.bfloat16))
    scoring.logits = measure_logit_transform(scoring.causal_lm)
    settle_layout(scoring, None, CUDA)
    chosen = type(scoring.layout)
    batch = long_batch()
    found = scoring.logprobs(batch.to(CUDA))
    alone = torch.cat([scoring.logprobs(batch.select([i]).to(CUDA)) for i in range(batch.num_sequences)])
    mask = batch.completion_mask.to(CUDA)
    error = (found - alone)[mask].square().mean().sqrt() / alone[mask].std()
    print(f"{name}: {chosen.__name__}, relative error {error:.1e}")
    assert error < 0.02
    if "varlen" in ZOO[name].wrong:
        assert chosen is LAYOUTS["padded"]


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3", "qwen3_moe", "gemma2", "gpt2"])
def test_auto_compiles_what_it_can_and_changes_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    scoring = make_scoring(ZOO[name].build().to(CUDA, torch.bfloat16))
    scoring.logits = measure_logit_transform(scoring.causal_lm)
    settle_layout(scoring, None, CUDA)
    with caplog.at_level(logging.INFO):
        settle_compile(scoring, "auto", CUDA)
    batch = long_batch().to(CUDA)
    compiled = scoring.logprobs(batch)
    with not_compiled(scoring.model):
        plain = scoring.logprobs(batch)
    mask = batch.completion_mask
    error = (compiled - plain)[mask].square().mean().sqrt() / plain[mask].std()
    print(f"{name}: {caplog.messages[-1]}; relative error {error:.1e}")
    assert error < 0.05, "kernels that are fused round less often; beyond this `auto` would not have compiled"


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("height", "kept_bytes"), [(333, 1 << 40), (100, 0)])
def test_the_kept_head_is_right(height: int, kept_bytes: int, softcap: float | None) -> None:
    torch.manual_seed(0)
    num_tokens, hidden_size, vocab_size = 333, 256, 5003

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=CUDA).bfloat16().requires_grad_()

    hidden, weight, bias = leaf(num_tokens, hidden_size), leaf(vocab_size, hidden_size), leaf(vocab_size)
    targets = torch.randint(vocab_size, (num_tokens,), device=CUDA)
    temperature = torch.linspace(0.5, 2, num_tokens, device=CUDA) * 10
    coefs = torch.linspace(-1, 2, num_tokens, device=CUDA)
    logprobs, entropy = KeptHead.apply(hidden, weight, bias, targets, temperature, softcap, (height, 1024), kept_bytes)
    found = torch.autograd.grad(logprobs @ coefs, [hidden, weight, bias])
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = wide[0] @ wide[1].T + wide[2]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature.double()[:, None], -1)
    right = log_p.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)
    for gradient, expected in zip(found, torch.autograd.grad(right @ coefs.double(), wide), strict=True):
        assert (gradient.double() - expected).norm() / expected.norm() < 0.006


@pytest.mark.parametrize("mean", [8, 400])
@pytest.mark.parametrize("way", [None, filtered.GATHERED, filtered.TILED], ids=["kernels", "gathered", "tiled"])
def test_the_filtered_head_is_right(way: filtered.Way | None, mean: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    num_tokens, hidden_size, vocab_size = 333, 272, 5003
    monkeypatch.setitem(filtered.TILE_SIDE, "cuda", 256)
    if way is None:
        monkeypatch.setattr(filtered, "TILED_FRAC", 1.0)
    else:
        monkeypatch.setattr(filtered, "way_for", lambda *args: way)

    # A third of the sets have the target alone, one the whole vocabulary; in all others is token 7.
    hidden, weight = (torch.randn(n, hidden_size, device=CUDA).bfloat16() for n in (num_tokens, vocab_size))
    weight[:, :] *= 0.2
    targets = torch.randint(8, vocab_size, (num_tokens,), device=CUDA)
    inside = torch.rand(num_tokens, vocab_size, device=CUDA) < mean / vocab_size
    inside[:, 7] = True
    inside[::3], inside[1] = False, True
    inside.scatter_(1, targets[:, None], False)
    sets = {"num_alternatives": inside.sum(1), "alternatives": inside.nonzero()[:, 1]}
    inside.scatter_(1, targets[:, None], True)
    temperature, coefs = (torch.linspace(low, 2, num_tokens, device=CUDA) for low in (0.5, -1))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    # Nothing waits for the GPU, but tiles.
    torch.cuda.set_sync_debug_mode("default" if way is filtered.TILED else "error")
    try:
        found = filtered.filtered_head(hidden, weight, None, targets, temperature, **sets, entropy_requires_grad=True)
        gradients = torch.autograd.grad((found[0] + found[1]) @ coefs, leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    log_p = torch.log_softmax(
        (wide[0] @ wide[1].T / temperature.double()[:, None]).masked_fill(~inside, -torch.inf), -1
    )
    right = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p.masked_fill(~inside, 0.0)).sum(-1)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5, check_dtype=False)
    expected = torch.autograd.grad((right[0] + right[1]) @ coefs.double(), wide)
    for gradient, exact in zip(gradients, expected, strict=True):
        assert (gradient.double() - exact).norm() / exact.norm() < 0.006


@pytest.mark.parametrize(
    "overrides", [["train.gradient_checkpointing=true"], ["model/lora=default"]], ids=["recomputed", "lora"]
)
def test_a_run_trains_with_compiled_blocks(tmp_path, overrides: list[str]) -> None:
    small = ["train.iterations=2", "eval.enabled=false", "train.precision=bf16", "train.lr=1e-4"]
    train(compose_config(*small, *overrides), tmp_path)
    text = (tmp_path / "run.log").read_text()
    assert "model.compile=auto: compiled the blocks" in text


needs_flash4 = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_flash4(CUDA, torch.bfloat16), reason="no flash-attn-4, or no GPU for it"
)

LENGTHS = (1, 300, 129, 128, 17, 640)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    per_group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(per_group, dim=1) for x in (k, v))
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(CUDA)
    distance = torch.arange(len(q), device=CUDA)[:, None] - torch.arange(len(q), device=CUDA)
    seen = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or len(q)))
    scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@needs_flash4
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (14, 2, 64), (8, 8, 96), (4, 1, 256)])
def test_it_is_dense_attention_within_sequences(heads: int, kv_heads: int, size: int, window: int | None) -> None:
    torch.manual_seed(0)
    total, scale = sum(LENGTHS), 0.7 / size**0.5

    def leaf(count: int) -> Tensor:
        return torch.randn(total, count, size, device=CUDA).bfloat16().requires_grad_()

    q, k, v = leaf(heads), leaf(kv_heads), leaf(kv_heads)
    grad = torch.randn(total, heads, size, device=CUDA)
    boundaries = torch.tensor((0, *LENGTHS), device=CUDA).cumsum(0).int()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    right = dense(*wide, scale, window)
    expected = torch.autograd.grad(right, wide, grad)
    found = _flash4_forward(q, k, v, boundaries, max(LENGTHS), scale, window or 0)[0]
    gradients = torch.autograd.grad(found, (q, k, v), grad.bfloat16())
    for name, a, b in zip("oqkv", (found, *gradients), (right, *expected), strict=True):
        error = ((a.float() - b).norm() / b.norm()).item()
        print(f"{heads}/{kv_heads} x {size}, window {window}: {name} {error:.1e}")
        assert error < 0.01, name


@needs_flash4
def test_auto_takes_it_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 128}
    torch.manual_seed(0)
    with CUDA:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).bfloat16()
    scoring = make_scoring(model)
    settle_layout(scoring, None, CUDA)
    assert type(scoring.layout) is Flash4
    with caplog.at_level(logging.INFO):
        settle_compile(scoring, True, CUDA)
    batch = long_batch().to(CUDA)
    batch.token_ids.clamp_(max=511)
    found = scoring.logprobs(batch)
    scoring.layout = Varlen()
    expected = scoring.logprobs(batch)
    mask = batch.completion_mask
    error = ((found - expected)[mask].square().mean().sqrt() / expected[mask].std()).item()
    print(f"relative error {error:.1e}")
    assert error < 0.02


PROMPTS = [[5, 6, 7], [9], list(range(2, 22)), [3, 3, 4, 8]]
NOT_SAMPLED = {name for name in ZOO if "mamba" in name}  # sampled by a server alone


@pytest.mark.parametrize("name", [name for name in ZOO if name not in NOT_SAMPLED])
def test_graphs_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO[name].build().to(CUDA).eval()
    model.generation_config.eos_token_id = list(range(40, 45))
    recorded = []
    record = decoding_graph._StepGraph._record
    tokenizer = build_char_tokenizer(128)

    def drawn():
        client = TransformersClient(model, tokenizer, batch_size=64)
        return generate(client, PROMPTS, SamplingParams(max_new_tokens=24), group_size=8, seeds=[1, 100, 200, 300])

    monkeypatch.setattr(
        decoding_graph._StepGraph, "_record", lambda self, inputs: (recorded.append(1), record(self, inputs))
    )
    replayed = drawn()
    print(f"{name}: {len(recorded)} graphs{', refused' if model in decoding_graph._not_recorded else ''}")
    monkeypatch.setattr(decoding_graph._StepGraph, "_record", lambda self, inputs: None)
    stepped = drawn()
    for one, other in zip(replayed, stepped, strict=True):
        for graphed, plain in zip(one, other, strict=True):
            assert graphed.token_ids == plain.token_ids
            assert graphed.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert max(max(c.token_ids) for group in replayed for c in group) < VOCAB
    assert name != "qwen2" or (recorded and model not in decoding_graph._not_recorded)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_pictures_are_seen_alike(name: str, tmp_path: Path) -> None:
    """By the sampler with its graphs, and by the trainer with its kernels, in the format that it trains in."""
    seeing = Seeing(name, tmp_path, device=CUDA, precision="bf16")
    policy, requests = seeing.policy, seeing.requests()
    client = TransformersClient(policy.model, policy.tokenizer, 64, seeing.vision)
    sampled = sorted(client.generate(requests, SamplingParams(max_new_tokens=12)), key=lambda pair: pair[0])
    batch = batch_of(requests, [group for _, group in sampled], temperature=1.0)
    stats = policy.scoring(batch.to(CUDA))
    stats.logprobs.sum().backward()
    difference = (stats.logprobs.cpu() - batch.rollout_logprobs)[batch.completion_mask].abs().mean().item()
    print(f"{name}: {difference:.1e} nats")
    assert difference < 0.05

"""A stand-in for an SGLang server, written from the source of SGLang 0.5.15 and compared with a real one. No real one
runs in the tests.

It keeps the rules that clients can trip over: requests are refused where SGLang's SamplingParams.verify refuses them,
seeds act under deterministic inference alone and fit 64 bits with a sign, logprobs are of softmax(logits / temperature)
before top_k, the repetition penalty comes a token late, a paused server fails health checks that sample, and one that
loads weights while it has requests, or what the last one left in its cache, ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripted_server import Reply, Request

VOCABULARY = 12
SAMPLING_FIELDS = """max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos
skip_special_tokens
spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed"""


def logits_after(token_ids: list[int]) -> list[float]:
    """The toy model: depends on every token before."""
    return [2 * math.sin((token + 1) * (sum(token_ids) + len(token_ids))) for token in range(VOCABULARY)]


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


@dataclass
class FakeSglang:
    """The script of a `ScriptedServer`. `load` makes a model of a folder: what turns the tokens so far into the next
    one's logits.
    """

    load: Callable[[str], Callable[[list[int]], list[float]]] = lambda _: logits_after
    model: Callable[[list[int]], list[float]] = logits_after
    version: str = "0.5.15"
    is_deterministic: bool = True
    samples_for_health: bool = False  # SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION
    api_key: str | None = None
    weight_version: str = "default"
    is_paused: bool = False
    is_dirty: bool = False  # the scheduler holds what the last request left
    is_dead: bool = False
    loaded: list[str] = field(default_factory=list)
    num_aborts: int = 0

    def __call__(self, request: Request) -> Reply:
        if self.is_dead:
            return Reply(cut="silence")
        is_open = request.path.startswith("/health")
        if (
            self.api_key is not None
            and not is_open
            and request.headers.get("Authorization") != f"Bearer {self.api_key}"
        ):
            return Reply({"error": "Unauthorized"}, status=401)
        try:
            answer = getattr(self, f"on{request.path.replace('/', '_')}")
        except AttributeError:
            return Reply({"detail": "Not Found"}, status=404)
        try:
            return answer(request)
        except ValueError as error:
            return Reply({"error": {"message": str(error)}}, status=400)

    def on_generate(self, request: Request) -> Reply:
        """A batch, as `GenerateReqInput` takes it."""
        body = request.body
        prompts, settings = body["input_ids"], body["sampling_params"]
        assert not self.is_paused
        assert all(type(token) is int for prompt in prompts for token in prompt)
        assert len(prompts) == len(settings)
        self.is_dirty = True
        return Reply(
            [
                self._complete(i, prompt, chosen, body["return_logprob"])
                for i, (prompt, chosen) in enumerate(zip(prompts, settings, strict=True))
            ]
        )

    def on_health(self, _: Request) -> Reply:
        return Reply(b"", headers={}, status=503 if self.samples_for_health and self.is_paused else 200)

    def on_server_info(self, _: Request) -> Reply:
        return Reply({"version": self.version, "enable_deterministic_inference": self.is_deterministic, "tp_size": 1})

    def on_model_info(self, _: Request) -> Reply:
        return Reply({"model_path": "model", "weight_version": self.weight_version})

    def on_pause_generation(self, request: Request) -> Reply:
        self.is_paused = True
        if request.body.get("mode", "abort") == "abort":
            self.num_aborts += 1
        return Reply({"message": "Generation paused successfully.", "status": "ok"})

    def on_continue_generation(self, _: Request) -> Reply:
        self.is_paused = False
        return Reply({"message": "Generation continued successfully.", "status": "ok"})

    def on_flush_cache(self, request: Request) -> Reply:
        assert float(request.query["timeout"][0]) > 0  # without it a scheduler that has not come to rest refuses
        self.is_dirty = False
        return Reply(b"Cache flushed.\n", headers={})

    def on_update_weights_from_disk(self, request: Request) -> Reply:
        if not self.is_paused or self.is_dirty:
            self.is_dead = True  # AssertionError: Cache flush failed after updating weights
            return Reply(cut="silence")
        body = request.body
        self.loaded.append(body["model_path"])
        self.model = self.load(body["model_path"])
        self.weight_version = body.get("weight_version", self.weight_version)
        return Reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    def on_update_weight_version(self, request: Request) -> Reply:
        self.num_aborts += request.body.get("abort_all_requests", True)
        self.weight_version = request.body["new_version"]
        assert isinstance(self.weight_version, str)
        return Reply({"success": True, "message": "Weight version updated", "new_version": self.weight_version})

    def _complete(
        self, index: int, prompt: list[int], settings: dict[str, Any], returns_logprobs: bool
    ) -> dict[str, Any]:
        verify(settings)
        seed = settings["sampling_seed"] if self.is_deterministic else random.getrandbits(62)
        tokens: list[int] = []
        logprobs: list[float] = []
        reason: dict[str, Any] = {"type": "length", "length": settings["max_new_tokens"]}
        while len(tokens) < settings["max_new_tokens"]:
            logits = penalised(self.model([*prompt, *tokens]), prompt, tokens, settings["repetition_penalty"])
            token, logprob = _draw(logits, settings, random.Random(f"{seed} {len(prompt) + len(tokens)}"))
            tokens.append(token)
            logprobs.append(logprob)
            if token in settings["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
        meta = {
            "id": f"{index}",
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.weight_version,
            "completion_tokens": len(tokens),
        }
        if returns_logprobs:
            triples = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
            meta |= {"output_token_logprobs": triples, "output_token_logprobs_length": len(triples)}
        return {"text": "", "output_ids": tokens, "meta_info": meta}


def penalised(logits: list[float], prompt: list[int], tokens: list[int], penalty: float) -> list[float]:
    """With the overlapping scheduler, which does not know the newest token yet: the prompt's last one is counted in its
    place.
    """
    counted = {prompt[-1], *tokens[:-1]} if tokens else set()
    return [(x * penalty if x < 0 else x / penalty) if token in counted else x for token, x in enumerate(logits)]


def verify(settings: dict[str, Any]) -> None:
    """SamplingParams.verify."""
    unknown = set(settings) - set(SAMPLING_FIELDS.split())
    if unknown:
        raise ValueError(f"Unexpected keyword argument '{unknown}'")
    if not 0 < settings["top_p"] <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {settings['top_p']}.")
    if settings["top_k"] < 1 and settings["top_k"] != -1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {settings['top_k']}.")
    if not 0 < settings["repetition_penalty"] <= 2:
        raise ValueError(
            f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {settings['repetition_penalty']}."
        )
    assert -(2**63) <= settings["sampling_seed"] < 2**63, (
        "torch.tensor(..., dtype=torch.int64) overflows, in the scheduler"
    )
    assert settings.get("n", 1) == 1, "all completions would have one seed"


def _draw(logits: list[float], settings: dict[str, Any], noise: random.Random) -> tuple[int, float]:
    is_greedy = settings["temperature"] < 1e-6
    temperature = 1.0 if is_greedy else settings["temperature"]
    logprobs = log_softmax([logit / temperature for logit in logits])
    ranked = sorted(range(len(logits)), key=lambda token: -logprobs[token])
    kept = ranked[: 1 if is_greedy else settings["top_k"] if settings["top_k"] > 0 else None]
    token = noise.choices(kept, weights=[math.exp(logprobs[token]) for token in kept])[0]
    return token, logprobs[token]

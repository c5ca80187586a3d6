"""Prompts with pictures on a real server with a tower: it reads what the trainer reads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_served
from engines import CPU, LORA_ARGS, make_client, make_server, preloaded_python, running
from factories import complete_in_order
from PIL import Image
from transformers import AutoConfig, AutoModelForMultimodalLM

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineError
from offline_grpo.model.pictures import Vision, vision_of
from offline_grpo.types import Completion, Picture, SamplingParams, SamplingRequest

pytestmark = pytest.mark.slow  # a start of a server


def picture(seed: int, width: int = 24, height: int = 16) -> Picture:
    file = BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(file, "PNG")
    return Picture(file.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served("qwen2_5_vl", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    own = tmp_path_factory.mktemp("server")
    args: dict[str, Any] = {**LORA_ARGS, "max_model_len": 256}
    with running(make_server(CPU, own, args=args, python=preloaded_python(own)), folder) as server:
        yield server


@pytest.fixture(scope="module")
def vision(folder: Path) -> Vision:
    found = vision_of(str(folder), AutoConfig.from_pretrained(folder))
    assert found is not None
    return found


def request_of(vision: Vision, *pictures: Picture, seed: int = 0, number: int = 2) -> SamplingRequest:
    text = "".join(f"{vision.placeholder} and " for _ in pictures) + "7 + 8 ="
    encoded = vision.encode(text, pictures)
    return SamplingRequest(
        tuple(encoded.ids), number, seed, pictures=pictures, unexpanded_ids=tuple(encoded.unexpanded_ids)
    )


def logprobs_of(
    model: Any, processor: Any, request: SamplingRequest, completion: Completion, banned: Sequence[int] = ()
) -> list[float]:
    """Of the completion's tokens, in nats, by transformers alone: its processor and its forward, one sequence."""
    text = processor.tokenizer.decode(request.unexpanded_ids or request.prompt_ids)
    images = [Image.open(BytesIO(each.data)) for each in request.pictures]
    inputs = processor(text=[text], images=[images] if images else None, add_special_tokens=False, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == list(request.prompt_ids)
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    more = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    types = torch.cat([inputs["mm_token_type_ids"], torch.zeros(1, len(completion.token_ids), dtype=torch.int64)], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=types, **more).logits[0, len(request.prompt_ids) - 1 : -1]
    logits[:, [*banned]] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1).tolist()


def test_a_server_reads_what_the_trainer_reads(server: VllmEngine, vision: Vision, folder: Path) -> None:
    client, model = make_client(server), AutoModelForMultimodalLM.from_pretrained(folder).eval()
    shapes = ((24, 16), (24, 16), (8, 40))
    requests = [request_of(vision, *(picture(i, *shapes[i]) for i in range(n)), seed=n) for n in range(4)]
    answers = complete_in_order(client, requests, SamplingParams(8))
    for request, completions in zip(requests, answers, strict=True):
        for completion in completions:
            found = logprobs_of(model, vision.processor, request, completion)
            assert completion.logprobs == pytest.approx(found, abs=5e-5)
    swapped = replace(requests[2], pictures=requests[2].pictures[::-1])
    other = logprobs_of(model, vision.processor, swapped, answers[2][0])
    assert answers[2][0].logprobs != pytest.approx(other, abs=1e-2)


def test_other_tokens_than_the_trainers_are_refused(server: VllmEngine, vision: Vision) -> None:
    client, right = make_client(server), request_of(vision, picture(1))
    at = right.prompt_ids.index(right.unexpanded_ids[0])  # of the two tokens of the picture the trainer has one less
    wrong = replace(right, prompt_ids=(*right.prompt_ids[:at], *right.prompt_ids[at + 1 :]))
    says = f"{len(right.prompt_ids)} tokens there, {len(wrong.prompt_ids)} in the trainer, and others from {at + 1} on"
    with pytest.raises(EngineError, match=says):
        complete_in_order(client, [wrong], SamplingParams(8))
    no_image = replace(right, pictures=(Picture(b"x"),))
    with pytest.raises(EngineError, match="images: cannot identify image"):
        complete_in_order(client, [no_image], SamplingParams(8))


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 30, "needs_alternatives": True}]
)
def test_tokens_that_stand_for_pictures_are_never_drawn(
    server: VllmEngine, vision: Vision, folder: Path, how: dict[str, Any]
) -> None:
    """Were they, a third of all tokens of this model would be among these."""
    client, model = make_client(server), AutoModelForMultimodalLM.from_pretrained(folder).eval()
    client.banned_ids = [*range(60, 107)]
    requests = [request_of(vision, *(picture(i) for i in range(n)), seed=n, number=4) for n in range(2)]
    answers = complete_in_order(client, requests, SamplingParams(8, **how))
    for request, completions in zip(requests, answers, strict=True):
        for completion in completions:
            assert not {*client.banned_ids} & {*completion.token_ids, *chain(*(completion.alternatives or ()))}
            if how.get("top_k") is None:
                found = logprobs_of(model, vision.processor, request, completion, client.banned_ids)
                assert completion.logprobs == pytest.approx(found, abs=5e-5)

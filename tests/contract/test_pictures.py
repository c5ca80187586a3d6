"""Prompts with pictures on a real server with a tower: it reads what the trainer reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from architectures import load_composite, save_served
from cameras import picture
from engines import (
    CLIENT,
    CPU,
    LORA_ARGS,
    deploy,
    make_client,
    make_server,
    num_running,
    place_of,
    preloaded_python,
    running,
    switch_of,
    train,
)
from factories import complete_in_order, compose_config, make_rollout, strategy
from PIL import Image
from pyarrow import parquet
from runs import SMALL, Endless, at, metrics_of, wait_until
from seeing import TEMPLATE
from transformers import AutoConfig, AutoModelForMultimodalLM

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineError
from offline_grpo.model.layouts import Padded
from offline_grpo.model.pictures import Vision, vision_of
from offline_grpo.run import train as train_run
from offline_grpo.types import Completion, Picture, SamplingParams, SamplingRequest
from offline_grpo.weight_sync.proof import probe_requests, scored

pytestmark = pytest.mark.slow  # a start of a server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served("qwen2_5_vl", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    own = tmp_path_factory.mktemp("server")
    args: dict[str, Any] = {**LORA_ARGS, "max_model_len": 512}
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
    body = client.body(requests[2], SamplingParams(8), client.weights)
    answer = client.post("/generate", {**body, "model": "policy"}).json()  # as others ask
    assert answer["prompt_token_ids"] == list(requests[2].prompt_ids)
    assert answer["token_ids"] == [list(completion.token_ids) for completion in answers[2]]
    swapped = replace(requests[2], pictures=requests[2].pictures[::-1])
    other = logprobs_of(model, vision.processor, swapped, answers[2][0])
    assert answers[2][0].logprobs != pytest.approx(other, abs=1e-2)


def test_files_are_shown_upright_and_on_white(server: VllmEngine, vision: Vision) -> None:
    """An orientation in EXIF, and transparency, mean the same as the pixels that they make."""
    pixels = Image.open(BytesIO(picture(3, 24, 16).data))
    files, exif = [BytesIO() for _ in range(4)], Image.Exif()
    exif[274] = 6  # to be turned clockwise
    pixels.save(files[0], "PNG", exif=exif)
    pixels.transpose(Image.Transpose.ROTATE_270).save(files[1], "PNG")
    mask = Image.new("L", pixels.size, 255)
    mask.paste(0, (0, 0, 12, 16))
    half = Image.composite(pixels, Image.new("RGB", pixels.size, "white"), mask)
    pixels.putalpha(mask)
    pixels.save(files[2], "PNG")
    half.save(files[3], "PNG")
    requests = [request_of(vision, Picture(file.getvalue())) for file in files]
    turned, upright, clear, white = complete_in_order(make_client(server), requests, SamplingParams(8))
    for one, other in ((turned, upright), (clear, white)):
        assert [each.token_ids for each in one] == [each.token_ids for each in other]
        assert one[0].logprobs == pytest.approx(other[0].logprobs, abs=1e-5)
    assert requests[0].prompt_ids == requests[1].prompt_ids


def test_other_tokens_than_the_trainers_are_refused(server: VllmEngine, vision: Vision) -> None:
    client, right = make_client(server), request_of(vision, picture(1, 24, 16))
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
    requests = [request_of(vision, *(picture(i, 24, 16) for i in range(n)), seed=n, number=4) for n in range(2)]
    answers = complete_in_order(client, requests, SamplingParams(8, **how))
    for request, completions in zip(requests, answers, strict=True):
        for completion in completions:
            assert not {*client.banned_ids} & {*completion.token_ids, *chain(*(completion.alternatives or ()))}
            if how.get("top_k") is None:
                found = logprobs_of(model, vision.processor, request, completion, client.banned_ids)
                assert completion.logprobs == pytest.approx(found, abs=5e-5)


def test_a_server_that_shows_other_pictures_is_found(
    server: VllmEngine, vision: Vision, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, policy = make_client(server), load_composite(folder, layout=Padded())
    policy.scoring.vision, client.banned_ids = vision, vision.stand_ins
    deployment = deploy(strategy("reload", "weight_sync.tolerance_nats=0.1"), client)  # as runs have it, for bf16
    deployment.connect(policy)
    assert deployment.push(policy, version=1).alignment["sync/probe_diff_abs_mean"] < 1e-5
    first, second = (each.pictures for each in probe_requests(policy)[:2])
    body = client.body

    def swapped(request: SamplingRequest, *others: Any) -> dict[str, Any]:
        """As a server would that gets them in another order: both are of the same size, and so are their tokens."""
        return body(replace(request, pictures={first: second, second: first}.get(request.pictures, ())), *others)

    monkeypatch.setattr(client, "body", swapped)
    with pytest.raises(EngineError, match=r"MISMATCH.*after pictures: the server shows the model something else"):
        deployment.push(policy, version=2)
    deployment.close()


def test_requests_go_on_through_a_push(
    server: VllmEngine, vision: Vision, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have read is computed again, their pictures too."""
    client, (old, policy) = make_client(server), (load_composite(folder, layout=Padded()) for _ in range(2))
    old.scoring.vision, policy.scoring.vision, client.banned_ids = vision, vision, vision.stand_ins
    deployment = deploy(strategy("reload", "weight_sync.pause_mode=keep"), client)
    deployment.connect(policy)
    deployment.push(policy, version=0)
    policy.make_masters()
    train(policy, seed=9, scale=0.1)
    requests = [request_of(vision, *(picture(i, 24, 16) for i in range(n)), seed=n, number=1) for n in range(1, 4)]
    asker = Endless(**{**CLIENT, **place_of(client), "eos_ids": [], "banned_ids": vision.stand_ins})
    pause = client.pause

    def amid_requests(mode: str) -> None:
        wait_until(lambda: num_running(client) == len(requests))
        pause(mode)

    monkeypatch.setattr(client, "pause", amid_requests)
    with ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(deployment.push, policy, version=1)
        answers = complete_in_order(asker, requests, SamplingParams(CPU.long))
        pushing.result()
    deployment.close()
    for request, [completion] in zip(requests, answers, strict=True):
        rollout = replace(make_rollout(request.prompt_ids, completion), pictures=(request.pictures,))
        from_old, from_new = (
            torch.tensor([token.trainer for token in scored(one, [rollout])[0]]) for one in (old, policy)
        )
        assert 0 < switch_of(completion.logprobs, from_old, from_new, CPU) < CPU.long


def test_a_run_beside_a_server(server: VllmEngine, folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {"prompt": f"{n}: " + "<image>" * (n % 3), "images": [picture(n, 24, 16).data] * (n % 3), "answer": "[a-m]"}
        for n in range(40)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    task = ["task=dataset", f"task.path={tmp_path}/rows.parquet", "task.image_field=images", "task.answer_kind=regex"]
    small = [word for word in SMALL if not word.startswith("model.tiny")]
    about = ["model=hf", f"model.train_id={folder}", "task.eval_frac=0.2", "data.num_train_seeds=null"]
    how = ["weight_sync=reload", "generation.max_new_tokens=6", "train.iterations=2", "model.device=cpu"]
    train_run(compose_config(*small, *about, *task, *how, *at(server)), tmp_path / "run")
    metrics = metrics_of(tmp_path / "run")
    for name in ("train_iter_000.json", "train_iter_001.json"):
        assert metrics[name]["alignment/diff_abs_mean"] < 1e-4
        assert metrics[name]["sync/probe_diff_abs_mean"] < 1e-4

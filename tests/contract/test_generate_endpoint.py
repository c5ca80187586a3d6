"""POST /generate of a real vLLM server: its answers are those of vLLM's own endpoint, of the weights that were pushed
last, or refusals.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engines import CPU, PROMPTS, Where, load, make_client, metric, num_running, score, serve_again, switch_of, train
from factories import complete_in_order
from runs import wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer, MinPLogitsWarper, TopPLogitsWarper

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.model.policy import Policy
from offline_grpo.types import Completion, FinishReason, SamplingParams, SamplingRequest

pytestmark = pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session")

IDS = {"prompt_token_ids": PROMPTS[1]}
LENGTH = 24


@pytest.fixture(scope="module")
def server(full_server: VllmEngine, model_folder: Path, where: Where) -> VllmEngine:
    serve_again(full_server, model_folder, where)
    return full_server


def post(server: VllmEngine, path: str = "/generate", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}{path}", json=body, timeout=60)


def generated(server: VllmEngine, **body: Any) -> dict[str, Any]:
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def completed(server: VllmEngine, **body: Any) -> list[dict[str, Any]]:
    """The same question to vLLM's own endpoint."""
    body = {"logprobs": 0, "return_token_ids": True, **body, "prompt": body["prompt"]["prompt_token_ids"]}
    return post(server, "/v1/completions", **body).json()["choices"]


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 3, "seed": 7, "temperature": 0.7, "max_tokens": LENGTH},
        {"n": 2, "seed": 1, "logprobs": 3, "max_tokens": LENGTH, "top_k": 5, "min_p": 0.01},
        {"seed": 3, "stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 500},
        {"seed": 4, "stop_token_ids": [20, 30], "min_tokens": 9, "max_tokens": 500, "skip_special_tokens": False},
    ],
)
def test_an_answer_is_that_of_the_completions_endpoint(server: VllmEngine, asked: dict[str, Any]) -> None:
    ours = generated(server, prompt=IDS, **asked)
    theirs = completed(server, prompt=IDS, **asked)
    assert set(ours) == {"text", "prompt", "finish_reasons", "logprobs", "prompt_token_ids", "token_ids"}
    assert ours["prompt_token_ids"] == PROMPTS[1]
    assert ours["token_ids"] == [choice["token_ids"] for choice in theirs]
    assert ours["text"] == [choice["text"] for choice in theirs]
    assert ours["finish_reasons"] == [choice["finish_reason"] for choice in theirs]
    for positions, choice in zip(ours["logprobs"], theirs, strict=True):
        assert [[int(next(iter(position))) for [position] in positions]] == [
            choice["token_ids"]
        ]  # the chosen token is the first
        chosen = [next(iter(position.values())) for [position] in positions]
        assert chosen == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
        for [position], top in zip(positions, choice["logprobs"]["top_logprobs"], strict=True):
            assert sorted(position.values()) == pytest.approx(sorted(top.values()), abs=1e-5)
    assert max(map(len, ours["token_ids"])) > 1


def test_a_stream_is_lines_of_all_text_so_far(server: VllmEngine) -> None:
    asked = {"prompt": IDS, "n": 2, "seed": 7, "max_tokens": LENGTH}
    answer = post(server, **asked, stream=True)
    lines = [json.loads(line)["text"] for line in answer.text.splitlines()]
    whole = generated(server, **asked)
    assert lines[-1] == [whole["prompt"] + text for text in whole["text"]]
    assert len(lines) > 2  # a server that is busy puts several tokens into one line
    for earlier, later in pairwise(lines):
        assert all(now.startswith(before) for before, now in zip(earlier, later, strict=True))


REFUSED: dict[str, tuple[int, str]] = {
    "{": (400, "truncated"),
    '{"max_tokens": 5}': (400, "prompt: must be a string"),
    '{"prompt": {"prompt_token_ids": [100]}}': (400, "from 0 to 99"),
    '{"prompt": {"prompt_token_ids": [%s 5]}}' % ("5," * 5000): (400, "longer than the maximum model length of 4096"),
    '{"prompt": "a", "bogus": 1, "output_kind": 2}': (
        400,
        "unknown: bogus, output_kind; a request may have prompt, model, stream",
    ),
    '{"prompt": "a", "temperature": "hot"}': (400, "Expected `float`, got `str` - at `$.temperature`"),
    '{"prompt": "a", "seed": 1180591620717411303424}': (400, "can't serialize ints"),
    '{"prompt": "a", "alternatives": true, "top_p": 0.9}': (400, "alternatives: need temperature and top_k above 0"),
    '{"prompt": "a", "model": "nobody"}': (400, "model=nobody: is not served; there are policy"),
}


def test_what_cannot_be_answered_is_one_line(server: VllmEngine) -> None:
    for body, (status, message) in REFUSED.items():
        answer = httpx.post(f"{server.base_url}/generate", content=body, timeout=60)
        assert answer.status_code == status, body[:80]
        assert message in answer.json()["error"], body[:80]
        assert "\n" not in answer.text
    assert httpx.get(f"{server.base_url}/generate").status_code == 405
    assert generated(server, prompt=IDS, max_tokens=2, ignore_eos=True)["finish_reasons"] == ["length"]


def test_who_hangs_up_is_not_worked_for(server: VllmEngine) -> None:
    body = json.dumps({"prompt": IDS, "max_tokens": 3900, "ignore_eos": True, "n": 2}).encode()
    host, port = server.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: num_running(server) == 2)
    wait_until(lambda: num_running(server) == 0)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(LENGTH, top_p=0.9, top_k=5, min_p=0.05, repetition_penalty=1.2),
        SamplingParams(500, stop=("e", "f")),
        SamplingParams(LENGTH, temperature=0),
    ],
)
def test_a_run_gets_the_tokens_that_a_stock_server_gives(server: VllmEngine, sampling: SamplingParams) -> None:
    def completions(path: str) -> list[list[Completion]]:
        client = make_client(server)
        client.path = path
        found = complete_in_order(
            client, [SamplingRequest(tuple(PROMPTS[i]), 3, 2**40 + i) for i in range(2)], sampling
        )
        client.close()
        assert client.path == path
        return found

    ours, theirs = (
        [completion for group in completions(path) for completion in group]
        for path in ("/generate_tokens", "/v1/completions")
    )
    assert [(one.token_ids, one.finish_reason) for one in ours] == [
        (one.token_ids, one.finish_reason) for one in theirs
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)  # batches that differ round differently
    if sampling.stop:
        assert {FinishReason.STOP} == {one.finish_reason for one in ours}


def test_a_completion_ends_at_any_end_id(server: VllmEngine) -> None:
    client, ends = make_client(server), {2, 20, 40}
    client.eos_ids = sorted(ends)
    [answers] = complete_in_order(client, [SamplingRequest(tuple(PROMPTS[1]), 8, 5)], SamplingParams(400))
    client.close()
    assert {answer.token_ids[-1] for answer in answers} == ends  # each comes first in one of them
    assert all(ends.isdisjoint(answer.token_ids[:-1]) for answer in answers)
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}


def test_logprobs_are_those_of_the_filtered_distribution(server: VllmEngine, model_folder: Path) -> None:
    """transformers' filters, in vLLM's order: min-p before top-p."""
    client, prompt = make_client(server), PROMPTS[1]
    sampling = SamplingParams(LENGTH, temperature=0.5, min_p=0.3, top_p=0.7)
    [answers] = complete_in_order(client, [SamplingRequest(tuple(prompt), 4, 5)], sampling)
    client.close()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for answer in answers:
        with torch.no_grad():
            scores = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1] / 0.5
        for warper in (MinPLogitsWarper(0.3), TopPLogitsWarper(0.7)):
            scores = warper(None, scores)
        logprobs = scores.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
        assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
        assert scores.isneginf().any()


@pytest.mark.parametrize(
    "filters",
    [{"top_p": 0.9, "top_k": 20}, {"top_p": 0.8, "top_k": 512}, {"min_p": 0.05, "top_k": 30, "stop": ("e",)}],
)
def test_every_route_tells_the_tokens_that_filters_left(
    server: VllmEngine, model_folder: Path, filters: dict[str, Any]
) -> None:
    """They are those of the filters as written down here, in float64, away from their edge; and logprobs are those of
    the softmax over them alone. With stop strings they come token by token.
    """
    sampling = SamplingParams(LENGTH, temperature=0.7, needs_alternatives=True, **filters)
    client = make_client(server, vocab_size=100)
    ours, theirs = [], []
    for path, found in (("/generate_tokens", ours), ("/v1/completions", theirs)):
        client.path = path
        for i in range(2):
            found += complete_in_order(client, [SamplingRequest(tuple(PROMPTS[i]), 3, 2**40 + i)], sampling)[0]
    client.close()
    asked = {**filters, "temperature": 0.7, "max_tokens": LENGTH, "seed": 2**40 + 1, "stop_token_ids": [2], "n": 3}
    answer = generated(server, prompt=IDS, alternatives=True, **asked)
    for completion, ids, sets in zip(ours[3:], answer["token_ids"], answer["alternatives"], strict=True):
        assert list(completion.token_ids) == ids
        assert [set(own) for own in completion.alternatives or ()] == [set(own) for own in sets]
    assert [[len(one) for one in positions] for positions in answer["logprobs"]] == [
        [1] * len(c.token_ids) for c in ours[3:]
    ]

    sizes, model = [], AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for i, (completion, other) in enumerate(zip(ours, theirs, strict=True)):
        assert completion.token_ids == other.token_ids
        assert completion.alternatives is not None
        prompt = PROMPTS[i // 3]
        with torch.no_grad():
            logits = (
                model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1].double() / 0.7
            )
        rows = zip(
            completion.token_ids,
            completion.alternatives,
            other.alternatives or (),
            logits,
            completion.logprobs,
            strict=True,
        )
        for token, beside, theirs_beside, row, logprob in rows:
            assert set(beside) == set(theirs_beside)
            kept, edge = nucleus(row, **filters)
            if edge > 1e-4:
                assert {token, *beside} == kept
            assert abs(row[token] - row[[token, *beside]].logsumexp(0) - logprob) < 2e-5
            sizes.append(1 + len(beside))
    assert min(sizes) < 5 < 9 < max(sizes)


def nucleus(
    row: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, **_: Any
) -> tuple[set[int], float]:
    """What filters leave of logits: min-p of all, the best k, and of these the fewest that have at least `top_p` of
    their probability; and how far a probability is from the edge at which it would be another set.
    """
    probabilities, order = row.softmax(0).sort(descending=True)
    edge = (probabilities - min_p * probabilities[0]).abs().min().item() if min_p else 1.0
    size = min(int((probabilities >= min_p * probabilities[0]).sum()), top_k)
    left = (probabilities[:size] / probabilities[:size].sum()).cumsum(0)
    edge = min(edge, (left - top_p).abs().min().item()) if top_p < 1 else edge
    size = int((left < top_p).sum()) + 1 if top_p < 1 else size
    return set(order[:size].tolist()), edge


def test_tokens_that_nobody_waits_for_travel_in_bundles(server: VllmEngine) -> None:
    """From vLLM's engine to the process that answers; vLLM counts what arrives there, without each first one."""

    def num_arrived(**body: Any) -> float:
        before = count()
        answer = post(server, prompt=IDS, max_tokens=100, ignore_eos=True, seed=1, **body)
        answer.raise_for_status()
        wait_until(lambda: num_running(server) == 0)
        return count() - before + 1

    def count() -> float:
        return metric(server, "inter_token_latency_seconds_count")

    assert num_arrived(path="/generate_tokens") == 4  # of 32, 32, 32 and 4
    assert num_arrived() == 4
    assert num_arrived(alternatives=True, top_k=20, top_p=0.9) == 4
    assert num_arrived(stream=True) == 100
    assert num_arrived(stop=["no text has this"]) == 100


def test_what_is_cut_short_is_no_answer(server: VllmEngine) -> None:
    """And a paused engine lets requests wait."""
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(post, server, prompt=IDS, max_tokens=3900, ignore_eos=True)
        wait_until(lambda: num_running(server) == 1)
        post(server, "/pause?mode=abort").raise_for_status()
        cut = asking.result()
        assert cut.status_code == 503
        assert "aborted the request" in cut.json()["error"]
        later = thread.submit(post, server, prompt=IDS, max_tokens=5)
        time.sleep(0.3)
        assert not later.done()
        post(server, "/resume").raise_for_status()
        assert later.result().status_code == 200
    assert generated(server, prompt=IDS, max_tokens=5, ignore_eos=True)["finish_reasons"] == ["length"]


@contextmanager
def asking_all_the_time(server: VllmEngine) -> Iterator[list[dict[str, Any]]]:
    """Answers to the same question, over and over, while the block runs and once after it."""
    answers: list[dict[str, Any]] = []
    is_over = False

    def ask() -> None:
        while True:
            was_over = is_over
            answer = post(server, prompt=IDS, n=2, max_tokens=LENGTH, ignore_eos=True)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
            if was_over:
                return

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        wait_until(lambda: bool(answers) or asking.done())
        yield answers
        is_over = True
        asking.result()


@pytest.mark.parametrize("option", ["shared_vllm", "lora_hotswap"])
def test_answers_are_whole_and_new_while_weights_are_pushed(
    option: str, connect: Callable[..., Any], where: Where, model_folder: Path
) -> None:
    sync, policy, client = connect(option)
    sync.push(policy, version=0)
    old = load(model_folder, where, lora=option == "lora_hotswap")
    with asking_all_the_time(client) as answers:
        train(policy, seed=9, scale=0.1)
        sync.push(policy, version=1)
    check_answers(answers, old, policy, where)


def check_answers(answers: list[dict[str, Any]], old: Policy, new: Policy, where: Where) -> None:
    """All are complete, each token is of the old policy or, from some token on, of the new one, and the last answer is
    the new one's.
    """
    switches = []
    for answer in answers:
        assert answer["finish_reasons"] == ["length"] * 2
        for ids, positions in zip(answer["token_ids"], answer["logprobs"], strict=True):
            assert [[str(token)] for token in ids] == [list(position) for [position] in positions]
            assert len(ids) == LENGTH
            logprobs = [next(iter(position.values())) for [position] in positions]
            completion = Completion(tuple(ids), tuple(logprobs), FinishReason.LENGTH, (0,) * LENGTH)
            ours = (score(one, [completion], [PROMPTS[1]])[0] for one in (old, new))
            switches.append(switch_of(logprobs, *ours, where))
    assert switches[0] == LENGTH  # of the old weights
    assert switches[-2:] == [0, 0]  # of the new ones


def test_what_atroposlib_reads_is_what_vllm_says(server: VllmEngine, model_folder: Path) -> None:
    """With a key, which this server does not ask for, and an address that ends in /v1."""
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    settings = {
        "api_key": "any",
        "base_url": f"{server.base_url}/v1",
        "model_name": "policy",
        "tokenizer_name": str(model_folder),
    }
    asked = {"n": 3, "seed": 5, "max_tokens": LENGTH, "temperature": 0.8}
    choices = completed(server, prompt=IDS, **asked)
    tokens = [choice["token_ids"] for choice in choices]
    logprobs = [pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5) for choice in choices]

    async def ask() -> None:
        theirs = VLLMServer(APIServerConfig(**settings, timeout=60))
        answer = await theirs.tokens_and_logprobs_completion(input_ids=list(PROMPTS[1]), **asked)
        assert answer == (PROMPTS[1], tokens, logprobs, [choice["finish_reason"] for choice in choices])
        scored = await theirs.get_logprobs(input_ids=list(PROMPTS[1]), top_k=2)
        assert [ids[0] for ids in scored["prompt_topk_token_ids"][1:]] == PROMPTS[1][1:]
        keeper = ManagedServer(theirs, tokenizer=theirs.tokenizer)
        await keeper.completion(prompt=theirs.tokenizer.decode(PROMPTS[1]), **asked)
        for node, ids, expected in zip(keeper.get_state()["nodes"], tokens, logprobs, strict=True):
            assert node.tokens == PROMPTS[1] + ids
            assert node.masked_tokens == [-100] * len(PROMPTS[1]) + ids
            assert node.logprobs[len(PROMPTS[1]) :] == expected

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_adapters_are_sampled_from_by_name_or_the_newest(connect: Callable[..., Any], where: Where) -> None:
    sync, policy, client = connect("lora_hotswap")
    sync.push(policy, version=0)
    train(policy, seed=4, scale=0.2)
    sync.push(policy, version=1)
    asked = {"prompt": IDS, "seed": 1, "max_tokens": LENGTH, "ignore_eos": True}
    unnamed = generated(client, **asked)
    named = generated(client, **asked, model=client.weights.name)
    base = generated(client, **asked, model="policy")
    [theirs] = completed(client, **asked, model=client.weights.name)
    [base_theirs] = completed(client, **asked, model="policy")
    assert (
        unnamed["token_ids"]
        == named["token_ids"]
        == [theirs["token_ids"]]
        != base["token_ids"]
        == [base_theirs["token_ids"]]
    )
    for answer, choice in ((unnamed, theirs), (base, base_theirs)):
        logprobs = [next(iter(position.values())) for [position] in answer["logprobs"][0]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)


def test_tokens_as_probable_as_the_last_of_top_k_are_told_too(
    server: VllmEngine, model_folder: Path, where: Where, tmp_path: Path
) -> None:
    """Of a model to which the tokens 2i and 2i + 1 are one: the fifth most probable comes with its twin."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    rows = model.get_output_embeddings().weight.data
    rows[1::2] = rows[::2]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    serve_again(server, tmp_path, where)
    client, sampling = make_client(server, vocab_size=100), SamplingParams(LENGTH, top_k=5, needs_alternatives=True)
    for client.path in ("/generate_tokens", "/v1/completions"):
        [[completion]] = complete_in_order(client, [SamplingRequest(tuple(PROMPTS[1]), 1, 7)], sampling)
        assert completion.alternatives is not None
        sets = [sorted([t, *own]) for t, own in zip(completion.token_ids, completion.alternatives, strict=True)]
        assert all(len(own) == 6 and [t ^ 1 for t in own[::2]] == own[1::2] for own in sets)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[1], *completion.token_ids]])).logits[0, len(PROMPTS[1]) - 1 : -1]
        pairs = zip(logits, completion.token_ids, sets, strict=True)
        right = [(row[token] - row[own].logsumexp(0)).item() for row, token, own in pairs]
        assert completion.logprobs == pytest.approx(right, abs=2e-5)
    client.close()

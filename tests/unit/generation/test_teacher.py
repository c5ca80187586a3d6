"""A teacher behind a server tells its model's logprobs; a server that would teach something else is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from factories import VOCAB, make_llama, make_passes, make_rollout, make_scoring
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.errors import ConfigError
from offline_grpo.generation.teacher import TeacherServer
from offline_grpo.train.batch import build_batch
from offline_grpo.types import RolloutGroup

MODEL = make_llama()
TOKENIZER: Any = type(
    "Tokenizer", (), {"__len__": lambda _: VOCAB, "decode": lambda _, ids: " ".join(f"<{token}>" for token in ids)}
)()


def script(changes: dict[str, Any]) -> Any:
    def answer(request: Request) -> Reply:
        if "status" in changes:
            return Reply({"detail": "Not Found"}, status=changes["status"])
        if request.path == "/v1/models":
            return Reply({"data": [{"id": "teacher", "max_model_len": changes.get("room", 64)}]})
        if request.path == "/detokenize":
            return Reply({"prompt": changes.get("words", TOKENIZER.decode)(request.body["tokens"])})
        ids = request.body["prompt"]
        with torch.no_grad():
            logprobs = MODEL(torch.tensor([ids])).logits.log_softmax(-1)[0]
        found = [{str(token): {"logprob": logprobs[t, token].item()}} for t, token in enumerate(ids[1:])]
        return Reply({"choices": [{"prompt_logprobs": None if changes.get("is_silent") else [None, *found]}]})

    return answer


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    with ScriptedServer(script(getattr(request, "param", {}))) as server:
        yield server


def test_a_server_tells_the_models_own_logprobs(server: ScriptedServer) -> None:
    teacher = TeacherServer(server.base_url)
    teacher.check(TOKENIZER, 20)
    rollouts = (make_rollout([5, 6, 7], [8, 9]), make_rollout([4], [3, 2, 1, 0]), make_rollout([1, 2], [3]))
    passes = make_passes(batch_size=1, teacher=teacher)
    [taught] = passes.teach([RolloutGroup(None, rollouts)])
    expected = make_scoring(MODEL).logprobs(build_batch(rollouts)).tolist()
    found = [logprob for rollout in taught.rollouts for logprob in rollout.teacher_logprobs or ()]
    assert found == pytest.approx(expected, abs=1e-5)
    hot = build_batch([make_rollout([5, 6], [8, 9], temperature=0.5)])
    with pytest.raises(ConfigError, match=r"^train.advantage.teacher=http.*at temperature 1; load the teacher here"):
        teacher.logprobs(hot)


REFUSED = [
    ({"words": lambda ids: TOKENIZER.decode(ids[::-1])}, "its tokens have other ids"),
    ({"room": 20}, "takes 19 tokens, and prompt and completion may have 20"),
    ({"is_silent": True}, "returns no prompt_logprobs"),
    ({"status": 404}, ".*no vLLM server, or it has no tokenizer"),
]


@pytest.mark.parametrize(("server", "expected"), REFUSED, indirect=["server"])
def test_a_server_that_would_teach_something_else_is_refused(server: ScriptedServer, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^train.advantage.teacher=http://.*: {expected}"):
        TeacherServer(server.base_url).check(TOKENIZER, 20)

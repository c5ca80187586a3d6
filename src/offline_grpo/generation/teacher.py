"""A teacher behind a vLLM server, which is asked how likely the tokens of whole sequences are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offline_grpo.engine.http import Refused, ServerApi, read
from offline_grpo.engine.server_engine import LOWEST_LOGPROB
from offline_grpo.errors import ConfigError, require
from offline_grpo.types import LOGPROB_ROUNDING, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "train.advantage.teacher"
PATH = "/v1/completions"
IN_FLIGHT = 64
TIMEOUT_S = 600.0


@dataclass
class TeacherServer:
    """A `Scorer` that asks a server of any run, or a stock vLLM, for the logprobs of prompts.

    vLLM computes those at temperature 1, whatever temperature the request has, and with raw and processed logprobs
    alike.
    """

    url: str
    device: torch.device = field(default=torch.device("cpu"), init=False)

    @cached_property
    def _api(self) -> ServerApi:
        return ServerApi(self.url, None)

    def check(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
        """Raise ConfigError for a server whose token ids mean something else, that has no room for sequences of
        `num_tokens`, or that returns no logprobs of prompts; EngineError where nobody answers.
        """
        # Its words for all token ids say whether it has the same vocabulary.
        ids = list(range(len(tokenizer)))
        fix = "no vLLM server, or it has no tokenizer; start one by python -m offline_grpo.engine.serve TEACHER"
        try:
            text = read(self._api.post("/detokenize", {"tokens": ids}), lambda answer: answer["prompt"])
            room = read(self._api.get("/v1/models"), lambda answer: answer["data"][0]["max_model_len"])
        except Refused as refusal:
            raise ConfigError(f"{KEY}={self.url}: {refusal}: {fix}") from refusal
        fix = "its tokens have other ids than those of the model to train; take a teacher of the same family"
        require(text == tokenizer.decode(ids), KEY, self.url, fix)
        fix = f"takes {room - 1} tokens, and prompt and completion may have {num_tokens}; raise its --max-model-len"
        require(num_tokens < room, KEY, self.url, fix)
        self._row([ids[0], ids[1]])

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """See `Scorer`. Raises ConfigError at another temperature than 1, EngineError where the server fails."""
        hot = batch.temperature[batch.completion_mask & (batch.temperature != 1.0)]
        fix = "a server tells logprobs of prompts at temperature 1; load the teacher here: give its folder or id"
        require(not len(hot), KEY, self.url, f"{fix} (these rollouts have {hot[:1].tolist()})")
        fix = "a server tells logprobs of the whole vocabulary, and these rollouts were filtered; load the teacher here"
        require(batch.alternatives is None, KEY, self.url, fix)
        rows = [row.tolist() for row in batch.token_ids.split(batch.sequence_lengths)]
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            found = [logprob for row in threads.map(self._row, rows) for logprob in row]
        return torch.tensor(found) * batch.completion_mask

    def _row(self, ids: list[int]) -> list[float]:
        """A logprob for each token; 0 for the first, which nothing predicts."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}

        def logprobs(answer: Any) -> list[float]:
            positions = answer["choices"][0].get("prompt_logprobs")
            fix = "returns no prompt_logprobs; is it a vLLM server?"
            require(positions is not None, KEY, self.url, fix)
            found = [position[str(token)]["logprob"] for token, position in zip(ids[1:], positions[1:], strict=True)]
            wrong = [each for each in found if not LOWEST_LOGPROB < each <= LOGPROB_ROUNDING]
            if wrong:
                raise ValueError(f"a token's logprob is {wrong[0]}")
            return [0.0, *found]

        return read(self._api.post(PATH, body, timeout_s=TIMEOUT_S), logprobs)

"""The data that flows through the pipeline, from a problem to an optimizer step.

    Problem -> SamplingRequest -> (client) -> Completion -> (task) -> Rollout -> RolloutGroup
            -> TokenBatch -> (policy) -> TokenStats -> (loss) -> LossOutput

Everything here is plain data: no component is imported, nothing is mutated after construction.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from hashlib import sha256
from itertools import chain, compress, groupby, pairwise
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a mistake in the configuration is found without torch, whose import takes seconds
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Routes = np.ndarray[Any, np.dtype[Any]]

Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`, of an assistant perhaps with `tool_calls`. With pictures the content is a list
of parts, `{"type": "text", "text": "..."}` and `{"type": "image"}`; the pictures themselves are beside the messages.
"""


def text_of(message: Message) -> str:
    """What a message says in words, without its pictures."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def num_pictures(message: Message) -> int:
    """How many places for pictures a message has."""
    content = message.get("content")
    return sum(part["type"] == "image" for part in content) if isinstance(content, (list, tuple)) else 0


def pictures_in(messages: Iterable[Message]) -> list[Picture]:
    """Of an episode's messages, whose parts have their pictures: `{"type": "image", "image": Picture}`."""
    contents = (message.get("content") for message in messages)
    return [part["image"] for each in contents if isinstance(each, list) for part in each if part["type"] == "image"]


class Split(StrEnum):
    """Which problems of a task: those trained on, or those held out."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why a completion ended: on its own (EOS or a stop string), at `max_new_tokens`, or dropped by the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


LOGPROB_ROUNDING = 1e-3
"""How far above 0 an engine may round a logprob, in nats."""
TASK_MARK = "::"  # in ids of a mixture's problems, between the name of the task and the problem's id there

Schema = Mapping[str, Any]  # of a tool, as `transformers.utils.get_json_schema` writes it


@dataclass(frozen=True, slots=True)
class Picture:
    """The bytes of an image file, such as a PNG. Pictures are equal if their `key`, the SHA-256 of the bytes, is."""

    data: bytes = field(repr=False, compare=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", sha256(self.data).hexdigest())


@dataclass(frozen=True, slots=True)
class Rules:
    """How far an episode may go. See conf/task/environment.yaml."""

    max_turns: int
    max_turn_tokens: int | None
    max_environment_tokens: int  # beside the problem's messages: schemas of tools, and all that comes between two turns
    timeout_s: float
    tools: tuple[Schema, ...] = ()  # in the first prompt, as far as they are known before
    has_address: bool = False  # its program is a client of OpenAI's API


class Encoded(NamedTuple):
    """A prompt in tokens."""

    ids: list[int]  # with as many tokens in the place of a picture as the model computes of it
    unexpanded_ids: list[int]  # with one placeholder in the place of a picture; empty without pictures


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a verifiable answer. `problem_id` is unique within the task and stable between runs."""

    problem_id: str
    messages: tuple[Message, ...]
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # the rest of its row in a data set, for reward functions
    rules: Rules | None = None  # of an episode, which `Task.play` plays; None: it is answered in one completion
    tools: tuple[Schema, ...] = ()  # that the prompt offers, where it is answered in one completion
    pictures: tuple[Picture, ...] = ()  # of the messages' parts `{"type": "image"}`, in their order

    @property
    def task(self) -> str:
        """The task of a mixture that it is of; "" elsewhere."""
        name, mark, _ = self.problem_id.partition(TASK_MARK)
        return name if mark else ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. Temperature 0 means greedy; `top_k=0`, `top_p=1`, `min_p=0`, `repetition_penalty=1`
    are off. The tokens of the first of the `stop` strings are kept; the text that is judged is cut before it, or behind
    it with `include_stop_str_in_output`. With `needs_alternatives` completions say what else might have been drawn.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    needs_alternatives: bool = False
    needs_routes: bool = False  # of a mixture of experts: completions say where their tokens went

    @property
    def has_filters(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are drawn from something else than the softmax at this temperature."""
        return self.has_filters or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that an engine serves: the optimizer updates in them, their name in requests ("": the base model)."""

    version: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Ask for completions of one prompt; the j-th is drawn with `seed + j`, so batching never changes a result.
    In `prompt_ids` as many tokens stand for a picture as the model computes of it; in `unexpanded_ids`, which servers
    are asked with, one placeholder does.
    `max_new_tokens` goes before that of `SamplingParams`. Requests of one `episode` begin alike: a server that answered
    one has most of the next in its cache. One that `is_urgent` is computed before others that wait in a vLLM server.
    """

    prompt_ids: tuple[int, ...]
    num_completions: int
    seed: int
    max_new_tokens: int | None = None
    episode: int | None = None
    is_urgent: bool = False
    pictures: tuple[Picture, ...] = ()
    unexpanded_ids: tuple[int, ...] = ()  # empty without pictures


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled after a prompt, EOS included."""

    token_ids: tuple[int, ...]  # [C]
    logprobs: tuple[float, ...]  # [C] nats, under the sampling distribution
    finish_reason: FinishReason
    versions: tuple[int, ...]  # [C] optimizer updates in the weights that drew the token
    alternatives: tuple[Sequence[int], ...] | None = None
    """[C] the tokens that the sampler's filters left beside the drawn one, in any order; None: the whole vocabulary."""
    routes: Routes | None = field(default=None, compare=False)
    """[P + C or less, L, K] the experts that the prompt's and its own first tokens went to in each block."""


EQUAL_REWARDS = 1e-6
"""Rewards that spread less are equal: the rest is rounding."""

CompletionStream = Generator[tuple[int, list[Completion]], None, None]
"""The index of each request of a call, with its completions, as they become complete; `close` abandons the rest."""


@dataclass(frozen=True, slots=True)
class Score:
    """A task's verdict on one completion."""

    reward: float  # NaN: it could not be scored
    is_correct: bool
    parts: Mapping[str, float]  # the weighted terms that `reward` is the sum of
    failure: str | None = None
    """Why it has no reward: timeout, memory, crashed, raised, and after a colon what happened; or none: it got none."""
    measured: Mapping[str, float] = field(default_factory=dict)  # other numbers, whose means are metrics

    @classmethod
    def unscored(cls, failure: str = "none") -> Score:
        """Of a completion that could not be scored, or that no reward applies to."""
        return cls(nan, False, {}, failure)

    @property
    def is_scored(self) -> bool:
        """Whether it has a reward: its own, or the one that `scoring.on_failure` gives to failures."""
        return not isnan(self.reward)


@dataclass(frozen=True, slots=True)
class Call:
    """Of a tool, by the policy."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy says in one turn."""

    text: str = ""  # as a task judges a completion
    content: str = ""  # without thinking and calls
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    is_cut: bool = False  # it stopped at a limit, and no further turn is possible
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_malformed: int = 0  # calls that could not be read

    @property
    def message(self) -> Message:
        """As the client of an OpenAI server appends it to its conversation, but for arguments, which are no JSON."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
        ]
        thinking = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **thinking, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `start` to `end` of a rollout, which the policy sampled in one go, and the part of the reward that was
    paid for them alone.
    """

    start: int
    end: int
    reward: float = 0.0  # a share of the rollout's reward; what no turn earned alone belongs to all of them


class UnusableGroup(ValueError):
    """Rollouts that nothing can be learnt from. `reason` is one word: malformed, masks, vocabulary, too_long, ..."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Rollout:
    """A scored completion of N tokens: the prompt, what the policy sampled, and, in several turns, what an environment
    wrote in between. Only sampled tokens are trained on. Example, two turns (p prompt, s sampled, e environment):

        token_ids  p p s s e e s s s
        is_sampled F F T T F F T T T

    An episode that forks, or rewrites its history, has several sequences, end to end, of which each is what the model
    read and wrote in one piece. What was sampled before a fork is sampled in the first of them, and context (c) in the
    others. Example, two answers to the same prompt and turn:

        token_ids  p p s s e e s s s p p c c e e s
        is_sampled F F T T F F T T T F F F F F F T          starts (0, 9)

    Raises:
        UnusableGroup: the fields differ in length, or the first token of a sequence is marked as sampled: nothing
            predicts it.
    """

    token_ids: tuple[int, ...]  # [N]
    is_sampled: tuple[bool, ...]  # [N]
    logprobs: tuple[float, ...]  # [N] nats, from the engine while it sampled; ignored where not sampled
    versions: tuple[int, ...]  # [N] as in `Completion`, -1: unknown; ignored where not sampled
    temperature: float  # what the sampler divided the logits by
    finish_reason: FinishReason | None  # of the last completion; None where the source does not know
    text: str  # what the task judged, see `TokenizerCodec.judged`; of other sources, the sampled text
    score: Score
    ref_logprobs: tuple[float, ...] | None = None  # [N] nats, of the source's reference; ignored where not sampled
    teacher_logprobs: tuple[float, ...] | None = None  # [N] nats, of a teacher; ignored where not sampled
    zero_advantage: bool = False  # it counts in the mean of its group, but gets the advantage 0
    turns: tuple[Turn, ...] = ()  # in an environment, in the order in which they were answered; elsewhere empty
    conversation: tuple[Message, ...] = ()  # the same: all messages of the last sequence, the prompt's too
    starts: tuple[int, ...] = (0,)  # where each sequence begins
    alternatives: tuple[Sequence[int], ...] | None = None  # [N] as in `Completion`; () where not sampled
    pictures: tuple[tuple[Picture, ...], ...] = ()  # of each sequence, in the order of its tokens; (): it has none
    routes: Routes | None = field(default=None, compare=False)  # [N, L, K] int16 as in `Completion`; -1: unknown

    def __post_init__(self) -> None:
        rows = (self.token_ids, self.is_sampled, self.logprobs, self.versions)
        given = (self.ref_logprobs, self.teacher_logprobs, self.alternatives, self.routes)
        lengths = {len(row) for row in (*rows, *given) if row is not None}
        if len(lengths) != 1:
            raise UnusableGroup("malformed", f"a rollout whose fields differ in length: {sorted(lengths)}")
        if any(self.is_sampled[start : start + 1] == (True,) for start in self.starts):
            raise UnusableGroup("masks", "the first token of a rollout is sampled, though nothing predicts it")

    @classmethod
    def of_one_turn(
        cls,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        temperature: float,
        text: str,
        score: Score,
        pictures: tuple[Picture, ...] = (),
    ) -> Rollout:
        blank = len(prompt_ids)
        return cls(
            token_ids=(*prompt_ids, *completion.token_ids),
            is_sampled=(False,) * blank + (True,) * len(completion.token_ids),
            logprobs=(0.0,) * blank + completion.logprobs,
            versions=(0,) * blank + completion.versions,
            temperature=temperature,
            finish_reason=completion.finish_reason,
            text=text,
            score=score,
            alternatives=None if (found := completion.alternatives) is None else ((),) * blank + found,
            pictures=(pictures,) if pictures else (),
            routes=joined_routes(blank + len(completion.token_ids), [(0, 0, completion.routes)]),
        )

    @property
    def num_sampled(self) -> int:
        return sum(self.is_sampled)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where each sequence begins and ends."""
        return list(pairwise((*self.starts, len(self.token_ids))))


def joined_routes(num_tokens: int, parts: Iterable[tuple[int, int, Routes | None]]) -> Routes | None:
    """[N, L, K] int16 of a rollout's completions: where the sequence of each begins, how many of its tokens have been
    in one before, which knows where they went, and its routes. None if there are none.
    """
    import numpy as np

    found = [(start, known, routes) for start, known, routes in parts if routes is not None]
    if not found:
        return None
    joined = np.full((num_tokens, *found[0][2].shape[1:]), -1, np.int16)
    for start, known, routes in found:
        joined[start + known : start + len(routes)] = routes[known:]
    return joined


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The G rollouts of one problem, whose rewards are compared with each other."""

    problem: Problem | None  # None where a source has the rollouts alone
    rollouts: tuple[Rollout, ...]
    advantages: tuple[tuple[float, ...], ...] | None = None  # [G][N], in place of those computed from the rewards
    num_replaced: int = 0  # groups without signal that were thrown away in favour of this one
    num_discarded_tokens: int = 0  # that were sampled for those
    discarded: tuple[tuple[str, int, int], ...] = ()  # of each: `problem_key`, right answers, scored completions

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise UnusableGroup("malformed", "a group without a rollout")
        if self.advantages is None:
            return
        found, needed = [len(row) for row in self.advantages], [len(rollout.token_ids) for rollout in self.rollouts]
        if found != needed:
            raise UnusableGroup("malformed", f"advantages of {found} numbers, and rollouts of {needed} tokens")
        if not all(isfinite(sum(row)) for row in self.advantages):
            raise UnusableGroup("numbers", "an advantage that is not finite")

    def select(self, members: Sequence[int]) -> RolloutGroup:
        """The group of these of its rollouts alone."""
        advantages = None if self.advantages is None else tuple(self.advantages[i] for i in members)
        return replace(self, rollouts=tuple(self.rollouts[i] for i in members), advantages=advantages)

    def scored(self) -> RolloutGroup | None:
        """The group of the rollouts that have a reward; None if those are fewer than two of several."""
        members = [i for i, rollout in enumerate(self.rollouts) if rollout.score.is_scored]
        if len(members) == len(self.rollouts):
            return self
        return self.select(members) if len(members) > 1 else None

    def with_scores(self, scores: Iterable[Score]) -> RolloutGroup:
        """The group with another score for each rollout."""
        pairs = zip(self.rollouts, scores, strict=True)
        return replace(self, rollouts=tuple(replace(rollout, score=score) for rollout, score in pairs))

    def with_failures(self, on_failure: str) -> RolloutGroup:
        """The group with a reward in place of each that is missing: `scoring.on_failure`.

        "exclude": none. "zero": 0. "least": the least reward of the group, or 0 if that is less: where rewards are
        below 0, a policy would learn from zeros to make the code fail that scores.
        """
        scores = [rollout.score for rollout in self.rollouts]
        if on_failure == "exclude" or all(score.is_scored for score in scores):
            return self
        known = [score.reward for score in scores if score.is_scored]
        reward = 0.0 if on_failure == "zero" else min([0.0, *known])
        return self.with_scores([score if score.is_scored else replace(score, reward=reward) for score in scores])

    def check(self, *, vocab_size: int, max_tokens: int | None) -> None:
        """Raise UnusableGroup unless a model of this vocabulary and this length of sequences can learn from it."""
        for rollout in self.rollouts:
            length = max(end - start for start, end in rollout.bounds)
            ids = (*rollout.token_ids, *chain.from_iterable(rollout.alternatives or ()))
            lowest, highest = min(ids, default=0), max(ids, default=0)
            if max_tokens is not None and length > max_tokens:
                raise UnusableGroup("too_long", f"a sequence of {length} tokens, where {max_tokens} are the limit")
            if highest >= vocab_size or lowest < 0:
                about = f"token {lowest if lowest < 0 else highest}, and the model has tokens 0 to {vocab_size - 1}"
                raise UnusableGroup("vocabulary", about)
            for logprobs in filter(None, (rollout.logprobs, rollout.ref_logprobs, rollout.teacher_logprobs)):
                sampled = list(compress(logprobs, rollout.is_sampled))
                if not (isfinite(sum(logprobs)) and max(sampled, default=0.0) <= LOGPROB_ROUNDING):
                    raise UnusableGroup("numbers", "a sampled token whose logprob is above 0 or not finite")
            reward, temperature, failure = rollout.score.reward, rollout.temperature, rollout.score.failure
            if not ((isfinite(reward) or failure is not None) and 0 < temperature < inf):
                raise UnusableGroup("numbers", f"a reward of {reward} at a temperature of {temperature}")


def by_task(groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
    """The groups of each task of a mixture, in the order of their names; none elsewhere."""
    tasks = sorted({group.problem.task for group in groups if group.problem is not None and group.problem.task})
    return {
        name: [group for group in groups if group.problem is not None and group.problem.task == name] for name in tasks
    }


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences laid end to end, one element per token and no padding: element t of every [T] tensor describes
    `token_ids[t]`.

    Example: two sequences, prompt 5 6 + completion 7, and prompt 8 + completion 9 10, are
        token_ids        5 6 7 8 9 10
        position_ids     0 1 2 0 1 2
        sequence_ids     0 0 0 1 1 1
        completion_mask  F F T F T T
        sequence_lengths (3, 3)
    Logprobs and advantages are 0 where `completion_mask` is False. The first token of a sequence is never trained:
    nothing predicts it. A rollout of several sequences has all of them here, one after the other.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    sequence_ids: Tensor  # [T] int64, 0 .. num_sequences-1, in order
    completion_mask: Tensor  # [T] bool: tokens that are trained on
    advantages: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32, nats, from the engine while it sampled
    old_logprobs: Tensor  # [T] float32, nats, from the trainer before the first update on these rollouts
    ref_logprobs: Tensor | None  # [T] float32, nats, from the frozen reference; None where no KL term needs it
    temperature: Tensor  # [T] float32, what the sampler divided the logits by
    sequence_lengths: tuple[int, ...]  # S lengths that sum to T, kept on the host so that no step waits for the device
    owners: tuple[int, ...]  # [S] the rollout that each sequence is of, 0 .. num_rollouts-1
    completion_index: Tensor | None = None  # see `completion_positions`
    teacher_logprobs: Tensor | None = None  # [T] float32, nats, from a frozen teacher; None where there is none
    rollout_sizes: Tensor | None = None  # [T] trained tokens of each one's rollout; None: each rollout is one sequence
    num_alternatives: Tensor | None = None  # [T] int64, of each token in `alternatives`; None: the whole vocabulary
    alternatives: Tensor | None = None
    """[M] int64: of one token after the other, those that the sampler's filters left beside it."""
    pictures: tuple[tuple[Picture, ...], ...] = ()  # [S] of each sequence, on the host; (): there are none
    routes: Tensor | None = None
    """[T, L, K] int16: the experts that each token goes to in each block, see `model/routes.py`; None: those that the
    policy chooses."""

    @property
    def completion_positions(self) -> Tensor:
        """[N] int64: where `completion_mask` is True. On a GPU it came along: to look there would wait for the GPU."""
        return self.completion_mask.nonzero().squeeze(-1) if self.completion_index is None else self.completion_index

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_rollouts(self) -> int:
        return len({*self.owners})

    @property
    def rollout_lengths(self) -> tuple[int, ...]:
        """[R] tokens of each rollout, which is whole in this batch."""
        pairs = groupby(zip(self.owners, self.sequence_lengths, strict=True), key=lambda pair: pair[0])
        return tuple(sum(length for _, length in own) for _, own in pairs)

    def with_logprobs(self, *, old: Tensor | None = None, ref: Tensor | None = None) -> TokenBatch:
        """The same batch with `old_logprobs` and / or `ref_logprobs` [T] replaced."""
        return replace(
            self,
            old_logprobs=self.old_logprobs if old is None else old,
            ref_logprobs=self.ref_logprobs if ref is None else ref,
        )

    def masked(self, is_trained: Tensor) -> TokenBatch:
        """The same batch on the CPU, of whose trained tokens only those of `is_trained` [T] are left."""
        names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs")
        found = {name: values for name in names if (values := getattr(self, name)) is not None}
        changed = {name: values.where(is_trained, 0.0) for name, values in found.items()}
        if self.num_alternatives is not None and self.alternatives is not None:
            changed["alternatives"] = self.alternatives[is_trained.repeat_interleave(self.num_alternatives)]
            changed["num_alternatives"] = self.num_alternatives * is_trained
        return replace(self, completion_mask=is_trained, **changed)

    def with_top_entropy(self, entropy: Tensor, frac: float) -> TokenBatch:
        """The same batch on the CPU, with advantages of 0 for all trained tokens but the share `frac` whose entropy [T]
        is highest (arXiv 2506.01939).
        """
        import numpy as np

        threshold = np.quantile(entropy.numpy()[self.completion_mask.numpy()], 1 - frac)
        return replace(self, advantages=self.advantages * (entropy >= threshold))

    def select(self, sequences: Sequence[int]) -> TokenBatch:
        """Of a batch on the CPU, these sequences alone, in this order; `sequence_ids` and owners count from 0 again."""
        import numpy as np
        import torch

        index, lengths = self.positions_of(sequences), tuple(self.sequence_lengths[s] for s in sequences)
        # torch would wake every core for each tensor: on a virtual machine of 32 cores that took 12 ms
        tensors = self._tensors()
        alternatives, counts = tensors.pop("alternatives", None), tensors.get("num_alternatives")
        chosen: dict[str, Any] = {name: torch.from_numpy(values.numpy()[index]) for name, values in tensors.items()}
        if alternatives is not None and counts is not None:
            before = np.cumsum(counts.numpy()) - counts.numpy()
            own = _runs(before[index], counts.numpy()[index])
            chosen["alternatives"] = torch.from_numpy(alternatives.numpy()[own])
        chosen["sequence_ids"] = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        numbers: dict[int, int] = {}
        owners = tuple(numbers.setdefault(self.owners[s], len(numbers)) for s in sequences)
        chosen["pictures"] = tuple(self.pictures[s] for s in sequences) if self.pictures else ()
        return replace(self, **chosen, sequence_lengths=lengths, owners=owners, completion_index=None)

    def positions_of(self, sequences: Sequence[int]) -> NDArray[np.int64]:
        """[T'] where the tokens of these sequences stand, in this order."""
        import numpy as np

        all_lengths, chosen = np.array(self.sequence_lengths, np.int64), np.array(sequences, np.int64)
        return _runs((np.cumsum(all_lengths) - all_lengths)[chosen], all_lengths[chosen])

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on another device; to a GPU through pinned memory, so that nothing waits."""
        tensors = self._tensors() | {"completion_index": self.completion_positions}
        if device.type == "cuda" and self.token_ids.device.type == "cpu":
            tensors = {name: values.pin_memory() for name, values in tensors.items()}
        return replace(self, **{name: values.to(device, non_blocking=True) for name, values in tensors.items()})

    def _tensors(self) -> dict[str, Tensor]:
        on_host = ("sequence_lengths", "owners", "completion_index", "pictures")
        names = (field.name for field in fields(self) if field.name not in on_host)
        return {name: values for name in names if (values := getattr(self, name)) is not None}


def _runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each run its numbers from the start on: of starts 5, 2 and lengths 2, 3 [5, 6, 2, 3, 4]."""
    import numpy as np

    first = np.cumsum(lengths) - lengths  # where each of them begins in the result
    return np.arange(lengths.sum()) + np.repeat(starts - first, lengths)


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Sizes of the whole optimizer batch, over all microbatches and processes: the denominators of every loss and
    metric. Dividing by these, and summing over both, makes the gradient independent of how the batch was split."""

    num_completion_tokens: int
    num_rollouts: int
    max_new_tokens: int  # the generation limit, Dr. GRPO's constant length


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What the policy says about each token, under the sampler's temperature; 0 where `completion_mask` is False."""

    logprobs: Tensor  # [T] float32, nats, with gradient
    entropy: Tensor  # [T] float32, nats, of the distribution that drew the token; gradient only where asked for


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A microbatch's share of loss and metrics: shares add up to the batch's value (see `BatchTotals`)."""

    loss: Tensor  # [] float32
    metrics: Mapping[str, Tensor]  # name -> [] float32, detached


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one push of weights moved, how long the engine stood still for it, and what proved that they arrived."""

    version: int  # that the engine serves afterwards; a push that was not due leaves the older one
    num_tensors: int
    num_bytes: int  # copied from one place to another
    seconds: float  # of the delivery, without the proof
    paused_seconds: float
    proof_seconds: float = 0.0
    alignment: Mapping[str, float] = field(default_factory=dict)  # metrics of the proof; empty without a comparison

    def metrics(self) -> dict[str, float]:
        """For the iteration's metrics file."""
        return {
            "sync/version": float(self.version),
            "sync/num_tensors": float(self.num_tensors),
            "sync/num_bytes": float(self.num_bytes),
            "time/sync_push_s": self.seconds,
            "time/sync_paused_s": self.paused_seconds,
            "time/sync_proof_s": self.proof_seconds,
            **self.alignment,
        }


Metrics = Mapping[str, float]
"""Metric name -> finite number. Equal runs differ in times and rates alone, which begin with `time/` or `perf/`."""

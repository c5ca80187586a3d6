"""From the JSON of a group, which may come from anybody, to a `RolloutGroup` that a run can learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import compress, repeat
from operator import ne
from typing import Any

from pydantic_core import SchemaValidator, ValidationError
from pydantic_core import core_schema as schema

from offline_grpo.engine.http import printable
from offline_grpo.errors import GrpoError
from offline_grpo.types import Rollout, RolloutGroup, Score

NOT_TRAINED = -100
"""In a mask; elsewhere a mask repeats the token."""
LARGEST = 1e4
"""Of scores and advantages. The square of what they and the next two bounds make of a gradient fits into float32."""
LOWEST_LOGPROB = -30.0
"""In nats, of a token that was sampled: one in 10 trillion."""
LOWEST_REF_LOGPROB = -1000.0
"""Of a token that another model drew."""
TEMPERATURES = (0.01, 100.0)
ROUNDING = 1e-3
"""How far a logprob may be above 0, in nats."""


@dataclass(frozen=True, slots=True)
class LazyText:
    """Text that is made when `str` asks for it: of the many completions of an iteration a few are read. Pickled, it is
    text.
    """

    decode: Callable[[Sequence[int]], str]
    token_ids: Sequence[int]

    def __str__(self) -> str:
        return self.decode(self.token_ids)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class Reason(StrEnum):
    """Why a group is dropped."""

    MALFORMED = "malformed"  # a field is missing or of another type, or lengths differ
    NUMBERS = "numbers"  # a number is not finite, or beyond what can be
    VOCABULARY = "vocabulary"  # a token that the model does not have
    MASKS = "masks"  # nothing to train on, or a first token, which nothing predicts
    TOO_LONG = "too_long"  # a sequence of more than rollouts.max_token_len tokens
    TOO_MANY = "too_many"  # more sequences than a batch
    IMAGES = "images"  # which the model would not see


class Dropped(Exception):
    """A group that is not trained on, and why."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class MissingLogprobs(GrpoError):
    """An environment does not say how likely its tokens were."""


@dataclass(frozen=True)
class _Settings:
    """What `generation_params`, `overrides` and `group_overrides` hold, as far as it is read."""

    temperature: float | None = None
    set_advantage_to_zero: bool | None = None


@dataclass(frozen=True)
class _Group:
    """A group whose fields have the right types, and bounded numbers."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    generation_params: _Settings | None = None
    overrides: list[_Settings | None] | None = None
    group_overrides: _Settings | None = None


OPTIONAL = ("inference_logprobs", "advantages", "ref_logprobs", "overrides")
"""Of each sequence or token. Environments of atroposlib send an empty list where they have none."""


def _validator() -> SchemaValidator:
    """Of `_Group`. It stops at the first error: a hostile group may have millions."""

    def rows(item: schema.CoreSchema) -> schema.CoreSchema:
        return schema.list_schema(schema.list_schema(item, fail_fast=True, strict=True), fail_fast=True, strict=True)

    def fields(
        cls: type, optional: dict[str, schema.CoreSchema], required: dict[str, schema.CoreSchema]
    ) -> schema.CoreSchema:
        nullable = {
            name: schema.with_default_schema(schema.nullable_schema(item), default=None)
            for name, item in optional.items()
        }
        all_fields = [schema.dataclass_field(name, item) for name, item in {**required, **nullable}.items()]
        names = [field["name"] for field in all_fields]
        return schema.dataclass_schema(cls, schema.dataclass_args_schema(cls.__name__, all_fields), names, strict=False)

    def number(lowest: float | None = None, highest: float | None = None) -> schema.CoreSchema:
        return schema.float_schema(ge=lowest, le=highest, allow_inf_nan=False, strict=True)

    token, bounded = schema.int_schema(strict=True), number(-LARGEST, LARGEST)
    settings = fields(
        _Settings, {"temperature": number(*TEMPERATURES), "set_advantage_to_zero": schema.bool_schema(strict=True)}, {}
    )
    group = fields(
        _Group,
        {
            "inference_logprobs": rows(number()),
            "advantages": rows(bounded),
            "ref_logprobs": rows(number()),
            "generation_params": settings,
            "overrides": schema.list_schema(schema.nullable_schema(settings), fail_fast=True),
            "group_overrides": settings,
        },
        {
            "tokens": rows(token),
            "masks": rows(token),
            "scores": schema.list_schema(bounded, fail_fast=True),
        },
    )
    return SchemaValidator(group)


_VALIDATOR = _validator()


@dataclass(frozen=True, kw_only=True)
class GroupReader:
    """Makes a `RolloutGroup` of a group's parsed JSON.

    Args:
        decode: token ids -> text.
        max_members: sequences of a group.
        max_token_len: tokens of a sequence.
        correct_threshold: the least score of a correct sequence; None: any score above 0 is.
    """

    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    max_members: int
    max_token_len: int
    correct_threshold: float | None = None

    def __call__(self, raw: Any) -> RolloutGroup:
        """The group. Its versions and finish reasons are unknown, its text is that of the sampled tokens, and its
        reward the score.

        Raises:
            Dropped: nothing can be learnt from it.
            MissingLogprobs: it is well-formed, and has no logprobs.
        """
        group = _parsed(raw)
        self._check(group, raw)
        if group.inference_logprobs is None:
            number = raw.get("env_id")
            raise MissingLogprobs(
                "GRPO requires inference_logprobs for importance sampling! The groups of environment "
                f"{number if type(number) is int else 'unknown'} have none: let it sample with server_type=vllm through its managed "
                "server, and put inference_logprobs of the managed server's nodes into its groups"
            )
        overrides = group.overrides or [None] * len(group.tokens)
        rollouts = [self._rollout(group, index, own or _Settings()) for index, own in enumerate(overrides)]
        if not any(any(rollout.is_sampled) for rollout in rollouts):
            raise Dropped(Reason.MASKS, "no token is trained on")
        advantages = None if group.advantages is None else tuple(map(tuple, group.advantages))
        return RolloutGroup(problem=None, rollouts=tuple(rollouts), advantages=advantages)

    def _check(self, group: _Group, raw: Any) -> None:
        count = len(group.tokens)
        if not 1 <= count <= self.max_members:
            raise Dropped(
                Reason.TOO_MANY if count else Reason.MALFORMED,
                f"{count} sequences, where a batch has {self.max_members}",
            )
        lengths = [len(row) for row in group.tokens]
        if not min(lengths):
            raise Dropped(Reason.MALFORMED, "an empty sequence")
        if max(lengths) > self.max_token_len:
            raise Dropped(
                Reason.TOO_LONG, f"a sequence of {max(lengths)} tokens, and rollouts.max_token_len={self.max_token_len}"
            )
        for name in ("masks", "inference_logprobs", "advantages", "ref_logprobs"):
            rows = getattr(group, name)
            if rows is not None and [len(row) for row in rows] != lengths:
                raise Dropped(Reason.MALFORMED, f"{name} and tokens differ in length")
        if len(group.scores) != count or (group.overrides is not None and len(group.overrides) != count):
            raise Dropped(Reason.MALFORMED, "scores or overrides, and tokens, differ in length")
        lowest, highest = min(map(min, group.tokens)), max(map(max, group.tokens))
        if not 0 <= lowest <= highest < self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise Dropped(
                Reason.VOCABULARY, f"token {str(wrong)[:20]}, and the model has tokens 0 to {self.vocab_size - 1}"
            )
        images = raw.get("images")
        if any(images) if isinstance(images, list) else images is not None:
            raise Dropped(Reason.IMAGES, "it comes with images, which the model would not see")

    def _rollout(self, group: _Group, index: int, own: _Settings) -> Rollout:
        tokens, mask = group.tokens[index], group.masks[index]
        is_sampled = _is_sampled(tokens, mask)
        if is_sampled[0]:
            raise Dropped(Reason.MASKS, "a first token that is trained on, though nothing predicts it")
        assert group.inference_logprobs is not None
        reward, least = group.scores[index], self.correct_threshold
        return Rollout(
            token_ids=tuple(tokens),
            is_sampled=is_sampled,
            logprobs=_logprobs(group.inference_logprobs[index], is_sampled, LOWEST_LOGPROB),
            versions=(-1,) * len(tokens),
            temperature=_temperature(group, own),
            finish_reason=None,
            text=LazyText(self.decode, list(compress(tokens, is_sampled))),
            score=Score(reward, reward > 0 if least is None else reward >= least, {}),
            ref_logprobs=None
            if group.ref_logprobs is None
            else _logprobs(group.ref_logprobs[index], is_sampled, LOWEST_REF_LOGPROB),
            zero_advantage=bool(own.set_advantage_to_zero),
        )


def _parsed(raw: Any) -> _Group:
    try:
        group = _VALIDATOR.validate_python(raw)
        return replace(
            group, **{name: None for name in OPTIONAL if group.tokens and not any(getattr(group, name) or ())}
        )
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_context=False, include_input=False)
        is_number = first["type"] in ("finite_number", "greater_than_equal", "less_than_equal")
        detail = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise Dropped(Reason.NUMBERS if is_number else Reason.MALFORMED, printable(detail[:200])) from None


def _is_sampled(tokens: list[int], mask: list[int]) -> tuple[bool, ...]:
    """[N] what the mask says of each token. Raises Dropped where it is not a mask of these tokens, none of which is
    negative.
    """
    start = mask.count(NOT_TRAINED)
    if mask[start:] == tokens[start:]:  # a single turn, as almost always: half the work
        return (False,) * start + (True,) * (len(mask) - start)
    is_sampled = tuple(map(ne, mask, repeat(NOT_TRAINED)))
    if list(compress(mask, is_sampled)) != list(compress(tokens, is_sampled)):
        raise Dropped(Reason.MALFORMED, f"a mask that is neither {NOT_TRAINED} nor its token")
    return is_sampled


def _logprobs(row: Sequence[float], is_sampled: Sequence[bool], lowest: float) -> tuple[float, ...]:
    """[N] nats; where not sampled whatever was sent, a finite number."""
    sampled = list(compress(row, is_sampled))
    if sampled and not lowest <= min(sampled) <= max(sampled) <= ROUNDING:
        wrong = min(sampled) if max(sampled) <= ROUNDING else max(sampled)
        raise Dropped(
            Reason.NUMBERS, f"a logprob of {wrong:g} at a token that is trained on; {lowest:g} to 0 are possible"
        )
    return tuple(row)


def _temperature(group: _Group, own: _Settings) -> float:
    """What the environment says last: of the sequence, then of its request, then of the group; 1 where it says nothing."""
    for settings in (own, group.generation_params, group.group_overrides):
        if settings is not None and settings.temperature is not None:
            return settings.temperature
    return 1.0

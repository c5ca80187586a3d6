"""From the JSON of a group, as an environment sent it, to a `RolloutGroup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import ne
from typing import Any

from pydantic import TypeAdapter, ValidationError

from offline_grpo.errors import GrpoError
from offline_grpo.types import Rollout, RolloutGroup, Score, UnusableGroup

NOT_TRAINED = -100  # in a mask; elsewhere a mask repeats the token


class MissingLogprobs(GrpoError):
    """An environment does not say how likely its tokens were."""


@dataclass
class _Settings:
    """The part of `generation_params`, `overrides` and `group_overrides` that is read."""

    temperature: float | None = None
    set_advantage_to_zero: bool | None = None


@dataclass
class _Group:
    """atroposlib's `ScoredData`, as far as it is read. Environments send an empty list where they have nothing."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    distill_token_ids: list[list[list[int]]] | None = None  # [sequence][position][k], of what the teacher was asked for
    distill_logprobs: list[list[list[float]]] | None = None
    generation_params: _Settings | None = None
    overrides: list[_Settings | None] | None = None
    group_overrides: _Settings | None = None
    images: Any = None
    env_id: int | None = None


_VALIDATOR = TypeAdapter(_Group)


@dataclass(frozen=True, kw_only=True)
class GroupReader:
    """Makes a `RolloutGroup` of a group's parsed JSON."""

    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    max_members: int  # sequences of a group
    max_token_len: int  # tokens of a sequence
    correct_threshold: float | None = None  # the least score of a correct sequence; None: any score above 0 is

    def __call__(self, raw: object) -> RolloutGroup:
        """The group; its text is that of the sampled tokens. Raises UnusableGroup if nothing can be learnt from it, and
        MissingLogprobs.
        """
        # 1. Its fields have the right types, and it is a group of this run.
        try:
            group = _VALIDATOR.validate_python(raw)
        except ValidationError as error:
            first = error.errors()[0]
            raise UnusableGroup("malformed", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        count = len(group.tokens)
        if count > self.max_members:
            raise UnusableGroup("too_many", f"{count} sequences, where a batch has {self.max_members}")
        if any(group.images) if isinstance(group.images, list) else group.images is not None:
            raise UnusableGroup("images", "it comes with images, which the model would not see")
        # 2. A field is there for all sequences, or for none: environments send a list of nothing where they have none.
        names = "inference_logprobs ref_logprobs overrides distill_token_ids distill_logprobs advantages"
        given = {name: rows for name in names.split() if (rows := getattr(group, name)) and any(rows)}
        if "inference_logprobs" not in given and group.tokens:
            fix = "let it sample with server_type=vllm through its managed server, and send its nodes' logprobs"
            about = "GRPO requires inference_logprobs for importance sampling! The groups of environment"
            raise MissingLogprobs(f"{about} {group.env_id} have none: {fix}")
        advantages = given.pop("advantages", None)
        if {len(rows) for rows in (group.tokens, group.masks, group.scores, *given.values())} != {count}:
            raise UnusableGroup("malformed", "its fields differ in their number of sequences")
        # 3. Each sequence becomes a rollout.
        rollouts = []
        for index, (tokens, reward) in enumerate(zip(group.tokens, group.scores, strict=True)):
            own: dict[str, Any] = {name: rows[index] for name, rows in given.items()}
            is_sampled, ref_logprobs = _is_sampled(tokens, group.masks[index]), own.get("ref_logprobs")
            said = (own.get("overrides"), group.generation_params, group.group_overrides)  # the most special first
            temperatures = (settings.temperature for settings in said if settings is not None)
            temperature = next((found for found in temperatures if found is not None), 1.0)
            # What a teacher says of the sampled tokens, at temperature 1 as servers give it, if it has all of them. Of
            # each position it was asked for k tokens, [N][k].
            asked, told = own.get("distill_token_ids"), own.get("distill_logprobs")
            teacher: tuple[float, ...] | None = None
            if temperature == 1.0 and asked is not None and told is not None:
                if not len(tokens) == len(asked) == len(told):
                    about = f"distill_* of {len(asked)} and {len(told)} positions, and {len(tokens)} tokens"
                    raise UnusableGroup("malformed", about)
                known = [dict(zip(*each, strict=False)) for each in zip(asked, told, strict=True)]
                taught = [known[i].get(token) if is_sampled[i] else 0.0 for i, token in enumerate(tokens)]
                teacher = None if None in taught else tuple(taught)  # type: ignore[arg-type]
            least = self.correct_threshold
            rollout = Rollout(
                token_ids=tuple(tokens),
                is_sampled=is_sampled,
                logprobs=tuple(own["inference_logprobs"]),
                versions=(-1,) * len(tokens),
                temperature=temperature,
                finish_reason=None,
                text=self.decode(list(compress(tokens, is_sampled))),
                score=Score(reward, reward > 0 if least is None else reward >= least, {}),
                ref_logprobs=None if ref_logprobs is None else tuple(ref_logprobs),
                teacher_logprobs=teacher,
                zero_advantage=bool(said[0] is not None and said[0].set_advantage_to_zero),
            )
            rollouts.append(rollout)
        found = RolloutGroup(None, tuple(rollouts), None if advantages is None else tuple(map(tuple, advantages)))
        found.check(vocab_size=self.vocab_size, max_tokens=self.max_token_len)
        if not any(rollout.num_sampled for rollout in found.rollouts):
            raise UnusableGroup("masks", "no token is sampled")
        return found


def _is_sampled(tokens: list[int], mask: list[int]) -> tuple[bool, ...]:
    """[N] what the mask says of each token. Raises UnusableGroup where it is not a mask of these tokens."""
    start = mask.count(NOT_TRAINED)
    if mask[start:] == tokens[start:]:  # a single turn, as almost always: half the work
        return (False,) * start + (True,) * (len(mask) - start)
    is_sampled = tuple(map(ne, mask, repeat(NOT_TRAINED)))
    if list(compress(mask, is_sampled)) != list(compress(tokens, is_sampled)):
        raise UnusableGroup("malformed", f"a mask that is neither {NOT_TRAINED} nor its token")
    return is_sampled

"""What a run shows once: its first prompt and completion as the model reads and writes them, and special tokens that
its rewards do not see."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress
from textwrap import indent, wrap

from transformers import PreTrainedTokenizerBase

from offline_grpo.interfaces import RunListener
from offline_grpo.logger.samples import rendered, visible
from offline_grpo.types import Rollout, RolloutGroup

WIDTH = 76

log = logging.getLogger(__name__)


class FirstLook(RunListener):
    """Most mistakes in templates, special tokens and ends show in one prompt and one completion.

    Args:
        end_ids: tokens that end a completion: no reward needs to see them.
        shows: whether prompt and completion are shown too, and not hidden tokens alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], *, shows: bool = True) -> None:
        self._decode: Callable[..., str] = tokenizer.decode  # type: ignore[assignment]  # text of a sequence
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = {*added, *tokenizer.all_special_ids} - {*end_ids}
        self._has_shown, self._has_told = not shows, False

    def rollouts(self, name: str, groups: Sequence[RolloutGroup], *, advantages: object, iteration: int) -> None:
        if groups and not self._has_shown:
            self._has_shown = True
            self._show(groups[0].rollouts[0])
        # Of groups without a problem, others have made the rewards; an environment sees more than a text.
        judged = [group for group in groups if group.problem is not None and group.problem.rules is None]
        rollouts = [rollout for group in judged for rollout in group.rollouts]
        hidden = set() if self._has_told else {token for rollout in rollouts for token in self._hidden(rollout)}
        if hidden:
            self._has_told = True
            names = ", ".join(sorted(map(repr, hidden)))
            log.warning("special tokens hidden from rewards (generation.skip_special_tokens): %s", names)

    def _show(self, rollout: Rollout) -> None:
        (_, prompt), *turns = rendered(rollout, (), partial(self._decode, skip_special_tokens=False))
        length = [*rollout.is_sampled, True].index(True)
        log.info("the first prompt, as the model reads it (%d tokens):\n%s", length, _folded(prompt))
        about = f"{rollout.num_sampled} tokens, reward {rollout.score.reward:.3g}"
        # a single turn stands alone
        texts = [_folded(text if len(turns) == 1 else f"[{who}] {text}") for who, text in turns]
        log.info("and its first completion, as the model wrote it (%s):\n%s", about, "\n".join(texts))

    def _hidden(self, rollout: Rollout) -> set[str]:
        sampled = self._special.intersection(compress(rollout.token_ids, rollout.is_sampled))
        return {text for text in map(self._decode, sampled) if text not in rollout.text}


def _folded(text: str) -> str:
    return indent("\n".join(wrap(visible(text), WIDTH, drop_whitespace=False)), "  ")

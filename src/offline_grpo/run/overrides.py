"""Words of a command line such as `+task@task.tasks.sums=arithmetic`, as far as they need no Hydra to be read."""

from __future__ import annotations


def key_of(word: str) -> str:
    """What an override sets, without the marks that add or delete: `++train.lr=1` sets `train.lr`. A word that is none
    is its own key.
    """
    return word.lstrip("+~").partition("=")[0]

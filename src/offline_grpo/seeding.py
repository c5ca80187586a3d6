"""Seeds that depend only on their purpose, so that results do not change with batching, process count or resuming."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**63) from the parts that identify a sample: the first 8 bytes, big-endian, of
    sha256("part:part:...").

    Example: `derive_seed(seed_base, cycle, problem_id, replicate)` seeds one evaluation completion.
    """
    text = ":".join(str(part) for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") & (2**63 - 1)

"""Seeds of samples: each is a function of what is sampled, never of when."""

from __future__ import annotations

import hashlib


def sample_seeds(seed: int, purpose: str, uid: int, *, count: int) -> tuple[int, ...]:
    """Seeds (0 to 2^63 - 1) of the `count` samples of the prompt `uid`, in a run with this `seed`."""
    texts = (f"{purpose}:{seed}:{uid}:{index}" for index in range(count))
    return tuple(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 for text in texts)

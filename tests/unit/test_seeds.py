"""Seeds follow from what is sampled."""

from __future__ import annotations

from hybridasync.algorithms.seeds import sample_seeds


def test_seeds_differ_in_every_respect_and_are_the_same_each_time() -> None:
    """By run, purpose, prompt and sample; non-negative 64-bit integers, as SGLang wants them."""
    made = [
        sample_seeds(seed, purpose, uid, count=4)
        for seed in (0, 1)
        for purpose in ("rollout", "evaluation")
        for uid in (0, 1, 11)
    ]
    everything = [seed for seeds in made for seed in seeds]
    assert len(set(everything)) == len(everything) == 48
    assert all(0 <= seed < 2**63 for seed in everything)
    assert made[0] == sample_seeds(0, "rollout", 0, count=4) == sample_seeds(0, "rollout", 0, count=9)[:4]

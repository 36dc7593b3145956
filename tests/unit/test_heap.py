"""observability/heap.py: what is there when serving begins isn't looked at again."""

from __future__ import annotations

import gc

from hybridasync.observability.heap import settled_heap


def test_objects_are_passed_over_only_within_it() -> None:
    """Inside they are frozen, garbage that is made there is still collected; afterwards all is as before."""
    before = gc.get_freeze_count()
    with settled_heap():
        assert gc.get_freeze_count() > before + 1000
        ring: list[object] = []
        ring.append(ring)
        del ring
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0

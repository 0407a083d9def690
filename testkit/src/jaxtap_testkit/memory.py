"""What a repeated action leaves in memory."""

import gc
from collections.abc import Callable
from typing import Any


def objects_kept(action: Callable[[], Any], times: int) -> float:
    """Return how many Python objects a run leaves behind.

    Args:
        action: what is run; several times before anything is counted, to fill caches.
        times: how often it is run while objects are counted.
    """
    for _ in range(5):
        action()
    before = _count()
    for _ in range(times):
        action()
    return (_count() - before) / times


def _count() -> int:
    # Twice: what finalizers of the first pass let go is found by the second.
    gc.collect()
    gc.collect()
    return len(gc.get_objects())

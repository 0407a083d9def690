"""How fast a model is: tokens a second of a prompt, and of what follows."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np

from .generate import GREEDY


class Timed:
    """Times the programs of a ``Generator``.

    Args:
        generator: whose programs run.
        batch: sequences at once.
    """

    def __init__(self, generator: Any, batch: int = 1) -> None:
        self.generator, self.batch = generator, batch
        self._caches = {}

    def prefill(self, length: int) -> float:
        """Return the seconds that prompts of this length take."""
        cache = self.generator.make_cache(self.batch, length)
        tokens = self._tokens(length)
        start = time.perf_counter()
        run = self.generator._prefill(self.generator.params, tokens, cache, length - 1)
        jax.block_until_ready(run)
        return time.perf_counter() - start

    def decode(self, context: int, steps: int) -> float:
        """Return the seconds of a step, of ``steps`` behind prompts of length ``context``."""
        made = self.generator
        if (context, steps) not in self._caches:
            cache = made.make_cache(self.batch, context + steps)
            _, cache = made._prefill(made.params, self._tokens(context), cache, context - 1)
            self._caches[context, steps] = jax.block_until_ready(cache)
        # The program takes the cache and gives it back; the next call writes the same positions.
        cache, token = self._caches.pop((context, steps)), self._tokens(1)[:, 0]
        start = time.perf_counter()
        tokens, cache = made._decode(
            made.params, token, cache, context, None, sampling=GREEDY, steps=steps
        )
        jax.block_until_ready((tokens, cache))
        seconds = time.perf_counter() - start
        self._caches[context, steps] = cache
        return seconds / steps

    def _tokens(self, length: int) -> Any:
        rng = np.random.default_rng(0)
        vocabulary = self.generator.config.vocabulary
        return rng.integers(0, vocabulary, (self.batch, length), np.int32)


def measure(
    generator: Any,
    prompts: Any = (128, 512),
    contexts: Any = (128, 1024),
    steps: int = 64,
    rounds: int = 5,
    batch: int = 1,
) -> Any:
    """Return tokens a second: rows of what is measured, the median and the best."""
    timed = Timed(generator, batch)
    runs = [(f"prefill {n}", n, lambda n=n: timed.prefill(n)) for n in prompts]
    runs += [(f"decode at {n}", 1, lambda n=n: timed.decode(n, steps)) for n in contexts]
    times = {name: [] for name, _, _ in runs}
    for name, _, run in runs:
        run()  # compiles
        times[name] = [run() for _ in range(rounds)]
    return [
        (name, batch * n / statistics.median(times[name]), batch * n / min(times[name]))
        for name, n, _ in runs
    ]

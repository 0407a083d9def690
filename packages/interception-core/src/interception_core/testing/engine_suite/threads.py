"""Threads: scopes of different threads do not affect each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .base import Suite, arrays, same, times
from .forms import FORMS
from .isolation import scaled


def race(rounds: int, left: Callable[[int], Any], right: Callable[[int], Any]) -> list[tuple]:
    """Run two functions at the same time on two threads.

    What one raises stands for its result: the other goes on.
    """
    barrier = threading.Barrier(2)
    results: tuple[list, list] = ([], [])

    def work(log: list, fn: Callable[[int], Any]) -> None:
        for i in range(rounds):
            barrier.wait(timeout=60)
            try:
                log.append(jax.tree.map(np.asarray, fn(i)))
            except BaseException as error:
                log.append(error)

    threads = [
        threading.Thread(target=work, args=pair)
        for pair in zip(results, (left, right), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    return list(zip(*results, strict=True))


class ThreadSuite(Suite):
    """Races of cold caches, and bystanders."""

    def test_two_hundred_concurrent_cold_starts(self) -> None:
        x, w = arrays((4, 4), (4, 4))
        forms = list(FORMS.values())
        fns = [jax.jit(forms[i % len(forms)]()) for i in range(200)]
        results = race(
            200,
            lambda i: self.engine.wrap(fns[i], scaled(2))(x, w),
            lambda i: fns[i](x, w),
        )
        assert len(results) == 200
        for fn, (tapped, plain) in zip(fns, results, strict=True):
            same(tapped, 2 * plain)
            same(fn(x, w), plain)

    def test_concurrent_eager_cold_starts(self) -> None:
        """Tap functions of ``jax.numpy`` on new shapes, from two threads."""

        def run(i: int) -> Any:
            return jnp.matmul(jnp.ones((i + 1, 3)), jnp.ones((3, i + 1)))

        results = race(40, lambda i: self.engine.wrap(lambda: run(i), scaled(2))(), run)
        assert len(results) == 40
        for i, (tapped, plain) in enumerate(results):
            same(tapped, np.full((i + 1, i + 1), 6, np.float32))
            same(plain, np.full((i + 1, i + 1), 3, np.float32))

    def test_two_interceptors_on_two_threads(self) -> None:
        x, w = arrays((4, 4), (4, 4))
        fns = [jax.jit(lambda x, w: jnp.abs(x) @ w) for _ in range(25)]
        results = race(
            25,
            lambda i: self.engine.wrap(fns[i], scaled(2))(x, w),
            lambda i: self.engine.wrap(fns[i], scaled(4))(x, w),
        )
        assert len(results) == 25
        for double, quadruple in results:
            same(2 * double, quadruple)

    def test_a_thread_that_the_wrapped_function_starts_is_outside(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        results = []

        def bystander() -> None:
            results.append(jnp.dot(*arrays((2, 3), (3, 3))))

        def body(x: Any, w: Any) -> Any:
            thread = threading.Thread(target=bystander)
            thread.start()
            thread.join(timeout=60)
            return jnp.dot(x, w)

        tapped = self.wrap(body, {"jax.numpy.dot": times(2)})(x, w)
        same(tapped, 2 * jnp.dot(x, w))
        assert results
        same(results[0], jnp.dot(x, w))

"""Runs coroutines and generators step by step, each step in its scope.

A scope is local to the thread, so it must end wherever the function gives up control: at
``await`` and ``yield``. What runs in between (other tasks, the caller) is outside.
"""

from __future__ import annotations

import functools
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any

from .scope import Activation, Entered, State


class Run:
    """The scope of one run, as its last step left it."""

    def __init__(self, state: State, activation: Activation):
        self._state = state
        self._activation = activation

    def step(self, function: Callable[[], Any]) -> Any:
        """Calls ``function`` in the scope."""
        entered = Entered(self._state)
        try:
            with entered:
                return function()
        finally:
            self._state = entered.left

    def generator(self, inner: Generator | Coroutine) -> Generator:
        """Drives a generator, or a coroutine through the same protocol."""
        step: Callable[[], Any] = functools.partial(inner.send, None)
        try:
            while True:
                try:
                    item = self.step(step)
                except StopIteration as stop:
                    return stop.value
                try:
                    sent = yield item
                except GeneratorExit:
                    self.step(inner.close)
                    raise
                except BaseException as error:
                    step = functools.partial(inner.throw, error)
                else:
                    step = functools.partial(inner.send, sent)
        finally:
            self._activation.finish()

    async def coroutine(self, inner: Coroutine) -> Any:
        """Drives a coroutine."""
        return await _Steps(self.generator(inner))

    async def async_generator(self, inner: AsyncGenerator) -> AsyncGenerator:
        """Drives an asynchronous generator."""
        step: Callable[[], Awaitable] = functools.partial(inner.asend, None)
        while True:
            try:
                item = await self.coroutine(step())  # type: ignore[arg-type]
            except StopAsyncIteration:
                return
            try:
                sent = yield item
            except GeneratorExit:
                await self.coroutine(inner.aclose())  # type: ignore[arg-type]
                raise
            except BaseException as error:
                step = functools.partial(inner.athrow, error)
            else:
                step = functools.partial(inner.asend, sent)


class _Steps:
    """Makes a generator awaitable."""

    def __init__(self, generator: Generator):
        self._generator = generator

    def __await__(self) -> Generator:
        return self._generator


DRIVERS: dict[type, Callable[[Run, Any], Any]] = {
    types.CoroutineType: Run.coroutine,
    types.GeneratorType: Run.generator,
    types.AsyncGeneratorType: Run.async_generator,
}

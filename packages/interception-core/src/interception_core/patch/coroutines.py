"""Coroutines and generators, run step by step, each step in its scope.

A scope is local to the thread, so it must end wherever the function gives up control: at
``await`` and ``yield``. Other tasks, and the caller, run outside of it in between.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

from .scope import Entered, State


class Suspended:
    """The scope of suspended code, as its last step left it.

    Args:
        state: the scope of the next step.
        finish: called when the code has ended, with or without an exception.
    """

    def __init__(self, state: State, finish: Callable[[], None]):
        self._state = state
        self._finish = finish

    def _step(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` in the scope."""
        entered = Entered(self._state)
        try:
            with entered:
                return function()
        finally:
            self._state = entered.left

    def _steps(self, inner: Generator | Coroutine) -> Generator:
        """Run a generator or coroutine, each step in the scope."""
        step: Callable[[], Any] = functools.partial(inner.send, None)
        while True:
            try:
                item = self._step(step)
            except StopIteration as stop:
                return stop.value
            try:
                sent = yield item
            except GeneratorExit:
                self._step(inner.close)
                raise
            except BaseException as error:
                step = functools.partial(inner.throw, error)
            else:
                step = functools.partial(inner.send, sent)

    def generator(self, inner: Generator) -> Generator:
        """Drive a generator."""
        try:
            return (yield from self._steps(inner))
        finally:
            self._finish()

    async def coroutine(self, inner: Coroutine) -> Any:
        """Drive a coroutine."""
        try:
            return await _Awaitable(self._steps(inner))
        finally:
            self._finish()

    async def async_generator(self, inner: AsyncGenerator) -> AsyncGenerator:
        """Drive an asynchronous generator."""
        step: Callable[[], Any] = functools.partial(inner.asend, None)
        try:
            while True:
                try:
                    item = await _Awaitable(self._steps(step()))
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    await _Awaitable(self._steps(inner.aclose()))  # type: ignore[arg-type]
                    raise
                except BaseException as error:
                    step = functools.partial(inner.athrow, error)
                else:
                    step = functools.partial(inner.asend, sent)
        finally:
            self._finish()


class _Awaitable:
    """Makes a generator awaitable."""

    def __init__(self, generator: Generator):
        self._generator = generator

    def __await__(self) -> Generator:
        return self._generator


_DRIVERS: dict[type, Callable[[Suspended, Any], Any]] = {
    types.CoroutineType: Suspended.coroutine,
    types.GeneratorType: Suspended.generator,
    types.AsyncGeneratorType: Suspended.async_generator,
}


def run_in(
    state: State,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    finish: Callable[[], None] = lambda: None,
) -> Any:
    """Call a function in a state, and run coroutines from it there.

    Returns:
        The function's result. A coroutine or generator runs in the state, too.
    """
    driver = None
    try:
        with (entered := Entered(state)):
            value = fn(*args, **kwargs)
        driver = _DRIVERS.get(type(value))
        return value if driver is None else driver(Suspended(entered.left, finish), value)
    finally:
        if driver is None:
            finish()


def wraps_as(call: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the name and signature of ``fn``."""
    wrapped = call
    if inspect.iscoroutinefunction(fn):

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            return await call(*args, **kwargs)

    # Without the function's __dict__, which holds the parameters of a model object.
    return functools.update_wrapper(wrapped, fn, updated=())

"""Base: what the parts of the suite share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ... import Engine, Interceptor, OpCall

TARGETS = f"{__package__}.targets"
"""The module of functions that only the suite taps."""

WATCHED = (
    "jax.numpy.dot",
    "jax.numpy.einsum",
    "jax.numpy.matmul",
    "jax.lax.dot_general",
    "jax.nn.relu",
    "jax.nn.softmax",
    *(f"{TARGETS}.{name}" for name in ("affine", "composite", "step", "jitted", "layer")),
)


class Suite:
    """The engine under test. See EngineConformance for the attributes."""

    engine: ClassVar[Engine]
    primitives: ClassVar[bool] = False
    disables_jit: ClassVar[bool] = False
    labels_jit: ClassVar[bool] = False
    examples: ClassVar[int] = 300

    @pytest.fixture(autouse=True)
    def _leaves_everything_as_it_was(self) -> Iterator[None]:
        """Hold for every test, whatever was raised in it."""
        before = snapshot()
        yield
        assert snapshot() == before

    def wrap(self, fn: Callable, handlers: dict[str, Callable], key: Hashable = None) -> Callable:
        """Return ``fn``, run with these handlers active."""
        return self.engine.wrap(fn, Interceptor(handlers, key=key))

    def plain(self, fn: Callable) -> Callable:
        """Return ``fn`` untapped, with JIT off where the engine turns it off.

        For comparing bits: XLA may compile an unrolled loop to other bits than a loop.
        """
        if not self.disables_jit:
            return fn

        def without_jit(*args: Any, **kwargs: Any) -> Any:
            with jax.disable_jit():
                return fn(*args, **kwargs)

        return without_jit

    def first_calls(
        self,
        fn: Callable,
        args: tuple,
        targets: tuple[str, ...],
        transform: Callable[[Callable], Callable] = lambda fn: fn,
        look: Callable[[OpCall], Any] = lambda call: call.op_id,
        engine: Engine | None = None,
    ) -> list[Any]:
        """Return ``look(call)`` for each different call that is shown, in their order.

        The interceptor is new each time: nothing traced before can be reused.
        """
        log: list[Any] = []
        interceptor = Interceptor(dict.fromkeys(targets, noting(log, look)))
        transform((engine or self.engine).wrap(fn, interceptor))(*args)
        return once(log)


def abstractly(fn: Callable) -> Callable:
    """Return a function that only traces ``fn``, without compiling."""
    return lambda *args: jax.eval_shape(fn, *args)


def once(log: list) -> list:
    """Return the entries of a log, each once."""
    return list(dict.fromkeys(log))


def times(factor: float) -> Callable:
    """Return a handler that multiplies its operation's result."""

    def handler(call: OpCall, *args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(
            lambda result: result * jnp.asarray(factor, result.dtype),
            call.proceed(*args, **kwargs),
        )

    return handler


def noting(log: list, look: Callable[[OpCall], Any]) -> Callable:
    """Return a handler that notes ``look(call)``, and lets the operation run."""

    def handler(call: OpCall, *args: Any, **kwargs: Any) -> Any:
        log.append(look(call))
        return NotImplemented

    return handler


def let(call: OpCall, *args: Any, **kwargs: Any) -> Any:
    """Let the operation run, as a handler."""
    return NotImplemented


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> tuple[jax.Array, ...]:
    """Return arrays of small integers, whose contractions are exact."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.integers(1, 5, size=shape), jnp.float32) for shape in shapes)


def same(actual: Any, expected: Any) -> None:
    """Assert that two pytrees have the same structure and the same bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        if left.tobytes() != right.tobytes():
            np.testing.assert_array_equal(left, right)  # says where
            raise AssertionError(f"equal numbers of different bits: {left!r}, {right!r}")


def close(actual: Any, expected: Any) -> None:
    """Assert that two pytrees are nearly equal."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def snapshot() -> tuple:
    """Return the identity of all that a tap may change."""
    state: list[Any] = [jax.config.jax_disable_jit]  # pyrefly: ignore[missing-attribute]
    for target in WATCHED:
        module, name = target.rsplit(".", 1)
        value = getattr(importlib.import_module(module), name)
        state.append((target, id(value), id(getattr(value, "__code__", None))))
        state.append(id(getattr(type(value).__call__, "__code__", None)))
    return tuple(state)

"""Several interceptors at once: the innermost is asked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ... import Interceptor
from . import targets
from .base import TARGETS, Suite, arrays, let, once, same, times
from .handlers import COMPOSITE, STEP, eager_and_jitted


def plus(number: int) -> Callable:
    """Return a handler that adds, which doesn't commute with `times`."""

    def handler(call: Any, *args: Any, **kwargs: Any) -> Any:
        return call.proceed(*args, **kwargs) + number

    return handler


class NestingSuite(Suite):
    """Wrapped functions that call wrapped functions."""

    def nested(self, fn: Callable, *handlers: dict[str, Callable]) -> Callable:
        """Return ``fn`` wrapped in each, the innermost first."""
        for each in handlers:
            fn = self.wrap(fn, each)
        return fn

    @eager_and_jitted
    def test_the_inner_is_asked_first(self, outer: Callable) -> None:
        x, w = arrays((2, 3), (3, 3))
        fn = outer(self.nested(targets.step, {STEP: times(2)}, {STEP: plus(1)}))
        same(fn(x, w), (jnp.dot(x, w) + 1) * 2)
        fn = outer(self.nested(targets.step, {STEP: plus(1)}, {STEP: times(2)}))
        same(fn(x, w), jnp.dot(x, w) * 2 + 1)

    @eager_and_jitted
    def test_three_deep(self, outer: Callable) -> None:
        x, w = arrays((2, 3), (3, 3))
        fn = self.nested(targets.step, {STEP: plus(1)}, {STEP: times(2)}, {STEP: plus(5)})
        same(outer(fn)(x, w), (jnp.dot(x, w) + 5) * 2 + 1)

    def test_the_outer_sees_what_the_inner_lets_through(self) -> None:
        log = []

        def note(name: str, result: Callable) -> Callable:
            def handler(call: Any, *args: Any) -> Any:
                log.append(name)
                return result(call, *args)

            return handler

        def run(inner: Callable) -> list:
            log.clear()
            self.nested(targets.step, {STEP: note("inner", inner)}, {STEP: note("outer", let)})(
                *arrays((2, 3), (3, 3))
            )
            return once(log)

        assert run(let) == ["inner", "outer"]
        assert run(times(2)) == ["inner", "outer"]
        assert run(lambda call, x, w: x) == ["inner"]

    def test_the_outer_sees_the_arguments_that_the_inner_proceeds_with(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        fn = self.nested(
            targets.step,
            {STEP: lambda call, x, w: call.proceed(x * 2, w)},
            {STEP: lambda call, x, w: x},
        )
        same(fn(x, w), 2 * x)

    @eager_and_jitted
    def test_the_outer_sees_what_the_inner_handler_does(self, outer: Callable) -> None:
        x, w = arrays((2, 3), (3, 3))
        fn = self.nested(
            targets.step,
            {STEP: lambda call, x, w: targets.layer.shifted(x)},
            {f"{TARGETS}.Layer.shifted": times(2)},
        )
        same(outer(fn)(x, w), 2 * (x + 3))

    @eager_and_jitted
    def test_the_inner_sees_what_the_outer_lets_run(self, outer: Callable) -> None:
        """``proceed`` of the outer handler runs the program's own operation."""
        x, w = arrays((2, 3), (3, 3))
        for through in (let, lambda call, *args: call.proceed(*args)):
            fn = self.nested(targets.composite, {STEP: times(2)}, {COMPOSITE: through})
            same(outer(fn)(x, w), 4 * targets.composite(x, w))

    def test_the_inner_does_not_see_what_the_outer_handler_does(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        fn = self.nested(
            targets.composite,
            {STEP: times(2)},
            {COMPOSITE: lambda call, x, w: targets.step(x, w)},
        )
        same(fn(x, w), jnp.dot(x, w))

    def test_handlers_that_call_each_other_end(self) -> None:
        even, odd = f"{TARGETS}.even", f"{TARGETS}.odd"
        (x,) = arrays((3,))
        fn = self.nested(
            lambda x: targets.odd(x, 3),
            {odd: lambda call, x, n: targets.even(x, n)},
            {
                even: lambda call, x, n: targets.odd(x, n),
                odd: lambda call, x, n: call.proceed(x, n),
            },
        )
        same(fn(x), 8 * x)

    @eager_and_jitted
    def test_wrapping_twice_taps_once(self, outer: Callable) -> None:
        x, w = arrays((2, 3), (3, 3))
        interceptor = Interceptor({STEP: times(2)})
        fn = targets.step
        for _ in range(3):
            fn = self.engine.wrap(fn, interceptor)
        same(outer(fn)(x, w), 2 * jnp.dot(x, w))

    def test_equal_interceptors_tap_once(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        first, second = (Interceptor({STEP: times(2)}, key="equal") for _ in range(2))
        fn = self.engine.wrap(self.engine.wrap(targets.step, first), second)
        same(fn(x, w), 2 * jnp.dot(x, w))

    def test_wrapping_twice_with_another_between(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        a, b = Interceptor({STEP: times(2)}), Interceptor({STEP: plus(1)})
        fn = self.engine.wrap(self.engine.wrap(self.engine.wrap(targets.step, a), b), a)
        same(fn(x, w), jnp.dot(x, w) * 2 + 1)

    def test_a_recursive_wrapped_function_taps_once(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        interceptor = Interceptor({STEP: times(2)})

        def body(x: Any, w: Any, depth: int) -> Any:
            return targets.step(x, w) if depth == 0 else recursive(x, w, depth - 1)

        def recursive(x: Any, w: Any, depth: int) -> Any:
            return self.engine.wrap(lambda x, w: body(x, w, depth), interceptor)(x, w)

        same(recursive(x, w, 3), 2 * jnp.dot(x, w))

    @eager_and_jitted
    def test_an_inner_scope_ends_with_its_call(self, outer: Callable) -> None:
        x, w = arrays((2, 3), (3, 3))
        inner = self.wrap(targets.step, {STEP: times(2)})

        def body(x: Any, w: Any) -> Any:
            return targets.step(x, w), inner(x, w), targets.step(x, w)

        plain = jnp.dot(x, w)
        same(outer(self.wrap(body, {STEP: plus(1)}))(x, w), (plain + 1, (plain + 1) * 2, plain + 1))
        same(outer(body)(x, w), (plain, 2 * plain, plain))

    @pytest.mark.parametrize("order", ["inner jit", "jit between", "grad between"])
    def test_transformations_between_the_scopes(self, order: str) -> None:
        x, w = arrays((2, 3), (3, 3))
        inner = jax.jit(targets.step) if order == "inner jit" else targets.step
        fn = self.wrap(inner, {STEP: times(2)})
        expected = 2 * jnp.dot(x, w)
        if order == "jit between":
            fn = jax.jit(fn)
        if order == "grad between":
            fn = jax.grad(lambda x, w, loss=fn: jnp.sum(loss(x, w)))
            expected = 2 * jnp.ones((2, 3)) @ w.T
        same(self.wrap(fn, {STEP: times(4)})(x, w), 4 * expected)
        same(fn(x, w), expected)

    @pytest.mark.parametrize("order", ["inner first", "outer first"])
    def test_nested_scopes_leave_no_traces_behind(self, order: str) -> None:
        x, w = arrays((2, 3), (3, 3))
        block = jax.jit(lambda x, w: targets.step(x, w))
        plain = jnp.dot(x, w)
        inner = self.wrap(lambda x, w: block(x, w), {STEP: times(2)})
        both = self.wrap(inner, {STEP: plus(1)})
        runs = [(inner, plain * 2), (both, (plain + 1) * 2), (block, plain)]
        for fn, expected in runs if order == "inner first" else reversed(runs):
            same(fn(x, w), expected)
        for fn, expected in runs:
            same(fn(x, w), expected)

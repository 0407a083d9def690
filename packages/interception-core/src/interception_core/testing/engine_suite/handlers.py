"""Handlers: what one is given, and what its result does."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from . import targets
from .base import TARGETS, Suite, arrays, let, once, same, times

AFFINE = f"{TARGETS}.affine"
STEP = f"{TARGETS}.step"
COMPOSITE = f"{TARGETS}.composite"

eager_and_jitted = pytest.mark.parametrize(
    "outer", [lambda fn: fn, jax.jit], ids=["eager", "outer jit"]
)


def shown(value: Any) -> Any:
    """Return what a handler knows of an argument before the run."""
    return value.shape if hasattr(value, "shape") else value


CALLS: dict[str, tuple[Callable, tuple, dict]] = {
    "positional": (lambda x, w: targets.affine(x, w), ((2, 3), (3, 3)), {}),
    "optional": (lambda x, w: targets.affine(x, w, x), ((2, 3), (3, 3), (2, 3)), {}),
    "None": (lambda x, w: targets.affine(x, w, None), ((2, 3), (3, 3), None), {}),
    "keyword": (lambda x, w: targets.affine(x, w=w), ((2, 3),), {"w": (3, 3)}),
    "static": (
        lambda x, w: targets.affine(x, w, scale=2, mode="relu"),
        ((2, 3), (3, 3)),
        {"scale": 2, "mode": "relu"},
    ),
    "mixed": (
        lambda x, w: targets.affine(x, w=w, bias=x, mode="relu"),
        ((2, 3),),
        {"w": (3, 3), "bias": (2, 3), "mode": "relu"},
    ),
}

PAIRS: dict[str, Callable[[], Any]] = {
    "generator": lambda: (pair for pair in ((1, 1), (1, 1))),
    "zip": lambda: zip((1, 1), (1, 1), strict=True),
    "iterators in an iterator": lambda: map(iter, ((1, 1), (1, 1))),
    "iterators in a list": lambda: [iter((1, 1)), iter((1, 1))],
    "values of a dictionary": lambda: {"height": (1, 1), "width": (1, 1)}.values(),
    "deque": lambda: collections.deque([(1, 1), (1, 1)]),
}
"""The padding of a convolution, as JAX takes it."""

RESULTS: dict[str, tuple[Callable, Callable]] = {
    "another value": (lambda call, x, w: x - 1, lambda x, w: x - 1),
    "proceed": (lambda call, x, w: -call.proceed(x, w), lambda x, w: -jnp.dot(x, w)),
    "by keyword": (lambda call, x, w: -call.proceed(x, w=w), lambda x, w: -jnp.dot(x, w)),
    "other arguments": (
        lambda call, x, w: call.proceed(x + 1, w * 2),
        lambda x, w: jnp.dot(x + 1, w * 2),
    ),
    "proceed twice": (
        lambda call, x, w: call.proceed(x, w) - call.proceed(x * 3, w),
        lambda x, w: jnp.dot(x, w) - jnp.dot(x * 3, w),
    ),
    "not after all": (
        lambda call, x, w: (call.proceed(x + 1, w), NotImplemented)[1],
        jnp.dot,
    ),
    "NotImplemented": (let, jnp.dot),
}
"""Handlers of a product, and what the product then gives."""

KINDS: dict[str, tuple[str, Callable]] = {
    "function": (STEP, lambda x, w: targets.step(x, w)),
    "alias of a function": (STEP, lambda x, w: targets.alias(x, w)),
    "method": (f"{TARGETS}.Layer.shifted", lambda x, w: targets.layer.shifted(x)),
    "__call__": (f"{TARGETS}.Layer.__call__", lambda x, w: targets.layer(x)),
    "instance": (f"{TARGETS}.layer", lambda x, w: targets.layer(x)),
    "jitted function": (f"{TARGETS}.jitted", lambda x, w: targets.jitted(x, w)),
    "custom_jvp": (f"{TARGETS}.clipped", lambda x, w: targets.clipped(x)),
    "custom_vjp": (f"{TARGETS}.straight", lambda x, w: targets.straight(x)),
    "jax.numpy.dot": ("jax.numpy.dot", lambda x, w: jnp.dot(x, w)),
    "alias of jax.numpy.dot": ("jax.numpy.dot", lambda x, w, dot=jnp.dot: dot(x, w)),
    "operator": ("jax.numpy.matmul", lambda x, w: x @ w),
    "method of arrays": ("jax.numpy.dot", lambda x, w: x.dot(w)),
    "jax.numpy.einsum": ("jax.numpy.einsum", lambda x, w: jnp.einsum("ij,jk->ik", x, w)),
    "jax.nn.softmax": ("jax.nn.softmax", lambda x, w: jax.nn.softmax(x, axis=-1)),
    "jax.nn.relu": ("jax.nn.relu", lambda x, w: jax.nn.relu(x - 2)),
    "jax.nn.gelu": ("jax.nn.gelu", lambda x, w: jax.nn.gelu(x)),
    "jax.lax.dot_general": (
        "jax.lax.dot_general",
        lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    ),
    "jax.numpy.cumsum": ("jax.numpy.cumsum", lambda x, w: jnp.cumsum(x, axis=0)),
}

OWN: dict[str, Callable] = {
    "call": lambda x, w: targets.step(x, w),
    "alias": lambda x, w: targets.alias(x, w),
    "jit": lambda x, w: jax.jit(lambda x, w: targets.step(x, w))(x, w),
    "scan": lambda x, w: lax.scan(lambda c, row: (c, targets.step(row, w)), 0, x)[1],
    "cond": lambda x, w: lax.cond(x[0, 0] < 9, targets.step, lambda x, w: x, x, w),
    "vmap": lambda x, w: jax.vmap(lambda row: targets.step(row, w))(x),
    "remat": lambda x, w: jax.checkpoint(lambda x, w: targets.step(x, w))(x, w),
    "jvp": lambda x, w: jax.jvp(lambda x: targets.step(x, w), (x,), (x,))[1],
    "vjp": lambda x, w: jax.vjp(lambda x: targets.step(x, w), x)[0],
}
"""The tapped product, as a handler may write it."""


class HandlerSuite(Suite):
    """The contract between an engine and a handler."""

    @pytest.mark.parametrize("case", CALLS)
    @eager_and_jitted
    def test_arguments_are_as_called(self, case: str, outer: Callable) -> None:
        fn, args, kwargs = CALLS[case]
        log: list[Any] = []

        def handler(call: Any, *given: Any, **named: Any) -> Any:
            log.append((tuple(map(shown, given)), {k: shown(v) for k, v in named.items()}))
            assert dict(call.params).keys() == named.keys()
            return NotImplemented

        x, w = arrays((2, 3), (3, 3))
        same(outer(self.wrap(fn, {AFFINE: handler}))(x, w), fn(x, w))
        assert log[0] == (args, kwargs)

    @eager_and_jitted
    def test_handlers_and_jax_both_read_an_iterable(self, outer: Callable) -> None:
        log: list[Any] = []

        def handler(call: Any, *args: Any, padding: Any) -> Any:
            log.append([tuple(pair) for pair in padding])
            return NotImplemented

        x, w = arrays((1, 1, 3, 3), (1, 1, 3, 3))
        expected = lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)])
        for make in PAIRS.values():

            def body(x: Any, w: Any, make: Callable = make) -> Any:
                return lax.conv_general_dilated(x, w, (1, 1), padding=make())

            same(outer(self.wrap(body, {"jax.lax.conv_general_dilated": handler}))(x, w), expected)
        assert log == [[(1, 1), (1, 1)]] * len(PAIRS)

    def test_functions_that_are_not_jax_s_get_the_iterator_itself(self) -> None:
        def handler(call: Any, x: Any, w: Any) -> Any:
            assert isinstance(w, Iterator)
            return x * next(w)

        def body(x: Any) -> Any:
            numbers = iter((2.0, 3.0))
            return targets.step(x, numbers) + next(numbers)

        (x,) = arrays((2,))
        same(self.wrap(body, {STEP: handler})(x), x * 2 + 3)

    @eager_and_jitted
    def test_a_call_says_what_it_is(self, outer: Callable) -> None:
        def body(x: Any, w: Any) -> Any:
            with jax.named_scope("encoder"), jax.named_scope("layer_0"):
                return targets.step(x, w)

        def look(call: Any) -> tuple:
            return (call.op_name, call.module_path, call.level, call.op_id, repr(call))

        assert self.first_calls(body, arrays((2, 3), (3, 3)), (STEP,), outer, look) == [
            (
                "step",
                "encoder/layer_0",
                "function",
                "encoder/layer_0/step:0",
                "<OpCall encoder/layer_0/step:0 (function)>",
            )
        ]

    def test_arguments_are_those_of_one_example_under_vmap(self) -> None:
        def shapes(call: Any) -> tuple:
            return tuple(operand.shape for operand in call.operands)

        args = arrays((5, 2, 3), (3, 3))
        seen = self.first_calls(
            targets.step, args, (STEP,), lambda fn: jax.vmap(fn, (0, None)), shapes
        )
        assert seen == [((2, 3), (3, 3))]

    @eager_and_jitted
    def test_pytrees_go_in_and_out(self, outer: Callable) -> None:
        def handler(call: Any, tree: dict) -> dict:
            assert tree.keys() == {"x", "rest"}
            out = call.proceed({"x": tree["x"] * 2, "rest": tree["rest"]})
            return {"sum": -out["sum"], "both": out["both"]}

        def body(x: Any) -> Any:
            return targets.pair({"x": x, "rest": (x + 1,)})

        (x,) = arrays((3,))
        out = outer(self.wrap(body, {f"{TARGETS}.pair": handler}))(x)
        same(out, {"sum": -(3 * x + 1), "both": (2 * x, 2 * x + 2)})

    @pytest.mark.parametrize("case", RESULTS)
    @eager_and_jitted
    def test_the_result_of_a_handler_is_the_operation_s(self, case: str, outer: Callable) -> None:
        handler, expected = RESULTS[case]
        x, w = arrays((2, 3), (3, 3))
        same(outer(self.wrap(targets.step, {STEP: handler}))(x, w), expected(x, w))
        same(targets.step(x, w), jnp.dot(x, w))

    @pytest.mark.parametrize("kind", KINDS)
    @eager_and_jitted
    def test_every_kind_of_target(self, kind: str, outer: Callable) -> None:
        target, fn = KINDS[kind]
        x, w = arrays((3, 3), (3, 3))
        plain = outer(fn)(x, w)
        tapped = outer(self.wrap(lambda x, w: fn(x, w), {target: times(2)}))
        same(tapped(x, w), 2 * plain)
        same(outer(lambda x, w: fn(x, w))(x, w), plain)
        same(tapped(x, w), 2 * plain)

    def test_only_the_named_instance_is_tapped(self) -> None:
        (x,) = arrays((3,))

        def body(x: Any) -> Any:
            return targets.layer(x), targets.other(x)

        same(self.wrap(body, {f"{TARGETS}.layer": times(2)})(x), (6 * x, 5 * x))

    def test_several_targets_have_handlers_of_their_own(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        fn = self.wrap(
            lambda x, w: (targets.step(x, w), targets.layer.shifted(x), jax.nn.relu(x)),
            {STEP: times(2), f"{TARGETS}.Layer.shifted": times(4), "jax.nn.relu": let},
        )
        same(fn(x, w), (2 * jnp.dot(x, w), 4 * (x + 3), x))

    @eager_and_jitted
    def test_what_a_let_operation_consists_of_is_seen(self, outer: Callable) -> None:
        """``call.within`` says which of the interceptor's operations it is a part of."""

        def look(call: Any) -> tuple:
            return call.op_id, call.within

        def body(x: Any, w: Any) -> Any:
            return targets.step(targets.composite(x, w), w)

        seen = self.first_calls(body, arrays((2, 3), (3, 3)), (COMPOSITE, STEP), outer, look)
        assert seen == [
            ("composite:0", frozenset()),
            ("step:0", frozenset({"composite"})),
            ("step:1", frozenset({"composite"})),
            ("step:2", frozenset()),
        ]

    def test_what_a_handler_proceeds_with_is_not_shown_to_it(self) -> None:
        log = []

        def handler(call: Any, *args: Any) -> Any:
            log.append(call.op_name)
            return call.proceed(*args)

        x, w = arrays((2, 3), (3, 3))
        fn = self.wrap(targets.composite, {COMPOSITE: handler, STEP: handler})
        same(fn(x, w), targets.composite(x, w))
        assert once(log) == ["composite"]

    def test_recursion_is_shown_once_per_function(self) -> None:
        def look(call: Any) -> tuple:
            return call.op_name, call.within

        names = (f"{TARGETS}.even", f"{TARGETS}.odd")
        seen = self.first_calls(lambda x: targets.even(x, 4), arrays((3,)), names, look=look)
        assert seen == [("even", frozenset()), ("odd", frozenset({"even"}))]

    @pytest.mark.parametrize("form", OWN)
    @eager_and_jitted
    def test_a_handler_s_own_operations_are_not_tapped(self, form: str, outer: Callable) -> None:
        log = []

        def handler(call: Any, x: Any, w: Any) -> Any:
            log.append(call.op_id)
            return OWN[form](x, w) * 2

        x, w = arrays((2, 3), (3, 3))
        handlers = {STEP: handler, "jax.numpy.dot": handler}
        expected = 2 * OWN[form](x, w)
        same(outer(self.wrap(targets.step, handlers))(x, w), expected)
        same(outer(self.wrap(targets.step, handlers))(x, w), expected)
        assert once(log) == ["step:0"]
        same(OWN[form](x, w) * 2, expected)

    def test_a_jitted_function_used_by_handler_and_program(self) -> None:
        """Handler and program never take each other's trace."""
        block = jax.jit(lambda x, w: targets.step(x, w))

        def handler(call: Any, x: Any, w: Any) -> Any:
            return block(x, w) * 2

        x, w = arrays((2, 3), (3, 3))
        for fn in (block, lambda x, w: targets.step(block(x, w), w), block):
            plain = fn(x, w)
            tapped = self.wrap(lambda x, w, fn=fn: fn(x, w), {STEP: handler})(x, w)
            same(tapped, plain * (2 if fn is block else 4))
            same(fn(x, w), plain)

    def test_a_wrapped_function_inside_a_handler(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        inner = self.wrap(targets.step, {"jax.numpy.dot": times(2)})
        fn = self.wrap(targets.step, {STEP: lambda call, x, w: inner(x, w) + 1})
        same(fn(x, w), 2 * jnp.dot(x, w) + 1)

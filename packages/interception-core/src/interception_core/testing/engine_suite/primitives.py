"""Primitives as targets, which some engines must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ... import Interceptor, OpCall, PatchEngine, TargetError, UnknownNameError
from ..models import models
from . import targets
from .base import Suite, abstractly, arrays, close, let, same, times
from .forms import DIFFERENTIABLE, FORMS
from .handlers import STEP, eager_and_jitted
from .identity import on_arrays

DOT = "primitive:dot_general"
STRAIGHT = [model for model in models() if not model.staged]


class PrimitiveSuite(Suite):
    """Below the functions.

    The tests on primitives exist for engines with ``primitives = True`` alone; others have the
    one that they are refused.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take out tests that the engine isn't made for."""
        super().__init_subclass__(**kwargs)
        for name in vars(PrimitiveSuite):
            if name.startswith("test_"):
                applies = cls.primitives is not name.endswith("_refused")
                setattr(cls, name, getattr(PrimitiveSuite, name) if applies else None)

    def test_primitives_are_refused(self) -> None:
        with pytest.raises(TargetError, match="dot_general"):
            self.wrap(targets.step, {DOT: let})(*arrays((2, 3), (3, 3)))

    def test_unknown_primitives(self) -> None:
        with pytest.raises(UnknownNameError, match="Did you mean 'dot_general'"):
            self.wrap(targets.step, {"primitive:dot_genral": let})(*arrays((2, 3), (3, 3)))

    @eager_and_jitted
    def test_a_primitive_says_what_it_is(self, outer: Callable) -> None:
        def look(call: OpCall) -> tuple:
            dimensions = call.params["dimension_numbers"]
            shapes = tuple(operand.shape for operand in call.operands)
            return call.op_id, call.op_name, call.level, dimensions, shapes

        seen = self.first_calls(jnp.dot, arrays((2, 3), (3, 3)), (DOT,), outer, look)
        dimensions = (((1,), (0,)), ((), ()))
        shapes = ((2, 3), (3, 3))
        assert seen == [("dot_general:0", "dot_general", "primitive", dimensions, shapes)]

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("mode", ["eager", "outer jit", "inner jit"])
    def test_a_primitive_in_every_form(self, form: str, mode: str) -> None:
        """Tapped, plain and otherwise tapped runs share no traces."""
        fn, (x, w) = FORMS[form](), arrays((4, 4), (4, 4))
        fn = jax.jit(fn) if mode == "inner jit" else fn

        def outer(fn: Callable) -> Callable:
            return jax.jit(fn) if mode == "outer jit" else fn

        for factor in (2, 4, 2):
            interceptor = Interceptor({DOT: times(factor)}, key=("times", factor))
            tapped = outer(self.engine.wrap(fn, interceptor))(x, w)
            plain = outer(fn)(x, w)
            same(tapped, factor * plain)

    @pytest.mark.parametrize("form", DIFFERENTIABLE)
    def test_a_primitive_below_a_gradient(self, form: str) -> None:
        fn, (x, w) = FORMS[form](), arrays((4, 4), (4, 4))
        tapped = self.wrap(fn, {DOT: times(2)})
        for inner in (lambda fn: fn, jax.jit):
            value, _ = jax.vjp(inner(tapped), x, w)
            close(value, 2 * fn(x, w))

    def test_a_primitive_within_a_function(self) -> None:
        def look(call: OpCall) -> tuple:
            return call.op_id, call.level, call.within

        seen = self.first_calls(targets.step, arrays((2, 3), (3, 3)), (STEP, DOT), look=look)
        assert seen == [
            ("step:0", "function", frozenset()),
            ("dot_general:0", "primitive", frozenset({"step"})),
        ]

    def test_a_primitive_proceeds_with_other_parameters(self) -> None:
        def handler(call: Any, x: Any, w: Any, **params: Any) -> Any:
            params["dimension_numbers"] = (((1,), (1,)), ((), ()))
            return call.proceed(x, w, **params)

        x, w = arrays((2, 3), (3, 3))
        same(self.wrap(targets.step, {DOT: handler})(x, w), jnp.dot(x, w.T))

    def test_a_handler_of_a_primitive_may_bind_it(self) -> None:
        def handler(call: Any, x: Any, w: Any, **params: Any) -> Any:
            return jax.jit(jnp.dot)(x, w) * 2 + jnp.exp(x - x)

        x, w = arrays((2, 3), (3, 3))
        fn = self.wrap(targets.composite, {DOT: handler, "primitive:exp": handler})
        same(fn(x, w), 2 * jnp.dot(2 * jnp.dot(x, w) + 1, w) + 1)

    @pytest.mark.parametrize("straight", STRAIGHT, ids=str)
    def test_ids_of_primitives_are_those_of_the_patch_engine(self, straight: Any) -> None:
        def look(call: OpCall) -> tuple:
            return call.op_id, call.op_name, call.module_path, call.level

        # None that is part of a custom_jvp: whether that is a separate trace depends on whether
        # the wrapped function is traced, for the patch engine.
        names = ("dot_general", "conv_general_dilated", "tanh", "rsqrt")
        targets = tuple(f"primitive:{name}" for name in names)
        case = straight.fn, on_arrays(straight), targets, abstractly, look
        reference = PatchEngine(disable_jit=True)
        seen, expected = self.first_calls(*case), self.first_calls(*case, engine=reference)
        assert sorted(seen) == sorted(expected)
        assert len(seen) >= 2

    @pytest.mark.parametrize("straight", STRAIGHT, ids=str)
    def test_primitives_that_are_let_run_change_nothing(self, straight: Any) -> None:
        args = on_arrays(straight)
        names = ("dot_general", "conv_general_dilated", "exp", "tanh", "max", "add", "mul")
        tapped = self.wrap(straight.fn, {f"primitive:{name}": let for name in names})
        plain = jax.jit(self.plain(straight.fn))(*args)
        np.testing.assert_array_equal(jax.jit(tapped)(*args), plain)

"""Provenance: which input of the wrapped function an operand is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from ... import Interceptor, OpCall
from ..models import ANY, Model
from . import targets
from .base import Suite, abstractly, arrays, noting
from .handlers import STEP, eager_and_jitted
from .identity import on_arrays


class Params(NamedTuple):
    """Another kind of pytree."""

    kernel: Any
    bias: Any


def provenances(call: OpCall) -> tuple:
    """Return what is known of the call's operands."""
    return tuple(operand.provenance for operand in call.operands)


class OperandSuite(Suite):
    """What a handler is told about operands."""

    @eager_and_jitted
    def test_positions_keywords_and_leaves(self, outer: Callable) -> None:
        def body(params: Any, x: Any, *, scale: Any) -> Any:
            h = targets.step(x, params["layers"][0].kernel)
            h = targets.step(h, params["layers"][1].kernel)
            h = targets.step(scale, h)
            h = targets.step(h, params["layers"][0].kernel)
            return targets.step(jnp.tanh(x), jnp.exp(params["head"]))

        x, w = arrays((3, 3), (3, 3))
        layers = (Params(w, x[0]), Params(w + 1, x[0]))
        params = {"layers": layers, "head": w + 2}
        seen: list[tuple] = []
        handler = noting(seen, lambda call: (call.op_id, provenances(call)))
        outer(self.wrap(body, {STEP: handler}))(params, x, scale=x + 1)
        assert dict(seen) == {
            "step:0": ("args[1]", "args[0]['layers'][0].kernel"),
            "step:1": (None, "args[0]['layers'][1].kernel"),
            "step:2": ("kwargs['scale']", None),
            "step:3": (None, "args[0]['layers'][0].kernel"),
            "step:4": (None, None),
        }

    @eager_and_jitted
    def test_an_input_as_such_has_its_own_axes_and_metadata(self, outer: Callable) -> None:
        seen: list[tuple] = []
        handler = noting(seen, lambda call: call.operands)
        outer(self.wrap(lambda x, w: targets.step(jnp.tanh(x), w), {STEP: handler}))(
            *arrays((2, 3), (3, 3))
        )
        computed, given = seen[0]
        assert (given.shape, given.dtype, given.axes) == ((3, 3), jnp.float32, (0, 1))
        assert (computed.shape, computed.dtype) == ((2, 3), jnp.float32)
        assert computed.provenance is computed.axes is None

    def test_operands_under_transformations(self) -> None:
        def body(params: Any, x: Any) -> Any:
            return jnp.sum(targets.step(x, params["w"]))

        x, w = arrays((2, 3), (3, 3))
        for transform in (
            jax.grad,
            jax.checkpoint,
            lambda fn: jax.jit(jax.value_and_grad(fn)),
            lambda fn: jax.vmap(fn, in_axes=None, axis_size=2),
            lambda fn: lambda *args: jax.jvp(fn, args, args),
        ):
            seen = self.first_calls(body, ({"w": w}, x), (STEP,), transform, provenances)
            assert seen == [("args[1]", "args[0]['w']")]

    def test_operands_of_the_shared_models(self, model: Model) -> None:
        def look(call: OpCall) -> tuple:
            return call.op_id, provenances(call)

        case = model.fn, on_arrays(model), model.targets, abstractly, look
        seen = dict(self.first_calls(*case))
        for op_id, expected in model.operands:
            pairs = zip(seen[op_id], expected, strict=True)
            assert all(wanted in (ANY, known) for known, wanted in pairs), (op_id, seen[op_id])

    @eager_and_jitted
    def test_metadata_stays_with_a_value(self, outer: Callable) -> None:
        """And not with what is computed from it."""
        seen = []

        def handler(call: OpCall, x: Any, w: Any) -> Any:
            seen.append(tuple(dict(operand.metadata) for operand in call.operands))
            call.annotate(w, used=True)
            result = call.annotate(call.proceed(x, w), scale=3, made="here")
            return call.annotate(result, scale=4)

        def body(x: Any, w: Any) -> Any:
            y = targets.step(x, w)
            y = targets.step(y, w)
            return targets.step(jnp.tanh(y), w + 1)

        outer(self.wrap(body, {STEP: handler}))(*arrays((2, 3), (3, 3)))
        assert seen[:3] == [({}, {}), ({"scale": 4, "made": "here"}, {"used": True}), ({}, {})]

    def test_metadata_is_of_one_run(self) -> None:
        seen = []

        def handler(call: OpCall, x: Any, w: Any) -> Any:
            seen.append(dict(call.metadata(w)))
            call.annotate(w, used=True)
            return NotImplemented

        args = arrays((2, 3), (3, 3))
        for _ in range(2):
            seen.clear()
            self.wrap(targets.step, {STEP: handler})(*args)
            assert seen[0] == {}

    def test_metadata_that_cannot_be_hashed_is_refused(self) -> None:
        def handler(call: OpCall, x: Any, w: Any) -> Any:
            return call.annotate(x, scale=[3])

        with pytest.raises(TypeError, match="can't be hashed"):
            self.wrap(targets.step, {STEP: handler})(*arrays((2, 3), (3, 3)))

    def test_any_value_can_be_asked_for(self) -> None:
        """``call.operand`` also takes keyword arguments and other objects."""

        def look(call: OpCall) -> tuple:
            return (
                call.operand(call.params["w"]).provenance,
                call.operand(call.params["mode"]).provenance,
                call.operand(call.params["mode"]).shape,
            )

        x, w = arrays((2, 3), (3, 3))
        seen = self.first_calls(
            lambda x, w: targets.affine(x, w=w, mode="relu"),
            (x, w),
            (f"{targets.__name__}.affine",),
            look=look,
        )
        assert seen == [("args[1]", None, None)]

    def test_operands_are_refused_after_the_run(self) -> None:
        """They would keep the inputs alive."""
        calls: list[OpCall] = []
        handler = noting(calls, lambda call: call)
        self.engine.wrap(targets.step, Interceptor({STEP: handler}))(*arrays((2, 3), (3, 3)))
        with pytest.raises(RuntimeError, match="Read it in the handler"):
            _ = calls[0].operands
        assert calls[0].op_id == "step:0"

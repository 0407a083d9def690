"""Emitting: a program's operations in the forms that LiteRT has integer kernels for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from interception_core import OpCall
from provider_odml.features import (
    PRIMITIVE,
    ConstantUse,
    Decision,
    DynamicUse,
    Quantize,
    Runtime,
    Scales,
    Site,
    SiteUse,
    WeightUse,
    inverted,
    is_float,
    matrix_axes,
)

from ..forms import FORMS, unsplat
from ..forms import wall as walled
from .collect import Collected
from .composite import Grid, dynamic, fake_quant
from .constants import Fold


class Device(Runtime):
    """Emits a program for the converter. What it emits also runs in JAX: the replay.

    Args:
        grids: by site.
        constants: the program's constants.
        converting: for the converter alone; or to be run in JAX.
        unchanged: the places of operands that have the scale already that they are read at.
    """

    walls = True

    def __init__(
        self,
        grids: Mapping[str, Grid],
        constants: Collected,
        converting: bool,
        unchanged: Container[str] = (),
    ):
        self._grids = grids
        self._unchanged = unchanged
        self._converting = converting
        self._constants = constants
        self._held: dict[str, jax.Array] = {}

    def activation(
        self, x: jax.Array, use: SiteUse, site: Site, where: str, call: OpCall
    ) -> jax.Array:
        """Return a tensor with the scale of its site."""
        is_operand = "#" in where.rpartition("/")[2]
        is_other = site.maker is not None and where not in self._unchanged
        if is_operand and (use.is_part or is_other):
            # Made in float, on another grid, or read in parts: that is not to be changed.
            x = walled(x)
        return self._quantized(x, self._grids[site.key], where)

    def _quantized(self, x: jax.Array, grid: Grid, where: str) -> jax.Array:
        with jax.named_scope(where.replace("/", ".")):
            return fake_quant(x.astype(jnp.float32), grid, self._converting).astype(x.dtype)

    def parameter(self, x: jax.Array, use: Quantize, where: str) -> jax.Array:
        """Return a constant with its scale; ``run`` quantizes contractions' operands."""
        if isinstance(use, WeightUse | DynamicUse):
            return x
        values, grid = self._constants.values[where]
        return self._quantized(jnp.asarray(values, jnp.float32), grid, where)

    def enter(self, decision: Decision, x: jax.Array) -> jax.Array:
        """Return the input of what is between two marks."""
        self._held[decision.node.op_id] = x
        return walled(x) if decision.is_float else x

    def joined(self, join: Callable[..., jax.Array], *values: jax.Array) -> jax.Array:
        """Emit what joins steps or branches in float: their values have different scales."""
        return walled(join(*(walled(value) if is_float(value) else value for value in values)))

    def run(self, decision: Decision, call: OpCall, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Emit one operation."""
        node = decision.node
        if decision.head is not None:
            # Folded into the contraction before it.
            place = next(u.slot for u in node.activations)
            return self._held[node.op_id] if node.begin else args[int(place)]
        table = decision.inputs.get(0)
        if node.op.kind is Scales.LOOKUP and isinstance(table, WeightUse | ConstantUse):
            return self._lookup(decision, call, args, kwargs)
        if any(isinstance(use, WeightUse) for use in decision.inputs.values()):
            return self._contraction(decision, call, args, kwargs)
        if decision.is_float:
            args = tuple(walled(a) if is_float(a) else a for a in args)
            kwargs = {k: walled(v) if is_float(v) else v for k, v in kwargs.items()}
            out = call.proceed(*args, **kwargs)
            return jax.tree.map(lambda o: walled(o) if is_float(o) else o, out)
        if inverted(decision):
            return args[0] * args[1]
        return self._fixed(decision, self._in_form(decision, call, args, kwargs))

    def _in_form(
        self, decision: Decision, call: OpCall, args: tuple, kwargs: Mapping[str, Any]
    ) -> Any:
        if decision.node.params.get("square"):
            return args[0] * args[0]
        form = FORMS.get(decision.node.op.target.replace(PRIMITIVE, "jax.lax."))
        # LiteRT looks up rows of tables alone, whose zero points are 0.
        is_picked = decision.node.op.kind is Scales.LOOKUP
        if form is None or is_picked or decision.node.begin is not None:
            return call.proceed(*args, **kwargs)
        options = dict(kwargs)
        if "fake_quant" in inspect.signature(form).parameters:
            options["fake_quant"] = self._inner(decision)
        return form(*args, **options)

    def _inner(self, decision: Decision) -> Any:
        qtype = self._grids[decision.output.site].qtype if decision.output else "int8"

        def quantized(x: jax.Array, name: str, fixed: tuple[float, float] | None) -> jax.Array:
            if fixed is None:
                return x
            grid = Grid.fixed(fixed, qtype)
            return self._quantized(x, grid, f"{decision.node.op_id}.{name}")

        return quantized

    def _fixed(self, decision: Decision, out: Any) -> Any:
        """Return an output at LiteRT's scale, then at its site's."""
        node = decision.node
        if node.op.fixed is None or decision.output is None or node.op.target in FORMS:
            return out
        own = self._grids[decision.output.site]
        asked = Grid.fixed(node.op.fixed, own.qtype)
        return out if own.same(asked) else self._quantized(out, asked, f"{node.op_id}.fixed")

    def _lookup(
        self, decision: Decision, call: OpCall, args: tuple, kwargs: Mapping[str, Any]
    ) -> jax.Array:
        """Emit rows of a table."""
        where, use = f"{decision.node.op_id}#0", decision.inputs[0]
        values, grid = self._constants.values[where]
        if isinstance(use, WeightUse):
            table = self._quantized(jnp.asarray(values), grid, where)
            form = FORMS["jax.lax.gather"]
            return walled(form(table, *args[1:], **kwargs)).astype(decision.node.dtype)
        out = call.proceed(*args, **kwargs)
        if decision.is_float:
            return walled(out)
        return self._quantized(out, grid, f"{decision.node.op_id}.rows")

    def _contraction(
        self, decision: Decision, call: OpCall, args: tuple, kwargs: Mapping[str, Any]
    ) -> Any:
        """Emit a contraction of a parameter, with all folded into it."""
        node = decision.node
        slot = next(int(s) for s, u in decision.inputs.items() if isinstance(u, WeightUse))
        where = f"{node.op_id}#{slot}"
        values, grid = self._constants.values[where]
        weight = self._quantized(jnp.asarray(unsplat(values)), grid, where)
        fold = self._constants.folds.get(node.op_id)
        params = node.params
        dtype = jnp.dtype(node.dtype)
        x = args[1 - slot]
        x = walled(x) if decision.is_float else x
        if "features" in params:
            return self._convolution(decision, x, weight, fold, kwargs)
        if params["batched"]:
            if _is_dynamic(decision):
                x = dynamic(x, ())
            operands = (x, weight) if slot == 1 else (weight, x)
            return call.proceed(*operands, **kwargs).astype(dtype)
        return self._matrix(decision, slot, weight, fold, x)

    def _convolution(
        self,
        decision: Decision,
        x: jax.Array,
        weight: jax.Array,
        fold: Fold | None,
        params: Mapping[str, Any],
    ) -> jax.Array:
        """Emit a convolution: CONV_2D, also of one axis."""
        form = FORMS["jax.lax.conv_general_dilated"]
        options = _conv_options(params)
        if x.ndim == 3:
            # Another axis of size 1 before the one, in all of them.
            options, x, weight = _in_2d(options, x, weight)
        # Channels last, as LiteRT has them: a bias is fused there alone.
        numbers = options["dimension_numbers"]
        n = x.ndim
        x = x.transpose(numbers.lhs_spec[:1] + numbers.lhs_spec[2:] + numbers.lhs_spec[1:2])
        last = (0, n - 1, *range(1, n - 1))
        options["dimension_numbers"] = lax.ConvDimensionNumbers(last, numbers.rhs_spec, last)
        x = x.astype(jnp.float32)
        if _is_dynamic(decision):
            x = dynamic(x, (0,))
        out = form(x, weight, **options)
        if fold is not None and np.any(fold.offset):
            out = out + _bias(fold)
        out = walled(out) if decision.is_float else out
        spec = numbers.out_spec
        out = out.transpose(np.argsort((spec[0], *spec[2:], spec[1])))
        return out.reshape(decision.node.shape).astype(decision.node.dtype)

    def _matrix(
        self, decision: Decision, slot: int, weight: jax.Array, fold: Fold | None, x: jax.Array
    ) -> jax.Array:
        """Emit a contraction as that of rows and a matrix: FULLY_CONNECTED."""
        node = decision.node
        given = next(use.shape for use in node.uses if use.slot == slot)
        _, free_w = matrix_axes(node.params, slot, len(given))
        inner_x = sorted(node.params["contracted"][1 - slot])
        free_x = [axis for axis in range(x.ndim) if axis not in inner_x]
        rows = x.astype(jnp.float32)
        if [*free_x, *inner_x] != list(range(x.ndim)):
            rows = rows.transpose([*free_x, *inner_x])
        rows = rows.reshape([*(x.shape[a] for a in free_x), weight.shape[0]])
        if _is_dynamic(decision):
            rows = dynamic(rows, tuple(range(rows.ndim - 1)))
        out = lax.dot_general(rows, weight, (((rows.ndim - 1,), (0,)), ((), ())))
        if fold is not None and np.any(fold.offset):
            out = out + _bias(fold)
        out = walled(out) if decision.is_float else out
        shape = [x.shape[a] for a in free_x] + [given[a] for a in free_w]
        out = out.reshape(shape)
        if slot == 0:
            n = len(free_x)
            out = out.transpose([*range(n, len(shape)), *range(n)])
        return out.astype(node.dtype)


def _in_2d(
    options: dict[str, Any], x: jax.Array, weight: jax.Array
) -> tuple[dict[str, Any], jax.Array, jax.Array]:
    """Return a convolution along one axis as one along two."""
    numbers = options["dimension_numbers"]
    specs = [numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec]
    wide = [(*(a + (a >= s) for a in (n, c)), s, s + 1) for n, c, s in specs]
    longer = dict(options)
    longer["dimension_numbers"] = lax.ConvDimensionNumbers(*wide)
    for name, one in (("window_strides", 1), ("padding", (0, 0)), ("lhs_dilation", 1)):
        longer[name] = (one, *options[name])
    longer["rhs_dilation"] = (1, *options["rhs_dilation"])
    return longer, jnp.expand_dims(x, specs[0][2]), jnp.expand_dims(weight, specs[1][2])


def _bias(fold: Fold) -> jax.Array:
    return jnp.asarray(unsplat(np.asarray(fold.offset, np.float32)))


def _is_dynamic(decision: Decision) -> bool:
    return any(isinstance(use, DynamicUse) for use in decision.inputs.values())


def _conv_options(params: Mapping[str, Any]) -> dict[str, Any]:
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
             "feature_group_count", "batch_group_count")  # fmt: skip
    return {name: params[name] for name in names}

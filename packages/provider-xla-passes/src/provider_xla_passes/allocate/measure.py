"""Output error: how far quantized parameters move a program's results.

The error of one parameter's format is measured: the program runs in float with the values that this
parameter's quantized values stand for. HAWQ (Dong et al. 2020, arXiv:1911.03852) and OBS estimate
it from second derivatives instead. The only assumption here is that errors of several parameters
add up, as squares of small independent ones do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import ArrayProxy, Part
from provider_xla import QuantizationError, WeightPlan
from provider_xla.features import (
    by_path,
    carried,
    in_float,
    is_array,
    map_params,
    of_arrays,
    quantize_leaf,
)

if TYPE_CHECKING:
    from provider_xla import Plan

Error = Callable[[Any, Any], Any]
"""Takes what the function returns in float, and with quantized parameters; returns a scalar."""


def noise_to_signal(expected: Any, actual: Any) -> jax.Array:
    """Return squared error over squared norm, averaged over floating arrays."""

    def one(expected: jax.Array, actual: jax.Array) -> jax.Array:
        wide = jnp.promote_types(expected.dtype, jnp.float32)
        expected, actual = expected.astype(wide), actual.astype(wide)
        norm = jnp.sum(jnp.square(jnp.abs(expected)))
        # Of an output that is zero in float, as it is.
        return jnp.sum(jnp.square(jnp.abs(actual - expected))) / jnp.where(norm > 0, norm, 1)

    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)
    found = [
        one(e, a)
        for e, a in pairs
        if is_array(e) and e.size and jnp.issubdtype(e.dtype, jnp.inexact)
    ]
    if not found:
        raise QuantizationError(
            "The function returns no array of floats to measure an error of. Plan it for one that "
            "does (logits, not the chosen class), or pass error=."
        )
    return jnp.mean(jnp.stack(found))


class Measure:
    """Measure the error of the output of a plan's function."""

    def __init__(self, plan: Plan, params: Any, batch: Sequence[Any], error: Error | None):
        self._plan = plan
        self._params = params
        self._batch = batch
        self._leaves, self._tree = by_path(params, plan.prefix)
        compare = noise_to_signal if error is None else error
        built: list[Any] = []

        computed = {
            one.path: (one.derived.expression, one.dtype)
            for one in plan.derived.values()
            if one.derived is not None
        }
        self._computed = {
            path: expression.evaluate(self._leaves).astype(dtype)
            for path, (expression, dtype) in computed.items()
        }
        called = _with_computed(plan) if computed else plan.fn
        fn = self._fn = functools.partial(called, **_flags(plan.keywords(batch)))

        def outputs(*args: Any) -> Any:
            returned = fn(*args)
            leaves, tree = jax.tree.flatten(returned)
            rest = [None if is_array(leaf) else leaf for leaf in leaves]
            built[:] = [tree, rest]
            return returned

        def whole(arrays: Sequence[jax.Array]) -> Any:
            tree, rest = built
            filled = iter(arrays)
            return jax.tree.unflatten(
                tree, [next(filled) if leaf is None else leaf for leaf in rest]
            )

        call, arrays = of_arrays(outputs, self._arguments({}), {})

        def compared(arrays: Sequence[Any], expected: Sequence[jax.Array]) -> jax.Array:
            found = call(arrays)
            return jnp.asarray(compare(whole(expected), whole(found)))

        self._expected = jax.jit(call)(arrays)
        self._compared = jax.jit(compared)

    def __call__(self, weights: Mapping[str, WeightPlan]) -> float:
        """Return the error with only these parameters quantized.

        Raises:
            QuantizationError: a parameter has values that are not finite, or the error is not one
                finite number of 0 or more.
        """
        values = {path: self.restored(weight) for path, weight in weights.items()}
        _, arrays = of_arrays(self._fn, self._arguments(values), {})
        found = np.asarray(self._compared(arrays, self._expected))
        if found.shape != () or not np.isfinite(found) or found < 0:
            what = ", ".join(f"{w.qtype} for {path}" for path, w in list(weights.items())[:3])
            raise QuantizationError(
                f"The error of the output is {found!r} with {what}"
                f"{', ...' if len(weights) > 3 else ''}; it must be one finite number, 0 or more. "
                "Look at what the function returns for this batch in float."
            )
        return float(found)

    def restored(self, weight: WeightPlan) -> jax.Array:
        """Return the values that the quantized values of a weight stand for."""
        value = self._value(weight)
        return _restored(quantize_leaf(weight, value), weight.dtype)

    def is_changed(self, weight: WeightPlan) -> bool:
        """Return whether a weight loses anything when it is quantized."""
        return bool(jnp.any(self.restored(weight) != self._value(weight)))

    def _value(self, weight: WeightPlan) -> Any:
        return (self._leaves if weight.derived is None else self._computed)[weight.path]

    def _arguments(self, values: Mapping[str, jax.Array]) -> list[Any]:
        leaves = [values.get(path, leaf) for path, leaf in self._leaves.items()]
        args = self._plan.arguments(jax.tree.unflatten(self._tree, leaves), self._batch)
        if self._computed:
            args.insert(0, {path: values.get(path, one) for path, one in self._computed.items()})
        return args


def _flags(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments by name of the call that a plan is for.

    Raises:
        QuantizationError: some have arrays, of which the plan knows the types alone.
    """
    names = [name for name, one in keywords.items() if any(map(is_array, jax.tree.leaves(one)))]
    if names:
        raise QuantizationError(
            "plan.allocate takes arrays by position, but the plan was made for a call with "
            f"{', '.join(names)} by name. Pass them by position; if the function has no such "
            "position, plan one that has: lambda params, x, y: fn(params, x, y=y)."
        )
    return keywords


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Value(ArrayProxy):
    """A value that replaces a computed weight."""

    value: jax.Array

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        return self.value.dtype

    def restore(self) -> jax.Array:
        return self.value

    def parts(self) -> dict[str, Part]:
        return {"value": Part(self.value, True)}

    def astype(self, dtype: Any) -> _Value:
        return _Value(self.value.astype(dtype))


def _with_computed(plan: Plan) -> Callable[..., Any]:
    """Return a plan's function, which takes computed weights as well."""
    tapped = plan.tap(in_float)

    def fn(computed: Mapping[str, jax.Array], *args: Any, **kwargs: Any) -> Any:
        values = {path: _Value(value) for path, value in computed.items()}

        def one(path: str, leaf: Any) -> Any:
            return carried(plan, path, leaf, leaf, values) if path in plan.leaves else leaf

        given = list(args)
        given[plan.argnum] = map_params(one, given[plan.argnum], plan.prefix)
        return tapped(*given, **kwargs)

    return fn


@functools.partial(jax.jit, static_argnums=1)
def _restored(stored: qn.StoredForm, dtype: np.dtype) -> jax.Array:
    return qn.dequantize(stored).astype(dtype)

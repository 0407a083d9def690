"""Isolation: traces never cross between inside and outside a scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ... import Engine, Interceptor, OpCall
from .base import Suite, arrays, close, same, times
from .forms import DIFFERENTIABLE, FORMS

TARGET = "jax.lax.dot_general"
MODES = ("eager", "outer jit", "inner jit")
FACTORS = {"doubled": 2, "quadrupled": 4}
ORDERS = {
    "plain first": ("plain", "other", "doubled", "plain", "other"),
    "tapped first": ("doubled", "plain", "other", "doubled"),
    "one interceptor then another": ("doubled", "quadrupled", "doubled", "plain", "other"),
}
"""The runs of a function, one after the other; "other" is another function of the same form."""

every_form = pytest.mark.parametrize("form", FORMS)
every_mode = pytest.mark.parametrize("mode", MODES)


def scaled(factor: int) -> Interceptor:
    """Return an interceptor that multiplies tapped matmuls by ``factor``.

    Those of equal factors are equal, as those that a provider makes from equal rules are.
    """
    return Interceptor({TARGET: times(factor)}, key=("scaled", factor))


def by_path(call: OpCall, *args: Any, **kwargs: Any) -> Any:
    """Treat two layers differently."""
    factor = {"first": 2, "second": 4}.get(call.module_path.split("/")[0])
    if factor is None:
        return NotImplemented
    return call.proceed(*args, **kwargs) * jnp.float32(factor)


class Case:
    """A function of a form, with its plain and tapped results."""

    def __init__(self, engine: Engine, form: str, mode: str):
        make = FORMS[form]
        self._engine, self._mode = engine, mode
        fns = [jax.jit(make()) if mode == "inner jit" else make() for _ in range(2)]
        self._fn, self._plain, self._other = fns[0], *map(self._outer, fns)

    def _outer(self, fn: Callable) -> Callable:
        return jax.jit(fn) if self._mode == "outer jit" else fn

    def run(self, name: str) -> Callable:
        """Return the function, plain or newly tapped, or another one."""
        if name in FACTORS:
            return self._outer(self._engine.wrap(self._fn, scaled(FACTORS[name])))
        return self._plain if name == "plain" else self._other


class IsolationSuite(Suite):
    """Every form, in every mode, in every order."""

    @every_form
    @every_mode
    @pytest.mark.parametrize("order", ORDERS)
    def test_isolation_in_every_order(self, order: str, form: str, mode: str) -> None:
        """Each run has its result, whatever ran before."""
        case, (x, w) = Case(self.engine, form, mode), arrays((4, 4), (4, 4))
        results = [(run, case.run(run)(x, w)) for run in ORDERS[order]]
        plain = dict(results)["plain"]
        for run, result in results:
            same(result, FACTORS.get(run, 1) * plain)

    @every_form
    @every_mode
    def test_isolation_two_rules_on_equal_layers(self, form: str, mode: str) -> None:
        layer = FORMS[form]()
        layer = jax.jit(layer) if mode == "inner jit" else layer

        def model(x: Any, w: Any) -> Any:
            with jax.named_scope("first"):
                first = layer(x, w)
            with jax.named_scope("second"):
                second = layer(x, w)
            return first, second, layer(x, w)

        plain: Callable = model
        wrapped = self.engine.wrap(model, Interceptor({TARGET: by_path}))
        if mode == "outer jit":
            plain, wrapped = jax.jit(plain), jax.jit(wrapped)
        x, w = arrays((4, 4), (4, 4))
        for _ in range(2):
            first, second, third = wrapped(x, w)
            expected = plain(x, w)[0]
            same(first, 2 * expected)
            same(second, 4 * expected)
            same(third, expected)

    @pytest.mark.parametrize("form", DIFFERENTIABLE)
    @pytest.mark.parametrize("inner", [lambda fn: fn, jax.jit], ids=["direct", "jitted"])
    def test_isolation_of_gradients(self, form: str, inner: Callable) -> None:
        """Rules that JAX evaluates after the scope are tapped, too."""
        fn, (x, w) = FORMS[form](), arrays((4, 4), (4, 4))

        def value(product: Callable) -> Any:
            return jax.value_and_grad(lambda x: jnp.sum(product(x, w)))(x)[0]

        plain = jnp.sum(fn(x, w))
        tapped = inner(self.engine.wrap(fn, scaled(2)))
        close(value(tapped), 2 * plain)
        close(value(inner(fn)), plain)
        close(value(inner(self.engine.wrap(fn, scaled(2)))), 2 * plain)

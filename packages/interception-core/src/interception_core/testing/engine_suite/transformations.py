"""Transformations: a wrapped function is an ordinary function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

from .base import Suite, arrays, close, let, same, times

TARGET = "jax.numpy.dot"


def layer(x: Any, w: Any, dot: Callable | None = None) -> Any:
    """Compute the wrapped function; with ``dot``, its tapped meaning."""
    return jnp.tanh((dot or jnp.dot)(x, w) / 8)


def doubled(x: Any, w: Any) -> Any:
    """Return the handler's result for a matmul."""
    return 2 * jnp.dot(x, w)


def loss(fn: Callable) -> Callable:
    """Return a function with a scalar result."""
    return lambda x, w: jnp.sum(jnp.sin(fn(x, w)))


def _export(fn: Callable, x: Any, w: Any) -> Any:
    return jax.export.export(jax.jit(fn))(x, w).call(x, w)


def _export_gradient(fn: Callable, x: Any, w: Any) -> Any:
    return jax.grad(loss(jax.export.export(jax.jit(fn))(x, w).call))(x, w)


def _make_jaxpr(fn: Callable, x: Any, w: Any) -> Any:
    closed = jax.make_jaxpr(fn)(x, w)
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x, w)


def _shard_map(fn: Callable, x: Any, w: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec, None), out_specs=spec)(x, w)


def _custom_vjp(fn: Callable, x: Any, w: Any) -> Any:
    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return fn(x, w)

    product.defvjp(lambda x, w: (fn(x, w), (x, w)), lambda res, ct: (ct * res[0], res[1]))
    return jax.grad(loss(product))(x, w)


def _custom_jvp(fn: Callable, x: Any, w: Any) -> Any:
    product = jax.custom_jvp(lambda x, w: fn(x, w))
    product.defjvp(lambda p, t: (fn(*p), fn(t[0], p[1])))
    return jax.jvp(product, (x, w), (x, w))


def _jit_twice(fn: Callable, x: Any, w: Any) -> Any:
    jitted = jax.jit(fn)
    return jitted(x, w), jitted(x + 1, w), jitted(x[:1], w)


def _hessian(fn: Callable, x: Any, w: Any) -> Any:
    return jax.hessian(lambda x: loss(fn)(x, w))(x[0, :2].repeat(2)[None])


TRANSFORMATIONS: dict[str, Callable[[Callable, Any, Any], Any]] = {
    "none": lambda fn, x, w: fn(x, w),
    "jit": lambda fn, x, w: jax.jit(fn)(x, w),
    "jit, several shapes": _jit_twice,
    "jit of jit": lambda fn, x, w: jax.jit(lambda x, w: jax.jit(fn)(x, w))(x, w),
    "jit with donation": lambda fn, x, w: jax.jit(fn, donate_argnums=0)(x + 0, w),
    "lower and compile": lambda fn, x, w: jax.jit(fn).lower(x, w).compile()(x, w),
    "grad": lambda fn, x, w: jax.grad(loss(fn), (0, 1))(x, w),
    "value_and_grad": lambda fn, x, w: jax.value_and_grad(loss(fn), (0, 1))(x, w),
    "jit of value_and_grad": lambda fn, x, w: jax.jit(jax.value_and_grad(loss(fn)))(x, w),
    "grad of jit": lambda fn, x, w: jax.grad(loss(jax.jit(fn)), (0, 1))(x, w),
    "grad of checkpoint": lambda fn, x, w: jax.grad(loss(jax.checkpoint(fn)), (0, 1))(x, w),
    "grad of grad": lambda fn, x, w: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(loss(fn))(x, w))))(
        x
    ),
    "hessian": _hessian,
    "jacfwd": lambda fn, x, w: jax.jacfwd(fn)(x, w),
    "jacrev": lambda fn, x, w: jax.jacrev(fn)(x, w),
    "jvp": lambda fn, x, w: jax.jvp(fn, (x, w), (x, w)),
    "linearize": lambda fn, x, w: jax.linearize(fn, x, w)[1](x, w),
    "vjp": lambda fn, x, w: jax.vjp(fn, x, w)[1](x),
    "vmap": lambda fn, x, w: jax.vmap(fn, (0, None))(x, w),
    "vmap of jit": lambda fn, x, w: jax.vmap(jax.jit(fn), (0, None))(x, w),
    "jit of vmap": lambda fn, x, w: jax.jit(jax.vmap(fn, (0, None)))(x, w),
    "vmap of grad": lambda fn, x, w: jax.vmap(jax.grad(loss(fn)), (0, None))(x, w),
    "vmap of vmap": lambda fn, x, w: jax.vmap(jax.vmap(fn, (0, None)), (None, 0))(
        x, jnp.stack([w, w])
    ),
    "checkpoint": lambda fn, x, w: jax.checkpoint(fn)(x, w),
    "scan": lambda fn, x, w: lax.scan(lambda c, _: (fn(c, w), c), x, None, length=3),
    "grad of scan": lambda fn, x, w: jax.grad(
        lambda x: jnp.sum(lax.scan(lambda c, _: (fn(c, w), None), x, None, length=3)[0])
    )(x),
    "map": lambda fn, x, w: lax.map(lambda row: fn(row, w), x),
    "fori_loop": lambda fn, x, w: lax.fori_loop(0, 3, lambda i, c: fn(c, w), x),
    "while_loop": lambda fn, x, w: lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, fn(s[1], w)), (0, x)
    ),
    "cond": lambda fn, x, w: lax.cond(x[0, 0] > 0, fn, lambda x, w: x, x, w),
    "switch": lambda fn, x, w: lax.switch(jnp.int32(x[0, 0]) % 2, [fn, fn], x, w),
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "shard_map": _shard_map,
    "make_jaxpr": _make_jaxpr,
    "export": _export,
    "export with gradient": _export_gradient,
    "keywords": lambda fn, x, w: jax.jit(fn)(x, w=w),
    "partial": lambda fn, x, w: jax.jit(functools.partial(fn, w=w))(x),
}
"""Each applies a transformation to a function of two matrices, and gives what comes out."""

COMPILED = ("export", "export with gradient", "lower and compile")
"""Those that need arrays: they can't be part of a program that is traced."""

every_one = pytest.mark.parametrize("transformation", TRANSFORMATIONS)
every_traceable = pytest.mark.parametrize(
    "transformation", [name for name in TRANSFORMATIONS if name not in COMPILED]
)


class TransformationSuite(Suite):
    """The wrapper outside, the wrapped inside."""

    @every_one
    def test_transformed_and_tapped(self, transformation: str) -> None:
        """The result is that of a program with the handler's operation."""
        apply, (x, w) = TRANSFORMATIONS[transformation], arrays((4, 4), (4, 4))
        plain, expected = apply(layer, x, w), apply(functools.partial(layer, dot=doubled), x, w)
        close(apply(self.wrap(layer, {TARGET: times(2)}), x, w), expected)
        close(apply(layer, x, w), plain)

    @every_traceable
    def test_transformed_inside(self, transformation: str) -> None:
        """The same, with the transformation in the program."""
        apply, (x, w) = TRANSFORMATIONS[transformation], arrays((4, 4), (4, 4))
        expected = apply(functools.partial(layer, dot=doubled), x, w)
        tapped = self.wrap(lambda x, w: apply(layer, x, w), {TARGET: times(2)})
        close(tapped(x, w), expected)
        close(jax.jit(tapped)(x, w), expected)

    @every_one
    def test_nothing_changes_where_handlers_let_everything_run(self, transformation: str) -> None:
        apply, (x, w) = TRANSFORMATIONS[transformation], arrays((4, 4), (4, 4))
        tapped = self.wrap(layer, {TARGET: let, "jax.lax.dot_general": let})
        close(apply(tapped, x, w), apply(layer, x, w))

    @every_traceable
    def test_shapes_of_what_is_tapped(self, transformation: str) -> None:
        """``eval_shape`` runs no program, and needs none to be run."""
        apply, (x, w) = TRANSFORMATIONS[transformation], arrays((4, 4), (4, 4))
        tapped = self.wrap(layer, {TARGET: times(2)})
        shapes = jax.eval_shape(lambda x, w: apply(tapped, x, w), x, w)
        assert shapes == jax.eval_shape(lambda x, w: apply(layer, x, w), x, w)

    def test_a_gradient_through_a_handler_s_own_rule(self) -> None:
        """A handler that returns a straight-through function decides about the gradient."""

        @jax.custom_vjp
        def product(x: Any, w: Any) -> Any:
            return jnp.dot(x, w)

        product.defvjp(
            lambda x, w: (jnp.dot(x, w), (x, w)), lambda res, ct: (7 * res[0], 0 * res[1])
        )
        x, w = arrays((4, 4), (4, 4))

        def body(x: Any) -> Any:
            return jnp.sum(jnp.dot(x, w))

        handlers = {TARGET: lambda call, x, w, **_: product(x, w)}
        for inner in (lambda fn: fn, jax.jit):
            same(jax.grad(inner(self.wrap(body, handlers)))(x), 7 * x)
            same(self.wrap(jax.grad(inner(body)), handlers)(x), 7 * x)

    def test_results_may_be_anything_that_jit_returns(self) -> None:
        def body(x: Any, *, scale: Any) -> Any:
            return {"a": [x, jnp.dot(x, x)], "b": (), "c": None, "d": (scale, jnp.int32(3), x)}

        (x,) = arrays((3, 3))
        tapped = self.wrap(body, {TARGET: let})
        same(jax.jit(tapped)(x, scale=x), jax.jit(body)(x, scale=x))
        same(tapped(x, scale=x), body(x, scale=x))

    def test_key_arrays_and_integers_go_through(self) -> None:
        def body(key: Any, x: Any, n: Any) -> Any:
            noise = jax.random.normal(key, (3, 3))
            return jnp.dot(x, noise), jax.random.split(key), n + 1

        (x,) = arrays((3, 3))
        args = (jax.random.key(0), x, jnp.int32(3))
        product, keys, n = self.wrap(body, {TARGET: times(2)})(*args)
        plain, other_keys, m = body(*args)
        close(product, 2 * plain)
        same((jax.random.key_data(keys), n), (jax.random.key_data(other_keys), m))

    def test_static_arguments_of_an_outer_jit(self) -> None:
        def body(x: Any, times: int) -> Any:
            for _ in range(times):
                x = jnp.dot(x, x)
            return x

        (x,) = arrays((3, 3))
        fn = jax.jit(self.wrap(body, {TARGET: times(2)}), static_argnums=1)
        same(fn(x, 1), 2 * jnp.dot(x, x))
        same(fn(x, 0), x)

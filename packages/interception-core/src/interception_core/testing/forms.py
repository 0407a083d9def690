"""What generated programs are made of: steps, and forms of control flow and transformations.

A step keeps the shape of a vector or matrix. A form is called with an array, the program's
parameters and its blocks, which are functions of an array and the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Params = dict[str, Array]
Block = Callable[[Array, Params], Array]


CONSTANT = np.linspace(-1, 1, 4, dtype=np.float32)
ORDER = np.array([2, 0, 3, 1], np.int32)


def _attention(x: Array, p: Params) -> Array:
    rows = jnp.atleast_2d(x)
    weights = jax.nn.softmax(jnp.einsum("qd,kd->qk", jnp.dot(rows, p["a"]), rows), axis=-1)
    return jnp.einsum("qk,kd->qd", weights, rows).reshape(x.shape)


def _slices(x: Array, p: Params) -> Array:
    left = lax.dynamic_slice_in_dim(x, 1, 2, axis=-1)
    return jnp.concatenate([left, x[..., :1], x[..., 3:]], axis=-1)


def _norm(x: Array, p: Params) -> Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, axis=-1, keepdims=True) + 0.5)


def _product(x: Array, p: Params) -> Array:
    return lax.dot_general(x, p["a"], (((x.ndim - 1,), (0,)), ((), ())))


STEPS: dict[str, Callable[[Array, Params], Array]] = {
    "dot": lambda x, p: jnp.dot(x, p["a"]),
    "dot, transposed": lambda x, p: jnp.dot(x, p["b"].T),
    "matmul": lambda x, p: x @ p["b"],
    "matmul of two weights": lambda x, p: x @ (p["a"] @ p["b"]),
    "dot_general": _product,
    "einsum": lambda x, p: jnp.einsum("...i,ij->...j", x, p["a"]),
    "einsum of three": lambda x, p: jnp.einsum("...i,ij,jk->...k", x, p["a"], p["b"]),
    "einsum of a constant": lambda x, p: jnp.einsum("...i,i->...i", x, CONSTANT),
    "attention": _attention,
    "softmax": lambda x, p: jax.nn.softmax(x, axis=-1),
    "log_softmax": lambda x, p: jax.nn.log_softmax(x, axis=-1),
    "gelu": lambda x, p: jax.nn.gelu(x),
    "silu": lambda x, p: jax.nn.silu(x),
    "relu": lambda x, p: jax.nn.relu(x),
    "tanh": lambda x, p: jnp.tanh(x),
    "exp": lambda x, p: jnp.exp(-x * x),
    "bias": lambda x, p: x + p["bias"],
    "constant": lambda x, p: x * CONSTANT + jnp.asarray(CONSTANT)[0],
    "norm": _norm,
    "sums": lambda x, p: x - jnp.sum(x, axis=-1, keepdims=True) / 4,
    "maximum": lambda x, p: x / (1 + jnp.max(jnp.abs(x))),
    "cumsum": lambda x, p: jnp.cumsum(x, axis=-1) / 4,
    "where": lambda x, p: jnp.where(x > 0, x, x / 4),
    "clip": lambda x, p: jnp.clip(x, -0.5, 2.0),
    "gather": lambda x, p: x[..., ORDER],
    "take": lambda x, p: jnp.take(x, ORDER, axis=-1),
    "scatter": lambda x, p: x.at[..., 1].add(x[..., 0]),
    "slices": _slices,
    "flip": lambda x, p: jnp.flip(x, axis=-1),
    "sort": lambda x, p: jnp.sort(x, axis=-1),
}
"""Each is called with the array and the program's parameters."""


def _jit(x: Array, p: Params, block: Block) -> Array:
    return jax.jit(lambda x, p: block(x, p))(x, p)


def _jit_of_closure(x: Array, p: Params, block: Block) -> Array:
    """Weights are closed over, not given."""
    return jax.jit(lambda x: block(x, p))(x)


def _jit_called_twice(x: Array, p: Params, block: Block) -> Array:
    jitted = jax.jit(lambda x, p: block(x, p))
    with jax.named_scope("once"):
        x = jitted(x, p)
    with jax.named_scope("again"):
        return jitted(x, {**p, "a": p["b"]})


def _scan(x: Array, p: Params, block: Block) -> Array:
    def body(carry: Array, w: Array) -> tuple[Array, Array]:
        carry = block(carry, {**p, "a": w})
        return carry, jnp.sum(carry)

    carry, sums = lax.scan(body, x, p["stack"])
    return carry + jnp.mean(sums)


def _scan_backwards(x: Array, p: Params, block: Block) -> Array:
    """The body closes over the array, and the carry is a pytree."""

    def body(carry: dict[str, Any], w: Array) -> tuple[dict[str, Any], None]:
        return {"x": x / 2 + block(carry["x"], {**p, "b": w}), "n": carry["n"] + 1}, None

    return lax.scan(body, {"x": x, "n": 0}, p["stack"], reverse=True)[0]["x"]


def _map_rows(x: Array, p: Params, block: Block) -> Array:
    return lax.map(lambda row: block(row, p), x if x.ndim > 1 else x[None]).reshape(x.shape)


def _fori_loop(x: Array, p: Params, block: Block) -> Array:
    return lax.fori_loop(0, 2, lambda i, x: block(x, p) + i, x)


def _while_loop(x: Array, p: Params, block: Block) -> Array:
    """Loop as often as values say, without a reverse derivative."""
    fixed, start = lax.stop_gradient((p, x))

    def unfinished(state: tuple[Any, Array]) -> Any:
        return (state[0] < 3) & (jnp.max(jnp.abs(state[1])) < 4)

    def advance(state: tuple[Any, Array]) -> tuple[Any, Array]:
        return state[0] + 1, block(state[1], fixed)

    return x + lax.while_loop(unfinished, advance, (0, start))[1]


def _cond(x: Array, p: Params, first: Block, second: Block) -> Array:
    return lax.cond(jnp.sum(x) > 0, first, second, x, p)


def _switch(x: Array, p: Params, *blocks: Block) -> Array:
    index = jnp.argmax(jnp.ravel(x)) % len(blocks)
    return lax.switch(index, [lambda x, block=block: block(x, p) for block in blocks], x)


def _remat(x: Array, p: Params, block: Block) -> Array:
    return jax.checkpoint(lambda x, p: block(x, p))(x, p)


def _remat_with_policy(x: Array, p: Params, block: Block) -> Array:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda x: block(x, p), policy=policy)(x)


def _custom_jvp(x: Array, p: Params, block: Block) -> Array:
    @jax.custom_jvp
    def fn(x: Array, p: Params) -> Array:
        return block(x, p)

    @fn.defjvp
    def rule(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        value, tangent = jax.jvp(block, primals, tangents)
        return value, tangent * 2

    return fn(x, p)


def _custom_vjp(x: Array, p: Params, block: Block) -> Array:
    def whole(x: Array, p: Params) -> Array:
        # Depends on all that may be mapped: a vmap refuses a backward rule that gives a batch of
        # cotangents for a result that is none.
        return block(x, p) + (jnp.sum(p["a"]) + jnp.sum(p["b"])) / 8

    @jax.custom_vjp
    def fn(x: Array, p: Params) -> Array:
        return whole(x, p)

    def backward(residuals: tuple[Array, Params], ct: Array) -> tuple[Array, Params]:
        return jax.vjp(whole, *residuals)[1](jnp.dot(ct, residuals[1]["b"]))

    fn.defvjp(lambda x, p: (whole(x, p), (x, p)), backward)
    return fn(x, p)


def _vmap_rows(x: Array, p: Params, block: Block) -> Array:
    return jax.vmap(lambda row: block(row, p))(x if x.ndim > 1 else x[None]).reshape(x.shape)


def _vmap_weights(x: Array, p: Params, block: Block) -> Array:
    return jnp.mean(jax.vmap(lambda w: block(x, {**p, "b": w}))(p["stack"]), axis=0)


def _grad(x: Array, p: Params, block: Block) -> Array:
    return x - jnp.tanh(jax.grad(lambda x: jnp.sum(block(x, p)))(x))


def _value_and_grad_of_weights(x: Array, p: Params, block: Block) -> Array:
    value, grads = jax.value_and_grad(lambda p: jnp.sum(jnp.tanh(block(x, p))))(p)
    return jnp.dot(x, p["a"] - grads["a"] / 8) + jnp.tanh(value)


def _jvp(x: Array, p: Params, block: Block) -> Array:
    value, tangent = jax.jvp(lambda x: block(x, p), (x,), (jnp.ones_like(x),))
    return value + jnp.tanh(tangent)


def _linearize(x: Array, p: Params, block: Block) -> Array:
    value, linear = jax.linearize(lambda x: block(x, p), x)
    return value + jnp.tanh(linear(x))


def _scopes(x: Array, p: Params, block: Block) -> Array:
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return block(x, p)


def _stop_gradient(x: Array, p: Params, block: Block) -> Array:
    return x + lax.stop_gradient(block(x, p))


FORMS: dict[str, Callable[..., Array]] = {
    "jit": _jit,
    "jit of a closure": _jit_of_closure,
    "jit called twice": _jit_called_twice,
    "scan": _scan,
    "scan backwards": _scan_backwards,
    "map rows": _map_rows,
    "fori_loop": _fori_loop,
    "while_loop": _while_loop,
    "cond": _cond,
    "switch": _switch,
    "remat": _remat,
    "remat with policy": _remat_with_policy,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "vmap rows": _vmap_rows,
    "vmap weights": _vmap_weights,
    "grad": _grad,
    "value_and_grad of weights": _value_and_grad_of_weights,
    "jvp": _jvp,
    "linearize": _linearize,
    "scopes": _scopes,
    "stop_gradient": _stop_gradient,
}

BLOCKS = {"cond": 2, "switch": 3}
"""How many blocks a form has; the others have one."""

NEEDS_FORWARD = {"jvp", "linearize", "custom_jvp", "while_loop"}
"""Those whose blocks are differentiated in forward mode, which ``custom_vjp`` refuses."""

NOT_FORWARD = {"custom_vjp"}

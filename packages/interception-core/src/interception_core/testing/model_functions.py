"""The functions of the shared models, and what makes their inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(shapes))
    return {name: rng.normal(size=s).astype(np.float32) / 2 for name, s in shapes.items()}


def mlp(params: dict, x: Any) -> jax.Array:
    """Compute two layers under scopes, and one outside."""
    with jax.named_scope("encoder"):
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = jax.nn.relu(jnp.dot(x, params[f"layer_{i}"]["w"]) + params[f"layer_{i}"]["b"])
                x = jnp.dot(x, params["shared"])
    return jnp.dot(x, params["shared"])


def mlp_args() -> tuple:
    layers = {f"layer_{i}": _weights(w=(4, 4), b=(4,)) for i in range(2)}
    return {**layers, "shared": np.eye(4, dtype=np.float32)}, np.ones((3, 4), np.float32)


def _norm(x: Any) -> jax.Array:
    with jax.named_scope("norm"):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, axis=-1, keepdims=True) + 1e-5)


def transformer(params: dict, x: Any) -> jax.Array:
    """Compute a block with attention; every matmul is an einsum."""
    with jax.named_scope("attention"):
        h = _norm(x)
        q, k, v = (jnp.einsum("sd,dhk->shk", h, params["attention"][name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("qhk,shk->hqs", q, k), axis=-1)
        h = jnp.einsum("hqs,shk->qhk", weights, v)
        x = x + jnp.einsum("shk,hkd->sd", h, params["attention"]["out"])
    with jax.named_scope("mlp"):
        h = jnp.einsum("sd,df->sf", _norm(x), params["mlp"]["up"])
        return x + jnp.einsum("sf,fd->sd", jax.nn.gelu(h), params["mlp"]["down"])


def transformer_args() -> tuple:
    attention = _weights(q=(4, 2, 2), k=(4, 2, 2), v=(4, 2, 2), out=(2, 2, 4))
    return {"attention": attention, "mlp": _weights(up=(4, 8), down=(8, 4))}, _weights(x=(3, 4))[
        "x"
    ]


def convolutions(params: list, images: Any) -> jax.Array:
    """Compute convolutions with weights in a list, and a head."""

    @jax.named_scope("stage")
    def stage(x: Any, kernel: Any) -> jax.Array:
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
        return jax.nn.relu(x)

    for kernel in params[:2]:
        images = stage(images, kernel)
    with jax.named_scope("head"):
        return jnp.matmul(jnp.mean(images, axis=(1, 2)), params[2])


def convolution_args() -> tuple:
    shapes = _weights(a=(3, 3, 1, 2), b=(3, 3, 2, 2), c=(2, 3))
    return [*shapes.values()], np.ones((2, 4, 4, 1), np.float32)


def recurrent(params: dict, x: Any) -> jax.Array:
    """Compute a scan over time between two matmuls."""

    def cell(state: Any, row: Any) -> tuple:
        with jax.named_scope("cell"):
            state = jnp.tanh(jnp.dot(state, params["state"]) + jnp.dot(row, params["input"]))
        return state, state

    with jax.named_scope("rnn"):
        rows = lax.scan(cell, jnp.zeros(4, jnp.float32), jnp.dot(x, params["embed"]))[1]
    return jnp.dot(rows, params["head"])


def recurrent_args() -> tuple:
    return _weights(state=(4, 4), input=(4, 4), embed=(4, 4), head=(4, 2)), np.ones(
        (3, 4), np.float32
    )


def layers_in_a_scan(params: Any, x: Any) -> jax.Array:
    """Compute stacked layers in a scope."""

    def block(x: Any, w: Any) -> tuple:
        with jax.named_scope("up"):
            h = jax.nn.softmax(jnp.dot(x, w["up"]), axis=-1)
        with jax.named_scope("down"):
            return jnp.dot(h, w["down"]), None

    with jax.named_scope("blocks"):
        x = lax.scan(block, jnp.dot(x, params["in"]), params["blocks"])[0]
    return jnp.dot(x, params["in"])


def scan_args() -> tuple:
    return {
        "blocks": _weights(up=(3, 4, 8), down=(3, 8, 4)),
        **_weights(**{"in": (4, 4)}),
    }, np.ones((2, 4), np.float32)


def branches(params: Any, x: Any) -> jax.Array:
    """Compute a cond and a switch."""

    def narrow(x: Any) -> jax.Array:
        return jnp.dot(x, params["narrow"])

    def wide(x: Any) -> jax.Array:
        with jax.named_scope("wide"):
            return jnp.dot(jnp.dot(x, params["up"]), params["down"])

    def none(x: Any) -> jax.Array:
        return x

    with jax.named_scope("first"):
        x = lax.cond(jnp.sum(x) > 0, wide, narrow, x)
    with jax.named_scope("second"):
        return lax.switch(jnp.argmax(x[0]), [none, narrow, wide], x)


def branch_args() -> tuple:
    return _weights(narrow=(4, 4), up=(4, 8), down=(8, 4)), np.ones((2, 4), np.float32)


def iterations(params: Any, x: Any) -> jax.Array:
    """Compute a while loop in a for loop."""

    def advance(state: tuple) -> tuple:
        i, x = state
        return i + 1, jnp.tanh(jnp.dot(x, params["inner"]))

    def unfinished(state: tuple) -> Any:
        return state[0] < 2

    def outer(i: Any, x: Any) -> jax.Array:
        x = jnp.dot(x, params["outer"])
        with jax.named_scope("solve"):
            return lax.while_loop(unfinished, advance, (0, x))[1]

    return lax.fori_loop(0, 2, outer, x)


def iteration_args() -> tuple:
    return _weights(inner=(4, 4), outer=(4, 4)), np.ones((2, 4), np.float32)


def per_example(params: Any, x: Any) -> jax.Array:
    """Compute a vmap and an inner gradient."""

    def energy(row: Any) -> jax.Array:
        with jax.named_scope("energy"):
            return jnp.sum(jnp.tanh(jnp.dot(row, params["w"])))

    with jax.named_scope("update"):
        x = x - jax.vmap(jax.grad(energy))(x)
    return jax.vmap(lambda row: jnp.dot(row, params["head"]))(x)


def per_example_args() -> tuple:
    return _weights(w=(4, 4), head=(4, 2)), np.ones((3, 4), np.float32)

"""Models with the ids that every engine gives their operations.

Plain functions over pytrees, with named scopes, and none of them is jitted: whether
such a function's label is part of an id is the engine's choice (``labels_jit``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ANY = "(any)"
"""Stands for a provenance that an engine may know or not, such as that of a mapped row."""


@dataclass(frozen=True)
class Model:
    """A function, its inputs, and what is to be seen of it.

    Attributes:
        name: for reports.
        fn: the model.
        make_args: makes its positional arguments: pytrees of float32 arrays.
        targets: what is tapped.
        ids: the ids of those operations, each once, in the order in which they run.
        operands: for some ids, the provenances of the operands. Those of an operation in a loop
            or a branch are left out.
        staged: whether it has loops or branches, which JAX traces by themselves.
        differentiable: whether the sum of its result has a gradient.
    """

    name: str
    fn: Callable[..., jax.Array]
    make_args: Callable[[], tuple]
    targets: tuple[str, ...]
    ids: tuple[str, ...]
    operands: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    staged: bool = False
    differentiable: bool = True

    def __repr__(self) -> str:
        return self.name


def _weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(shapes))
    return {name: rng.normal(size=s).astype(np.float32) / 2 for name, s in shapes.items()}


def _ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def mlp(params: dict, x: Any) -> jax.Array:
    """Compute two layers under scopes, and one outside."""
    with jax.named_scope("encoder"):
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = jax.nn.relu(jnp.dot(x, params[f"layer_{i}"]["w"]) + params[f"layer_{i}"]["b"])
                x = jnp.dot(x, params["shared"])
    return jnp.dot(x, params["shared"])


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


def recurrent(params: dict, x: Any) -> jax.Array:
    """Compute a scan over time between two matmuls."""

    def cell(state: Any, row: Any) -> tuple:
        with jax.named_scope("cell"):
            state = jnp.tanh(jnp.dot(state, params["state"]) + jnp.dot(row, params["input"]))
        return state, state

    with jax.named_scope("rnn"):
        rows = lax.scan(cell, jnp.zeros(4, jnp.float32), jnp.dot(x, params["embed"]))[1]
    return jnp.dot(rows, params["head"])


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


def per_example(params: Any, x: Any) -> jax.Array:
    """Compute a vmap and an inner gradient."""

    def energy(row: Any) -> jax.Array:
        with jax.named_scope("energy"):
            return jnp.sum(jnp.tanh(jnp.dot(row, params["w"])))

    with jax.named_scope("update"):
        x = x - jax.vmap(jax.grad(energy))(x)
    return jax.vmap(lambda row: jnp.dot(row, params["head"]))(x)


def models() -> list[Model]:
    """Return the shared models."""
    dot, einsum, softmax = "jax.numpy.dot", "jax.numpy.einsum", "jax.nn.softmax"
    return [
        Model(
            "mlp",
            mlp,
            lambda: (
                {
                    **{f"layer_{i}": _weights(w=(4, 4), b=(4,)) for i in range(2)},
                    "shared": np.eye(4, dtype=np.float32),
                },
                _ones(3, 4),
            ),
            (dot,),
            (
                "encoder/layer_0/dot:0",
                "encoder/layer_0/dot:1",
                "encoder/layer_1/dot:0",
                "encoder/layer_1/dot:1",
                "dot:0",
            ),
            (
                ("encoder/layer_0/dot:0", ("args[1]", "args[0]['layer_0']['w']")),
                ("encoder/layer_0/dot:1", (None, "args[0]['shared']")),
                ("encoder/layer_1/dot:0", (None, "args[0]['layer_1']['w']")),
                ("encoder/layer_1/dot:1", (None, "args[0]['shared']")),
                ("dot:0", (None, "args[0]['shared']")),
            ),
        ),
        Model(
            "transformer",
            transformer,
            lambda: (
                {
                    "attention": _weights(q=(4, 2, 2), k=(4, 2, 2), v=(4, 2, 2), out=(2, 2, 4)),
                    "mlp": _weights(up=(4, 8), down=(8, 4)),
                },
                _weights(x=(3, 4))["x"],
            ),
            (einsum, softmax, "jax.nn.gelu"),
            (
                *(f"attention/einsum:{i}" for i in range(4)),
                "attention/softmax:0",
                *(f"attention/einsum:{i}" for i in range(4, 6)),
                "mlp/einsum:0",
                "mlp/gelu:0",
                "mlp/einsum:1",
            ),
            (
                ("attention/einsum:0", (None, None, "args[0]['attention']['q']")),
                ("attention/einsum:3", (None, None, None)),
                ("attention/einsum:5", (None, None, "args[0]['attention']['out']")),
                ("mlp/einsum:1", (None, None, "args[0]['mlp']['down']")),
            ),
        ),
        Model(
            "convolutions",
            convolutions,
            lambda: (
                [*_weights(a=(3, 3, 1, 2), b=(3, 3, 2, 2), c=(2, 3)).values()],
                _ones(2, 4, 4, 1),
            ),
            ("jax.lax.conv_general_dilated", "jax.numpy.mean", "jax.numpy.matmul"),
            (
                "stage/conv_general_dilated:0",
                "stage/conv_general_dilated:1",
                "head/mean:0",
                "head/matmul:0",
            ),
            (
                ("stage/conv_general_dilated:0", ("args[1]", "args[0][0]", None, None)),
                ("stage/conv_general_dilated:1", (None, "args[0][1]", None, None)),
                ("head/matmul:0", (None, "args[0][2]")),
            ),
        ),
        Model(
            "recurrent",
            recurrent,
            lambda: (
                _weights(state=(4, 4), input=(4, 4), embed=(4, 4), head=(4, 2)),
                _ones(3, 4),
            ),
            (dot,),
            ("rnn/dot:0", "rnn/cell/scan(cell)/dot:0", "rnn/cell/scan(cell)/dot:1", "dot:0"),
            (
                ("rnn/dot:0", ("args[1]", "args[0]['embed']")),
                ("dot:0", (None, "args[0]['head']")),
            ),
            staged=True,
        ),
        Model(
            "layers in a scan",
            layers_in_a_scan,
            lambda: (
                {"blocks": _weights(up=(3, 4, 8), down=(3, 8, 4)), **_weights(**{"in": (4, 4)})},
                _ones(2, 4),
            ),
            (dot, softmax),
            (
                "blocks/dot:0",
                "blocks/up/scan(block)/dot:0",
                "blocks/up/scan(block)/softmax:0",
                "blocks/down/scan(block)/dot:0",
                "dot:0",
            ),
            (("blocks/dot:0", ("args[1]", "args[0]['in']")),),
            staged=True,
        ),
        Model(
            "branches",
            branches,
            lambda: (_weights(narrow=(4, 4), up=(4, 8), down=(8, 4)), _ones(2, 4)),
            (dot,),
            (
                "first/wide/cond(wide)/dot:0",
                "first/wide/cond(wide)/dot:1",
                "first/cond(narrow)/dot:0",
                "second/switch(narrow)/dot:0",
                "second/wide/switch(wide)/dot:0",
                "second/wide/switch(wide)/dot:1",
            ),
            staged=True,
        ),
        Model(
            "iterations",
            iterations,
            lambda: (_weights(inner=(4, 4), outer=(4, 4)), _ones(2, 4)),
            (dot,),
            ("fori_loop(outer)/dot:0", "solve/while_body(advance)/dot:0"),
            staged=True,
            differentiable=False,
        ),
        Model(
            "per example",
            per_example,
            lambda: (_weights(w=(4, 4), head=(4, 2)), _ones(3, 4)),
            (dot,),
            ("update/energy/dot:0", "dot:0"),
            (
                ("update/energy/dot:0", (ANY, "args[0]['w']")),
                ("dot:0", (None, "args[0]['head']")),
            ),
        ),
    ]

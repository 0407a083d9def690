"""Programs with parameters that are reached in many ways."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYOUT = ("NHWC", "HWIO", "NHWC")


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def equations(fn, *args):
    """Yield every equation of ``fn``'s jaxpr, with the loops around it."""

    def visit(jaxpr, within):
        for eqn in jaxpr.eqns:
            yield eqn, within
            params = dict(eqn.params)
            # Of a choice by platform, only the default branch, for any other platform.
            platforms = params.pop("branches_platforms", None)
            if platforms is not None:
                params = {"branch": params["branches"][platforms.index(None)]}
            for inner in jax.tree.leaves(
                list(params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from visit(inner, (*within, eqn.primitive.name))

    return list(visit(jax.make_jaxpr(fn)(*args).jaxpr, ()))


CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def contractions(fn, *args, results=False):
    """Return dtypes of contractions' operands, and of results if ``results``."""
    return [
        tuple(v.aval.dtype.name for v in (*eqn.invars[:2], *(eqn.outvars if results else ())))
        for eqn, _ in equations(fn, *args)
        if eqn.primitive.name in CONTRACTIONS
    ]


@jax.jit
def block(w, x):
    return jnp.tanh(x @ w)


def stack(ws, x):
    return lax.scan(lambda h, w: (block(w, h), None), x, ws)[0]


def nested_stack(ws, x):
    return lax.scan(lambda h, w: (stack(w, h), None), x, ws)[0]


def remat_stack(ws, x):
    return lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.T), None)), x, ws)[0]


def conv(k, x):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=LAYOUT)


def transposed_kernel(k, x):
    return conv(k.transpose(2, 3, 1, 0), x)


def tied(params, x):
    h = jnp.tanh(jnp.take(params["table"], x, axis=0) @ params["w"])
    return h @ params["table"].T


def indexed(params, x):
    return params["table"][x] @ params["table"].T


def attention(params, x):
    """Grouped queries: two heads of queries share one of keys and values."""
    q = jnp.einsum("btd,dghe->btghe", x, params["q"])
    k, v = (jnp.einsum("btd,dge->btge", x, params[name]) for name in "kv")
    scores = jax.nn.softmax(jnp.einsum("btghe,bsge->bghts", q, k))
    mixed = jnp.einsum("bghts,bsge->btghe", scores, v)
    return jnp.einsum("btghe,gheo->bto", mixed, params["o"])


def experts(params, x):
    sizes = jnp.array([3, 5, 0, 4], jnp.int32)
    h = jax.nn.relu(lax.ragged_dot(x, params["up"], sizes))
    return lax.ragged_dot(h, params["down"], sizes)


def heads(w, x):
    """Return a matrix that one contraction keeps and another sums."""
    q = x @ w
    return jnp.einsum("bhe,dhe->bhd", q.reshape(4, 4, 4), w.reshape(8, 4, 4))


# name: function, parameters' shapes, the other argument, contractions of int8 in w8a8.
PROGRAMS = {
    "operator": (lambda w, x: x @ w, (8, 6), (4, 8), 1),
    "left": (lambda w, x: w @ x.T, (6, 8), (4, 8), 1),
    "transposed": (lambda w, x: x @ w.T, (6, 8), (4, 8), 1),
    "moveaxis": (lambda w, x: x @ jnp.moveaxis(w, -1, 0), (6, 8), (4, 8), 1),
    "cast": (
        lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        (8, 6),
        (4, 8),
        1,
    ),
    "reshaped, split": (
        lambda w, x: jnp.einsum("bd,dhe->bhe", x, w.reshape(8, 2, 3)),
        (8, 6),
        (4, 8),
        1,
    ),
    "reshaped, merged": (lambda w, x: x @ w.reshape(8, 6), (8, 2, 3), (4, 8), 1),
    "reshaped, contracted": (lambda w, x: x @ w.reshape(8, 6), (2, 4, 6), (4, 8), 1),
    "heads": (heads, (8, 16), (4, 8), 2),
    "twice": (lambda w, x: jnp.tanh(x @ w) @ w.T, (8, 6), (4, 8), 2),
    "jit": (lambda w, x: block(w, block(w, x)), (8, 8), (4, 8), 2),
    "closure in scan": (
        lambda w, x: lax.scan(lambda h, _: (h @ w, None), x, None, length=3)[0],
        (8, 8),
        (4, 8),
        1,
    ),
    "scan": (stack, (3, 8, 8), (4, 8), 1),
    "scan of scan": (nested_stack, (2, 3, 8, 8), (4, 8), 1),
    "scan of remat": (remat_stack, (3, 8, 8), (4, 8), 1),
    "cond": (
        lambda w, x: lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x @ w.T, w),
        (8, 8),
        (4, 8),
        2,
    ),
    "while": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w), x),
        (8, 8),
        (4, 8),
        1,
    ),
    "vmap over examples": (
        lambda w, x: jax.vmap(lambda row: jnp.tanh(row @ w) @ w.T)(x),
        (8, 6),
        (4, 8),
        2,
    ),
    "convolution": (conv, (3, 3, 2, 5), (2, 6, 6, 2), 1),
    "transposed kernel": (transposed_kernel, (5, 2, 3, 3), (2, 6, 6, 2), 1),
    "tied": (tied, {"table": (16, 8), "w": (8, 8)}, "ids", 2),
    "indexed": (indexed, {"table": (16, 8)}, "ids", 1),
    "grouped queries": (
        attention,
        {"q": (8, 2, 2, 4), "k": (8, 2, 4), "v": (8, 2, 4), "o": (2, 2, 4, 6)},
        (2, 5, 8),
        6,
    ),
    "experts": (experts, {"up": (4, 8, 6), "down": (4, 6, 8)}, (12, 8), 2),
    "three operands": (
        lambda params, x: jnp.einsum("bi,ij,jk->bk", x, params["a"], params["b"]),
        {"a": (8, 6), "b": (6, 7)},
        (4, 8),
        2,
    ),
}


def make(name, dtype=np.float32):
    """Return the function, its parameters, and its other argument."""
    fn, shapes, x, _ = PROGRAMS[name]
    if isinstance(shapes, tuple):
        (params,) = draw(shapes, dtype=dtype)
    else:
        params = dict(zip(shapes, draw(*shapes.values(), dtype=dtype), strict=True))
    if x == "ids":
        return fn, params, jnp.asarray([[1, 4, 9], [0, 15, 1]])
    return fn, params, draw(x, seed=1, dtype=dtype)[0]


@jax.custom_jvp
def dense(x, w):
    """Return a layer's result; its derivative is a rule with contractions."""
    return jnp.tanh(x @ w)


@dense.defjvp
def _dense_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = dense(x, w)
    return y, (1 - y * y) * (dx @ w + x @ dw)

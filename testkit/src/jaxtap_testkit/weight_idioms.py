"""Programs that take parameters apart or compute weights from them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MASK = (np.arange(48).reshape(8, 6) % 2).astype(np.float32)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


W, STACK, X = draw(8, 6), draw(3, 8, 8), draw(4, 8)
MASKS = np.stack([MASK, 1 - MASK])

# Programs that take parts of parameters, or compute weights from them, in all ways that were met
# in model libraries.
IDIOMS = {
    "split": (lambda p, x: sum(x @ v for v in jnp.split(p, 3, axis=1)), W),
    "index": (lambda p, x: sum(x @ p[i] for i in range(3)), STACK),
    "fori_loop": (lambda p, x: lax.fori_loop(0, 3, lambda i, c: c @ p[i], x), STACK),
    "index in a scan": (
        lambda p, x: lax.scan(
            lambda c, i: (c @ lax.dynamic_index_in_dim(p, i, 0, False), None), x, jnp.arange(3)
        )[0],
        STACK,
    ),
    "unstack": (lambda p, x: sum(x @ w for w in jnp.unstack(p)), STACK),
    "concatenate": (lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1), {"a": W, "b": -W}),
    "stack and vmap": (
        lambda p, x: jax.vmap(lambda w: x @ w)(jnp.stack([p["a"], p["b"]])),
        {"a": W, "b": -W},
    ),
    "flip": (lambda p, x: x @ jnp.flip(p, 0), W),
    "mask": (lambda p, x: x @ (p * MASK), W),
    "scale": (lambda p, x: x @ (p * 0.125), W),
    "weight norm": (
        lambda p, x: x @ (p["v"] / jnp.linalg.norm(p["v"], axis=0) * p["g"]),
        {"v": W, "g": draw(6)},
    ),
    "low rank": (
        lambda p, x: x @ (p["w"] + p["a"] @ p["b"]),
        {"w": W, "a": draw(8, 2), "b": draw(2, 6)},
    ),
    "pad": (lambda p, x: x @ jnp.pad(p, ((0, 2), (0, 0))), W[:6]),
    "tile": (lambda p, x: x @ jnp.tile(p, (2, 1)), W[:4]),
    "routed": (lambda p, x: jnp.einsum("ab,abc->ac", x, p[jnp.argmax(x[:, :3], 1)]), STACK),
    "in a jitted function": (lambda p, x: jax.jit(lambda w, x: x @ (w * 2))(p, x), W),
    "steps": (
        lambda p, x: lax.scan(lambda c, w: (jnp.tanh(c @ (w * w)), None), x, p)[0],
        STACK,
    ),
    "transposed and masked": (lambda p, x: x @ (p.T * MASK), W.T),
    "masked and transposed": (lambda p, x: x @ (p * MASK.T).T, W.T),
    "masked and used twice": (lambda p, x: (x @ (p * MASK)) @ (p * MASK).T, W),
    "masked and split": (lambda p, x: sum(x @ v for v in jnp.split(p * MASK, 2, axis=1)), W),
    "used as it is, too": (lambda p, x: x @ p + x @ (p * 0.5), W),
    "masked steps under remat": (
        lambda p, x: lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ (w * 0.1)), None)), x, p)[
            0
        ],
        STACK,
    ),
    "mapped and scaled": (
        lambda p, x: jax.vmap(lambda w, g: x @ (w * g))(p["w"], p["g"]),
        {"w": STACK, "g": draw(3, 1, 8, seed=1)},
    ),
    "masked in a branch": (
        lambda p, x: lax.cond(x[0, 0] > 9, lambda x: x @ p, lambda x: x @ (p * MASK), x),
        W,
    ),
    "a jitted norm": (lambda p, x: x @ jax.jit(lambda w: w / jnp.abs(w).sum(0))(p), W),
    "index, then scale": (lambda p, x: sum(x @ (p[i] * 0.1) for i in range(3)), STACK),
    "tanh of the transpose": (lambda p, x: jnp.einsum("bi,oi->bo", x, jnp.tanh(p.T)), W),
    "flipped kernel": (
        lambda p, x: lax.conv_transpose(x[None, :, :], p, (1,), "SAME", transpose_kernel=True),
        draw(3, 5, 8),
    ),
}

"""Programs with loops for tests of provider-odml, and the same with steps that are written out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import provider_odml as odml

from .odml_exports import normal

RULES = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")]
W, X = normal(4, 8, 8), normal(16, 8, seed=1)


def by_hand(body, c, xs, reverse=False, **options):
    """Compute what ``lax.scan`` does, in steps that are written out."""
    del options
    count = len(jax.tree.leaves(xs)[0])
    for i in range(count)[:: -1 if reverse else 1]:
        c, _ = body(c, jax.tree.map(lambda x, i=i: x[i], xs))
    return c, None


def layer(c, w):
    return jnp.tanh(c @ w), None


def stack(scan, w, x, part=lambda f: f, **options):
    return scan(part(layer), 10 * x, w, **options)[0]


def nested(scan, w, x):
    """Two groups of layers, the second with other values."""
    inner = jax.checkpoint(lambda c, w: scan(layer, 20 * c, w)[0])
    return scan(lambda c, w: (inner(c, w) / 16, None), x, w.reshape(2, 2, 8, 8))[0]


def branches(scan, w, x):
    def body(c, w_i):
        w, i = w_i
        return lax.cond(i % 2 == 0, lambda: jnp.tanh(c @ w), lambda: jnp.sin(c @ w)), None

    return scan(body, 10 * x, (w, jnp.arange(len(w))))[0]


PROGRAMS = {
    "scan": stack,
    "backwards": lambda scan, w, x: stack(scan, w, x, reverse=True),
    "unrolled by two": lambda scan, w, x: stack(scan, w, x, unroll=2),
    "remat in scan": lambda scan, w, x: stack(scan, w, x, jax.checkpoint),
    "scan in remat in scan": nested,
    "two calls of one body": lambda scan, w, x: (
        scan(layer, 10 * x, w)[0] + scan(layer, 0.1 * x, w)[0]
    ),
}


def error(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def forms(*names):
    """Return programs as one, with loops and with steps that are written out."""

    def form(scan):
        return lambda w, x: {name: PROGRAMS[name](scan, w, x) for name in names}

    def alone(scan):
        return lambda w, x: PROGRAMS[names[0]](scan, w, x)

    return map(form if len(names) > 1 else alone, (lax.scan, by_hand))


def while_loop(w, x):
    def step(state):
        i, c = state
        return i + 1, jnp.tanh(c @ w)

    return lax.while_loop(lambda state: state[0] < 3, step, (0, 10 * x))[1]

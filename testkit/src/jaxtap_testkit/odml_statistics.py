"""A program of two layers for tests of provider-odml, and its statistics."""

import functools
import json

import jax
import jax.numpy as jnp

from provider_odml import QuantStats, qat

from .odml_samples import MLP, W8A8, draw, mlp

X = draw(4, 6)
PARAMS = {"w": draw(6, 8, seed=1), "v": draw(8, 3, seed=2)}


def two(first="enc", second="dec", extra=False, act=jnp.tanh):
    """Two layers under the names that are given, with another operation between, or not."""

    def fn(p, x):
        with jax.named_scope(first):
            h = act(x @ p["w"])
        if extra:
            h = h + jnp.tanh(h)
        with jax.named_scope(second):
            return jnp.tanh(h) @ p["v"]

    return fn


def trained(fn=mlp, params=MLP, x=X, rules=(W8A8,), **options):
    model = qat(fn, rules, **options)
    stats = model.init(params, x)
    jax.jit(model)(params, x, quant_stats=stats)
    return stats


@functools.cache
def stats_of_two():
    return trained(two(), PARAMS)


def without(stats, *keys):
    """Statistics that lack sites: also in the manifest."""
    found = json.loads(stats.to_json())
    for key in keys:
        del found["sites"][key], found["manifest"]["sites"][key]
    return QuantStats.from_json(json.dumps(found))

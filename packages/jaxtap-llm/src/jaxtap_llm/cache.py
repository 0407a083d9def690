"""The KV cache by rule: the programs of a model carry it in a format, and the model stays as is."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import provider_xla as xla

from . import checkpoint, model
from .config import Config
from .rules import rules_for

KEYS_AND_VALUES = r"\['[kv]\d*'\]"
"""The paths of what is quantized: sums over all positions, beside them, stay float."""


def make_cache(
    config: Config, kind: str, batch: int, positions: int, dtype: Any = jnp.float32
) -> Any:
    """Return an empty cache, in one of ``rules.CACHES``.

    Args:
        kind: ``"float"``, or the qtype of quantized values with a scale per head and position.
        dtype: of the float form.
    """
    cache = model.make_cache(config, batch, positions, dtype)
    if kind == "float":
        return cache
    return _plan(config, kind, batch, positions, jnp.dtype(dtype)).quantize_cache(cache)


@functools.lru_cache(maxsize=32)
def _plan(config: Config, kind: str, batch: int, positions: int, dtype: Any) -> Any:
    """Return the plan of a decode step: there a program both writes to the cache and reads it."""
    cache = jax.eval_shape(lambda: model.make_cache(config, batch, positions, dtype))
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = functools.partial(model.decode, config)
    rule = xla.CacheRule("cache", path=KEYS_AND_VALUES, qtype=kind)
    provider = xla.PtqProvider([rule], strict=True)
    return provider.plan(step, checkpoint.shapes(config, dtype), tokens, cache, 0)


def applying(config: Config, plan: Any, kind: str | None) -> Any:
    """Return what makes of a program one for stored parameters and a cache in a format.

    Args:
        plan: of the parameters; None for float.
        kind: of the cache, one of ``rules.CACHES``; None for programs without one.
    """
    if plan is not None:
        return plan.apply
    if kind in (None, "float"):
        return lambda fn: fn
    return xla.PtqProvider(rules_for(config, None)).apply


def size_of(config: Config, kind: str) -> int:
    """Return the bytes of a cache for each position of a sequence, without states."""
    sizes = [
        sum(x.nbytes for x in jax.tree.leaves(make_cache(config, kind, 1, positions)))
        for positions in (64, 128)
    ]
    return (sizes[1] - sizes[0]) // 64

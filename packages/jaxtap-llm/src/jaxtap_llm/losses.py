"""How well a model expects a text."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from . import model
from .cache import applying, make_cache
from .config import Config, LlmError


def losses(config: Config, params: Any, tokens: Any) -> Any:
    """Return the nats of each token behind the first, float32 ``[batch, length - 1]``."""
    return _nats(model.logits(config, params, tokens[:, :-1]), tokens[:, 1:])


def losses_of_steps(config: Config, params: Any, tokens: Any, cache: Any) -> Any:
    """Return what ``losses`` does, by decoding: each token is expected from what a cache holds.

    Args:
        cache: an empty one, of ``length - 1`` positions or more.
    """

    def step(carry: Any, tokens: Any) -> Any:
        (cache, position), (token, expected) = carry, tokens
        found, cache = model.decode(config, params, token, cache, position)
        return (cache, position + 1), _nats(found, expected)

    pairs = tokens[:, :-1].T, tokens[:, 1:].T
    return lax.scan(step, (cache, jnp.int32(0)), pairs)[1].T


def counted_nats(config: Config, params: Any, tokens: Any, documents: Any, counted: Any) -> Any:
    """Return the nats of tokens that are learnt, all together: a float32 scalar.

    Gradients compute layers again instead of keeping what is inside them.

    Args:
        tokens: int ``[batch, length]``, rows of documents; ``documents`` as ``model.logits``.
        counted: bool, as tokens: whether the token behind is learnt from this one.
    """
    found = model.logits(config, params, tokens, documents, remat=True)
    return jnp.where(counted, _nats(found, jnp.roll(tokens, -1, axis=1)), 0).sum()


def _nats(logits: Any, tokens: Any) -> Any:
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def perplexity(
    config: Config,
    params: Any,
    tokens: Any,
    plan: Any = None,
    window: int = 512,
    batch: int = 1,
    cache: str | None = None,
) -> float:
    """Return the perplexity of a text, cut into windows of which each is seen alone.

    Args:
        params: float, or as stored by the plan.
        tokens: int ``[n]``; those that fill no window are left out, if there is one.
        window: tokens that are expected in each, from those before.
        batch: windows at once.
        cache: ``"float"`` or ``"int8"`` to decode a token at a time from such a cache; None to see
            each window at once, without a cache.

    Raises:
        LlmError: less than two tokens.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.size < 2:
        raise LlmError(f"The text must have two tokens or more, got {tokens.size}.")
    window = min(window, tokens.size - 1)
    starts = np.arange(0, tokens.size - window, window)
    windows = np.stack([tokens[i : i + window + 1] for i in starts])
    fn = functools.partial(losses if cache is None else losses_of_steps, config)
    run = jax.jit(applying(config, plan, cache)(fn))
    total = 0.0
    quiet = not sys.stderr.isatty()
    for i in tqdm(range(0, len(windows), batch), "perplexity", disable=quiet):
        part = windows[i : i + batch]
        held = ()
        if cache is not None:
            held = (make_cache(config, cache, len(part), window, params["norm"].dtype),)
        total += float(run(params, part, *held).sum())
    return math.exp(total / (window * len(windows)))

"""How well a model expects a text."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from . import model
from .config import LlmError


def losses(config, params, tokens):
    """Return the nats of each token behind the first, float32 ``[batch, length - 1]``."""
    found = model.logits(config, params, tokens[:, :-1])
    chosen = jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(found, axis=-1) - chosen


def perplexity(config, params, tokens, plan=None, window=512, batch=1):
    """Return the perplexity of a text, cut into windows of which each is seen alone.

    Args:
        params: float, or as stored by the plan.
        tokens: int ``[n]``; those that fill no window are left out, if there is one.
        window: tokens that are expected in each, from those before.
        batch: windows at once.

    Raises:
        LlmError: less than two tokens.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.size < 2:
        raise LlmError(f"The text must have two tokens or more, got {tokens.size}.")
    window = min(window, tokens.size - 1)
    starts = np.arange(0, tokens.size - window, window)
    windows = np.stack([tokens[i : i + window + 1] for i in starts])
    fn = functools.partial(losses, config)
    run = jax.jit(fn if plan is None else plan.apply(fn))
    total = 0.0
    quiet = not sys.stderr.isatty()
    for i in tqdm(range(0, len(windows), batch), "perplexity", disable=quiet):
        total += float(run(params, windows[i : i + batch]).sum())
    return math.exp(total / (window * len(windows)))

"""From a float folder and a text to a quantized folder: bits where they matter, and GPTQ.

Unlike ``quantized.quantize`` this has the whole model in memory, in float, and runs it on the text.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import provider_xla as xla

from . import checkpoint, floats, model, quantized
from .config import Config, LlmError
from .rules import FORMATS
from .tokenizer import read_tokenizer

SEEN = 2**15
"""Tokens that are seen at most."""
AT_ONCE = 512
"""Tokens of a batch, at least, if there are as many."""
MEASURED = 2048
"""Tokens on which formats are measured: each parameter in each format is run once."""
QTYPES = ("int2", "int3", "int4", "int5", "int6", "int8")
TILES = (32, 64, 128)
LEAST_BITS, MOST_BITS = 2.2, 8.5


def quantize(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    given: str | None,
    bits: float | None,
    text: str,
    window: int = 512,
) -> Any:
    """Quantize a folder for the least error on a text.

    Args:
        folder: config.json, safetensors files and tokenizer.json.
        out: a folder that is made.
        given: rules, as ``read_rules`` takes them; None with ``bits``.
        bits: of a weight on average, with its scales: each kind of matrix gets a format.
        text: to run the model on: windows that are spread over it, 32,768 tokens at most.
        window: tokens that are seen together.

    Returns:
        The plan of the whole model.

    Raises:
        LlmError: something in the folder or in a file of rules can't be used, or the text is too
            short, before anything is written; or ``out`` is a file, or of another model, of other
            rules or another text.
    """
    folder, out = Path(folder), Path(out)
    if out.exists() and not out.is_dir():
        raise LlmError(f"{out} must be a folder, got a file. Name another.")
    if bits is not None and not LEAST_BITS <= bits <= MOST_BITS:
        raise LlmError(
            f"--bits must be from {LEAST_BITS} to {MOST_BITS}, with scales, got {bits:g}."
        )
    config, files, rules, _ = quantized.check(folder, given or "int4")
    if given in FORMATS and FORMATS[given] is None:
        raise LlmError(
            f"--calibrate needs a format of weights, got {given}. Leave one of them out."
        )
    batches = batches_of(read_tokenizer(folder, config).encode(text), window)
    # The text decides about the formats, so another text makes another model.
    facts = quantized.facts_of(folder, files) | {
        "rules": [f"{bits} bits"] if bits is not None else [repr(rule) for rule in rules],
        "text": [hashlib.sha256(text.encode()).hexdigest(), window],
    }
    quantized.begin(folder, out, quantized.SOURCE, facts)
    params = checkpoint.gathered(config, floats.opened(folder).get)
    params = jax.tree.map(jnp.asarray, params)
    plan, stored = optimized(config, params, batches, rules, bits)
    # Those that a narrower rule has left nothing to decide would be reported at each start.
    used = sorted({record.rule for record in plan.ops if record.rule is not None})
    quantized.write(out, config, [plan.rules.rules[i] for i in used], stored)
    return plan


def batches_of(tokens: Any, window: int) -> list[np.ndarray]:
    """Return windows of a text, spread over it, int32 ``[batch, window]`` each.

    Raises:
        LlmError: there are less than 32 tokens.
    """
    tokens = np.asarray(tokens, np.int32)
    window = min(window, tokens.size)
    if tokens.size < 32:
        raise LlmError(f"The text to calibrate on must have 32 tokens or more, got {tokens.size}.")
    rows = max(1, min(AT_ONCE, tokens.size) // window)
    count = max(rows, min(SEEN, tokens.size) // window // rows * rows)
    starts = np.linspace(0, tokens.size - window, count).astype(int)
    windows = np.stack([tokens[i : i + window] for i in starts])
    return list(windows.reshape(-1, rows, window))


def optimized(
    config: Config,
    params: Any,
    batches: Any,
    rules: Any,
    bits: float | None = None,
    errors: Any = None,
) -> tuple[Any, Any]:
    """Return a plan of the whole model, and the parameters as it stores them, packed for no kernel.

    Args:
        params: float.
        batches: int32 tokens ``[batch, length]``, each.
        rules: of the formats, or of what has none and the formats of activations, with ``bits``.
        bits: of a weight on average; None for the rules' formats.
        errors: ``plan.allocation.errors`` of another number of bits, which are not measured again.
    """
    fn = functools.partial(model.logits, config)
    plan = xla.PtqProvider(rules).plan(fn, params, batches[0])
    if bits is not None:
        each = max(1, len(batches) * batches[0].size // MEASURED)
        rows = np.concatenate(batches)[::each]
        asked = {"qtypes": QTYPES, "tile_size": TILES, "error": divergence, "errors": errors}
        plan = plan.allocate(params, rows, budget_bits=bits, **asked)
    # Which is better depends on the format: Ranges clips, and Gptq moves later channels beyond what
    # is left, which costs 3 bits and more something, and 2 bits less than their wide steps.
    gptq = xla.Gptq(sequential=config.layers)
    data = [(one,) for one in batches]
    found = [
        plan.optimize(params, data, passes, prepack=False)
        for passes in ([gptq], [xla.Ranges(), gptq])
    ]
    return plan, _least(*found)


def _least(first: Any, second: Any) -> Any:
    """Return the parameters of two results of passes, of which each has the least error."""
    pairs = zip(first.report, second.report, strict=True)
    better = {
        one.path
        for one, other in pairs
        if other.after.get("Gptq", math.inf) < one.after.get("Gptq", math.inf)
    }

    def chosen(path: Any, one: Any, other: Any) -> Any:
        return other if f"args[0]{jax.tree_util.keystr(path)}" in better else one

    is_leaf = lambda x: hasattr(x, "qtype")  # noqa: E731
    return jax.tree_util.tree_map_with_path(chosen, first.params, second.params, is_leaf=is_leaf)


def divergence(expected: jax.Array, actual: jax.Array) -> jax.Array:
    """Return the mean divergence of two distributions over tokens, in nats.

    Args:
        expected: logits ``[..., vocabulary]``.
        actual: others.
    """
    log_p, log_q = jax.nn.log_softmax(expected), jax.nn.log_softmax(actual)
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))

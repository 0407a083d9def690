"""From a float folder and a text to a quantized one: bits where they matter, GPTQ, fitted scales.

Unlike ``quantized.quantize`` this has the whole model in memory, in float, and runs it on the text.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import provider_xla as xla
import quant_numerics as qn

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
QTYPES = ("int2", "int3", "int4", "nf4", "int5", "int6", "int8")
TILES = (32, 64, 128)
EPOCHS, RATE = 2, 2e-3
"""How often scales see the text to be fitted, and by how much the first step changes them."""
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
            short; or ``out`` is a file, or of another model, of other rules or another text.
            Nothing is written then.
        provider_xla.QuantizationError: no formats are within ``bits``. Nothing is written.
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
    quantized.check_begun(out, quantized.SOURCE, facts)
    params = checkpoint.gathered(config, floats.opened(folder).get)
    params = jax.tree.map(jnp.asarray, params)
    plan, stored = optimized(config, params, batches, rules, bits)
    # Only now: a size that no format has would leave a folder that is begun for it.
    quantized.begin(folder, out, quantized.SOURCE, facts)
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
        # A width that no tile divides got the largest divisor, whose scales may take more than its
        # numbers: there, a scale for each output is a choice, too.
        own = [w.granularity.tile_axes.values() for w in plan.weights.values()]
        divided = all(tile % min(TILES) == 0 for tiles in own for tile in tiles)
        tiles = TILES if divided else (*TILES, None)
        asked = {"qtypes": QTYPES, "tile_size": tiles, "error": divergence, "errors": errors}
        plan = plan.allocate(params, rows, budget_bits=bits, **asked)
    passes = [xla.Gptq(sequential=config.layers)]
    found = plan.optimize(params, [(one,) for one in batches], passes, prepack=False)
    return plan, fitted(config, params, found.params, batches)


def fitted(config: Config, params: Any, stored: Any, batches: Any) -> Any:
    """Return stored parameters with the scales that predict most like the float model.

    ``Gptq`` sees a matrix at a time. What all roundings do together to the predictions is made less
    here: each scale, and each number that stays float, has a factor, which Adam fits to the
    divergence of the predictions. Quantized values stay (the second phase of EfficientQAT, Chen et
    al. 2024, arXiv:2407.11062, with the float model to learn from).

    Args:
        params: float.
        stored: the same, quantized and packed for no kernel.
        batches: int32 tokens ``[batch, length]``, each.
    """
    leaves, tree = jax.tree.flatten(stored, is_leaf=_is_quantized)
    # Unpacked once: a step would take bits apart again.
    values = [leaf.unpacked() if _is_quantized(leaf) else leaf for leaf in leaves]
    multiplied = [x.scale if _is_quantized(x) else x for x in leaves]
    factors: Any = [jnp.ones(x.shape, jnp.float32) if _is_fitted(x) else None for x in multiplied]
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, EPOCHS * len(batches)))

    def loss(factors: Any, values: Any, params: Any, tokens: Any) -> jax.Array:
        # In float32, whatever scales have: their gradients would vanish in float16.
        now = [_restored(_multiplied(x, f)) for x, f in zip(values, factors, strict=True)]
        actual = model.logits(config, jax.tree.unflatten(tree, now), tokens, remat=True)
        return divergence(model.logits(config, params, tokens), actual)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(factors: Any, state: Any, values: Any, params: Any, tokens: Any) -> tuple[Any, Any]:
        grads = jax.grad(loss)(factors, values, params, tokens)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(factors, updates), state

    state = optimizer.init(factors)
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(len(batches)) for _ in range(EPOCHS)])
    for i in tqdm(order, desc="fitting scales", unit="step", disable=not sys.stderr.isatty()):
        factors, state = step(factors, state, values, params, batches[i])
    found = [_with_dtype(_multiplied(leaf, f), leaf)
             for leaf, f in zip(leaves, factors, strict=True)]  # fmt: skip
    return jax.tree.unflatten(tree, found)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, qn.QArray | qn.PackedQArray)


def _is_fitted(x: Any) -> bool:
    """Return whether numbers are fine enough for a factor: scales of a byte are a format's own."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def _multiplied(x: Any, factor: Any) -> Any:
    """Return a parameter with its scales, or what stays float, times a factor, in float32."""
    if factor is None:
        return x
    if not _is_quantized(x):
        return x.astype(jnp.float32) * factor
    return dataclasses.replace(x, scale=x.scale.astype(jnp.float32) * factor)


def _with_dtype(x: Any, like: Any) -> Any:
    """Return a parameter as it was stored."""
    if not _is_quantized(x):
        return x.astype(like.dtype)
    return dataclasses.replace(x, scale=x.scale.astype(like.scale.dtype))


def _restored(x: Any) -> Any:
    return qn.dequantize(x) if _is_quantized(x) else x


def divergence(expected: jax.Array, actual: jax.Array) -> jax.Array:
    """Return the mean divergence of two distributions over tokens, in nats.

    Args:
        expected: logits ``[..., vocabulary]``.
        actual: others.
    """
    log_p, log_q = jax.nn.log_softmax(expected), jax.nn.log_softmax(actual)
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))

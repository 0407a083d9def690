"""Trains a small model of bytes on Python's standard library, and compares formats on it."""

from __future__ import annotations

import functools
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import provider_xla as xla

from . import checkpoint, curves, model
from .bench import Timed
from .cache import size_of
from .config import Config
from .fields import parse_config
from .generate import Generator
from .losses import losses, perplexity
from .rules import FORMATS, rules_for
from .tokenizer import BYTES, ByteTokenizer

FIELDS = {
    "model_type": "llama",
    "vocab_size": BYTES,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}
WINDOW, BATCH = 128, 4
WINDOWS = 512
RATE = 2e-3
PROMPT = "def __init__(self, "
COMPLETION = 48
HELD_OUT = 16
"""Every so many files are not trained on."""

VARIANTS = {
    "float": ("float", None, "float"),
    "int8": ("int8", [], "float"),
    "int8, activations too": ("w8a8", [], "float"),
    "int4": ("int4", [], "float"),
    "int4, Hadamard and GPTQ": ("int4", [xla.Hadamard(), xla.Gptq()], "float"),
    "nf4": ("nf4", [], "float"),
    "float, int8 cache": ("float", None, "int8"),
    "int8, int8 cache": ("int8", [], "int8"),
}
"""By name: the format of weights, the passes (None for no quantization), and that of the cache."""


def read_corpus() -> Any:
    """Return bytes to train on and others to measure on: Python's own files, some held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 2000)
    files += sorted(folder.glob("asyncio/*.py")) + sorted(folder.glob("email/*.py"))
    parts = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    held_out = parts[::HELD_OUT]
    rest = [part for i, part in enumerate(parts) if i % HELD_OUT]
    return np.concatenate(rest), np.concatenate(held_out)


def train(config: Config, params: Any, corpus: Any, seconds: float, seed: int) -> Any:
    """Return trained parameters, and the losses of the steps in nats a byte.

    Adam (Kingma and Ba 2014, arXiv:1412.6980), with a rate that falls with the time that is left.
    """

    def loss(params: Any, tokens: Any) -> Any:
        return losses(config, params, tokens).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, tokens: Any, rate: Any, n: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        first, second = moments
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, second, grads)
        scale = rate * jnp.sqrt(1 - 0.98**n) / (1 - 0.9**n)
        params = jax.tree.map(
            lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), params, first, second
        )
        return params, (first, second), value

    rng = np.random.default_rng(seed)
    params = jax.device_put(params)
    moments = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    curve, start = [], None
    with tqdm(
        total=round(seconds), desc="training", unit="s", disable=not sys.stderr.isatty()
    ) as bar:
        while True:
            spent = 0.0 if start is None else time.perf_counter() - start
            if start is not None and spent >= seconds:
                return params, curve
            n = len(curve) + 1
            done = spent / seconds
            rate = RATE * min(1, 0.05 + 20 * done) * max(0.02, 1 - done)
            at = rng.integers(0, len(corpus) - WINDOW - 1, BATCH)
            tokens = np.stack([corpus[i : i + WINDOW + 1] for i in at]).astype(np.int32)
            params, moments, value = step(params, moments, tokens, rate, float(n))
            curve.append(float(value))
            start = start or time.perf_counter()  # the first step compiles
            bar.set_postfix_str(f"loss {curve[-1]:.3f}", refresh=False)
            bar.update(min(int(spent), bar.total) - bar.n)


def calibration_batches(corpus: Any) -> Any:
    """Return what passes look at: batches of windows of the text that was trained on."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(corpus) - WINDOW, (8, BATCH))
    return [(np.stack([corpus[i : i + WINDOW] for i in row]).astype(np.int32),) for row in starts]


def compare(config: Config, params: Any, corpus: Any, held_out: Any) -> Iterator[Any]:
    """Yield a row for each of ``VARIANTS``: perplexity, bytes of parameters and of a
    position of the cache, tokens a second, a completion.
    """
    fn, example = functools.partial(model.logits, config), jnp.zeros((1, WINDOW), jnp.int32)
    batches = calibration_batches(corpus)
    prompt = [ByteTokenizer().encode(PROMPT)]
    for name, (kind, passes, cache) in VARIANTS.items():
        plan, stored = None, params
        if passes is not None:
            plan = xla.PtqProvider(rules_for(config, FORMATS[kind])).plan(fn, params, example)
            stored = plan.optimize(params, batches, passes)[0] if passes else plan.quantize(params)
        # What a cache changes is seen where tokens are decoded from it.
        through = None if cache == "float" else cache
        found = perplexity(config, stored, held_out, plan, WINDOW, BATCH, through)
        generator = Generator(config, stored, plan, cache=cache)
        timed = Timed(generator)
        rates = []
        for run, tokens in (
            (lambda timed=timed: timed.prefill(WINDOW), WINDOW),
            (lambda timed=timed: timed.decode(WINDOW, 64), 1),
        ):
            run()  # compiles
            rates.append(tokens / min(run() for _ in range(5)))
        ids = np.concatenate(list(generator.stream(prompt, COMPLETION)), axis=1)[0]
        size = sum(x.nbytes for x in jax.tree.leaves(params)) if plan is None else plan.bytes_after
        position = size_of(config, cache)
        yield name, found, size, position, *rates, ByteTokenizer().decode(ids.tolist())


def run(seconds: float, seed: int, save: Any, windows: Any = WINDOWS) -> None:
    """Train, compare, and print what was found.

    Args:
        seconds: to train for.
        seed: of the parameters and the batches.
        save: a folder for the trained model, or None.
        windows: of unseen text that perplexity is measured on.
    """
    config = parse_config(FIELDS)
    corpus, held_out = read_corpus()
    held_out = held_out[: windows * WINDOW + 1]
    count = sum(x.size for x in jax.tree.leaves(checkpoint.shapes(config)))
    print(f"{count:,} parameters; {len(corpus):,} bytes to train on, {len(held_out):,} others")
    params, curve = train(config, checkpoint.init(config, seed), corpus, seconds, seed)
    print(f"{len(curve)} steps of {BATCH * WINDOW:,} bytes; loss in nats a byte:")
    print(curves.show(curve))
    if save:
        checkpoint.write(save, FIELDS, config, params)
        print(f"saved to {save}")
    print(f"\nperplexity of bytes of files that it has not seen, behind up to {WINDOW} bytes")
    print(
        f"{'':26}{'perplexity':>10}{'bytes':>12}{'cache/token':>13}{'prefill/s':>11}{'decode/s':>10}"
    )
    completions = []
    for name, found, size, position, prefill, decode, text in compare(
        config, params, corpus, held_out
    ):
        sizes = f"{size:12,}{position:13,}"
        print(f"{name:26}{found:10.4f}{sizes}{prefill:11,.0f}{decode:10,.0f}", flush=True)
        completions.append((name, text))
    print(f"\n{PROMPT!r} goes on")
    for name, text in completions:
        print(f"  {name:26}{text!r}")

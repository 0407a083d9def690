"""Perplexity of a trained model in each side's formats and runtime, with its speed."""

import functools
import math
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import llama_cpp_peer
import numpy as np

import provider_xla as xla
from jaxtap_llm import checkpoint, demo, model
from jaxtap_llm.bench import Timed
from jaxtap_llm.fields import parse_config
from jaxtap_llm.generate import Generator
from jaxtap_llm.losses import losses
from jaxtap_llm.rules import FORMATS, rules_for

from .llama_cpp import Native
from .processes import Side, in_a_process

WINDOW = 128
WINDOWS, FEW_WINDOWS = 512, 16
THEIRS = ("F32", "Q8_0", "Q5_K", "Q4_K", "Q4_1", "Q4_0")
OURS = {
    "float": (None, None),
    "int8": ("int8", []),
    "w8a8": ("w8a8", []),
    "int4": ("int4", []),
    "int4, GPTQ": ("int4", [xla.Gptq()]),
    "int4, Hadamard and GPTQ": ("int4", [xla.Hadamard(), xla.Gptq()]),
}
STEPS = 64


def train(folder, seconds, windows):
    """Train the model of the demo, and write it, and its text for both sides, to a folder."""
    config = parse_config(demo.FIELDS)
    corpus, held_out = demo.read_corpus()
    params, _ = demo.train(config, checkpoint.init(config), corpus, seconds, 0)
    checkpoint.write(folder, demo.FIELDS, config, params)
    write_files(folder, config, params, held_out, windows)


def write_files(folder, config, params, held_out, windows):
    """Write the text, of ASCII alone, and the model for llama.cpp in float32."""
    folder = Path(folder)
    # llama.cpp's tool cuts a line's end off at the end of the file: one byte more than windows.
    text = held_out[held_out < 128][: WINDOW * windows + 1]
    (folder / "text").write_bytes(text.tobytes())
    params = jax.tree.map(np.asarray, params)
    llama_cpp_peer.write_gguf(folder / "F32.gguf", config, params, vocabulary="bytes")


class Ours:
    """A format of the trained model in JAX."""

    def __init__(self, name, folder):
        kind, passes = OURS[name]
        self._config, params = checkpoint.read(folder)
        params = jax.tree.map(jnp.asarray, params)
        self._plan, stored = None, params
        if kind is not None:
            fn = functools.partial(model.logits, self._config)
            example = jnp.zeros((1, WINDOW), jnp.int32)
            rules = rules_for(self._config, FORMATS[kind])
            self._plan = xla.PtqProvider(rules).plan(fn, params, example)
            batches = demo.calibration_batches(demo.read_corpus()[0])
            optimize, quantize = self._plan.optimize, self._plan.quantize
            stored = optimize(params, batches, passes)[0] if passes else quantize(params)
        self.size = sum(x.nbytes for x in jax.tree.leaves(stored))
        self._params = stored
        self._timed = Timed(Generator(self._config, stored, self._plan))

    def perplexity(self, text, window):
        """Return that of the second half of each window, as llama.cpp's tool computes it."""
        tokens = np.frombuffer(Path(text).read_bytes(), np.uint8).astype(np.int32)
        windows = tokens[: tokens.size // window * window].reshape(-1, 8, window)
        fn = functools.partial(losses, self._config)
        run = jax.jit(fn if self._plan is None else self._plan.apply(fn))
        found = [run(self._params, part)[:, window // 2 :] for part in windows]
        return math.exp(np.concatenate(found).mean(dtype=np.float64))

    def decode(self, context, steps):
        return self._timed.decode(context, steps)


def measure(folder, seconds, windows, tools, rounds, progress):
    """Return rows: side, perplexity, bytes, tokens a second of each round.

    Args:
        folder: for files.
        seconds: to train for.
        windows: of text that the perplexity is of, in eights.
        tools: llama.cpp's own tools; None leaves it out.
        rounds: of decoding.
        progress: wraps what is iterated over.
    """
    folder = Path(folder)
    in_a_process(train, folder, seconds, windows)
    sides = {}
    if tools:
        exact = Native(tools, folder / "F32.gguf")
        for kind in THEIRS:
            path = folder / f"{kind}.gguf"
            sides[f"llama.cpp native {kind}"] = (
                exact if kind == "F32" else exact.quantized(path, kind)
            )
    for name in progress(OURS):
        sides[name] = Side(Ours, name, str(folder))
    try:
        found = {
            name: side.seconds("perplexity", str(folder / "text"), WINDOW)
            for name, side in progress(sides.items())
        }
        times = {name: [] for name in sides}
        for i in progress(range(rounds + 1)):
            for name, side in sides.items():
                took = side.seconds("decode", WINDOW, STEPS)
                if i:
                    times[name].append(1 / took)
    finally:
        for side in sides.values():
            side.close()
    return [(name, found[name], side.size, times[name]) for name, side in sides.items()]


def table(rows):
    """Return Markdown, in the order of perplexity.

    The last column is ours beside the fastest of llama.cpp's formats whose perplexity is at most
    0.2% above.
    """
    speeds = {name: statistics.median(times) for name, _, _, times in rows}
    titles = ["", "perplexity", "MB", "decode at 128", "times llama.cpp at equal perplexity"]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for name, found, size, times in sorted(rows, key=lambda row: row[1]):
        middle = f"{speeds[name]:.0f} ({min(times):.0f}-{max(times):.0f})"
        cells = [name, f"{found:.4f}", f"{size / 1e6:.2f}", middle, ""]
        equal = [one for one, other, *_ in rows if "llama" in one and other <= 1.002 * found]
        if name in OURS and equal:
            best = max(equal, key=speeds.get)
            cells[-1] = f"{speeds[name] / speeds[best]:.2f} ({best.split()[-1]})"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)

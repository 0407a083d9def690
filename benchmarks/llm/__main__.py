"""Language models of random weights beside llama.cpp and XLA in float: docs/benchmarks/llm.md.

uv run --group llm --group peers python benchmarks/language_models.py [--shape 0.5B]

Each side has a process, which is stopped while others are timed: threads of one side that wait for
work would take time from another. They are timed in turn, round by round; each timed call follows
another of the same side, so that its threads are awake and its caches are full.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "peers")]

import llama_cpp_peer  # noqa: E402
from examples.llm import checkpoint, model  # noqa: E402
from examples.llm.bench import Timed  # noqa: E402
from examples.llm.config import parse_config  # noqa: E402
from examples.llm.generate import Generator  # noqa: E402
from examples.llm.rules import FORMATS, rules_for  # noqa: E402

from provider_xla import PtqProvider  # noqa: E402

SHAPES = {
    "213M": {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
    },
    "0.5B": {  # Qwen2.5-0.5B
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
}
STEPS = 64
FLOAT_STEPS = 16
"""Of XLA in float, which decodes ten times slower."""


class LlamaCpp:
    """A side of llama.cpp, with the interface of ``Timed``: its server's own times."""

    def __init__(self, folder, config, params, qtype, batch):
        path = Path(folder) / f"{qtype}.gguf"
        llama_cpp_peer.write_gguf(path, config, params, qtype)
        self.size, self.vocabulary = path.stat().st_size, config.vocabulary
        self.llama = llama_cpp_peer.Llama(path, context=1152)
        if batch != 1:
            raise NotImplementedError("The server takes the prompts of a batch one by one.")

    def _run(self, length, **options):
        tokens = np.random.default_rng(0).integers(300, self.vocabulary, length)
        # One candidate: no time goes into sorting the vocabulary.
        return self.llama.complete(tokens, samplers=["top_k"], top_k=1, **options)["timings"]

    def prefill(self, length):
        found = self._run(length, n_predict=1)
        assert found["prompt_n"] == length, found
        return found["prompt_ms"] / 1e3

    def decode(self, context, steps):
        found = self._run(context, n_predict=steps + 1, cache_prompt=True)
        assert found["predicted_n"] == steps + 1, found
        return found["predicted_ms"] / steps / 1e3


def side_of(name, config, batch, folder):
    """Return what is timed, and its bytes."""
    params = checkpoint.init(config)
    if name.startswith("llama.cpp"):
        side = LlamaCpp(folder, config, params, name.split()[1], batch)
        return side, side.size
    if name.startswith("XLA"):
        dtype = jnp.bfloat16 if name == "XLA bfloat16" else jnp.float32
        stored, plan = jax.tree.map(lambda x: jnp.asarray(x, dtype), params), None
    else:
        dtype = jnp.float32
        fn, tokens = functools.partial(model.logits, config), jnp.zeros((1, 32), jnp.int32)
        plan = PtqProvider(rules_for(config, FORMATS[name])).plan(fn, params, tokens)
        stored = plan.quantize(params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
    return Timed(Generator(config, stored, plan, dtype), batch), size


def serve(connection, *of_side):
    """Make a side in this process, and time what is asked for until nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        side, size = side_of(*of_side, folder)
        connection.send(size)
        while (asked := connection.recv()) is not None:
            method, *numbers = asked
            getattr(side, method)(*numbers)
            connection.send(getattr(side, method)(*numbers))
    os._exit(0)  # llama.cpp's server has no end


class Side:
    """A side in a process, which runs only while it is asked."""

    def __init__(self, name, config, batch):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, config, batch))
        self._process.start()
        theirs.close()  # so that a process that dies is the end of what it sends
        self.size = self._pipe.recv()
        os.kill(self._process.pid, signal.SIGSTOP)

    def seconds(self, *asked):
        """Return what a method of the side returns."""
        os.kill(self._process.pid, signal.SIGCONT)
        self._pipe.send(asked)
        found = self._pipe.recv()
        os.kill(self._process.pid, signal.SIGSTOP)
        return found

    def close(self):
        self._process.kill()


def measure(made, prompts, contexts, rounds):
    """Return the tokens a second of each round, by what is measured and side."""
    runs = {}
    for name in made:
        steps = FLOAT_STEPS if name.startswith("XLA") else STEPS
        for n in prompts:
            runs[f"prefill {n}", name] = ("prefill", n), n
        for n in contexts:
            runs[f"decode at {n}", name] = ("decode", n, steps), 1
    times = {key: [] for key in runs}
    for i in tqdm(range(rounds + 1), "rounds", disable=not sys.stderr.isatty()):
        for key, (asked, tokens) in sorted(runs.items(), key=lambda item: item[0][0]):
            seconds = made[key[1]].seconds(*asked)
            if i:  # the first compiles
                times[key].append(tokens / seconds)
    return times


def table(times, made, batch):
    """Return Markdown: medians in tokens a second, and the range of the rounds."""
    kinds = list(dict.fromkeys(kind for kind, _ in times))
    lines = ["| | MB | " + " | ".join(kinds) + " |", "| --- " * (len(kinds) + 2) + "|"]
    for name, side in made.items():
        cells = [name, f"{side.size / 1e6:.0f}"]
        for kind in kinds:
            found = [batch * one for one in times[kind, name]]
            middle = f"{statistics.median(found):.{0 if min(found) > 100 else 1}f}"
            cells.append(f"{middle} ({min(found):.0f}-{max(found):.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    names = ["XLA float32", "XLA bfloat16", "llama.cpp Q8_0", "llama.cpp Q4_0"]
    names += ["int8", "w8a8", "int4"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="213M")
    parser.add_argument("--sides", nargs="+", choices=names, default=names)
    parser.add_argument("--prompts", nargs="*", type=int, default=[128, 512])
    parser.add_argument("--contexts", nargs="*", type=int, default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    if args.batch > 1:
        args.sides = [name for name in args.sides if not name.startswith("llama.cpp")]
    config = parse_config(SHAPES[args.shape])
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        made = {}
        for name in tqdm(args.sides, "preparing", disable=not sys.stderr.isatty()):
            made[name] = Side(name, config, args.batch)
            stack.callback(made[name].close)
        prepared = time.perf_counter()
        times = measure(made, args.prompts, args.contexts, args.rounds)
    print(f"{args.shape}, batch {args.batch}, tokens a second: median (least-most)\n")
    print(table(times, made, args.batch))
    print(
        f"\n{args.rounds} rounds, {os.cpu_count()} cores, JAX {jax.__version__}; "
        f"{prepared - start:.0f} s to prepare, {time.perf_counter() - prepared:.0f} s to time"
    )


if __name__ == "__main__":
    main()

"""llama.cpp's sides: its server from a wheel, and its own tools, built for this machine."""

import json
import re
import subprocess
from pathlib import Path

import llama_cpp_peer
import numpy as np

POSITIONS = 1152
TOOLS = ("llama-bench", "llama-batched-bench", "llama-perplexity", "llama-quantize")
TOOLS += ("llama-completion",)


class Wheel:
    """The server of ``xllamacpp``'s wheel in this process: its own times, batch 1."""

    def __init__(self, path, vocabulary):
        self.size, self._vocabulary = Path(path).stat().st_size, vocabulary
        self._llama = llama_cpp_peer.Llama(path, context=POSITIONS)

    def _run(self, length, **options):
        tokens = np.random.default_rng(0).integers(300, self._vocabulary, length)
        # One candidate: no time goes into sorting the vocabulary.
        return self._llama.complete(tokens, samplers=["top_k"], top_k=1, **options)["timings"]

    def prefill(self, length, batch):
        assert batch == 1, "The server takes the prompts of a batch one by one."
        found = self._run(length, n_predict=1)
        assert found["prompt_n"] == length, found
        return found["prompt_ms"] / 1e3

    def decode(self, context, steps, batch):
        assert batch == 1, "The server takes the prompts of a batch one by one."
        found = self._run(context, n_predict=steps + 1, cache_prompt=True)
        assert found["predicted_n"] == steps + 1, found
        return found["predicted_ms"] / steps / 1e3


class Native:
    """llama.cpp's own tools, which load the file at each call; loading is not timed.

    Args:
        folder: with the tools.
        path: the GGUF file.
        threads: of prefill and of decoding.
    """

    def __init__(self, folder, path, threads=2):
        self._folder, self._path, self._threads = Path(folder), Path(path), str(threads)
        self.size = self._path.stat().st_size

    def seconds(self, method, *numbers):
        """Return what a method returns, as ``Side`` does."""
        return getattr(self, method)(*numbers)

    def close(self):
        """Nothing runs between calls."""

    def prefill(self, length, batch=1):
        """Return the seconds that prompts of this length take."""
        if batch == 1:
            return self._bench("-p", length, "-n", 0)
        return self._batched(batch, length, 1)["t_pp"]

    def decode(self, context, steps, batch=1):
        """Return the seconds of a step behind prompts of length ``context``."""
        if batch == 1:
            return self._bench("-p", 0, "-n", steps, "-d", context) / steps
        return self._batched(batch, context, steps)["t_tg"] / steps

    def perplexity(self, text, window):
        """Return the perplexity of the second half of each window of a text."""
        options = ["-f", text, "-c", window, "-b", window]
        return float(self._logged(r"PPL = ([\d.]+)", "llama-perplexity", *options))

    def quantized(self, path, kind):
        """Return the tools with a file that is written in another format, all its matrices."""
        command = [self._folder / "llama-quantize", "--pure", "--allow-requantize"]
        run_checked([*command, self._path, path, kind])
        return Native(self._folder, path, self._threads)

    def _bench(self, *options):
        # Its first run is not counted: it warms up.
        found = self._run("llama-bench", *options, "-r", 1, "-o", "json")
        (one,) = json.loads(found.stdout)
        return one["samples_ns"][0] / 1e9

    def _batched(self, batch, prompt, steps):
        # Each sequence has a part of the context, in multiples of 256.
        size = batch * -(-(prompt + steps) // 256) * 256
        options = ["-npp", prompt, "-ntg", steps, "-npl", batch, "-c", size, "-b", 2048]
        found = self._logged(
            r"^(\{.*\})$", "llama-batched-bench", *options, "--output-format", "jsonl"
        )
        return json.loads(found)

    def _logged(self, pattern, tool, *options):
        """Return what a pattern finds in the log of a tool.

        The log is written by a thread, whose last lines the end of the process may cut off.
        """
        for _ in range(5):
            run = self._run(tool, *options)
            if found := re.search(pattern, run.stdout + run.stderr, re.MULTILINE):
                return found[1]
        raise RuntimeError(f"{tool} must print its result, got {run.stderr[-400:]}")

    def _run(self, tool, *options):
        command = [self._folder / tool, "-m", self._path, "-t", self._threads, *map(str, options)]
        return run_checked(command)


def run_checked(command):
    """Run a tool, and return what it printed.

    Raises:
        RuntimeError: it failed; says what it printed last.
    """
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{command[0]} ended with {run.returncode}: {run.stderr[-400:]}")
    return run


def check_tools(folder):
    """Return what is wrong with a folder of tools, or None."""
    missing = [name for name in TOOLS if not (Path(folder) / name).is_file()]
    return f"{folder} lacks {', '.join(missing)}. Build them as the page says." if missing else None

"""How long a process takes from its start to its first token, with files and programs cached."""

import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from jaxtap_llm import checkpoint
from jaxtap_llm.fields import parse_config

from .processes import in_a_process
from .shapes import SHAPES

ROOT = Path(__file__).parent.parent.parent
PROMPT = "".join(random.Random(0).choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=128))
"""A token for each character, on both sides."""


def write_folder(shape, folder):
    """Write a Hugging Face folder with random parameters, and a tokenizer of characters."""
    from tokenizers import Tokenizer, models

    fields = SHAPES[shape]
    config = parse_config(fields)
    checkpoint.write(folder, fields, config, checkpoint.init(config))
    vocabulary = {chr(33 + i): i for i in range(90)}
    more = range(len(vocabulary), config.vocabulary)
    vocabulary |= {f"<{i}>": i for i in more}
    Tokenizer(models.BPE(vocabulary, [])).save(str(Path(folder) / "tokenizer.json"))


def seconds_to_output(command, known):
    """Return the seconds until a process has written more than ``known`` bytes, or has ended.

    A token may show nothing; the end follows it.
    """
    # Python's compiled modules are files that are cached, too.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pipe, start = subprocess.PIPE, time.perf_counter()
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT, env=env) as run:
        written = b""
        while len(written.rstrip()) <= known:
            part = run.stdout.read1()
            if not part:
                if run.wait():
                    raise RuntimeError(f"{command[0]} failed: {run.stderr.read()[-400:].decode()}")
                break
            written += part
        found = time.perf_counter() - start
        run.kill()
    return found


def measure(shape, rules, gguf, tools, folder, rounds, progress):
    """Return the seconds of each round, by side.

    Args:
        rules: that ours is quantized with.
        gguf: llama.cpp's file of equal bits.
        tools: its own tools.
        folder: for files.
        rounds: after one that is not counted.
        progress: wraps what is iterated over.
    """
    folder = Path(folder)
    in_a_process(write_folder, shape, folder / "float")
    ours = [sys.executable, "-m", "interception_core", "llm"]
    stored, programs = folder / "stored", folder / "programs"
    quantize = ["quantize", folder / "float", stored, "--preset", rules]
    for command in (quantize, ["export", stored, programs]):
        subprocess.run([*ours, *command], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    generate = ["--prompt", PROMPT, "--count", "1", "--compilation-cache", folder / "cache"]
    sides = {
        "generate, of what quantize wrote": ([*ours, "generate", stored, *generate], len(PROMPT)),
        "generate, of what export wrote": ([*ours, "generate", programs, *generate], len(PROMPT)),
    }
    if tools:
        options = ["-m", gguf, "-t", "2", "-p", PROMPT, "-n", "1", "-c", "256", "--ignore-eos"]
        options += ["--temp", "0"]
        options += ["--no-warmup", "--no-display-prompt", "-no-cnv"]
        sides["llama.cpp native, llama-completion"] = (
            [Path(tools) / "llama-completion", *options],
            0,
        )
    found = {name: [] for name in sides}
    for i in progress(range(rounds + 1)):
        for name, (command, known) in sides.items():
            seconds = seconds_to_output(list(map(str, command)), known)
            if i:
                found[name].append(seconds)
    return found


def table(found):
    """Return Markdown: medians in seconds, and the range of the rounds."""
    lines = ["| | seconds |", "| --- | --- |"]
    for name, times in found.items():
        middle = f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
        lines.append(f"| {name} | {middle} |")
    return "\n".join(lines)

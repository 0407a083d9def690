"""Language models beside XLA in float, llama.cpp and onnxruntime: docs/benchmarks/llm.md.

uv run --group peers python -m benchmarks.language_models --page docs/benchmarks/llm.md
"""

import argparse
import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax
from tqdm import tqdm

sys.path.append(str(Path(__file__).parent.parent.parent / "peers"))

from . import first_token, page, quality
from .llama_cpp import check_tools
from .processes import in_a_process
from .shapes import QUICK
from .sides import FEW_STEPS, NAMES, STEPS, gguf_path, open_sides, write_gguf

progress = functools.partial(tqdm, disable=not sys.stderr.isatty(), leave=False)
FEW = ["XLA float32", "llama.cpp native Q8_0", "llama.cpp native Q4_0", "onnxruntime int4"]
FEW += ["int8", "w8a8", "int4"]


def measure(made, prompts, contexts, batches, rounds):
    """Return tokens a second of each round, by what is measured and side.

    Args:
        made: sides, by name.
        prompts: lengths, each with a batch: ``(128, 1)``.
        contexts: as prompts, behind which tokens are decoded.
        batches: sides that take more than one sequence.
        rounds: after one that is not counted, which compiles.
    """
    runs = {}
    for name in made:
        for kind, sizes in (("prefill", prompts), ("decode at", contexts)):
            for n, batch in sizes:
                if batch > 1 and name not in batches:
                    continue
                steps = FEW_STEPS if batch > 1 or name.startswith("XLA") else STEPS
                title = f"{kind} {n}" + (f", batch {batch}" if batch > 1 else "")
                if kind == "prefill":
                    runs[title, name] = ("prefill", n, batch), n * batch
                else:
                    runs[title, name] = ("decode", n, steps, batch), batch
    times = {key: [] for key in runs}
    for i in progress(range(rounds + 1), "rounds"):
        # All sides of one measurement, then the next one.
        for key, (asked, tokens) in sorted(runs.items(), key=lambda item: item[0][0]):
            seconds = made[key[1]].seconds(*asked)
            if i:
                times[key].append(tokens / seconds)
    return {key: times[key] for key in runs}


def several(names):
    """Return the sides that take several sequences at once."""
    return [name for name in names if "llama.cpp" not in name or "native" in name]


def speeds(shape, names, prompts, contexts, rounds, folder, tools):
    """Return the times of a shape, and the bytes of its sides."""
    with contextlib.ExitStack() as stack:
        bar = functools.partial(progress, desc=f"{shape}, preparing")
        made = open_sides(stack, shape, names, folder, tools, bar)
        times = measure(made, prompts, contexts, several(names), rounds)
    return times, {name: side.size for name, side in made.items()}


def of_batch(times, is_batch):
    """Return the times of one sequence, or of several."""
    return {key: found for key, found in times.items() if (", batch" in key[0]) == is_batch}


def run_213m(args, folder):
    contexts = [(128, 1), (1024, 1), (128, 8), (128, 16)]
    prompts = [(128, 1), (512, 1), (128, 8)]
    shape = args.shape("213M")
    times, sizes = speeds(shape, args.sides, prompts, contexts, args.rounds, folder, args.tools)
    one, more = of_batch(times, False), of_batch(times, True)
    yield f"213M, batch 1, tokens a second, {args.rounds} rounds:", page.table(one, sizes)
    kept = {name: size for name, size in sizes.items() if name in several(sizes)}
    yield "213M, several sequences at once, tokens a second of all:", page.table(more, kept)
    yield "213M, ratios beside the best of the others:", page.ratios(times)


def run_half_b(args, folder):
    names = [name for name in args.sides if name in FEW]
    rounds = min(args.rounds, 2)
    times, sizes = speeds(
        args.shape("0.5B"), names, [(128, 1)], [(128, 1)], rounds, folder, args.tools
    )
    yield f"0.5B, batch 1, tokens a second, {rounds} rounds:", page.table(times, sizes)


def run_experts(args, folder):
    names = [name for name in args.sides if name in FEW and "onnx" not in name]
    rounds = min(args.rounds, 2)
    times, sizes = speeds(
        args.shape("experts"), names, [(128, 1)], [(128, 1)], rounds, folder, args.tools
    )
    text = "Qwen 3 with experts (364M, of which a token uses 75M), tokens a second"
    yield f"{text}, {rounds} rounds:", page.table(times, sizes)


def run_first_token(args, folder):
    shape = args.shape("213M")
    gguf = gguf_path(folder, shape, "Q4_0")
    if args.tools and not gguf.exists():
        in_a_process(write_gguf, shape, ["Q4_0"], folder)
    bar = functools.partial(progress, desc="first token")
    found = first_token.measure(shape, "int4", gguf, args.tools, folder, args.rounds + 1, bar)
    yield (
        "213M in int4 and Q4_0, a prompt of 128 tokens: from the start of the process to the "
        "first token, files and compiled programs cached:",
        first_token.table(found),
    )


def run_quality(args, folder):
    bar = functools.partial(progress, desc="quality")
    windows = quality.FEW_WINDOWS if args.quick else quality.WINDOWS
    with tempfile.TemporaryDirectory(dir=folder) as own:
        rows = quality.measure(own, args.train, windows, args.tools, args.rounds, bar)
    yield (
        f"The demo's model after {args.train:.0f} s of training: perplexity of the second half "
        f"of {windows} windows of {quality.WINDOW} bytes that it has not seen, by each "
        "side's own program, and tokens a second:",
        quality.table(rows),
    )


PARTS = {
    "213M": run_213m,
    "0.5B": run_half_b,
    "experts": run_experts,
    "first-token": run_first_token,
    "quality": run_quality,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sides", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two layers, a small vocabulary and little text: whether everything runs",
    )
    parser.add_argument("--train", type=float, default=120, help="seconds to train for quality")
    parser.add_argument(
        "--tools",
        metavar="FOLDER",
        default=os.environ.get("JAXTAP_LLAMA_CPP"),
        help="llama.cpp's own tools (default $JAXTAP_LLAMA_CPP; without, its wheel alone)",
    )
    parser.add_argument(
        "--page", help="write the results of each part behind the mark of this page"
    )
    args = parser.parse_args()
    if args.quick and args.page:
        parser.error("--quick measures other models than the page is about. Leave --page out.")
    args.shape = lambda name: name + QUICK * args.quick
    if args.tools and (wrong := check_tools(args.tools)):
        parser.error(wrong)
    # So that the sides, which are stopped, end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    start, failed = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            begun, sections = time.perf_counter(), []
            try:
                for title, text in PARTS[part](args, folder):
                    sections.append((title, text))
                    print(f"{title}\n\n{text}\n", flush=True)
            except Exception:  # the parts behind it are measured nevertheless
                traceback.print_exc()
                failed.append(part)
                continue
            if args.page:
                page.write(args.page, part, sections, PARTS)
            print(f"({part}: {time.perf_counter() - begun:.0f} s)\n", flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all, JAX {jax.__version__}")
    if failed:
        sys.exit(f"These parts failed, see above: {', '.join(failed)}. Run them again: --parts.")


if __name__ == "__main__":
    main()

"""Writes docs/benchmarks/cuda.md from what tools/gpu_check found.

    python benchmarks/cuda_page.py FOLDER HEAD.md PAGE.md

FOLDER has found.json, and of the steps that ran speed.json, first.json, decoder.json, profile.json
and training.json. What HEAD.md says before the results stays.
"""

import json
import sys
from pathlib import Path

MARK = "<!-- results -->"


def ops(found):
    yield "| case | µs | TB/s | of a copy | XLA µs | XLA / kernel |"
    yield "|---|---|---|---|---|---|"
    for result in (result for result in found if "bytes" in result):
        kernel, xla = result["seconds"]["kernel"], result["seconds"]["xla"]
        rate = result["bytes"] / kernel
        yield (
            f"| {result['case']} | {kernel * 1e6:.1f} | {rate / 1e12:.2f} | "
            f"{rate / result['copy_bytes_per_second']:.0%} | {xla * 1e6:.1f} | {xla / kernel:.2f} |"
        )


def matmuls(found):
    yield "| case | µs | TFLOP/s | read, of a copy | XLA in bf16, µs | XLA / kernel |"
    yield "|---|---|---|---|---|---|"
    for result in (result for result in found if "flops" in result):
        kernel, xla = result["seconds"]["kernel"], result["seconds"]["xla"]
        share = ""
        if "read" in result:
            share = f"{result['read'] / kernel / result['copy_bytes_per_second']:.0%}"
        yield (
            f"| {result['case']} | {kernel * 1e6:.1f} | {result['flops'] / kernel / 1e12:.1f} | "
            f"{share} | {xla * 1e6:.1f} | {xla / kernel:.2f} |"
        )


def speed(given):
    side = given["side"]
    yield (
        f"Matmuls of a weight of {side} x {side}, and attention of {side // 2} tokens beside XLA's "
        f"own call of cuDNN, JAX {given['jax']}."
    )
    yield from ("", *matmuls(given["results"]), "")
    yield f"Arrays of {side} x {side} numbers of bfloat16 beside the ops' references in XLA."
    yield from ("", *ops(given["results"]))


def first(given):
    gpus = max(result["gpus"] for result in given["results"])
    beside = f", after a sum over {gpus} GPUs by NCCL" if gpus > 1 else ", on one GPU, without NCCL"
    yield f"First execution of a program in a fresh process{beside}, in ms:"
    yield from ("", "| case | warm-up | compile | first | second |", "|---|---|---|---|---|")
    for result in given["results"]:
        times = " | ".join(f"{1e3 * result[name]:.1f}" for name in ("compile", "first", "second"))
        yield f"| {result['case']} | {'yes' if result['warms'] else 'no'} | {times} |"


def decoder(given):
    yield f"A decoder ({given['shape']}), tokens a second:"
    yield from ("", "| side | MB | prompt | decoding | kernels |", "|---|---|---|---|---|")
    for result in given["results"]:
        kernels = ", ".join(name.removeprefix("te_ffi_kernels.") for name in result["kernels"])
        yield (
            f"| {result['case']} | {result['bytes'] / 1e6:.0f} | {result['prefill']:.0f} | "
            f"{result['decode']:.0f} | {kernels} |"
        )


LONGEST = 6


def profile(given):
    yield (
        f"Where the time of a program goes: its {LONGEST} longest kernels, and in *idle* what is "
        "left of a call when all kernels are taken off."
    )
    yield from ("", "| program | µs | idle | kernel | µs | launches |", "|---|---|---|---|---|---|")
    for result in given["results"]:
        idle = max(0, 1 - result["busy"] / result["us"])
        head = f"| {result['case']} | {result['us']:.0f} | {idle:.0%} |"
        for kernel in result["kernels"][:LONGEST]:
            name = kernel["kernel"].replace("|", "/")[:60]
            yield f"{head} `{name}` | {kernel['us']:.1f} | {kernel['launches']:.0f} |"
            head = "| | | |"


def training(given):
    yield (
        "Training steps (value and gradient of all parameters), in XLA. *Error*: how far the "
        "gradient is from that of bfloat16, relative."
    )
    yield from ("", "| model | width | tokens | side | ms | speed | error |")
    yield "|---|---|---|---|---|---|---|"
    for result in given["results"]:
        size = f"{result['model']} | {result['width']} | {result['tokens']}"
        found = f"{1e3 * result['seconds']:.2f} | {result['speed']:.2f} | {result['error']:.3f}"
        yield f"| {size} | {result['case']} | {found} |"


SECTIONS = {
    "speed": speed,
    "first": first,
    "decoder": decoder,
    "profile": profile,
    "training": training,
}


def page(folder, head):
    """Return the page's text."""
    found = json.loads((folder / "found.json").read_text())
    yield from (
        head.split(MARK)[0].rstrip(),
        "",
        MARK,
        "",
        f"Machine: {', '.join(found['gpu'])}.",
        "",
    )
    for step, checks in found["steps"].items():
        for name, outcome, said in checks:
            yield f"- {name}: {outcome}, {said} ({found['seconds'][step]:.0f} s)"
    for name, section in SECTIONS.items():
        path = folder / f"{name}.json"
        if name in found["steps"] and path.exists():
            yield from ("", *section(json.loads(path.read_text())))


def main():
    """Does what the command line says."""
    folder, head, out = map(Path, sys.argv[1:])
    text = "\n".join(page(folder, head.read_text() if head.exists() else ""))
    out.write_text(text.lstrip("\n") + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()

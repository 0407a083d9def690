"""The results as Markdown, written behind the mark of a page."""

import contextlib
import os
import platform
import statistics
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MARK = "<!-- results -->"
RATIOS = [
    ("int4 decodes, beside llama.cpp Q4_0", "int4", "Q4_0", "decode", 1.2),
    ("int8 decodes, beside llama.cpp Q8_0", "int8", "Q8_0", "decode", 1.2),
    ("int4 decodes, beside onnxruntime int4", "int4", "onnxruntime int4", "decode", None),
    ("int4 prefill, beside XLA float32", "int4", "XLA float32", "prefill", 2.3),
    ("w8a8 prefill, beside XLA float32", "w8a8", "XLA float32", "prefill", 4.5),
    ("int4 prefill, beside XLA bfloat16", "int4", "XLA bfloat16", "prefill", None),
    (
        "int4, bfloat16 prefill, beside XLA bfloat16",
        "int4, bfloat16",
        "XLA bfloat16",
        "prefill",
        None,
    ),
]
"""What is asked: ours, others (a part of their names; the best is taken), kind, aim."""


def median(found):
    """Return the text of a median, with the least and the most."""
    middle = statistics.median(found)
    digits = 0 if min(found) > 100 else 1
    return f"{middle:.{digits}f} ({min(found):.0f}-{max(found):.0f})"


def table(times, sizes):
    """Return Markdown: tokens a second.

    Args:
        times: of each round, by what is measured and side.
        sizes: bytes, by side.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in times))
    lines = ["| | MB | " + " | ".join(kinds) + " |", "| --- " * (len(kinds) + 2) + "|"]
    for name, size in sizes.items():
        cells = [median(times[kind, name]) if (kind, name) in times else "" for kind in kinds]
        lines.append("| " + " | ".join([name, f"{size / 1e6:.0f}", *cells]) + " |")
    return "\n".join(lines)


def ratios(times):
    """Return Markdown: medians of ours divided by the best of the others, beside the aims."""
    kinds = list(dict.fromkeys(kind for kind, _ in times))
    lines = ["| ratio | at | | aim |", "| --- | --- | --- | --- |"]
    for title, ours, others, start, aim in RATIOS:
        for kind in (kind for kind in kinds if kind.startswith(start)):
            theirs = {
                name: statistics.median(found)
                for (of, name), found in times.items()
                if of == kind and others in name and name != ours
            }
            if (kind, ours) not in times or not theirs:
                continue
            best = max(theirs, key=theirs.get)
            ratio = statistics.median(times[kind, ours]) / theirs[best]
            shown = f"{ratio:.2f}" + (f" ({best})" if len(theirs) > 1 else "")
            lines.append(f"| {title} | {kind} | {shown} | {aim or ''} |")
    return "\n".join(lines)


def machine():
    """Return the line about the machine and the versions."""
    found = []
    for name in ("jax", "xllamacpp", "onnxruntime"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    python = platform.python_version()
    return f"- {cpu()}, {os.cpu_count()} cores, Python {python}, {', '.join(found)}, {date.today()}"


def cpu():
    """Return the name of the CPU, with what its matmuls can use."""
    fields = {}
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", "").split()
    units = [
        text for flag, text in (("avx512_vnni", "AVX-512"), ("amx_int8", "AMX")) if flag in flags
    ]
    return " ".join(
        [fields.get("model name", platform.processor()), *(f"({one})" for one in units[-1:])]
    )


def write(path, sections):
    """Write the sections, (title, Markdown) each, behind the mark; what is above it stays."""
    path = Path(path)
    head = path.read_text().partition(MARK)[0] if path.exists() else ""
    body = "\n\n".join(f"{title}\n\n{text}" for title, text in sections)
    part = path.with_suffix(".part")
    part.write_text(f"{head}{MARK}\n\n{machine()}\n\n{body}\n")
    part.replace(path)

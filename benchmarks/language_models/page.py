"""The results as Markdown, written behind the mark of a page."""

import contextlib
import os
import platform
import re
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


def machine(packages=("jax", "xllamacpp", "onnxruntime")):
    """Return the line about the machine and the versions of what is installed of packages."""
    found = []
    for name in packages:
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


def write(path, part, sections, order):
    """Write a part's sections behind the mark; what is above it and other parts stay.

    Args:
        part: its name, and that of the block that is replaced or put in.
        sections: (title, Markdown) each.
        order: names of parts, in the order of their blocks.
    """
    path = Path(path)
    head, _, below = (path.read_text() if path.exists() else "").partition(MARK)
    blocks = dict(re.findall(r"<!-- part (.+?) -->\n+(.*?)\n*(?=<!-- part|\Z)", below, re.DOTALL))
    body = (f"{title}\n\n{text}" for title, text in sections)
    blocks[part] = "\n\n".join([machine(), *body])
    shown = (f"<!-- part {name} -->\n\n{blocks[name]}\n" for name in order if name in blocks)
    written = path.with_suffix(".part")
    written.write_text("\n".join([f"{head}{MARK}\n", *shown]))
    written.replace(path)

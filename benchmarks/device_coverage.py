"""The models of Qwix's coverage test, each exported alone: the table of docs/benchmarks/odml.md."""

import provider_odml as odml
from jaxtap_testkit.odml_coverage import CASES, result

KINDS = ("quantize", "dequantize", "float", "integer")


def rows():
    """Yield the table: operations of the file beside those that Qwix expects, and how exact it is.

    A dash is what Qwix's test doesn't count. The last columns are signal to noise in decibels.
    """
    head = ["model", "operations of the file", "Qwix expects", "steps off", "to QAT, dB"]
    head += ["to float, dB"]
    yield from ("| " + " | ".join(head) + " |", "| --- " * len(head) + "|")
    for name, case in CASES.items():
        try:
            found = result(case)
        except odml.OdmlError as error:
            yield f"| {name} | refused: {str(error).splitlines()[0][:80]} |"
            continue
        ours = " ".join(str(found.counts[kind]) for kind in KINDS)
        theirs = " ".join(str(case.expected.get(kind, "-")) for kind in KINDS)
        steps = "" if found.lsb is None else f"{found.lsb:.2f}"
        cells = [name, ours, theirs if case.expected else "", steps]
        yield "| " + " | ".join([*cells, f"{found.trained:.1f}", f"{found.exact:.1f}"]) + " |"

"""What a compiled program moves between devices, read from its HLO."""

import math
import re

_BYTES = {
    "s4": 0.5,
    "u4": 0.5,
    "pred": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f8e8m0fnu": 1,
    "f4e2m1fn": 0.5,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all"


def collectives(compiled):
    """Return the bytes of collectives' results, by kind and dtype.

    Args:
        compiled: what ``jax.jit(fn).lower(...).compile()`` returns, or the text of a program.
    """
    found = {}
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    lines = re.findall(rf"= (.*?) ({_KINDS})(?:-start)?\(", text)
    for types, kind in lines:
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", types):
            count = math.prod(int(size) for size in sizes.split(",") if size)
            place = kind, dtype
            found[place] = found.get(place, 0) + int(count * _BYTES[dtype])
    return found

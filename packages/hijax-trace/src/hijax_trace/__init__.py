"""hijax-trace: high-level JAX types, Box, and the engine that taps primitives under jit.

Importing this package does not import jax: names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._box.box import Box
    from ._box.jit import jit
    from ._box.types import BoxType, mut_types
    from ._proxy.moves import Move, MoveError
    from ._proxy.proxy import ArrayProxy, Part
    from ._tap.engine import TraceEngine
    from ._tap.expression import Expression
    from ._types.hiprim import (
        HiPrim,
        bdims_at_front,
        jvp_from_lin,
        linearize_from_jvp,
        unmap_avals,
        vjp_from_jvp,
        vjp_from_lin,
        vmap_rule,
    )
    from ._types.hitype import HiPspec, HiType, MappingSpec, register_hitype
    from ._types.inspect import is_high, lower, requires_low, typeof
    from ._types.primitive import HiPrimitive

    __version__: str

__all__ = [
    "ArrayProxy",
    "Box",
    "BoxType",
    "Expression",
    "HiPrim",
    "HiPrimitive",
    "HiPspec",
    "HiType",
    "MappingSpec",
    "Move",
    "MoveError",
    "Part",
    "TraceEngine",
    "bdims_at_front",
    "is_high",
    "jit",
    "jvp_from_lin",
    "linearize_from_jvp",
    "lower",
    "mut_types",
    "register_hitype",
    "requires_low",
    "typeof",
    "unmap_avals",
    "vjp_from_jvp",
    "vjp_from_lin",
    "vmap_rule",
]

_LAZY = {
    "ArrayProxy": "_proxy.proxy",
    "Box": "_box.box",
    "BoxType": "_box.types",
    "Expression": "_tap.expression",
    "HiPrim": "_types.hiprim",
    "HiPrimitive": "_types.primitive",
    "HiPspec": "_types.hitype",
    "HiType": "_types.hitype",
    "MappingSpec": "_types.hitype",
    "Move": "_proxy.moves",
    "MoveError": "_proxy.moves",
    "Part": "_proxy.proxy",
    "TraceEngine": "_tap.engine",
    "bdims_at_front": "_types.hiprim",
    "is_high": "_types.inspect",
    "jit": "_box.jit",
    "jvp_from_lin": "_types.hiprim",
    "linearize_from_jvp": "_types.hiprim",
    "lower": "_types.inspect",
    "mut_types": "_box.types",
    "register_hitype": "_types.hitype",
    "requires_low": "_types.inspect",
    "typeof": "_types.inspect",
    "unmap_avals": "_types.hiprim",
    "vjp_from_jvp": "_types.hiprim",
    "vjp_from_lin": "_types.hiprim",
    "vmap_rule": "_types.hiprim",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("hijax-trace")
    elif name in _LAZY:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

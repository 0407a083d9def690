"""hijax-trace: high-level JAX types, Box, and an engine that taps jitted programs.

Importing this package does not import jax. Each name is imported when it is first used.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .box.box import Box
    from .box.jit import jit
    from .box.types import BoxType, mut_types
    from .compat.jaxpr import used_inputs
    from .dataflow.expression import Expression, Leaf
    from .dataflow.nodes import is_cut
    from .dataflow.replay import carriers_of, mapped_axes, mapped_rows, replay, root_of
    from .engine import TraceEngine
    from .hi.hiprim import (
        HiPrim,
        Zero,
        bdims_at_front,
        instantiate_zeros,
        jvp_from_lin,
        linearize_from_jvp,
        unmap_avals,
        vjp_from_jvp,
        vjp_from_lin,
        vmap_rule,
    )
    from .hi.hitype import HiPspec, HiType, MappingSpec, register_hitype
    from .hi.inspect import is_high, lower, requires_low, typeof
    from .hi.primitive import HiPrimitive
    from .interpreter.handler_proxies import is_same, unsliced, untransposed
    from .patterns.attention import Attention, attention
    from .proxy.array_proxy import ArrayProxy
    from .proxy.carrier import Carrier
    from .proxy.move import Move, MoveError
    from .proxy.parts import Part, Shared
    from .proxy.shards import Shards
    from .staging.repeated import repeated

__version__ = version("hijax-trace")

__all__ = [
    "ArrayProxy",
    "Attention",
    "Box",
    "BoxType",
    "Carrier",
    "Expression",
    "HiPrim",
    "HiPrimitive",
    "HiPspec",
    "HiType",
    "Leaf",
    "MappingSpec",
    "Move",
    "MoveError",
    "Part",
    "Shards",
    "Shared",
    "TraceEngine",
    "Zero",
    "attention",
    "bdims_at_front",
    "carriers_of",
    "instantiate_zeros",
    "is_cut",
    "is_high",
    "is_same",
    "jit",
    "jvp_from_lin",
    "linearize_from_jvp",
    "lower",
    "mapped_axes",
    "mapped_rows",
    "mut_types",
    "register_hitype",
    "repeated",
    "replay",
    "requires_low",
    "root_of",
    "typeof",
    "unmap_avals",
    "unsliced",
    "untransposed",
    "used_inputs",
    "vjp_from_jvp",
    "vjp_from_lin",
    "vmap_rule",
]

_LAZY = {
    "ArrayProxy": "proxy.array_proxy",
    "Attention": "patterns.attention",
    "attention": "patterns.attention",
    "Box": "box.box",
    "BoxType": "box.types",
    "Carrier": "proxy.carrier",
    "Expression": "dataflow.expression",
    "HiPrim": "hi.hiprim",
    "HiPrimitive": "hi.primitive",
    "HiPspec": "hi.hitype",
    "HiType": "hi.hitype",
    "Leaf": "dataflow.expression",
    "MappingSpec": "hi.hitype",
    "Move": "proxy.move",
    "MoveError": "proxy.move",
    "Part": "proxy.parts",
    "Shards": "proxy.shards",
    "Shared": "proxy.parts",
    "TraceEngine": "engine",
    "Zero": "hi.hiprim",
    "bdims_at_front": "hi.hiprim",
    "carriers_of": "dataflow.replay",
    "instantiate_zeros": "hi.hiprim",
    "is_cut": "dataflow.nodes",
    "is_high": "hi.inspect",
    "is_same": "interpreter.handler_proxies",
    "jit": "box.jit",
    "jvp_from_lin": "hi.hiprim",
    "linearize_from_jvp": "hi.hiprim",
    "lower": "hi.inspect",
    "mapped_axes": "dataflow.replay",
    "mapped_rows": "dataflow.replay",
    "mut_types": "box.types",
    "register_hitype": "hi.hitype",
    "repeated": "staging.repeated",
    "replay": "dataflow.replay",
    "requires_low": "hi.inspect",
    "root_of": "dataflow.replay",
    "typeof": "hi.inspect",
    "unmap_avals": "hi.hiprim",
    "unsliced": "interpreter.handler_proxies",
    "untransposed": "interpreter.handler_proxies",
    "used_inputs": "compat.jaxpr",
    "vjp_from_jvp": "hi.hiprim",
    "vjp_from_lin": "hi.hiprim",
    "vmap_rule": "hi.hiprim",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The operations of a program, as TraceEngine shows them to handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from interception_core import Interceptor, OpCall, TargetError, primitive_names

from .. import compat
from ..engine import TraceEngine

_BY_MODULE = {
    "jax.numpy": """
        dot matmul einsum tensordot inner outer vdot mean var std sum max min prod cumsum take
        take_along_axis where concatenate stack argmax argmin sort argsort linalg.norm""",
    "jax.nn": """
        softmax log_softmax logsumexp gelu silu relu relu6 leaky_relu elu selu sigmoid softplus
        hard_swish glu standardize one_hot dot_product_attention""",
    "jax.image": "resize",
    "jax.lax": "conv_general_dilated ragged_dot reduce_window",
    "flax.linen": """
        Dense.__call__ DenseGeneral.__call__ Conv.__call__ Embed.__call__ LayerNorm.__call__
        RMSNorm.__call__ GroupNorm.__call__ BatchNorm.__call__ avg_pool max_pool""",
    "flax.nnx": """
        Linear.__call__ LinearGeneral.__call__ Conv.__call__ Embed.__call__ LayerNorm.__call__
        RMSNorm.__call__ GroupNorm.__call__ BatchNorm.__call__""",
    "equinox.nn": """
        Linear.__call__ Conv.__call__ Embedding.__call__ LayerNorm.__call__ RMSNorm.__call__
        GroupNorm.__call__ MultiheadAttention.__call__""",
}
NAMES = tuple(f"{module}.{name}" for module, names in _BY_MODULE.items() for name in names.split())
"""The functions that are listed by name, if their package is imported."""

_CALLS = frozenset(
    {
        "jit",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vmap_call",
    }
)
"""Primitives that only call a program: its operations are listed instead."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program.

    Attributes:
        op_id: module path, name and number.
        level: "function" or "primitive".
        within: the names of the tapped functions around it.
        operands: the types of its array operands, such as ``f32[4,8]``.
        provenance: for each operand, the pytree path of the input that it is, or None.
        axes: for each operand, where that input's axes are.
        computed: for each operand, how it is computed from parameters, such as
            ``view: split(args[0])``; None if it is not a view or derived value of parameters.
        high: whether an operand has a high-level type, or the primitive is a high-level one.
        hi_prim: the class of the ``HiPrim``, if it is one.
    """

    op_id: str
    level: str
    within: tuple[str, ...]
    operands: tuple[str, ...]
    provenance: tuple[str | None, ...]
    axes: tuple[tuple | None, ...]
    computed: tuple[str | None, ...]
    high: bool
    hi_prim: str | None


def default_targets(loaded: Iterable[str]) -> list[str]:
    """Return the targets to list: well-known functions and all primitives.

    Args:
        loaded: the packages that are imported. Functions of others are left out.
    """
    names = [name for name in NAMES if name.partition(".")[0] in loaded]
    primitives = [f"primitive:{name}" for name in sorted(primitive_names() - _CALLS)]
    return [*filter(_is_there, names), *primitives]


def _is_there(name: str) -> bool:
    """Return whether the installed version's function can be tapped."""
    with contextlib.suppress(TargetError, LookupError):
        from interception_core.engine_api import Taps

        return bool(Taps(Interceptor({name: _ignore})).functions)
    return False


def _ignore(call: OpCall, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def operations(
    fn: Callable, args: tuple, targets: Iterable[str], params: str | None = None
) -> tuple[list[Operation], Any]:
    """Trace a function. Return its operations in order, and its jaxpr.

    Nothing is computed. A jitted function is shown once for each way in which it is called.

    Args:
        args: its positional arguments: arrays or ``jax.ShapeDtypeStruct``, in pytrees.
        params: prefix of the pytree paths of all parameters. If given, calls of one jitted function
            are shown one by one, since their operands are computed in different ways.

    Raises:
        TargetError: see ``TraceEngine.wrap``.
    """
    found: list[Operation] = []

    def is_parameter(path: str) -> bool:
        return params is not None and path.startswith(params)

    def computed(call: OpCall, value: Any) -> str | None:
        expression = None if params is None else call.expression(value)
        if expression is None:
            return None
        kind = expression.kind(is_parameter)
        return f"{kind}: {expression}" if kind in ("view", "derived") else None

    def look(call: OpCall, *args: Any, **kwargs: Any) -> Any:
        prim = kwargs.get("_prim")
        if prim is not None and compat.prim_program(prim) is not None:
            return NotImplemented  # only calls a program, too
        values = [leaf for leaf in jax.tree.leaves(args) if _is_value(leaf)]
        types = [compat.typeof(value) for value in values]
        operands = [call.operand(value) for value in values]
        found.append(
            Operation(
                call.op_id,
                call.level,
                tuple(sorted(call.within)),
                tuple(aval.str_short(short_dtypes=True) for aval in types),
                tuple(operand.provenance for operand in operands),
                tuple(operand.axes for operand in operands),
                tuple(computed(call, value) for value in values),
                prim is not None or any(compat.is_high_type(aval) for aval in types),
                None if prim is None else type(prim).__name__,
            )
        )
        return NotImplemented

    tapped = TraceEngine().wrap(fn, Interceptor(dict.fromkeys(targets, look)))
    jaxpr = jax.make_jaxpr(tapped)(*args)
    return found, jaxpr


def _is_value(leaf: Any) -> bool:
    return not isinstance(leaf, bool | int | float | complex | str) and compat.is_jax_type(leaf)


def high_jaxprs(jaxpr: Any, name: str = "the program") -> list[tuple[str, int]]:
    """Return names and sizes of the high jaxprs in a program."""
    jaxpr = compat.open_of(jaxpr)
    found = [(name, len(jaxpr.eqns))] if jaxpr.is_high else []
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, compat.JAXPRS):
                    found += high_jaxprs(inner, f"{name} / {compat.label(inner)}")
    return found

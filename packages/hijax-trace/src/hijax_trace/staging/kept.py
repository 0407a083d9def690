"""Kept: operations that meet a derivative in a nested function, or a transpose.

JAX takes the derivative while it traces the part, and stages only the derivative's operations. A
handler is to be asked about the operation before that, and can't be asked yet: where the operands
come from is known only when the program is re-interpreted. So the operation is staged as one
equation of the primitive ``kept``. Its derivatives, transposes and maps are equations of that
primitive, too. Each holds a ``Function``: a program, or a transformation of another function. The
interpreter applies the same transformations to the program with its operations tapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from interception_core.engine_api import is_settled

from .. import compat
from .functions import Program
from .mapped import Staged


def keeps(trace: Any, program: Any) -> bool:
    """Return whether operations of a trace are staged as kept ones.

    Args:
        trace: the trace.
        program: the program's own trace, in which handlers are asked early instead.
    """
    # Forward and backward would each compute the operation, with its collectives.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return False
    staging, transposes = compat.derivative_above_staging(trace)
    # A settled operation is the result of an engine inside, not a part of the program.
    if staging is None or is_settled():
        return False
    # JAX transposes what it traces here, and a handler's result has no transpose.
    return transposes or staging is not program


def can_keep(call: Staged) -> bool:
    """Return whether a call is a pure function of arrays."""
    opened = compat.open_of(call.jaxpr)
    avals = [atom.aval for atom in (*opened.invars, *opened.outvars)]
    return not opened.effects and not any(map(compat.is_high_type, avals))


def keep(call: Staged, values: Sequence[Any]) -> list[Any]:
    """Stage a call as a kept operation. Return its results."""
    return compat.kept_p.bind(*call.more, *values, function=Program(call.jaxpr))

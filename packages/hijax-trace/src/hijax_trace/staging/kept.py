"""Kept: what meets a derivative in a nested part of the program, kept as it was before.

JAX takes a derivative while it traces the part, and stages the operations of the derivative alone.
A handler is to be asked about the operation that the program calls, and can't be yet: only when the
program is run again is it known where the operands come from. So the operation is staged as one
equation, of a primitive whose derivatives, transposes and maps are equations of that primitive
again. Each holds a function: a program, or what was made of another function. Run again, the
function is made in the same way of the program with its operations tapped.
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
    """Return whether operations in ``trace`` are to be kept.

    What an engine within this one has answered is none of the program that it runs again. In a
    ``shard_map`` nothing is kept: forward and backward would each compute the operation, with its
    collectives.

    Args:
        trace: where they are.
        program: the trace of the program itself, where their handlers are asked at once.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return False
    staging = compat.derivative_above_staging(trace)
    return staging is not None and staging is not program and not is_settled()


def can_keep(call: Staged) -> bool:
    """Return whether a call is a function of arrays, without effects."""
    opened = compat.open_of(call.jaxpr)
    avals = [atom.aval for atom in (*opened.invars, *opened.outvars)]
    return not opened.effects and not any(map(compat.is_high_type, avals))


def keep(call: Staged, values: Sequence[Any]) -> list[Any]:
    """Make a call in the current trace, for which ``keeps`` holds. Return its results."""
    return compat.kept_p.bind(*call.more, *values, function=Program(call.jaxpr))

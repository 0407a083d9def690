"""Deferred: operations that meet the program's own ``vmap``, derivative or transpose.

JAX at once replaces an operation under ``vmap`` by one on whole batches, and one under ``grad`` by
the operations of its derivative. A handler is to be asked about the operation before that, and
often can't be asked yet: where the operands of a nested function come from is known only when the
program is re-interpreted. So the operation is staged as one equation of the primitive
``deferred``. Its derivatives, transposes and maps are equations of that primitive, too. Each holds
a ``Function``: a program, or a transformation of another function. The interpreter applies the same
transformations to the program with its operations tapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from interception_core.engine_api import is_settled

from .. import compat
from .functions import Program
from .marker import hoisted


class Staged(NamedTuple):
    """A staged function.

    Attributes:
        jaxpr: its closed jaxpr.
        more: the values of the leading inputs that are not arguments.
        results: its packed result, or what else it returns; None if it returns a flat list alone.
    """

    jaxpr: Any
    more: list[Any]
    results: Any = None


def staged(name: str, fn: Callable[..., Sequence[Any]], values: Sequence[Any]) -> Staged:
    """Stage a function of flat values."""
    info = compat.named_info(name)
    jaxpr, consts = compat.stage(fn, [compat.typeof(value) for value in values], info)
    return Staged(*hoisted(jaxpr, consts))


def defers(trace: Any, program: Any) -> bool:
    """Return whether operations of a trace are deferred.

    Args:
        program: the program's own trace. Where the operands of its operations come from is known,
            so that handlers are asked early instead, and JAX derives what they make.
    """
    # A settled operation is the result of an engine inside, not a part of the program.
    if is_settled():
        return False
    transforms = compat.transforms_above_staging(trace)
    if not transforms.derives:
        return transforms.maps
    # Forward and backward would each compute the operation, with its collectives.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return False
    # JAX transposes what it traces here, and a handler's result has no transpose.
    return transforms.transposes or transforms.staging is not program


def can_defer(call: Staged, trace: Any = None) -> bool:
    """Return whether a call is a function of arrays, and pure.

    Args:
        trace: a trace where it may have effects, if that only maps it.
    """
    opened = compat.open_of(call.jaxpr)
    atoms = (*opened.invars, *opened.outvars)
    if not all(compat.is_array_type(atom.aval) for atom in atoms):
        return False
    transforms = compat.transforms_above_staging(trace)
    return not opened.effects or (transforms.maps and not transforms.derives)


def defer(call: Staged, values: Sequence[Any]) -> list[Any]:
    """Stage a call as a deferred operation. Return its results."""
    transforms = compat.transforms_above_staging(compat.current_trace())
    program = Program(call.jaxpr, transforms.derives)
    return compat.deferred_p.bind(*call.more, *values, function=program)

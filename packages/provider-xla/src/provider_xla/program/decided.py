"""Decided: what a plan decided, held against each program that it is applied to.

Rules are functions of what an operation is (its name, module path and parameters), so that one
program is decided the same in its plan and where the plan is applied. Another program may not be:
a renamed scope, another length, an operation more. What it does to the parameters that the plan
quantizes must be what the plan says of them; what no plan speaks of, the rules decide there.

Operations are told apart by their parameters, not by their ids: a handler that reads ids is asked
about each of a hundred equal layers. Ranges are stored by id, so ids are read where there are any.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import quant_numerics as qn
from interception_core import OpCall
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

from ..errors import QuantizationError
from .facts import Code, Fact, joined
from .record import OpRecord

_Formats = tuple[str, ...]

_OF_SIZES = (Code.MISFIT, Code.BLOCK_MISFIT, Code.NO_TILES, Code.NO_BLOCKS_HERE)
"""Why an operation stays float that other sizes would let a rule quantize."""


class _Uses(NamedTuple):
    """What a plan decided about the operations of a parameter.

    Attributes:
        quantized: the rule and the formats of those that are quantized.
        left: the names of those that stay float.
        shown: the first that is quantized, for messages.
    """

    quantized: frozenset[tuple[int | None, _Formats]]
    left: frozenset[str]
    shown: OpRecord


class Decided:
    """What a plan decided about its operations."""

    def __init__(self, ops: Iterable[OpRecord]):
        self._by_id: dict[str, list[OpRecord]] = {}
        by_path: dict[str, list[OpRecord]] = {}
        for op in ops:
            self._by_id.setdefault(op.op_id, []).append(op)
            # What computes a weight reads no stored one, and a lookup reads rows as they are.
            if op.op_name == "take" or (op.why and op.why.code is Code.COMPUTES_WEIGHT):
                continue
            for path in op.paths:
                by_path.setdefault(path, []).append(op)
        uses = {path: _uses(found) for path, found in by_path.items()}
        self._uses = {path: one for path, one in uses.items() if one is not None}

    def key(self, path: str) -> Hashable:
        """Return a key of a parameter; equal keys mean that its operations are decided alike."""
        found = self._uses.get(path)
        return None if found is None else found[:2]

    def check(
        self,
        call: OpCall,
        name: str,
        paths: Collection[str],
        index: int | None,
        hows: Sequence[qn.HowToQuantize | None],
        why: Fact | None,
        is_linear: bool = False,
    ) -> None:
        """Raise QuantizationError unless the plan decided so about an operation's parameters.

        Args:
            call: the operation.
            name: what rules call it.
            paths: of the parameters behind its operands.
            index: the number of its rule.
            hows: how its operands are quantized here.
            why: why it stays float; None if it does not.
            is_linear: whether JAX transposes it, so that its activations stay float.
        """
        known = [self._uses[path] for path in paths if path in self._uses]
        if not known:
            if not paths and why is not None and why.code in _OF_SIZES:
                self._check_sizes(call, hows, index, why)
            return
        if is_linear:  # as a derivative of what is quantized
            is_same = any(index == rule for uses in known for rule, _ in uses.quantized)
        elif why is None:
            here = index, _formats(None if how is None else how.qtype for how in hows)
            is_same = any(here in uses.quantized for uses in known)
        else:
            is_same = any(name in uses.left for uses in known)
        if not is_same:
            raise _differs(call, known[0].shown, hows, index, why)

    def _check_sizes(self, call: OpCall, hows: Sequence[Any], index: int | None, why: Fact) -> None:
        """Raise QuantizationError if a product of activations is quantized in the plan."""
        found = self._by_id.get(call.op_id, ())
        if found and all(op.quantized for op in found):
            raise _differs(call, found[0], hows, index, why)

    def check_range(
        self,
        call: OpCall,
        contraction: Contraction,
        ndims: tuple[int, ...],
        paths: Collection[str],
    ) -> None:
        """Raise QuantizationError if an id is that of another operation in the plan.

        The ranges that are stored under it are then those of other activations.

        Args:
            call: an operation with a static range.
            contraction: what it computes.
            ndims: the number of axes of each operand.
            paths: of the parameters behind its operands.
        """
        found = self._by_id.get(call.op_id)
        if not found:  # there are no statistics for it, which is an error of their own
            return
        subject = subject_of(contraction, ndims)
        for op in found:
            is_alike = op.subject is None or op.subject[0] != subject[0] or op.subject == subject
            if set(op.paths) == set(paths) and is_alike:
                return
        planned = joined(found[0].paths) or "two activations"
        raise QuantizationError(
            f"{call.op_id} must be the operation that the plan has a static range for, of "
            f"{planned}, got another one, of {joined(paths) or 'two activations'}: operations that "
            "share a module path and a name are numbered in their order. Make a plan for this "
            "function and calibrate with it, or give the operations name scopes."
        )


def subject_of(contraction: Contraction, ndims: tuple[int, ...]) -> tuple[Hashable, Hashable]:
    """Return the axes of operands, and how a contraction takes them, whatever their sizes."""
    if isinstance(contraction, Matmul):
        how: Hashable = contraction.dims
    elif isinstance(contraction, Convolution | RaggedMatmul):
        how = contraction.numbers
    else:
        how = None
    return ndims, (type(contraction), how)


def _uses(ops: Sequence[OpRecord]) -> _Uses | None:
    """Return what is decided about the operations of a parameter; None if all stay float."""
    quantized = [op for op in ops if op.quantized]
    if not quantized:
        return None
    decided = frozenset((op.rule, _formats(op.qtypes)) for op in quantized)
    return _Uses(decided, frozenset(op.op_name for op in ops if not op.quantized), quantized[0])


def _formats(qtypes: Iterable[str | None]) -> _Formats:
    """Return the formats of both operands; another program may have them on the other side."""
    return tuple(sorted(qtype or "float" for qtype in qtypes))


def _differs(
    call: OpCall,
    planned: OpRecord,
    hows: Sequence[qn.HowToQuantize | None],
    index: int | None,
    why: Fact | None,
) -> QuantizationError:
    """Return the error of an operation that is decided otherwise than in the plan."""
    shown = " x ".join(qtype or "float" for qtype in planned.qtypes)
    if why is not None:
        here = f"float: {why}"
    else:
        here = " x ".join("float" if how is None else how.qtype for how in hows)
        here += f" by rule {index}"
    what = f"use {joined(planned.paths)}" if planned.paths else "run"
    return QuantizationError(
        f"{call.op_id} must {what} as the plan does, {shown} by rule "
        f"{planned.rule} ({planned.op_id}), got {here}. Make a plan for this function and these "
        "shapes: provider.plan(fn, params, ...). Or give its operations the names and module paths "
        "that the rules have."
    )

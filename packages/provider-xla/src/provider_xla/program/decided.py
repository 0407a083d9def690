"""Decided: what a plan decided, held against each program that it is applied to.

Rules are functions of what an operation is (its name, module path and parameters), so that one
program is decided the same in its plan and where the plan is applied. Another program may not be:
a renamed scope, another length, an operation more. What it does to the parameters that the plan
quantizes must be what the plan says of them. What the plan does not speak of, the rules decide
there. A rule that quantizes products of activations in the plan, and none there, is told.

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


_Decision = tuple[int | None, _Formats] | None
"""The rule of an operation and the formats of its operands; None where it stays float."""


class _Uses(NamedTuple):
    """What a plan decided about the operations of a parameter that it quantizes.

    Attributes:
        decided: the decisions.
        shown: the first operation that is quantized, for messages.
    """

    decided: frozenset[_Decision]
    shown: OpRecord


class Decided:
    """What a plan decided about its operations.

    Args:
        ops: the operations.
        names_operations: whether rules name operations, so that those that consist of others are
            decided in their parts.

    Attributes:
        products: by the number of a rule, the first product of activations that it quantizes.
    """

    def __init__(self, ops: Iterable[OpRecord], names_operations: bool):
        self.products: dict[int, str] = {}
        self._by_id: dict[str, list[OpRecord]] = {}
        by_path: dict[str, list[OpRecord]] = {}
        for op in ops:
            self._by_id.setdefault(op.op_id, []).append(op)
            if op.quantized and not op.paths and op.op_name != "take" and op.rule is not None:
                self.products.setdefault(op.rule, op.op_id)
            # What computes a weight reads no stored one, and a lookup reads rows as they are.
            is_other = op.op_name == "take" or (op.why and op.why.code is Code.COMPUTES_WEIGHT)
            if not is_other and not (names_operations and op.is_in_parts):
                for path in op.paths:
                    by_path.setdefault(path, []).append(op)
        self._uses: dict[str, _Uses] = {}
        for path, found in by_path.items():
            if (shown := next((op for op in found if op.quantized), None)) is not None:
                self._uses[path] = _Uses(frozenset(map(_decision, found)), shown)

    def key(self, path: str) -> Hashable:
        """Return a key of a parameter; equal keys mean that its operations are decided alike."""
        found = self._uses.get(path)
        return None if found is None else found.decided

    def check(
        self,
        call: OpCall,
        paths: Collection[str],
        index: int | None,
        hows: Sequence[qn.HowToQuantize | None],
        why: Fact | None,
        is_linear: bool = False,
    ) -> None:
        """Raise QuantizationError unless the plan decided so about an operation's parameters.

        ``why`` says why it stays float; ``is_linear``, that JAX transposes it, so that its
        activations do.
        """
        known = [self._uses[path] for path in paths if path in self._uses]
        if not known:
            if not paths and why is not None and why.code in _OF_SIZES:
                self._check_sizes(call, hows, index, why)
            return
        decided = {one for uses in known for one in uses.decided}
        if is_linear:  # as a derivative of what is quantized
            is_same = any(one is not None and one[0] == index for one in decided)
        else:
            if len(decided) > 1:  # only its id tells which of them is meant
                own = (op for op in self._by_id.get(call.op_id, ()) if {*op.paths} & {*paths})
                decided = set(map(_decision, own))
            formats = _formats(None if how is None else how.qtype for how in hows)
            is_same = (None if why is not None else (index, formats)) in decided
        if not is_same:
            several = not is_linear and any(len(uses.decided) > 1 for uses in known)
            raise _differs(call, known[0].shown, hows, index, why, several)

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


def _decision(op: OpRecord) -> _Decision:
    return (op.rule, _formats(op.qtypes)) if op.quantized else None


def _formats(qtypes: Iterable[str | None]) -> _Formats:
    """Return the formats of both operands; another program may have them on the other side."""
    return tuple(sorted(qtype or "float" for qtype in qtypes))


def _differs(
    call: OpCall,
    planned: OpRecord,
    hows: Sequence[qn.HowToQuantize | None],
    index: int | None,
    why: Fact | None,
    several: bool = False,
) -> QuantizationError:
    """Return the error of an operation that is decided otherwise than in the plan."""
    shown = " x ".join(qtype or "float" for qtype in planned.qtypes)
    if why is not None:
        here = f"float: {why}"
    else:
        here = " x ".join("float" if how is None else how.qtype for how in hows)
        here += f" by rule {index}"
    what = f"use {joined(planned.paths)}" if planned.paths else "run"
    if several:
        here += ", and the plan, which has several ways, has no such operation of this id"
    return QuantizationError(
        f"{call.op_id} must {what} as the plan does, {shown} by rule "
        f"{planned.rule} ({planned.op_id}), got {here}. Make a plan for this function and these "
        "shapes: provider.plan(fn, params, ...). Or give its operations the names and module paths "
        "that the rules have."
    )

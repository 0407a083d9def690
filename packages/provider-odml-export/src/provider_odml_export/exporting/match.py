"""Which operation of the program each operation of a float .tflite is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from provider_odml.features import ConstantUse, Decision, Passage, Scales, WeightUse

from ..litert import Model, Op, Subgraph, Tensor
from ..litert.model import FLOATS
from .float_program import marker
from .program import Exported

VIEWS = frozenset(
    {"RESHAPE", "TRANSPOSE", "SQUEEZE", "EXPAND_DIMS", "BROADCAST_TO", "SLICE", "STRIDED_SLICE"}
    | {"SPLIT", "SPLIT_V", "REVERSE_V2", "DYNAMIC_SLICE"}
)
"""Operations of the file that are in integers where what they read is."""


CONTRACTIONS = frozenset(
    {"FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "CONV_3D"}
)
"""Operations of the file that others are fused into."""


_TRANSFORMED = re.compile(r"\w+\((.*)\)")


@dataclass(frozen=True)
class Place:
    """An operand in a file, to find it again in the quantized one.

    Attributes:
        graph: the index of the subgraph.
        kind: the kind of the operation.
        output: the name of its output.
        slot: which operand.
    """

    graph: int
    kind: str
    output: str
    slot: int

    def tensor(self, model: Model) -> Tensor | None:
        """Return what is stored for it, if it is still there."""
        graph = model.subgraphs[self.graph]
        makers = {i: op for op in graph.ops for i in op.outputs}
        for op in graph.ops:
            if op.name == self.kind and graph.tensors[op.outputs[0]].name == self.output:
                place = op.inputs[self.slot]
                maker = makers.get(place)
                if maker is not None and maker.name == "DEQUANTIZE":
                    place = maker.inputs[0]
                return graph.tensors[place] if graph.tensors[place].nbytes else None
        return None


@dataclass(frozen=True)
class FileOp:
    """An operation of a float file, and what rules say.

    Attributes:
        graph: its subgraph in the file.
        op: the operation, with the indices of its tensors in the subgraph.
        op_id: the operation of the program; None for a view, and for what the file alone has.
        rule: the index of its rule; None for no rule.
        is_static: whether the rule gives it integer inputs and outputs with static ranges.
        is_view: whether it only moves values, and has the format of what it reads.
        is_lookup: whether it looks up rows of a table.
        has_parameters: whether its rule quantizes parameters of it.
        weights: where these are, which finds them again in the quantized file.
    """

    graph: Subgraph
    op: Op
    op_id: str | None = None
    rule: int | None = None
    is_static: bool = False
    is_view: bool = False
    is_lookup: bool = False
    has_parameters: bool = False
    weights: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Matches:
    """The operations of a file.

    Attributes:
        ops: all of them, in the order of the file.
        lost: operations with parameters to quantize that are not in the file under their names.
        unknown: operations of the file that compute, and are none of the program, if a rule is
            static.
    """

    ops: tuple[FileOp, ...]
    lost: tuple[str, ...]
    unknown: tuple[str, ...]


def names_of_op(graph: Subgraph, op: Op) -> str:
    """Return an operation's names: those of its outputs and constants, each ended by ";".

    The constants count since the operation that makes an output of the model has the name of that
    output, not one of the program's.
    """
    places = [index for index in op.inputs if index >= 0 and graph.tensors[index].nbytes]
    return "".join(f"{graph.tensors[i].name};" for i in (*op.outputs, *places) if i >= 0)


def match(model: Model, exported: Sequence[Exported]) -> Matches:
    """Find which operation of the program each operation of a file is.

    Args:
        model: the float file, made of ``float_program``.
        exported: its signatures.
    """
    return _Matcher(exported).match(model)


def _has_parameters(decision: Decision) -> bool:
    is_lookup = decision.node.op.kind is Scales.LOOKUP
    return any(
        isinstance(use, WeightUse) or (is_lookup and isinstance(use, ConstantUse))
        for use in decision.inputs.values()
    )


class _Matcher:
    def __init__(self, exported: Sequence[Exported]):
        self._exported = exported
        self._any_static = any(rule.is_static for one in exported for rule in one.plan.rules)
        self._decisions: dict[str, tuple[str, Decision]] = {}
        for one in exported:
            for op_id, decision in one.plan.decisions.items():
                if decision.node.op.kind is not Passage.OUTPUT:
                    self._decisions.setdefault(marker(op_id), (op_id, decision))
        self._ids = dict(self._decisions.values())
        # What is between marks has the path of its module, and not a separate name.
        self._between = {
            f"/{decision.node.module_path}/": op_id
            for op_id, decision in self._ids.items()
            if decision.node.begin is not None and decision.node.module_path
        }

    def match(self, model: Model) -> Matches:
        seen: set[str] = set()
        ops, unknown = [], []
        for graph in model.subgraphs:
            outputs = self._outputs(model, graph)
            for op in graph.ops:
                one = self._found(graph, op, outputs, seen)
                ops.append(one)
                is_float = any(graph.tensors[i].dtype in FLOATS for i in op.outputs)
                if is_float and self._any_static and one.op_id is None and not one.is_view:
                    unknown.append(f"{op.name} {graph.tensors[op.outputs[0]].name}")
        lost = (
            op_id
            for op_id, decision in self._ids.items()
            if _has_parameters(decision) and op_id not in seen
        )
        return Matches(tuple(ops), tuple(lost), tuple(unknown))

    def _found(self, graph: Subgraph, op: Op, outputs: Mapping[int, str], seen: set[str]) -> FileOp:
        op_ids = self._named(names_of_op(graph, op))
        seen.update(op_ids)
        if op.name in VIEWS:
            return FileOp(graph, op, is_view=True)
        op_ids = op_ids or [outputs[i] for i in op.outputs if i in outputs]
        if not op_ids:
            return FileOp(graph, op)
        op_id = max(op_ids, key=lambda each: self._rank(self._ids[each]))
        if op.name in CONTRACTIONS:
            op_id = self._contraction(op_id)
        seen.add(op_id)
        decision = self._ids[op_id]
        rule = None if decision.rule is None else self._exported[0].plan.rules[decision.rule]
        weights = [
            Place(graph.index, op.name, graph.tensors[op.outputs[0]].name, slot)
            for slot, i in enumerate(op.inputs)
            if i >= 0
            and (tensor := graph.tensors[i]).nbytes
            and tensor.dtype in FLOATS
            and len(tensor.shape) > 1
        ]
        has_parameters = _has_parameters(decision)
        return FileOp(
            graph,
            op,
            op_id,
            decision.rule,
            is_static=rule is not None and rule.is_static and not decision.is_float,
            is_lookup=decision.node.op.kind is Scales.LOOKUP,
            has_parameters=has_parameters,
            weights=tuple(weights) if has_parameters else (),
        )

    def _contraction(self, op_id: str) -> str:
        """Return the contraction of a parameter that an operation is fused into."""
        found: str | None = op_id
        while found in self._ids and not _has_parameters(self._ids[found]):
            node = self._ids[found].node
            if node.op.kind is Scales.CONTRACTION:
                return found
            found = next((use.tensor for use in node.activations), None)
        return found if found in self._ids else op_id

    def _named(self, names: str) -> list[str]:
        parts = [self._bare(part) for part in re.split("[/;]", names)]
        found = [self._decisions[part][0] for part in parts if part in self._decisions]
        found = found or [op_id for path, op_id in self._between.items() if path in names]
        return list(dict.fromkeys(found))

    def _bare(self, part: str) -> str:
        """Return a name's part without transformations such as vmap(...)."""
        while part not in self._decisions and (inner := _TRANSFORMED.fullmatch(part)):
            part = inner[1]
        return part

    @staticmethod
    def _rank(decision: Decision) -> int:
        """Return which of several operations decides: contractions of parameters first."""
        return 2 if _has_parameters(decision) else int(decision.node.op.kind is Scales.CONTRACTION)

    def _outputs(self, model: Model, graph: Subgraph) -> dict[int, str]:
        """Return the operations that make the outputs of the model."""
        found = {}
        for one in self._exported:
            signature = model.signatures[one.name]
            if signature.subgraph != graph.index:
                continue
            makers = [
                decision.node.uses[0].tensor if decision.node.uses else None
                for decision in one.plan.decisions.values()
                if decision.node.op.kind is Passage.OUTPUT
            ]
            places = [t.index for t in signature.outputs.values() if t.dtype in FLOATS]
            if len(makers) == len(places):
                pairs = zip(places, makers, strict=True)
                found.update({i: maker for i, maker in pairs if maker in self._ids})
        return found

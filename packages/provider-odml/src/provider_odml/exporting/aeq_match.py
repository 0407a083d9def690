"""Which operation of the program each operation of a float .tflite is, and what it gets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..capture.ops import Passage, Scales
from ..decide.decision import ConstantUse, Decision, WeightUse
from ..litert import AeqRule, Model, Op, Subgraph, names_of_op
from ..litert.model import FLOATS
from .aeq_place import Place
from .aeq_program import marker
from .program import Exported

VIEWS = frozenset(
    {"RESHAPE", "TRANSPOSE", "SQUEEZE", "EXPAND_DIMS", "BROADCAST_TO", "SLICE", "STRIDED_SLICE"}
    | {"SPLIT", "SPLIT_V", "REVERSE_V2", "DYNAMIC_SLICE"}
)
"""Operations of the file that are in integers where what they read is."""


PRODUCTS = frozenset(
    {"FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "CONV_3D"}
)
"""Operations of the file that others are fused into."""


_TRANSFORMED = re.compile(r"\w+\((.*)\)")


@dataclass
class Matches:
    """What the operations of a file get.

    Attributes:
        rules: exact for each operation; the last one that matches holds, and there is one.
        weights: by op id, where its parameters are in the file.
        lost: operations with parameters to quantize that are not in the file under their names.
        unknown: operations of the file that compute, and are none of the program.
    """

    rules: tuple[AeqRule, ...] = ()
    weights: dict[str, list[Place]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def has_parameters(decision: Decision) -> bool:
    """Returns whether an operation has parameters that its rule quantizes."""
    is_lookup = decision.node.op.kind is Scales.LOOKUP
    return any(
        isinstance(use, WeightUse) or (is_lookup and isinstance(use, ConstantUse))
        for use in decision.inputs.values()
    )


def match(
    model: Model, exported: Sequence[Exported], entries: Mapping[int, AeqRule | None]
) -> Matches:
    """Finds what each operation of a file gets.

    Args:
        model: the float file, made of ``float_program``.
        exported: its signatures.
        entries: by the number of a rule of the provider, what its operations get.
    """
    return _Matcher(exported, entries).match(model)


class _Matcher:
    def __init__(self, exported: Sequence[Exported], entries: Mapping[int, AeqRule | None]):
        self._exported = exported
        self._entries = entries
        self._decisions: dict[str, tuple[str, Decision]] = {}
        for one in exported:
            for op_id, decision in one.plan.decisions.items():
                if decision.node.op.kind is not Passage.OUTPUT:
                    self._decisions.setdefault(marker(op_id), (op_id, decision))
        self._ids = dict(self._decisions.values())
        # What is between marks has the path of its module, and no name of its own.
        self._between = {
            f"/{decision.node.module_path}/": op_id
            for op_id, decision in self._ids.items()
            if decision.node.begin is not None and decision.node.module_path
        }

    def match(self, model: Model) -> Matches:
        found = Matches()
        names: dict[tuple[AeqRule, str], list[str]] = {}
        seen: set[str] = set()
        for graph in model.subgraphs:
            static: dict[int, AeqRule] = {}
            outputs = self._outputs(model, graph)
            for op in graph.ops:
                entry = self._entry(graph, op, static, outputs, found, seen)
                if entry is not None:
                    names.setdefault((entry, op.name), []).append(names_of_op(graph, op))
        found.rules = tuple(_exact(entry, kind, each) for (entry, kind), each in names.items())
        found.lost = [
            op_id
            for op_id, decision in self._ids.items()
            if has_parameters(decision) and op_id not in seen and self._of(decision) is not None
        ]
        return found

    def _of(self, decision: Decision) -> AeqRule | None:
        return None if decision.rule is None else self._entries[decision.rule]

    def _entry(
        self,
        graph: Subgraph,
        op: Op,
        static: dict[int, AeqRule],
        outputs: Mapping[int, str],
        found: Matches,
        seen: set[str],
    ) -> AeqRule | None:
        """Returns what one operation gets; None leaves it in float."""
        op_ids = self._named(names_of_op(graph, op))
        seen.update(op_ids)
        if not op_ids:
            op_ids = [outputs[i] for i in op.outputs if i in outputs and op.name not in VIEWS]
        if op.name in VIEWS:
            before = next((static[i] for i in op.inputs if i in static), None)
            static.update({} if before is None else dict.fromkeys(op.outputs, before))
            return before
        if not op_ids:
            is_float = any(graph.tensors[i].dtype in FLOATS for i in op.outputs)
            if is_float and any(e and e.mode == "static" for e in self._entries.values()):
                found.unknown.append(f"{op.name} {graph.tensors[op.outputs[0]].name}")
            return None
        op_id = max(op_ids, key=lambda each: self._rank(self._ids[each]))
        if op.name in PRODUCTS:
            op_id = self._product(op_id)
        seen.add(op_id)
        decision = self._ids[op_id]
        entry = self._of(decision)
        if entry is None:
            return None
        if entry.mode == "static" and not decision.is_float:
            static.update(dict.fromkeys(op.outputs, entry))
        if not has_parameters(decision):
            return entry if entry.mode == "static" and not decision.is_float else None
        weights = [
            Place(graph.index, op.name, graph.tensors[op.outputs[0]].name, slot)
            for slot, i in enumerate(op.inputs)
            if i >= 0
            and (tensor := graph.tensors[i]).nbytes
            and tensor.dtype in FLOATS
            and len(tensor.shape) > 1
        ]
        found.weights.setdefault(op_id, []).extend(weights)
        if entry.mode == "static" and decision.node.op.kind is Scales.LOOKUP:
            # The library knows no static ranges of lookups; what is looked up is quantized later.
            return replace(entry, mode="dynamic")
        if entry.mode == "static" and decision.is_float:
            return replace(entry, mode="weight_only")
        return entry

    def _product(self, op_id: str) -> str:
        """Returns the product of a parameter that an operation is fused into."""
        found: str | None = op_id
        while found in self._ids and not has_parameters(self._ids[found]):
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
        """Returns a part of a name without the transformations around it, such as vmap(...)."""
        while part not in self._decisions and (inner := _TRANSFORMED.fullmatch(part)):
            part = inner[1]
        return part

    @staticmethod
    def _rank(decision: Decision) -> int:
        """What is fused into a product has its rule; else the last one makes the output."""
        return 2 if has_parameters(decision) else int(decision.node.op.kind is Scales.CONTRACTION)

    def _outputs(self, model: Model, graph: Subgraph) -> dict[int, str]:
        """Returns what makes the outputs of the model, which have names of their own there."""
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


def _exact(entry: AeqRule, kind: str, names: Sequence[str]) -> AeqRule:
    pattern = "|".join(map(re.escape, dict.fromkeys(names)))
    return replace(entry, regex=f"^(?:{pattern})$", operation=kind)

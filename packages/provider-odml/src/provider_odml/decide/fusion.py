"""Which operations the device computes in the contraction before them.

Behind a matmul or convolution with a parameter, LiteRT folds what acts by channel (a bias, a
factor, BatchNorm) into the parameter, and an activation into the kernel's last step. What is
folded has neither a scale nor a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..capture.graph import ACTIVATION, Graph, Node, Use
from ..capture.ops import Scales
from .limits import FUSED_ACTIVATIONS, why_float
from .rules import OdmlRule


@dataclass
class Ruled:
    """The operations of a program with the rule of each.

    Attributes:
        graph: the program.
        rules: all rules.
        index: by op id, the number of the first rule that matches; None without one.
        readers: who reads each tensor.
    """

    graph: Graph
    rules: tuple[OdmlRule, ...]
    index: Mapping[str, int | None] = field(init=False)
    readers: Mapping[str, Sequence[tuple[Node, Use]]] = field(init=False)

    def __post_init__(self) -> None:
        self.index = {node.op_id: self._first(node) for node in self.graph.nodes.values()}
        self.readers = self.graph.readers()

    def _first(self, node: Node) -> int | None:
        for i, rule in enumerate(self.rules):
            if rule.matches(node.names, node.module_path):
                return i
        return None

    def rule(self, node: Node) -> OdmlRule | None:
        """Return the rule of an operation."""
        index = self.index[node.op_id]
        return None if index is None else self.rules[index]

    def only_reader(self, node: Node) -> tuple[Node, Use, OdmlRule] | None:
        """Return the one static reader of an output, its slot and rule."""
        readers = self.readers.get(node.op_id, [])
        if len(readers) != 1:
            return None
        reader, use = readers[0]
        rule = self.rule(reader)
        return None if rule is None or not rule.is_static else (reader, use, rule)


@dataclass
class Fusion:
    """Decides what is folded into what.

    Attributes:
        program: the operations with their rules.
        quantized: the tensors that are quantized where they are made: nothing folds over these.
        chains: by op id of a contraction and of what is folded into it, the contraction's.
    """

    program: Ruled
    quantized: Mapping[str, object]
    chains: dict[str, str] = field(default_factory=dict)

    def reader(self, node: Node) -> Node | None:
        """Return the one operation that a node's output is folded into."""
        found, ours = self.program.only_reader(node), self.program.rule(node)
        if found is None or ours is None or not ours.is_static:
            return None
        reader, use, theirs = found
        if ours.output_qtype != theirs.output_qtype or node.op.fixed is not None:
            return None
        if node.op.kind is not Scales.NORM and self.why_float(node, ours) is not None:
            return None
        if _is_relu(reader):
            known = FUSED_ACTIVATIONS[str(theirs.output_qtype)]
            return reader if reader.op.name in known and self._takes_relu(node) else None
        if reader.op.kind is Scales.NORM:
            return reader if self._is_chain(node) else None
        if reader.op.kind is Scales.ARITHMETIC and len(reader.activations) == 1:
            return reader if self._is_chain(node) and _is_by_channel(reader, use) else None
        return None

    def into(self, node: Node) -> bool:
        """Return whether a node is folded into its input's maker."""
        for use in node.activations:
            maker = self.program.graph.nodes.get(use.tensor or "")
            if maker is not None and self.reader(maker) is node:
                return use.tensor not in self.quantized
        return False

    def join(self, node: Node, rule: OdmlRule, fused: bool) -> str | None:
        """Note what a node's output is an affine function of.

        Args:
            node: an operation that is decided now; those before it were.
            rule: its rule.
            fused: whether it is folded into what makes its input.

        Returns:
            The op id of that contraction, if the node is folded into it; None otherwise.
        """
        if self._is_head(node, rule):
            self.chains[node.op_id] = node.op_id
        elif fused and node.op.kind in (Scales.ARITHMETIC, Scales.NORM):
            before = next(u.tensor for u in node.activations if u.tensor in self.chains)
            head = self.chains[node.op_id] = self.chains[str(before)]
            return head
        return None

    def why_float(self, node: Node, rule: OdmlRule) -> str | None:
        """Return why LiteRT can't compute a node in integers, or None."""
        return why_float(node, rule, self.into)

    def _takes_relu(self, node: Node) -> bool:
        """Return whether LiteRT's kernel of a node can end with relu."""
        if node.op.kind is Scales.CONTRACTION:
            return len(node.activations) == 1
        if node.op_id in self.chains:
            return True
        return node.op.kind is Scales.ARITHMETIC and node.op.name != "truediv"

    def _is_chain(self, node: Node) -> bool:
        if node.op_id in self.chains:
            return True
        rule = self.program.rule(node)
        return rule is not None and self._is_head(node, rule)

    def _is_head(self, node: Node, rule: OdmlRule) -> bool:
        """Return whether what follows may be folded: a contraction of one parameter."""
        if node.op.kind is not Scales.CONTRACTION or rule.weight_qtype is None:
            return False
        if len(node.activations) != 1 or len(node.uses) != 2 or node.params.get("batched"):
            return False
        return self.why_float(node, rule) is None


def _is_by_channel(reader: Node, use: Use) -> bool:
    """Return whether arithmetic with a constant acts by channel."""
    others = [other for other in reader.uses if other.role != ACTIVATION]
    is_divisor = reader.op.name == "truediv" and use.slot == 1
    return bool(others) and not is_divisor and _per_channel(use, others[0])


def _is_relu(node: Node) -> bool:
    """Return whether an operation is relu or relu6."""
    if node.op.name in ("relu", "relu6"):
        return True
    return node.op.name == "max" and any(use.scalar == 0.0 for use in node.uses)


def _per_channel(use: Use, other: Use) -> bool:
    """Return whether a constant varies along a contraction's channels alone."""
    if other.scalar is not None or math.prod(other.shape) == 1:
        return True
    offset = len(use.shape) - len(other.shape)
    return all(
        size == 1 or (axis + offset in use.channels and size == use.shape[axis + offset])
        for axis, size in enumerate(other.shape)
    )

"""The graph of a program: its operations, and the tensors between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .ops import Op

WEIGHT, ACTIVATION, INSIDE, CONSTANT = "weight", "activation", "inside", "constant"


@dataclass(frozen=True)
class Fact:
    """What is known of a value.

    Attributes:
        role: "weight": computed from parameters alone, "activation", "constant", or "inside":
            between the marks of an operation.
        tensor: the name of the tensor that it is, in whatever form; None if that has none.
            Inside an operation, that of its input.
        begin: inside an operation, the id of the mark that it begins with.
        channels: of what a contraction of a parameter has made, the axes that are the parameter's
            channels, in its order.
        path: of what is computed from one parameter alone, the parameter's pytree path.
        is_part: whether it is a part of the tensor.
    """

    role: str
    tensor: str | None = None
    begin: str | None = None
    channels: tuple[int, ...] = ()
    path: str | None = None
    is_part: bool = False


@dataclass(frozen=True)
class Use:
    """One array that an operation reads.

    Attributes:
        slot: where in the arguments: a position, or a name.
        role: "weight", "activation", or None for a constant.
        tensor: the name of the activation.
        shape: its shape.
        dtype: its dtype.
        scalar: its value, if it is a constant number.
        channels: see ``Fact``.
        path: see ``Fact``.
        is_part: see ``Fact``.
    """

    slot: int | str
    role: str | None
    tensor: str | None
    shape: tuple[int, ...]
    dtype: str
    scalar: float | None = None
    channels: tuple[int, ...] = ()
    path: str | None = None
    is_part: bool = False


@dataclass(frozen=True)
class Node:
    """One operation of a program.

    Attributes:
        op_id: its id.
        kind: its id without the number.
        op: what it is.
        names: what rules call it.
        module_path: where it is.
        uses: the arrays that it reads.
        shape: that of its (first) output.
        dtype: that of its (first) output.
        params: what else is known, see ``channels_of``.
        begin: the id of the mark that it begins with, if it is marked.
        channels: those of its output, see ``Fact``.
        loops: how many steps the loops around it have, the outermost first; None for one of which
            only a run can tell.
        is_chosen: whether it is in a branch, which is run for some inputs alone.
    """

    op_id: str
    kind: str
    op: Op
    names: tuple[str, ...]
    module_path: str
    uses: tuple[Use, ...]
    shape: tuple[int, ...]
    dtype: str
    params: Mapping[str, Any] = field(default_factory=dict)
    begin: str | None = None
    channels: tuple[int, ...] = ()
    loops: tuple[int | None, ...] = ()
    is_chosen: bool = False

    @property
    def activations(self) -> tuple[Use, ...]:
        """The uses that are activations."""
        return tuple(use for use in self.uses if use.role == ACTIVATION)


@dataclass
class Graph:
    """The operations in their order, and who reads each tensor.

    Attributes:
        nodes: by op id.
        functions: the targets that were called and are functions: operations inside them are not
            numbered.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)

    def add(self, node: Node) -> None:
        """Add an operation. A second visit replaces the first."""
        self.nodes[node.op_id] = node

    def readers(self) -> dict[str, list[tuple[Node, Use]]]:
        """Return who reads each tensor."""
        found: dict[str, list[tuple[Node, Use]]] = {}
        for node in self.nodes.values():
            for use in node.activations:
                if use.tensor is not None:
                    found.setdefault(use.tensor, []).append((node, use))
        return found

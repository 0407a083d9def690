"""Where tensors are quantized, as far as operations are decided."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from ..capture.graph import ACTIVATION, Graph, Node, Use
from .decision import Site
from .rules import MOST_STEPS, OdmlRule


@dataclass
class Placed:
    """The tensors with a static range, and those on a grid.

    Attributes:
        graph: the program.
        sites: the tensors with a static range, by key.
        tables: by what ``made`` has for a row of a table, the op id of the lookup.
        made: by tensor that is quantized where it is made: the key of its site, or the place of the
            table that it is a row of; and the qtype.
        shared: tensors that are on the scale of the one operation that reads them.
        parts: the sites of tensors of which the first operation that reads them reads a part.
        averaged: the sites that tensors share whose averages have them.
        masked: tensors with constants in them that no integer range should hold, such as -1e9.
    """

    graph: Graph
    sites: dict[str, Site] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    made: dict[str, tuple[str, str]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    averaged: set[str] = field(default_factory=set)
    masked: set[str] = field(default_factory=set)

    def add(
        self,
        key: str,
        node: Node,
        rule: OdmlRule,
        shape: tuple[int, ...],
        fixed: tuple[float, float] | None,
        tensor: str,
        maker: str | None,
    ) -> str:
        """Add a site, and return its key.

        Args:
            key: what its statistics are kept under.
            node: the operation that the tensor is observed at.
            rule: that operation's rule.
            shape: the tensor's.
            fixed: its range, if that is known; 8-bit.
            tensor: its name.
            maker: see ``Site``.
        """
        qtype = str(rule.output_qtype)
        if qtype == "int16" and fixed is not None:
            # LiteRT's int16 softmax, logistic and tanh have the scale 1/32768.
            bound = 32767 / 32768 if fixed == node.op.fixed else max(map(abs, fixed))
            fixed = (-bound, bound)
        batch_axes = None if rule.act_batch_axes is None else tuple(rule.act_batch_axes)
        around = self.graph.nodes[maker].loops if maker is not None else ()
        steps, is_joined = _steps(around, node, rule)
        self.sites[key] = Site(
            key, tensor, maker, qtype, rule.act_method, batch_axes, fixed, shape,
            _fingerprint(node, self.graph), steps, is_joined or key in self.averaged,
        )  # fmt: skip
        return key

    def add_output(self, node: Node, rule: OdmlRule) -> str:
        """Add an output that is quantized where made. Return its site."""
        own = node.op_id
        key = self.add(own, node, rule, node.shape, node.op.fixed, own, own)
        self.made[node.op_id] = key, str(rule.output_qtype)
        return key


def _steps(
    made_in: tuple[int | None, ...], node: Node, rule: OdmlRule
) -> tuple[tuple[int, ...], bool]:
    """Return the loops with a range per step, and whether others join.

    A tensor that is made outside of a loop is one for all of its steps.

    Args:
        made_in: the loops around what makes the tensor.
        node: what observes it.
        rule: its rule.
    """
    steps: list[int] = []
    for length, around in zip(made_in, node.loops, strict=False):
        if length is None or length != around:
            break
        steps.append(length)
    asked = rule.static_range
    if asked == "joined" or (asked is None and math.prod(steps) > MOST_STEPS):
        steps = []
    return tuple(steps), len(steps) < len(node.loops)


def _fingerprint(node: Node, graph: Graph) -> str:
    """Return what tells apart operations of one id, but for the batch."""
    reads = [(use.slot, use.role, _maker(use, graph), _size(use)) for use in node.uses]
    text = repr((node.op.name, len(node.shape), reads))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _maker(use: Use, graph: Graph) -> str:
    """Return what makes an operand, without its number."""
    maker = graph.nodes.get(use.tensor or "")
    return use.tensor or "" if maker is None else maker.kind


def _size(use: Use) -> tuple[int, ...]:
    # Those of activations hold the batch, somewhere.
    return (len(use.shape),) if use.role == ACTIVATION else use.shape

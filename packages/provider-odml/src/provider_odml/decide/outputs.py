"""How the output of an operation is quantized where it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..capture.graph import Node
from ..capture.ops import Scales
from .decision import SiteUse
from .fusion import Fusion, Ruled
from .placed import Placed
from .rules import OdmlRule


@dataclass
class Outputs:
    """Decides about outputs.

    Attributes:
        program: the operations with their rules.
        fusion: what is folded into what.
        placed: where tensors are quantized so far; added to.
    """

    program: Ruled
    fusion: Fusion
    placed: Placed

    def of(self, node: Node, rule: OdmlRule) -> SiteUse | None:
        """Return how an integer output is quantized; None if it is fused."""
        if self.fusion.reader(node) is not None:
            return None
        alias = self._input_scale(node)
        if alias is not None:
            # The same scale for input and output loses no value and needs no kernel.
            self.placed.made[node.op_id] = alias, str(rule.output_qtype)
            return SiteUse(alias)
        shared = self._reader_scale(node, rule)
        if shared is not None:
            self.placed.shared.add(node.op_id)
            # Averages are nearer to each other than what they are of: the range is that of both.
            ((reader, _),) = self.program.readers[node.op_id]
            is_averaged = reader.op.kind is Scales.AVERAGE
            if is_averaged:
                self.placed.averaged.add(shared)
            return SiteUse(shared, observe=is_averaged, device_only=not is_averaged)
        return SiteUse(self.placed.add_output(node, rule), observe=True)

    def fix(self, node: Node, limits: tuple[float, float]) -> None:
        """Give an output of the model a range, if it has none."""
        tensor = node.uses[0].tensor if node.uses else None
        if tensor not in self.placed.made:
            return
        key, _ = self.placed.made[tensor]
        maker, sites = self.program.graph.nodes.get(key), self.placed.sites
        # LiteRT insists on the ranges of softmax and the like.
        if key in sites and (maker is None or maker.op.fixed is None):
            sites[key] = replace(sites[key], fixed=limits)

    def _input_scale(self, node: Node) -> str | None:
        """Return the site whose scale an output shares with its input."""
        if node.op.kind not in (Scales.CLAMP, Scales.AVERAGE) or len(node.activations) != 1:
            return None
        name = node.activations[0].tensor
        if name is None:
            name = f"{node.op_id}#{node.activations[0].slot}"
        if name in self.placed.made:
            return self.placed.made[name][0]
        return name if name in self.placed.sites else None

    def _reader_scale(self, node: Node, rule: OdmlRule) -> str | None:
        """Return the site whose scale an output shares with its reader."""
        found = self.program.only_reader(node)
        if found is None or node.op.fixed is not None or node.op.kind is Scales.JOIN:
            return None
        reader, _, theirs = found
        kind = reader.op.kind
        if kind not in (Scales.JOIN, Scales.CLAMP, Scales.AVERAGE) or reader.op.name == "select_n":
            return None
        if (
            theirs.output_qtype != rule.output_qtype
            or self.fusion.why_float(reader, theirs) is not None
        ):
            return None
        if self.fusion.reader(reader) is not None:
            return None
        # Of what is resized and then concatenated, too: else that would be requantized.
        further = self._reader_scale(reader, theirs)
        own = None if kind is Scales.AVERAGE else reader.op_id
        return own if further is None else further

"""How the operands of an operation are quantized where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..capture.channels import channel_axes, matrix_axes
from ..capture.graph import ACTIVATION, Node, Use
from ..capture.ops import Scales
from .decision import ConstantUse, DynamicUse, Quantize, SiteUse, WeightUse
from .fusion import Fusion
from .limits import why_no_blocks
from .placed import Placed
from .rules import OdmlRule


@dataclass
class Inputs:
    """Decides about operands.

    Attributes:
        fusion: what is folded into what.
        placed: where tensors are quantized so far; added to.
        fixed: the range of every float input of the model, or None.
        per_channel: whether parameters of contractions have a scale per channel.
    """

    fusion: Fusion
    placed: Placed
    fixed: tuple[float, float] | None
    per_channel: bool

    def of(self, node: Node, rule: OdmlRule, fused: bool) -> dict[int | str, Quantize]:
        """Return how the operands of an integer operation are quantized, by slot.

        Args:
            node: the operation.
            rule: its rule, with a static range.
            fused: whether it is folded into what makes its input.
        """
        found = {} if fused else self._activations(node, rule)
        if node.op.kind is Scales.CONTRACTION:
            found |= self.weights(node, rule)
        elif node.op.kind is Scales.ARITHMETIC and not fused:
            for use in others(node):
                is_divisor = node.op.name == "truediv" and use.slot == 1
                found[use.slot] = ConstantUse(str(rule.output_qtype), is_divisor)
        return found

    def read(self, node: Node, rule: OdmlRule) -> dict[int | str, Quantize]:
        """Return how the activations are quantized that an operation reads."""
        placed = {use.slot: self.activation(node, use, rule) for use in node.activations}
        return {slot: use for slot, use in placed.items() if use is not None}

    def weights(self, node: Node, rule: OdmlRule) -> dict[int | str, Quantize]:
        """Return how the parameters of a contraction are quantized."""
        if rule.weight_qtype is None:
            return {}
        found: dict[int | str, Quantize] = {}
        for use in others(node):
            axes = channel_axes(node.params, int(use.slot), len(use.shape))
            how = rule.weight_qtype, axes, rule.weight_calibration_method
            if why_no_blocks(node, use, rule) is None:
                inner, _ = matrix_axes(node.params, int(use.slot), len(use.shape))
                found[use.slot] = WeightUse(*how, rule.tile_size, inner)
            else:
                found[use.slot] = WeightUse(how[0], axes if self.per_channel else (), how[2])
        return found

    def dynamic(self, node: Node) -> dict[int | str, Quantize]:
        """Return the activations of a contraction whose ranges the device finds."""
        found: dict[int | str, Quantize] = {}
        for use in node.activations:
            axes = channel_axes(node.params, int(use.slot), len(use.shape))
            if node.op.name == "conv_general_dilated":
                axes = (node.params["lhs_batch"],)
            found[use.slot] = DynamicUse(axes)
        return found

    def scale_of_product(self, node: Node, inputs: Mapping[int | str, Quantize]) -> str | None:
        """Return what has the scale of a contraction's one activation: see ``Decision.reads``.

        Args:
            node: the operation.
            inputs: how its operands are quantized.
        """
        if node.op.kind is not Scales.CONTRACTION or len(node.activations) != 1:
            return None
        use = node.activations[0]
        read = inputs.get(use.slot)
        if isinstance(read, SiteUse):
            return read.site
        made = self.placed.made.get(use.tensor or "")
        return None if made is None else made[0]

    def activation(self, node: Node, use: Use, rule: OdmlRule) -> SiteUse | None:
        """Return how an activation is quantized where it is read, or None."""
        qtype, placed = str(rule.output_qtype), self.placed
        if use.tensor in placed.masked:
            return None
        name = use.tensor if use.tensor is not None else f"{node.op_id}#{use.slot}"
        if name in placed.made:
            is_ours = placed.made[name][1] == qtype
            return None if is_ours else self._site(f"{name}@{qtype}", name, node, use, rule)
        if name in placed.shared:
            return None
        maker = placed.graph.nodes.get(name)
        if maker is not None and self.fusion.reader(maker) is node:
            return None
        return self._site(name, name, node, use, rule)

    def _activations(self, node: Node, rule: OdmlRule) -> dict[int | str, Quantize]:
        kind, activations = node.op.kind, node.activations
        joined = kind is Scales.JOIN or (kind is Scales.CLAMP and len(activations) > 1)
        found: dict[int | str, Quantize] = {}
        for use in activations:
            if joined:
                # Others may read it at another scale.
                is_there = use.tensor in self.placed.shared
                placed = None if is_there else SiteUse(node.op_id, device_only=True)
            else:
                placed = self.activation(node, use, rule)
            if placed is not None:
                found[use.slot] = placed
        return found

    def _site(self, key: str, tensor: str, node: Node, use: Use, rule: OdmlRule) -> SiteUse:
        """Return the quantization of a float tensor where it is read."""
        placed, sites = self.placed, self.placed.sites
        known = sites.get(key)
        if known is not None and known.qtype != rule.output_qtype:
            key = f"{tensor}@{rule.output_qtype}"
            known = sites.get(key)
        if known is None:
            maker = node.op_id if use.tensor is None else use.tensor
            maker = maker if maker in placed.graph.nodes else None
            fixed = self.fixed if maker is None else None
            placed.add(key, node, rule, use.shape, fixed, tensor, maker)
            if use.is_part:
                sites[key] = replace(sites[key], is_joined=True)
                placed.parts.add(key)
        # Of several branches one alone is run: the tensor is observed in each. So it is where
        # operations read parts of it.
        observe = known is None or node.is_chosen or key in placed.parts
        return SiteUse(key, observe=observe, is_part=use.is_part)


def others(node: Node) -> list[Use]:
    """Return the operands that are parameters or constants."""
    return [use for use in node.uses if use.role != ACTIVATION]

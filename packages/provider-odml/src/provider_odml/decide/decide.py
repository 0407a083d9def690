"""Deciding where the tensors of a program are quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..capture.graph import ACTIVATION, Graph, Node, Use
from ..capture.ops import NoKernel, Passage, Scales
from .decision import ConstantUse, Decision, Quantize, SiteUse, WeightUse
from .fusion import Fusion, Ruled
from .inputs import Inputs, others
from .limits import INT16_FLOAT, MASK, NO_INT16, why_no_blocks, why_no_product
from .outputs import Outputs
from .placed import Placed
from .plan import Plan
from .rules import OdmlRule


@dataclass
class Options:
    """How ranges of the model's inputs and outputs are given.

    Attributes:
        inputs: the range of every float input, or None.
        outputs: the range of every output, or None.
        per_channel: whether parameters of contractions have a scale per channel.
        strict: whether an operation that LiteRT's integer kernels don't know is an error.
    """

    inputs: tuple[float, float] | None = None
    outputs: tuple[float, float] | None = None
    per_channel: bool = True
    strict: bool = True


_AT_THE_INPUTS_SCALE = frozenset({Scales.CLAMP, Scales.PICK, Scales.AVERAGE, Scales.LOOKUP})


def decide(graph: Graph, rules: Sequence[OdmlRule], options: Options) -> Plan:
    """Return where the tensors of a program are quantized.

    Every tensor has one scale: it is quantized where it is made, and all that read it read the
    same quantized values, as on the device. What is made in float is quantized where it is read
    by an operation that computes in integers.
    """
    decider = _Decider(Ruled(graph, tuple(rules)), options)
    decisions = {node.op_id: decider.decide(node) for node in graph.nodes.values()}
    decisions = _apart(decisions)
    return Plan(
        decisions,
        decider.placed.sites,
        tuple(rules),
        frozenset(graph.functions),
        tuple(decider.problems),
    )


def _apart(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Return decisions that tell of inputs which are read in several ways.

    The converter quantizes an input where it comes in, for all that read it: also for an output,
    an operation in float or one at another scale.
    """
    readers: dict[str, set[str | None]] = {}
    for decision in decisions.values():
        for use in decision.node.activations:
            if use.tensor is not None and use.tensor not in decisions:
                read = decision.inputs.get(use.slot)
                site = read.site if isinstance(read, SiteUse) else None
                readers.setdefault(use.tensor, set()).add(site)
    several = {tensor for tensor, sites in readers.items() if len(sites) > 1}

    def told(decision: Decision) -> Decision:
        slots = {use.slot for use in decision.node.activations if use.tensor in several}
        inputs = {
            slot: replace(use, is_part=True) if slot in slots and isinstance(use, SiteUse) else use
            for slot, use in decision.inputs.items()
        }
        return replace(decision, inputs=inputs) if slots else decision

    return {op_id: told(decision) for op_id, decision in decisions.items()}


class _Decider:
    """Decides about operations in the order of the program."""

    def __init__(self, program: Ruled, options: Options):
        self.program = program
        self.placed = Placed(program.graph)
        self.problems: list[str] = []
        self._options = options
        self._fusion = Fusion(program, self.placed.made)
        self._inputs = Inputs(self._fusion, self.placed, options.inputs, options.per_channel)
        self._outputs = Outputs(program, self._fusion, self.placed)

    def decide(self, node: Node) -> Decision:
        index, rule, kind = self.program.index[node.op_id], self.program.rule(node), node.op.kind
        if kind is Passage.OUTPUT:
            if self._options.outputs is not None:
                self._outputs.fix(node, self._options.outputs)
            return Decision(node, None, is_float=True)
        if kind in (Scales.PICK, Scales.LOOKUP) and node.uses and node.uses[0].role == ACTIVATION:
            return self._picked(node, index, rule)
        if kind is Scales.LOOKUP:
            return self._lookup(node, index, rule)
        if rule is None:
            return Decision(node, None, is_float=True)
        if not rule.is_static:
            return self._weights_alone(node, index, rule)
        if isinstance(kind, NoKernel):
            return self._float(node, index)
        return self._static(node, index, rule)

    def _static(self, node: Node, index: int | None, rule: OdmlRule) -> Decision:
        """Decide about an operation with a kernel and static ranges."""
        if node.op.name == "select_n" and len(node.activations) < len(node.uses):
            self.placed.masked.add(node.op_id)
            return Decision(node, index, is_float=True, reason=MASK)
        if any(use.tensor in self.placed.masked for use in node.activations):
            return self._island(node, index, rule, MASK)
        why = self._fusion.why_float(node, rule)
        if why is not None and self._fusion.reader(node) is None:
            return self._island(node, index, rule, why)
        fused = self._fusion.into(node)
        inputs = self._inputs.of(node, rule, fused)
        head = self._fusion.join(node, rule, fused)
        reads = self._inputs.scale_of_product(node, inputs)
        row_of = self.placed.tables.get(reads or "")
        output = self._outputs.of(node, rule)
        if output is not None:
            # What is joined has the scale of the output, which may be that of its reader.
            inputs = {slot: _at(use, node.op_id, output.site) for slot, use in inputs.items()}
        return Decision(
            node, index, inputs, output, fused=fused, head=head,
            reads=None if row_of else reads, row_of=row_of,
        )  # fmt: skip

    def _weights_alone(self, node: Node, index: int | None, rule: OdmlRule) -> Decision:
        """An operation whose rule has no static range: contractions alone have more."""
        if node.op.kind is not Scales.CONTRACTION:
            return Decision(node, index, is_float=True, reason=rule.reason)
        inputs = self._inputs.weights(node, rule)
        self._check_blocks(node, rule, others(node))
        reason = None if inputs else rule.reason
        if inputs and rule.is_dynamic:
            reason = why_no_product(node, rule)
            inputs |= {} if reason else self._inputs.dynamic(node)
        return Decision(node, index, inputs, is_float=not inputs, reason=reason)

    def _picked(self, node: Node, index: int | None, rule: OdmlRule | None) -> Decision:
        """Values picked from a tensor: at its scale, if it has one."""
        use = node.activations[0]
        inputs: dict[int | str, Quantize] = {}
        if use.tensor in self.placed.made:
            key, qtype = self.placed.made[use.tensor]
        else:
            if rule is None or not rule.is_static:
                return Decision(node, index, is_float=True)
            read = self._inputs.activation(node, use, rule)
            key, qtype = str(use.tensor), str(rule.output_qtype)
            if read is not None:
                inputs[use.slot] = read
                key = read.site
        if qtype == "int16" and node.op.name in INT16_FLOAT:
            return Decision(node, index, inputs, is_float=True, reason=NO_INT16)
        self.placed.made[node.op_id] = key, qtype
        return Decision(node, index, inputs, SiteUse(key, device_only=True))

    def _lookup(self, node: Node, index: int | None, rule: OdmlRule | None) -> Decision:
        """Row of a parameter, which has one scale."""
        if rule is None or (rule.weight_qtype is None and not rule.is_static):
            return Decision(node, index, is_float=True)
        if not rule.is_static:
            use = WeightUse(str(rule.weight_qtype), (0,), rule.weight_calibration_method)
            if rule.tile_size is not None and self._check_blocks(node, rule, node.uses[:1]):
                use = replace(use, tile_size=rule.tile_size, tiled_axes=(1,))
            return Decision(node, index, {0: use}, is_float=not node.params["rows"])
        inputs: dict[int | str, Quantize] = {0: ConstantUse("int8")}
        if rule.output_qtype == "int16":
            output = SiteUse(self.placed.add_output(node, rule), observe=True)
            return Decision(node, index, inputs, output, is_float=True, reason=NO_INT16)
        kinds = {reader.op.kind for reader, _ in self.program.readers.get(node.op_id, ())}
        if kinds & _AT_THE_INPUTS_SCALE:
            # Whose output has the scale of a site.
            output = SiteUse(self.placed.add_output(node, rule), observe=True)
            return Decision(node, index, inputs, output)
        table = f"{node.op_id}#0"
        self.placed.tables[table] = node.op_id
        self.placed.made[node.op_id] = table, "int8"
        return Decision(node, index, inputs)

    def _check_blocks(self, node: Node, rule: OdmlRule, parameters: Sequence[Use]) -> bool:
        """Return whether LiteRT has the blocks that a rule asks for; note the problem if not."""
        if rule.tile_size is None:
            return True
        why = next(filter(None, (why_no_blocks(node, use, rule) for use in parameters)), None)
        if why is not None:
            self.problems.append(
                f"{node.op_id}: {why}; give it a rule with another tile_size, or without one: one "
                "scale per channel, as with strict=False"
            )
        return why is None

    def _float(self, node: Node, index: int | None) -> Decision:
        if node.op.kind is NoKernel.UNKNOWN and self._options.strict:
            self.problems.append(
                f"{node.op_id}: LiteRT's integer kernels don't know {node.op.name}; give it a "
                "rule without qtypes, or pass strict=False to compute it in float"
            )
        reason = f"LiteRT computes {node.op.name} in float"
        return Decision(node, index, is_float=True, reason=reason)

    def _island(self, node: Node, index: int | None, rule: OdmlRule, why: str) -> Decision:
        """Computed in float, from and to integers."""
        inputs = self._inputs.read(node, rule)
        if node.op.kind is Scales.CONTRACTION:
            inputs |= self._inputs.weights(node, rule)
        output = SiteUse(self.placed.add_output(node, rule), observe=True)
        return Decision(node, index, inputs, output, is_float=True, reason=why)


def _at(use: Quantize, old: str, new: str) -> Quantize:
    """Return how an operand is quantized, at another site instead of one."""
    return replace(use, site=new) if isinstance(use, SiteUse) and use.site == old else use

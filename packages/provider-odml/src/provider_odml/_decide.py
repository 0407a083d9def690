"""Deciding where the tensors of a program are quantized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ._channels import channel_axes
from ._graph import ACTIVATION, Graph, Node, Use
from ._limits import FUSED_ACTIVATIONS, INT16_FLOAT, MASK, NO_INT16, why_float
from ._ops import Kind
from ._plan import (
    ConstantUse,
    Decision,
    DynamicUse,
    Plan,
    Quantize,
    Site,
    SiteUse,
    WeightUse,
)
from ._rules import MOST_STEPS, OdmlRule
from ._traits import fingerprint, is_relu, per_channel


@dataclass
class Options:
    """How ranges of the model's inputs and outputs are given.

    Attributes:
        inputs: the range of every float input, or None.
        outputs: the range of every output, or None.
        per_channel: whether parameters of products have a scale per channel.
        strict: whether an operation that LiteRT's integer kernels don't know is an error.
    """

    inputs: tuple[float, float] | None = None
    outputs: tuple[float, float] | None = None
    per_channel: bool = True
    strict: bool = True


def decide(graph: Graph, rules: Sequence[OdmlRule], options: Options) -> Plan:
    """Returns where the tensors of a program are quantized.

    Every tensor has one scale: it is quantized where it is made, and all that read it read the
    same codes, as on the device. What is made in float is quantized where it is read by an
    operation that computes in integers.
    """
    return _Decider(graph, tuple(rules), options).plan()


@dataclass
class _Decider:
    graph: Graph
    rules: tuple[OdmlRule, ...]
    options: Options
    decisions: dict[str, Decision] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    grid: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By tensor that is quantized where it is made: the key of its site, and the qtype."""
    chains: dict[str, str] = field(default_factory=dict)
    """Products of a parameter, and what is folded into them: the products."""
    masked: set[str] = field(default_factory=set)
    """Tensors with constants in them that no integer range should hold, such as -1e9."""
    problems: list[str] = field(default_factory=list)

    def plan(self) -> Plan:
        self.readers = self.graph.readers()
        for node in self.graph.nodes.values():
            index = self._find(node)
            self.decisions[node.op_id] = self._decide(node, index)
        used = {decision.rule for decision in self.decisions.values()}
        for i, rule in enumerate(self.rules):
            if i not in used:
                self.problems.append(f"rule {i} decides nothing: {rule!r}")
        return Plan(
            self.decisions,
            self.sites,
            self.rules,
            frozenset(self.graph.functions),
            tuple(self.problems),
        )

    def _find(self, node: Node) -> int | None:
        for i, rule in enumerate(self.rules):
            if rule.matches(node.names, node.module_path):
                return i
        return None

    def _rule(self, node: Node) -> OdmlRule | None:
        index = self._find(node)
        return None if index is None else self.rules[index]

    def _decide(self, node: Node, index: int | None) -> Decision:
        rule = None if index is None else self.rules[index]
        kind = node.op.kind
        if kind is Kind.OUTPUT:
            return self._output(node)
        if kind in (Kind.KEEP, Kind.LOOKUP) and self._kept(node):
            return self._keep(node, index, rule)
        if kind is Kind.LOOKUP:
            return self._lookup(node, index, rule)
        if rule is None:
            return Decision(node, None, is_float=True)
        if kind is Kind.LINEAR and not rule.is_static:
            return self._weights_alone(node, index, rule)
        if not rule.is_static:
            return Decision(node, index, is_float=True)
        if kind in (Kind.FLOAT, Kind.UNKNOWN):
            return self._float(node, index)
        if node.op.name == "select_n" and len(node.activations) < len(node.uses):
            self.masked.add(node.op_id)
            return Decision(node, index, is_float=True, reason=MASK)
        if any(use.tensor in self.masked for use in node.activations):
            return self._island(node, index, rule, MASK)
        why = self._why_float(node, rule)
        if why is not None and self._absorbed(node) is None:
            return self._island(node, index, rule, why)
        inputs = self._inputs(node, rule)
        fused = self._fused_input(node)
        head = None
        if self._is_head(node, rule):
            self.chains[node.op_id] = node.op_id
        elif fused and kind in (Kind.ARITH, Kind.NORM):
            before = next(u.tensor for u in node.activations if u.tensor in self.chains)
            head = self.chains[node.op_id] = self.chains[str(before)]
        return Decision(node, index, inputs, self._made(node, rule), fused=fused, head=head)

    # What becomes of the output.

    def _absorbed(self, node: Node) -> Node | None:
        """Returns the one operation that a node's output is fused into."""
        readers = self.readers.get(node.op_id, [])
        if len(readers) != 1:
            return None
        reader, use = readers[0]
        ours, theirs = self._rule(node), self._rule(reader)
        if ours is None or theirs is None or not (ours.is_static and theirs.is_static):
            return None
        if ours.act_qtype != theirs.act_qtype or node.op.fixed is not None:
            return None
        if node.op.kind is not Kind.NORM and self._why_float(node, ours) is not None:
            return None
        qtype = str(theirs.act_qtype)
        if is_relu(reader):
            fusable = node.op_id in self.chains or node.op.kind is Kind.LINEAR
            fusable = fusable or (node.op.kind is Kind.ARITH and node.op.name != "truediv")
            fusable = fusable and (node.op.kind is not Kind.LINEAR or len(node.activations) == 1)
            return reader if fusable and reader.op.name in FUSED_ACTIVATIONS[qtype] else None
        if reader.op.kind is Kind.NORM:
            return reader if self._is_chain(node) else None
        if reader.op.kind is Kind.ARITH and len(reader.activations) == 1:
            other = [u for u in reader.uses if u.role != ACTIVATION]
            is_divided = reader.op.name == "truediv" and use.slot == 1
            if (
                other
                and not is_divided
                and self._is_chain(node)
                and per_channel(node, use, other[0])
            ):
                return reader
        return None

    def _is_chain(self, node: Node) -> bool:
        rule = self._rule(node)
        return node.op_id in self.chains or (rule is not None and self._is_head(node, rule))

    def _is_head(self, node: Node, rule: OdmlRule) -> bool:
        """Returns whether what follows may be folded into a node: a product of a parameter."""
        if node.op.kind is not Kind.LINEAR or rule.weight_qtype is None:
            return False
        if len(node.activations) != 1 or len(node.uses) != 2 or node.params.get("batched"):
            return False
        return self._why_float(node, rule) is None

    def _fused_input(self, node: Node) -> bool:
        for use in node.activations:
            maker = self.graph.nodes.get(use.tensor or "")
            if maker is not None and self._absorbed(maker) is node:
                return use.tensor not in self.grid
        return False

    def _made(self, node: Node, rule: OdmlRule) -> SiteUse | None:
        """Returns how the output is quantized where it is made."""
        if self._absorbed(node) is not None:
            return None
        alias = self._same_scale(node)
        if alias is not None:
            # The same scale for input and output: no code is lost, and no kernel needed for it.
            self.grid[node.op_id] = alias, str(rule.act_qtype)
            return SiteUse(alias)
        shared = self._sharing(node, rule)
        if shared is not None:
            return SiteUse(shared, device_only=True)
        key = self._site(node.op_id, node, rule, node.shape, node.op.fixed)
        self.grid[node.op_id] = key, str(rule.act_qtype)
        return SiteUse(key, observe=True)

    def _same_scale(self, node: Node) -> str | None:
        """Returns the site of the input of an operation whose output shares its scale."""
        kinds = (Kind.CLAMP, Kind.AVERAGE)
        if node.op.kind not in kinds or len(node.activations) != 1:
            return None
        tensor = node.activations[0].tensor
        name = tensor if tensor is not None else f"{node.op_id}#{node.activations[0].slot}"
        if name in self.grid:
            return self.grid[name][0]
        return name if name in self.sites else None

    def _sharing(self, node: Node, rule: OdmlRule) -> str | None:
        """Returns the site of the one operation that reads the output and shares its scale."""
        readers = self.readers.get(node.op_id, [])
        if len(readers) != 1 or node.op.fixed is not None or node.op.kind is Kind.JOIN:
            return None
        reader, _ = readers[0]
        theirs = self._rule(reader)
        if reader.op.kind not in (Kind.JOIN, Kind.CLAMP) or theirs is None:
            return None
        if (
            theirs.act_qtype != rule.act_qtype
            or not theirs.is_static
            or reader.op.name == "select_n"
        ):
            return None
        if self._why_float(reader, theirs) is not None or self._absorbed(reader) is not None:
            return None
        return reader.op_id if self._sharing(reader, theirs) is None else None

    # What is done with the inputs.

    def _inputs(self, node: Node, rule: OdmlRule) -> dict[int | str, Quantize]:
        found: dict[int | str, Quantize] = {}
        kind, fused = node.op.kind, self._fused_input(node)
        joined = kind is Kind.JOIN or (kind is Kind.CLAMP and len(node.activations) > 1)
        for use in node.uses:
            if use.role == ACTIVATION:
                if not fused:
                    placed = self._activation(node, use, rule)
                    if placed is not None:
                        found[use.slot] = placed
                    elif joined and use.tensor in self.grid:
                        # Others may read it at its own scale.
                        found[use.slot] = SiteUse(node.op_id, device_only=True)
            elif node.op.kind is Kind.LINEAR:
                weight = self._weight(node, use, rule)
                if weight is not None:
                    found[use.slot] = weight
            elif node.op.kind is Kind.ARITH and not fused:
                inverted = node.op.name == "truediv" and use.slot == 1
                found[use.slot] = ConstantUse(str(rule.act_qtype), inverted)
        return found

    def _activation(self, node: Node, use: Use, rule: OdmlRule) -> SiteUse | None:
        qtype = str(rule.act_qtype)
        if use.tensor in self.masked:
            return None
        name = use.tensor if use.tensor is not None else f"{node.op_id}#{use.slot}"
        if name in self.grid:
            _, made = self.grid[name]
            if made == qtype:
                return None
            return self._read(f"{name}@{qtype}", name, node, use, rule)
        maker = self.graph.nodes.get(name)
        if maker is not None and (d := self.decisions.get(name)) is not None:
            if d.output is not None and d.output.device_only:
                return None  # it shares our scale
            if self._absorbed(maker) is node:
                return None
        return self._read(name, name, node, use, rule)

    def _read(self, key: str, tensor: str, node: Node, use: Use, rule: OdmlRule) -> SiteUse:
        """Returns the quantization of a float tensor where it is read."""
        known = self.sites.get(key)
        if known is not None and known.qtype != rule.act_qtype:
            key = f"{tensor}@{rule.act_qtype}"
            known = self.sites.get(key)
        if known is None:
            is_input = tensor.startswith(("args[", "kwargs["))
            fixed = self.options.inputs if is_input else None
            key = self._site(key, node, rule, use.shape, fixed, tensor)
        # Of several branches one alone is run: the tensor is observed in each.
        return SiteUse(key, observe=known is None or "cond(" in node.op_id)

    def _weight(self, node: Node, use: Use, rule: OdmlRule) -> WeightUse | None:
        if rule.weight_qtype is None:
            return None
        axes = channel_axes(node.params, int(use.slot), len(use.shape))
        axes = axes if self.options.per_channel else ()
        return WeightUse(rule.weight_qtype, axes, rule.weight_calibration_method)

    # Kinds of their own.

    def _weights_alone(self, node: Node, index: int | None, rule: OdmlRule) -> Decision:
        inputs: dict[int | str, Quantize] = {}
        for use in node.uses:
            if use.role != ACTIVATION and (weight := self._weight(node, use, rule)) is not None:
                inputs[use.slot] = weight
        if inputs and rule.is_dynamic:
            for use in node.activations:
                axes = channel_axes(node.params, int(use.slot), len(use.shape))
                if node.op.name == "conv_general_dilated":
                    axes = (node.params["lhs_batch"],)
                inputs[use.slot] = DynamicUse(axes)
        return Decision(node, index, inputs, is_float=not inputs)

    def _kept(self, node: Node) -> bool:
        use = next(iter(node.uses), None)
        return use is not None and use.role == ACTIVATION

    def _keep(self, node: Node, index: int | None, rule: OdmlRule | None) -> Decision:
        """Values picked from a tensor: on its grid, if it has one."""
        use = node.activations[0]
        inputs: dict[int | str, Quantize] = {}
        name = use.tensor
        if name not in self.grid:
            if rule is None or not rule.is_static:
                return Decision(node, index, is_float=True)
            placed = self._activation(node, use, rule)
            if placed is not None:
                inputs[use.slot] = placed
                key = placed.site
            else:
                key = str(name)
            name, qtype = key, str(rule.act_qtype)
        else:
            name, qtype = self.grid[str(name)]
        if qtype == "int16" and node.op.name in INT16_FLOAT:
            return Decision(node, index, inputs, is_float=True, reason=NO_INT16)
        self.grid[node.op_id] = name, qtype
        return Decision(node, index, inputs, SiteUse(name, device_only=True))

    def _lookup(self, node: Node, index: int | None, rule: OdmlRule | None) -> Decision:
        """Rows of a parameter, which has one scale."""
        if rule is None or (rule.weight_qtype is None and not rule.is_static):
            return Decision(node, index, is_float=True)
        if not rule.is_static:
            use = WeightUse(str(rule.weight_qtype), (0,), rule.weight_calibration_method)
            return Decision(node, index, {0: use}, is_float=not node.params["rows"])
        inputs: dict[int | str, Quantize] = {0: ConstantUse("int8")}
        if rule.act_qtype == "int16":
            key = self._site(node.op_id, node, rule, node.shape, None)
            self.grid[node.op_id] = key, "int16"
            output = SiteUse(key, observe=True)
            return Decision(node, index, inputs, output, is_float=True, reason=NO_INT16)
        self.grid[node.op_id] = "", "int8"
        return Decision(node, index, inputs)

    def _float(self, node: Node, index: int | None) -> Decision:
        if node.op.kind is Kind.UNKNOWN and self.options.strict:
            self.problems.append(
                f"{node.op_id}: LiteRT's integer kernels don't know {node.op.name}; give it a "
                "rule without qtypes, or pass strict=False to compute it in float"
            )
        reason = f"LiteRT computes {node.op.name} in float"
        return Decision(node, index, is_float=True, reason=reason)

    def _island(self, node: Node, index: int | None, rule: OdmlRule, why: str) -> Decision:
        """Computed in float, from and to integers."""
        inputs: dict[int | str, Quantize] = {}
        for use in node.activations:
            placed = self._activation(node, use, rule)
            if placed is not None:
                inputs[use.slot] = placed
        if node.op.kind is Kind.LINEAR:
            inputs |= {
                use.slot: weight
                for use in node.uses
                if use.role != ACTIVATION and (weight := self._weight(node, use, rule)) is not None
            }
        fixed = node.op.fixed
        key = self._site(node.op_id, node, rule, node.shape, fixed)
        self.grid[node.op_id] = key, str(rule.act_qtype)
        output = SiteUse(key, observe=True)
        return Decision(node, index, inputs, output, is_float=True, reason=why)

    def _output(self, node: Node) -> Decision:
        tensor = node.uses[0].tensor if node.uses else None
        if self.options.outputs is not None and tensor in self.grid:
            key, _ = self.grid[tensor]
            maker = self.graph.nodes.get(key)
            # LiteRT insists on the ranges of softmax and the like.
            if key in self.sites and (maker is None or maker.op.fixed is None):
                self.sites[key] = replace(self.sites[key], fixed=self.options.outputs)
        return Decision(node, None, is_float=True)

    def _why_float(self, node: Node, rule: OdmlRule) -> str | None:
        return why_float(node, rule, self._fused_input)

    def _site(
        self,
        key: str,
        node: Node,
        rule: OdmlRule,
        shape: tuple[int, ...],
        fixed: tuple[float, float] | None,
        tensor: str | None = None,
    ) -> str:
        qtype = str(rule.act_qtype)
        if qtype == "int16" and fixed is not None:
            # LiteRT's int16 softmax, logistic and tanh have the scale 1/32768.
            bound = 32767 / 32768 if fixed == node.op.fixed else max(map(abs, fixed))
            fixed = (-bound, bound)
        batch_axes = None if rule.act_batch_axes is None else tuple(rule.act_batch_axes)
        steps, is_joined = self._steps(tensor or key, node, rule)
        self.sites[key] = Site(
            key, tensor or key, qtype, rule.act_method, batch_axes, fixed, shape,
            fingerprint(node), steps, is_joined,
        )  # fmt: skip
        return key

    def _steps(self, tensor: str, node: Node, rule: OdmlRule) -> tuple[tuple[int, ...], bool]:
        """Return the loops whose steps have a range each, and whether other steps are joined.

        A tensor that is made outside of a loop is one for all of its steps.
        """
        is_own = tensor == node.op_id or tensor.startswith(f"{node.op_id}#")
        maker = node if is_own else self.graph.nodes.get(tensor)
        steps: list[int] = []
        for length, around in zip(() if maker is None else maker.loops, node.loops, strict=False):
            if length is None or length != around:
                break
            steps.append(length)
        asked = rule.static_range
        if asked == "joined" or (asked is None and math.prod(steps) > MOST_STEPS):
            steps = []
        return tuple(steps), len(steps) < len(node.loops)

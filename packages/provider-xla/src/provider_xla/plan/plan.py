"""PlanData: what rules do to a program, before anything runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax

from interception_core import Engine

from ..cache.plan import CachePlan
from ..program.facts import Code, Fact
from ..program.fold import fold_lines
from ..program.matching import Rules, follows_values
from ..program.record import Choice, OpRecord, Report
from ..run.static.ranges import StaticRange
from .weight import WeightPlan

if TYPE_CHECKING:
    from .allocation import Allocation
    from .lora import LoraPlan

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class PlanData:
    """What rules do to a program and its parameters. ``print`` shows a table.

    Attributes:
        ops: every operation: its rule and its parameter, or why it stays float.
        weights: every parameter that is quantized, by pytree path.
        faults: where rules can't be followed; ``problems`` is their text.
        ranges: the activations with a static range, by site and side.
        trained_ranges: the parameters and incoming gradients that have one in training.
        allocation: what ``allocate`` gave each parameter, and why; None of other plans.
        lora: the adapters of parameters that rules with a rank are about, by pytree path.
        absorbed: parameters of which nothing is stored, since only derived weights use them.
        remarks: what is done that no rule says, such as another tile size where the rule's does
            not divide; ``notes`` is their text.
        caches: how the arguments that cache rules are about are carried, by pytree path.
        rules: the rules, and where the parameters are among the arguments.
        engine: taps the program.
        argnum: position of the argument that holds the parameters.
        leaves: shape and dtype of each parameter, by pytree path.
        fn: the function that the plan is for.
        again: makes the plan again, from the types of the function's arguments; it can be pickled
            if the function can.
        params: the parameters' tree, with types for arrays.
    """

    ops: Report
    weights: Mapping[str, WeightPlan]
    faults: tuple[Fact, ...]
    ranges: Mapping[str, StaticRange]
    rules: Rules = dataclasses.field(repr=False)
    engine: Engine = dataclasses.field(repr=False)
    argnum: int = dataclasses.field(repr=False)
    leaves: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(repr=False)
    fn: Callable[..., Any] = dataclasses.field(repr=False)
    params: Any = dataclasses.field(repr=False)
    again: functools.partial[PlanData] = dataclasses.field(repr=False)
    allocation: Allocation | None = None
    lora: Mapping[str, LoraPlan] = dataclasses.field(default_factory=dict, kw_only=True)
    absorbed: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)
    remarks: tuple[Fact, ...] = dataclasses.field(default=(), kw_only=True)
    caches: Mapping[str, CachePlan] = dataclasses.field(default_factory=dict, kw_only=True)
    trained_ranges: Mapping[str, StaticRange] = dataclasses.field(
        default_factory=dict, kw_only=True
    )

    @property
    def problems(self) -> tuple[str, ...]:
        """Return in sentences where rules can't be followed."""
        return tuple(map(str, self.faults))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return in sentences what is done that no rule says."""
        return tuple(map(str, self.remarks))

    # Cached: `beside` asks for it once for each of perhaps thousands of parameters.
    @functools.cached_property
    def derived(self) -> dict[str, WeightPlan]:
        """The derived weights, by the key of their expression."""
        return {
            weight.derived.expression.key: weight
            for weight in self.weights.values()
            if weight.derived is not None
        }

    @functools.cached_property
    def derived_from(self) -> frozenset[str]:
        """The parameters that derived weights are computed from."""
        found = (weight.derived for weight in self.derived.values())
        return frozenset(path for one in found if one is not None for path in one.leaves)

    def beside(self, path: str) -> dict[str, WeightPlan]:
        """Return the derived weights that are stored beside a parameter, by key."""
        return {
            key: weight
            for key, weight in self.derived.items()
            if weight.derived is not None and weight.derived.carrier == path
        }

    def arguments(self, params: Any, others: Sequence[Any]) -> list[Any]:
        """Return the arguments of the function: the parameters, and all others."""
        return [*others[: self.argnum], params, *others[self.argnum :]]

    @property
    def bytes_before(self) -> int:
        """Return the bytes of all float parameters."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves.values())

    @property
    def bytes_after(self) -> int:
        """Return the bytes of all parameters, those of ``weights`` quantized."""
        kept = self.leaves.keys() - self.weights.keys() - self.absorbed
        floats = sum(self.leaves[path].size * self.leaves[path].dtype.itemsize for path in kept)
        return floats + sum(weight.bytes_after for weight in self.weights.values())

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "ops": self.ops.as_json(),
            "weights": [weight.as_json() for weight in self.weights.values()],
            "lora": [adapter.as_json() for adapter in self.lora.values()],
            "problems": list(self.problems),
            "notes": list(self.notes),
            "caches": [cache.as_json() for cache in self.caches.values()],
            "floats": [list(one) for one in self.floats],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    @property
    def floats(self) -> tuple[tuple[str, int, str], ...]:
        """The parameters that stay float: path, bytes, and why, the largest first."""
        uses: dict[str, list[OpRecord]] = {}
        for op in self.ops:
            for path in set(op.paths):
                uses.setdefault(path, []).append(op)
        found = []
        for path, leaf in self.leaves.items():
            if path not in self.weights and path not in self.absorbed:
                why = self._why_float(path, uses.get(path, []))
                found.append((path, leaf.size * leaf.dtype.itemsize, why))
        return tuple(sorted(found, key=lambda one: -one[1]))

    @property
    def in_xla(self) -> dict[str, tuple[str, ...]]:
        """The contractions of stored weights that no kernel computes: their ids, by reason."""
        found: dict[str, tuple[str, ...]] = {}
        # Not by the weight's path: a program may join several weights, or derive one.
        stored = {op_id for weight in self.weights.values() for op_id in weight.ops}
        for op in self.ops:
            choice = next(iter(op.kernels.values()), Choice(None, None))
            if op.op_id in stored and choice.reason is not None and not choice.is_lookup:
                found[choice.reason] = (*found.get(choice.reason, ()), op.op_id)
        return found

    def _why_float(self, path: str, ops: Sequence[OpRecord]) -> str:
        if not ops:
            if (op := next((op for op in self.ops if path in op.beside), None)) is not None:
                return f"{op.op_id}: {Code.BESIDE_WEIGHT()}"
            codes = {op.why.code for op in self.ops if op.why is not None}
            # The patch engine knows a parameter by its identity alone.
            if Code.UNFOLLOWED in codes or not follows_values(self.engine):
                return "no matmul, convolution or lookup is known to use it"
            # Rows at one index are slices, which are looked at only where a rule names lookups.
            lookup = "lookup" if self.rules.looks_up else "gather"
            return f"no matmul, convolution or {lookup} uses it"
        first = next((op for op in ops if op.rule is not None), ops[0])
        other = "a weight computed from it is stored" if path in self.derived_from else ""
        return f"{first.op_id}: " + (first.reason or other or "it can't be stored")

    def __str__(self) -> str:
        table = self.ops.table({path: weight.bytes for path, weight in self.weights.items()})
        before, after = (f"{n / 2**20:.2f} MiB" for n in (self.bytes_before, self.bytes_after))
        count = sum(path in self.weights or path in self.absorbed for path in self.leaves)
        lines = [f"{count} of {len(self.leaves)} parameters quantized: {before} -> {after}"]
        floats = self.floats
        line = f"{sum(size for _, size, _ in floats) / 2**20:.2f} MiB of parameters stay float"
        shown = [f"{path} {size / 2**20:.2f} MiB ({why})" for path, size, why in floats[:3]]
        shown += [f"{len(floats) - 3} more"] * (len(floats) > 3)
        lines.append(": ".join(filter(None, [line, ", ".join(shown)])))
        derived = [weight.derived for weight in self.derived.values() if weight.derived]
        lines += fold_lines([f"derived: {one.path}, of {', '.join(one.leaves)}" for one in derived])
        if self.lora:
            numbers = sum(adapter.size for adapter in self.lora.values())
            lines.append(f"{len(self.lora)} parameters have adapters: {numbers:,} numbers to train")
        for why, (first, *others) in self.in_xla.items():
            more = f" and {len(others)} more" if others else ""
            lines.append(f"in XLA: {first}{more}: {why}")
        lines += fold_lines([f"problem: {problem}" for problem in self.problems])
        lines += fold_lines([f"cache: {cache}" for cache in self.caches.values()])
        lines += fold_lines([f"note: {note}" for note in self.notes])
        return "\n".join([*lines, "", table])

    @property
    def prefix(self) -> str:
        """Return what the pytree path of every parameter begins with."""
        return self.rules.params

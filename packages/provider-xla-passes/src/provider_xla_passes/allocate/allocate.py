"""``Plan.allocate``: candidates, their errors, the choice, the plan of that, and how it shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interception_core import hide_frames
from interception_core.log import progress
from provider_xla import QuantizationError, WeightPlan
from provider_xla.features import (
    Code,
    by_path,
    check_parameters,
    joined,
    replanned,
    table,
)

from .candidates import Candidate, Option, make_candidates, options_of, rules_for
from .knapsack import choose
from .measure import Error, Measure

if TYPE_CHECKING:
    from provider_xla import Plan


@dataclasses.dataclass(frozen=True)
class AllocatedWeight:
    """What the allocation gave one parameter or derived weight.

    Attributes:
        path: its pytree path, or how it is computed.
        elements: how many it has.
        qtype: its format.
        tile_size: elements per scale along a tiled axis; None without tiles.
        bytes: of quantized values and scales, as they are saved.
        error: of the output if only this weight, and those that share its parameters, are
            quantized.
    """

    path: str
    elements: int
    qtype: str
    tile_size: int | None
    bytes: int
    error: float

    @property
    def bits(self) -> float:
        """Return the bits per element, scales included."""
        return 8 * self.bytes / max(self.elements, 1)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The result with one format for all parameters that can have it.

    Attributes:
        name: the format.
        bytes: of all quantized parameters.
        bits: per element of those, scales included.
        predicted: the sum of the errors of single parameters.
        measured: the error of the output.
    """

    name: str
    bytes: int
    bits: float
    predicted: float
    measured: float


@dataclasses.dataclass(frozen=True)
class Allocation:
    """How bits are given to parameters. ``print(allocation)`` shows it as a table.

    Errors are those of the output on the batch: its squared error over its squared norm, or what
    ``error=`` returned.

    Attributes:
        weights: what each parameter got.
        budget: the most bytes that all quantized parameters may take.
        predicted: the sum of the errors of single parameters, which the allocation minimizes.
        measured: the error of the output.
        uniform: the results of one format for all parameters, to compare with.
        errors: the error that was measured for each parameter in each format, by the paths of what
            has one format: a parameter and the derived weights that share it. Pass it to
            ``allocate`` with the same batch and another budget.
    """

    weights: tuple[AllocatedWeight, ...]
    budget: int
    predicted: float
    measured: float
    uniform: tuple[Uniform, ...]
    errors: Mapping[tuple[str, ...], Mapping[str, float]]

    @property
    def bytes(self) -> int:
        """Return the saved bytes of all quantized parameters."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def bits(self) -> float:
        """Return the bits per quantized element, scales included."""
        return 8 * self.bytes / max(sum(weight.elements for weight in self.weights), 1)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        weights = [dataclasses.asdict(one) | {"bits": one.bits} for one in self.weights]
        return {
            "weights": weights,
            "budget": self.budget,
            "bytes": self.bytes,
            "bits": self.bits,
            "predicted": self.predicted,
            "measured": self.measured,
            "uniform": [dataclasses.asdict(one) for one in self.uniform],
            "errors": [
                {"paths": list(paths), "errors": dict(row)} for paths, row in self.errors.items()
            ],
        }

    def __str__(self) -> str:
        weights = [
            [w.path, f"{w.elements:,}", w.qtype, str(w.tile_size or ""), f"{w.bits:.2f}",
             _short(w.error)]
            for w in self.weights
        ]  # fmt: skip
        own = Uniform("allocated", self.bytes, self.bits, self.predicted, self.measured)
        totals = [
            [u.name, f"{u.bytes:,}", f"{u.bits:.2f}", _short(u.predicted), _short(u.measured),
             _decibel(u.measured)]
            for u in (own, *self.uniform)
        ]  # fmt: skip
        head = ["weight", "elements", "qtype", "tile", "bits", "error"]
        above = table(weights, head, right=(1, 3, 4, 5))
        head = ["all weights", "bytes", "bits", "predicted", "measured", "SQNR"]
        below = table(totals, head, right=range(1, 6))
        return f"{above}\n\n{below}\nat most {self.budget:,} bytes"


def _short(error: float) -> str:
    return f"{error:.2e}"


def _decibel(error: float) -> str:
    return f"{-10 * math.log10(error):.1f} dB" if error > 0 else ""


hide_frames(Path(__file__).parent.parent)

Options = Mapping[tuple[str, ...], Sequence[Option]]
Errors = Mapping[tuple[str, ...], Mapping[str, float]]
Costs = Mapping[tuple[str, ...], Sequence[float]]


def allocate(
    plan: Plan,
    params: Any,
    batch: Sequence[Any],
    *,
    budget_bits: float | None,
    budget_bytes: int | None,
    qtypes: Iterable[Any],
    tile_size: Any,
    error: Error | None,
    errors: Errors | None,
) -> Plan:
    """Make a plan with the least error within a budget: see ``Plan.allocate``."""
    candidates = make_candidates(qtypes, tile_size)
    if not plan.weights:
        raise QuantizationError(
            "There is nothing to allocate: the plan quantizes no parameter. Its rules need a "
            "weight_qtype; print(plan) says why each operation stays float."
        )
    leaves, _ = by_path(params, plan.prefix)
    check_parameters(plan, leaves)
    for path, weight in plan.weights.items():
        if weight.derived is None:
            weight.check(leaves[path])
    options = options_of(plan, params, batch, candidates)
    budget = _budget(plan, options, budget_bits, budget_bytes)

    measure = Measure(plan, params, batch, error)
    total = sum(map(len, options.values()))
    known = _known(errors)
    table: dict[tuple[str, ...], dict[str, float]] = {paths: {} for paths in options}
    with progress(total=total, unit="run", desc="measuring") as bar:
        for paths, some in options.items():
            for option in some:
                found = known.get(paths, {}).get(option.name)
                found = measure(option.by_path) if found is None else float(found)
                table[paths][option.name] = found
                bar.update()
    costs = {paths: list(row.values()) for paths, row in table.items()}
    _check_used(measure, options, costs)

    sizes = [[option.bytes for option in some] for some in options.values()]
    numbers = choose(sizes, list(costs.values()), budget)
    assert numbers is not None  # _budget has looked
    chosen = dict(zip(options, numbers, strict=True))
    picked = {paths: options[paths][j] for paths, j in chosen.items()}
    allocation = Allocation(
        tuple(
            _row(weight, costs[paths][j])
            for paths, j in chosen.items()
            for weight in picked[paths].weights
        ),
        budget,
        math.fsum(costs[paths][j] for paths, j in chosen.items()),
        measure(_weights(picked.values())),
        tuple(_uniform(options, costs, measure, candidates)),
        table,
    )
    return _planned(plan, params, batch, [*picked.values()], allocation)


def _known(errors: Errors | None) -> Errors:
    """Return errors that were measured before, or raise ValueError for what has other keys."""
    errors = {} if errors is None else errors
    if not isinstance(errors, Mapping) or not all(isinstance(paths, tuple) for paths in errors):
        raise ValueError(
            "errors must be a mapping by tuples of paths, as plan.allocation.errors, got "
            f"{errors!r:.80}. From as_json, make {{tuple(one['paths']): one['errors'] for one in "
            "content['errors']}."
        )
    return errors


def _weights(picked: Iterable[Option]) -> dict[str, WeightPlan]:
    """Return how all weights are quantized, by path."""
    return {path: weight for option in picked for path, weight in option.by_path.items()}


def _elements(options: Options) -> int:
    return sum(math.prod(weight.shape) for some in options.values() for weight in some[0].weights)


def _budget(plan: Plan, options: Options, bits: float | None, size: int | None) -> int:
    """Return the most bytes that the quantized parameters may take.

    Raises:
        ValueError: neither or both budgets are given.
        QuantizationError: even the smallest options take more.
    """
    if (bits is None) == (size is None):
        raise ValueError(
            f"Give one of budget_bits and budget_bytes. Got budget_bits={bits!r} and "
            f"budget_bytes={size!r}."
        )
    elements = _elements(options)
    rest = plan.bytes_after - sum(weight.bytes_after for weight in plan.weights.values())
    least = sum(min(option.bytes for option in some) for some in options.values())
    if bits is not None:
        budget = math.floor(bits * elements / 8)
        asked = f"budget_bits={bits} is"
        need = f"{math.ceil(8e4 * least / max(elements, 1)) / 1e4} bits per element, with scales"
    else:
        assert size is not None
        budget = math.floor(size) - rest
        asked = f"budget_bytes={size} is"
        need = f"{least + rest} bytes, {rest} of them for what stays float"
    if budget < least:
        raise QuantizationError(
            f"{asked} too few: with the smallest of the qtypes for each parameter it takes {need}. "
            "Allow more, or add smaller qtypes or larger tiles."
        )
    return budget


def _check_used(measure: Measure, options: Options, errors: Costs) -> None:
    """Raise QuantizationError for parameters that don't change the batch's output."""
    unused = [
        joined(paths)
        for paths, some in options.items()
        if not any(errors[paths])
        and any(measure.is_changed(weight) for option in some for weight in option.weights)
    ]
    if unused:
        raise QuantizationError(
            f"Quantizing {', '.join(unused)} does not change the output for this batch. Give a "
            "batch that uses it, or leave it float by a rule in front: "
            "QuantizationRule(weight_path=..., op_names=[...]) without qtypes."
        )


def _row(weight: WeightPlan, error: float) -> AllocatedWeight:
    tiles = [*weight.granularity.tile_axes.values(), None]
    elements = math.prod(weight.shape)
    return AllocatedWeight(weight.path, elements, weight.qtype, tiles[0], weight.bytes_after, error)


def _uniform(
    options: Options,
    errors: Costs,
    measure: Measure,
    candidates: Sequence[Candidate],
) -> Iterable[Uniform]:
    """Yield what each candidate alone costs, where all parameters can have it."""
    elements = _elements(options)
    for candidate in candidates:
        places = {}
        for paths, some in options.items():
            same = [j for j, option in enumerate(some) if option.candidate in (candidate, None)]
            if same:
                places[paths] = same[0]
        if len(places) < len(options):
            continue
        picked = [options[paths][j] for paths, j in places.items()]
        size = sum(option.bytes for option in picked)
        yield Uniform(
            str(candidate),
            size,
            8 * size / max(elements, 1),
            math.fsum(errors[paths][j] for paths, j in places.items()),
            measure(_weights(picked)),
        )


def _planned(
    plan: Plan,
    params: Any,
    batch: Sequence[Any],
    picked: Sequence[Option],
    allocation: Allocation,
) -> Plan:
    """Return the plan of what was chosen.

    Raises:
        QuantizationError: an operation has two parameters, which can't have a format each.
    """
    chosen = {
        path: option.candidate
        for option in picked
        if option.candidate is not None
        for one in option.weights
        for path in one.parameters
    }
    rules, numbers = rules_for(plan, chosen)
    made = replanned(plan, rules, params, batch)
    for path, asked in _weights(picked).items():
        weight = made.weights.get(path)
        # Derived weights are compared by path, since each plan has new expressions.
        same = weight is not None and dataclasses.replace(
            weight, rule=asked.rule, packings={}, platform="", derived=None
        ) == dataclasses.replace(asked, packings={}, platform="", derived=None)
        if not same:
            raise QuantizationError(
                f"{path} can't have {asked.qtype} by a separate rule: an operation of "
                "it has another parameter, too. Leave one of them as it is, by a rule with "
                "weight_path and without qtypes."
            )
    # A rule whose parameters all have separate rules now is not reported as unused.
    unused = {fault.rule for fault in plan.faults if fault.code is Code.UNUSED}
    used = {new for old, new in numbers.items() if old not in unused}
    left = (one for one in made.faults if one.code is not Code.UNUSED or one.rule not in used)
    return dataclasses.replace(made, faults=tuple(left), allocation=allocation)

"""``Plan.allocate``: candidates, their errors, the choice, and the plan of that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..errors import QuantizationError
from ..plan.allocation import AllocatedWeight, Allocation, Uniform
from ..plan.check import check_parameters
from ..plan.make import make_plan
from .candidates import Candidate, Option, make_candidates, options_of, rules_for
from .knapsack import choose
from .measure import Error, Measure

if TYPE_CHECKING:
    from ..plan.plan import PlanData

Options = Mapping[str, Sequence[Option]]
Errors = Mapping[str, Mapping[str, float]]


def allocate(
    plan: PlanData,
    params: Any,
    batch: Sequence[Any],
    *,
    budget_bits: float | None,
    budget_bytes: int | None,
    qtypes: Iterable[Any],
    tile_size: Any,
    error: Error | None,
    errors: Errors | None,
) -> PlanData:
    """Makes a plan with the least error within a budget: see ``Plan.allocate``."""
    from tqdm import tqdm

    candidates = make_candidates(qtypes, tile_size)
    own = {path: weight for path, weight in plan.weights.items() if weight.derived is None}
    if plan.weights and not own:
        raise QuantizationError(
            "There is nothing to allocate: every weight of the plan is derived from parameters "
            f"({', '.join(plan.weights)}), and these keep the format of their rule."
        )
    if not own:
        raise QuantizationError(
            "There is nothing to allocate: the plan quantizes no parameter. Its rules need a "
            "weight_qtype; print(plan) says why each operation stays float."
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    leaves = {plan.prefix + jax.tree_util.keystr(path): leaf for path, leaf in flat}
    check_parameters(plan, leaves)
    for path, weight in own.items():
        weight.check(leaves[path])
    options = options_of(plan, params, batch, candidates)
    budget = _budget(plan, options, budget_bits, budget_bytes)

    measure = Measure(plan, params, batch, error)
    total = sum(map(len, options.values()))
    known: Errors = errors or {}
    table: dict[str, dict[str, float]] = {path: {} for path in options}
    with tqdm(total=total, unit="run", desc="measuring", disable=None) as bar:
        for path, some in options.items():
            for option in some:
                found = known.get(path, {}).get(option.name)
                found = measure({path: option.weight}) if found is None else float(found)
                table[path][option.name] = found
                bar.update()
    costs = {path: list(row.values()) for path, row in table.items()}
    _check_used(measure, options, costs)

    sizes = [[option.bytes for option in some] for some in options.values()]
    numbers = choose(sizes, list(costs.values()), budget)
    assert numbers is not None  # _budget has looked
    chosen = dict(zip(options, numbers, strict=True))
    picked = {path: options[path][j] for path, j in chosen.items()}
    allocation = Allocation(
        tuple(_row(picked[path], costs[path][j]) for path, j in chosen.items()),
        budget,
        math.fsum(costs[path][j] for path, j in chosen.items()),
        measure({path: option.weight for path, option in picked.items()}),
        tuple(_uniform(options, costs, measure, candidates)),
        table,
    )
    return _planned(plan, params, batch, picked, allocation)


def _budget(plan: PlanData, options: Options, bits: float | None, size: int | None) -> int:
    """Returns the bytes of the quantized parameters, at most.

    Raises:
        ValueError: not one of both is given.
        QuantizationError: it is less than the least that is possible.
    """
    if (bits is None) == (size is None):
        raise ValueError(
            f"Give one of budget_bits and budget_bytes. Got budget_bits={bits!r} and "
            f"budget_bytes={size!r}."
        )
    elements = sum(math.prod(plan.weights[path].shape) for path in options)
    rest = plan.bytes_after - sum(plan.weights[path].bytes_after for path in options)
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


def _check_used(measure: Measure, options: Options, errors: Mapping[str, Sequence[float]]) -> None:
    """Raises QuantizationError for parameters that the batch says nothing about."""
    unused = [
        path
        for path, some in options.items()
        if not any(errors[path]) and any(measure.is_changed(option.weight) for option in some)
    ]
    if unused:
        raise QuantizationError(
            f"Whatever {', '.join(unused)} is quantized to, the output for this batch is the same, "
            "so there is nothing to choose by. Give a batch that uses it, or leave it as it is: "
            "QuantizationRule(weight_path=..., op_names=[...]) without qtypes, in front."
        )


def _row(option: Option, error: float) -> AllocatedWeight:
    weight = option.weight
    tiles = [*weight.granularity.tile_axes.values(), None]
    elements = math.prod(weight.shape)
    return AllocatedWeight(weight.path, elements, weight.qtype, tiles[0], option.bytes, error)


def _uniform(
    options: Options,
    errors: Mapping[str, Sequence[float]],
    measure: Measure,
    candidates: Sequence[Candidate],
) -> Iterable[Uniform]:
    """Yields what each candidate would be by itself, where all parameters can have it."""
    elements = sum(math.prod(some[0].weight.shape) for some in options.values())
    for candidate in candidates:
        places = {}
        for path, some in options.items():
            same = [j for j, option in enumerate(some) if option.candidate in (candidate, None)]
            if same:
                places[path] = same[0]
        if len(places) < len(options):
            continue
        picked = {path: options[path][j] for path, j in places.items()}
        size = sum(option.bytes for option in picked.values())
        yield Uniform(
            str(candidate),
            size,
            8 * size / max(elements, 1),
            math.fsum(errors[path][j] for path, j in places.items()),
            measure({path: option.weight for path, option in picked.items()}),
        )


def _planned(
    plan: PlanData,
    params: Any,
    batch: Sequence[Any],
    picked: Mapping[str, Option],
    allocation: Allocation,
) -> PlanData:
    """Returns the plan of what was chosen.

    Raises:
        QuantizationError: an operation has two parameters, which can't have a format each.
    """
    chosen = {path: o.candidate for path, o in picked.items() if o.candidate is not None}
    rules, numbers = rules_for(plan, chosen)
    kernels = any(op.kernel or op.kernel_reason for op in plan.ops if op.quantized)
    made = make_plan(rules, plan.engine, plan.argnum, plan.fn, params, tuple(batch), {}, kernels)
    for path, option in picked.items():
        weight = made.weights.get(path)
        same = weight is not None and dataclasses.replace(
            weight, rule=option.weight.rule, packing=None
        ) == dataclasses.replace(option.weight, packing=None)
        if not same:
            raise QuantizationError(
                f"{path} can't have {option.weight.qtype} by a rule of its own: an operation of "
                "it has another parameter, too. Leave one of them as it is, by a rule with "
                "weight_path and without qtypes."
            )
    # A rule whose parameters all have a rule of their own now is none that decides nothing.
    before = {f"rule {i} decides nothing" for i in range(len(plan.rules.rules))}
    before -= {problem.partition(":")[0] for problem in plan.problems}
    known = {
        f"rule {numbers[i]} decides nothing"
        for i in (int(text.split()[1]) for text in before)
        if i in numbers
    }
    problems = tuple(p for p in made.problems if p.partition(":")[0] not in known)
    return dataclasses.replace(made, problems=problems, allocation=allocation)

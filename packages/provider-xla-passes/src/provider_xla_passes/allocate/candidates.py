"""Candidates: the formats that each parameter could have, with their rules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

import quant_numerics as qn
from provider_xla import WeightPlan
from provider_xla.features import Rules, by_path, joined, tried

if TYPE_CHECKING:
    from provider_xla import Plan

OWN = "rule"
"""The tile size of the rule that decides a parameter."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A format that parameters could have.

    Attributes:
        qtype: its name.
        tile_size: as in a rule, or ``OWN``; formats with blocks have tiles of their block.
    """

    qtype: str
    tile_size: Any = OWN

    def rule(self, rule: Any, **fields: Any) -> Any:
        """Return a rule with this format for parameters."""
        fields["weight_qtype"] = self.qtype
        kind = qn.get_qtype(self.qtype)
        if rule.scale_dtype is not None and jnp.dtype(rule.scale_dtype) not in kind.scale_dtypes:
            fields["scale_dtype"] = None
        if kind.block is not None:
            fields["tile_size"] = None
        elif self.tile_size != OWN:
            fields["tile_size"] = self.tile_size
            # No fallback: a parameter that these tiles don't divide has no such candidate.
            fields["tile_fallback"] = None
        return dataclasses.replace(rule, **fields)

    def __str__(self) -> str:
        plain = self.tile_size in (OWN, None) or qn.get_qtype(self.qtype).block is not None
        return self.qtype if plain else f"{self.qtype} in tiles of {self.tile_size}"


@dataclasses.dataclass(frozen=True)
class Option:
    """What one parameter and the weights computed from it can be.

    Attributes:
        candidate: the format; None for that of the plan, if no candidate is possible.
        weights: how they are quantized then, as quantized values and scales.
    """

    candidate: Candidate | None
    weights: tuple[WeightPlan, ...]

    @property
    def name(self) -> str:
        """What it is called among the options of its parameter."""
        if self.candidate is not None:
            return str(self.candidate)
        return joined(dict.fromkeys(weight.qtype for weight in self.weights))

    @property
    def bytes(self) -> int:
        """Return the bytes of quantized values and scales."""
        return sum(weight.bytes_after for weight in self.weights)

    @property
    def by_path(self) -> dict[str, WeightPlan]:
        """The weights, by path."""
        return {weight.path: weight for weight in self.weights}


def groups_of(plan: Plan) -> list[tuple[str, ...]]:
    """Return the groups of weights that have one format: their paths.

    A rule decides by the paths of parameters, so weights that share a parameter share a format.
    """
    groups: list[tuple[list[str], set[str]]] = []
    for path, weight in plan.weights.items():
        leaves = set(weight.parameters)
        sharing = [group for group in groups if not group[1].isdisjoint(leaves)]
        groups = [group for group in groups if group[1].isdisjoint(leaves)]
        paths = [one for group in sharing for one in group[0]]
        groups.append(([*paths, path], leaves.union(*(group[1] for group in sharing))))
    return [tuple(paths) for paths, _ in groups]


def make_candidates(qtypes: Iterable[Any], tile_size: Any) -> list[Candidate]:
    """Return all combinations, each once.

    Raises:
        ValueError: ``qtypes`` is empty, or has one that doesn't exist.
    """
    if isinstance(qtypes, str):
        raise ValueError(
            f"qtypes must be a sequence of qtypes. Got {qtypes!r}: write [{qtypes!r}]."
        )
    names = [qn.get_qtype(qtype).name for qtype in qtypes]
    if not names:
        raise ValueError("qtypes is empty: give those to choose from, as ['int4', 'int8'].")
    sizes = [OWN] if tile_size is None else tile_size
    if isinstance(sizes, int | float):
        sizes = [sizes]
    found = (
        Candidate(name, OWN if qn.get_qtype(name).block is not None else size)
        for size in sizes
        for name in names
    )
    return list(dict.fromkeys(found))


def options_of(
    plan: Plan, params: Any, batch: Sequence[Any], candidates: Sequence[Candidate]
) -> dict[tuple[str, ...], list[Option]]:
    """Return what weights can be, by group: see ``groups_of``.

    A group lacks a candidate if an operation of its weights has no quantized form in it.
    """
    trials: dict[Any, dict[str, WeightPlan]] = {}
    options: dict[tuple[str, ...], list[Option]] = {paths: [] for paths in groups_of(plan)}
    leaves, _ = by_path(params, plan.prefix)
    for candidate in candidates:
        # All formats without blocks have scales at the same places.
        block = qn.get_qtype(candidate.qtype).block
        key = (candidate.tile_size, block and candidate.qtype)
        if key not in trials:
            rules = tuple(
                rule if rule.weight_qtype is None else candidate.rule(rule)
                for rule in plan.rules.rules
            )
            trials[key] = tried(plan, Rules(rules, plan.rules.params), params, batch)
        found = trials[key]
        for paths, some in options.items():
            if all(path in found for path in paths):
                own = (dataclasses.replace(found[p], qtype=candidate.qtype) for p in paths)
                # Derived weights have no leaf: their values are unknown here.
                own = (one.of_values(leaves.get(one.path)) for one in own)
                some.append(Option(candidate, tuple(own)))
    for paths, some in options.items():
        if not some:
            own = (dataclasses.replace(plan.weights[path], packings={}) for path in paths)
            some.append(Option(None, tuple(own)))
    return options


def rules_for(plan: Plan, chosen: Mapping[str, Candidate]) -> tuple[Rules, dict[int, int]]:
    """Return rules for the chosen formats and the plan's for the rest, and old ones' new numbers.

    Each new rule comes right before the rule that it narrows, so that earlier rules still win.
    Parameters with the same format share a rule, and so can share traces. A rule whose parameters
    all have new ones has no new number.
    """
    deciding: dict[int, dict[Candidate, list[str]]] = {}
    for record in plan.ops:
        if record.rule is None or not record.quantized:
            continue
        if plan.rules.rules[record.rule].weight_qtype is None:
            continue
        for path in record.paths:
            if path in chosen:
                paths = deciding.setdefault(record.rule, {}).setdefault(chosen[path], [])
                paths.append(path.removeprefix(plan.rules.params))
    every = plan.rules.below(plan.leaves)
    rules: list[Any] = []
    numbers = {}
    for i, rule in enumerate(plan.rules.rules):
        narrowed = set()
        for candidate, paths in deciding.get(i, {}).items():
            narrowed.update(paths)
            pattern = "|".join(re.escape(path) for path in dict.fromkeys(paths))
            rules.append(candidate.rule(rule, weight_path=pattern, kernel=None))
        about = {path for path in every if rule.matches_weight((path,))}
        if rule.weight_path is None or not narrowed or about > narrowed:
            numbers[i] = len(rules)
            rules.append(rule)
    return Rules(tuple(rules), plan.rules.params), numbers

"""The plan of a program whose loops are written out: what is decided for a loop, for each step.

Nothing is decided again. A step's operations are those of the loop, in the same order, so that the
k-th call of a name under a module path is the k-th of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from provider_odml import OdmlError, OdmlQatProvider, Plan
from provider_odml.features import (
    Calls,
    ConstantUse,
    Decision,
    Site,
    SiteUse,
    Use,
    WeightUse,
    calls_of,
    keeps_loops,
)

from .unroll import NEVER, first_step, scopes_of_steps, unrolled

Step = tuple[int, ...]
"""The number of a step in each loop that is written out, the outermost first."""


@dataclass(frozen=True)
class WrittenOut:
    """A plan for a program whose loops are written out.

    Attributes:
        plan: the plan.
        origins: by site: its key in the plan of the program with loops, and its step.
    """

    plan: Plan
    origins: Mapping[str, tuple[str, Step]]


@dataclass(frozen=True)
class Unrolled(WrittenOut):
    """A program whose loops are written out, with its plan.

    Attributes:
        fn: the program.
        trained: the plan of the program with loops.
    """

    fn: Callable[..., Any]
    trained: Plan


def planned(
    provider: OdmlQatProvider, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Unrolled:
    """Write out a program's loops, and return it with its plan.

    Args:
        provider: plans the program as it was trained.
        fn: the program.
        args: its arguments, with the parameters.
        kwargs: its keyword arguments.

    Raises:
        OdmlError: the rules can't be followed, or a loop can't be written out.
    """
    engine = provider._engine
    trained = provider._plan(fn, args, kwargs)
    flat = unrolled(fn, keeps_loops(engine))
    found = written_out(trained, calls_of(engine, flat, args, kwargs))
    _check_loops(found.plan)
    return Unrolled(found.plan, found.origins, flat, trained)


def _check_loops(plan: Plan) -> None:
    """Refuse a rolled loop whose steps read different parameters: a file has one of each."""
    for op_id, decision in plan.decisions.items():
        reads = [
            use for use in decision.inputs.values() if isinstance(use, WeightUse | ConstantUse)
        ]
        if reads and any(length is not None for length in decision.node.loops):
            raise OdmlError(
                f"A loop that reads a parameter must be one that export writes out, got {op_id} in "
                f"a loop of {decision.node.loops} steps. Use jax.lax.scan, fori_loop or a Python "
                "loop, called while the model runs."
            )


def written_out(plan: Plan, calls: Calls) -> WrittenOut:
    """Return a plan of a program with loops as one of the program without.

    Args:
        plan: of the program with loops, as it was trained.
        calls: of the program without.

    Raises:
        OdmlError: a loop has other operations in its steps than as a loop.
    """
    return _Steps(plan, calls).result()


class _Steps:
    """Finds, for each call of a written-out program, the call of the loop that it is a step of."""

    def __init__(self, plan: Plan, calls: Calls):
        self._plan = plan
        self._calls = calls
        self._of = _counterparts(plan, calls)
        self._ids = {found: op_id for op_id, found in self._of.items()}
        self._depths = {op_id: len(step) for op_id, step in self._of.values()}

    def result(self) -> WrittenOut:
        """Return the plan."""
        decisions, sites, origins = {}, {}, {}
        for op_id, (rolled, step) in self._of.items():
            decision = self._plan.decisions.get(rolled)
            if decision is None or NEVER in self._calls.places[op_id][0]:
                continue
            decisions[op_id] = self._decision(decision, op_id, step)
            for use in (*decision.inputs.values(), decision.output):
                if isinstance(use, SiteUse):
                    key, own = self._key(use.site, step)
                    site = self._plan.sites[use.site]
                    sites[key] = self._site(site, key, step)
                    origins[key] = use.site, own
        functions = self._calls.functions | self._plan.calls.functions
        calls = Calls(self._calls.places, functions)
        plan = replace(self._plan, decisions=decisions, sites=sites, calls=calls)
        return WrittenOut(plan, origins)

    def _decision(self, decision: Decision, op_id: str, step: Step) -> Decision:
        node = decision.node
        known = [length for length in node.loops if length is not None]
        node = replace(
            node,
            op_id=op_id,
            begin=None if node.begin is None else self._id(node.begin, step),
            uses=tuple(self._read(use, step) for use in node.uses),
            # Those that stay loops.
            loops=(*known[len(step) :], *(one for one in node.loops if one is None)),
        )
        inputs = {slot: self._use(use, step) for slot, use in decision.inputs.items()}
        head = None if decision.head is None else self._id(decision.head, step)
        reads = None if decision.reads is None else self._key(decision.reads, step)[0]
        output = self._use(decision.output, step)
        return replace(decision, node=node, inputs=inputs, output=output, head=head, reads=reads)

    def _read(self, use: Use, step: Step) -> Use:
        return use if use.tensor is None else replace(use, tensor=self._key(use.tensor, step)[0])

    def _use(self, use: Any, step: Step) -> Any:
        if not isinstance(use, SiteUse):
            return use
        # A loop's steps may read parts of any input.
        has_loops = any(self._depths.values())
        key = self._key(use.site, step)[0]
        return replace(use, site=key, is_part=use.is_part or has_loops)

    def _site(self, site: Site, key: str, step: Step) -> Site:
        return replace(site, key=key, tensor=self._key(site.tensor, step)[0], steps=())

    def _key(self, key: str, step: Step) -> tuple[str, Step]:
        """Return the name of a tensor or site in a step, and how far into the loops it is."""
        # Behind the op id there may be a slot and a qtype.
        folder, slash, name = key.rpartition("/")
        op_name = name.partition("#")[0].partition("@")[0]
        op_id = f"{folder}{slash}{op_name}"
        depth = self._depths.get(op_id)
        if not depth:
            return key, ()
        return self._id(op_id, step) + name[len(op_name) :], step[:depth]

    def _id(self, op_id: str, step: Step) -> str:
        """Return a call in a step: one of the loop's, or of a loop around it."""
        return self._ids.get((op_id, step[: self._depths[op_id]]), op_id)


def _counterparts(plan: Plan, calls: Calls) -> dict[str, tuple[str, Step]]:
    """Return, by op id without loops, the op id with loops and the step."""
    rolled: dict[tuple[str, str], list[str]] = {}
    for op_id, place in plan.calls.places.items():
        rolled.setdefault(place, []).append(op_id)
    seen: dict[tuple[str, str], dict[str, int]] = {}
    found = {}
    for op_id, (path, name) in calls.places.items():
        plain, step = scopes_of_steps(path)
        place = plain, name
        numbers = seen.setdefault(place, {})
        number = numbers.setdefault(first_step(path) + op_id[len(path) :], len(numbers))
        if number < len(rolled.get(place, ())):
            found[op_id] = rolled[place][number], step
    for place, ids in rolled.items():
        count = len(seen.get(place, ()))
        if count != len(ids) and any(op_id in plan.decisions for op_id in ids):
            raise OdmlError(
                f"A loop must have the same operations in each step, got {count} of {place[1]} "
                f"instead of {len(ids)} under {place[0]!r}. Let its body not look at the values of "
                "numbers or arrays in Python."
            )
    return found

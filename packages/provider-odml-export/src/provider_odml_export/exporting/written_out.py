"""The plan of a program whose loops are written out: what is decided for a loop, for each step.

Nothing is decided again, and no operation is looked for: the operations of the staged program have
the ids of the plan, and those of its steps have the steps' numbers beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from provider_odml import OdmlError, Plan, QatModel
from provider_odml.features import (
    ConstantUse,
    Decision,
    Op,
    Site,
    SiteUse,
    Use,
    WeightUse,
    equations_in,
    split,
)

from .loops import At, Handler, Plain, StepCall, written_out
from .staged import Staged, operation_p, stage

Step = tuple[int, ...]
"""The number of a step in each loop that is written out, the outermost first."""


@dataclass(frozen=True)
class WrittenOut:
    """A program whose loops are written out, with its plan.

    Attributes:
        staged: the program, with loops.
        trained: its plan.
        plan: the plan of the program with its loops written out.
        origins: by site of that: its key in the plan of the program with loops, and its step.
    """

    staged: Staged
    trained: Plan
    plan: Plan
    origins: Mapping[str, tuple[str, Step]]

    def run(self, handler: Handler, arrays: Sequence[Any]) -> Any:
        """Return the program's results.

        Args:
            handler: what is done at each operation.
            arrays: those among its arguments.
        """
        found = written_out(self.staged.jaxpr, handler, arrays)
        return jax.tree.unflatten(jax.tree.structure(self.staged.out), found)


def planned(model: QatModel, args: tuple, kwargs: dict[str, Any]) -> WrittenOut:
    """Return a model's program with its loops written out, and its plan, unchecked.

    Args:
        model: the function, with the plan that it was trained by.
        args: its arguments, with the parameters.
        kwargs: its keyword arguments.

    Raises:
        OdmlError: a loop can't be written out.
    """
    plan = model.unchecked_plan(args, kwargs)
    staged = stage(model.provider.runs_on, model.fn, plan, args, kwargs)
    _check_staged(plan, staged)
    instances = _Instances(plan)
    arrays, _ = split((args, kwargs))
    jax.eval_shape(lambda arrays: written_out(staged.jaxpr, instances, arrays), arrays)
    found = _Steps(plan, instances.found)
    result = WrittenOut(staged, plan, *found.result())
    _check_loops(result.plan)
    return result


def _check_staged(plan: Plan, staged: Staged) -> None:
    """Refuse a program that does not show an operation as it was planned."""
    operations = (
        eqn.params["operation"]
        for eqn in equations_in(staged.jaxpr)
        if eqn.primitive is operation_p
    )
    missing = set(plan.decisions) - {one.place.at(()) for one in operations}
    if missing:
        raise OdmlError(
            "Export must find every operation of the plan in the program, got none of "
            f"{', '.join(sorted(missing)[:5])}. Let the function do the same in each call."
        )


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


class _Instances(Plain):
    """Finds the steps in which each operation of a plan is computed.

    Attributes:
        found: the operations in the program's order, with where they are.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self.found: dict[tuple[str, Step], tuple[str, At]] = {}

    def __call__(self, op: Op, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        """Note an operation, and let it run."""
        rolled = call.operation.place.at(())
        self.found.setdefault((rolled, call.at.steps), (call.op_id, call.at))
        return super().__call__(op, call, *args, **kwargs)


class _Steps:
    """Makes the decisions of a loop those of its steps."""

    def __init__(self, plan: Plan, instances: Mapping[tuple[str, Step], tuple[str, At]]):
        self._plan = plan
        self._instances = instances
        self._depths = {rolled: len(step) for rolled, step in instances}

    def result(self) -> tuple[Plan, dict[str, tuple[str, Step]]]:
        """Return the plan, and where its sites are from: see ``WrittenOut``."""
        decisions, sites, origins = {}, {}, {}
        for (rolled, step), (op_id, at) in self._instances.items():
            decision = self._plan.decisions.get(rolled)
            if decision is None:
                continue
            decisions[op_id] = self._decision(decision, op_id, at)
            for use in (*decision.inputs.values(), decision.output):
                if isinstance(use, SiteUse):
                    site = self._plan.sites[use.site]
                    key, own = self._key(site.key, site.maker, step)
                    sites[key] = self._site(site, key, step)
                    origins[key] = use.site, own
        return replace(self._plan, decisions=decisions, sites=sites), origins

    def _decision(self, decision: Decision, op_id: str, at: At) -> Decision:
        node, step = decision.node, at.steps
        known = [length for length in node.loops if length is not None]
        node = replace(
            node,
            op_id=op_id,
            begin=None if node.begin is None else self._id(node.begin, step),
            uses=tuple(self._read(use, step) for use in node.uses),
            # Those that stay loops.
            loops=(*known[len(step) :], *(one for one in node.loops if one is None)),
            is_chosen=at.is_chosen,
        )
        reads = None if decision.reads is None else self._plan.sites[decision.reads]
        return replace(
            decision,
            node=node,
            inputs={slot: self._use(use, step) for slot, use in decision.inputs.items()},
            output=self._use(decision.output, step),
            head=None if decision.head is None else self._id(decision.head, step),
            reads=None if reads is None else self._key(reads.key, reads.maker, step)[0],
            row_of=None if decision.row_of is None else self._id(decision.row_of, step),
        )

    def _read(self, use: Use, step: Step) -> Use:
        return use if use.tensor is None else replace(use, tensor=self._id(use.tensor, step))

    def _use(self, use: Any, step: Step) -> Any:
        if not isinstance(use, SiteUse):
            return use
        # A loop's steps may read parts of any input.
        has_loops = any(self._depths.values())
        key = self._key(use.site, self._plan.sites[use.site].maker, step)[0]
        return replace(use, site=key, is_part=use.is_part or has_loops)

    def _site(self, site: Site, key: str, step: Step) -> Site:
        tensor = self._key(site.tensor, site.maker, step)[0]
        maker = None if site.maker is None else self._id(site.maker, step)
        return replace(site, key=key, tensor=tensor, maker=maker, steps=())

    def _key(self, key: str, maker: str | None, step: Step) -> tuple[str, Step]:
        """Return the name of a tensor or site in a step, and how far into the loops it is.

        Args:
            key: its name, which begins with the id of what makes it.
            maker: that; None for an input.
            step: the step.
        """
        depth = self._depths.get(maker or "", 0)
        if maker is None or not depth:
            return key, ()
        return self._id(maker, step) + key[len(maker) :], step[:depth]

    def _id(self, op_id: str, step: Step) -> str:
        """Return a call in a step: one of the loop's, or of a loop around it."""
        found = self._instances.get((op_id, step[: self._depths.get(op_id, 0)]))
        return op_id if found is None else found[0]

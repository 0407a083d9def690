"""Running a program with its tensors quantized as planned."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from interception_core import Engine, Interceptor, OpCall

from ..capture.ops import Op, Passage, ops
from ..capture.survey import prepared
from ..decide.decision import ConstantUse, Decision, Quantize, Site, SiteUse
from ..decide.plan import Plan


class Runtime(abc.ABC):
    """How tensors are quantized: in training, in calibration, for the device."""

    walls = False
    """Whether what is computed in float is kept apart from what is in integers."""

    @abc.abstractmethod
    def activation(
        self, x: jax.Array, use: SiteUse, site: Site, where: str, call: OpCall
    ) -> jax.Array:
        """Return a tensor quantized with the range of its site.

        Args:
            x: the tensor.
            use: how.
            site: the site.
            where: names it: the op id; with ``#`` and the slot for an operand.
            call: of the operation.
        """

    @abc.abstractmethod
    def parameter(self, x: jax.Array, use: Quantize, where: str) -> jax.Array:
        """Return a quantized parameter, constant or input of a dynamic contraction.

        Args:
            x: the array.
            use: how.
            where: names it: the op id, ``#`` and the slot.
        """

    def enter(self, decision: Decision, x: jax.Array) -> jax.Array:
        """Return the input of a marked operation, as its body gets it."""
        return x

    def joined(self, join: Callable[..., jax.Array], *values: jax.Array) -> jax.Array:
        """Return one value of those of several steps or branches, which are written out.

        Args:
            join: makes it.
            values: those of the steps, or a number and those of the branches.
        """
        return join(*values)

    def run(self, decision: Decision, call: OpCall, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on what was made of its operands."""
        return call.proceed(*args, **kwargs)


def replay(
    engine: Engine, fn: Callable[..., Any], plan: Plan, runtime: Runtime
) -> Callable[..., Any]:
    """Return ``fn`` with its tensors quantized where the plan says so."""
    handler = Replay(plan, runtime)
    active = {d.node.op.target for d in plan.decisions.values() if handler.acts(d)}
    begins = {f"{target}_begin" for target in active}
    handlers = {
        target: functools.partial(handler, op)
        for target, op in ops().items()
        # What functions consist of must not be seen, whether anything is done to them or not.
        if target in active or target in begins or target in plan.functions
    }
    if not handlers:
        return fn
    return engine.wrap(prepared(fn), Interceptor(handlers))


class Replay:
    """The handler of every operation: does what the plan has decided for its id.

    Args:
        plan: the plan.
        runtime: how tensors are quantized.
    """

    def __init__(self, plan: Plan, runtime: Runtime):
        self._plan = plan
        self._runtime = runtime
        self.joined = runtime.joined
        self._begins = {d.node.begin: d for d in plan.decisions.values() if d.node.begin}

    def acts(self, decision: Decision) -> bool:
        """Return whether anything is done at an operation."""
        if decision.is_active or decision.fused:
            return True
        return (
            self._runtime.walls
            and decision.is_float
            and decision.node.op.kind is not Passage.OUTPUT
        )

    def __call__(self, op: Op, call: OpCall, *args: Any, **kwargs: Any) -> Any:
        """Return the results of an operation, or ``NotImplemented`` for what it computes."""
        if op.kind is Passage.BEGIN:
            decision = self._begins.get(call.op_id)
            if decision is None:
                return args[0]
            use, x = decision.inputs.get(0), args[0]
            x = x if use is None else self._quantized(x, use, f"{decision.node.op_id}#0", call)
            return self._runtime.enter(decision, x)
        decision = self._plan.decisions.get(call.op_id)
        if decision is None or not self.acts(decision):
            return NotImplemented if op.is_primitive else call.proceed(*args, **kwargs)
        if decision.node.begin is None:
            args, kwargs = self._with_inputs(decision, call, args, kwargs)
        out = self._runtime.run(decision, call, args, kwargs)
        use = decision.output
        if use is None or isinstance(out, tuple | list):
            return out
        site = self._plan.sites[use.site]
        return self._runtime.activation(out, use, site, decision.node.op_id, call)

    def _with_inputs(
        self, decision: Decision, call: OpCall, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        changed, named = list(args), dict(kwargs)
        for slot, use in decision.inputs.items():
            where = f"{decision.node.op_id}#{slot}"
            if isinstance(slot, int):
                changed[slot] = self._quantized(args[slot], use, where, call)
            else:
                named[slot] = self._quantized(kwargs[slot], use, where, call)
        return tuple(changed), named

    def _quantized(self, x: Any, use: Quantize, where: str, call: OpCall) -> jax.Array:
        x = jnp.asarray(x)
        if isinstance(use, SiteUse):
            return self._runtime.activation(x, use, self._plan.sites[use.site], where, call)
        return self._runtime.parameter(x, use, where)


def inverted(decision: Decision) -> bool:
    """Return whether an operation divides by a constant whose inverse is quantized."""
    use = decision.inputs.get(1)
    return isinstance(use, ConstantUse) and use.inverted

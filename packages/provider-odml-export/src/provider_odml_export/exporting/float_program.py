"""The float program of a signature: its operations carry their ids into the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from provider_odml.features import PRIMITIVE, Decision, Op, Passage, Scales

from ..forms import FORMS
from ..litert import Program
from .loops import Plain, StepCall
from .program import Exported


def marker(op_id: str) -> str:
    """Return the name scope that an operation is put under: no path, and no end of a name."""
    return op_id.replace("/", ".").replace(";", ",")


def float_program(one: Exported) -> Program:
    """Return a signature's program with the parameters as constants, for the converter."""
    visitor = _Visitor(one.plan.decisions)

    def run(*inputs: Any) -> Any:
        return tuple(jax.tree.leaves(one.run(visitor, inputs)))

    return one.lowered(run, one.outputs)


def float_results(one: Exported) -> list[np.ndarray]:
    """Return what JAX computes from the sample data, with nothing quantized."""
    run = jax.jit(lambda inputs: jax.tree.leaves(one.run(Plain(), inputs)))
    return [np.asarray(leaf) for leaf in run(one.samples)]


class _Visitor(Plain):
    """Names every operation of the plan."""

    def __init__(self, decisions: Mapping[str, Decision]):
        self._decisions = decisions

    def __call__(self, op: Op, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        """Compute an operation under its name."""
        decision = self._decisions.get(call.op_id)
        if decision is None or op.kind is Passage.OUTPUT:
            return NotImplemented
        form = FORMS.get(op.target.replace(PRIMITIVE, "jax.lax."))
        if op.kind is Scales.CONTRACTION or decision.node.begin is not None:
            form = None
        with jax.named_scope(marker(call.op_id)):
            return (form or call.proceed)(*args, **kwargs)

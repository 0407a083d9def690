"""The float program of a signature: its operations carry their ids into the file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from interception_core import Interceptor, OpCall
from provider_odml.features import PRIMITIVE, Decision, Op, Passage, Scales, ops, prepared

from ..forms import FORMS
from ..litert import Program
from .program import Exported


def marker(op_id: str) -> str:
    """Return the name scope that an operation is put under: no path, and no end of a name."""
    return op_id.replace("/", ".").replace(";", ",")


def float_program(one: Exported) -> Program:
    """Return a signature's program with the parameters as constants, for the converter."""
    targets = ops()
    visitor = _Visitor(one.plan.decisions)
    handlers = {target: functools.partial(visitor, op) for target, op in targets.items()}
    wrapped = one.engine.wrap(prepared(one.fn), Interceptor(handlers))

    def run(*inputs: Any) -> Any:
        return tuple(jax.tree.leaves(wrapped(*one.filled(inputs))))

    return one.lowered(run, one.outputs)


def float_results(one: Exported) -> list[np.ndarray]:
    """Return what JAX computes from the sample data, with nothing quantized."""
    run = jax.jit(lambda inputs: jax.tree.leaves(one.fn(*one.filled(inputs))))
    return [np.asarray(leaf) for leaf in run(one.samples)]


class _Visitor:
    """Names every operation of the plan."""

    def __init__(self, decisions: Mapping[str, Decision]):
        self._decisions = decisions

    def __call__(self, op: Op, call: OpCall, *args: Any, **kwargs: Any) -> Any:
        # What is tapped is what the survey taps: ids count the operations of a target.
        if op.kind is Passage.NAME:
            return NotImplemented
        decision = self._decisions.get(call.op_id)
        if decision is None or op.kind is Passage.OUTPUT:
            return call.proceed(*args, **kwargs)
        form = FORMS.get(op.target.replace(PRIMITIVE, "jax.lax."))
        if op.kind is Scales.CONTRACTION or decision.node.begin is not None:
            form = None
        with jax.named_scope(marker(call.op_id)):
            return (form or call.proceed)(*args, **kwargs)

"""The survey: one abstract run of a program, which finds its operations and tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from interception_core import Engine, Interceptor, OpCall

from .._compat import is_mapped
from ..errors import OdmlError
from ..trees import is_array, split
from .channels import channels_of, output_channels
from .graph import ACTIVATION, CONSTANT, INSIDE, WEIGHT, Fact, Graph, Node, Use
from .module_calls import bracketed, model_output
from .ops import DEPTHWISE, MARKS, RANDOM, Op, Passage, Scales, is_float, methods, ops
from .vmapped import lifted

NOTE = "odml"
"""What facts are attached under."""

BRANCHES = ("cond(", "switch(")
"""How the label of a branch begins."""


def survey(engine: Engine, fn: Callable[..., Any], params: str, args: Any, kwargs: Any) -> Graph:
    """Find the operations of ``fn(*args, **kwargs)``. Nothing is run.

    Args:
        engine: runs it.
        fn: the function.
        params: begins the pytree path of every parameter.
        args: positional arguments: arrays or ``jax.ShapeDtypeStruct``, and others.
        kwargs: keyword arguments.
    """
    graph = Graph()
    visit = _Visitor(graph, params, keeps_loops(engine)).visit
    handlers = {target: functools.partial(visit, op) for target, op in ops().items()}
    wrapped = engine.wrap(prepared(fn), Interceptor(handlers))
    arrays, rebuild = split((args, kwargs))

    def run(arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        wrapped(*args, **kwargs)

    jax.eval_shape(run, arrays)
    return graph


def keeps_loops(engine: Engine) -> bool:
    """Return whether loops stay loops in what an engine taps; or run step by step, JIT off."""
    return getattr(engine, "follows_values", False)


def prepared(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with marks: around methods of modules, and at its float results."""
    marked = lifted(bracketed(fn, methods()))

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        out = marked(*args, **kwargs)
        # Looked up at each call: it is tapped there.
        return jax.tree.map(lambda x: model_output(x) if is_float(x) else x, out)

    return call


class _Visitor:
    """Sees every operation once, and attaches facts to what it returns."""

    def __init__(self, graph: Graph, params: str, knows_loops: bool):
        self._graph = graph
        self._knows_loops = knows_loops
        self._params = params

    def visit(self, op: Op, call: OpCall, *args: Any, **kwargs: Any) -> Any:
        """Handle one operation."""
        if op.kind is Passage.NAME:
            return NotImplemented
        if not op.is_primitive:
            self._graph.functions.add(op.target)
        if op.name in RANDOM:
            out = call.proceed(*args, **kwargs)
            _attach(call, out, Fact(CONSTANT))
            return out
        if any(is_mapped(arg) for arg in args):
            raise OdmlError(
                f"A jax.vmap must be called inside the model, got {call.op_id} under one around "
                "it. Call it inside: lambda params, x: jax.vmap(f)(x)."
            )
        slots = op.slots(args, kwargs)
        values = [args[slot] if isinstance(slot, int) else kwargs[slot] for slot in slots]
        facts = [self.fact(call, value) for value in values]
        roles = {None if fact is None else fact.role for fact in facts}
        if op.kind is Scales.CONTRACTION and all(self._is_unknown(call, value) for value in values):
            raise OdmlError(
                "Operands must not come into a jax.checkpoint or a lax.cond with engine='patch', "
                f"got those of {call.op_id}. Use engine='trace'."
            )
        out = call.proceed(*args, **kwargs)
        if op.target.startswith(MARKS):
            out = jnp.copy(out)  # another value than its operand, so that it has separate facts
        inside = next((f for f in facts if f is not None and f.role == INSIDE), None)
        if inside is not None and op.kind is Passage.OUTPUT:
            return out  # statistics of a BatchNorm, say: no reader of its input
        if inside is not None and not op.target.startswith(MARKS):
            _attach(call, out, inside)
        elif ACTIVATION in roles or inside is not None:
            self._active(op, call, out, list(zip(slots, facts, values, strict=True)), inside)
        else:
            known = [fact for x in args if is_array(x) and (fact := self.fact(call, x))]
            others = {fact.role for fact in known}
            if op.kind is Scales.LOOKUP and WEIGHT in roles and ACTIVATION in others:
                self._active(op, call, out, list(zip(slots, facts, values, strict=True)), None)
            elif ACTIVATION in others:
                _attach(call, out, Fact(ACTIVATION))  # of integers: the indices of a lookup
            else:
                is_weight = WEIGHT in others | roles
                paths = {fact.path for fact in [*known, *facts] if fact is not None}
                path = paths.pop() if len(paths) == 1 else None
                _attach(call, out, Fact(WEIGHT, path=path) if is_weight else Fact(CONSTANT))
        return out

    def _active(
        self, op: Op, call: OpCall, out: Any, operands: list[Operand], inside: Fact | None
    ) -> None:
        """Take an operation on activations."""
        active = next((f for _, f, _ in operands if f is not None and f.role == ACTIVATION), None)
        first = jax.tree.leaves(out)[0]
        if op.kind is Passage.BEGIN and active is not None:
            fact = inside or Fact(INSIDE, active.tensor, call.op_id, active.channels)
            _attach(call, out, fact)
        elif op.kind is Passage.VIEW:
            if inside is not None:  # a marked one
                _attach(call, out, Fact(ACTIVATION, inside.tensor))
            elif active is not None:
                before = next(value for _, fact, value in operands if fact is active)
                channels = _moved(active.channels, call, before, first)
                part = active.is_part or first.size < before.size
                _attach(call, out, Fact(ACTIVATION, active.tensor, None, channels, None, part))
        else:
            begin = None
            params = channels_of(op, call.params, operands[0][2].shape if operands else ())
            if inside is not None:
                begin, active = inside.begin, Fact(ACTIVATION, inside.tensor, None, inside.channels)
                operands = [(slot, active, value) for slot, _, value in operands]
            channels: tuple[int, ...] = ()
            if op.kind is Scales.CONTRACTION:
                weights = [fact is None or fact.role != ACTIVATION for _, fact, _ in operands]
                if sum(weights) == 1 and len(operands) == 2:
                    ndims = [value.ndim for _, _, value in operands]
                    channels = output_channels(params, ndims, weights.index(True))
            elif op.kind in (Scales.ARITHMETIC, Scales.NORM) and active is not None:
                channels = active.channels
            self._add(op, call, operands, params, first, begin, channels)
            name = call.op_id if is_float(first) else None
            _attach(call, out, Fact(ACTIVATION, name, channels=channels))

    def _add(
        self,
        op: Op,
        call: OpCall,
        operands: list[Operand],
        params: Mapping[str, Any],
        first: Any,
        begin: str | None,
        channels: tuple[int, ...],
    ) -> None:
        names = {op.name, *(name.rpartition(".")[2] for name in call.within)}
        if params.get("depthwise"):
            names.add(DEPTHWISE)
        self._graph.add(
            Node(
                call.op_id,
                "/".join(filter(None, (call.module_path, call.label, call.op_name))),
                op,
                tuple(names),
                call.module_path,
                tuple(_use(*each) for each in operands),
                tuple(first.shape),
                str(first.dtype),
                params,
                begin,
                channels,
                self._loops(call),
                call.label.startswith(BRANCHES),
            )
        )

    def _loops(self, call: OpCall) -> tuple[int | None, ...]:
        if not self._knows_loops:
            return ()  # they run with JIT off: each step is a separate call
        steps = call.steps
        return (None,) if steps is None else tuple(step.length for step in steps)

    def _is_unknown(self, call: OpCall, value: Any) -> bool:
        """Return whether a traced value is one that the engine has lost."""
        if not isinstance(value, jax.core.Tracer) or call.metadata(value).get(NOTE) is not None:
            return False
        return call.provenance(value) is None and call.roots(value) is None

    def fact(self, call: OpCall, value: Any) -> Fact | None:
        """Return what is known of a value; None for a constant."""
        note: Fact | None = call.metadata(value).get(NOTE)
        if note is not None:
            return None if note.role == CONSTANT else note
        path = call.provenance(value)
        if path is not None:
            is_weight = path.startswith(self._params)
            return Fact(WEIGHT, path=path) if is_weight else Fact(ACTIVATION, path)
        roots = call.roots(value)
        if not roots:
            return None
        weight = all(root.startswith(self._params) for root in roots)
        if not weight:
            return Fact(ACTIVATION)
        return Fact(WEIGHT, path=next(iter(roots)) if len(roots) == 1 else None)


Operand = tuple[int | str, Fact | None, Any]
"""Where an array is in the arguments, what is known of it, and itself."""


def _attach(call: OpCall, out: Any, fact: Fact) -> None:
    for leaf in jax.tree.leaves(out):
        if hasattr(leaf, "dtype"):
            call.annotate(leaf, **{NOTE: fact})


def _moved(channels: tuple[int, ...], call: OpCall, before: Any, after: Any) -> tuple[int, ...]:
    """Return where channels are after a view."""
    if call.op_name == "transpose" and "permutation" in call.params:
        return tuple(call.params["permutation"].index(axis) for axis in channels)
    if call.op_name == "broadcast_in_dim" and "broadcast_dimensions" in call.params:
        places = call.params["broadcast_dimensions"]
        found = tuple(places[axis] for axis in channels)
    elif before.size == after.size:
        # A reshape keeps an axis whose size, and the sizes before it, are what they were.
        axes = {(math.prod(after.shape[:i]), n): i for i, n in enumerate(after.shape)}
        keys = [(math.prod(before.shape[:axis]), before.shape[axis]) for axis in channels]
        found = tuple(axes.get(key, -1) for key in keys)
    else:
        found = channels if before.ndim == after.ndim else ()
    same = all(
        b >= 0 and before.shape[a] == after.shape[b] for a, b in zip(channels, found, strict=False)
    )
    return found if same and len(found) == len(channels) else ()


def _use(slot: int | str, fact: Fact | None, value: Any) -> Use:
    role, tensor = (None, None) if fact is None else (fact.role, fact.tensor)
    scalar = None
    if fact is None and not isinstance(value, jax.core.Tracer) and np.size(value) == 1:
        scalar = float(np.asarray(value, np.float64).reshape(()))
    shape, dtype = tuple(value.shape), str(value.dtype)
    if fact is None:
        return Use(slot, role, tensor, shape, dtype, scalar)
    known = fact.channels, fact.path, fact.is_part
    return Use(slot, role, tensor, shape, dtype, scalar, *known)

"""vmap inside a model: its operations are seen with the batch axis that they get.

Every Equinox model is one for a single example, under ``jax.vmap``. On the device, and for the
ranges of tensors, the program is the batched one. So a mapped function is staged first, in which
JAX turns its operations into batched ones; the functions of the op table are kept whole, and are
called again, on batches, when what was staged is run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from interception_core import Interceptor, OpCall, PatchEngine, loaded, untapped

from .._compat import bind_again, define_batching, scopes_of
from ..jaxprs import Interpreter, checkpoint_again, cond_again, equations_in, while_again
from ..trees import split
from .module_calls import anywhere, bracketed
from .ops import Op, Passage, methods, ops


@dataclass(frozen=True, eq=False)
class _Kept:
    """A call that is kept whole.

    Attributes:
        fn: calls the function with its operand, and the number of that one's batch axes.
        before: how many batch axes its operand has got: they are its first.
    """

    fn: Callable[[jax.Array, int], jax.Array]
    before: int = 0


_is_staging: ContextVar[bool] = ContextVar("staging a mapped function", default=False)


class _Call(Primitive):
    """The call of a function that stays whole while a mapped function is staged."""

    def bind(self, x: Any, *, kept: _Kept) -> Any:
        return super().bind(x, kept=kept) if _is_staging.get() else kept.fn(x, kept.before)


call_p = _Call("odml_call")


@call_p.def_abstract_eval
def _type(x: Any, *, kept: _Kept) -> Any:
    given = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = jax.eval_shape(lambda x: untapped(kept.fn)(x, kept.before), given)
    return x.update(shape=out.shape, dtype=out.dtype, weak_type=False)


define_batching(call_p, lambda x, kept: call_p.bind(x, kept=_Kept(kept.fn, kept.before + 1)))


def lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with the functions that it maps by ``jax.vmap`` batched."""
    interceptor = Interceptor({"jax.vmap": _vmap}, key="odml vmap", path_key=anywhere)
    return PatchEngine().wrap(fn, interceptor)


def _vmap(call: OpCall, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    handlers = {
        target: functools.partial(_keep, op)
        for target, op in ops().items()
        if not op.is_primitive and op.kind is not Passage.NAME
    }
    whole = PatchEngine(disable_jit=True).wrap(bracketed(fun, methods()), Interceptor(handlers))
    mapped = call.proceed(whole, *args, **kwargs)

    @functools.wraps(fun, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        # Others are options: None, numbers, strings.
        arrays, rebuild = split((args, kwargs))

        def on_arrays(*arrays: Any) -> Any:
            args, kwargs = rebuild(arrays)
            return mapped(*args, **kwargs)

        stage = functools.partial(jax.make_jaxpr, return_shape=True)
        token = _is_staging.set(True)
        try:
            closed, out = untapped(stage(on_arrays))(*arrays)
        finally:
            _is_staging.reset(token)
        return jax.tree.unflatten(jax.tree.structure(out), _Batched().run(closed, arrays))

    return run


class _Batched(Interpreter):
    """Runs what was staged, under its name scopes."""

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        holds_calls = any(one.primitive is call_p for one in equations_in(*eqn.params.values()))
        again = _AGAIN.get(eqn.primitive.name) if holds_calls else None
        with contextlib.ExitStack() as scopes:
            for name in scopes_of(eqn):
                scopes.enter_context(jax.named_scope(name))
            return bind_again(eqn, operands) if again is None else again(eqn, operands, self.run)


_AGAIN = {
    "checkpoint": checkpoint_again,
    "remat2": checkpoint_again,
    "cond": cond_again,
    "while": while_again,
}
"""By primitive, how an equation that holds kept calls is made again. JAX runs others as functions,
and with JIT off it has written out scans and jitted functions."""


def _keep(op: Op, call: OpCall, *args: Any, **kwargs: Any) -> Any:
    """Keep a call whole: one of a single array, the first of the operands."""
    slots = op.slots(args, kwargs)
    arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "dtype")]
    if len(slots) != 1 or len(arrays) != 1:
        return NotImplemented
    slot = slots[0]
    x = args[slot] if isinstance(slot, int) else kwargs[slot]

    # Without the operand: what is kept must not hold a tracer.
    args = tuple(None if place == slot else arg for place, arg in enumerate(args))
    kwargs = {name: None if name == slot else arg for name, arg in kwargs.items()}

    def fn(x: jax.Array, before: int) -> jax.Array:
        given = list(args)
        named = dict(kwargs)
        if isinstance(slot, int):
            given[slot] = x
        else:
            named[slot] = x
        if before:
            shift = _SHIFTS.get(op.name)
            if shift is not None:
                given, named = shift(x, given, named, before)
        # Looked up when it is called: it is tapped there.
        return loaded(op.target)(*given, **named)

    return call_p.bind(x, kept=_Kept(fn))


Arguments = tuple[list[Any], dict[str, Any]]


def _axis(place: int, default: Any) -> Callable[..., Arguments]:
    """Shift the argument that names axes."""

    def shift(x: jax.Array, args: list[Any], kwargs: dict[str, Any], before: int) -> Arguments:
        axis = args[place] if len(args) > place else kwargs.get("axis", default)
        if axis is None:
            axis = tuple(range(before, x.ndim))
        else:
            many = axis if isinstance(axis, tuple | list) else (axis,)
            many = tuple(a if a < 0 else a + before for a in many)
            axis = many if isinstance(axis, tuple | list) else many[0]
        if len(args) > place:
            return [*args[:place], axis, *args[place + 1 :]], kwargs
        return args, {**kwargs, "axis": axis}

    return shift


def _shape(x: jax.Array, args: list[Any], kwargs: dict[str, Any], before: int) -> Arguments:
    if len(args) > 1:
        return [args[0], (*x.shape[:before], *args[1]), *args[2:]], kwargs
    return args, {**kwargs, "shape": (*x.shape[:before], *kwargs["shape"])}


def _pad(x: jax.Array, args: list[Any], kwargs: dict[str, Any], before: int) -> Arguments:
    width = args[1] if len(args) > 1 else kwargs["pad_width"]
    pairs = np.broadcast_to(np.asarray(width), (x.ndim - before, 2))
    own = [tuple(map(int, pair)) for pair in pairs]
    padded = ((0, 0),) * before + tuple(own)
    if len(args) > 1:
        return [args[0], padded, *args[2:]], kwargs
    return args, {**kwargs, "pad_width": padded}


_SHIFTS: Mapping[str, Callable[..., Arguments]] = {
    "softmax": _axis(1, -1),
    "log_softmax": _axis(1, -1),
    "mean": _axis(1, None),
    "var": _axis(1, None),
    "standardize": _axis(1, -1),
    "repeat": _axis(2, None),
    "resize": _shape,
    "pad": _pad,
}
"""By name, how the arguments of a function change with the batch axes of its operand."""

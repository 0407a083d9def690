"""Marks: identities that tell the handlers where a model, or a module in it, begins and ends.

A method of a module, such as ``LayerNorm.__call__``, reads and writes the module's state, so an
engine can't show its call as one operation. What is in it lies between two marks instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from interception_core import Interceptor, OpCall, PatchEngine


def _mark(doc: str) -> Callable[[Any], Any]:
    """Return a separate identity: engines tap functions by their names here."""

    def mark(x: Any) -> Any:
        return x

    mark.__doc__ = doc
    return mark


model_output = _mark("Return an output of the model.")
norm_op_begin = _mark("Return the input of a normalization.")
norm_op = _mark("Return the output of a normalization.")
batch_norm_op_begin = _mark("Return the input of a BatchNorm.")
batch_norm_op = _mark("Return the output of a BatchNorm.")
dropout_begin = _mark("Return the input of a Dropout.")
dropout = _mark("Return the output of a Dropout.")
avg_pool_begin = _mark("Return the input of a module that takes averages.")
avg_pool = _mark("Return the output of a module that takes averages.")
max_pool_begin = _mark("Return the input of a module that takes maxima.")
max_pool = _mark("Return the output of a module that takes maxima.")


_PLACES = {"inputs": 1, "x": 1}
_TRAINED_OTHERWISE = ("batch_norm_op", "dropout")
"""The modules that compute something else in training than in evaluation."""


def _scope(name: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if name is None else jax.named_scope(name)


def bracketed(fn: Callable[..., Any], methods: dict[str, str]) -> Callable[..., Any]:
    """Return ``fn`` with the calls of methods between marks.

    Args:
        fn: the function.
        methods: by target, the name of the mark.
    """
    if not methods:
        return fn
    handlers = {target: _Bracket(name) for target, name in methods.items()}
    key = ("odml marks", *sorted(methods))
    return PatchEngine().wrap(fn, Interceptor(handlers, key=key, path_key=anywhere))


def anywhere(path: str) -> None:
    """The ``path_key`` of handlers that don't look at paths: JAX traces once for all modules."""


class _Bracket:
    """Puts a call between marks."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, call: OpCall, *args: Any, **kwargs: Any) -> Any:
        place: int | str | None = 1 if len(args) > 1 else None
        if place is None:
            place = next((name for name in _PLACES if name in kwargs), None)
        if place is None:
            return NotImplemented
        begin, end = globals()[f"{self._name}_begin"], globals()[self._name]
        name = getattr(args[0], "name", None)
        # A Linen module's operations have its name in their ids. Those of a module without a name
        # are counted with all others, and training has more of them than evaluation.
        is_named = isinstance(name, str)
        inner = _scope(self._name if not is_named and self._name in _TRAINED_OTHERWISE else None)
        with _scope(name if is_named else None):
            x = begin(args[place] if isinstance(place, int) else kwargs[place])
        with inner:
            if isinstance(place, int):
                out = call.proceed(args[0], x, *args[2:], **kwargs)
            else:
                out = call.proceed(*args, **{**kwargs, place: x})
        with _scope(name if is_named else None):
            # equinox's BatchNorm returns its state beside.
            return (end(out[0]), *out[1:]) if isinstance(out, tuple) else end(out)

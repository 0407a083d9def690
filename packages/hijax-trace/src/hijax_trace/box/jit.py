"""jit: ``jax.jit`` for functions that change the types of Boxes.

One ``jax.jit`` compiles the function, with the given options. If the function changes the type of a
Box, the new contents are extra outputs of the program, and the Box gets them after the call. Boxes
that are closed over are part of the program, as closed-over arrays are for ``jax.jit``. If one gets
another type, the function is compiled again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax

from interception_core import CacheKey

from .. import compat
from . import scope
from .box import Box, collect
from .contents import BoxType, Contents, mut_types, record_mut_types
from .guard import explained
from .run import Repeated, Result, Run, apply, is_box

# A part of the key of JAX's caches, so that programs do not share the traces made inside of them.
_PROGRAM = CacheKey()
_NUMBERS = itertools.count(1)


_KEPT = 8
"""How many programs are kept. Each keeps the contents of the Boxes that it closes over."""


@dataclasses.dataclass(eq=False, slots=True)
class _Program:
    """A compiled function, valid while its closed-over Boxes have the same contents.

    Attributes:
        held: these Boxes, with their contents when it was traced.
        number: identifies the traces that are made inside of it.
        jitted: the function.
    """

    held: dict[Box, Contents]
    number: int | None = None
    jitted: Any = None

    def fits(self) -> bool:
        """Return whether the Boxes have the same contents now."""
        return all(box._resolved()._current() is held for box, held in self.held.items())


class BoxJit:
    """A function under ``hijax_trace.jit``, called like the function."""

    def __init__(self, fun: Callable, options: dict[str, Any]):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._options = options
        self._always = options.get("out_shardings") is not None
        if self._always:
            options = {**options, "out_shardings": Result(options["out_shardings"], None)}
        self._jit_options = options
        self._lock = threading.RLock()
        self._boxes: list[Box] = []  # the closed-over Boxes, as programs number them
        self._calls = threading.local()
        self._programs = [self._made(_Program({}))]  # the last one used comes first

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<hijax_trace.jit of {getattr(self._fun, '__name__', self._fun)!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, compiled for the types of its arguments and Boxes.

        Raises:
            TypeError: a type changed where it is fixed; see ``Box.set``.
        """
        program = self._programs[0]
        if not program.held:
            # The fast path. Arguments are not searched for Boxes: flattening one raises BoxFound.
            local = scope.LOCAL
            local.none_expected = True
            try:
                result = program.jitted(*args, **kwargs)
            except scope.BoxFound:
                pass
            else:
                # The first trace may have found closed-over Boxes.
                return apply(result, [], self._boxes) if type(result) is Result else result
            finally:
                local.none_expected = False
        return self._through(lambda jitted: jitted, collect((args, kwargs)), args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``jax.jit(f).trace``, whose jaxpr ``mut_types`` knows."""
        traced = self._stage("trace", args, kwargs)
        out = traced.out_info
        if type(out) is Result and out.writes is not None:
            places = _places(args, kwargs)
            record_mut_types(
                traced.jaxpr,
                {
                    places[index] if kind == "argument" else f"closed over[{index}]": type_
                    for kind, index, type_ in out.writes.entries
                    if kind != "new"
                },
            )
        return traced

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``jax.jit(f).lower``.

        Raises:
            TypeError: the function changes the type of a Box.
        """
        changed = mut_types(self.trace(*args, **kwargs).jaxpr)
        if changed:
            raise TypeError(
                "A program that is compiled ahead of time can't change the type of a Box, got one "
                f"that does: {changed}. Call the function once, so that the Box has its final "
                "type, and lower it then."
            )
        return self._stage("lower", args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the types of the results. No Box changes."""
        out = self.trace(*args, **kwargs).out_info
        return out.out if type(out) is Result else out

    def clear_cache(self) -> None:
        """Forget all programs."""
        with self._lock:
            self._programs = [self._made(_Program({}))]

    def index(self, box: Box) -> int:
        """Return the number of a closed-over Box."""
        with self._lock:
            for i, known in enumerate(self._boxes):
                if known is box:
                    return i
            self._boxes.append(box)
            return len(self._boxes) - 1

    def _made(self, program: _Program) -> _Program:
        fun, always, calls = self._fun, self._always, self._calls

        @functools.wraps(fun)
        def traced(*args: Any, **kwargs: Any) -> Any:
            scope.LOCAL.none_expected = False
            if not compat.is_staging(compat.current_trace()):
                return fun(*args, **kwargs)  # under jax.disable_jit, writes happen at once
            run = Run(self.index, getattr(calls, "arguments", ()))
            args, kwargs = run.adopt(args, kwargs)
            with run:
                out = run.finish(fun(*args, **kwargs), always)
            self._note(run, program)
            return out

        program.jitted = jax.jit(traced, **self._jit_options)
        return program

    def _note(self, run: Run, program: _Program) -> None:
        """Record the contents of closed-over Boxes when a program was traced."""
        with self._lock:
            unknown = [box for box in run.used if box not in program.held]
            program.held.update(run.used)
            if run.aliased and any(box in unknown for box in run.outer):
                # It was traced without the key for an argument that is also closed over, so it is
                # valid for one call alone.
                self._calls.stale = True

    def _prepare(self, boxes: list[Box], args: tuple, kwargs: dict) -> tuple[Any, ...]:
        """Return program, passed Boxes, arguments and context of a call."""
        passed = list(dict.fromkeys(box._resolved() for box in boxes))
        if len(passed) < len(boxes):
            args, kwargs = _once(args, kwargs)
        with self._lock:
            program = self._fitting()
            aliases = tuple(
                (i, j)
                for i, box in enumerate(passed)
                for j, known in enumerate(program.held)
                if known._resolved() is box
            )
            known = list(program.held)
        for run in scope.LOCAL.runs:  # the program around this one uses these Boxes, too
            for box in known:
                if box._resolved() is box:
                    run.uses(box)
        number = program.number
        key = (number, aliases) if number is not None or aliases else None
        return program, passed, args, kwargs, nullcontext() if key is None else _PROGRAM(key)

    def _fitting(self) -> _Program:
        """Return the program for the Boxes' contents, a new one if needed."""
        last = self._programs[0]
        found = next((program for program in self._programs if program.fits()), None)
        if found is None:
            now = {box: box._resolved()._current() for box in last.held}
            found = self._made(_Program(now, next(_NUMBERS)))
        others = [program for program in self._programs if program is not found]
        self._programs = [found, *others[: _KEPT - 1]]
        return found

    def _through(self, method: Callable, boxes: list[Box], args: tuple, kwargs: dict) -> Any:
        program, passed, args, kwargs, context = self._prepare(boxes, args, kwargs)
        if passed:
            self._check_donation(args)
        self._calls.arguments, self._calls.stale = tuple(passed), False
        try:
            with explained(), context:
                result = method(program.jitted)(*args, **kwargs)
        finally:
            self._calls.arguments = ()
        if self._calls.stale:
            with self._lock:
                self._made(program)
        return apply(result, passed, self._boxes) if type(result) is Result else result

    def _stage(self, name: str, args: tuple, kwargs: dict) -> Any:
        staged = []

        def method(jitted: Any) -> Callable:
            return lambda *a, **k: staged.append(getattr(jitted, name)(*a, **k))

        self._through(method, collect((args, kwargs)), args, kwargs)
        return staged[0]

    def _check_donation(self, args: tuple) -> None:
        donated = self._options.get("donate_argnums", ())
        for i in (donated,) if isinstance(donated, int) else donated or ():
            if i < len(args) and collect(args[i]):
                raise TypeError(
                    f"A donated argument must not hold a Box, got one in argument {i}, and a Box "
                    "is updated without a copy already. Leave it out of donate_argnums."
                )


def _once(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments with repetitions of a Box replaced by ``Repeated``."""
    seen: dict[Box, int] = {}

    def mark(x: Any) -> Any:
        if not is_box(x):
            return x
        box = x._resolved()
        if box in seen:
            return Repeated(seen[box])
        seen[box] = len(seen)
        return x

    return jax.tree.map(mark, (args, kwargs), is_leaf=lambda x: is_box(x) or x is None)


def _places(args: tuple, kwargs: dict) -> list[str]:
    """Return the pytree path of each Box among the arguments."""
    found: dict[Box, str] = {}
    for name, tree in (("args", args), ("kwargs", kwargs)):
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_box):
            if is_box(leaf):
                found.setdefault(leaf._resolved(), name + jax.tree_util.keystr(path))
    return list(found.values())


def jit(fun: Callable | None = None, /, **options: Any) -> Any:
    """Compile a function like ``jax.jit``, and let it change types of Boxes.

    Args:
        fun: the function. Without it, a decorator is returned.
        **options: options of ``jax.jit``, such as static and donated arguments, and shardings.

    Returns:
        The function, with ``trace``, ``lower``, ``eval_shape`` and ``clear_cache``. It may return
        Boxes, and may be called under ``jax.grad``, ``jax.vmap`` and ``jax.jit``, within what these
        allow for a Box.
    """
    if fun is None:
        return functools.partial(jit, **options)
    return BoxJit(fun, options)


__all__ = ["BoxJit", "BoxType", "jit"]

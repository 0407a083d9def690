"""Box: a mutable cell for a pytree of arrays and hi values."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from .. import compat
from . import scope
from .contents import BoxType, Contents, flatten
from .guard import explained


class Box:
    """A mutable cell for a pytree of arrays, numbers and hi values.

    Functions under any transformation may close over a Box or get it as an argument. Writes inside
    are seen outside. A Box is a pytree node, and ``jax.jit`` and others pass it by reference.

    The type of the contents may change outside of traces, in the trace that made the Box, and in
    functions under ``hijax_trace.jit``. In other traces it is fixed.

    Args:
        value: the first value.
        differentiated: whether a function that makes the Box and is differentiated differentiates
            it, too. False is for what is constant: values that are written need
            ``jax.lax.stop_gradient``, and ``jax.checkpoint`` does not write them again.
    """

    __slots__ = ("__weakref__", "_axes", "_contents", "_earlier", "_fixed_by", "_home", "_passed")

    _axes: frozenset[str]
    _contents: Contents
    _earlier: weakref.WeakValueDictionary[BoxType, Contents] | None
    _home: Any
    _passed: bool
    _fixed_by: str | None

    def __init__(self, value: Any = None, *, differentiated: bool = True):
        leaves, type_ = flatten(value)
        self._set_up(Contents.of(leaves, type_, not differentiated), passed=False)

    def _set_up(self, contents: Contents, passed: bool) -> None:
        home = scope.home_trace()
        self._axes = scope.shard_axes()
        self._contents = contents
        # Contents of earlier types, for as long as a program for them lives.
        self._earlier = None
        self._home = None if home is None else weakref.ref(home)
        self._passed = passed
        self._fixed_by = None

    @classmethod
    def new(cls, value: Any = None) -> Box:
        """Return a Box that holds ``value``."""
        return cls(value)

    def beside(self, value: Any) -> Box:
        """Return a new Box that belongs to this Box's trace.

        A Box that is made in a differentiated or mapped function is differentiated or mapped with
        it. A Box beside one from outside is not.

        Args:
            value: its value, without tracers.

        Raises:
            RuntimeError: this Box escaped its trace.
        """
        home = self._resolved()._home_trace()
        scope.traces_up_to(home)  # raises if this Box escaped
        with compat.set_current_trace(compat.eval_trace if home is None else home):
            box = Box(value, differentiated=not self._resolved()._current().constant)
        box._axes = self._resolved()._axes
        return box

    def get(self) -> Any:
        """Return the value.

        Raises:
            RuntimeError: the Box escaped its trace.
            NotImplementedError: it was closed over by a function under ``shard_map``.
        """
        try:
            return self._resolved()._used().read()
        except jax.errors.UnexpectedTracerError as error:
            raise scope.escaped_error() from error

    def set(self, value: Any) -> None:
        """Replace the value.

        Raises:
            TypeError: the value has another type than the contents, and the type is fixed here. Or
                the value is differentiated or mapped by ``vmap``, and the Box is not.
            RuntimeError: the Box escaped its trace.
            NotImplementedError: it was closed over by a function under ``shard_map``.
        """
        leaves, type_ = flatten(value)
        box = self._resolved()
        try:
            with explained():
                current = box._current()
                if current.type == type_:
                    current = box._used()
                if current.type == type_ and current.values is None:
                    current.write(leaves, box._passed, box._weak_types_change())
                else:
                    box._change(leaves, type_)
        except jax.errors.UnexpectedTracerError as error:
            raise scope.escaped_error() from error

    def around(self) -> list[str]:
        """Return what the traces between here and the Box are for.

        Returns:
            Names such as "scan", "cond" and "grad", innermost first. What is around a "shard_map"
            is not known.

        Raises:
            RuntimeError: the Box escaped its trace.
        """
        home, trace, found = self._resolved()._home_trace(), compat.current_trace(), []
        while trace is not home and not compat.is_eval(trace):
            found.append(compat.traced_for(trace))
            trace = compat.parent_trace(trace)
        return found

    @property
    def type(self) -> BoxType:
        """The type of the contents."""
        return self._resolved()._current().type

    def __repr__(self) -> str:
        try:
            return repr(self.type)
        except Exception:
            return "Box(...)"

    def _resolved(self) -> Box:
        """Return the argument that this Box is in a run, or itself."""
        box = self
        for run in scope.LOCAL.runs:
            box = run.as_argument(box)
        return box

    def _current(self) -> Contents:
        """Return the contents as the innermost run sees them."""
        for run in reversed(scope.LOCAL.runs):
            if (contents := run.changed.get(self)) is not None:
                return contents
        return self._contents

    def _home_trace(self) -> Any:
        """Return the trace that the Box belongs to, or None.

        Raises:
            RuntimeError: that trace has ended.
        """
        if self._home is None:
            return None
        home = self._home()
        if home is None or not home.is_valid():
            raise scope.escaped_error()
        return home

    def _used(self) -> Contents:
        """Return the contents, and record which run or trace uses them."""
        between = scope.traces_up_to(self._home_trace())
        scope.check_not_sharded(self._axes)
        contents = self._current()
        staging = scope.staging_in(between)
        if staging is None:
            return contents
        runs = scope.LOCAL.runs
        for run in runs:
            run.uses(self)
        run = next((run for run in runs if run.will_return(contents, self)), None)
        if run is not None and staging is not run.trace:
            with compat.set_current_trace(run.trace):
                _ = contents.refs  # a loop needs a reference, made outside of it
        label = compat.traced_for(staging)
        # A run traces its program again for other types. A plain trace can't, so the type is fixed.
        within = any(staging is run.trace for run in runs) or (runs and label != "jit")
        if not within:
            self._fixed_by = label
        return contents

    def _weak_types_change(self) -> bool:
        """Return whether a write here decides which leaves are weak: not in a nested trace."""
        home, here = self._home_trace(), compat.current_trace()
        at_home = compat.is_eval(here) if home is None else here is home
        return at_home and self._fixed_by is None

    def _change(self, leaves: list, type_: BoxType) -> None:
        """Give the Box contents of another type."""
        home = self._home_trace()
        between = scope.traces_up_to(home)
        scope.check_not_sharded(self._axes)
        staging = scope.staging_in(between)
        old = self._current().type
        run = next((r for r in scope.LOCAL.runs if r.owns(self, staging)), None)
        if run is None and (staging is not None or self._passed):
            raise scope.frozen_error(old, type_, staging or home, self._passed)
        if self._fixed_by is not None:
            raise scope.captured_error(old, type_, self._fixed_by)
        inner = between if staging is None else between[: between.index(staging)]
        scope.check_unmixed(leaves, inner)
        if run is not None:
            contents = Contents.to_come(leaves, type_)
            if not run.is_argument(self):
                self._used()
                run.changed[self] = contents
                return
        elif inner:
            # References that are made under grad or vmap would be transformed with the program.
            # Make them in the Box's trace.
            with compat.set_current_trace(
                home if home is not None else compat.parent_trace(inner[-1])
            ):
                contents = self._renewed(leaves, type_)
        else:
            contents = self._renewed(leaves, type_)
        if self._earlier is None:
            self._earlier = weakref.WeakValueDictionary()
        self._earlier[old] = self._contents
        self._contents = contents

    def _renewed(self, leaves: list, type_: BoxType) -> Contents:
        """Return contents of another type: earlier ones, if there are any."""
        contents = None if self._earlier is None else self._earlier.get(type_)
        if contents is None or not contents.lies_like(leaves):
            return Contents.of(leaves, type_, self._current().constant)
        contents.write(leaves, self._passed)
        return contents


class _Structure:
    """The static part of a Box as a pytree node: its structure, and which leaves are weak.

    The Box is kept weakly, so that ``jax.tree.map(lambda x: x, box)`` returns the same Box. It does
    not count for equality.
    """

    __slots__ = ("owner", "treedef", "weak")

    def __init__(self, treedef: Any, owner: Box, weak: tuple[bool, ...] = ()):
        self.treedef = treedef
        self.owner = weakref.ref(owner)
        self.weak = weak

    def _key(self) -> tuple:
        return self.treedef, self.weak

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Box[{self.treedef}]"


def _flatten(box: Box) -> tuple[tuple, _Structure]:
    local = scope.LOCAL
    if local.none_expected:
        local.none_expected = False
        raise scope.BoxFound
    if local.collected is not None:
        local.collected.append(box)
        return (), _Structure(None, box)
    box = box._resolved()
    contents = box._current()
    if contents.values is not None:
        contents = box._used()
    refs = contents.refs
    return refs, _Structure(contents.treedef, box, contents.weak)


def _flatten_with_keys(box: Box) -> tuple[tuple, _Structure]:
    refs, structure = _flatten(box)
    return tuple((jax.tree_util.SequenceKey(i), ref) for i, ref in enumerate(refs)), structure


def _unflatten(structure: _Structure, refs: Any) -> Box:
    refs = tuple(refs)
    owner = structure.owner()
    if owner is not None:
        own = owner._resolved()._current()._refs or ()
        same = len(own) == len(refs) and all(a is b for a, b in zip(own, refs, strict=True))
        # A Box without references can't be recognized by them: in a trace it is a new one.
        if same and (refs or scope.home_trace() is None):
            return owner
    box = object.__new__(Box)
    box._set_up(Contents(structure.treedef, refs, weak=structure.weak), passed=True)
    return box


jax.tree_util.register_pytree_with_keys(Box, _flatten_with_keys, _unflatten, _flatten)


def collect(tree: Any) -> list[Box]:
    """Return the Boxes in a pytree, in order, with repetitions."""
    local = scope.LOCAL
    outer, local.collected = local.collected, []
    try:
        jax.tree.leaves(tree)
        return local.collected
    finally:
        local.collected = outer

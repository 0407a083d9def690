"""Run: one tracing of a function under ``hijax_trace.jit``, and what it hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .. import compat
from . import scope
from .box import Box
from .contents import Contents, undifferentiated
from .types import BoxType


@jax.tree_util.register_pytree_node_class
class Again:
    """Stands for a Box that is among the arguments already, as the ``index``-th."""

    def __init__(self, index: int):
        self.index = index

    def tree_flatten(self) -> tuple[tuple, int]:
        """Return no leaves: the references are passed once."""
        return (), self.index

    @classmethod
    def tree_unflatten(cls, index: int, leaves: tuple) -> Again:
        """The reverse."""
        return cls(index)


@jax.tree_util.register_pytree_node_class
class Returned(Again):
    """Stands for a Box in the result: an argument, one closed over, or a new one."""


@jax.tree_util.register_pytree_node_class
class Writes:
    """New contents of Boxes: ``entries`` are (kind, index, type), ``values`` lists of leaves."""

    def __init__(self, entries: tuple, returned: tuple, values: list):
        self.entries = entries
        self.returned = returned
        self.values = values

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The leaves are outputs of the program."""
        return (self.values,), (self.entries, self.returned)

    @classmethod
    def tree_unflatten(cls, meta: tuple, children: tuple) -> Writes:
        """The reverse."""
        return cls(*meta, *children)


@jax.tree_util.register_pytree_node_class
class Result:
    """A function's result with the Boxes that it changed."""

    def __init__(self, out: Any, writes: Writes | None):
        self.out = out
        self.writes = writes

    def tree_flatten(self) -> tuple[tuple, None]:
        """Both are outputs."""
        return (self.out, self.writes), None

    @classmethod
    def tree_unflatten(cls, meta: None, children: tuple) -> Result:
        """The reverse."""
        return cls(*children)


def is_box(x: Any) -> bool:
    """Return whether ``x`` is a Box, for ``is_leaf``."""
    return isinstance(x, Box)


class Run:
    """What is known while the function is traced. A context manager.

    Args:
        index: returns the number of a Box that is closed over, and of its contents.
        outer: the Boxes in the call's arguments, as the caller has them.
    """

    def __init__(self, index: Callable[[Box, Contents], int], outer: tuple[Box, ...]):
        self._index = index
        self.trace = compat.current_trace()
        self.outer = outer
        self.arguments: list[Box] = []  # the same as the function has them
        self.initial: list[Contents] = []
        self.changed: dict[Box, Contents] = {}  # new contents of Boxes closed over
        self.used: dict[Box, Contents] = {}  # Boxes closed over, with what they held
        self.aliased = False

    def __enter__(self) -> Run:
        scope.LOCAL.runs.append(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        scope.LOCAL.runs.remove(self)

    def adopt(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments with one Box for each that was passed."""

        def own(x: Any) -> Any:
            if isinstance(x, Again):
                return self.arguments[x.index]
            if not is_box(x):
                return x
            box = object.__new__(Box)
            box._set_up(Contents(x._contents.treedef, x._contents.refs), passed=True)
            self.arguments.append(box)
            self.initial.append(box._contents)
            return box

        # Before this run is the innermost one: the Boxes here are the ones that JAX has rebuilt.
        return jax.tree.map(
            own, (args, kwargs), is_leaf=lambda x: isinstance(x, (Box, Again)) or x is None
        )

    def stand_in(self, box: Box) -> Box:
        """Return the argument for a Box that is closed over and passed as well."""
        for outer, argument in zip(self.outer, self.arguments, strict=False):
            if outer is box:
                self.aliased = True
                self.used.setdefault(box, box._contents)
                return argument
        return box

    def is_argument(self, box: Box) -> bool:
        """Return whether ``box`` came in as an argument."""
        return any(box is argument for argument in self.arguments)

    def uses(self, box: Box) -> None:
        """Note that the function uses a Box from outside."""
        if not self.is_argument(box) and box not in self.used:
            home = box._home_trace()
            if home is not self.trace and box not in self.changed:
                self.used[box] = box._contents

    def owns(self, box: Box, staging: Any) -> bool:
        """Return whether this run can hand out new contents of ``box``."""
        return staging is self.trace or (staging is None and self.is_argument(box))

    def hands_out(self, contents: Contents, box: Box) -> bool:
        """Return whether ``contents`` are what this run is about to hand out for ``box``."""
        return contents.pending and (self.changed.get(box) is contents or self.is_argument(box))

    def finish(self, out: Any, always: bool) -> Any:
        """Return what the program returns: the result, with new contents where there are any."""
        entries: list[tuple[str, int, BoxType]] = []
        values: list[list] = []
        for i, (box, before) in enumerate(zip(self.arguments, self.initial, strict=True)):
            self._hand_out("argument", i, before, box._contents, entries, values)
        for box, after in self.changed.items():
            index = self._index(box, self.used[box])
            self._hand_out("closed over", index, box._contents, after, entries, values)
        out, returned = self._without_boxes(out, entries, values)
        if not (entries or returned or always):
            return out
        return Result(out, Writes(tuple(entries), returned, values))

    @staticmethod
    def _hand_out(
        kind: str, index: int, before: Contents, after: Contents, entries: list, values: list
    ) -> None:
        if after is before:
            return
        leaves = after.leaves()
        if after.values is None:  # an undifferentiated reference, which JAX can't know
            leaves = list(map(undifferentiated, leaves))
        if after.type == before.type:  # it changed and changed back
            before.write(leaves, passed=True)
            return
        entries.append((kind, index, after.type))
        values.append(leaves)

    def _without_boxes(self, out: Any, entries: list, values: list) -> tuple[Any, tuple]:
        """Replace the Boxes in the result, which can't leave a trace, by stand-ins."""
        returned: list[tuple[str, int]] = []
        seen: dict[Box, int] = {}

        def replace(x: Any) -> Any:
            if not is_box(x):
                return x
            box = x._resolved()
            if box not in seen:
                seen[box] = len(returned)
                if self.is_argument(box):
                    position = next(i for i, a in enumerate(self.arguments) if a is box)
                    returned.append(("argument", position))
                elif box._home_trace() is self.trace:
                    returned.append(("new", len(entries)))
                    entries.append(("new", len(entries), box._contents.type))
                    values.append(box._contents.leaves())
                else:
                    box._used()
                    returned.append(("closed over", self._index(box, self.used[box])))
            return Returned(seen[box])

        return jax.tree.map(replace, out, is_leaf=is_box), tuple(returned)


def apply(result: Result, arguments: list[Box], closed_over: list[Box]) -> Any:
    """Give the Boxes their new contents, where the program was called. Return its result."""
    writes = result.writes
    if writes is None:
        return result.out
    new: dict[int, Box] = {}
    for i, ((kind, index, type_), leaves) in enumerate(
        zip(writes.entries, writes.values, strict=True)
    ):
        value = jax.tree.unflatten(type_.treedef, leaves)
        if kind == "new":
            new[i] = Box(value)
        else:
            (arguments if kind == "argument" else closed_over)[index].set(value)
    if not writes.returned:
        return result.out
    boxes = {"argument": arguments, "closed over": closed_over, "new": new}
    outs = [boxes[kind][index] for kind, index in writes.returned]
    return jax.tree.map(
        lambda x: outs[x.index] if isinstance(x, Returned) else x,
        result.out,
        is_leaf=lambda x: isinstance(x, Returned),
    )

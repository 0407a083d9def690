"""Run: one tracing of a function under ``hijax_trace.jit``, and its new contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from .. import compat
from . import scope
from .box import Box
from .contents import BoxType, Contents


@jax.tree_util.register_dataclass
@dataclass
class Repeated:
    """Another occurrence of the Box that is argument ``index``: references are passed once."""

    index: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass
class Returned(Repeated):
    """A Box in the result: number ``index`` of ``Writes.returned``."""


@jax.tree_util.register_dataclass
@dataclass
class Writes:
    """New contents of Boxes, as outputs of a program.

    Args:
        entries: for each changed or new Box its kind ("argument", "closed over" or "new"), its
            number in that kind, and its type.
        returned: the kind and number of each Box in the result.
        values: the leaves for each entry.
    """

    entries: tuple = field(metadata={"static": True})
    returned: tuple = field(metadata={"static": True})
    values: list


@jax.tree_util.register_dataclass
@dataclass
class Result:
    """A function's result with the Boxes that it changed."""

    out: Any
    writes: Writes | None


def is_box(x: Any) -> bool:
    """Return whether ``x`` is a Box, for ``is_leaf``."""
    return isinstance(x, Box)


class Run:
    """The Boxes of a function while it is traced. A context manager.

    Args:
        index: returns the number of a closed-over Box.
        outer: the Boxes among the call's arguments, as the caller has them.

    Attributes:
        trace: the trace of the function.
        arguments: the Boxes among the arguments, as the function has them.
        initial: their contents at the start.
        changed: new contents of closed-over Boxes.
        used: the closed-over Boxes, with their contents at the start.
        aliased: whether a Box is an argument and closed over.
    """

    def __init__(self, index: Callable[[Box], int], outer: tuple[Box, ...]):
        self._index = index
        self.trace = compat.current_trace()
        self.outer = outer
        self.arguments: list[Box] = []
        self.initial: list[Contents] = []
        self.changed: dict[Box, Contents] = {}
        self.used: dict[Box, Contents] = {}
        self.aliased = False

    def __enter__(self) -> Run:
        scope.LOCAL.runs.append(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        scope.LOCAL.runs.remove(self)

    def adopt(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments with a new Box for each that was passed."""

        def own(x: Any) -> Any:
            if isinstance(x, Repeated):
                return self.arguments[x.index]
            if not is_box(x):
                return x
            box = object.__new__(Box)
            given = x._contents
            box._set_up(Contents(given.treedef, given.refs, weak=given.weak), passed=True)
            self.arguments.append(box)
            self.initial.append(box._contents)
            return box

        # The run has not begun yet, so the Boxes here are those that JAX rebuilt.
        return jax.tree.map(
            own, (args, kwargs), is_leaf=lambda x: isinstance(x, (Box, Repeated)) or x is None
        )

    def as_argument(self, box: Box) -> Box:
        """Return the argument that is a closed-over Box, or the Box."""
        for outer, argument in zip(self.outer, self.arguments, strict=False):
            if outer is box:
                self.aliased = True
                self.used.setdefault(box, box._contents)
                return argument
        return box

    def is_argument(self, box: Box) -> bool:
        """Return whether a Box is one of the arguments."""
        return any(box is argument for argument in self.arguments)

    def uses(self, box: Box) -> None:
        """Record that the function uses a Box from outside."""
        if not self.is_argument(box) and box not in self.used:
            home = box._home_trace()
            if home is not self.trace and box not in self.changed:
                self.used[box] = box._contents

    def owns(self, box: Box, staging: Any) -> bool:
        """Return whether this run can return new contents of a Box."""
        return staging is self.trace or (staging is None and self.is_argument(box))

    def will_return(self, contents: Contents, box: Box) -> bool:
        """Return whether this run will return pending contents for a Box."""
        return contents.pending and (self.changed.get(box) is contents or self.is_argument(box))

    def finish(self, out: Any, always: bool) -> Any:
        """Return the program's outputs: the function's result and new contents."""
        entries: list[tuple[str, int, BoxType]] = []
        values: list[list] = []
        for i, (box, before) in enumerate(zip(self.arguments, self.initial, strict=True)):
            self._add("argument", i, before, box._contents, entries, values)
        for box, after in self.changed.items():
            index = self._index(box)
            self._add("closed over", index, box._contents, after, entries, values)
        out, returned = self._without_boxes(out, entries, values)
        if not (entries or returned or always):
            return out
        return Result(out, Writes(tuple(entries), returned, values))

    @staticmethod
    def _add(
        kind: str, index: int, before: Contents, after: Contents, entries: list, values: list
    ) -> None:
        """Add an entry for a Box whose contents changed."""
        if after is before:
            return
        leaves = after.leaves()
        if after.type == before.type:  # the type changed and changed back
            before.write(leaves, passed=True)
            return
        entries.append((kind, index, after.type))
        values.append(leaves)

    def _without_boxes(self, out: Any, entries: list, values: list) -> tuple[Any, tuple]:
        """Replace Boxes in the result, which can't leave a trace, by ``Returned``."""
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
                    returned.append(("closed over", self._index(box)))
            return Returned(seen[box])

        return jax.tree.map(replace, out, is_leaf=is_box), tuple(returned)


def apply(result: Result, arguments: list[Box], closed_over: list[Box]) -> Any:
    """Give Boxes their new contents after a call. Return the function's result."""
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

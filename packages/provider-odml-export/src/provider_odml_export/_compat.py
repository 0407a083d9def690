"""Private JAX, and what depends on its version."""

from __future__ import annotations

import functools
from typing import Any

from jax._src import source_info_util  # 0.10.2 - 0.12


def label_of(kind: str, fn: Any) -> str:
    """Return a name for what a loop or branch calls, such as "scan(step)", 0.10.2 - 0.12.

    JAX says so of the functions that it makes itself, of a fori_loop's body.
    """
    info = getattr(fn, "__fun_debug_info__", None)
    if info is not None:
        return f"{info.traced_for}({info.func_name})".replace("/", ".")
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"{kind}({getattr(fn, '__name__', type(fn).__name__)})".replace("/", ".")


def place_of(eqn: Any) -> Any:
    """Return a context in which operations are where an equation is, 0.10.2 - 0.12."""
    return source_info_util.user_context(_info_of(eqn).traceback, name_stack=_stack_of(eqn))


def where_of(eqn: Any) -> str:
    """Return where an equation is: its name scopes, file and line, 0.10.2 - 0.12."""
    scopes, line = str(_stack_of(eqn)), source_info_util.summarize(_info_of(eqn))
    return f"{scopes} ({line})" if scopes else line


def _info_of(eqn: Any) -> Any:
    """Return where an equation is in the user's files, or else the call that it is in."""
    info = eqn.source_info
    is_users = source_info_util.user_frame(info.traceback) is not None
    return info if is_users else source_info_util.current()


def _stack_of(eqn: Any) -> Any:
    return source_info_util.current_name_stack() + eqn.source_info.name_stack


def composite_attribute(eqn: Any, name: str) -> Any:
    """Return an attribute of a composite's equation, 0.10.2 - 0.12."""
    (leaf,) = next(leaves for key, leaves, _ in eqn.params["attributes"] if key == name)
    return getattr(leaf, "val", leaf)  # of an array that is hashed

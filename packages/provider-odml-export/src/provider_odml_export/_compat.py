"""Private JAX, and what depends on its version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import source_info_util  # 0.10.2 - 0.12
from jax.interpreters import ad  # 0.10.2 - 0.12


def define_transformations(primitive: Any, run: Callable[..., Sequence[Any]]) -> None:
    """Define the derivative of a primitive of several results, 0.10.2 - 0.12.

    Args:
        primitive: the primitive. Its results stay what they are.
        run: called with the operands and the parameters; computes the results by other primitives.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        along = [ad.instantiate_zeros(tangent) for tangent in tangents]
        _, out = jax.jvp(lambda *x: tuple(run(x, **params)), tuple(primals), tuple(along))
        return primitive.bind(*primals, **params), list(out)

    ad.primitive_jvps[primitive] = jvp


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

"""Names of ops that compute what a program does with their result as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax


class JoiningName(str):
    """The name of a jitted function that hijax-trace joins with an operation after it.

    A program that TraceEngine taps adds a bias to what a handler computed by an op. The engine asks
    the name of the op's call, which JAX keeps in the call's equation, for the sum as one call: see
    "Joins" in the README of ``hijax_trace.interpreter``.

    Args:
        name: the name.
        join: ``joined`` without the parameters of the primitive.
    """

    _join: Callable[..., Any]

    def __new__(cls, name: str, join: Callable[..., Any]) -> Self:
        """Return the name."""
        self = super().__new__(cls, name)
        self._join = join
        return self

    def joined(
        self,
        primitive: str,
        params: Mapping[str, Any],
        operands: Sequence[jax.Array],
        which: int,
        call: Sequence[jax.Array],
    ) -> Any:
        """Return the result of an operation on a call's result; NotImplemented for another.

        Args:
            primitive: name of the operation's primitive.
            params: its parameters.
            operands: its operands.
            which: the number of the operand that is the call's result. The others have its shape,
                or are ``[n]`` where they are repeated along all axes but the last.
            call: the operands of the call.
        """
        return self._join(primitive, operands, which, call)

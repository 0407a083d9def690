"""Guard: the identity on values that are written to a Box.

A Box from outside of a transformed function is not differentiated and not mapped. JAX finds that
when it transforms the program, with an error that does not mention Boxes. The rules of this
primitive raise one that says what to do. Its second operand is the reference, so that the rules
know whether the Box is transformed, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .. import compat
from ..hi.primitive import HiPrimitive

STOP_GRADIENT = (
    "A value that is written to a Box from outside of grad must not be differentiated, got one "
    "that is. Write box.set(jax.lax.stop_gradient(value)), or make the Box inside of the "
    "differentiated function."
)
VMAPPED = (
    "A value that is written to a Box which is shared by all examples of vmap must be the same for "
    "all, got the value of one example. Pass the Box to the mapped function with a batch axis "
    "(in_axes=0), make it inside, or return the values and write them to the Box after vmap."
)
VARYING = (
    "A value that is written to a Box which all devices of a shard_map share must be the same for "
    "all, got the value of one device. Reduce it (jax.lax.psum, jax.lax.pmax), or pass the Box as "
    "an argument with a spec that cuts it."
)


class Written(HiPrimitive):
    """The primitive: ``written.bind(value, ref)`` returns ``value``. It is lowered to nothing."""

    def __init__(self, name: str):
        super().__init__(name)
        compat.register_discharge_to_first(self)

    def is_high(self, *avals: Any, **params: Any) -> bool:
        """Return whether the value is a hi one: no other needs ``to_lojax``."""
        return avals[0].is_high

    def abstract_eval(self, *avals: Any, **params: Any) -> tuple[Any, set]:
        """Return the type of the value."""
        return avals[0], set()

    def to_lojax(self, *args: Any, **params: Any) -> Any:
        """Return the value."""
        return args[0]

    def jvp(self, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
        """Return the value and its tangent.

        Raises:
            TypeError: the value is differentiated and the Box is not.
        """
        value, ref = tangents
        if isinstance(ref, compat.Zero) and not isinstance(value, compat.Zero):
            raise TypeError(STOP_GRADIENT)
        return self.bind(*primals, **params), value

    def batch(self, axis_data: Any, args: tuple, dims: tuple, **params: Any) -> tuple[Any, Any]:
        """Return the value and its axis.

        Raises:
            TypeError: the value is mapped and the Box is not.
        """
        value, ref = dims
        if ref is None and value is not None:
            raise TypeError(VMAPPED)
        return self.bind(*args, **params), value


written = Written("written_to_box")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Return a context that raises an error which tells what to do instead of JAX's."""
    try:
        yield
    except Exception as error:
        if type(error) is Exception and "set/swap operation" in str(error):
            differentiated = "differentiated" in str(error)
            raise TypeError(STOP_GRADIENT if differentiated else VMAPPED) from error
        raise

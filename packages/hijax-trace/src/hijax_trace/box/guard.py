"""The identity on what is written to a Box that may be from outside of a transformed function.

Such a Box is not differentiated and not mapped. JAX finds that out when it transforms the
program, and its error doesn't know of Boxes; the rules of this primitive say what to do. It has
the reference as an operand, for its rules to see whether the Box is transformed too.
"""

from __future__ import annotations

from typing import Any

from .. import compat
from ..hi.primitive import HiPrimitive

STOP_GRADIENT = (
    "a differentiated value was written to a Box that is not differentiated. Write "
    "box.set(jax.lax.stop_gradient(value)), or make the Box inside of the differentiated function."
)
VMAPPED = (
    "a value of one example of vmap was written to a Box that is shared by all examples. Pass the "
    "Box to the mapped function with a batch axis (in_axes=0), make it inside, or return the "
    "values and write them to the Box after vmap."
)


class Written(HiPrimitive):
    """``written.bind(value, ref, constant=...)`` is ``value``; lowered to nothing.

    With ``constant`` the Box is known not to be differentiated, though ``ref`` may be: JAX counts
    all references made inside of a differentiated program.
    """

    def __init__(self, name: str):
        super().__init__(name)
        compat.register_discharge_to_first(self)

    def is_high(self, *avals: Any, **params: Any) -> bool:
        """Only hi values need lowering: other programs stay as fast as they are."""
        return avals[0].is_high

    def abstract_eval(self, *avals: Any, **params: Any) -> tuple[Any, set]:
        """Return the type of the value."""
        return avals[0], set()

    def to_lojax(self, *args: Any, **params: Any) -> Any:
        """Return the value."""
        return args[0]

    def jvp(self, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
        """Return value and tangent.

        Raises:
            TypeError: the value is differentiated and the Box is not.
        """
        value, ref = tangents
        constant = params["constant"] or isinstance(ref, compat.Zero)
        if constant and not isinstance(value, compat.Zero):
            raise TypeError(STOP_GRADIENT)
        return self.bind(*primals, **params), value

    def batch(self, axis_data: Any, args: tuple, dims: tuple, **params: Any) -> tuple[Any, Any]:
        """Return the value with its axis.

        Raises:
            TypeError: the value is mapped and the Box is not.
        """
        value, ref = dims
        if ref is None and value is not None:
            raise TypeError(VMAPPED)
        return self.bind(*args, **params), value


written = Written("written_to_box")


def explained(error: Exception) -> Exception:
    """Return the error to raise for one that JAX raised at a read or write of a Box."""
    if type(error) is Exception and "set/swap operation" in str(error):
        return TypeError(STOP_GRADIENT if "differentiated" in str(error) else VMAPPED)
    return error

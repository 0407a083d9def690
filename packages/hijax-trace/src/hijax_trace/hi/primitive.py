"""HiPrimitive: an operation with rules and a lowering in Python.

The semantics are those of jax pull request 28781. In ``bind``, JAX asks ``is_high(*avals,
**params)``. If that is true and the current trace requires low, ``to_lojax`` runs at once. A trace
that builds a hi jaxpr keeps the operation and marks the jaxpr as high.
"""

from __future__ import annotations

from typing import Any

from .. import compat
from .hitype import must_implement


class HiPrimitive(compat.PrimitiveBase):
    """Base class of primitives that ``to_lojax`` lowers. Make one instance per operation.

    A missing rule raises an error that names it. The class attribute ``multiple_results = True``
    makes a primitive with a list of results.
    """

    def is_high(self, *avals: Any, **params: Any) -> bool:
        """Return whether the operation must be lowered by ``to_lojax``.

        The answer may depend on types and parameters, for primitives that hold jaxprs. If it is
        False, the operation stays in lojax jaxprs, and ``to_lojax`` runs when the program is
        lowered for XLA.

        Args:
            *avals: the types of the operands.
            **params: as given to ``bind``.
        """
        return True

    # pyrefly: ignore[bad-override-mutable-attribute]
    def is_effectful(self, params: dict[str, Any]) -> bool:
        """Return whether ``abstract_eval`` may return effects."""
        return False

    def abstract_eval(self, *avals: Any, **params: Any) -> tuple[Any, set]:
        """Return the type, or list of types, and the effects."""
        must_implement(self, "abstract_eval", "tracing (e.g. under jit)")

    def to_lojax(self, *args: Any, **params: Any) -> Any:
        """Compute the result by other operations, from hi values of their class."""
        must_implement(self, "to_lojax", "lowering")

    def jvp(self, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
        """Return the result and its tangent. Tangents may be a symbolic ``Zero``."""
        must_implement(self, "jvp", "autodiff (jvp, linearize, grad)")

    def transpose(self, cotangent: Any, *args: Any, **params: Any) -> list[Any]:
        """Return a cotangent per argument; None for arguments that are not linear."""
        must_implement(self, "transpose", "reverse-mode autodiff (grad, vjp)")

    def batch(self, axis_data: Any, args: tuple, dims: tuple, **params: Any) -> tuple[Any, Any]:
        """Return the batched result and its batch axis.

        Args:
            axis_data: size and name of the mapped axis.
            args: the batched arguments.
            dims: an axis, a ``MappingSpec`` or None per argument.
            **params: as given to ``bind``.
        """
        must_implement(self, "batch", "vmap")

    def impl(self, *args: Any, **params: Any) -> Any:
        """Evaluate the operation if ``is_high`` returned False."""
        return self.to_lojax(*args, **params)

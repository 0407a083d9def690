"""HiPrimitive: an operation with rules for each transformation and a lowering in Python.

The semantics of jax pull request 28781. In ``bind``, JAX asks ``is_high(*avals, **params)``. If
so, and the current trace requires low, ``to_lojax`` runs at once. A trace that builds a hi jaxpr
keeps the operation and marks the jaxpr high.
"""

from __future__ import annotations

from typing import Any

from .. import compat
from .hitype import must_implement


class HiPrimitive(compat.PrimitiveBase):
    """Base of primitives that are lowered by ``to_lojax``. Make one instance per operation.

    A rule that is missing raises an error that names it. ``multiple_results = True``, as a class
    attribute, makes a primitive with a list of results.
    """

    def is_high(self, *avals: Any, **params: Any) -> bool:
        """Return whether the operation must be lowered by ``to_lojax``.

        May depend on types and parameters, for primitives that hold jaxprs. Where it returns
        False the operation stays in lojax jaxprs, and ``to_lojax`` runs when XLA's program is
        made.
        """
        return True

    # pyrefly: ignore[bad-override-mutable-attribute]
    def is_effectful(self, params: dict[str, Any]) -> bool:
        """Return whether ``abstract_eval`` may return effects."""
        return False

    def abstract_eval(self, *avals: Any, **params: Any) -> tuple[Any, set]:
        """Return the type of the result (or a list of types) and the set of effects."""
        must_implement(self, "abstract_eval", "tracing (e.g. under jit)")

    def to_lojax(self, *args: Any, **params: Any) -> Any:
        """Compute the result by other operations. Hi values come as instances of their class."""
        must_implement(self, "to_lojax", "lowering")

    def jvp(self, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
        """Return the result and its tangent. Tangents may be symbolic ``Zero``."""
        must_implement(self, "jvp", "autodiff (jvp, linearize, grad)")

    def transpose(self, cotangent: Any, *args: Any, **params: Any) -> list[Any]:
        """Return a cotangent per argument, None for those that are not linear."""
        must_implement(self, "transpose", "reverse-mode autodiff (grad, vjp)")

    def batch(self, axis_data: Any, args: tuple, dims: tuple, **params: Any) -> tuple[Any, Any]:
        """Return the batched result and where its batch axis is.

        Args:
            axis_data: size and name of the mapped axis.
            args: the batched arguments.
            dims: an axis, a ``MappingSpec`` or None per argument.
            **params: as given to ``bind``.
        """
        must_implement(self, "batch", "vmap")

    def impl(self, *args: Any, **params: Any) -> Any:
        """Evaluate the operation where ``is_high`` returned False."""
        return self.to_lojax(*args, **params)

"""References: JAX's mutable arrays, of which Boxes are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import core  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12, see below
from jax._src.interpreters import batching  # 0.10.2 - 0.12
from jax._src.state import discharge as _discharge  # 0.10.2 - 0.12
from jax._src.state import primitives as _state_primitives  # 0.10.2 - 0.12
from jax._src.state import types as _state  # 0.10.2 - 0.12


def is_ref(value: Any) -> bool:
    """Return whether a value is a Ref or a tracer of one."""
    if isinstance(value, core.Ref):
        return True
    return isinstance(value, core.Tracer) and isinstance(core.typeof(value), _state.AbstractRef)


_swap_mapped = batching.fancy_primitive_batchers[_state_primitives.swap_p]


def _swap_vmap(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Write to a reference, under ``vmap``.

    JAX refuses a write to a reference that isn't mapped, even of a value that isn't mapped. This
    rule writes such a value once. It changes nothing that worked.
    """
    if any(dim is not None for dim in dims):
        return _swap_mapped(axis_data, args, dims, **params)
    return _state_primitives.swap_p.bind(*args, **params), None


batching.fancy_primitive_batchers[_state_primitives.swap_p] = _swap_vmap


undifferentiated_refs: bool = hasattr(_hijax, "HiPrim")
"""Whether JAX can transpose a loop that writes only constants to a reference from outside.

0.10.2 fails with "DynamicJaxprTracer has no attribute accum".
"""


def register_discharge_to_first(primitive: Any) -> None:
    """Discharge a primitive of a value and a reference to the value.

    JAX passes a rule the operands last, after two other arguments on 0.10.2 and one since.
    """

    @_discharge.register_discharge_rule(primitive)
    def discharged(*args: Any, **params: Any) -> Any:
        value, _ = args[-2:]
        return (None, None), value

"""References, which Boxes are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import core  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12, see below
from jax._src.interpreters import batching  # 0.10.2 - 0.12
from jax._src.state import discharge as _discharge  # 0.10.2 - 0.12
from jax._src.state import primitives as _state_primitives  # 0.10.2 - 0.12
from jax._src.state import types as _state  # 0.10.2 - 0.12

Ref: type = core.Ref
"""0.10.2 - 0.12."""


def is_ref(value: Any) -> bool:
    """Return whether ``value`` is a Ref, or stands for one (0.10.2 - 0.12)."""
    if isinstance(value, core.Ref):
        return True
    return isinstance(value, core.Tracer) and isinstance(core.typeof(value), _state.AbstractRef)


_swap_mapped = batching.fancy_primitive_batchers[_state_primitives.swap_p]


def _swap_vmap(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Write to a reference, under ``vmap``.

    JAX refuses where the reference isn't mapped, also if nothing is that is written: then it is
    written once. Nothing that worked is changed (0.10.2 - 0.12).
    """
    if any(dim is not None for dim in dims):
        return _swap_mapped(axis_data, args, dims, **params)
    return _state_primitives.swap_p.bind(*args, **params), None


batching.fancy_primitive_batchers[_state_primitives.swap_p] = _swap_vmap


undifferentiated_refs: bool = hasattr(_hijax, "HiPrim")
"""Whether a loop can be transposed that writes only constants to a reference made before it.

0.10.2 fails with "DynamicJaxprTracer has no attribute accum".
"""


def register_discharge_to_first(primitive: Any) -> None:
    """Let a primitive of a value and a reference become the value, where references end.

    JAX's rules get the operands last, after two other arguments on 0.10.2 and one since.
    """

    @_discharge.register_discharge_rule(primitive)
    def discharged(*args: Any, **params: Any) -> Any:
        value, _ = args[-2:]
        return (None, None), value

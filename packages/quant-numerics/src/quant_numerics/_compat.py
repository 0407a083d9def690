"""The only place of quant-numerics that depends on JAX's machinery of autodiff and lowering.

Each name was checked on 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Zero: type = ad.Zero
"""A tangent or cotangent that is known to be zero, with its type as ``aval``."""

instantiate = ad.instantiate_zeros
"""Return an array of zeros for a Zero, and other tangents as they are."""

is_undefined_primal = ad.is_undefined_primal
"""Return whether an operand of a transpose rule is one whose cotangent is asked for."""


def primitive(
    name: str,
    result: Callable[..., Any],
    plain: Callable[..., Any],
    native: Callable[..., Any],
    platforms: Sequence[str],
    batched: Callable[..., Any],
) -> Any:
    """Return a primitive that some platforms lower in another way than others.

    They do in programs for one platform that are run here. Others may not hold what has no
    compatibility guarantees, or no lowering for each platform.
    """
    made = Primitive(name)
    made.def_abstract_eval(result)
    made.def_impl(lambda *operands: jax.jit(made.bind)(*operands))
    batching.primitive_batchers[made] = batched
    # Custom partitioning must know the devices.
    dispatch.prim_requires_devices_during_lowering.add(made)
    in_jax = mlir.lower_fun(plain, multiple_results=False)

    def lowered(context: Any, *operands: Any) -> Any:
        module = context.module_context
        alone = len(module.platforms) == 1 and not module.lowering_parameters.for_export
        rule = mlir.lower_fun(native, multiple_results=False) if alone else in_jax
        return rule(context, *operands)

    mlir.register_lowering(made, in_jax)
    for platform in platforms:
        mlir.register_lowering(made, lowered, platform=platform)
    return made

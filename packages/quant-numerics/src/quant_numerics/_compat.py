"""The only place of quant-numerics that depends on JAX's autodiff machinery.

Each name was checked on 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

from jax.interpreters import ad

Zero: type = ad.Zero
"""A tangent or cotangent that is known to be zero, with its type as ``aval``."""

instantiate = ad.instantiate_zeros
"""Makes an array of zeros of a Zero, and leaves other tangents."""

is_undefined_primal = ad.is_undefined_primal
"""Whether an operand of a transpose rule is what the cotangent is asked for."""

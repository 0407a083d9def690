"""The only place of quant-numerics that depends on JAX's autodiff machinery.

Each name was checked on 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

from jax.interpreters import ad

Zero: type = ad.Zero
"""A tangent or cotangent that is known to be zero, with its type as ``aval``."""

instantiate = ad.instantiate_zeros
"""Return an array of zeros for a Zero, and other tangents as they are."""

is_undefined_primal = ad.is_undefined_primal
"""Return whether an operand of a transpose rule is one whose cotangent is asked for."""

"""The user context that carries what is active on this thread into JAX's cache keys."""

import jax

CONTEXT = jax.make_user_context(default_value=None)
"""None, or the current ``Scope`` (see ``scope``). Public JAX API since 0.10."""

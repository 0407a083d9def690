"""Functions that are traced once for each shape, in a model of many layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def traced_once(*static: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Jit a function with static arguments, also inside of programs that run with JIT off."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(fn, static_argnums=static)

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            # As the patch engine runs them: it would trace a site's operations at each site.
            with jax.disable_jit(False):
                return jitted(*args)

        return call

    return decorate

"""Straight-through derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def straight_through(
    quantized_fn: Callable[..., Any], float_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """Return one function with the derivative of another.

    ``f(*args)`` equals ``quantized_fn(*args)``; its JVP, and so its gradients of any order and
    mode, is that of ``float_fn`` at the same arguments. Rounding has derivative zero almost
    everywhere; with ``float_fn`` the unquantized op this is the straight-through estimator of
    Bengio et al. 2013 (arXiv:1308.3432). Works under jit, grad, jvp, vmap, scan and remat.

    Args:
      quantized_fn: positional array (or pytree) arguments -> arrays.
      float_fn: takes the same arguments; returns the same tree of shapes and dtypes. It is
        evaluated only where a derivative is taken. Close over static options in both.

    Returns:
      A function of positional arguments.

    Raises:
      ValueError: when it is differentiated: the two functions return different trees, shapes or
        dtypes.
    """

    @jax.custom_jvp
    def apply(*args: Any) -> Any:
        return quantized_fn(*args)

    @apply.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out = apply(*primals)  # not quantized_fn: higher derivatives go straight through too
        float_out, tangent = jax.jvp(float_fn, primals, tangents)
        ours, theirs = _signature(out), _signature(float_out)
        if ours != theirs:
            raise ValueError(
                "the outputs of the two functions of straight_through must be alike, got "
                f"{ours} of quantized_fn and {theirs} of float_fn. Give both the same "
                "preferred_element_type, or convert the result of one."
            )
        return out, tangent

    return apply


def _signature(tree: Any) -> tuple[str, list[str]]:
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), [f"{x.dtype.name}{list(x.shape)}" for x in map(jnp.asarray, leaves)]

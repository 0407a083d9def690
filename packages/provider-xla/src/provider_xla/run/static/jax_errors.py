"""JAX errors: what JAX says where a range can't be recorded, and what to do instead."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from ...errors import QuantizationError
from .gradients import WITHOUT_GRADIENTS


def is_of_jax(error: Exception, caller: str = "jax._src") -> bool:
    """Return whether JAX raised an error, not the program.

    Args:
        error: the error.
        caller: the module that called JAX, whose own frames JAX may have removed.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).startswith(("jax._src", caller))


def explained(
    error: Exception, observed: Sequence[str], in_loops: Sequence[str], watched: Sequence[str]
) -> QuantizationError | None:
    """Return an error for one of JAX's, or of a Box's, about what can't be written.

    Args:
        error: what was raised.
        observed: the ids of the operations that are observed.
        in_loops: those of them that are in a loop whose length only a run can tell.
        watched: the operations whose gradients are recorded.

    Returns:
        The error; None if it is about something else.
    """
    text, ops = str(error), observed
    instead = "give a rule for these operations act_static_scale=False"
    if "vmap-of-cond" in text:
        what = "A static range can't be measured in a lax.cond or lax.switch under jax.vmap"
        instead = f"Run the branches outside of vmap (jax.lax.map), or {instead}"
        ops = [one for one in ops if "cond(" in one or "switch(" in one] or ops
    elif "cond partial-eval" in text:
        what = "A static range can't be measured in a branch of a loop that is differentiated"
        instead = (
            "Measure with calls that are not differentiated, and train with "
            f"apply(..., update=False), or {instead}"
        )
    elif "inside of shard_map" in text and ops:
        what = (
            "A static range can't be measured where the program differentiates a shard_map, or "
            "differentiates inside of one"
        )
        instead = (
            "Put jax.jit around the function that is differentiated, or apply the provider "
            "inside of the shard_map, with the statistics as an argument"
        )
        ops = ops[-1:]
    elif watched and ("forward-mode" in text or "custom_lin" in text):
        what, ops = "Gradients can't be recorded under jax.jvp", watched
        instead = WITHOUT_GRADIENTS
    elif isinstance(error, AssertionError) and in_loops and is_of_jax(error):
        what = (
            "A static range can't be measured in a loop that ends at another step for each "
            "example of jax.vmap"
        )
        instead = f"Run the loop outside of vmap (jax.lax.map), or {instead}"
        ops = in_loops
    else:
        return None
    return QuantizationError(f"{what}, got {', '.join(dict.fromkeys(ops))}. {instead}.")

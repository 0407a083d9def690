"""The GPUs of this process. Imports no JAX."""

from __future__ import annotations

import sys

from ._status import built, native

OLDEST = 80
"""The kernels are built for compute capability 8.0 and newer."""


def used() -> dict[int, int]:
    """Return CUDA's numbers of the GPUs that JAX uses, each with its capability: 90 for 9.0.

    A program is lowered for all of them alike, so that a kernel must fit each.
    """
    found = dict(enumerate(native().compute_capabilities())) if built() else {}
    jax = sys.modules.get("jax")
    if not found or jax is None:
        return found
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return found
    numbers = {device.local_hardware_id for device in devices}
    return {number: one for number, one in found.items() if number in numbers} or found


def unfit(needed: int, what: str = "the kernels") -> str | None:
    """Return why a GPU is too old for what needs this capability; None if no GPU is."""
    gpus = used()
    old = [number for number, found in gpus.items() if found < needed]
    if not old:
        return None
    why = (
        f"{what} need a GPU of compute capability {needed / 10} or newer, and GPU {old[0]} has "
        f"{gpus[old[0]] / 10}"
    )
    if len(old) == len(gpus):
        return why
    kept = ",".join(str(number) for number in gpus if number not in old)
    return f"{why}; set CUDA_VISIBLE_DEVICES={kept} to run them on the others"


def one_of_each() -> list[int]:
    """Return CUDA's number of the first GPU of each capability: others have the same plans."""
    first: dict[int, int] = {}
    for number, capability in used().items():
        first.setdefault(capability, number)
    return list(first.values())

"""kernel_workspace: how much memory beside operands and results a kernel wants for a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import PluginError, one_line
from ..plugins.kernel_call import KernelCall
from ..plugins.paths import resolve
from ..plugins.specs import KernelSpec


def kernel_workspace(
    spec: KernelSpec, operands: Iterable[Any], results: Iterable[Any], **attributes: Any
) -> int | None:
    """Returns the bytes that a kernel wants as one result more, by its `workspace`.

    Args:
        spec: the kernel, from `select_kernel`.
        operands: what the target is called with: anything with `.shape` and `.dtype`. Where a
            program is sharded, these are a device's.
        results: the results of the call without that memory, likewise.
        **attributes: those of the call; they must be hashable.

    Returns:
        The bytes, or None where the target has no such result.

    Raises:
        PluginError: `workspace` can't be loaded, fails, or returns something else.
        TypeError: as of `select_kernel`.
    """
    if spec.workspace is None:
        return None
    owner = f"the kernel {spec.key!r}"
    call = KernelCall.of(spec.op, spec.platform, operands, **attributes)
    avals = KernelCall.of(spec.op, spec.platform, results).operands
    ask = resolve(spec.workspace, owner)
    try:
        found = ask(call, avals)
    except Exception as error:
        raise PluginError(
            f"{owner}: its workspace {spec.workspace!r} failed for {call}: {one_line(error)}"
        ) from error
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and found >= 0):
        return found
    raise PluginError(
        f"{owner}: its workspace {spec.workspace!r} must return bytes, an int of 0 or more, or "
        f"None, and returned {found!r} for {call}"
    )

"""kernel_workspace: how much scratch memory a kernel needs for a call."""

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
    """Return the bytes of scratch memory that a kernel needs.

    Args:
        spec: the kernel, from `select_kernel`.
        operands: the operands of the target: objects with `.shape` and `.dtype`. In a sharded
            program they are those of one device.
        results: the results of the target without that memory, as ``operands``.
        **attributes: the attributes of the call, which must be hashable.

    Returns:
        The bytes, which the target gets as one more result; None if it has no such result.

    Raises:
        PluginError: `workspace` can't be loaded, fails, or returns something else.
        TypeError: an operand has no shape or dtype, or an attribute can't be hashed.
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
        f"None, got {found!r} for {call}. Return the size of the scratch memory."
    )

"""get_op: the function that programs call for an op."""

from collections.abc import Callable
from typing import Any

from ..errors import unknown_name
from ..plugins import host as _host
from ..plugins.paths import resolve
from ..plugins.specs import KernelSpec


def get_op(op: str, /) -> Callable[..., Any]:
    """Return the function that programs call for an op.

    Args:
        op: the op, such as ``"gemm_w8a8"``.

    Returns:
        The `apply` of the op's kernel with the highest priority, among those that declare one.

    Raises:
        UnknownNameError: no kernel with an `apply` implements the op.
        PluginError: the function can't be imported.
    """
    claims = _host.ready().of(KernelSpec)
    callable_ones = [claim for claim in claims if claim.spec.apply is not None]
    found = [claim for claim in callable_ones if claim.spec.op == op]
    if not found:
        bare = [claim.spec.target for claim in claims if claim.spec.op == op]
        hint = f"{', '.join(bare)} implements it, without an apply to call it by." if bare else ""
        raise unknown_name("op", op, (claim.spec.op for claim in callable_ones), hint)
    best = max(found, key=lambda claim: claim.spec.priority)
    return resolve(best.spec.apply or "", best.label)

"""What attention's kernels take, which is what cuDNN has. Imports no JAX where there is no GPU."""

from __future__ import annotations

import functools
from typing import Any

from . import _cudnn, _gpus
from ._status import native

Attributes = tuple[tuple[str, Any], ...]
"""Those of the FFI call, by name, sorted."""

FORWARD, BACKWARD = "fused_attn_forward", "fused_attn_backward"
_DTYPES = ("bfloat16", "float16")
_PRE_SCALE = 1
_FIRST_THD = 10
_LEAST_FOR_PACKED_OFFSETS = 92600


def unfit(op: str, dtype: str, attributes: Attributes, capability: int) -> str | None:
    """Why a call isn't for cuDNN, whatever its version; None where it may be."""
    given = dict(attributes)
    why = unfit_operands(dtype, (given["qk_head_dim"], given["v_head_dim"]))
    if why:
        return why
    if not given["input_batch"] * given["q_max_seqlen"] * given["kv_max_seqlen"]:
        return "there are no queries, or no keys"
    if given["bias_type"] == _PRE_SCALE:
        return "a bias before the scale, which cuDNN doesn't have"
    if not given["scaling_factor"] > 0:
        return f"scaling_factor is {given['scaling_factor']}, which must be positive"
    if given["qkv_layout"] >= _FIRST_THD and not 90 <= capability < 110:
        return (
            "packed segments need a GPU of compute capability 9.0 or 10.x, and one here has "
            f"{capability / 10}"
        )
    return None


def unfit_operands(dtype: str, sizes: tuple[int, int]) -> str | None:
    """Why numbers or heads of these sizes, of keys and of values, aren't for cuDNN; or None."""
    if dtype not in _DTYPES:
        return f"q is {dtype}, and cuDNN's attention is of {' or '.join(_DTYPES)}"
    if any(size % 8 for size in sizes):
        return f"heads are of {sizes[0]} and {sizes[1]} numbers, which must be multiples of 8"
    if max(sizes) > 128 and (sizes[0] != sizes[1] or sizes[0] > 256):
        return (
            f"heads are of {sizes[0]} and {sizes[1]} numbers, which must be 128 at most, or of one "
            "size up to 256"
        )
    return None


def refused(op: str, dtype: str, attributes: Attributes) -> str | None:
    """Why cuDNN has no plan for a call on a GPU here; None where it has one on each.

    Makes the plan, which takes up to seconds, once.
    """
    given = dict(attributes)
    # Forward and backward must draw the same random words.
    ops = (FORWARD, BACKWARD) if given["is_training"] and given["dropout_probability"] else (op,)
    for one in ops:
        why = _known(one, given)
        if why is None:
            try:
                why = planned(one, dtype, attributes)[1]
            except RuntimeError as error:
                why = str(error)
        if why:
            return f"cuDNN {_cudnn.dotted(_cudnn.loaded()[0])} doesn't have {one}: {why}"
    return None


def _known(op: str, given: dict[str, Any]) -> str | None:
    """What cuDNN says that it has, and doesn't."""
    if op != BACKWARD or not given["softmax_type"]:
        return None
    if given["qkv_layout"] >= _FIRST_THD and _cudnn.loaded()[0] < _LEAST_FOR_PACKED_OFFSETS:
        return "with packed segments and a softmax offset it reads beyond arrays before 9.26"
    if given["deterministic"]:
        return "the gradient of a softmax offset is a sum in no order, and XLA_FLAGS want one"
    return None


@functools.cache
def planned(op: str, dtype: str, attributes: Attributes) -> tuple[int, str]:
    """(bytes of cuDNN's workspace, why it has no plan), for each kind of GPU here.

    The bytes are the most of them; the reason is the first.
    """
    bfloat16, backward = dtype == "bfloat16", op == BACKWARD
    plans = [
        native().plan_attention(dict(attributes), bfloat16, backward, device)
        for device in _gpus.one_of_each()
    ]
    return max(size for size, _ in plans), next((why for _, why in plans if why), "")

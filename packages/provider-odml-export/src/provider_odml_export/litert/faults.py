"""Puts right what the converter writes and LiteRT's kernels do not take.

With 16-bit activations the kernels read a bias as int64. The converter writes int32: the
convolutions then read past it, two values as one, and give wrong numbers without an error; the
depthwise convolution refuses to load.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from .io import compact
from .schema import op_name, pack, schema, unpack

BIAS = {"FULLY_CONNECTED": 2, "CONV_2D": 2, "DEPTHWISE_CONV_2D": 2, "TRANSPOSE_CONV": 3}
"""Which input the bias is."""


def repair(model: bytes) -> bytes:
    """Make the biases of operations on 16-bit activations int64.

    Args:
        model: a .tflite.

    Returns:
        The .tflite, or the same bytes where there is nothing to repair.

    Raises:
        OdmlError: this is no .tflite.
    """
    found = unpack(model)
    codes = list(map(op_name, found.operatorCodes))
    repaired = [
        _widen(found, graph, op, BIAS[codes[op.opcodeIndex]])
        for graph in found.subgraphs
        for op in (graph.operators if graph.operators is not None else ())
        if codes[op.opcodeIndex] in BIAS
    ]
    if not any(repaired):
        return model
    compact(found)
    return pack(found)


def _widen(model: Any, graph: Any, op: Any, place: int) -> bool:
    """Give one operation an int64 bias, if it needs one."""
    kinds = schema().TensorType
    if len(op.inputs) <= place or op.inputs[place] < 0:
        return False
    index = int(op.inputs[place])
    bias = graph.tensors[index]
    data = model.buffers[bias.buffer].data
    is_wide = graph.tensors[op.outputs[0]].type == kinds.INT16
    if not is_wide or bias.type != kinds.INT32 or data is None:
        return False
    # A separate tensor: operations on 8-bit activations may read the old one.
    new, buffer = copy.copy(bias), schema().BufferT()
    values = np.asarray(data, np.uint8).view(np.int32)
    buffer.data = values.astype(np.int64).view(np.uint8)
    new.type, new.buffer = kinds.INT64, len(model.buffers)
    if any(index in other.inputs for other in graph.operators if other is not op):
        graph.tensors.append(new)
        op.inputs = np.array(op.inputs)
        op.inputs[place] = len(graph.tensors) - 1
    else:
        graph.tensors[index] = new
    model.buffers.append(buffer)
    # FULLY_CONNECTED alone says in its options what type the bias has.
    if getattr(op.builtinOptions, "quantizedBiasType", None) is not None:
        op.builtinOptions.quantizedBiasType = kinds.INT64
    return True

"""What is in a .tflite, read from the flatbuffer itself: the interpreter shows int4 as int8."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np

from provider_odml import OdmlError

from .model import Model, Op, Signature, Subgraph, Tensor
from .schema import names_of, op_name, schema, unpack


def read(model: bytes) -> Model:
    """Read a .tflite. Constants are views of the bytes.

    Args:
        model: the bytes of the file.

    Returns:
        What is in it.

    Raises:
        OdmlError: this is no .tflite, or a broken one.
    """
    try:
        return _model(unpack(model), len(model))
    except (TypeError, ValueError, LookupError, AttributeError, struct.error) as error:
        raise OdmlError(f"A .tflite must be whole, got a broken one: {error}") from error


def _model(found: Any, nbytes: int) -> Model:
    names = list(map(op_name, found.operatorCodes or ()))
    subgraphs = tuple(_subgraph(found, i, names) for i in range(len(found.subgraphs)))
    signatures = {}
    for one in found.signatureDefs or ():
        graph, name = subgraphs[one.subgraphIndex], one.signatureKey.decode()
        inputs, outputs = (
            {entry.name.decode(): graph.tensors[entry.tensorIndex] for entry in entries or ()}
            for entries in (one.inputs, one.outputs)
        )
        signatures[name] = Signature(name, inputs, outputs, graph.index)
    return Model(signatures, subgraphs, nbytes)


def _subgraph(found: Any, index: int, names: list[str]) -> Subgraph:
    graph = found.subgraphs[index]
    tables = list(graph.tensors or ())
    tensors = [_tensor(table, i, found.buffers) for i, table in enumerate(tables)]
    tensors = [_blockwise(*pair, tensors) for pair in zip(tables, tensors, strict=True)]
    activations, ops = names_of("ActivationFunctionType"), []
    for op in graph.operators or ():
        activation = getattr(op.builtinOptions, "fusedActivationFunction", 0)
        places = _ints(op.inputs), _ints(op.outputs)
        ops.append(Op(names[op.opcodeIndex], *places, activations[activation]))
    places = _ints(graph.inputs), _ints(graph.outputs)
    return Subgraph(index, (graph.name or b"").decode(), tuple(tensors), tuple(ops), *places)


def _tensor(table: Any, index: int, buffers: Any) -> Tensor:
    data = buffers[table.buffer].data
    found = Tensor(
        index=index,
        name=(table.name or b"").decode(),
        shape=_ints(table.shapeSignature) or _ints(table.shape),
        dtype=names_of("TensorType")[table.type].lower(),
        buffer=table.buffer,
        raw=None if data is None or not len(data) else np.asarray(data, np.uint8),
    )
    quantization = table.quantization
    if quantization is None or quantization.scale is None or not len(quantization.scale):
        return found
    scale, zero = np.array(quantization.scale, np.float32), quantization.zeroPoint
    zero = np.zeros(len(scale), np.int64) if zero is None or not len(zero) else np.array(zero)
    axis = quantization.quantizedDimension if len(scale) > 1 else None
    return replace(found, scale=scale, zero_point=zero, quantized_dimension=axis)


def _blockwise(table: Any, tensor: Tensor, tensors: list[Tensor]) -> Tensor:
    """Return a tensor of blocks with its scales, another tensor's values."""
    quantization = table.quantization
    blocks = schema().QuantizationDetails.BlockwiseQuantization
    if quantization is None or quantization.detailsType != blocks:
        return tensor
    details = quantization.details
    scale = tensors[details.scales].data
    if scale is None:
        raise OdmlError(f"Tensor {tensor.name!r}, quantized in blocks, must have scales, got none.")
    zeros = details.zeroPoints
    zero = tensors[zeros].data if 0 < zeros < len(tensors) else None
    return replace(
        tensor,
        scale=scale.astype(np.float32),
        zero_point=np.zeros(scale.shape, np.int64) if zero is None else zero.astype(np.int64),
        quantized_dimension=quantization.quantizedDimension,
        block_size=details.blockSize,
    )


def _ints(values: Any) -> tuple[int, ...]:
    return () if values is None else tuple(map(int, values))

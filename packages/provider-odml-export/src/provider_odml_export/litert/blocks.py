"""Scales of blocks in a .tflite: several for each channel, in a separate tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from provider_odml import OdmlError

from .io import compact
from .schema import op_name, pack, schema, unpack

READERS = ("FULLY_CONNECTED", "EMBEDDING_LOOKUP")
"""The operations whose kernels know of blocks."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The scales of a matrix in blocks.

    Attributes:
        scale: float[rows, blocks], numbers that float16 has.
        size: values in a block.
    """

    scale: np.ndarray
    size: int


def in_blocks(model: bytes, blocks: Mapping[float, Blocks]) -> bytes:
    """Give matrices of integers the scales of their blocks.

    They are written as ai-edge-quantizer writes them: a float16 tensor of scales, no zero points.

    Args:
        model: a .tflite.
        blocks: by the scale that all rows of a matrix have in the file.

    Returns:
        The .tflite with those scales.

    Raises:
        OdmlError: it is not a .tflite, or a matrix does not exist, has another shape, or is read
            by an operation that knows no blocks.
    """
    found = unpack(model)
    codes = list(map(op_name, found.operatorCodes))
    seen = set()
    for graph in found.subgraphs:
        for index, tensor in enumerate(list(graph.tensors)):
            mark = _mark(tensor)
            if mark not in blocks:
                continue
            seen.add(mark)
            readers = [codes[op.opcodeIndex] for op in graph.operators if index in op.inputs]
            _check(tensor, blocks[mark], readers)
            tensor.quantization = _quantization(found, graph, tensor, blocks[mark])
    if missing := set(blocks) - seen:
        raise OdmlError(
            f"The file must have all {len(blocks)} parameters in blocks, got {len(seen)}: the "
            f"converter wrote {len(missing)} otherwise. Give their operations a rule without "
            "tile_size."
        )
    compact(found)
    return pack(found)


def _mark(tensor: Any) -> float | None:
    scales = None if tensor.quantization is None else tensor.quantization.scale
    if scales is None or not len(scales) or not np.all(scales == scales[0]):
        return None
    return float(np.float32(scales[0]))


def _check(tensor: Any, blocks: Blocks, readers: list[str]) -> None:
    rows, size = (int(n) for n in tensor.shape)
    if blocks.scale.shape != (rows, size // blocks.size) or not set(readers) <= set(READERS):
        raise OdmlError(
            f"A parameter in blocks of {blocks.size} must be read by {' or '.join(READERS)} and "
            f"have scales of {[rows, size // blocks.size]}, got {', '.join(readers)} and "
            f"{list(blocks.scale.shape)}. Give its operation a rule without tile_size."
        )


def _quantization(model: Any, graph: Any, tensor: Any, blocks: Blocks) -> Any:
    """Return a tensor's quantization in blocks. Adds the tensor of scales."""
    fb = schema()
    buffer, scales = fb.BufferT(), fb.TensorT()
    buffer.data = np.ascontiguousarray(blocks.scale, np.float16).view(np.uint8).reshape(-1)
    model.buffers.append(buffer)
    scales.name, scales.type = tensor.name + b"_scales", fb.TensorType.FLOAT16
    scales.shape, scales.hasRank = np.array(blocks.scale.shape, np.int32), True
    scales.buffer = len(model.buffers) - 1
    graph.tensors.append(scales)
    details = fb.BlockwiseQuantizationT()
    details.scales, details.zeroPoints = len(graph.tensors) - 1, -1
    details.blockSize = blocks.size
    found = fb.QuantizationParametersT()
    found.detailsType, found.details = fb.QuantizationDetails.BlockwiseQuantization, details
    return found

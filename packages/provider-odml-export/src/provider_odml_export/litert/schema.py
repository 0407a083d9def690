"""A .tflite as flatbuffer objects and back. The schema's classes come with ai-edge-litert."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import flatbuffers
import numpy as np

from provider_odml import OdmlError

IDENTIFIER = b"TFL3"
ALIGNMENT = 16
"""Of the buffers' data, as the schema's ``force_align`` asks; generated Python ignores it."""


def schema() -> Any:
    """Return the module with the schema's classes."""
    return importlib.import_module("ai_edge_litert.schema_py_generated")


@cache
def names_of(enum: str) -> dict[int, str]:
    """Return the names of a schema enum's values.

    Args:
        enum: such as "TensorType".
    """
    found = vars(getattr(schema(), enum)).items()
    return {value: name for name, value in found if isinstance(value, int)}


def op_name(code: Any) -> str:
    """Return the name of an ``OperatorCodeT``: such as "CONV_2D", or a custom operation's."""
    name = names_of("BuiltinOperator")[max(code.builtinCode, code.deprecatedBuiltinCode)]
    return (code.customCode or b"CUSTOM").decode() if name == "CUSTOM" else name


def root(model: bytes) -> Any:
    """Return the flatbuffer's ``Model``, whose fields are read when asked for.

    Raises:
        OdmlError: this is no .tflite.
    """
    if len(model) < 8 or model[4:8] != IDENTIFIER:
        raise OdmlError(
            f"Bytes 4 to 8 of a .tflite must be {IDENTIFIER!r}, got {bytes(model[4:8])!r} in "
            f"{len(model)} bytes."
        )
    return schema().Model.GetRootAs(model, 0)


def unpack(model: bytes) -> Any:
    """Return the model as a ``ModelT``, whose fields can be changed.

    Data that lies behind the flatbuffer, at an offset, is moved into it.

    Raises:
        OdmlError: this is no .tflite.
    """
    found = schema().ModelT.InitFromObj(root(model))
    for buffer in found.buffers:
        if buffer.offset > 1:
            buffer.data = np.frombuffer(model, np.uint8, buffer.size, buffer.offset)
        buffer.offset = buffer.size = 0
    for graph in found.subgraphs:
        for op in graph.operators if graph.operators is not None else ():
            if op.largeCustomOptionsOffset > 1:
                start, size = op.largeCustomOptionsOffset, op.largeCustomOptionsSize
                op.customOptions = np.frombuffer(model, np.uint8, size, start)
            op.largeCustomOptionsOffset = op.largeCustomOptionsSize = 0
    return found


def pack(model: Any) -> bytes:
    """Return a ``ModelT`` as the bytes of a .tflite.

    Raises:
        OdmlError: it is larger than a flatbuffer can be, 2 GiB.
    """
    size = sum(len(one.data) for one in model.buffers if one.data is not None)
    builder = flatbuffers.Builder(size + size // 8 + 65536)
    kept = model.buffers
    try:
        model.buffers = [_Aligned(one.data) for one in kept]
        builder.Finish(model.Pack(builder), file_identifier=IDENTIFIER)
    except flatbuffers.builder.BuilderSizeError as error:
        raise OdmlError(
            f"Constants must take at most 2 GiB, got {size} bytes. Quantize more parameters."
        ) from error
    finally:
        model.buffers = kept
    return bytes(builder.Output())


class _Aligned:
    """Packs like a ``BufferT``, with its data aligned as the schema asks."""

    def __init__(self, data: Any):
        self.data = None if data is None else np.asarray(data, np.uint8)

    def Pack(self, builder: flatbuffers.Builder) -> int:
        fb, vector = schema(), None
        if self.data is not None:
            builder.StartVector(1, len(self.data), ALIGNMENT)
            builder.head = builder.Head() - len(self.data)
            builder.Bytes[builder.Head() : builder.Head() + len(self.data)] = self.data.tobytes()
            vector = builder.EndVector()
        fb.BufferStart(builder)
        if vector is not None:
            fb.BufferAddData(builder, vector)
        return fb.BufferEnd(builder)

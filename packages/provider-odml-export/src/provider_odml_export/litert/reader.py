"""What is in a .tflite, read from the flatbuffer itself: the interpreter shows int4 as int8."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from provider_odml import OdmlError

from .model import Model, Op, Signature, Subgraph, Tensor
from .schema import names_of, root, schema


def read(model: bytes) -> Model:
    """Read a .tflite. Constants are views of the bytes.

    Args:
        model: the bytes of the file.

    Returns:
        What is in it.

    Raises:
        OdmlError: this is no .tflite, or a broken one.
    """
    found = root(model)
    try:
        return _model(found, model)
    except (TypeError, ValueError, LookupError, struct.error) as error:
        raise OdmlError(f"A .tflite must be whole, got a broken one: {error}") from error


def _model(found: Any, model: bytes) -> Model:
    codes = [found.OperatorCodes(i) for i in range(found.OperatorCodesLength())]
    names = [_op_name(code) for code in codes]
    raws = _Buffers(found, model)
    subgraphs = tuple(
        _subgraph(found.Subgraphs(i), i, names, raws) for i in range(found.SubgraphsLength())
    )
    signatures = {}
    for i in range(found.SignatureDefsLength()):
        one = found.SignatureDefs(i)
        graph = subgraphs[one.SubgraphIndex()]
        inputs = [one.Inputs(j) for j in range(one.InputsLength())]
        outputs = [one.Outputs(j) for j in range(one.OutputsLength())]
        name = one.SignatureKey().decode()
        signatures[name] = Signature(
            name,
            {entry.Name().decode(): graph.tensors[entry.TensorIndex()] for entry in inputs},
            {entry.Name().decode(): graph.tensors[entry.TensorIndex()] for entry in outputs},
            graph.index,
        )
    return Model(signatures, subgraphs, len(model))


class _Buffers:
    """The stored bytes of the buffers."""

    def __init__(self, found: Any, model: bytes):
        self.found, self.model = found, model

    def __getitem__(self, index: int) -> np.ndarray | None:
        buffer = self.found.Buffers(index)
        if buffer.Offset() > 1:  # behind the flatbuffer, in files over 2 GiB
            return np.frombuffer(self.model, np.uint8, buffer.Size(), buffer.Offset())
        return None if buffer.DataIsNone() or not buffer.DataLength() else buffer.DataAsNumpy()


def _subgraph(graph: Any, index: int, names: list[str], raws: _Buffers) -> Subgraph:
    tables = [graph.Tensors(i) for i in range(graph.TensorsLength())]
    tensors = [_tensor(table, i, raws) for i, table in enumerate(tables)]
    for i, table in enumerate(tables):
        tensors[i] = _blockwise(table, tensors[i], tensors)
    ops = []
    for i in range(graph.OperatorsLength()):
        op = graph.Operators(i)
        options = _options(op)
        activation = names_of("ActivationFunctionType")[options.pop("FusedActivationFunction", 0)]
        composite = options.pop("Name", b"").decode()
        inputs, outputs = _ints(op, "Inputs"), _ints(op, "Outputs")
        ops.append(Op(names[op.OpcodeIndex()], inputs, outputs, activation, composite, options))
    name = (graph.Name() or b"").decode()
    places = _ints(graph, "Inputs"), _ints(graph, "Outputs")
    return Subgraph(index, name, tuple(tensors), tuple(ops), *places)


def _tensor(table: Any, index: int, raws: _Buffers) -> Tensor:
    shape = _ints(table, "ShapeSignature") or _ints(table, "Shape")
    raw = raws[table.Buffer()]
    found = Tensor(
        index=index,
        name=(table.Name() or b"").decode(),
        shape=shape,
        dtype=names_of("TensorType")[table.Type()].lower(),
        buffer=table.Buffer(),
        raw=raw,
    )
    quantization = table.Quantization()
    if quantization is None or not quantization.ScaleLength():
        return found
    scale = np.array(quantization.ScaleAsNumpy())
    zero = quantization.ZeroPointAsNumpy() if quantization.ZeroPointLength() else None
    zero = np.zeros(len(scale), np.int64) if zero is None else np.array(zero)
    axis = quantization.QuantizedDimension() if len(scale) > 1 else None
    return _with(found, scale=scale, zero_point=zero, quantized_dimension=axis)


def _blockwise(table: Any, tensor: Tensor, tensors: list[Tensor]) -> Tensor:
    """Return a tensor of blocks with its scales, another tensor's values."""
    quantization, fb = table.Quantization(), schema()
    if quantization is None:
        return tensor
    if quantization.DetailsType() != fb.QuantizationDetails.BlockwiseQuantization:
        return tensor
    union, details = quantization.Details(), fb.BlockwiseQuantization()
    details.Init(union.Bytes, union.Pos)
    scale = tensors[details.Scales()].data
    if scale is None:
        raise OdmlError(f"Tensor {tensor.name!r}, quantized in blocks, must have scales, got none.")
    scale = scale.astype(np.float32)
    zeros = details.ZeroPoints()
    zero = tensors[zeros].data if 0 < zeros < len(tensors) else None
    zero = np.zeros(scale.shape, np.int64) if zero is None else zero.astype(np.int64)
    return _with(
        tensor,
        scale=scale,
        zero_point=zero,
        quantized_dimension=quantization.QuantizedDimension(),
        block_size=details.BlockSize(),
    )


def _with(tensor: Tensor, **fields: Any) -> Tensor:
    return Tensor(**{**vars(tensor), **fields})


def _op_name(code: Any) -> str:
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    name = names_of("BuiltinOperator")[number]
    return (code.CustomCode() or b"CUSTOM").decode() if name == "CUSTOM" else name


def _options(op: Any) -> dict[str, Any]:
    """Return the scalar options of an operation, by name."""
    found: dict[str, Any] = {}
    for union in ("BuiltinOptions", "BuiltinOptions2"):
        kind = names_of(union)[getattr(op, f"{union}Type")()]
        table = getattr(op, union)()
        if table is None or kind == "NONE":
            continue
        options = getattr(schema(), kind)()
        options.Init(table.Bytes, table.Pos)
        for name, method in vars(type(options)).items():
            if name[:1].isupper() and callable(method) and method.__code__.co_argcount == 1:
                value = method(options)
                if isinstance(value, int | float | bytes):
                    found[name] = value
    helpers = ("Length", "IsNone", "AsNumpy")
    return {name: value for name, value in found.items() if not name.endswith(helpers)}


def _ints(table: Any, name: str) -> tuple[int, ...]:
    if not getattr(table, f"{name}Length")():
        return ()
    return tuple(int(value) for value in getattr(table, f"{name}AsNumpy")())

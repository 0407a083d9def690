"""What a .tflite has: signatures, subgraphs, tensors and operations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from provider_odml import OdmlError

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
NOT_COMPUTING = ("QUANTIZE", "DEQUANTIZE", "WHILE", "IF", "STABLEHLO_COMPOSITE", "CALL_ONCE")
"""Ops that only convert, or only run other subgraphs, whose ops are looked at themselves."""

PACKED = {"int4": (4, True), "uint4": (4, False), "int2": (2, True)}
"""Bits, and whether they are signed, of the types that are several in a byte."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a subgraph.

    Attributes:
        index: its place in the subgraph.
        name: as in the file.
        shape: -1 where a size is not known.
        dtype: such as "int8", "int4" or "float32".
        scale: one per tensor or channel; per block with the shape of `scale`'s own tensor; or
            None.
        zero_point: as many as scales, or None.
        quantized_dimension: the axis of the channels, or None without several scales.
        block_size: how many values along the last axis share a scale, or 0.
        buffer: which buffer has its data; tensors may share one.
        raw: the stored bytes of a constant, or None.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    quantized_dimension: int | None = None
    block_size: int = 0
    buffer: int = 0
    raw: np.ndarray | None = field(default=None, repr=False)

    @property
    def grid(self) -> tuple[float, int] | None:
        """Scale and zero point of a tensor that has one of each, else None."""
        if self.scale is None or self.scale.size != 1:
            return None
        points = self.zero_point
        point = 0 if points is None or not points.size else int(points.reshape(-1)[0])
        return float(self.scale.reshape(-1)[0]), point

    @property
    def nbytes(self) -> int:
        """The stored bytes of a constant, else 0."""
        return 0 if self.raw is None else self.raw.size

    @property
    def data(self) -> np.ndarray | None:
        """A constant's values, 4-bit and 2-bit ones as int8 or uint8. None for others.

        Raises:
            OdmlError: the stored bytes are not of the tensor's shape and type.
        """
        if self.raw is None or self.dtype in ("string", "resource", "variant"):
            return None
        size = math.prod(self.shape)
        if self.dtype in PACKED:
            values = _unpacked(self.raw, *PACKED[self.dtype])[:size]
        else:
            kind = _numpy_dtype(self.dtype)
            values = self.raw[: self.raw.size // kind.itemsize * kind.itemsize].view(kind)
        if values.size != size:
            raise OdmlError(
                f"The stored bytes of tensor {self.name!r} must be those of "
                f"{self.dtype}{list(self.shape)}, got {self.raw.size}."
            )
        return values.reshape(self.shape)


@dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
        name: the builtin's, such as "FULLY_CONNECTED"; a custom operation's own.
        inputs: indices of tensors in the subgraph, -1 for one left out.
        outputs: indices of tensors in the subgraph.
        fused_activation: such as "RELU", or "NONE".
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fused_activation: str = "NONE"


@dataclass(frozen=True, eq=False)
class Subgraph:
    """A graph of tensors and operations."""

    index: int
    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Signature:
    """An entry point: its inputs and outputs by name, and the index of its subgraph."""

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    subgraph: int


@dataclass(frozen=True, eq=False)
class Model:
    """A .tflite.

    Attributes:
        signatures: by name.
        subgraphs: in order; the first ones are those of the signatures.
        nbytes: of the file.
    """

    signatures: dict[str, Signature]
    subgraphs: tuple[Subgraph, ...]
    nbytes: int

    def ops(self) -> Iterator[tuple[Subgraph, Op]]:
        """Yield all operations, each with its subgraph."""
        for graph in self.subgraphs:
            for op in graph.ops:
                yield graph, op

    def float_ops(self) -> list[tuple[Subgraph, Op]]:
        """Return the operations that compute in floats."""
        found = []
        for graph, op in self.ops():
            places = [index for index in (*op.inputs, *op.outputs) if index >= 0]
            is_float = any(graph.tensors[index].dtype in FLOATS for index in places)
            if is_float and op.name not in NOT_COMPUTING:
                found.append((graph, op))
        return found

    def op_counts(self) -> dict[str, int]:
        """Return how many there are of each operation, by name."""
        return dict(sorted(Counter(op.name for _, op in self.ops()).items()))

    def bytes_by_dtype(self) -> dict[str, int]:
        """Return the stored bytes of the constants, shared buffers counted once."""
        buffers: dict[int, Tensor] = {}
        for graph in self.subgraphs:
            for tensor in graph.tensors:
                if tensor.raw is not None:
                    buffers.setdefault(tensor.buffer, tensor)
        found: Counter[str] = Counter()
        for tensor in buffers.values():
            found[tensor.dtype] += tensor.nbytes
        return dict(sorted(found.items()))


def _numpy_dtype(name: str) -> np.dtype:
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def _unpacked(raw: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    """Return the values of a packed type, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = (raw[:, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(-1)
    if not signed:
        return values
    half = 1 << (bits - 1)
    return ((values ^ half).astype(np.int16) - half).astype(np.int8)

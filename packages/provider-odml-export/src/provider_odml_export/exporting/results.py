"""Results: what is in an exported file, and how it compares with JAX."""

from __future__ import annotations

from dataclasses import dataclass

from .verify import OutputResult, SiteResult


@dataclass(frozen=True)
class FloatOp:
    """An operation of the program that LiteRT computes in float.

    Attributes:
        operation: its op id.
        reason: why.
    """

    operation: str
    reason: str


@dataclass(frozen=True)
class Weight:
    """A parameter that is stored quantized.

    Attributes:
        operation: the op id of what reads it.
        dtype: as it is stored.
        shape: its shape.
        nbytes: its bytes, without its scales.
        block_size: how many values share a scale; 0 for one per channel or for all.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block_size: int = 0


@dataclass(frozen=True)
class Interface:
    """A signature of the file.

    Attributes:
        name: its name.
        inputs: by name, the types.
        outputs: by name, the types.
    """

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]


@dataclass(frozen=True)
class Results:
    """What is in an exported file, and how it compares with JAX.

    Attributes:
        sites: every place where a tensor is quantized.
        outputs: every output.
        floats: what stayed float, and why.
        bytes_by_dtype: bytes of the constants.
        ops: the operations of the file, counted.
        float_ops: how many of them compute in floats.
        file_bytes: those of the file.
        signatures: its signatures.
        weights: the parameters that are quantized.
        backend: that of ``export``. The outputs are compared with JAX's fake quantization for
            "converter", with JAX in float for any other.
        sqnr_floor: the signal to noise that outputs were held to, in decibels; None for none.
        warnings: ranges that cost far more than those of their neighbours.
    """

    sites: tuple[SiteResult, ...]
    outputs: tuple[OutputResult, ...]
    floats: tuple[FloatOp, ...]
    bytes_by_dtype: dict[str, int]
    ops: dict[str, int]
    float_ops: int
    file_bytes: int = 0
    signatures: tuple[Interface, ...] = ()
    weights: tuple[Weight, ...] = ()
    backend: str = "converter"
    sqnr_floor: float | None = None
    warnings: tuple[str, ...] = ()

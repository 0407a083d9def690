"""The number formats: quantized types, and the float types they stand for."""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_F32 = jnp.dtype(jnp.float32)

# The 4-bit NormalFloat of Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314), appendix E.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True)
class QType:
    """Describe a number format that arrays can be quantized to.

    Symmetric integers lie in ``[-qmax, qmax]`` (narrow range: the most negative two's complement
    number is not used, so negation is exact), as in section 3.1 of Wu et al. 2020, "Integer
    Quantization for Deep Learning Inference" (arXiv:2004.09602). With a zero point they use the
    whole range, `asymmetric`.

    Attributes:
      name: the name that ``quantize`` and ``QArray.qtype`` use.
      kind: "int", "float", or "codebook" (indices into `codebook`).
      bits: bits of one quantized value.
      qmax: the largest number that a quantized value stands for, if symmetric.
      storage_dtype: dtype of ``QArray.qvalue``; it may be wider than `bits` (see ``pack``).
      block: the tile size that the format demands, or None for any granularity.
      scale_dtype: dtype of ``QArray.scale``.
      asymmetric: least and largest integer with a zero point; None if there can't be one.
      codebook: the numbers that indices stand for, ascending; None except for kind "codebook".
    """

    name: str
    kind: Literal["int", "float", "codebook"]
    bits: int
    qmax: float
    storage_dtype: np.dtype
    block: int | None = None
    scale_dtype: np.dtype = _F32
    asymmetric: tuple[int, int] | None = None
    codebook: tuple[float, ...] | None = None

    @property
    def two_level(self) -> bool:
        """Return whether block scales are themselves scaled, by a ``QArray.global_scale``."""
        return self.scale_dtype == jnp.float8_e4m3fn


def _int(bits: int, storage: DTypeLike) -> QType:
    top = 2 ** (bits - 1)
    return QType(f"int{bits}", "int", bits, top - 1, jnp.dtype(storage), asymmetric=(-top, top - 1))


def _float(
    name: str,
    qmax: float,
    storage: DTypeLike,
    block: int | None = None,
    scale_dtype: DTypeLike = _F32,
) -> QType:
    bits = 4 if storage is jnp.float4_e2m1fn else 8
    return QType(name, "float", bits, qmax, jnp.dtype(storage), block, jnp.dtype(scale_dtype))


_ALL = (
    _int(2, jnp.int2),
    _int(3, jnp.int4),
    _int(4, jnp.int4),
    *(_int(bits, jnp.int8) for bits in (5, 6, 7, 8)),
    _int(16, jnp.int16),
    _float("float8_e4m3fn", 448.0, jnp.float8_e4m3fn),
    _float("float8_e5m2", 57344.0, jnp.float8_e5m2),
    _float("float4_e2m1fn", 6.0, jnp.float4_e2m1fn),
    QType("nf4", "codebook", 4, 1.0, jnp.dtype(jnp.uint4), codebook=_NF4),
    _float("mxfp8", 448.0, jnp.float8_e4m3fn, 32, jnp.float8_e8m0fnu),
    _float("mxfp4", 6.0, jnp.float4_e2m1fn, 32, jnp.float8_e8m0fnu),
    _float("nvfp4", 6.0, jnp.float4_e2m1fn, 16, jnp.float8_e4m3fn),
)

QTYPES: Mapping[str, QType] = types.MappingProxyType({kind.name: kind for kind in _ALL})
"""All known quantized types by name (read-only)."""

_ALIASES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn",
}


def get_qtype(name: str | DTypeLike) -> QType:
    """Return the QType called `name`.

    Args:
      name: a name in ``QTYPES``; "fp8", "fp8_e4m3", "fp8_e5m2" or "fp4"; or the dtype of that
        name, e.g. ``jnp.int8``.

    Raises:
      ValueError: `name` is none of these; the message lists the known names and the nearest.
    """
    if isinstance(name, str):
        found = QTYPES.get(name) or QTYPES.get(_ALIASES.get(name, ""))
        text = name
    else:
        try:
            text = jnp.dtype(name).name
        except TypeError:
            text = str(name)
        found = QTYPES.get(text)
    if found is not None:
        return found
    known = [*sorted(QTYPES), *_ALIASES]
    nearest = difflib.get_close_matches(text, known, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"unknown qtype {name!r}: known qtypes are {', '.join(known)}; did you mean {nearest!r}?"
    )

"""The number formats: a table of ours, and those that plugins declare; the float dtypes."""

import dataclasses
import difflib
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from interception_core import (
    CheckResult,
    PluginError,
    QTypeSpec,
    UnknownNameError,
    declared_specs,
    make_qtype,
)

FLOAT_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))
"""The dtypes that can be quantized, and that results can have."""


def float_dtype(dtype: Any, what: str) -> np.dtype:
    """Return `dtype` canonical (x64-aware), or raise a TypeError that names `what`."""
    if jnp.dtype(dtype) not in FLOAT_DTYPES:
        allowed = ", ".join(d.name for d in FLOAT_DTYPES)
        raise TypeError(
            f"{what} must have one of the dtypes {allowed}, got {jnp.dtype(dtype).name}. Convert "
            "it with .astype(...) first."
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def promote_floats(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the wider of two float dtypes, float32 for bfloat16 with float16.

    This is JAX's promotion of these dtypes. It is spelled out because ``jnp.promote_types`` refuses
    to promote under ``jax.numpy_dtype_promotion("strict")``.
    """
    if a == b:
        return a
    if a.itemsize == b.itemsize:
        return _F32
    return max(a, b, key=lambda d: d.itemsize)


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that arithmetic on scales uses for a logical dtype."""
    return promote_floats(dtype, _F32)


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
# llama.cpp's IQ4_NL and IQ4_XS, ggml's `kvalues_iq4nl`.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(frozen=True)
class QType:
    """A number format that arrays can be quantized to.

    Symmetric integers lie in ``[-qmax, qmax]`` (narrow range: the most negative two's complement
    number is not used, so negation is exact), as in section 3.1 of Wu et al. 2020, "Integer
    Quantization for Deep Learning Inference" (arXiv:2004.09602). With a zero point they use the
    whole range, `asymmetric`. A plugin adds a format by the hook ``jaxtap_register_qtypes``.

    Attributes:
      name: the name that ``quantize`` and ``QArray.qtype`` use.
      kind: "int", "float", or "codebook" (indices into `codebook`).
      bits: bits of one quantized value.
      qmax: the largest number that a quantized value stands for, if symmetric.
      storage_dtype: dtype of ``QArray.qvalue``; it may be wider than `bits` (see ``pack``).
      block: the tile size that the format demands, or None for any granularity.
      scale_dtype: dtype of ``QArray.scale``: float32, bfloat16 or float16; float8_e8m0fnu for
        powers of two; float8_e4m3fn for scales that have a ``QArray.global_scale``.
      asymmetric: least and largest integer with a zero point; None if there can't be one.
      codebook: the numbers that indices stand for, ascending, negative ones and positive ones;
        None except for kind "codebook".

    Raises:
      ValueError: parts that contradict each other; the message names the attribute.
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

    def __post_init__(self):
        for field in ("storage_dtype", "scale_dtype"):
            object.__setattr__(self, field, jnp.dtype(getattr(self, field)))
        if self.codebook is not None:
            object.__setattr__(self, "codebook", tuple(map(float, self.codebook)))
        wrong = next((field for field, fits in self._checks() if not fits), None)
        if wrong is not None:
            raise ValueError(
                f"QType.{wrong} must be {_ALLOWED[wrong]}, got {getattr(self, wrong)!r} in the "
                f"format {self.name!r} of kind {self.kind!r}. Change it."
            )

    def _checks(self) -> Iterator[tuple[str, bool]]:
        """Yield each attribute, and whether it fits those before it."""
        yield "kind", self.kind in _STORAGE
        yield "storage_dtype", jnp.issubdtype(self.storage_dtype, _STORAGE[self.kind])
        yield "bits", 1 <= self.bits <= self.storage_bits
        book = self.codebook
        yield "codebook", (book is not None) == (self.kind == "codebook")
        if book is not None:
            ascending = all(a < b for a, b in itertools.pairwise(book))
            around = bool(book) and book[0] <= 0 <= book[-1]
            yield "codebook", ascending and around and len(book) <= 2**self.bits
        info = jnp.iinfo(self.storage_dtype) if self.kind == "int" else None
        largest = info.max if info else max(map(abs, book)) if book else np.inf
        yield "qmax", 0 < self.qmax <= largest and (book is None or self.qmax == largest)
        yield "block", self.block is None or (isinstance(self.block, int) and self.block > 0)
        yield "scale_dtype", self.scale_dtype in _SCALE_DTYPES
        if self.asymmetric is not None:
            low, high = self.asymmetric
            fits = info is not None and info.min <= low <= 0 <= high <= info.max and low < high
            yield "asymmetric", fits

    @property
    def storage_bits(self) -> int:
        """Return the bits of one element of ``QArray.qvalue``."""
        info: Any = jnp.finfo if self.kind == "float" else jnp.iinfo
        return info(self.storage_dtype).bits

    @property
    def packable(self) -> bool:
        """Return whether ``pack`` makes quantized values smaller."""
        return self.kind != "float" and self.bits < self.storage_bits

    @property
    def has_zero(self) -> bool:
        """Return whether a quantized value stands for 0."""
        return self.codebook is None or 0.0 in self.codebook

    @property
    def scale_dtypes(self) -> tuple[np.dtype, ...]:
        """Return the dtypes that ``QArray.scale`` may have, that of the format first."""
        wide = self.scale_dtype.itemsize > 1
        others = [jnp.dtype(d) for d in _SCALE_DTYPES[:3] if wide and d != self.scale_dtype]
        return (self.scale_dtype, *others)

    def with_scales(self, dtype: DTypeLike | None) -> "QType":
        """Return the format with scales of another dtype; None for its own.

        Raises:
          ValueError: a dtype that the format's scales can't have.
        """
        if dtype is None:
            return self
        if jnp.dtype(dtype) not in self.scale_dtypes:
            raise ValueError(
                f"scale_dtype must be {' or '.join(d.name for d in self.scale_dtypes)} for the "
                f"format {self.name!r}, got {jnp.dtype(dtype).name}. Leave it out for "
                f"{self.scale_dtype.name}."
            )
        return dataclasses.replace(self, scale_dtype=jnp.dtype(dtype))

    @property
    def two_level(self) -> bool:
        """Return whether block scales are themselves scaled, by a ``QArray.global_scale``."""
        return self.scale_dtype == jnp.float8_e4m3fn


_STORAGE = {
    "int": jnp.signedinteger,
    "float": jnp.floating,
    "codebook": jnp.unsignedinteger,
}
_SCALE_DTYPES = (
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e8m0fnu,
    jnp.float8_e4m3fn,
)
_ALLOWED = {
    "kind": "'int', 'float' or 'codebook'",
    "storage_dtype": "a signed integer, float or unsigned integer (for a codebook) dtype",
    "bits": "a positive number of bits that the storage dtype has",
    "codebook": "at most 2**bits ascending numbers around 0 for kind 'codebook', and None for "
    "others",
    "qmax": "positive and in the storage dtype, for a codebook its largest magnitude",
    "block": "a positive int, or None",
    "scale_dtype": "float32, bfloat16, float16, float8_e8m0fnu or float8_e4m3fn",
    "asymmetric": "two ints around 0 in the storage dtype for kind 'int', and None for others",
}


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
    QType("iq4_nl", "codebook", 4, 127.0, jnp.dtype(jnp.uint4), codebook=_IQ4_NL),
    _float("mxfp8", 448.0, jnp.float8_e4m3fn, 32, jnp.float8_e8m0fnu),
    _float("mxfp4", 6.0, jnp.float4_e2m1fn, 32, jnp.float8_e8m0fnu),
    _float("nvfp4", 6.0, jnp.float4_e2m1fn, 16, jnp.float8_e4m3fn),
)

QTYPES: Mapping[str, QType] = types.MappingProxyType({kind.name: kind for kind in _ALL})
"""The quantized types of this package, by name (read-only)."""

_ALIASES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn",
}


def get_qtype(name: str | DTypeLike) -> QType:
    """Return the QType called `name`.

    Args:
      name: a name in ``QTYPES``, or one that a plugin declares; "fp8", "fp8_e4m3", "fp8_e5m2" or
        "fp4"; or the dtype of that name, e.g. ``jnp.int8``.

    Raises:
      ValueError: `name` is none of these; the message lists the known names and the nearest.
      PluginError: two plugins claim the name, or the one that declares it is broken.
    """
    if isinstance(name, str):
        found = QTYPES.get(_ALIASES.get(name, name))
        return _of_a_plugin(name) if found is None else found
    try:
        text = jnp.dtype(name).name
    except TypeError:
        text = str(name)
    if text not in QTYPES:
        raise _unknown(name, text, QTYPES)
    return QTYPES[text]


def _of_a_plugin(name: str) -> QType:
    try:
        found = make_qtype(name)
    except UnknownNameError as error:
        # The cause names the plugins that failed, one of which may have had it.
        raise _unknown(name, name, (*QTYPES, *error.known)) from error
    if not isinstance(found, QType):
        raise PluginError(
            f"The qtype {name!r} of a plugin must be a quant_numerics.QType, got {found!r}. Return "
            "one from the factory that its QTypeSpec names."
        )
    return found


def _unknown(given: object, text: str, names: Iterable[str]) -> ValueError:
    known = [*sorted(names), *_ALIASES]
    nearest = difflib.get_close_matches(text.casefold(), known, n=1, cutoff=0.0)[0]
    return ValueError(
        f"a qtype must be one of {', '.join(known)}, got {given!r}. Did you mean {nearest!r}? A "
        "plugin can declare another with jaxtap_register_qtypes."
    )


def formats() -> Iterator[CheckResult]:
    """Report this package's formats, and try each that a plugin declares."""
    yield CheckResult("ok", f"{len(QTYPES)} of quant-numerics: {', '.join(QTYPES)}")
    for spec in declared_specs(QTypeSpec):
        if spec.name in QTYPES:
            yield CheckResult(
                "fail",
                f"the qtype {spec.name!r} of a plugin is hidden by quant-numerics' own",
                f"rename it: {spec.factory} is never called",
            )
            continue
        try:
            kind = get_qtype(spec.name)
        except (PluginError, ValueError) as error:
            yield CheckResult("fail", str(error), f"look at {spec.factory}")
        else:
            parts = [
                f"{kind.bits} bits in {kind.storage_dtype.name}",
                f"{kind.scale_dtype.name} scales",
            ]
            parts += [] if kind.block is None else [f"blocks of {kind.block}"]
            yield CheckResult("ok", f"{spec.name}: {spec.summary} ({', '.join(parts)})")

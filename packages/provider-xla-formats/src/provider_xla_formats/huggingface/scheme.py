"""Schemes: how compressed-tensors says in a config what is quantized to what."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import quant_numerics as qn
from provider_xla.file_formats import StoreError

INT, FLOAT, PACKED = "int-quantized", "float-quantized", "pack-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
BLOCKS = {NVFP4: ("nvfp4", 4, 16), MXFP4: ("mxfp4", 4, 32), MXFP8: ("mxfp8", 8, 32)}
"""Formats of blocks: the qtype, bits of a value and numbers of a block."""
_NAIVE = "naive-quantized"
_MIXED = "mixed-precision"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How weights are quantized.

    Attributes:
        format: "int-quantized", "float-quantized", "pack-quantized", or one of blocks.
        bits: bits of a quantized value.
        kind: "int" or "float".
        symmetric: whether there are no zero points.
        strategy: what shares a scale: "tensor", "channel", "group" or "block".
        group: numbers of a row that share a scale, for "group".
        block: rows and columns that share a scale, for "block".
    """

    format: str
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group: int | None = None
    block: tuple[int, int] | None = None

    @property
    def qtype(self) -> str:
        """The qtype of the quantized values."""
        if self.format in BLOCKS:
            return BLOCKS[self.format][0]
        return "float8_e4m3fn" if self.kind == "float" else f"int{self.bits}"

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales, with the weight's number of axes."""
        *lead, n, k = shape
        if self.strategy == "tensor":
            return (*(1 for _ in lead), 1, 1)
        if self.strategy == "channel":
            return (*lead, n, 1)
        if self.block is not None:
            return (*lead, -(-n // self.block[0]), -(-k // self.block[1]))
        assert self.group is not None
        return (*lead, n, -(-k // self.group))

    def as_json(self) -> dict[str, Any]:
        """Return the arguments of the weights, as a config has them."""
        found: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": "tensor_group" if self.format == NVFP4 else self.strategy,
            "group_size": self.group,
            "dynamic": False,
        }
        return found | ({} if self.block is None else {"block_structure": list(self.block)})


def scheme_of(what: str, q: qn.QArray, act_qtype: str | None) -> Scheme:
    """Return the scheme of a weight [out, in], or raise StoreError if there is none.

    int-quantized is for weights that are multiplied with int8 activations. With float activations
    vLLM expects packed weights, whatever their bits.
    """
    kind = qn.get_qtype(q.qtype)
    names = ["float8_e4m3fn", *(f"int{bits}" for bits in range(2, 9))]
    blocks = {qtype: (form, *sizes) for form, (qtype, *sizes) in BLOCKS.items()}
    if q.ndim < 2 or kind.name not in [*names, *blocks]:
        raise StoreError(
            f"{what} must be a matrix of int2 to int8, float8_e4m3fn, {', '.join(blocks)} in "
            f"compressed-tensors, got {q.qtype}{list(q.shape)}. Quantize it to one of these."
        )
    *lead, n, k = q.shape
    if kind.name in blocks:
        form, bits, size = blocks[kind.name]
        if q.scale.shape != (*lead, n, k // size) or k % size:
            raise StoreError(
                f"{what} must have blocks of {size} along its last axis, of whole blocks, got "
                f"scales of shape {list(q.scale.shape)} for {[*lead, n, k]}. Transpose a weight "
                "that is [in, out] by a Target."
            )
        return Scheme(form, bits, "float", True, "group", size)
    counts, shape = q.scale.shape, (*lead, n, k)
    group = block = None
    if counts == (*lead, n, 1):
        strategy = "channel"
    elif all(count == 1 for count in counts):
        strategy = "tensor"
    elif counts[:-1] == (*lead, n) and counts[-1] and k % counts[-1] == 0:
        strategy, group = "group", k // counts[-1]
    elif kind.kind == "float" and min(_block(q)) > 1 and counts[:-2] == tuple(lead):
        strategy, block = "block", _block(q)
    else:
        raise StoreError(
            f"{what} must have one scale, or one for each row, group of a row or, of floats, block "
            f"in compressed-tensors, got scales of shape {list(counts)} for {list(shape)}. "
            "Transpose a weight that is [in, out] by a Target."
        )
    is_packed = kind.bits < 8 or strategy == "group" or act_qtype != "int8"
    form = FLOAT if kind.kind == "float" else PACKED if is_packed else INT
    return Scheme(form, kind.bits, kind.kind, q.zero_point is None, strategy, group, block)


def _block(q: qn.QArray) -> tuple[int, int]:
    """Return the rows and columns that share a scale; 0 where unknown."""
    ragged = dict(q.ragged_tiles)
    pairs = [(axis, q.shape[axis], q.scale.shape[axis]) for axis in (-2, -1)]
    rows, columns = (ragged.get(axis, 0 if n % count else n // count) for axis, n, count in pairs)
    return rows, columns


def read_schemes(where: str, config: Mapping[str, Any]) -> dict[str, tuple[list[str], Scheme]]:
    """Return a config's groups: their targets and weight schemes.

    Raises:
        StoreError: it is not such a config, or has a scheme that can't be read.
    """
    for key, is_there in (
        ("transform_config", bool((config.get("transform_config") or {}).get("config_groups"))),
        ("sparsity_config", _is_sparse(config.get("sparsity_config"))),
    ):
        if is_there:
            raise StoreError(
                f"{where} must have no {key}, which is not read: numbers would be others. Take the "
                "float checkpoint, by quantize_file."
            )
    try:
        found = {}
        for name, group in config["config_groups"].items():
            own = group.get("format") or config["format"]
            targets = [str(target) for target in group["targets"]]
            if group.get("weights") is not None:
                found[name] = targets, _scheme(f"{name} of {where}", own, group["weights"])
        return found
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"{where} must have a quantization_config of compressed-tensors, got one that can't be "
            f"read ({error!r})."
        ) from error


def _is_sparse(about: Any) -> bool:
    return isinstance(about, Mapping) and about.get("format", "dense") != "dense"


def _scheme(what: str, form: str, args: Mapping[str, Any]) -> Scheme:
    kind, bits = str(args.get("type", "int")).lower(), args.get("num_bits", 8)
    if form in (_NAIVE, _MIXED):
        form = FLOAT if kind == "float" else INT
    if form in BLOCKS:
        _, own, size = BLOCKS[form]
        if (kind, bits, args.get("group_size", size)) != ("float", own, size):
            raise StoreError(
                f"{what} must have {own}-bit floats in groups of {size} as {form} has, got "
                f"{bits}-bit {kind}s in groups of {args.get('group_size')}."
            )
        return Scheme(form, own, kind, True, "group", size)
    fits = bits == 8 if kind == "float" else kind == "int" and 2 <= bits <= 8
    if form not in (INT, FLOAT, PACKED) or not fits or (kind == "float") != (form == FLOAT):
        raise StoreError(
            f"{what} must be {', '.join([INT, FLOAT, PACKED, *BLOCKS])}, of int2 to int8 or of "
            f"8-bit floats, got {form} of {bits}-bit {kind}s."
        )
    group = args.get("group_size")
    strategy = args.get("strategy") or ("group" if (group or 0) > 0 else "tensor")
    if args.get("strategy") is None and group == -1:
        strategy = "channel"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise StoreError(
            f"{what} must have scales by tensor, channel, group or block, got {strategy}."
        )
    return Scheme(
        form,
        bits,
        kind,
        bool(args.get("symmetric", True)),
        strategy,
        group if strategy == "group" else None,
        tuple(args["block_structure"]) if strategy == "block" else None,
    )


def find(module: str, groups: Mapping[str, tuple[list[str], Scheme]]) -> Scheme | None:
    """Return a module's scheme: by name, by pattern, then by class.

    A file doesn't say classes: what embeds has that in its name, and all else is Linear.
    """
    embeds = "embed" in module.rpartition(".")[2]
    tests = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
        lambda target: target.isidentifier() and ("Embedding" in target) == embeds,
    )
    for test in tests:
        for targets, scheme in groups.values():
            if any(test(target) for target in targets):
                return scheme
    return None


def config_of(
    schemes: Mapping[str, Scheme], ignored: Sequence[str], act_qtype: str | None
) -> dict[str, Any]:
    """Return the config of weights, by module."""
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    activations = None
    if act_qtype is not None:
        kind = qn.get_qtype(act_qtype)
        activations = {
            "num_bits": kind.bits,
            "type": kind.kind,
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
        }
    groups = {
        f"group_{i}": {
            "targets": modules,
            "weights": scheme.as_json(),
            "input_activations": activations,
            "output_activations": None,
            "format": scheme.format,
        }
        for i, (scheme, modules) in enumerate(by_scheme.items())
    }
    formats = {scheme.format for scheme in by_scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def shaped(scale: np.ndarray, scheme: Scheme, shape: Sequence[int]) -> np.ndarray:
    """Return scales or zero points with as many axes as their weight.

    Raises:
        ValueError: their number does not fit the weight.
    """
    wanted = scheme.scale_shape(shape)
    if scale.size != np.prod(wanted, dtype=int):
        raise ValueError(f"scales of shape {list(scale.shape)} must be {list(wanted)}")
    return scale.reshape(wanted)


def tiles(scheme: Scheme, shape: Sequence[int]) -> dict[int, int]:
    """Return the tiles of a weight whose last tiles are shorter, by axis."""
    if scheme.block is None:
        return {}
    sizes = zip((len(shape) - 2, len(shape) - 1), scheme.block, strict=True)
    return {axis: size for axis, size in sizes if shape[axis] > size and shape[axis] % size}

"""compressed-tensors, the checkpoints of vLLM and llm-compressor, read and written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import quant_numerics as qn
from provider_xla.file_formats import DTYPES, StoreError, atomic_write, write_tensors

from ..affine import AffineWeight
from ..blocks import as_float4, from_float4, nibbles, whole_bytes
from ..float_files import SINGLE
from ..names import Targets, tensors_of
from .method import CONFIG, KEYS, Method, check_scales, grouped, pack_words, unpack_words
from .scheme import (
    BLOCKS,
    FLOAT,
    INT,
    NVFP4,
    PACKED,
    Scheme,
    config_of,
    find,
    read_schemes,
    scheme_of,
    shaped,
    tiles,
)

_PARTS = ("packed", "scale", "global_scale", "zero_point", "shape", "g_idx")


class CompressedTensors(Method):
    """A module has the scheme of the group among whose targets it is."""

    parts = (".weight", *(f".weight_{part}" for part in _PARTS))
    marks = (".weight_scale",)

    def __init__(self, where: str, config: Mapping[str, Any]):
        self._groups = read_schemes(where, config)

    def read(self, module: str, found: Mapping[str, np.ndarray], dtype: DTypeLike | None) -> Any:
        """Return a weight; see ``Method``."""
        scheme = find(module, self._groups)
        if scheme is None:
            raise ValueError("it has scales, and must be among the targets of a group")
        if scheme.symmetric and ".weight_zero_point" in found:
            raise ValueError("it has zero points, which its scheme doesn't have")
        read = {name.removeprefix(".weight_"): array for name, array in found.items()}
        kind = qn.get_qtype(scheme.qtype)
        if scheme.format in BLOCKS:
            return _blocks(scheme, read, jnp.bfloat16 if dtype is None else dtype)
        if scheme.format == PACKED:
            shape = tuple(map(int, read["shape"]))
            values = unpack_words(read["packed"], scheme.bits, shape[-1]).reshape(shape)
        else:
            values, shape = read[".weight"], read[".weight"].shape
        wanted = {FLOAT: scheme.qtype, INT: "int8"}.get(scheme.format, values.dtype.name)
        if values.dtype.name != wanted:
            raise ValueError(f"its values must be {wanted}, got {values.dtype.name}")
        check_scales(read["scale"])
        if scheme.group is not None and shape[-1] % scheme.group:
            raise ValueError(f"groups of {scheme.group} must divide its {shape[-1]} columns")
        scale, zero_point = shaped(read["scale"], scheme, shape), None
        if not scheme.symmetric:
            zero_point = read["zero_point"]
            if scheme.format == PACKED and scheme.strategy != "tensor":
                turned = unpack_words(zero_point.swapaxes(-1, -2), scheme.bits, shape[-2])
                zero_point = turned.swapaxes(-1, -2)
            zero_point = shaped(zero_point, scheme, shape)
        dtype = scale.dtype if dtype is None else dtype
        if "g_idx" in read:
            return grouped(values, scale, zero_point, read["g_idx"], kind.name, dtype)
        return qn.qarray(
            jnp.asarray(values).astype(kind.storage_dtype),
            jnp.asarray(scale),
            kind.name,
            dtype,
            zero_point=None if zero_point is None else zero_point.astype(kind.storage_dtype),
            tile_axes=tiles(scheme, shape),
        )


def _blocks(scheme: Scheme, read: Mapping[str, np.ndarray], dtype: DTypeLike) -> qn.QArray:
    """Return a weight in blocks of floats."""
    values = as_float4(nibbles(read["packed"])) if scheme.bits == 4 else read[".weight"]
    kind, whole = qn.get_qtype(scheme.qtype), None
    scale = read["scale"].view(kind.scale_dtype)
    if scheme.format == NVFP4:
        # What scales were multiplied with, so that float8 holds them.
        whole = (1 / read["global_scale"].astype(np.float32)).reshape([1] * values.ndim)
    scale = shaped(scale, scheme, values.shape)
    return qn.qarray(jnp.asarray(values), jnp.asarray(scale), kind.name, dtype, global_scale=whole)


def save_compressed_tensors(
    folder: str | os.PathLike[str],
    params: Any,
    *,
    names: Targets = None,
    config: Mapping[str, Any] | None = None,
    act_qtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write parameters as a checkpoint for vLLM and llm-compressor.

    Args:
        folder: the folder to make, with config.json and model.safetensors. It is whole or doesn't
            exist.
        params: any tree of arrays and of what ``plan.quantize`` returned.
        names: which tensors the parameters become, by the name of the leaf: a name, a ``Target`` or
            several. Weights are [out, in] and their names end in ".weight":
            ``Target("up_proj.weight", lambda w: w.T)``.
        config: the other keys of config.json, such as "architectures".
        act_qtype: what activations are quantized to when it runs, row by row: "int8" or
            "float8_e4m3fn"; None for floats. With "int8", weights in int8 are int-quantized;
            without, they are pack-quantized, as vLLM has both.
        overwrite: whether to replace what is there.

    Raises:
        StoreError: ``folder`` exists; or the leaf that the message names has no scheme.
    """
    if act_qtype not in (None, "int8", "float8_e4m3fn"):
        raise StoreError(f"act_qtype must be None, 'int8' or 'float8_e4m3fn', got {act_qtype!r}.")
    written: dict[str, np.ndarray] = {}
    schemes: dict[str, Scheme] = {}
    ignored = []
    for leaf, name, make in tensors_of(params, names):
        value = make()
        if isinstance(value, AffineWeight):
            raise StoreError(
                f"{leaf} as {name} must have whole zero points in compressed-tensors, got a float "
                "minimum for each group. Quantize the float parameters again."
            )
        module, _, last = name.rpartition(".")
        if isinstance(value, qn.QArray):
            if last != "weight" or not module:
                raise StoreError(
                    f"{leaf} must be a tensor whose name ends in .weight, got {name}. Give it such "
                    "a name by names=."
                )
            schemes[module] = scheme_of(f"{leaf} as {name}", value, act_qtype)
            parts = _parts(value, schemes[module])
            written |= {f"{module}.{part}": array for part, array in parts.items()}
        else:
            if np.asarray(value).dtype.name not in DTYPES:
                raise StoreError(
                    f"{leaf} as {name} must be of {', '.join(DTYPES)}, got {value.dtype.name}."
                )
            if last == "weight" and np.ndim(value) > 1:
                ignored.append(module)
            written[name] = np.asarray(value)
    found = {**(config or {}), KEYS[0]: config_of(schemes, ignored, act_qtype)}
    with atomic_write(Path(folder), overwrite) as new:
        try:
            new.mkdir()
            (new / CONFIG).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            write_tensors(new / SINGLE, written)
        except (OSError, TypeError, ValueError) as error:
            raise StoreError(f"{folder} can't be written: {error}") from error


def _parts(q: qn.QArray, scheme: Scheme) -> dict[str, np.ndarray]:
    """Return the tensors of a weight, by their names in its module."""
    scale = np.asarray(q.scale)
    if scheme.format in BLOCKS:
        values = np.asarray(q.qvalue)
        parts = {"weight": values}
        if scheme.bits == 4:
            parts = {"weight_packed": whole_bytes(from_float4(values))}
        if q.global_scale is None:
            return parts | {"weight_scale": scale.view(np.uint8)}
        whole = 1 / np.asarray(q.global_scale).reshape(-1)
        return parts | {"weight_scale": scale, "weight_global_scale": whole}
    parts = {"weight_scale": scale.reshape(-1) if scheme.strategy == "tensor" else scale}
    points = None if q.zero_point is None else np.asarray(q.zero_point.astype(jnp.int8))
    if scheme.format != PACKED:
        parts["weight"] = np.asarray(
            q.qvalue if scheme.kind == "float" else q.qvalue.astype("int8")
        )
    else:
        parts["weight_packed"] = pack_words(np.asarray(q.qvalue.astype(jnp.int8)), scheme.bits)
        parts["weight_shape"] = np.asarray(q.shape, np.int64)
        if points is not None and scheme.strategy != "tensor":
            turned = pack_words(points.swapaxes(-1, -2), scheme.bits)
            points = np.ascontiguousarray(turned.swapaxes(-1, -2))
    if points is not None:
        parts["weight_zero_point"] = points
    return parts

"""A folder that somebody else quantized, as it was published: its quantized values are kept."""

import dataclasses
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import provider_xla as xla
import quant_numerics as qn

from . import checkpoint
from .config import LlmError
from .fields import read_config, read_fields
from .rules import rules_for

KEYS = "quantization_config", "compression_config"
IGNORED = re.compile(
    r".*\.self_attn\.(q|k|v)_scale|.*\.(input|k_proj\.output|v_proj\.output)_scale"
)
"""Ranges of activations and caches, which are float here."""


def _about(folder):
    """Return what a folder's config says of its quantization, or None."""
    fields = read_fields(folder)
    return next((fields[key] for key in KEYS if isinstance(fields, dict) and fields.get(key)), None)


def is_published(folder):
    """Return whether a folder's config says that its tensors are quantized."""
    return _about(folder) is not None


def read(folder, dtype="float32"):
    """Return the config, the rules and the stored parameters of such a folder.

    A parameter whose tensors have several formats is dequantized, and a warning names it.

    Args:
        folder: config.json and safetensors files, by any method of ``load_huggingface``.
        dtype: of parameters that are not quantized, and that quantized ones stand for.

    Raises:
        LlmError: the config asks for what ``model`` does not compute, or tensors are missing,
            unknown or of another shape.
        provider_xla.StoreError: tensors do not fit what the config says of them.
    """
    folder = Path(folder)
    config, about = read_config(folder, quantized=True), _about(folder)
    files = checkpoint.find_files(folder)
    config = checkpoint.located(config, files)
    _check_names(folder, config, files)
    mixed = []
    sources = {
        name: _source(config, name, None, dtype, mixed) for name in checkpoint.tensor_names(config)
    }
    for stack in config.stacks:
        for name in checkpoint.tensor_names(config, stack.layers[0]):
            sources[f"{stack.name}.{name}"] = _source(config, name, stack, dtype, mixed)
    params = xla.load_huggingface(folder, like=checkpoint.shapes(config, dtype), names=sources)
    if mixed:
        warnings.warn(
            f"{', '.join(mixed)} of {folder} are float in all layers: each is made of tensors of "
            "several formats, such as layers that are not quantized.",
            xla.QuantizationWarning,
            stacklevel=2,
        )
    return config, [*rules_for(config, None), *xla.rules_of(params, _act_qtype(about))], params


def opened(folder):
    """Return the config of such a folder, and what returns a parameter: see ``checkpoint.Get``."""
    folder = Path(folder)
    config, files = read_config(folder, quantized=True), checkpoint.find_files(folder)
    config = checkpoint.located(config, files)
    _check_names(folder, config, files)
    shapes = checkpoint.shapes(config)

    def get(name, layer):
        stack = None if layer is None else dataclasses.replace(
            config.place(layer)[0], layers=(layer,)
        )  # fmt: skip
        shape = shapes[name] if stack is None else shapes[stack.name][name]
        if stack is not None:
            shape = jax.ShapeDtypeStruct((1, *shape.shape[1:]), shape.dtype)
        source = _source(config, name, stack, "float32", [])
        found = xla.load_huggingface(folder, like={"it": shape}, names={"it": source})["it"]
        array = np.asarray(found.restore() if hasattr(found, "restore") else found, np.float32)
        return array if layer is None else array[0]

    return config, get


def _source(config, name, stack, dtype, mixed):
    """Return what a parameter is read from: of the layers of a stack, or around them."""
    each = [None] if stack is None else stack.layers
    tensors = [checkpoint.tensor_names(config, i)[name] for i in each]
    count, config = len(tensors[0]), config if stack is None else config.view(stack)

    def transform(*found):
        if any(isinstance(one, qn.QArray) for one in found):
            if checkpoint.is_whole(config, name) and found[0].ndim > 2:  # [experts, out, in]
                found = [_folded(one.swapaxes(-1, -2)) for one in found]
            else:
                found = [_by_rows(_folded(one)) for one in found]
            joined = _joined(config, name, found, count, stack)
            if joined is not None:
                return joined
            mixed.append(name)
            found = [_numbers(one) for one in found]
        parts = [
            np.asarray(checkpoint.join(config, name, found[i : i + count]), np.float32)
            for i in range(0, len(found), count)
        ]
        return (parts[0] if stack is None else np.stack(parts)).astype(jnp.dtype(dtype))

    return xla.Source(*(one for names in tensors for one in names), transform=transform)


def _joined(config, name, tensors, count, stack):
    """Return a parameter of QArrays; None where they have several formats."""
    if not all(isinstance(one, qn.QArray) for one in tensors):
        return None
    if len({(q.qtype, q.zero_point is None, _tile(q)) for q in tensors}) > 1:
        return None
    try:
        is_whole = checkpoint.is_whole(config, name)
        tensors = tensors if is_whole else [one.swapaxes(-1, -2) for one in tensors]
        is_one = is_whole or checkpoint.is_turned(config, name)
        experts = config.experts if name in ("gate_up", "down") and not is_one else 0
        per = count // (experts or 1)
        whole = [qn.concatenate(tensors[i : i + per], -1) for i in range(0, len(tensors), per)]
        if experts:
            whole = [qn.concatenate([one[None] for one in whole[i : i + experts]], 0)
                     for i in range(0, len(whole), experts)]  # fmt: skip
        return whole[0] if stack is None else qn.concatenate([one[None] for one in whole], 0)
    except ValueError:  # scales that can't be put side by side
        return None


def _tile(q):
    """Return how many numbers of a row share a scale."""
    return q.shape[-1] // q.scale.shape[-1]


def _folded(q):
    """Return nvfp4, whose tensors each have a scale of their scales, with scales in float32."""
    if not isinstance(q, qn.QArray) or q.global_scale is None:
        return q
    scale = q.scale.astype(jnp.float32) * q.global_scale
    return qn.qarray(q.qvalue, scale, "float4_e2m1fn", q.dtype)


def _by_rows(q):
    """Return a weight in blocks of several rows with a scale for each row, which is the same.

    Rows of several tensors then lie side by side, wherever their blocks end.
    """
    if not isinstance(q, qn.QArray) or q.scale.shape[-2] == q.shape[-2]:
        return q
    tiles = dict(q.ragged_tiles)
    rows = tiles.get(-2, q.shape[-2] // q.scale.shape[-2])
    along = {axis: size for axis, size in tiles.items() if axis == -1}

    def repeated(array):
        return jnp.repeat(array, rows, -2)[..., : q.shape[-2], :]

    return dataclasses.replace(
        q,
        scale=repeated(q.scale),
        zero_point=None if q.zero_point is None else repeated(q.zero_point),
        ragged_tiles=tuple(along.items()),
    )


def _numbers(tensor):
    """Return a tensor's numbers, float32 in NumPy."""
    # Not rounded to the dtype that it stands for.
    tensor = qn.dequantize(tensor.astype("float32")) if isinstance(tensor, qn.QArray) else tensor
    return np.asarray(tensor, np.float32)


def _act_qtype(about):
    """Return what activations are quantized to row by row: int8, or None for floats."""
    groups = about.get("config_groups") or {}
    found = [group.get("input_activations") or {} for group in groups.values()]
    kinds = {(one.get("type", "int"), one.get("num_bits")) for one in found}
    return "int8" if kinds == {("int", 8)} else None


def _check_names(folder, config, files):
    """Check that tensors which no parameter is made of say nothing.

    Raises:
        LlmError: one is of an unknown module, or a bias that is not zero.
    """
    from safetensors import safe_open

    wanted = set()
    for layer in (None, *range(config.layers)):
        wanted = wanted.union(*checkpoint.tensor_names(config, layer).values())
    wanted |= checkpoint.unread(config)
    modules = {re.sub(r"\.(weight|bias)$", "", name) for name in wanted}
    if config.tied:
        modules |= {"lm_head", "language_model.lm_head"}
    for file in files:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                if re.sub("_(blocks|scales)$", "", name) in wanted or IGNORED.fullmatch(name):
                    continue
                module, _, _ = name.rpartition(".")
                while module and module not in modules:
                    module, _, _ = module.rpartition(".")
                if name == f"{module}.bias" and opened.get_tensor(name).any():
                    raise LlmError(
                        f"{name} of {folder} must be zeros, or not there: {config.family} has no "
                        "such bias."
                    )
                if not module and not checkpoint.is_unused(config, name):
                    raise LlmError(
                        f"{name} of {folder} is unknown. config.json says {config.family} with "
                        f"{config.layers} layers."
                    )

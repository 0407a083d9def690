"""A file of llama.cpp as a model: what ``gguf`` writes, and what others wrote, read.

The file is taken for a folder: it has a ``config.json``, a ``tokenizer.json`` and parameters. Its
quantized numbers stay as they are stored.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import provider_xla as xla
import quant_numerics as qn

from . import checkpoint, gguf_families, gguf_fields, gguf_layout, gguf_texts
from .config import Config, LlmError
from .fields import parse_config
from .rules import rules_for

_UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config is made of, or that are computed."""
_FLOAT = "float"
_INTEGERS = ("int2", "int3", "int4", "int5", "int6", "int8")


@dataclasses.dataclass(frozen=True)
class Model:
    """A file whose tensors have the names and shapes of a config's.

    Attributes:
        file: with its tensors.
        config: of the model.
    """

    file: xla.GgufFile
    config: Config


def opened_model(path: Any) -> Model:
    """Return what a file has, checked.

    Raises:
        LlmError, provider_xla.StoreError: the file is damaged, or says what can't be honoured.
    """
    said = gguf_texts.said(path)
    config = parse_config(said.fields, path)
    start = f"{said.keys.architecture}."
    written = gguf_layout.architecture_keys(config, said.fields)
    written = {key.removeprefix(start): value for key, value in written.items()}
    gguf_fields.check(said.keys, config, written)
    _check_tensors(config, said.file)
    count = len(said.tokens.texts)
    if count > config.vocabulary:
        raise LlmError(
            f"{path}: tokenizer.ggml.tokens must be the {config.vocabulary} rows of "
            f"token_embd.weight at most, got {count}."
        )
    return Model(said.file, config)


def tensor_names(config: Config, layer: int | None) -> dict[str, list[str]]:
    """Return the names of the tensors of each parameter of a layer, or around the layers."""
    at, one = ("", config) if layer is None else (f"blk.{layer}.", config.view(layer))
    names = checkpoint.tensor_names(config, layer)
    return {name: [f"{at}{part}" for part in gguf_families.names_of(one, name)] for name in names}


def _shapes_of(config: Config, layer: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a layer, or around the layers, by name."""
    one = config if layer is None else config.view(layer)
    if layer is None:
        around = checkpoint.shapes(config)
        wanted = {name: around[name].shape for name in checkpoint.tensor_names(config)}
    else:
        wanted = checkpoint.layer_shapes(one)
    found = {}
    for name, names in tensor_names(config, layer).items():
        shape = wanted[name]
        if name == "delta_conv":
            shape = shape[2], shape[0]
        for part, width in zip(names, gguf_families.columns(one, name, shape[-1]), strict=True):
            if name == "shared_router":
                found[part] = shape[:1]
            elif len(shape) > 1 and gguf_layout.is_turned(name):
                found[part] = (*shape[:-2], width, shape[-2])
            else:
                found[part] = (*shape[:-1], width)
    return found


def _check_tensors(config: Config, file: xla.GgufFile) -> None:
    """Check that a file has the tensors of a config, and no others.

    Raises:
        LlmError: names what is missing, unknown or of another shape.
    """
    if config.layers > len(file.shapes):
        raise LlmError(f"{file.path} must have {config.layers} layers, got fewer tensors.")
    wanted: dict[str, tuple[int, ...]] = {}
    for layer in (None, *range(config.layers)):
        wanted |= _shapes_of(config, layer)
    unknown = file.shapes.keys() - wanted.keys() - set(_UNREAD)
    lacking = wanted.keys() - file.shapes.keys()
    wrong = {"lacks tensors:": lacking, "has unknown tensors:": unknown}
    checkpoint.check_names(config, str(file.path), wrong, "It")
    for name, shape in wanted.items():
        if file.shapes[name] != shape:
            raise LlmError(
                f"{name} of {file.path} must be {list(shape)}, as its metadata says, got "
                f"{list(file.shapes[name])}."
            )


def is_float(path: Any) -> bool:
    """Return whether a file has a float model."""
    file = opened_model(path).file
    return not any(map(file.is_quantized, file.shapes))


def opened(path: Any) -> tuple[Config, checkpoint.Get]:
    """Return the config of a file, and what returns a parameter: see ``checkpoint.Get``."""
    model = opened_model(path)

    def get(name: str, layer: int | None) -> np.ndarray:
        return _floats_of(_parameter(model, name, layer))

    return model.config, get


def read(path: Any, dtype: str = "float32") -> tuple[Config, list[Any], Any]:
    """Return the config, the rules and the stored parameters of a file.

    Quantized numbers stay what they are. A parameter here is made of the tensors of all layers, and
    of queries, keys and values; where these have several types, it becomes int6 or int8 with the
    scales of the smallest tiles, which has all their numbers, and a warning names it. It is float
    where one of them is.

    Args:
        path: of the file.
        dtype: of parameters that are not quantized, and that quantized ones stand for.

    Raises:
        LlmError, provider_xla.StoreError: the file is damaged, or says what can't be honoured.
    """
    model = opened_model(path)
    config, changed = model.config, {"float": [], "int6 or int8": []}
    params: dict[str, Any] = {
        name: _stored(_parameter(model, name, None), dtype)
        for name in checkpoint.tensor_names(config)
    }
    for stack in config.stacks:
        params[stack.name] = {}
        for name in checkpoint.tensor_names(config, stack.layers[0]):
            each = _alike([_parameter(model, name, layer) for layer in stack.layers])
            whole = _joined([one.each(lambda x: x[None]) for one in each], 0)
            params[stack.name][name] = _stored(whole, dtype)
            kinds = _types_of(model, name, stack.layers)
            if kinds != {_FLOAT} and (len(kinds) > 1 or whole.qtype is None):
                form = "float" if whole.qtype is None else "int6 or int8"
                changed[form].append(f"{stack.name}.{name}")
    for form, names in changed.items():
        if names:
            warnings.warn(
                f"{', '.join(names)} of {path} are {form} in all layers: each is made of tensors "
                "of several types. Their numbers are the file's.",
                xla.QuantizationWarning,
                stacklevel=2,
            )
    model.file.warn_of_tables(model.file.shapes)
    return config, [*rules_for(config, None), *_rules(config, params)], params


def _rules(config: Config, params: Any) -> list[Any]:
    """Return the rules of stored parameters: tables are looked up, and one may be the head."""
    tables = {"['embed']", "['input_embed']"}
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: hasattr(x, "qtype"))
    paths = {jax.tree_util.keystr(path) for path, _ in leaves}
    multiplied = paths - tables | ({"['embed']"} if config.tied else set())
    found = []
    for rule in xla.rules_of(params):
        if any(rule.matches_weight([path]) for path in tables & paths):
            found.append(dataclasses.replace(rule, op_names=["take"]))
        if any(rule.matches_weight([path]) for path in multiplied):
            found.append(rule)
    return found


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """A tensor, or a parameter, of a file: floats, or quantized numbers with scales.

    Attributes:
        arrays: floats alone; or values, scales, and minima for types that have them. Scales have
            the axes of values, one of them with a number for each tile.
        qtype: of the values; None for floats.
        shift: what is added to each value, of types with minima; None for others.
    """

    arrays: tuple[np.ndarray, ...]
    qtype: str | None = None
    shift: int | None = None

    def each(self, change: Any) -> _Numbers:
        """Return it with its arrays changed."""
        return dataclasses.replace(self, arrays=tuple(map(change, self.arrays)))

    @property
    def axis(self) -> int:
        """The axis that tiles lie along, counted from the last."""
        pairs = zip(self.arrays[0].shape, self.arrays[-1].shape, strict=True)
        return next((i - self.arrays[0].ndim for i, (n, m) in enumerate(pairs) if n != m), -1)

    @property
    def tiles(self) -> int:
        """How many tiles there are along that axis."""
        return self.arrays[-1].shape[self.axis]

    @property
    def tile(self) -> int:
        """How many numbers share a scale; 1 for floats."""
        return self.arrays[0].shape[self.axis] // self.tiles

    @property
    def form(self) -> tuple[Any, ...]:
        """What tensors must have in common to be one parameter."""
        scale = None if self.qtype is None else self.arrays[1].dtype
        return self.qtype, self.shift, self.tile, scale


def _tensor(model: Model, name: str) -> _Numbers:
    """Return a tensor as it is stored, ``[..., out, in]``."""
    found, shift, minima = model.file.read(name), None, ()
    if isinstance(found, xla.AffineWeight):
        shift, minima, found = found.shift, (np.asarray(found.minimum),), found.inner
    if not isinstance(found, qn.QArray):
        return _Numbers((np.asarray(found, np.float32),))
    scale, qtype = np.asarray(found.scale), found.qtype
    if found.global_scale is not None:
        # nvfp4's second scale is 1 here, and float32 has all of the first.
        scale, qtype = scale.astype(np.float32), "float4_e2m1fn"
    return _Numbers((np.asarray(found.qvalue), scale, *minima), qtype, shift)


def _types_of(model: Model, name: str, layers: Sequence[int]) -> set[str]:
    """Return the types of a parameter's tensors in some layers; those of floats are one."""
    file = model.file
    names = [one for layer in layers for one in tensor_names(model.config, layer)[name]]
    return {file.types[one] if file.is_quantized(one) else _FLOAT for one in names}


def _parameter(model: Model, name: str, layer: int | None) -> _Numbers:
    """Return a parameter of a layer, or around them, in the layout that ``model`` takes."""
    config = model.config if layer is None else model.config.view(layer)
    tensors = []
    for full in tensor_names(model.config, layer)[name]:
        part = full if layer is None else full.removeprefix(f"blk.{layer}.")
        one = _tensor(model, full)
        if gguf_layout.has_neighbours(config, part):
            size = config.head_size
            axis = max(one.arrays[0].ndim - 2, 0)
            order = np.arange(one.arrays[0].shape[axis]).reshape(-1, size // 2, 2)
            order = order.swapaxes(1, 2).ravel()
            one = one.each(lambda x, axis=axis, order=order: x.take(order, axis))
        if gguf_layout.is_turned(name) and one.arrays[0].ndim > 1:
            one = one.each(lambda x: x.swapaxes(-1, -2))
        tensors.append(one.each(lambda x: x[:, None]) if name == "shared_router" else one)
    whole = _joined(_alike(tensors), -1)
    if gguf_families.takes_turns(config, name):
        half = whole.arrays[0].shape[-1] // 2
        turns = np.arange(2 * half).reshape(2, half).T.ravel()
        whole = whole.each(lambda x: x.take(turns, -1))
    return _in_order(config, name, whole)


def _in_order(config: Config, name: str, whole: _Numbers) -> _Numbers:
    """Return a parameter with the heads of values as folders have them: ``reordered``, back."""
    columns = gguf_families.column_order(config, name, whole.arrays[0].shape[-1])
    rows = gguf_families.row_order(config, name)
    if columns is not None:
        back = np.argsort(columns)
        whole = whole.each(lambda x: x.take(back, -1))
    if rows is not None:
        back = np.argsort(rows)
        if config.delta is not None and config.delta.value_size % whole.tile:
            whole = _Numbers((_floats_of(whole),))
        tile = whole.tile
        # Heads move as a whole, and tiles with them.
        whole = whole.each(
            lambda x: x.take(back if len(back) == x.shape[-2] else back[::tile] // tile, -2)
        )
    if name == "delta_conv":
        whole = whole.each(lambda x: x.T[:, None])
    if name == "delta_decay":
        whole = whole.each(lambda x: np.log(-x))
    return whole


def _joined(tensors: Sequence[_Numbers], axis: int) -> _Numbers:
    """Return tensors of one form side by side."""
    if len(tensors) == 1:
        return tensors[0]
    arrays = zip(*(one.arrays for one in tensors), strict=True)
    return dataclasses.replace(
        tensors[0], arrays=tuple(np.concatenate(each, axis) for each in arrays)
    )


def _alike(tensors: Sequence[_Numbers]) -> list[_Numbers]:
    """Return tensors in one form: their own, or integers that have all of their numbers."""
    if len({one.form for one in tensors}) == 1:
        return list(tensors)
    if any(one.qtype is None for one in tensors):
        return [_Numbers((_floats_of(one),)) for one in tensors]
    wide = list(map(_as_integers, tensors))
    count = max(one.tiles for one in wide)
    values = [one.arrays[0] for one in wide]
    is_6 = all(x.min(initial=0) >= -32 and x.max(initial=0) < 32 for x in values)
    qtype = "int6" if is_6 else "int8"
    storage = qn.get_qtype(qtype).storage_dtype
    shift = 0 if any(one.shift is not None for one in wide) else None
    found = []
    for one in wide:
        scale, *minima = (np.repeat(x, count // one.tiles, one.axis) for x in one.arrays[1:])
        if shift is not None and not minima:
            minima = [np.zeros_like(scale)]
        found.append(_Numbers((one.arrays[0].astype(storage), scale, *minima), qtype, shift))
    return found


def _values(one: _Numbers) -> np.ndarray:
    """Return what quantized numbers stand for but for scales and minima, float32."""
    assert one.qtype is not None
    about = qn.get_qtype(one.qtype)
    codes = one.arrays[0]
    if about.codebook is not None:
        return np.asarray(about.codebook, np.float32)[codes.astype(np.int64)]
    return codes.astype(np.float32) + np.float32(one.shift or 0)


def _as_integers(one: _Numbers) -> _Numbers:
    """Return quantized numbers as int8, with scales in float32: the same numbers.

    Tables of llama.cpp have integers, and floats of 4 bits halves.
    """
    values, scale = _values(one), one.arrays[1].astype(np.float32)
    if one.qtype not in _INTEGERS and (values % 1).any():
        values, scale = values * 2, scale / 2
    assert not (values % 1).any(), one.qtype
    minima = [x.astype(np.float32) for x in one.arrays[2:]]
    shift = None if one.shift is None else 0
    return _Numbers((values.astype(np.int8), scale, *minima), "int8", shift)


def _floats_of(one: _Numbers) -> np.ndarray:
    """Return the numbers of a tensor, float32."""
    if one.qtype is None:
        return one.arrays[0]
    scale, *minima = (np.repeat(x.astype(np.float32), one.tile, one.axis) for x in one.arrays[1:])
    found = _values(one) * scale
    return found + minima[0] if minima else found


def _stored(one: _Numbers, dtype: Any) -> Any:
    """Return a parameter as plans store it."""
    if one.qtype is None:
        return jnp.asarray(one.arrays[0], dtype)
    about = qn.get_qtype(one.qtype)
    values, scale, *minima = map(jnp.asarray, one.arrays)
    q = qn.qarray(values, scale, one.qtype, dtype)
    held = q if one.shift is None else xla.AffineWeight(q, minima[0], one.shift)
    return held.with_values(qn.pack) if about.packable else held

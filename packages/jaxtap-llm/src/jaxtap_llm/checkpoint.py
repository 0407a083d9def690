"""Parameters under the names and in the layout of Hugging Face's folders."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from provider_xla import Source

from .config import Config, LlmError
from .fields import NESTED, read_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FORMAT = {"format": "pt"}
"""Metadata of a safetensors file that transformers asks for."""
UNUSED = ("rotary_emb.inv_freq",)
"""Ends of names of tensors that are computed, and nevertheless in some files."""
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""What names of the decoder's tensors begin with: the others, in folders with an encoder."""
BESIDE = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio)\.|mtp\."
)
"""Begins the names of encoders of images and sounds, and of drafts of further tokens."""
BESIDE_OF = frozenset(NESTED.values())
Get = Callable[[str, int | None], np.ndarray]
"""Returns a parameter by its name, float32: of a layer, or around the layers for None."""


def shapes(config: Config, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Return the tree of parameters that ``model`` takes, of ``jax.ShapeDtypeStruct``."""
    width = config.width
    tree: dict = {"embed": (config.vocabulary, width), "norm": (width,)}
    if config.layer_input:
        inputs = config.layers * config.layer_input
        tree["input_embed"] = (config.layer_vocabulary, inputs)
        tree["input_project"] = (width, inputs)
        tree["input_norm"] = (config.layer_input,)
    if not config.tied:
        tree["head"] = (width, config.vocabulary)
    for stack in config.stacks:
        found = layer_shapes(config.view(stack))
        tree[stack.name] = {name: (len(stack.layers), *shape) for name, shape in found.items()}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), tree, is_leaf=is_shape)


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a layer; ``config`` is a view of it."""
    width, inner, some = config.width, config.inner, (config.experts,) if config.experts else ()
    layer: dict[str, tuple[int, ...]] = {"attention_norm": (width,), "mlp_norm": (width,)}
    if config.mixer == "delta":
        d = config.delta
        assert d is not None
        values = d.values * d.value_size
        layer |= {"delta_in": (width, d.width + values), "delta_gates": (width, 2 * d.values)}
        layer |= {"delta_conv": (d.width, 1, d.taps), "delta_norm": (d.value_size,)}
        layer |= {"delta_bias": (d.values,), "delta_decay": (d.values,), "out": (values, width)}
    else:
        size = config.head_size
        layer |= {
            "qkv": (width, sum(config.projected_heads) * size),
            "out": (config.heads * size, width),
        }
        if config.head_norms:
            layer |= {f"{one}_norm": (size,) for one in ("qk" if config.keeps else "q")}
    layer |= {"gate_up": (*some, width, 2 * inner), "down": (*some, inner, width)}
    layer |= {f"{name}_bias": layer[name][1:] for name in config.biased}
    if config.sinks:
        layer["sinks"] = (config.heads,)
    if config.limit:
        layer |= {f"{name}_bias": (*some, layer[name][-1]) for name in ("gate_up", "down")}
        layer["router_bias"] = some
    if config.gemma:
        layer |= {"attention_post_norm": (width,), "mlp_post_norm": (width,)}
    if config.experts:
        layer["router"] = (width, config.experts)
    if config.shared_inner:
        shared = config.shared_inner
        layer |= {"shared_gate_up": (width, 2 * shared), "shared_down": (shared, width)}
    if config.gated_shared:
        layer["shared_router"] = (width, 1)
    if config.parallel:
        norms = ("shared_post_norm", "experts_norm", "experts_post_norm", "router_scale")
        layer |= dict.fromkeys(norms, (width,)) | {"expert_scale": (config.experts,)}
    if config.layer_input:
        each = config.layer_input
        layer |= {"input_gate": (width, each), "input_out": (each, width)}
        layer["input_post_norm"] = (width,)
    if config.layer_scales:
        layer["layer_scale"] = (1,)
    return layer


def init(config: Config, seed: int = 0) -> Any:
    """Return random parameters, float32 in NumPy, as a model has them before training."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        if name.endswith(("norm", "scale")):
            return np.ones(leaf.shape, np.float32)
        if name.endswith(("bias", "sinks", "decay")):
            return np.zeros(leaf.shape, np.float32)
        scale = 0.02 if name.endswith("embed") else leaf.shape[-2] ** -0.5
        return rng.standard_normal(leaf.shape, np.float32) * np.float32(scale)

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


def tensor_names(config: Config, layer: int | None = None) -> dict[str, list[str]]:
    """Return the names of the tensors of each parameter, by its name in one layer or around them.

    Those of one parameter are put one after the other along its last axis, experts aside.
    """
    if layer is None:
        names = {"embed": "embed_tokens", "norm": "norm"}
        if config.layer_input:
            names["input_embed"] = "embed_tokens_per_layer"
            names["input_project"] = "per_layer_model_projection"
            names["input_norm"] = "per_layer_projection_norm"
        ends = {name: [f"{config.prefix}{tensor}.weight"] for name, tensor in names.items()}
        # An image encoder is beside the decoder with its head, or beside the decoder alone.
        around = "language_model." if config.prefix == "language_model.model." else ""
        return ends if config.tied else ends | {"head": [f"{around}lm_head.weight"]}
    at, config = f"{config.prefix}layers.{layer}.", config.view(layer)
    after = {"mlp_norm": "post_attention_layernorm"}
    if config.gemma:
        after = {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    if config.parallel:
        after["shared_post_norm"] = "post_feedforward_layernorm_1"
        after["experts_norm"] = "pre_feedforward_layernorm_2"
        after["experts_post_norm"] = "post_feedforward_layernorm_2"
    if config.layer_input:
        after["input_gate"] = "per_layer_input_gate"
        after["input_out"] = "per_layer_projection"
        after["input_post_norm"] = "post_per_layer_input_norm"
    names = {"attention_norm": [f"{at}input_layernorm.weight"]}
    names |= _delta_names(at) if config.mixer == "delta" else _attention_names(config, at)
    names |= {name: [f"{at}{norm}.weight"] for name, norm in after.items()}
    if config.layer_scales:
        names["layer_scale"] = [f"{at}layer_scalar"]
    return names | _mlp_names(config, at)


def _delta_names(at: str) -> dict[str, list[str]]:
    """Return those of a layer with a gated delta rule."""
    at = f"{at}linear_attn."
    return {
        "delta_in": [f"{at}in_proj_qkv.weight", f"{at}in_proj_z.weight"],
        "delta_gates": [f"{at}in_proj_b.weight", f"{at}in_proj_a.weight"],
        "delta_conv": [f"{at}conv1d.weight"],
        "delta_norm": [f"{at}norm.weight"],
        "delta_bias": [f"{at}dt_bias"],
        "delta_decay": [f"{at}A_log"],
        "out": [f"{at}out_proj.weight"],
    }


def _attention_names(config: Config, at: str) -> dict[str, list[str]]:
    """Return those of a layer's attention."""
    at = f"{at}self_attn."
    projections = [f"{at}{one}_proj" for one in "qkv"[: len(config.projected_heads)]]
    if config.family == "phi3":
        projections = [f"{at}qkv_proj"]
    names = {"qkv": [f"{one}.weight" for one in projections], "out": [f"{at}o_proj.weight"]}
    if "qkv" in config.biased:
        names["qkv_bias"] = [f"{one}.bias" for one in projections]
    if "out" in config.biased:
        names["out_bias"] = [f"{at}o_proj.bias"]
    if config.sinks:
        names["sinks"] = [f"{at}sinks"]
    if config.head_norms:
        kinds = "qk" if config.keeps else "q"
        names |= {f"{one}_norm": [f"{at}{one}_norm.weight"] for one in kinds}
    return names


def _mlp_names(config: Config, at: str) -> dict[str, list[str]]:
    """Return those of a layer's MLP, or of its experts."""
    mlp = f"{at}feed_forward." if config.family == "llama4_text" else f"{at}mlp."
    parts, names = ("gate_proj", "up_proj", "down_proj"), {}
    if config.family == "mixtral":
        mlp, parts = f"{at}block_sparse_moe.", ("w1", "w3", "w2")
    if config.experts:
        router = "router" if config.family in ("gpt_oss", "llama4_text") else "gate"
        names["router"] = [f"{mlp}{router}.weight"]
    if config.shared_inner:
        beside = mlp if config.parallel else f"{mlp}shared_expert."
        names["shared_gate_up"] = [f"{beside}{one}.weight" for one in parts[:2]]
        names["shared_down"] = [f"{beside}{parts[2]}.weight"]
    if config.gated_shared:
        names["shared_router"] = [f"{mlp}shared_expert_gate.weight"]
    if config.parallel:  # beside the MLP, not in it
        mlp = at
        names["router"] = [f"{at}router.proj.weight"]
        names["router_scale"] = [f"{at}router.scale"]
        names["expert_scale"] = [f"{at}router.per_expert_scale"]
    if config.family == "gpt_oss":
        names["router_bias"] = [f"{mlp}router.bias"]
        names["gate_up_bias"] = [f"{mlp}experts.gate_up_proj_bias"]
        names["down_bias"] = [f"{mlp}experts.down_proj_bias"]
    if config.experts and config.layout != "each":
        whole = {"gate_up": "gate_up_proj", "down": "down_proj"}
        return names | {name: [f"{mlp}experts.{tensor}"] for name, tensor in whole.items()}
    mlps = [f"{mlp}experts.{i}." for i in range(config.experts)] or [mlp]
    gates = ["gate_up_proj"] if config.family == "phi3" else parts[:2]
    names["gate_up"] = [f"{mlp}{one}.weight" for mlp in mlps for one in gates]
    names["down"] = [f"{mlp}{parts[2]}.weight" for mlp in mlps]
    return names


def is_whole(config: Config, name: str) -> bool:
    """Return whether a parameter is one tensor, as it is."""
    is_whole = config.experts and config.layout == "whole"
    of_experts = is_whole and name.startswith(("gate_up", "down"))
    return of_experts or name in ("embed", "input_embed", "sinks", "router_bias", "delta_conv")


def is_turned(config: Config, name: str) -> bool:
    """Return whether a parameter is one tensor of all experts, ``[experts, out, in]``."""
    return bool(config.experts) and config.layout == "turned" and name in ("gate_up", "down")


def join(config: Config, name: str, tensors: Any) -> Any:
    """Return a parameter of one layer, or around them, from its tensors.

    Args:
        config: of the layer, as ``config.view`` returns it.
        name: of the parameter.
        tensors: as ``tensor_names`` has them.
    """
    if is_whole(config, name):
        return tensors[0]
    if is_turned(config, name):
        return tensors[0].swapaxes(-1, -2)
    if _is_shifted(config, name):  # the files have what is added to 1
        return np.asarray(tensors[0], np.float32) + 1
    if tensors[0].ndim == 1:
        return tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
    if config.experts and name in ("gate_up", "down"):
        per = len(tensors) // config.experts
        each = [tensors[i : i + per] for i in range(0, len(tensors), per)]
        return np.stack([np.concatenate([t.T for t in one], axis=1) for one in each])
    return np.concatenate([t.T for t in tensors], axis=1)


def _is_shifted(config: Config, name: str) -> bool:
    return config.shifted and name.endswith("norm") and name != "delta_norm"


def split(config: Config, name: str, array: Any) -> list[Any]:
    """Return the tensors that ``join`` makes this parameter of; of a ``QArray`` as such."""
    if is_whole(config, name):
        return [array]
    if is_turned(config, name):
        return [array.swapaxes(-1, -2)]
    if name.endswith(("norm", "scale", "decay")):
        return [array - 1 if _is_shifted(config, name) else array]
    ends = [0, *itertools.accumulate(_columns(config, name, array.shape[-1]))]
    is_many = config.experts and name in ("gate_up", "down")
    each = [array[i] for i in range(config.experts)] if is_many else [array]
    return [one[..., start:end].T for one in each for start, end in itertools.pairwise(ends)]


def _columns(config: Config, name: str, width: int) -> list[int]:
    """Return how many columns of a parameter each of its tensors has."""
    if config.family == "phi3":
        return [width]
    if name.startswith("qkv"):
        return [n * config.head_size for n in config.projected_heads]
    if name == "delta_in":
        assert config.delta is not None
        return [config.delta.width, width - config.delta.width]
    halves = name in ("gate_up", "shared_gate_up", "delta_gates")
    return [width // 2] * 2 if halves else [width]


def tensor_shapes(config: Config, layer: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a layer, or around the layers, by name."""
    found = {}
    one = config if layer is None else config.view(layer)
    of_layer = {} if layer is None else layer_shapes(one)
    around = shapes(config) if layer is None else {}
    for name, names in tensor_names(config, layer).items():
        shape = around[name].shape if layer is None else of_layer[name]
        columns = _columns(one, name, shape[-1])
        if is_whole(one, name):
            each = [shape]
        elif is_turned(one, name):
            each = [(*shape[:-2], shape[-1], shape[-2])]
        else:
            each = [(n, *shape[-2:-1]) for n in columns]
        found |= zip(names, each * (len(names) // len(each)), strict=True)
    return found


def sources(config: Config, layer: int | None = None) -> dict[str, Source]:
    """Return what ``provider_xla.quantize_file`` reads the parameters of one layer from.

    With None those around the layers. A parameter of a layer has a first axis of size 1.
    """

    one = config if layer is None else config.view(layer)

    def source(name: str, names: list[str]) -> Any:
        def transform(*tensors: Any) -> Any:
            array = join(one, name, tensors)
            return array if layer is None else array[None]

        return Source(*names, transform=transform)

    prefix = "" if layer is None else f"{config.place(layer)[0].name}."
    names = tensor_names(config, layer)
    return {prefix + name: source(name, tensors) for name, tensors in names.items()}


def parameter(
    config: Config, params: Any, name: str, layer: int | None = None
) -> tuple[Config, Any]:
    """Return a parameter of a layer or around them in a tree, behind the config that it is of."""
    if layer is None:
        return config, params[name]
    stack, at = config.place(layer)
    return config.view(layer), params[stack.name][name][at]


def tensors_of(config: Config, params: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a tree of parameters, as a folder has them, by name."""
    found = {}
    for layer in (None, *range(config.layers)):
        for name, names in tensor_names(config, layer).items():
            one, array = parameter(config, params, name, layer)
            parts = map(np.ascontiguousarray, split(one, name, np.asarray(array)))
            found |= zip(names, parts, strict=True)
    return found


def find_files(folder: Any) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises:
        LlmError: there are none, or one that the index names is missing.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise LlmError(f"{folder} must have {SINGLE}, or {INDEX} and the files that it names.")
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise LlmError(f"{folder / INDEX} must have a weight_map from tensors to files.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise LlmError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names. Download again.")
    return [folder / name for name in names]


def names_in(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Return the names of the tensors of safetensors files, and their shapes.

    Raises:
        LlmError: a file can't be read.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                names = opened.keys()
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise LlmError(
                f"{file} must be a safetensors file: {error}. Download again."
            ) from error
    return found


def located(config: Config, files: list[Path]) -> Config:
    """Return the config with what files say of names: where the decoder is, and how experts are.

    Raises:
        LlmError: a file can't be read.
    """
    names = names_in(files)
    prefix = next(
        (one for one in PREFIXES if any(n.startswith(f"{one}layers.") for n in names)), ""
    )
    layout = config.layout
    if layout == "each" and any(name.endswith(".mlp.experts.gate_up_proj") for name in names):
        layout = "turned"
    return dataclasses.replace(config, prefix=prefix or config.prefix, layout=layout)


def unread(config: Config) -> set[str]:
    """Return the names of tensors that files have, and nothing reads.

    Gemma 4's layers that attend to another's keys have projections, too.
    """
    names = set()
    for i in range(config.layers):
        if config.source(i) != i and config.kinds[i].mixer == "attention":
            at = f"{config.prefix}layers.{i}.self_attn."
            names |= {f"{at}{one}.weight" for one in ("k_proj", "v_proj", "k_norm", "v_norm")}
    return names


def is_unused(config: Config, name: str) -> bool:
    """Return whether a tensor is nothing of the decoder: of images, sounds, or of drafts."""
    return name.endswith(UNUSED) or (bool(BESIDE.match(name)) and config.family in BESIDE_OF)


def check_tensors(config: Config, files: list[Path]) -> None:
    """Check that the files have the tensors of this config, and no others.

    Raises:
        LlmError: a file can't be read, or tensors are missing, unknown or of another shape. Names
            them.
    """
    found = names_in(files)
    wanted = {}
    for layer in (None, *range(config.layers)):
        wanted |= tensor_shapes(config, layer)
    allowed = {"lm_head.weight", "language_model.lm_head.weight"} if config.tied else set()
    allowed |= unread(config)
    unknown = {n for n in found.keys() - wanted.keys() - allowed if not is_unused(config, n)}
    where = f"The files of {files[0].parent}"
    wrong = {"lack": wanted.keys() - found.keys(), "have unknown tensors:": unknown}
    check_names(config, where, wrong, "config.json")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise LlmError(
                f"{name} must be {list(shape)}, got {list(found[name])}. config.json is another's."
            )


def check_names(config: Config, where: str, wrong: Mapping[str, Set[str]], which: str) -> None:
    """Raise LlmError if there are wrong names of tensors, by what is wrong with them.

    ``where`` is what has the tensors, and ``which`` what says the config.
    """
    for what, names in wrong.items():
        if names:
            first, more = sorted(names)[:4], f" and {len(names) - 4} more" * (len(names) > 4)
            raise LlmError(
                f"{where} {what} {', '.join(first)}{more}. {which} says {config.family} with "
                f"{config.layers} layers."
            )


def opened(folder: Any) -> tuple[Config, Get]:
    """Return the config of a float folder, and what returns a parameter: see ``Get``."""
    from safetensors import safe_open

    config, files = read_config(folder), find_files(folder)
    config = located(config, files)
    check_tensors(config, files)
    opened = [safe_open(file, framework="np") for file in files]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def get(name: str, layer: int | None) -> Any:
        names = tensor_names(config, layer)[name]
        one = config if layer is None else config.view(layer)
        return np.asarray(join(one, name, [where[n].get_tensor(n) for n in names]), np.float32)

    return config, get


def read(folder: Any) -> tuple[Config, Any]:
    """Return the config and the float parameters of a folder, float32 in NumPy."""
    config, get = opened(folder)
    return config, gathered(config, get)


def gathered(config: Config, get: Get) -> dict[str, Any]:
    """Return the tree of parameters that are got one by one; ``get`` is a ``Get``."""
    params: dict = {name: get(name, None) for name in tensor_names(config)}
    for stack in config.stacks:
        params[stack.name] = {
            name: np.stack([get(name, i) for i in stack.layers])
            for name in tensor_names(config, stack.layers[0])
        }
    return params


def write(folder: Any, fields: Any, config: Config, params: Any, shards: int | None = 1) -> None:
    """Write a folder as Hugging Face's are, of a tree of parameters: see ``write_each``."""

    def get(name: str, layer: int | None) -> Any:
        return np.asarray(parameter(config, params, name, layer)[1])

    write_each(folder, fields, config, get, np.asarray(params["norm"]).dtype, shards)


def write_each(
    folder: Any, fields: Any, config: Config, get: Get, dtype: Any, shards: int | None = None
) -> None:
    """Write a folder as Hugging Face's are: config.json, and the tensors in one or more files.

    Parameters are got, split and written one after the other: the largest is in memory, no more.

    Args:
        folder: that is made, or is empty.
        fields: of config.json.
        config: of the model.
        get: what returns a parameter: see ``Get``.
        dtype: of all tensors.
        shards: how many files there are, at most; None for files of 5 GB.
    """
    folder, dtype = Path(folder), jnp.dtype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    each, size = [], 0  # parameters with the shapes of their tensors, behind where they begin
    for layer in (None, *range(config.layers)):
        shapes_of = tensor_shapes(config, layer)
        for name, names in tensor_names(config, layer).items():
            found = {tensor: shapes_of[tensor] for tensor in names}
            each.append((size, (name, layer, found)))
            size += sum(math.prod(shape) for shape in found.values()) * dtype.itemsize
    shards = -(-size // SHARD) if shards is None else shards
    groups = itertools.groupby(each, key=lambda one: one[0] * shards // size)
    parts = [[part for _, part in group] for _, group in groups]
    count = len(parts)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    files = files if count > 1 else [SINGLE]
    for file, some in zip(files, parts, strict=True):
        _write_file(folder / file, config, get, dtype, some)
    if count > 1:
        mapping = {tensor: file for file, some in zip(files, parts, strict=True)
                   for _, _, found in some for tensor in found}  # fmt: skip
        (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))


def _write_file(path: Any, config: Config, get: Get, dtype: Any, parts: Any) -> None:
    """Write one file: safetensors' own writer would have all its tensors in memory."""
    header: dict[str, Any] = {"__metadata__": FORMAT}
    end = 0
    for _, _, found in parts:
        for tensor, shape in found.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[tensor] = {"dtype": DTYPES[dtype.name], "shape": shape,
                              "data_offsets": [start, end]}  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, layer, found in parts:
            one = config if layer is None else config.view(layer)
            tensors = split(one, name, get(name, layer))
            for shape, tensor in zip(found.values(), tensors, strict=True):
                assert tuple(tensor.shape) == tuple(shape), (name, tensor.shape, shape)
                array = np.ascontiguousarray(tensor, dtype)
                file.write(array.reshape(-1).view(np.uint8).data)


SHARD = 5 * 10**9
"""Bytes of a file, if a model needs several."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What a safetensors file calls them."""

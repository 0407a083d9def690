"""Perplexity by bits per weight, beside llama.cpp's mixes of k-quants with an importance matrix.

uv run python -m benchmarks.language_models.bits --library llama.cpp/bin/libllama.so \
    --model FOLDER

``FOLDER`` is what ``jaxtap llm demo --save FOLDER`` wrote. Both sides see the same text of its
corpus to calibrate on, and the same bytes of files that it was not trained on. With ``--own-text``
the folder is any float one, and both texts are drawn from the model's own distribution, with
different seeds: no text is needed, and none fits better.

llama.cpp quantizes with its own function (``llama_model_quantize``, what ``llama-quantize`` calls),
its mix of formats and an importance matrix, and its weights are dequantized by the library gguf.
All perplexities are computed by one program in float32, the second half of each window, so that
nothing but the weights differs. Bytes are those of all tensors.

Perplexities of one text differ by chance as much as those of good formats do. So their difference
from float's has the standard error of its mean over tokens, and beside it stands the mean
divergence from the float model's distributions, which is certain to some percent.
"""

import argparse
import ctypes
import functools
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, dequantize
from jax import lax

import provider_xla as xla
from jaxtap_llm import calibrated, checkpoint, demo, gguf, model
from jaxtap_llm.rules import FORMATS, rules_for
from jaxtap_llm.vocabulary import of_bytes

WINDOW, AT_ONCE = 128, 16
BEGIN = 1
"""Llama's token of a beginning, from which a model writes."""
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
    for name, places in gguf.tensors(config, _getter(_tree(numbers))):
        flat[np.asarray(places).reshape(-1)] = tensors[name].reshape(-1)
    found = {name: jnp.asarray(flat[places]) for name, places in numbers.items()}
    return _tree(found), sum(one.n_bytes for one in reader.tensors)


def _getter(params):
    """Return what returns a parameter of a tree by its name, of a layer or around them."""
    return lambda name, layer: params[name] if layer is None else params["layers"][name][layer]


def _flat(params):
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    return rest | {f"layers.{name}": leaf for name, leaf in params["layers"].items()}


def _tree(flat):
    tree = {"layers": {}}
    for name, leaf in flat.items():
        within = tree["layers"] if name.startswith("layers.") else tree
        within[name.removeprefix("layers.")] = leaf
    return tree


class Found(NamedTuple):
    """How far a model is from the float one on the second half of windows.

    Attributes:
        perplexity: of the tokens.
        more: its difference from the float model's, as a share.
        error: the standard error of that.
        divergence: of the distributions from the float model's, in nats a token.
    """

    perplexity: float
    more: float
    error: float
    divergence: float


class Test:
    """A text on which models are measured beside their float model."""

    def __init__(self, config, params, tokens):
        self._fn = functools.partial(model.logits, config)
        self._tokens = tokens
        self._exact = [np.asarray(run(params, part)) for run in [jax.jit(self._fn)]
                       for part in tokens]  # fmt: skip

    def measure(self, params, plan=None):
        """Return what is ``Found``."""
        run = jax.jit(self._fn if plan is None else plan.apply(self._fn))
        parts = [
            jax.tree.map(np.asarray, _compared(exact, run(params, part), part))
            for exact, part in zip(self._exact, self._tokens, strict=True)
        ]
        nats, more, divergence = (
            np.concatenate([part[i].ravel() for part in parts]).astype(np.float64) for i in range(3)
        )
        return Found(
            math.exp(nats.mean()),
            math.expm1(more.mean()),
            more.std() / math.sqrt(more.size),
            divergence.mean(),
        )


@jax.jit
def _compared(exact, actual, tokens):
    """Return nats of each token, how many more than the float model's, and divergences."""
    half = tokens.shape[1] // 2
    log_p, log_q = (jax.nn.log_softmax(x[:, half:-1]) for x in (exact, actual))
    expected, nats = (
        -jnp.take_along_axis(x, tokens[:, half + 1 :, None], axis=-1)[..., 0]
        for x in (log_p, log_q)
    )
    return nats, nats - expected, (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def own_text(config, params, count, seed):
    """Return windows that a model wrote, at temperature 1: int32 ``[count, WINDOW]``."""
    start = np.full((count, 1), BEGIN, np.int32)
    cache = model.make_cache(config, count, WINDOW)

    def step(carry, _):
        (cache, position), tokens, key = carry
        logits, cache = model.decode(config, params, tokens, cache, position)
        key, own = jax.random.split(key)
        tokens = jax.random.categorical(own, logits).astype(jnp.int32)
        return ((cache, position + 1), tokens, key), tokens

    first = ((cache, jnp.int32(0)), jnp.asarray(start[:, 0]), jax.random.key(seed))
    _, tokens = jax.jit(functools.partial(lax.scan, step, length=WINDOW - 1))(first, None)
    return np.concatenate([start, np.asarray(tokens).T], axis=1)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, help="libllama.so; None leaves llama.cpp out")
    parser.add_argument("--model", type=Path, required=True, help="a folder of demo --save")
    parser.add_argument("--own-text", action="store_true", help="that the model writes")
    parser.add_argument("--windows", type=int, default=2048, help="of 128 tokens")
    parser.add_argument("--theirs", nargs="*", default=[*THEIRS], choices=THEIRS)
    parser.add_argument("--bits", nargs="*", type=float, default=OURS)
    given = parser.parse_args()
    config, params = checkpoint.read(given.model)
    params = jax.tree.map(jnp.asarray, params)
    if given.own_text:
        tokens = own_text(config, params, given.windows, seed=1)
        batches = calibrated.batches_of(own_text(config, params, 256, seed=2).reshape(-1), WINDOW)
        about = {"tokenizer.ggml.model": "none"}
    else:
        corpus, held_out = demo.read_corpus()
        tokens = held_out[held_out < 128][: WINDOW * given.windows].astype(np.int32)
        batches = calibrated.batches_of(corpus[corpus < 128], WINDOW)
        about = of_bytes()
    test = Test(config, params, tokens.reshape(-1, AT_ONCE, WINDOW))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))

    print(
        "| format | perplexity | beside float | divergence | bits | MB |\n|---|---|---|---|---|---|"
    )

    def row(name, found, size):
        more = f"{100 * found.more:+.2f}% ± {100 * found.error:.2f}"
        print(
            f"| {name} | {found.perplexity:.4f} | {more} | {found.divergence:.5f} | "
            f"{8 * size / count:.2f} | {size / 1e6:.3f} |",
            flush=True,
        )

    row("float32", test.measure(params), 4 * count)
    if given.library:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "float.gguf", Path(folder) / "theirs.gguf"
            plain = jax.tree.map(np.asarray, params)
            about |= gguf.metadata(config, {"max_position_embeddings": 4096}, "f32")
            gguf.write(source, config, _getter(plain), about, "f32")
            matrix = importance(config, params, batches)
            for name in given.theirs:
                quantize_theirs(given.library, source, target, THEIRS[name], matrix)
                found, size = read_theirs(target, config, plain)
                row(f"llama.cpp {name}", test.measure(found), size)
                target.unlink()
    errors = None
    for bits in given.bits:
        start = time.process_time()
        rules = rules_for(config, FORMATS["int4"])
        plan, stored = calibrated.optimized(config, params, batches, rules, bits, errors)
        spent, errors = time.process_time() - start, plan.allocation.errors
        # As they are saved: kernels hold 3, 5 and 6 bits in 4 and 8.
        of_floats = 4 * count - sum(4 * one.elements for one in plan.allocation.weights)
        size = plan.allocation.bytes + of_floats
        row(f"`quantize --bits {bits}`", test.measure(stored, plan), size)
        print(plan.allocation, f"{spent:.0f} CPU seconds", sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()

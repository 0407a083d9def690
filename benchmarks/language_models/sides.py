"""What is timed: ours, XLA in float, llama.cpp and onnxruntime, each made in a process."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import llama_cpp_peer

from jaxtap_llm import checkpoint, model
from jaxtap_llm.bench import Timed
from jaxtap_llm.fields import parse_config
from jaxtap_llm.generate import Generator
from jaxtap_llm.rules import FORMATS, rules_for
from provider_xla import PtqProvider

from .llama_cpp import Native, Wheel
from .processes import Side, in_a_process
from .shapes import SHAPES

OURS = {kind: (kind, "float32") for kind in ("int8", "w8a8", "int4")}
OURS |= {f"{kind}, bfloat16": (kind, "bfloat16") for kind in ("int8", "int4")}
"""Format and dtype of the activations, by the name of the side."""

NAMES = (
    *("XLA float32", "XLA bfloat16", "llama.cpp Q8_0", "llama.cpp Q4_0"),
    *("llama.cpp native Q8_0", "llama.cpp native Q4_0", "onnxruntime int4", *OURS),
)
STEPS = 64
FEW_STEPS = 16
"""Of XLA in float, which decodes ten times slower, and of several sequences at once."""


class InJax:
    """A ``Generator`` with the sizes of a batch as arguments."""

    def __init__(self, config, params, plan, dtype):
        self.size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        self._generator = Generator(config, params, plan, dtype)
        self._timed = {}

    def _of(self, batch):
        return self._timed.setdefault(batch, Timed(self._generator, batch))

    def prefill(self, length, batch):
        return self._of(batch).prefill(length)

    def decode(self, context, steps, batch):
        return self._of(batch).decode(context, steps)


def in_jax(shape, name):
    """Return XLA's side, or ours."""
    config = parse_config(SHAPES[shape])
    params = checkpoint.init(config)
    kind, dtype = OURS.get(name, (None, name.removeprefix("XLA ")))
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    if kind is None:
        return InJax(config, params, None, jnp.dtype(dtype))
    fn, tokens = functools.partial(model.logits, config), jnp.zeros((1, 32), jnp.int32)
    plan = PtqProvider(rules_for(config, FORMATS[kind])).plan(fn, params, tokens)
    return InJax(config, plan.quantize(params), plan, jnp.dtype(dtype))


def wheel(shape, path):
    """Return llama.cpp's side from the wheel."""
    return Wheel(path, SHAPES[shape]["vocab_size"])


def in_onnxruntime(shape):
    """Return onnxruntime's side."""
    from onnxruntime_peer import OnnxDecoder

    config = parse_config(SHAPES[shape])
    return OnnxDecoder(config, checkpoint.init(config))


def write_gguf(shape, qtypes, folder):
    """Write the random parameters of a shape for llama.cpp."""
    config = parse_config(SHAPES[shape])
    params = checkpoint.init(config)
    for qtype in qtypes:
        llama_cpp_peer.write_gguf(gguf_path(folder, shape, qtype), config, params, qtype)


def gguf_path(folder, shape, qtype):
    """Return where ``write_gguf`` writes."""
    return Path(folder) / f"{shape}-{qtype}.gguf"


def open_sides(stack, shape, names, folder, tools, progress):
    """Return the sides of a shape, by name, which an ExitStack closes.

    Args:
        stack: of the caller.
        names: of ``NAMES``.
        folder: for files.
        tools: folder of llama.cpp's own tools; None leaves them out.
        progress: wraps what is iterated over.
    """
    names = [name for name in names if tools or "native" not in name]
    qtypes = {name.split()[-1] for name in names if name.startswith("llama.cpp")}
    if qtypes:
        in_a_process(write_gguf, shape, sorted(qtypes), folder)
    made = {}
    for name in progress(names):
        path = gguf_path(folder, shape, name.split()[-1])
        if "native" in name:
            made[name] = Native(tools, path)
        elif name.startswith("llama.cpp"):
            made[name] = Side(wheel, shape, path)
        elif name.startswith("onnxruntime"):
            made[name] = Side(in_onnxruntime, shape)
        else:
            made[name] = Side(in_jax, shape, name)
        stack.callback(made[name].close)
    return made

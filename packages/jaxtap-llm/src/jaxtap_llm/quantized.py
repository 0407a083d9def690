"""From a float folder to a quantized one, a layer at a time.

The model is never there as a whole: each part (one for each layer, and one for what is around them)
is read, quantized and written before the next one. A part's file appears when it is complete, so
that a run which was interrupted goes on where it was.
"""

import dataclasses
import functools
import json
import shutil
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

import provider_xla as xla

from . import checkpoint, model, published
from .config import LlmError, read_config
from .rules import FORMATS, read_rules
from .tokenizer import read_tokenizer

ENDS = "ends.safetensors"
SOURCE = "source.json"
COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def whole_plan(config, rules, dtype=jnp.float32):
    """Return the plan of the whole model, with parameters and activations of a dtype."""
    fn = functools.partial(model.logits, config)
    example = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    return xla.PtqProvider(rules).plan(fn, checkpoint.shapes(config, dtype), example)


def part_plans(config, rules):
    """Return the plan of what is around the layers, and that of one layer."""
    one = dataclasses.replace(config, windows=config.windows[:1], rope_of=config.rope_of[:1])
    shapes, provider = checkpoint.shapes(one), xla.PtqProvider(rules)

    def ends(params, tokens):
        return model.head(config, params, model.embed(config, params, tokens))

    def layer(params, x):
        return model.run_layers(one, params["layers"], x)[0]

    layers = {"layers": shapes.pop("layers")}
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    x = jax.ShapeDtypeStruct((1, 32, config.width), jnp.float32)
    with warnings.catch_warnings():
        # The plan of the whole model has said what there is to say; a part needs not all rules.
        warnings.simplefilter("ignore", xla.QuantizationWarning)
        return provider.plan(ends, shapes, tokens), provider.plan(layer, layers, x)


def quantize(folder, out, given):
    """Quantize a folder. What an interrupted run has written is not made again.

    Args:
        folder: config.json, safetensors files and tokenizer.json.
        out: a folder that is made.
        given: rules, as ``read_rules`` takes them.

    Returns:
        The plan of the whole model.

    Raises:
        LlmError: something in the folder or in a file of rules can't be used, before anything is
            written; or ``out`` is a file, or of another model or of other rules.
    """
    folder, out = Path(folder), Path(out)
    if out.exists() and not out.is_dir():
        raise LlmError(f"{out} must be a folder, got a file. Name another.")
    config = read_config(folder)
    files = checkpoint.find_files(folder)
    checkpoint.check_tensors(config, files)
    read_tokenizer(folder, config)
    rules = read_rules(config, given)
    is_own = given not in FORMATS  # the user's rules: what they name must be there
    with warnings.catch_warnings():
        if is_own:
            warnings.simplefilter("ignore", xla.QuantizationWarning)
        plan = whole_plan(config, rules)
    if is_own and plan.problems:
        raise LlmError(f"--rules {given} can't be followed: {'; '.join(plan.problems)}.")
    _begin(folder, out, files, rules)
    ends, layer = part_plans(config, rules)
    parts = [(ENDS, ends, None), *((_layer(i), layer, i) for i in range(config.layers))]
    for name, part, i in tqdm(parts, "quantizing", disable=not sys.stderr.isatty()):
        if not (out / name).exists():
            names = checkpoint.sources(config, i)
            xla.quantize_file(part, files, out / name, names=names)
    return plan


def _begin(folder, out, files, rules):
    """Make the folder, or check that it was begun with the same."""
    facts = {
        "files": {file.name: file.stat().st_size for file in files},
        "config": json.loads((folder / "config.json").read_text()),
        "rules": [repr(rule) for rule in rules],
    }
    if out.exists() and any(out.iterdir()):
        known = json.loads((out / SOURCE).read_text()) if (out / SOURCE).is_file() else None
        if known != facts:
            raise LlmError(
                f"{out} must be empty, or begun with the same model and rules. Remove it, or name "
                "another folder."
            )
    out.mkdir(parents=True, exist_ok=True)
    (out / SOURCE).write_text(json.dumps(facts, indent=1))
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copy(folder / name, out / name)


def load(out, dtype="float32"):
    """Return the config, the plan and the stored parameters of a quantized folder.

    Args:
        out: that ``quantize`` wrote, or that was published as it is.
        dtype: of the activations, and of parameters that are not quantized. Quantized values and
            their scales are the same for all.

    Raises:
        LlmError: it is not quantized, or not completely.
    """
    out = Path(out)
    if not (out / SOURCE).is_file():
        if published.is_published(out):
            return published.load(out, dtype)
        raise LlmError(f"{out} must be what the command quantize wrote. Run that first.")
    config = read_config(out)
    missing = [name for name in _parts(config) if not (out / name).is_file()]
    if missing:
        raise LlmError(f"{out} lacks {missing[0]}: quantize was interrupted. Run it again.")
    rules = xla.read_manifest(out / ENDS).rules()
    plan, (ends, layer) = whole_plan(config, rules, dtype), part_plans(config, rules)
    params = xla.load(out / ENDS, plan=ends, prepack=False)
    layers = [
        xla.load(out / _layer(i), plan=layer, prepack=False)["layers"] for i in range(config.layers)
    ]
    # Of values and scales alike: the first axis is that of the layers.
    params["layers"] = jax.tree.map(lambda *each: jnp.concatenate(each), *layers)
    params = jax.tree.map(lambda x: x.astype(dtype), params, is_leaf=lambda x: hasattr(x, "qtype"))
    return config, plan, plan.prepack(params)


def size_of(out):
    """Return the bytes of the files of a quantized folder."""
    return sum(path.stat().st_size for path in Path(out).glob("*.safetensors"))


def _parts(config):
    return [ENDS, *map(_layer, range(config.layers))]


def _layer(i):
    return f"layer-{i:05}.safetensors"

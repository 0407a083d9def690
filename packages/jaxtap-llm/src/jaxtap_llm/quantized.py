"""From a float folder to a quantized one, a layer at a time.

The model is never there as a whole: each part (one for each layer, and one for what is around them)
is read, quantized and written before the next one. A part's file appears when it is complete, so
that a run which was interrupted goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import provider_xla as xla
from provider_xla.file_formats import atomic_write

from . import beside, checkpoint, gguf_source, model
from .config import Config, LlmError
from .fields import read_config, read_fields
from .rules import FORMATS, read_rules
from .tokenizer import read_tokenizer

ENDS = "ends.safetensors"
SOURCE = "source.json"


def whole_plan(config: Config, rules: Any, dtype: Any = jnp.float32) -> Any:
    """Return the plan of the whole model, with parameters and activations of a dtype."""
    fn = functools.partial(model.logits, config)
    example = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    return xla.PtqProvider(rules).plan(fn, checkpoint.shapes(config, dtype), example)


def part_plans(config: Config, rules: Any) -> Any:
    """Return the plan of what is around the layers, and that of one layer of each stack by name."""
    shapes, provider = checkpoint.shapes(config), xla.PtqProvider(rules)
    where = model.Where(jnp.arange(32))

    def ends(params: Any, tokens: Any) -> Any:
        x = model.embed(config, params, tokens)
        return model.head(config, params, x), model.layer_inputs(config, params, tokens, x)

    def layer(stack: Any, params: Any, x: Any) -> Any:
        inputs = jnp.zeros((config.layers, *x.shape[:2], config.layer_input), x.dtype)
        inputs = inputs if config.layer_input else None
        shared = model.empty_shared(config, x)
        return model.run_segment(config, [stack], params, x, where, shared=shared, inputs=inputs)[0]

    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    x = jax.ShapeDtypeStruct((1, 32, config.width), jnp.float32)
    with warnings.catch_warnings():
        # The plan of the whole model has said what there is to say; a part needs not all rules.
        warnings.simplefilter("ignore", xla.QuantizationWarning)
        plans = {}
        for stack in config.stacks:
            of_one = dataclasses.replace(stack, layers=stack.layers[:1])
            layers = {name: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
                      for name, x in shapes.pop(stack.name).items()}  # fmt: skip
            fn = functools.partial(layer, of_one)
            plans[stack.name] = provider.plan(fn, {stack.name: layers}, x)
        return provider.plan(ends, shapes, tokens), plans


def quantize(folder: str | os.PathLike[str], out: str | os.PathLike[str], given: str) -> Any:
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
    config, files, rules, plan = check(folder, given)
    facts = facts_of(folder, files) | {"rules": [repr(rule) for rule in rules]}
    begin(folder, out, SOURCE, facts)
    ends, layers = part_plans(config, rules)
    parts = [(ENDS, ends, None)]
    parts += [(_layer(i), layers[config.place(i)[0].name], i) for i in range(config.layers)]
    for name, part, i in tqdm(parts, "quantizing", disable=not sys.stderr.isatty()):
        if (out / name).exists():
            continue
        if beside.is_gguf(folder):
            _, get = gguf_source.opened(folder)
            params = {one: get(one, i) for one in checkpoint.tensor_names(config, i)}
            if i is not None:
                params = {config.place(i)[0].name: {one: x[None] for one, x in params.items()}}
            xla.save(out / name, part.quantize(params, prepack=False), part)
        else:
            names = checkpoint.sources(config, i)
            xla.quantize_file(part, files, out / name, names=names)
    return plan


def write(out: Any, config: Config, rules: Any, stored: Any) -> None:
    """Write stored parameters of a whole model into a folder that was begun, a layer to a file.

    Args:
        out: the folder.
        config: of the model.
        rules: of their formats.
        stored: the parameters, packed for no kernel.
    """
    ends, plans = part_plans(config, rules)
    rest = {name: leaf for name, leaf in stored.items() if name not in plans}
    xla.save(out / ENDS, rest, ends, overwrite=True)
    for stack in config.stacks:
        for at, i in enumerate(stack.layers):
            # Of values and scales alike: the first axis is that of the layers.
            one = jax.tree.map(lambda x, at=at: x[at : at + 1], stored[stack.name])
            xla.save(out / _layer(i), {stack.name: one}, plans[stack.name], overwrite=True)


def check(folder: Any, given: Any) -> Any:
    """Return the config, the files, the rules and the plan of a folder that can be quantized.

    Raises:
        LlmError: something in the folder or in a file of rules can't be used.
    """
    config = read_config(folder)
    if beside.is_gguf(folder):
        files = gguf_source.opened_model(folder).file.files
        if not gguf_source.is_float(folder):
            raise LlmError(
                f"{folder} must have float tensors to be quantized, got quantized ones. Run "
                "generate, finetune or export on it as it is."
            )
    else:
        files = checkpoint.find_files(folder)
        config = checkpoint.located(config, files)
        checkpoint.check_tensors(config, files)
    read_tokenizer(folder, config)
    rules = read_rules(config, given)
    is_own = given not in FORMATS  # the user's rules: what they name must be there
    with warnings.catch_warnings():
        if is_own:
            warnings.simplefilter("ignore", xla.QuantizationWarning)
        plan = whole_plan(config, rules)
    if is_own and plan.problems:
        raise LlmError(f"The rules of {given} can't be followed: {'; '.join(plan.problems)}.")
    return config, files, rules, plan


def facts_of(folder: Any, files: list[Path]) -> Any:
    """Return what tells a folder from others: the fields of its config, and sizes of its files."""
    sizes = {file.name: file.stat().st_size for file in files}
    return {"files": sizes, "config": read_fields(folder)}


def begin(folder: Any, out: Any, name: str, facts: Any) -> None:
    """Make a folder with a model's config and tokenizer, or check that it was begun with the same.

    Args:
        folder: the model's.
        out: to make.
        name: of the file in it with the facts.
        facts: what the same means, by what it is called; as JSON has it.

    Raises:
        LlmError: as ``check_begun``.
    """
    check_begun(out, name, facts)
    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(out / name, overwrite=True) as new:
        new.write_text(json.dumps(facts, indent=1))
    beside.copy(folder, out, (beside.CONFIG, *beside.AROUND))


def check_begun(out: Any, name: str, facts: Any) -> None:
    """Check that a folder is empty or not there, or was begun with the same facts: see ``begin``.

    Raises:
        LlmError: the folder was begun with other facts, which the error names, or has other files.
    """
    if out.exists() and any(out.iterdir()):
        known = json.loads((out / name).read_text()) if (out / name).is_file() else {}
        # Also what this run says nothing of, such as the text of a run with one: the two write
        # files of the same names, and a half-written folder would be filled up with the other's.
        keys = [*facts, *(known.keys() - facts.keys())]
        others = [key for key in keys if known.get(key) != facts.get(key)]
        if others:
            what = f"got other {' and '.join(others)}" if known else "got other files"
            raise LlmError(
                f"{out} must be empty, or begun with the same {' and '.join(keys)}, {what}. "
                "Remove it, or name another folder."
            )


def is_quantized(folder: Any) -> bool:
    """Return whether ``quantize`` wrote a folder, or began to."""
    return (Path(folder) / SOURCE).is_file()


def read(out: Any, dtype: str = "float32") -> tuple[Config, list[Any], Any]:
    """Return the config, the rules and the stored parameters of a folder that ``quantize`` wrote.

    Args:
        out: the folder.
        dtype: of parameters that are not quantized, and that quantized ones stand for.

    Raises:
        LlmError: quantizing it was interrupted.
    """
    out = Path(out)
    config, rules = _facts(out)
    ends, plans = part_plans(config, rules)
    params = xla.load(out / ENDS, plan=ends, prepack=False)
    for name, layers in ((stack.name, stack.layers) for stack in config.stacks):
        each = [xla.load(out / _layer(i), plan=plans[name], prepack=False)[name] for i in layers]
        # Of values and scales alike: the first axis is that of the layers.
        params[name] = jax.tree.map(lambda *each: jnp.concatenate(each), *each)
    params = jax.tree.map(lambda x: x.astype(dtype), params, is_leaf=lambda x: hasattr(x, "qtype"))
    return config, rules, params


def opened(out: Any) -> tuple[Config, checkpoint.Get]:
    """Return the config of such a folder, and what returns a parameter: see ``checkpoint.Get``.

    The file of one layer is in memory, and no more.
    """
    out = Path(out)
    config, rules = _facts(out)
    ends, plans = part_plans(config, rules)

    @functools.lru_cache(maxsize=1)
    def part(layer: int | None) -> Any:
        if layer is None:
            return xla.load(out / ENDS, plan=ends, prepack=False)
        name = config.place(layer)[0].name
        return xla.load(out / _layer(layer), plan=plans[name], prepack=False)[name]

    def get(name: str, layer: int | None) -> Any:
        found = part(layer)[name]
        array = np.asarray(found.restore() if hasattr(found, "restore") else found, np.float32)
        return array if layer is None else array[0]

    return config, get


def _facts(out: Any) -> Any:
    """Return the config and the rules of a folder that ``quantize`` wrote, and that is whole."""
    config = read_config(out)
    missing = [name for name in _parts(config) if not (out / name).is_file()]
    if missing:
        raise LlmError(f"{out} lacks {missing[0]}: quantize was interrupted. Run it again.")
    return config, xla.read_manifest(out / ENDS).rules()


def size_of(out: Any) -> int:
    """Return the bytes of the files of a quantized folder."""
    return sum(path.stat().st_size for path in Path(out).glob("*.safetensors"))


def _parts(config: Config) -> list[str]:
    return [ENDS, *map(_layer, range(config.layers))]


def _layer(i: int) -> str:
    return f"layer-{i:05}.safetensors"

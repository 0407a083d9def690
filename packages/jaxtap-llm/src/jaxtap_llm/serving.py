"""A quantized folder as programs and packed parameters, for processes that start quickly.

Nothing is traced, planned or packed at the start: the programs are lowered already, the parameters
are mapped into memory, and a compilation cache has the machine code.
"""

import functools
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import provider_xla as xla

from . import beside, model
from .config import LlmError
from .fields import read_config
from .generate import GREEDY, STEPS, Generator, first, following, sample

FACTS = "exported.json"
PARAMETERS = "parameters"
PROGRAMS = ("prefill", "decode", "step")
COPIED = ("config.json", "tokenizer.json", "generation_config.json")


def greedy(config, params, token, cache, position):
    """Decode ``STEPS`` of the likeliest tokens: see ``generate.following``."""
    return following(config, params, token, cache, position, None, GREEDY, STEPS)


def export(folder, out, generator, plan, prompt=128, positions=1024):
    """Write a folder of programs and packed parameters, for one sequence at once.

    Args:
        folder: that ``quantize`` wrote: its config and its tokenizer are copied.
        out: a folder that is made.
        generator: whose programs and parameters these are.
        plan: of the parameters.
        prompt: tokens that a prompt is filled up to.
        positions: of the cache.

    Raises:
        LlmError: ``out`` is there, or the sizes can't be. Nothing is written then.
    """
    folder, out, config = Path(folder), Path(out), generator.config
    if out.exists():
        raise LlmError(f"{out} must be a folder that is not there. Remove it, or name another.")
    if not 0 < prompt < positions:
        raise LlmError(
            f"--prompt must be 1 or more, and below --positions, got {prompt} and {positions}."
        )
    cache, token = generator.make_cache(1, positions), jnp.zeros(1, jnp.int32)
    tokens, at = jnp.zeros((1, prompt), jnp.int32), jnp.int32(0)
    made = {
        "prefill": (first, tokens, cache, at),
        "decode": (greedy, token, cache, at),
        "step": (model.decode, token, cache, at),
    }
    part = out.with_name(f"{out.name}.{os.getpid()}")  # whole, it gets its name
    part.mkdir(parents=True)
    try:
        for name, (fn, *args) in made.items():
            program = plan.export(generator.params, *args, fn=functools.partial(fn, config))
            program.save(part / f"{name}.program")
        (part / PARAMETERS).mkdir()
        for i, leaf in enumerate(jax.tree.leaves(generator.params)):
            array = np.asarray(leaf)
            # NumPy's files know no bfloat16. Bytes start at multiples of 64: JAX takes them as
            # they lie.
            np.save(part / PARAMETERS / f"{i:05}.npy", array.view(f"V{array.itemsize}"))
        facts = {"prompt": prompt, "positions": positions}
        (part / FACTS).write_text(json.dumps(facts))
        beside.copy(folder, part, COPIED)
        os.rename(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_exported(folder):
    """Return whether ``export`` wrote a folder."""
    return (Path(folder) / FACTS).is_file()


class Exported(Generator):
    """A generator of an exported folder.

    Args:
        folder: that ``export`` wrote.

    Raises:
        LlmError: something in it is missing or damaged.
    """

    def __init__(self, folder):
        folder = Path(folder)
        self.config = read_config(folder, quantized=True)
        try:
            facts = json.loads((folder / FACTS).read_text())
            self._prompt, self.positions = facts["prompt"], facts["positions"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LlmError(
                f"{folder / FACTS} must be what export wrote: {error!r}. Export again."
            ) from error
        self._exported = {}
        for name in PROGRAMS:
            self._exported[name] = xla.load_exported(folder / f"{name}.program").exported
        params, _, self._cache, _ = self._arguments("prefill")
        self.params = _mapped(folder / PARAMETERS, params)
        self._prefill, self._greedy, self._step = (
            jax.jit(self._exported[name].call, donate_argnums=2) for name in PROGRAMS
        )
        self._sample = jax.jit(sample, static_argnums=0)

    def make_cache(self, batch, positions):
        """Return an empty cache for its programs.

        Raises:
            LlmError: for other sizes than they were exported for.
        """
        if (batch, positions) != (1, self.positions):
            raise LlmError(
                f"The programs are for one sequence and a cache of {self.positions} positions, got "
                f"{batch} and {positions}. Export them again, or leave --context out."
            )
        return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), self._cache)

    def _decode(self, params, token, cache, start, key, sampling, steps):
        assert steps == STEPS, "The program was exported for as many."
        if sampling.temperature == 0:
            return self._greedy(params, token, cache, np.int32(start))
        found = []
        for i, one in enumerate(jax.random.split(key, steps)):
            logits, cache = self._step(params, token, cache, np.int32(start + i))
            token = self._sample(sampling, one, logits).astype(jnp.int32)
            found.append(token)
        return jnp.stack(found, axis=1), cache

    def _room(self, wanted):
        return self.positions

    def _filled(self, length, positions):
        return self._prompt

    def _check(self, prompts, count, positions):
        length = prompts.shape[1]
        if length > self._prompt:
            raise LlmError(
                f"The prompt must have at most {self._prompt} tokens, which the programs were "
                f"exported for, got {length}. Export them again with --prompt."
            )
        if length + count > self.positions:
            raise LlmError(
                f"Prompt and completion must fit into the {self.positions} positions that the "
                f"programs were exported for, got {length} + {count}. Lower --count, or export "
                "them again with --positions."
            )
        super()._check(prompts, count, positions)

    def _arguments(self, name):
        """Return the types of a program's arguments."""
        exported = self._exported[name]
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.in_avals]
        return jax.tree.unflatten(exported.in_tree, types)[0]


def _mapped(folder, types):
    """Return parameters whose bytes stay in their files until they are read."""
    leaves, tree = jax.tree.flatten(types)
    arrays = []
    for i, wanted in enumerate(leaves):
        path = folder / f"{i:05}.npy"
        try:
            array = np.load(path, mmap_mode="r").view(wanted.dtype)
        except (OSError, ValueError) as error:
            raise LlmError(f"{path} must be what export wrote: {error}. Export again.") from error
        if array.shape != wanted.shape:
            raise LlmError(
                f"{path} must be {wanted.shape}, got {array.shape}. It is another model's; export "
                "again."
            )
        arrays.append(jax.device_put(array))
    return jax.tree.unflatten(tree, arrays)

"""Train adapters beside a quantized base: low-rank adapters (QLoRA, arXiv:2305.14314)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from tqdm import tqdm

import provider_xla as xla

from . import adapters, beside, curves, folders, quantized
from .config import LlmError
from .documents import Rows, order, pack, read_documents
from .fields import read_config, read_fields
from .losses import counted_nats
from .rules import DTYPES
from .tokenizer import read_stops, read_tokenizer

_CURVE = "curve"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How adapters are trained.

    Attributes:
        rank: of the adapters.
        alpha: they are scaled by ``alpha / rank``; None for twice the rank.
        dropout: share of an activation that an adapter does not see.
        rate: of Adam, at its highest: it rises for a part of the steps, and falls to 0 by a cosine.
        epochs: how often each row is seen.
        steps: how many there are, whatever ``epochs`` says; None for as many as that takes.
        batch: rows that are computed at once.
        accumulate: times ``batch``, whose gradients are added up for one step.
        length: tokens of a row.
        seed: of the adapters, the order of rows and dropout.
        dtype: of activations, one of ``rules.DTYPES``. Adapters and their moments are float32.
        every: steps between checkpoints.
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    rate: float = 2e-4
    epochs: float = 1.0
    steps: int | None = None
    batch: int = 1
    accumulate: int = 8
    length: int = 512
    seed: int = 0
    dtype: str = "float32"
    every: int = 20

    def __post_init__(self):
        for name in ("rank", "batch", "accumulate", "every"):
            if getattr(self, name) < 1:
                raise LlmError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if self.length < 2:
            raise LlmError(f"length must be 2 or more, got {self.length}.")
        if self.steps is not None and self.steps < 1:
            raise LlmError(f"steps must be 1 or more, got {self.steps}.")
        for name in ("rate", "epochs", "alpha"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise LlmError(f"{name} must be above 0, got {value}.")
        if not 0 <= self.dropout < 1:
            raise LlmError(f"dropout must be 0 or more, and below 1, got {self.dropout}.")
        if self.dtype not in DTYPES:
            raise LlmError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")

    @property
    def lora(self) -> xla.Lora:
        """The adapters as a rule has them."""
        alpha = 2.0 * self.rank if self.alpha is None else float(self.alpha)
        return xla.Lora(self.rank, alpha, float(self.dropout))

    def steps_of(self, rows: int) -> int:
        """Return how many steps there are for so many rows."""
        count = math.ceil(self.epochs * rows / (self.batch * self.accumulate))
        return count if self.steps is None else self.steps


def finetune(
    folder: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    preset: str | None = None,
    recipe: Recipe | None = None,
) -> list[float]:
    """Train adapters on a text. A run that was interrupted goes on where its checkpoint is.

    Args:
        folder: float, which is quantized into ``out`` first; or quantized, as it is.
        data: a text or a ``.jsonl`` file: see ``read_documents``.
        out: a folder that is made: ``load``, ``generate`` and ``export`` take it.
        preset: what a float folder is quantized to, as ``quantize`` takes rules; "float" for not
            at all, None for nf4.
        recipe: how they are trained; None for the default.

    Returns:
        The loss of each step, in nats a token.

    Raises:
        LlmError: the folder, the data or a setting can't be used, before anything is written; or
            ``out`` was begun with others.
    """
    folder, data, out, recipe = Path(folder), Path(data), Path(out), recipe or Recipe()
    if out.exists() and not out.is_dir():
        raise LlmError(f"{out} must be a folder, got a file. Name another.")
    is_float = folders.is_float(folder)
    if adapters.is_finetuned(folder):
        raise LlmError(
            f"{folder} must not be fine-tuned already. Merge it first: jaxtap llm export {folder} "
            "MERGED --merged."
        )
    if preset is not None and not is_float:
        raise LlmError(f"--preset must be left out, as {folder} is quantized already.")
    config = read_config(folder, quantized=not is_float)
    rows = _rows(folder, config, data, recipe)
    files = [folder] if beside.is_gguf(folder) else sorted(folder.glob("*.safetensors"))
    loaded = None
    if is_float and preset != "float":
        preset = "nf4" if preset is None else preset
        _, files, rules, _ = quantized.check(folder, preset)
        adapters.plan_with(config, rules, recipe.lora, recipe.dtype)
    else:
        loaded = folders.load_base(folder, recipe.dtype, recipe.lora)
    steps = recipe.steps_of(len(rows))
    facts = {
        "base": {
            "folder": adapters.BASE if loaded is None else str(folder.absolute()),
            "name": read_fields(folder).get("_name_or_path") or str(folder.absolute()),
            "preset": preset,
            **quantized.facts_of(folder, files),
        },
        "data": {"name": data.name, "sha256": hashlib.sha256(data.read_bytes()).hexdigest()},
        "adapters": dataclasses.asdict(recipe.lora),
        "training": dataclasses.asdict(recipe) | {"steps": steps},
    }
    del facts["training"]["every"]  # an interrupted run may go on with another
    quantized.begin(folder, out, adapters.FACTS, facts)
    if loaded is None:
        assert preset is not None
        quantized.quantize(folder, out / adapters.BASE, preset)
        loaded = folders.load_base(out / adapters.BASE, recipe.dtype, recipe.lora)
    return Trainer(*loaded, recipe, rows, out / adapters.STATE).run(steps)


def _rows(folder: Path, config: Any, data: Path, recipe: Recipe) -> Rows:
    """Return the rows of the data."""
    most = read_fields(folder).get("max_position_embeddings")
    if most is not None and recipe.length > most:
        raise LlmError(
            f"--length must be at most the {most} positions of the model "
            f"(max_position_embeddings), got {recipe.length}."
        )
    tokenizer = read_tokenizer(folder, config)
    rows = pack(read_documents(data, tokenizer, read_stops(folder)), recipe.length)
    if rows.tokens.max() >= config.vocabulary:
        raise LlmError(
            f"Tokens must be below the model's vocabulary of {config.vocabulary}, got "
            f"{rows.tokens.max()}. The tokenizer, or eos_token_id, is another model's."
        )
    return rows


class Trainer:
    """Trains adapters, and stores them with what continuing takes.

    Args:
        config: of the model.
        plan: with adapters.
        params: of the base, as ``plan`` stores them.
        recipe: how they are trained.
        rows: what they are trained on.
        path: of the checkpoint; what is there is gone on with.
    """

    def __init__(self, config: Any, plan: Any, params: Any, recipe: Recipe, rows: Rows, path: Path):
        self.recipe, self.rows, self.path = recipe, rows, path
        self._plan, self._params = plan, params
        self._run = plan.apply(functools.partial(counted_nats, config))

    def run(self, steps: int) -> list[float]:
        """Train until so many steps are done, and return the loss of each.

        Raises:
            LlmError: the checkpoint is damaged, or of another model.
        """
        warm = max(1, round(0.03 * steps))
        rate = optax.warmup_cosine_decay_schedule(
            self.recipe.rate / (warm + 1), self.recipe.rate, warm, max(warm + 1, steps)
        )
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        step = jax.jit(functools.partial(self._step, optimizer))
        arrays, curve = self._begin(optimizer)
        now = arrays, len(curve)
        size, stored = self.recipe.batch * self.recipe.accumulate, len(curve)
        shape = self.recipe.accumulate, self.recipe.batch, -1
        start, seen = time.perf_counter(), 0
        try:
            with tqdm(
                total=steps, initial=len(curve), desc="training", unit="step",
                disable=not sys.stderr.isatty(),
            ) as bar:  # fmt: skip
                for i in range(len(curve), steps):
                    chosen = order(len(self.rows), self.recipe.seed, i * size, size)
                    given = [x.reshape(shape) for x in self.rows.take(chosen)]
                    key = jax.random.fold_in(jax.random.key(self.recipe.seed), i)
                    *after, loss = step(*now[0], self._params, *given, key)
                    if not math.isfinite(loss):
                        raise LlmError(
                            f"The loss of step {i + 1} must be a number, got {loss}. Lower --rate: "
                            f"remove {self.path.parent}, and train from the start."
                        )
                    curve.append(float(loss))
                    now = after, len(curve)
                    seen += int((given[1] > 0).sum())
                    speed = seen / (time.perf_counter() - start)
                    text = f"loss {curve[-1]:.3f}, {speed:,.0f} tokens/s"
                    bar.set_postfix_str(text, refresh=False)
                    bar.update()
                    if len(curve) % self.recipe.every == 0 or len(curve) == steps:
                        stored = self._store(after, curve, rate)
        except KeyboardInterrupt:
            arrays, done = now
            if done > stored:
                self._store(arrays, curve[:done], rate)
            print(f"\nstopped after step {done} of {steps}: run it again to go on", file=sys.stderr)
            raise
        return curve

    def _step(
        self, optimizer: Any, trained: Any, state: Any, params: Any, tokens: Any, documents: Any,
        counted: Any, key: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Return adapters and the optimizer's state after a step, and the mean loss before.

        Args:
            tokens: int ``[accumulate, batch, length]``, and so are ``documents`` and ``counted``.
        """
        dropout = self.recipe.dropout > 0

        def nats(trained: Any, key: Any, *rows: Any) -> Any:
            more = {"dropout_key": key} if dropout else {}
            return self._run(params, *rows, adapters=trained, **more)

        def add(carry: Any, given: Any) -> Any:
            found = jax.value_and_grad(nats)(trained, *given)
            return jax.tree.map(jnp.add, carry, found), None

        zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, trained)
        keys = jax.random.split(key, len(tokens))
        (total, grads), _ = lax.scan(add, zero, (keys, tokens, documents, counted))
        # Rows count by their tokens, however they are dealt out to batches.
        count = jnp.maximum(counted.sum(), 1)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / count, grads), state)
        return optax.apply_updates(trained, updates), state, total / count

    def _begin(self, optimizer: Any) -> tuple[list[Any], list[float]]:
        """Return adapters and the optimizer's state, and the losses so far."""
        trained = self._plan.init_adapters(jax.random.key(self.recipe.seed))
        state = optimizer.init(trained)
        if not self.path.is_file():
            return [trained, state], []
        arrays, step = adapters.read_state(self.path)
        like = self._named(trained, state)
        shapes = {name: x.shape for name, x in like.items()}
        curve = arrays.pop(_CURVE, np.zeros(0))
        if {name: x.shape for name, x in arrays.items()} != shapes or len(curve) != step:
            raise LlmError(
                f"{self.path} must be a checkpoint of this model, got another's. Remove it to "
                "train from the start."
            )
        trained = jax.tree.map(jnp.asarray, adapters.adapters_in(arrays))
        leaves, tree = jax.tree.flatten(state)
        leaves = [jnp.asarray(arrays[_nth(i)], leaf.dtype) for i, leaf in enumerate(leaves)]
        return [trained, jax.tree.unflatten(tree, leaves)], curve.tolist()

    def _store(self, now: Sequence[Any], curve: list[float], rate: Any) -> int:
        """Write the checkpoint and the losses, and return after how many steps that is."""
        arrays = self._named(*now) | {_CURVE: np.array(curve, np.float32)}
        adapters.write_state(self.path, arrays, len(curve))
        rates = np.asarray(jax.vmap(rate)(np.arange(len(curve)))).tolist()
        curves.write(self.path.parent, curve, rates)
        return len(curve)

    @staticmethod
    def _named(trained: Any, state: Any) -> dict[str, Any]:
        """Return all arrays by name."""
        moments = {_nth(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        return adapters.names_of(trained) | moments


def _nth(i: int) -> str:
    """Return the name of an array of the optimizer."""
    return f"optimizer.{i:05}"

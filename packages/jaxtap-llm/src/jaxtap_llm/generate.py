"""From a prompt to tokens: programs that prefill a cache and decode from it, compiled by JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import model
from .cache import applying, make_cache
from .config import Config, LlmError

BLOCK = 64
"""Prompts and caches are filled up to multiples of it, so that few programs are compiled."""
STEPS = 8
"""Tokens that one call of the compiled program decodes."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 for the likeliest token.
        top_k: how many of the likeliest are drawn from; 0 for all.
        top_p: of these, the fewest that have this much of the probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise LlmError(
                "temperature must be 0 or more, top-k 0 or more and top-p above 0 and at most 1, "
                f"got {self.temperature}, {self.top_k} and {self.top_p}."
            )


GREEDY = Sampling()


def sample(sampling: Any, key: Any, logits: Any) -> Any:
    """Return int ``[batch]``, drawn from the distributions of ``[batch, vocabulary]``."""
    if sampling.temperature == 0:
        return likeliest(logits)
    logits = logits / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return jax.random.categorical(key, logits)
    kept, tokens = lax.top_k(logits, min(sampling.top_k or logits.shape[-1], logits.shape[-1]))
    chances = jax.nn.softmax(kept)
    before = jnp.cumsum(chances, axis=-1) - chances  # 0 for the likeliest, which is always kept
    kept = jnp.where(before < sampling.top_p, kept, -jnp.inf)
    drawn = jax.random.categorical(key, kept)
    return jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0]


def likeliest(logits: Any) -> Any:
    """Return ``jnp.argmax`` along the last axis, faster: XLA on CPU runs two simple passes."""
    most = logits.max(-1, keepdims=True)
    at = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.where(logits == most, at, logits.shape[-1] - 1).min(-1)


class Generator:
    """A model that is ready to generate.

    Args:
        config: of the model.
        params: float, or as ``plan.quantize`` returned them.
        plan: None for float.
        dtype: of a float cache.
        cache: ``"float"``, or ``"int8"`` for a cache by rule.
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        plan: Any = None,
        dtype: Any = jnp.float32,
        cache: str = "float",
    ) -> None:
        self.config, self.params, self.dtype, self.cache = config, params, dtype, cache
        apply = applying(config, plan, cache)
        self._prefill = jax.jit(apply(functools.partial(first, config)), donate_argnums=2)
        self._decode: Any = jax.jit(
            apply(functools.partial(following, config)),
            donate_argnums=2,
            static_argnames=("sampling", "steps"),
        )
        self._sample = jax.jit(sample, static_argnums=0)

    def make_cache(self, batch: int, positions: int) -> Any:
        """Return an empty cache for its programs."""
        return make_cache(self.config, self.cache, batch, positions, self.dtype)

    def stream(
        self,
        prompts: Any,
        count: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop: tuple[int, ...] = (),
        positions: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Yield int ``[batch, n]``: first one token of each sequence, then up to ``STEPS`` at once.

        Args:
            prompts: int ``[batch, length]``.
            count: tokens of each sequence.
            sampling: how they are chosen.
            seed: of what is drawn.
            stop: tokens that end a sequence; it ends when all sequences had one.
            positions: of the cache; None for as many as are needed.

        Raises:
            LlmError: no prompt, prompts of several lengths, tokens that are not in the vocabulary,
                or more than the cache has.
        """
        lengths = sorted({len(prompt) for prompt in prompts})
        if len(lengths) != 1:
            raise LlmError(
                f"Prompts must be of one length, got lengths of {lengths}. Generate those of each "
                "length by themselves."
            )
        prompts = np.asarray(prompts, np.int32)
        length = prompts.shape[1]
        positions = positions or self._room(length + count)
        self._check(prompts, count, positions)
        padded = np.pad(prompts, ((0, 0), (0, self._filled(length, positions) - length)))
        cache = self.make_cache(len(prompts), positions)
        # Keys that nothing draws with would be programs to compile, or to load.
        key = jax.random.key(seed) if sampling.temperature else None
        key, own = _split(key)
        logits, cache = self._prefill(self.params, padded, cache, length - 1)
        token = self._sample(sampling, own, logits)
        ended = np.isin(token, stop)
        yield np.asarray(token)[:, None]
        for start in range(length, length + count - 1, STEPS):
            if ended.all():
                return
            key, own = _split(key)
            now = min(STEPS, length + count - 1 - start)
            tokens, cache = self._decode(
                self.params, token, cache, start, own, sampling=sampling, steps=STEPS
            )
            token, tokens = tokens[:, -1], np.asarray(tokens)[:, :now]
            ended |= np.isin(tokens, stop).any(axis=1)
            yield tokens

    def _room(self, wanted: int) -> int:
        """Return the positions of a cache for so many tokens."""
        return _multiple(wanted)

    def _filled(self, length: int, positions: int) -> Any:
        """Return the length that a prompt is filled up to."""
        return min(_multiple(length), positions)

    def _check(self, prompts: Any, count: int, positions: int) -> None:
        length = prompts.shape[1]
        if length == 0:
            raise LlmError("The prompt must have a token or more, got none.")
        if prompts.min() < 0 or prompts.max() >= self.config.vocabulary:
            raise LlmError(
                f"Tokens must be below the model's vocabulary of {self.config.vocabulary}, got "
                f"{prompts.max()}. The tokenizer does not fit the model."
            )
        if length + count > positions:
            raise LlmError(
                f"Prompt and completion must fit into the cache of {positions} positions, got "
                f"{length} + {count}. Shorten the prompt, or raise --context."
            )


def _split(key: Any) -> Any:
    return (None, None) if key is None else jax.random.split(key)


def _multiple(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def first(config: Config, params: Any, tokens: Any, cache: Any, last: Any) -> Any:
    """Run a prompt: see ``model.prefill``."""
    return model.prefill(config, params, tokens, cache, last)


def following(
    config: Config,
    params: Any,
    token: Any,
    cache: Any,
    position: Any,
    key: Any,
    sampling: Any,
    steps: int,
) -> Any:
    """Decode tokens behind the given ones, ``[batch]``: ``[batch, steps]``, and the cache.

    Those beyond the end of the cache are not to be used.
    """

    def step(carry: Any, key: Any) -> Any:
        token, cache, position = carry
        logits, cache = model.decode(config, params, token, cache, position)
        token = sample(sampling, key, logits).astype(token.dtype)
        return (token, cache, position + 1), token

    token = token.astype(jnp.int32)
    carry = token, cache, jnp.asarray(position, jnp.int32)
    keys = jax.random.split(key, steps) if sampling.temperature else None
    (_, cache, _), tokens = lax.scan(step, carry, keys, length=steps)
    return tokens.T, cache

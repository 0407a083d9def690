"""A decoder on a phone: a LiteRT file with the signatures of LiteRT-LM's models.

``prefill_N`` and ``decode`` share the weights in the file; the cache goes in and comes out. The
file is verified against JAX while it is made, and can then be compared with the float program on
this machine. ``bundle`` puts it and the tokenizer into what LiteRT-LM opens.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import model
from .bench import Timed
from .config import Config, LlmError
from .generate import Generator
from .losses import losses
from .rules import DEVICE

try:
    import ai_edge_litert.interpreter

    import provider_odml as odml
except ModuleNotFoundError as error:
    raise LlmError(
        f"jaxtap llm device needs {error.name}, which is not installed. Run pip install "
        '"jaxtap-llm[device]".'
    ) from error


def export(config: Config, params: Any, name: str, prompt: int, positions: int) -> Any:
    """Return the verified file of a decoder.

    Args:
        params: float.
        name: of a rule for all weights, one of ``rules.DEVICE``.
        prompt: tokens that ``prefill_N`` takes at once; shorter prompts are padded.
        positions: that a sequence may have.

    Returns:
        An ``Artifact`` with two signatures, whose names are those that LiteRT-LM looks for.
        ``prefill_N`` takes ``tokens`` ``[1, prompt]`` and ``input_pos`` ``[prompt]``, their
        positions, and returns the cache; ``decode`` takes one of each, and returns ``logits``
        ``[1, 1, vocabulary]``, too. The cache is ``kv_cache_k_0`` and ``kv_cache_v_0``, and more
        where layers have other heads, ``[1, layers * kv_heads, positions + prompt, head_size]``: a
        padded prompt that begins at the last position has room.

    Raises:
        LlmError: the prompt is longer than the cache, or the model has experts or layers that
            keep a sum over all positions.
    """
    if config.experts:
        raise LlmError(
            "The model must have no experts, got some: LiteRT can't sort tokens by expert. Export "
            "a dense model."
        )
    if not 0 < prompt <= positions:
        raise LlmError(f"The prompt must have 1 to {positions} tokens, got {prompt}.")
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (1, prompt), np.int32)
    cache = model.make_cache(config, 1, positions + prompt)
    if "state" in cache:
        raise LlmError(
            "The model must have attention in all layers, got some that sum over positions: "
            "LiteRT-LM fills prompts up, and does not say how far. Export another model."
        )
    prefill, decode = (functools.partial(_run, config, out) for out in (False, True))
    places = jnp.arange(prompt, dtype=jnp.int32)
    empty = _flat(dict(sorted(cache.items())))  # as JAX orders what a function returns
    # A cache with a prompt in it: what is read out of zeros would verify nothing.
    filled = jax.jit(prefill)(params, tokens, places, *empty.values())
    signatures = {
        f"prefill_{prompt}": (prefill, (jnp.asarray(tokens), places, *empty.values())),
        "decode": (decode, (jnp.asarray(tokens[:, -1:]), places[-1:], *filled.values())),
    }
    named = {
        key: odml.Signature(args, fn=fn, inputs=("tokens", "input_pos", *empty))
        for key, (fn, args) in signatures.items()
    }
    return odml.export(decode, params, None, odml.OdmlRule(**DEVICE[name]), signatures=named)


CACHE = "kv_cache_"
"""Begins LiteRT-LM's names of the parts of the cache. It takes one for each layer, and looks at the
third of the first one's four axes alone: equal layers are in one here, as the scan has them."""


def _flat(cache: Any) -> Any:
    """Return a cache as the file has it: ``k`` is ``kv_cache_k_0``, ``v1`` is ``kv_cache_v_1``."""
    return {
        f"{CACHE}{part[0]}_{part[1:] or 0}": x.reshape(1, -1, *x.shape[3:])
        for part, x in cache.items()
    }


def _run(
    config: Config, has_logits: Any, params: Any, tokens: Any, input_pos: Any, *flat: Any
) -> Any:
    """Run tokens ``[1, length]`` behind what the cache has."""
    cache = jax.eval_shape(lambda: model.make_cache(config, 1, flat[0].shape[2]))
    parts = zip(cache.items(), flat, strict=True)
    cache = {part: x.reshape(kind.shape) for (part, kind), x in parts}
    # Positions follow each other; those of padding are zeros to LiteRT-LM.
    first = input_pos[0]
    where = model.Where(first + jnp.arange(tokens.shape[1]), first)
    x, cache = model.run(config, params, tokens, where, cache)
    return _flat(cache) | ({"logits": model.head(config, params, x)} if has_logits else {})


class Device:
    """Runs a file of ``export`` in LiteRT's interpreter.

    Args:
        file: its path; of a bundle, the bytes of the file in it.
        threads: that it may use.
    """

    def __init__(self, file: Any, threads: int = 2) -> None:
        is_whole = isinstance(file, bytes)
        given = {"model_content": file} if is_whole else {"model_path": str(file)}
        self._interpreter = ai_edge_litert.interpreter.Interpreter(**given, num_threads=threads)
        names = self._interpreter.get_signature_list()
        prefill = next(name for name in names if name.startswith("prefill"))
        self._prefill, self._decode = map(
            self._interpreter.get_signature_runner, (prefill, "decode")
        )
        details = self._prefill.get_input_details()
        self.prompt = int(details["tokens"]["shape"][1])
        parts = {name: one["shape"] for name, one in details.items() if name.startswith(CACHE)}
        self._empty = {name: np.zeros(shape, np.float32) for name, shape in parts.items()}
        self.positions = int(parts[f"{CACHE}k_0"][2]) - self.prompt

    def prefill(self, tokens: Any) -> Any:
        """Return the logits behind a prompt, float32 ``[vocabulary]``, and the cache.

        As LiteRT-LM does it: all but the last token at once, and that one decoded.
        """
        if not 0 < len(tokens) <= self.prompt:
            raise LlmError(
                f"The prompt must have 1 to {self.prompt} tokens, got {len(tokens)}. Export with a "
                "larger --prompt."
            )
        *before, last = tokens
        cache = self._empty
        if before:
            padded, places = np.zeros((2, self.prompt), np.int32)
            padded[: len(before)], places[: len(before)] = before, range(len(before))
            cache = self._prefill(tokens=padded[None], input_pos=places, **cache)
        return self.decode(last, cache, len(before))

    def decode(self, token: int, cache: Any, position: int) -> tuple[Any, Any]:
        """Return the logits behind a token at a position, and the cache with it."""
        if not 0 <= position < self.positions:
            raise LlmError(
                f"The position must be 0 to {self.positions - 1}, got {position}. Export with "
                "larger --positions."
            )
        tokens, places = np.array([[token]], np.int32), np.array([position], np.int32)
        out = self._decode(tokens=tokens, input_pos=places, **cache)
        return out["logits"][0, 0], {name: out[name] for name in cache}

    def generate(self, prompt: Any, count: int) -> list[int]:
        """Return the likeliest tokens behind a prompt."""
        logits, cache = self.prefill(prompt)
        found = [int(logits.argmax())]
        for position in range(len(prompt), len(prompt) + count - 1):
            logits, cache = self.decode(found[-1], cache, position)
            found.append(int(logits.argmax()))
        return found

    def perplexity(self, tokens: Any) -> float:
        """Return the perplexity of two tokens or more, of which the first is given."""
        cache, total = self._empty, 0.0
        for position, (token, wanted) in enumerate(itertools.pairwise(tokens)):
            logits, cache = self.decode(token, cache, position)
            logits = logits.astype(np.float64)
            total += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[wanted]
        return math.exp(total / (len(tokens) - 1))


def compare(
    device: Any, config: Config, params: Any, tokens: Any, steps: int = 32
) -> Iterator[Any]:
    """Yield rows: what is compared, in float in JAX, and on the device.

    Args:
        device: a ``Device``.
        params: float.
        tokens: two or more; those that don't fit into the cache are left out.
        steps: tokens that are generated.
    """
    tokens = np.asarray(tokens[: device.positions], np.int32)
    nats = jax.jit(functools.partial(losses, config))(params, tokens[None])
    yield "perplexity", math.exp(float(nats.mean())), device.perplexity(tokens.tolist())
    prompt = np.resize(tokens, device.prompt).tolist()
    # The last token is not put into the cache.
    steps = min(steps, device.positions - len(prompt) + 1)
    generator = Generator(config, params)
    blocks = list(generator.stream([prompt], steps))
    equal = np.equal(np.concatenate(blocks, axis=1)[0], device.generate(prompt, steps))
    yield "equal tokens", steps, int(equal.cumprod().sum())
    timed, cache = Timed(generator), device.prefill(prompt)[1]
    at = device.positions - 1
    runs = {
        "prefill": (lambda: timed.prefill(len(prompt)), lambda: device.prefill(prompt)),
        "decode": (lambda: timed.decode(at, 16), lambda: device.decode(0, cache, at)),
    }
    for name, (in_jax, on_device) in runs.items():
        count = len(prompt) if name == "prefill" else 1
        # Those of JAX return their time, without what is around the program.
        ours = _median([in_jax() for _ in range(6)])
        theirs = _median([_seconds(on_device) for _ in range(6)])
        yield f"{name}, tokens/s", count / ours, count / theirs


def _median(times: Any) -> Any:
    """Return the median without the first, which compiles or allocates."""
    return statistics.median(times[1:])


def _seconds(run: Any) -> Any:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

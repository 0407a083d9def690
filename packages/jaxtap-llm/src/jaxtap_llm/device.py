"""A decoder on a phone: a LiteRT file with the signatures ``prefill`` and ``decode``.

The two share the weights in the file; the cache goes in and comes out. The file is verified against
JAX while it is made, and can then be compared with the float program on this machine.
"""

import functools
import itertools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from . import model
from .bench import Timed
from .config import LlmError
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


def export(config, params, name, prompt, positions):
    """Return the verified file of a decoder.

    Args:
        params: float.
        name: of a rule for all weights, one of ``rules.DEVICE``.
        prompt: tokens that ``prefill`` takes at once; shorter prompts are padded.
        positions: of the cache.

    Returns:
        An ``Artifact``: ``prefill`` takes ``tokens`` ``[1, prompt]``, and ``decode`` ``[1]``; both
        take ``position`` (of the last token), ``cache_k`` and ``cache_v``, and return ``logits``,
        ``k`` and ``v``.

    Raises:
        LlmError: the prompt is longer than the cache, or the model has experts.
    """
    if config.experts:
        raise LlmError(
            "The model must have no experts, got some: LiteRT can't sort tokens by expert. Export "
            "a dense model."
        )
    if not 0 < prompt <= positions:
        raise LlmError(f"The prompt must have 1 to {positions} tokens, got {prompt}.")
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (1, prompt), np.int32)
    cache, last = model.make_cache(config, 1, positions), jnp.int32(prompt - 1)
    # A cache with a prompt in it: what is read out of zeros would verify nothing.
    filled = jax.jit(functools.partial(model.prefill, config))(params, tokens, cache, last)[1]
    prefill, decode = (_named(config, fn) for fn in (model.prefill, model.decode))
    signatures = {
        "prefill": odml.Signature((jnp.asarray(tokens), cache, last), fn=prefill),
        "decode": odml.Signature((jnp.asarray(tokens[:, -1]), filled, last), fn=decode),
    }
    rule = odml.OdmlRule(**DEVICE[name])
    return odml.export(decode, params, None, rule, signatures=signatures)


def _named(config, fn):
    """Return a function with the names that the file's inputs and outputs get."""

    def named(params, tokens, cache, position):
        logits, cache = fn(config, params, tokens, cache, position)
        return {"logits": logits, **cache}

    return named


class Device:
    """Runs a file of ``export`` in LiteRT's interpreter.

    Args:
        path: of the file.
        threads: that it may use.
    """

    def __init__(self, path, threads=2):
        self._interpreter = ai_edge_litert.interpreter.Interpreter(
            model_path=str(path), num_threads=threads
        )
        self._runs = {
            name: self._interpreter.get_signature_runner(name) for name in ("prefill", "decode")
        }
        details = self._runs["prefill"].get_input_details()
        self.prompt = int(details["tokens"]["shape"][1])
        shapes = {name: details[f"cache_{name}"]["shape"] for name in "kv"}
        self._empty = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.positions = int(shapes["k"][3])

    def prefill(self, tokens):
        """Return the logits behind a prompt, float32 ``[vocabulary]``, and the cache."""
        if not 0 < len(tokens) <= self.prompt:
            raise LlmError(
                f"The prompt must have 1 to {self.prompt} tokens, got {len(tokens)}. Export with a "
                "larger --prompt."
            )
        padded = np.zeros((1, self.prompt), np.int32)
        padded[0, : len(tokens)] = tokens
        return self._run("prefill", padded, self._empty, len(tokens) - 1)

    def decode(self, token, cache, position):
        """Return the logits behind a token at a position, and the cache with it."""
        if not 0 <= position < self.positions:
            raise LlmError(
                f"The position must be 0 to {self.positions - 1}, got {position}. Export with "
                "larger --positions."
            )
        return self._run("decode", np.array([token], np.int32), cache, position)

    def generate(self, prompt, count):
        """Return the likeliest tokens behind a prompt."""
        logits, cache = self.prefill(prompt)
        found = [int(logits.argmax())]
        for position in range(len(prompt), len(prompt) + count - 1):
            logits, cache = self.decode(found[-1], cache, position)
            found.append(int(logits.argmax()))
        return found

    def perplexity(self, tokens):
        """Return the perplexity of two tokens or more, of which the first is given."""
        cache, total = self._empty, 0.0
        for position, (token, wanted) in enumerate(itertools.pairwise(tokens)):
            logits, cache = self.decode(token, cache, position)
            logits = logits.astype(np.float64)
            total += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[wanted]
        return math.exp(total / (len(tokens) - 1))

    def _run(self, name, tokens, cache, position):
        inputs = {f"cache_{part}": array for part, array in cache.items()}
        out = self._runs[name](tokens=tokens, position=np.int32(position), **inputs)
        return out["logits"][0], {part: out[part] for part in cache}


def compare(device, config, params, tokens, steps=32):
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


def _median(times):
    """Return the median without the first, which compiles or allocates."""
    return statistics.median(times[1:])


def _seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

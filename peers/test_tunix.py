"""A model that is not ours, with programs that are not ours: tunix's Llama3, Sampler, PeftTrainer.

``quantize_model`` takes the model; tunix generates with it, from a cache that tunix makes, and
trains adapters of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import provider_xla as xla

pytestmark = pytest.mark.filterwarnings("ignore")  # of tunix and what it imports
LENGTH, STEPS = 16, 12
REST = nnx.Not(nnx.LoRAParam)
# tunix's buffer of logits is as wide as its embeddings.
WIDTH = VOCABULARY = 64
SIZES = {"num_layers": 2, "embed_dim": WIDTH, "hidden_dim": 96, "vocab_size": VOCABULARY}
SIZES |= {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2, "norm_eps": 1e-5}
TABLE = xla.QuantizationRule(op_names=["take"], weight_qtype="int8")
RULES = {
    "int8": xla.QuantizationRule(weight_qtype="int8", weights_only=True),
    "int4": xla.QuantizationRule(weight_qtype="int4", tile_size=16, weights_only=True),
}


class Letters:
    """A tokenizer of letters, as tunix takes it."""

    def encode(self, text):
        return [3 + ord(letter) % 60 for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 2

    def eos_id(self):
        return 1

    def pad_id(self):
        return 0


@pytest.fixture
def llama():
    """Return tunix's Llama3 with weights of which logits are spread."""
    from tunix.models.llama3 import model

    made = model.Llama3(model.ModelConfig(**SIZES, rope_theta=10_000), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    state = nnx.state(made, nnx.Param)
    nnx.update(
        made,
        jax.tree.map(
            lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.3 if x.ndim > 1 else 0.1, x.shape)),
            state,
        ),
    )
    return made


def inputs():
    tokens = jnp.ones((2, LENGTH), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    return (
        tokens,
        positions,
        None,
        jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (2, LENGTH, LENGTH)),
    )


def quantized(model, *rules):
    return xla.quantize_model(model, xla.PtqProvider([TABLE, *rules]), *inputs())


def dequantized(model, quantized):
    """Return the float model with the values that the quantized one has."""
    state = nnx.to_pure_dict(nnx.state(quantized, nnx.Param))
    values = jax.tree.map(
        lambda x: x.restore() if hasattr(x, "restore") else x,
        state,
        is_leaf=lambda x: hasattr(x, "restore"),
    )
    made = nnx.clone(model)
    params = nnx.state(made, nnx.Param)
    nnx.replace_by_pure_dict(params, values)
    nnx.update(made, params)
    return made


def sampled(model, kind=None):
    from tunix.generate.sampler import CacheConfig, Sampler

    cache = CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=16)
    sampler = (kind or Sampler)(model, Letters(), cache)
    return sampler(["ab", "hello there"], max_generation_steps=STEPS, return_logits=True)


@pytest.mark.parametrize("name", RULES)
def test_sampler_generates_with_quantized_weights(llama, name):
    model = quantized(llama, RULES[name])
    plan = xla.model_plan(model)
    # A table, the head, and in each layer four matmuls of attention and three of the MLP.
    assert len(plan.weights) == 2 + 2 * 7
    found, expected, floats = map(sampled, (model, dequantized(llama, model), llama))
    # Kernels multiply the rows of a prompt in two planes of int8: 3e-5 for each matmul.
    for one, other, unquantized in zip(found.logits, expected.logits, floats.logits, strict=True):
        np.testing.assert_allclose(one, other, atol=0.01 * np.std(other))
        # The first is of the prompt alone, whatever is generated.
        assert np.linalg.norm(one[0] - unquantized[0]) > 10 * np.linalg.norm(one[0] - other[0])
    for one, other in zip(found.tokens, expected.tokens, strict=True):
        assert len(one) == STEPS
        np.testing.assert_array_equal(one, other)


def test_sampler_generates_from_an_int8_cache(llama):
    """The model takes the cache that the Sampler makes, once that is quantized."""
    from tunix.generate.sampler import Sampler, _init_cache

    empty = _init_cache(2, 64, 2, 2, 16, jnp.float32)
    tokens, positions, _, mask = inputs()
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 64 - LENGTH)))
    provider = xla.PtqProvider([xla.CacheRule("cache"), TABLE, RULES["int8"]], strict=True)
    model = xla.quantize_model(llama, provider, tokens, positions, empty, mask)
    plan = xla.model_plan(model)
    assert len(plan.caches) == 2 * 2

    class Carrying(Sampler):
        def init_sample_state(self, *args, **kwargs):
            state = super().init_sample_state(*args, **kwargs)
            return dataclasses.replace(state, cache=plan.quantize_cache(state.cache, "cache"))

        def _decode_fn(self, params, state):
            state = super()._decode_fn(params, state)
            held.append(state.cache["layer_1"]["k"])
            return state

    held = []
    found, expected = sampled(model, Carrying), sampled(dequantized(llama, model))
    assert isinstance(held[0], xla.CacheArray)
    for one, other in zip(found.logits, expected.logits, strict=True):
        # Of the prompt alone, and of the prompt and one token: tokens may differ from there on.
        for i in (0, 1):
            error = np.linalg.norm(one[i] - other[i]) / np.linalg.norm(other[i])
            assert 1e-4 < error < 0.05
    for one, other in zip(found.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(one[:2], other[:2])


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_trainer_trains_adapters(llama, qtype):
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

    adapted = xla.LoraRule(
        module_path=".*(mlp|attn).*", weight_qtype=qtype, tile_size=16, rank=4, weights_only=True
    )
    model = quantized(llama, adapted)
    frozen = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(model, REST)))
    before = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    assert len(before) == 2 * 2 * 7
    tokens = np.random.default_rng(1).integers(3, VOCABULARY, (4, LENGTH)).astype(np.int32)
    batch = TrainingInput(tokens, np.ones_like(tokens))
    config = TrainingConfig(eval_every_n_steps=100, max_steps=15)
    trainer = PeftTrainer(model, optax.adam(1e-2), config)
    trainer = trainer.with_gen_model_input_fn(
        lambda batch: {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(LENGTH), (4, LENGTH)),
            "attention_mask": jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (4, LENGTH, LENGTH)),
        }
    )
    first = float(loss_of(model, tokens))
    trainer.train([batch] * 15)
    assert float(loss_of(model, tokens)) < 0.7 * first
    after = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    assert all((one != other).any() for one, other in zip(before, after, strict=True))
    for one, other in zip(frozen, jax.tree.leaves(nnx.state(model, REST)), strict=True):
        np.testing.assert_array_equal(one, other)
    merged = xla.merge_model(model)
    np.testing.assert_allclose(loss_of(merged, tokens), loss_of(model, tokens), rtol=1e-3)


def loss_of(model, tokens):
    """Return the mean nats of each token behind the first."""
    _, positions, _, mask = inputs()
    logits, _ = model(
        jnp.asarray(tokens),
        jnp.broadcast_to(positions[:1], tokens.shape),
        None,
        jnp.broadcast_to(mask[:1], (len(tokens), LENGTH, LENGTH)),
    )
    chances = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(chances, jnp.asarray(tokens)[:, 1:, None], axis=-1).mean()

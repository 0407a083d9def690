"""Model objects collect the static ranges of activations in training, and keep them afterwards."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.xla_samples import draw

RULE = xla.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
TRAINS, INFERS = xla.QtProvider(RULE), xla.PtqProvider(RULE)

BATCHES = [jnp.asarray(draw((4, 8))[0]) * (i + 1) for i in range(3)]


def range_of(batches):
    """The mean over all examples of their largest magnitude."""
    return np.mean([np.abs(np.asarray(x, np.float64)).max(1) for x in batches])


def expected(x, w, range_):
    """A product in int8 of ``x`` in a static range and ``w`` by columns, in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    scale, scales = range_ / 127, np.abs(w).max(0) / 127
    return (np.clip(np.round(x / scale), -127, 127) * scale) @ (np.round(w / scales) * scales)


def nnx_steps():
    model = xla.quantize_model(
        nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0)), TRAINS, BATCHES[0]
    )

    @nnx.jit
    def step(model, x):
        return nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)

    return model, step, lambda model: model.kernel.get_value()


def linen_steps():
    net = linen.Dense(4, use_bias=False)
    model = net.bind(net.init(jax.random.key(0), BATCHES[0]))
    model = xla.quantize_model(model, TRAINS, BATCHES[0])

    def step(model, x):
        module, variables = model.unbind()
        loss = jax.jit(jax.grad(lambda v: jnp.sum(module.apply(v, x) ** 2)))
        return loss(variables)

    return model, step, lambda model: model.variables["params"]["kernel"]


def equinox_steps():
    net = eqx.nn.Linear(8, 4, use_bias=False, key=jax.random.key(0))
    model = xla.quantize_model(net, TRAINS, BATCHES[0][0])

    @eqx.filter_jit
    def step(model, x):
        return eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(x) ** 2))(model)

    return model, step, lambda model: model.weight.T


@pytest.mark.parametrize("make", [nnx_steps, linen_steps, equinox_steps])
def test_a_model_in_training_collects_ranges_for_inference(make):
    model, step, weight = make()
    for x in BATCHES:
        step(model, x)
    is_mapped = make is equinox_steps
    example = BATCHES[0][0] if is_mapped else BATCHES[0]
    static = xla.quantize_model(model, INFERS, example)
    step(model, 100 * BATCHES[0])  # what inference must not follow

    y = jax.vmap(static)(BATCHES[0]) if is_mapped else static(BATCHES[0])
    want = expected(BATCHES[0], weight(model), range_of(BATCHES))
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_ranges_that_are_given_stay_as_they_are():
    net = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
    ranges = xla.calibrate_model(net, TRAINS, [(BATCHES[0],)])
    model = xla.quantize_model(net, TRAINS, BATCHES[0], statistics=ranges)
    model(BATCHES[2])
    want = expected(BATCHES[2], net.kernel.get_value(), range_of(BATCHES[:1]))
    np.testing.assert_allclose(model(BATCHES[2]), want, rtol=1e-4, atol=1e-4)


def test_a_file_has_what_a_model_has_collected(tmp_path):
    def net():
        return nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))

    model = xla.quantize_model(net(), TRAINS, BATCHES[0])
    for x in BATCHES[:2]:
        model(x)
    xla.save_model(tmp_path / "net", model)
    loaded = xla.quantize_model(nnx.eval_shape(net), TRAINS, BATCHES[0])
    loaded = xla.load_model(tmp_path / "net", loaded)
    loaded(BATCHES[2])  # goes on where the other one was

    static = xla.quantize_model(loaded, INFERS, BATCHES[0])
    want = expected(BATCHES[0], net().kernel.get_value(), range_of(BATCHES))
    np.testing.assert_allclose(static(BATCHES[0]), want, rtol=1e-4, atol=1e-4)


def test_histories_of_delayed_scaling_are_collected():
    rule = xla.QtRule(
        weight_qtype="float8_e4m3fn",
        act_qtype="float8_e4m3fn",
        bwd_qtype="float8_e5m2",
        bwd_static_scale=True,
        static_average=qn.AmaxHistory(2),
    )
    net = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
    model = xla.quantize_model(net, xla.QtProvider(rule), BATCHES[0])

    @nnx.jit
    def gradient(model):
        loss = nnx.value_and_grad(lambda model: 1e6 * jnp.sum(model(BATCHES[0])))
        return loss(model)[1].kernel.get_value()

    exact = np.asarray(BATCHES[0], np.float64).sum(0)[:, None] * 1e6 * np.ones(4)
    first, second = gradient(model), gradient(model)
    # The first step has scale 1, out of whose range the gradient lies. The next one has its own.
    assert np.abs(np.asarray(first) - exact).max() > 0.5 * np.abs(exact).max()
    np.testing.assert_allclose(second, exact, atol=0.2 * np.abs(exact).max())

"""quantize_model on Equinox."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.bridge_nets import (
    TOKENS,
    WIDTH,
    close,
    count_stored,
    dequantized,
    differs,
    equinox_classes,
    equinox_net,
    ptq,
    qat,
)
from jaxtap_testkit.numbers import normal
from provider_xla import (
    PtqProvider,
    QtRule,
    QuantizationError,
    QuantizationRule,
    calibrate_model,
    model_plan,
    quantize_model,
)

pytestmark = pytest.mark.sample(2)

eqx = pytest.importorskip("equinox")
ROW = TOKENS[0]


def run(model, *args):
    return eqx.filter_jit(lambda model, *args: model(*args))(model, *args)


def rows(model, xs):
    return eqx.filter_jit(lambda model, xs: jax.vmap(model)(xs))(model, xs)


def plain_of(model, net):
    """The float model with the dequantized parameters of the quantized one."""
    leaves = jax.tree.leaves(dequantized(eqx.filter(model, eqx.is_array)))
    arrays, rest = eqx.partition(net, eqx.is_array)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), rest)


def linear():
    return eqx.nn.Linear(WIDTH, 8, key=jax.random.key(1)), jax.random.normal(
        jax.random.key(0), (WIDTH,)
    )


def test_it_computes_what_the_float_model_does_with_dequantized_weights():
    net = equinox_net(block=equinox_classes()[1])
    model = quantize_model(net, ptq(), ROW)
    assert isinstance(model, type(net))
    assert type(model).__name__ == "Net"
    assert count_stored(model) == 13
    assert count_stored(net) == 0
    expected = run(plain_of(model, net), ROW)
    result = run(model, ROW)
    close(result, expected)
    differs(result, run(net, ROW))
    # Under vmap, from inside and outside, the weights are the stored ones.
    close(rows(model, TOKENS)[0], expected)
    close(
        run(model.blocks[1].mlp, jnp.ones(WIDTH)),
        run(plain_of(model, net).blocks[1].mlp, jnp.ones(WIDTH)),
    )


def test_paths_are_attributes_without_equinoxs_own_scopes():
    rules = [
        QuantizationRule(module_path="head"),
        QuantizationRule(module_path=r"blocks/\d/attn/.*", weight_qtype="int4"),
        QuantizationRule(module_path="blocks/1/mlp/layers/0", weight_qtype="int8"),
    ]
    model = quantize_model(equinox_net(block=equinox_classes()[1]), ptq(*rules), ROW)
    ids = {op.op_id: op for op in model_plan(model).ops}
    assert ids["blocks/0/attn/query_proj/matmul:0"].paths == (
        "args[0].blocks[0].attn.query_proj.weight",
    )
    assert ids["head/matmul:0"].reason == "the rule leaves it float"
    assert model.blocks[0].attn.key_proj.weight.qtype == "int4"
    assert model.blocks[1].mlp.layers[0].weight.qtype == "int8"
    assert count_stored(model) == 9


def test_ids_are_those_of_a_plain_function_under_the_same_scopes():
    class Small(eqx.Module):
        parts: dict

        def __call__(self, x):
            return self.parts["b"](jax.nn.relu(self.parts["a"](x)))

    def plain(params, x):
        for name in "ab":
            with jax.named_scope("parts"), jax.named_scope(name):
                x = params[name] @ x
            x = jax.nn.relu(x) if name == "a" else x
        return x

    layers = {name: eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0)) for name in "ab"}
    ops = model_plan(quantize_model(Small(layers), ptq(), jnp.ones(4))).ops
    params = {name: layer.weight for name, layer in layers.items()}
    assert [op.op_id for op in ops] == [
        op.op_id for op in ptq().plan(plain, params, jnp.ones(4)).ops
    ]
    assert [op.op_id for op in ops] == ["parts/a/matmul:0", "parts/b/matmul:0"]


@pytest.mark.slow
def test_it_trains():
    optax = pytest.importorskip("optax")
    model = quantize_model(equinox_net(), qat())
    labels, optimizer = jnp.array([0, 2]), optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, state):
        def loss(model):
            logits = jax.nn.log_softmax(jax.vmap(model)(TOKENS))
            return -jnp.mean(logits[jnp.arange(2), labels])

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state)
        return value, eqx.apply_updates(model, updates), state

    state, losses = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        for _ in range(20):
            value, model, state = step(model, state)
            losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    assert isinstance(model, equinox_classes()[0])
    stored = quantize_model(model, ptq(), ROW)
    assert (jnp.argmax(rows(stored, TOKENS), 1) == labels).all()
    with pytest.raises(QuantizationError, match="already"):
        quantize_model(stored, ptq(), ROW)


@pytest.mark.sample(1)
@pytest.mark.parametrize("decorator", [eqx.filter_jit, jax.jit, eqx.filter_checkpoint])
def test_transformed_methods_and_parts(decorator):
    class Layer(eqx.Module):
        linear: eqx.nn.Linear

        @decorator
        def __call__(self, x):
            return jnp.tanh(x @ self.linear.weight.T)

    class Net(eqx.Module):
        layers: list

        def __call__(self, x):
            x = self.layers[0](x)
            x = eqx.filter_checkpoint(self.layers[1])(x)
            return eqx.filter_jit(self.layers[2])(x)

    keys = jax.random.split(jax.random.key(0), 3)
    net = Net([Layer(eqx.nn.Linear(WIDTH, WIDTH, key=key)) for key in keys])
    x = normal(4, WIDTH, seed=1)
    model = quantize_model(net, ptq(), x)
    ids = [op.op_id for op in model_plan(model).ops]
    assert ids == [f"layers/{i}/matmul:0" for i in range(3)]
    assert count_stored(model) == 3
    close(run(model, x), run(plain_of(model, net), x))


@pytest.mark.slow
def test_a_jitted_method_with_a_vmap_inside():
    plain = equinox_classes()[1]

    class Block(plain):
        @eqx.filter_jit
        def __call__(self, x):
            return plain.__call__(self, x)

    net = equinox_net(block=Block)
    assert count_stored(quantize_model(net, ptq(), ROW)) == 13


@pytest.mark.slow
@pytest.mark.parametrize("part", [eqx.filter_checkpoint, eqx.filter_jit, lambda f: f])
def test_a_vmap_in_a_part(part):
    class Net(eqx.Module):
        linear: eqx.nn.Linear
        experts: jax.Array

        def __call__(self, x):
            def rows(linear, experts, x):
                mixed = jax.vmap(lambda expert: expert @ x.T)(experts)
                return jax.vmap(linear)(x) + mixed.sum(0).T

            return part(rows)(self.linear, self.experts, x)

    draw = np.random.default_rng(0)
    experts = jnp.asarray(draw.normal(size=(3, 4, 4)), "float32")
    net = Net(eqx.nn.Linear(4, 4, key=jax.random.key(0)), experts)
    x = jnp.asarray(draw.normal(size=(2, 4)), "float32")
    model = quantize_model(net, ptq(), x)
    assert count_stored(model) == 2
    close(run(model, x), run(plain_of(model, net), x))


@pytest.mark.slow
def test_a_derivative_inside_of_a_checkpoint_is_quantized():
    class Net(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            def slope(linear, x):
                return jax.grad(lambda x: jnp.sum(linear(x) ** 2))(x)

            return eqx.filter_checkpoint(slope)(self.linear, x)

    net, x = Net(eqx.nn.Linear(4, 4, key=jax.random.key(0))), jnp.arange(4.0)
    rule = QuantizationRule(weight_qtype="int8")
    model = quantize_model(net, PtqProvider(rule, strict=True), x)
    weight, bias = (np.asarray(part, np.float64) for part in (net.linear.weight, net.linear.bias))
    scale = np.abs(weight).max(1, keepdims=True) / 127
    weight = np.round(weight / scale) * scale
    np.testing.assert_allclose(model(x), 2 * (weight @ np.arange(4) + bias) @ weight, rtol=1e-5)
    assert np.abs(model(x) - net(x)).max() > 1e-4


@pytest.mark.slow
def test_scan_over_stacked_blocks_and_a_batch_of_models():
    class Layer(eqx.Module):
        weight: jax.Array

        def __init__(self, key):
            self.weight = jax.random.normal(key, (WIDTH, WIDTH)) / 4

        def __call__(self, x):
            return jnp.tanh(x @ self.weight)

    class Stack(eqx.Module):
        layers: Layer

        def __call__(self, x):
            arrays, rest = eqx.partition(self.layers, eqx.is_array)

            def step(x, arrays):
                return eqx.combine(arrays, rest)(x), None

            return jax.lax.scan(step, x, arrays)[0]

    layers = eqx.filter_vmap(Layer)(jax.random.split(jax.random.key(0), 3))
    net, x = Stack(layers), jnp.ones((2, WIDTH))
    model = quantize_model(net, ptq(), x)
    assert [op.op_id for op in model_plan(model).ops] == ["layers/scan(step)/matmul:0"]
    assert model.layers.weight.scale.shape == (3, 1, WIDTH)
    close(run(model, x), run(plain_of(model, net), x))

    models = quantize_model(layers, qat())
    every = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))(models, x)
    first = quantize_model(jax.tree.map(lambda leaf: leaf[0], layers), qat())
    close(every[0], first(x))


def test_state_and_dropout():
    class Net(eqx.Module):
        up: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        drop: eqx.nn.Dropout

        def __init__(self, key):
            self.up = eqx.nn.Linear(WIDTH, WIDTH, key=key)
            self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")
            self.drop = eqx.nn.Dropout(0.5)

        def __call__(self, x, state, key):
            x, state = self.norm(self.up(x), state)
            return self.drop(x, key=key), state

    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    x, keys = (
        normal(8, WIDTH, seed=1),
        jax.random.split(jax.random.key(2), 8),
    )

    def batch(model, state):
        @eqx.filter_jit
        def run(model, state):
            axes = {"axis_name": "batch", "in_axes": (0, None, 0), "out_axes": (0, None)}
            return jax.vmap(model, **axes)(x, state, keys)

        return run(model, state)

    class Batched(eqx.Module):
        net: Net

        def __call__(self, x, state, keys):
            call = jax.vmap(self.net, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
            return call(x, state, keys)

    model = quantize_model(Batched(net), ptq(), x, state, keys)
    assert [op.op_id for op in model_plan(model).ops] == ["net/up/matmul:0"]
    expected, changed = batch(plain_of(model, Batched(net)).net, state)
    result, after = eqx.filter_jit(model)(x, state, keys)
    close(result, expected)
    jax.tree.map(close, jax.tree.leaves(after), jax.tree.leaves(changed))
    # A quantized model inside of vmap, with its collectives.
    trained, after = batch(quantize_model(net, qat()), state)
    differs(trained, batch(net, state)[0])


def test_what_a_method_returns_is_quantized_and_has_its_path():
    class Net(eqx.Module):
        parts: list
        scale: jax.Array

        def __call__(self, x):
            return self.pick(1)(x) * self.scale

        def pick(self, i):
            return self.parts[i]

        def scaled(self, scale):
            return eqx.tree_at(lambda net: net.scale, self, scale)

    class Outer(eqx.Module):
        net: Net

        def __call__(self, x):
            return self.net.pick(0)(x) + self.net.scaled(2.0)(x)

    keys = jax.random.split(jax.random.key(0))
    net = Net([eqx.nn.Linear(WIDTH, 4, key=key) for key in keys], jnp.array(3.0))
    x = jnp.ones(WIDTH)
    model = quantize_model(Outer(net), ptq(), x)
    ids = [op.op_id for op in model_plan(model).ops]
    assert ids == ["net/parts/0/matmul:0", "net/parts/1/matmul:0"]
    close(run(model, x), run(plain_of(model, Outer(net)), x))
    close(model.net.scaled(jnp.array(6.0))(x), 2 * model.net(x))


@pytest.mark.slow
def test_saved_and_loaded(tmp_path):
    net, x = linear()
    model = quantize_model(net, ptq(), x)
    path = str(tmp_path / "model.eqx")
    eqx.tree_serialise_leaves(path, model)
    like = quantize_model(jax.tree.map(jnp.ones_like, net), ptq(), x)
    read = eqx.tree_deserialise_leaves(path, like)
    np.testing.assert_array_equal(read(x), model(x))
    np.testing.assert_array_equal(copy.deepcopy(model)(x), model(x))
    changed = eqx.tree_at(lambda model: model.bias, model, model.bias + 1)
    close(changed(x), model(x) + 1)


@pytest.mark.slow
def test_static_ranges_and_random_keys():
    net, x = linear()
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    mlp = eqx.nn.MLP(WIDTH, 4, 8, 1, key=jax.random.key(0))  # holds functions, too
    ranges = calibrate_model(mlp, ptq(rule), [(x,)])
    assert sorted(ranges) == ["layers/0/matmul:0#rhs", "layers/1/matmul:0#rhs"]
    ranges = calibrate_model(net, ptq(rule), [(x,), (x / 2,)])
    static = quantize_model(net, ptq(rule), x, statistics=ranges)
    np.testing.assert_array_equal(static(1e3 * jnp.sign(x)), static(1e6 * jnp.sign(x)))
    noisy = QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform"
    )

    class Contraction(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return x @ self.weight

    model, xs = quantize_model(Contraction(net.weight.T), qat(noisy)), jnp.stack([x, x / 3, x**2])

    @jax.jit
    def grad(key):
        return eqx.filter_grad(lambda model: jnp.sum(model(xs, quant_key=key) ** 2))(model).weight

    assert (grad(jax.random.key(0)) != grad(jax.random.key(1))).any()

"""quantize_model on Flax Linen."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interception_core import JaxtapError
from jaxtap_testkit.bridge_nets import (
    TOKENS,
    WIDTH,
    close,
    count_stored,
    dequantized,
    differs,
    linen_classes,
    linen_net,
    ptq,
    qat,
)
from jaxtap_testkit.numbers import normal
from provider_xla import (
    QtRule,
    QuantizationError,
    QuantizationRule,
    calibrate_model,
    model_plan,
    quantize_model,
)

pytestmark = pytest.mark.sample(2)

linen = pytest.importorskip("flax.linen")
serialization = pytest.importorskip("flax.serialization")


def dense(**options):
    net, x = linen.Dense(8, **options), normal(4, WIDTH)
    return net, net.init(jax.random.key(1), x), x


@pytest.mark.slow
def test_a_bound_module_holds_stored_variables():
    net, variables = linen_net(block=linen_classes()[1])
    model = quantize_model(net.bind(variables), ptq(), TOKENS)
    assert isinstance(model, type(net))
    module, stored = model.unbind()
    assert count_stored(stored) == 13
    assert count_stored(variables) == 0
    expected = jax.jit(net.apply)(dequantized(stored), TOKENS)
    result = jax.jit(module.apply)(stored, TOKENS)
    close(result, expected)
    close(jax.jit(lambda v, x: module.bind(v)(x))(stored, TOKENS), expected)
    differs(result, jax.jit(net.apply)(variables, TOKENS))
    # Float variables are quantized each time.
    close(jax.jit(module.apply)(variables, TOKENS), expected)
    # Paths are those of provider.apply(net.apply), with the class of the model first.
    ids = {op.op_id for op in model_plan(model).ops}
    assert ids == {op.op_id for op in ptq().plan(net.apply, variables, TOKENS).ops}
    assert "Net/block_0/attn/query/dot_general:0" in ids


def test_rules_go_by_linens_paths():
    net, variables = linen_net()
    rules = [
        QuantizationRule(module_path="Net/head"),
        QuantizationRule(module_path="Net/block_1/.*", weight_qtype="int8"),
    ]
    stored = quantize_model(net.bind(variables), ptq(*rules), TOKENS).variables["params"]
    assert count_stored(stored) == count_stored(stored["block_1"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["jit", "remat", "scan"])
def test_lifted_transformations(transform):
    block = linen_classes()[2]
    if transform == "scan":

        class Net(linen.Module):
            @linen.compact
            def __call__(self, x):
                step = linen.scan(
                    lambda block, x, _: (block(x), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=3,
                )
                return step(block(WIDTH, name="block"), x, None)[0]

        net = Net()
    else:
        net = getattr(linen, transform)(block)(WIDTH)
    x = normal(2, 3, WIDTH)
    variables = net.init(jax.random.key(1), x)
    module, stored = quantize_model(net.bind(variables), ptq(), x).unbind()
    assert count_stored(stored) == 2
    close(jax.jit(module.apply)(stored, x), jax.jit(net.apply)(dequantized(stored), x))


def test_it_trains():
    optax = pytest.importorskip("optax")
    net, variables = linen_net()
    model = quantize_model(net, qat())
    structure = jax.tree.structure(model.init(jax.random.key(0), TOKENS))
    assert structure == jax.tree.structure(variables)
    optimizer, labels = optax.adam(1e-2), jnp.array([0, 2])

    @jax.jit
    def step(variables, state):
        def loss(variables):
            logits = jax.nn.log_softmax(model.apply(variables, TOKENS))
            return -jnp.mean(logits[jnp.arange(2), labels])

        value, grads = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(grads, state)
        return value, optax.apply_updates(variables, updates), state

    state, losses = optimizer.init(variables), []
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        for _ in range(20):
            value, variables, state = step(variables, state)
            losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    stored = quantize_model(model.bind(variables), ptq(), TOKENS)
    assert (jnp.argmax(jax.jit(lambda: stored(TOKENS))(), 1) == labels).all()
    with pytest.raises(QuantizationError, match="already"):
        quantize_model(stored, ptq(), TOKENS)


class Stateful(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        self.sow("intermediates", "seen", x)
        x = linen.Dense(WIDTH, name="up")(x)
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return linen.Dropout(0.5, deterministic=not train)(x)

    def twice(self, x):
        return 2 * x


@pytest.mark.sample(1)
@pytest.mark.parametrize("bound", [True, False])
def test_mutable_collections_and_random_keys(bound):
    net, x = Stateful(), normal(8, WIDTH, seed=3)
    variables = net.init(jax.random.key(0), x, False)
    keys, mutable = {"dropout": jax.random.key(5)}, ["batch_stats", "intermediates"]
    model = quantize_model(net.bind(variables, rngs=keys, mutable=mutable), ptq(), x, True)
    module, stored = model.unbind()
    expected, changed = net.apply(dequantized(stored), x, True, rngs=keys, mutable=mutable)
    if bound:
        result, state = model(x, True), model.variables
        assert count_stored(state["params"]) == 1
    else:
        result, state = module.apply(stored, x, True, rngs=keys, mutable=mutable)
    close(result, expected)  # with the same dropout
    for name in mutable:
        jax.tree.map(close, state[name], changed[name])
    assert module.apply(stored, x, method="twice").shape == x.shape
    assert module.apply(stored, x, method=Stateful.twice).shape == x.shape


@pytest.mark.slow
def test_a_quantized_module_in_another_one():
    class Outer(linen.Module):
        inner: linen.Module

        @linen.compact
        def __call__(self, x):
            return linen.Dense(4, name="last")(self.inner(x))

    net, _, x = dense()
    model = Outer(quantize_model(net, qat()))
    variables = model.init(jax.random.key(0), x)
    assert jax.tree.structure(variables) == jax.tree.structure(
        Outer(net).init(jax.random.key(0), x)
    )
    inner = variables["params"]["inner"]
    quantized = qat().apply(net.apply)({"params": inner}, x)
    last = variables["params"]["last"]
    result = jax.jit(model.apply)(variables, x)
    close(result, quantized @ last["kernel"] + last["bias"])
    differs(result, Outer(net).apply(variables, x))
    # Its variables can be stored too.
    stored = quantize_model(net.bind({"params": inner}), ptq(), x).variables["params"]
    variables["params"]["inner"] = stored
    kernel = dequantized(stored)["kernel"]
    expected = (x @ kernel + inner["bias"]) @ last["kernel"] + last["bias"]
    close(Outer(quantize_model(net, ptq())).apply(variables, x), expected)


@pytest.mark.slow
def test_saved_by_flax_and_loaded():
    net, variables, x = dense()
    model = quantize_model(net.bind(variables), ptq(), x)
    module, stored = model.unbind()
    written = serialization.to_bytes(stored)
    assert len(written) < len(serialization.to_bytes(variables))
    other = quantize_model(net.bind(jax.tree.map(jnp.ones_like, variables)), ptq(), x)
    read = serialization.from_bytes(other.variables, written)
    np.testing.assert_array_equal(module.apply(read, x), module.apply(stored, x))
    tiled = QuantizationRule(weight_qtype="int4", tile_size=4)
    with pytest.raises(ValueError, match="same rules"):
        serialization.from_bytes(
            quantize_model(net.bind(variables), ptq(tiled), x).variables, written
        )


@pytest.mark.slow
def test_static_ranges_and_random_keys():
    net, variables, x = dense()
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    ranges = calibrate_model(net.bind(variables), ptq(rule), [(x,), (x / 2,)])
    static = quantize_model(net.bind(variables), ptq(rule), x, statistics=ranges)
    np.testing.assert_array_equal(static(1e3 * jnp.sign(x)), static(1e6 * jnp.sign(x)))
    module = quantize_model(net, ptq(rule), statistics=ranges)
    close(module.apply(static.variables, x), static(x))
    with pytest.raises(QuantizationError, match="bind"):
        calibrate_model(net, ptq(rule), [(x,)])

    noisy = QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform"
    )
    model = quantize_model(net, qat(noisy))

    @jax.jit
    def grad(key):
        def loss(variables):
            return jnp.sum(model.apply(variables, x, quant_key=key) ** 2)

        return jax.grad(loss)(variables)["params"]["kernel"]

    first, other = grad(jax.random.key(0)), grad(jax.random.key(1))
    np.testing.assert_array_equal(first, grad(jax.random.key(0)))
    assert (first != other).any()
    with pytest.raises(JaxtapError, match="quant_key"):
        jax.grad(lambda variables: jnp.sum(model.apply(variables, x)))(variables)


def test_it_says_what_an_unbound_module_lacks():
    net, variables, x = dense()
    with pytest.raises(QuantizationError, match=r"net\.bind\(variables\)"):
        quantize_model(net, ptq(), x)
    with pytest.raises(QuantizationError, match="example inputs"):
        quantize_model(net.bind(variables), ptq())
    assert model_plan(quantize_model(net, ptq())) is None


class Parts(linen.Module):
    """A module whose parts are fields, and made in ``setup``, alone and in a list."""

    inner: linen.Module

    def setup(self):
        self.layers = [linen.Dense(WIDTH), linen.Dense(WIDTH)]

    def __call__(self, x):
        return self.inner(self.layers[1](self.layers[0](x)))


class Whole(linen.Module):
    def setup(self):
        self.parts, self.head = Parts(linen.Dense(8)), linen.Dense(4)

    def __call__(self, x):
        return self.head(self.parts(x))

    def features(self, x):
        return self.parts(x)


def test_parts_of_a_bound_module():
    x, net = jax.random.normal(jax.random.key(0), (4, WIDTH)), Whole()
    model = net.bind(net.init(jax.random.key(1), x))
    fields = {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}
    fields["act_batch_axes"] = ()
    # By paths and ids from the whole model, whose other parts stay float.
    provider = ptq(QuantizationRule(module_path="Whole/parts/.*", **fields))
    ranges = calibrate_model(model, provider, [(x,)])
    quantized = quantize_model(model, provider, x, statistics=ranges)
    assert isinstance(quantized.parts, Parts)
    assert quantized.parts is quantized.parts
    for run in (
        lambda net: net.parts(x),
        lambda net: net.features(x),  # not named in `methods`
        lambda net: net.parts.layers[0](x),
        lambda net: net.parts.inner(0.2 * x),
        lambda net: linen.apply(lambda bound: bound.parts(x), net)(net.unbind()[1]),
    ):
        expected = run(model)
        assert 0.001 < np.linalg.norm(run(quantized) - expected) / np.linalg.norm(expected) < 0.03
    np.testing.assert_array_equal(quantized(x), quantized.head(quantized.parts(x)))
    again = pickle.loads(pickle.dumps(quantized))
    np.testing.assert_array_equal(again.parts(x), quantized.parts(x))
    head, variables = quantized.head.unbind()
    assert head.apply(variables, x[:, :8]).shape == (4, 4)

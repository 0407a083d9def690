"""quantize_model with a rank: adapters are trainable state of the returned object."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.bridge_nets import (
    TOKENS,
    close,
    equinox_net,
    linen_net,
    nnx_net,
)
from jaxtap_testkit.numbers import normal
from provider_xla import (
    AdaptedWeight,
    LoraRule,
    PtqProvider,
    QtProvider,
    QuantizationError,
    QuantizationRule,
    adapter_mask,
    merge_model,
    model_plan,
    quantize_model,
)

nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
eqx = pytest.importorskip("equinox")
traverse_util = pytest.importorskip("flax.traverse_util")

QLORA = LoraRule(module_path=".*(up|down)", weight_qtype="int8", rank=2, alpha=4.0)
LABELS = jnp.asarray([0, 2])


def ptq(rule=QLORA):
    return PtqProvider(rule)


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def test_adapters_have_the_sharding_metadata_of_their_parameter():
    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
            self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))

    def specs(make):
        with jax.set_mesh(mesh):
            net = make()
        model = quantize_model(net, ptq(), normal(4, 8))
        return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.LoRAParam)))

    def make():
        return Net(nnx.Rngs(0))

    mesh = jax.make_mesh((1, 1), ("in", "out"), axis_types=(AxisType.Auto,) * 2)

    wanted = {"kernel_lora_a": P("in", None), "kernel_lora_b": P(None, "out")}
    plain = {"kernel_lora_a": P(), "kernel_lora_b": P()}
    assert specs(make) == {"up": wanted, "down": plain}
    assert specs(lambda: nnx.eval_shape(make)) == {"up": wanted, "down": plain}


@pytest.mark.parametrize("partitioning", ["with_partitioning", "with_logical_partitioning"])
def test_adapters_of_linen_have_it_too(partitioning):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = getattr(linen, partitioning)(linen.initializers.lecun_normal(), ("in", "out"))
            return linen.Dense(8, name="down")(linen.Dense(16, kernel_init=init, name="up")(x))

    x, net = normal(4, 8), Net()
    variables = net.init(jax.random.key(0), x)
    model = quantize_model(net.bind(variables), ptq(), x)
    module, stored = model.unbind()
    adapters = linen.get_partition_spec(stored["lora"])
    up, down = (adapters[name]["kernel"].arrays for name in ("up", "down"))
    assert (up, down) == ({"a": P("in", None), "b": P(None, "out")}, {"a": P(), "b": P()})
    b = normal(2, 16)
    boxed = stored["lora"]["up"]["kernel"]
    mask = adapter_mask(stored)["lora"]["up"]["kernel"].arrays
    assert jax.tree.structure(mask) == jax.tree.structure(boxed.arrays)
    lora = AdaptedWeight(
        None, {**boxed.arrays, "b": boxed.arrays["b"].replace(value=b)}, boxed.form
    )
    trained = {**stored, "lora": {**stored["lora"], "up": {"kernel": lora}}}
    merged = merge_model(module.bind(trained))
    kernel = merged.variables["params"]["up"]["kernel"]
    assert kernel.names == ("in", "out")
    a = np.float64(boxed.arrays["a"].value)
    w = np.float64(stored["params"]["up"]["kernel"].value.restore())
    wanted = w + QLORA.alpha / QLORA.rank * a @ np.float64(b)
    np.testing.assert_allclose(kernel.value, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(module.apply(trained, x), merged(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_nnx_trains_adapters_with_its_own_optimizer():
    net = nnx_net()
    model = quantize_model(net, ptq(), TOKENS)
    assert sorted(model_plan(model).adapters) == [
        f"args[0]['blocks'][{i}]['{name}']['kernel']" for i in (0, 1) for name in ("down", "up")
    ]
    plain = quantize_model(
        net,
        PtqProvider(QuantizationRule(module_path=QLORA.module_path, weight_qtype="int8")),
        TOKENS,
    )
    forward = nnx.jit(lambda model: model(TOKENS))
    np.testing.assert_array_equal(forward(model), forward(plain))  # B is zero
    up = model.blocks[0].up
    assert type(up.kernel_lora_a) is nnx.LoRAParam
    assert (up.kernel_lora_a.shape, up.kernel_lora_b.shape) == ((16, 2), (2, 32))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.LoRAParam)
    frozen = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.LoRAParam)))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return cross_entropy(model(TOKENS))

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(25)]
    assert losses[-1] < 0.3 * losses[0]
    for one, other in zip(
        frozen, jax.tree.leaves(nnx.state(model, nnx.Not(nnx.LoRAParam))), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    merged = merge_model(model)
    assert type(merged) is type(net)
    assert not nnx.to_flat_state(nnx.state(merged, nnx.LoRAParam))
    close(forward(merged), forward(model), 2e-5)
    kernel = np.asarray(up.kernel.get_raw_value().restore(), np.float64)
    expected = kernel + 2 * np.asarray(up.kernel_lora_a[...], np.float64) @ np.asarray(
        up.kernel_lora_b[...], np.float64
    )
    np.testing.assert_allclose(merged.blocks[0].up.kernel[...], expected, rtol=1e-5, atol=1e-5)
    # It is a float model again.
    again = quantize_model(merged, ptq(), TOKENS)
    close(forward(again), forward(merged), 0.05)


@pytest.mark.slow
def test_parts_of_an_nnx_model_run_with_their_adapters():
    model = quantize_model(nnx_net(), ptq(), TOKENS)
    x = normal(2, 7, 16, seed=1)
    before = model.blocks[1](x)
    model.blocks[1].up.kernel_lora_b[...] += 1.0
    assert np.abs(np.asarray(model.blocks[1](x) - before)).max() > 0.1
    merged = merge_model(model)
    close(model.blocks[1](x), merged.blocks[1](x), 2e-5)


@pytest.mark.slow
def test_a_tied_table_has_one_adapter():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(11, 8, rngs=rngs)
            self.output = nnx.Linear(8, 8, rngs=rngs)
            self.again = self.output

        def __call__(self, tokens):
            return self.embed.attend(self.again(self.output(self.embed(tokens))))

    rule = LoraRule(weight_qtype="int8", rank=2)
    model = quantize_model(Tied(nnx.Rngs(0)), ptq(rule), TOKENS)
    variables = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    assert len(variables) == 4
    assert model.again.kernel_lora_a is model.output.kernel_lora_a
    for _, variable in variables:
        variable[...] = variable[...] + 0.1
    close(model(TOKENS), merge_model(model)(TOKENS), 1e-4)


@pytest.mark.slow
def test_lists_of_parameters_and_stacks_of_modules():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return x + nnx.relu(self.up(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.list = nnx.List([nnx.Param(rngs.params.normal((8, 8))) for _ in range(2)])
            make = nnx.split_rngs(splits=3)(nnx.vmap(Block))
            self.blocks = make(rngs)

        def __call__(self, x):
            for weight in self.list:
                x = jnp.tanh(x @ weight[...])
            axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
            return nnx.scan(lambda block, x: block(x), **axes)(self.blocks, x)

    x = normal(4, 8)
    rule = LoraRule(weight_qtype="int8", rank=2)
    model = quantize_model(Net(nnx.Rngs(0)), ptq(rule), x)
    variables = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    assert {"/".join(path): variable.shape for path, variable in variables} == {
        "blocks/up/kernel_lora_a": (3, 8, 2),
        "blocks/up/kernel_lora_b": (3, 2, 8),
        "list_0_lora_a": (8, 2),
        "list_0_lora_b": (2, 8),
        "list_1_lora_a": (8, 2),
        "list_1_lora_b": (2, 8),
    }
    before = model(x)
    for _, variable in variables:
        variable[...] = variable[...] + 0.1
    differ = np.abs(np.asarray(model(x) - before)).max()
    assert differ > 0.05
    close(model(x), merge_model(model)(x), 1e-4)


@pytest.mark.slow
def test_a_decoder_with_einsum_projections_is_trained_by_a_trainer_of_adapters():
    """Train einsums, grouped heads and a tied table."""
    heads, groups, width = 4, 2, 4

    class Einsum(nnx.Module):
        def __init__(self, spec, shape, rngs):
            self.spec = spec
            self.w = nnx.Param(rngs.params.normal(shape) * shape[0] ** -0.5)

        def __call__(self, x):
            return jnp.einsum(self.spec, x, self.w[...])

    class Norm(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(16))

        def __call__(self, x):
            return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.w[...]

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.before, self.after = Norm(), Norm()
            self.q = Einsum("BTD,DNH->BTNH", (16, heads, width), rngs)
            self.kv = Einsum("BSD,CDKH->CBSKH", (2, 16, groups, width), rngs)
            self.o = Einsum("BTNH,NHD->BTD", (heads, width, 16), rngs)
            self.gate = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

        def __call__(self, x, mask):
            h = self.before(x)
            q, (k, v) = self.q(h), self.kv(h)
            q = q.reshape(*q.shape[:2], groups, heads // groups, width)
            scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k) / width**0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
            attended = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)
            x = x + self.o(attended.reshape(*x.shape[:2], heads, width))
            return x + self.down(nnx.silu(self.gate(self.after(x))))

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Param(rngs.params.normal((32, 16)) * 0.5)
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])
            self.norm = Norm()

        def __call__(self, tokens, positions, cache, mask):
            x = self.table[...][tokens] + jnp.sin(positions[..., None] / jnp.arange(1.0, 17.0))
            for layer in self.layers:
                x = layer(x, mask)
            return self.norm(x) @ self.table[...].T, cache

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 9)))
    positions = jnp.broadcast_to(jnp.arange(9.0), (4, 9))
    mask = jnp.tril(jnp.ones((9, 9), bool))
    rules = [
        LoraRule(module_path="layers/.*", weight_qtype="nf4", rank=4, weights_only=True),
        QuantizationRule(weight_qtype="int8", weights_only=True),
    ]
    net = Decoder(nnx.Rngs(0))
    model = quantize_model(net, PtqProvider(rules), tokens, positions, None, mask)
    assert len(model_plan(model).adapters) == 10
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.LoRAParam)
    frozen = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.LoRAParam)))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits, _ = model(tokens, positions, None, mask)
            picked = optax.softmax_cross_entropy_with_integer_labels
            return picked(logits[:, :-1], tokens[:, 1:]).mean(), logits

        state = nnx.DiffState(0, nnx.LoRAParam)
        (value, _), grads = nnx.value_and_grad(loss, argnums=state, has_aux=True)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.6 * losses[0]
    left = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.LoRAParam)))
    for one, other in zip(frozen, left, strict=True):
        np.testing.assert_array_equal(one, other)
    found, _ = model(tokens, positions, None, mask)
    expected, _ = merge_model(model)(tokens, positions, None, mask)
    close(found, expected, 1e-4)


@pytest.mark.slow
def test_linen_keeps_adapters_in_a_collection():
    net, variables = linen_net()
    bound = quantize_model(net.bind(variables), ptq(), TOKENS)
    module, stored = bound.unbind()
    lora = stored["lora"]
    assert sorted(traverse_util.flatten_dict(lora, sep="/")) == [
        f"block_{i}/{name}/kernel" for i in (0, 1) for name in ("down", "up")
    ]
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(lora):
        return cross_entropy(module.apply({**stored, "lora": lora}, TOKENS))

    @jax.jit
    def step(lora, state):
        value, grads = jax.value_and_grad(loss)(lora)
        updates, state = optimizer.update(grads, state)
        return value, optax.apply_updates(lora, updates), state

    state, losses = optimizer.init(lora), []
    for _ in range(25):
        value, lora, state = step(lora, state)
        losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    trained = module.bind({**stored, "lora": lora})
    close(trained(TOKENS), module.apply({**stored, "lora": lora}, TOKENS))
    unbound = quantize_model(net, ptq())  # holds no variables: those of a call have adapters
    close(unbound.apply({**stored, "lora": lora}, TOKENS), trained(TOKENS))
    merged = merge_model(trained)
    assert type(merged) is type(net)
    close(merged(TOKENS), trained(TOKENS), 2e-5)
    # Adapters are saved and read as Flax does.
    from flax import serialization

    read = serialization.from_bytes(stored["lora"], serialization.to_bytes(lora))
    jax.tree.map(np.testing.assert_array_equal, read, lora)


@pytest.mark.slow
def test_equinox_trains_what_its_partition_selects():
    net = equinox_net()
    rule = LoraRule(module_path=".*mlp.*", weight_qtype="int8", rank=2, alpha=4.0)
    model = quantize_model(net, ptq(rule), TOKENS[0])
    weights = [
        x
        for x in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, AdaptedWeight))
        if isinstance(x, AdaptedWeight)
    ]
    assert len(weights) == 4
    adapters, frozen = eqx.partition(model, adapter_mask(model))
    assert len(jax.tree.leaves(adapters)) == 8
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(adapters, frozen):
        return cross_entropy(jax.vmap(eqx.combine(adapters, frozen))(TOKENS))

    @eqx.filter_jit
    def step(adapters, frozen, state):
        value, grads = eqx.filter_value_and_grad(loss)(adapters, frozen)
        updates, state = optimizer.update(grads, state)
        return value, eqx.apply_updates(adapters, updates), state

    state, losses = optimizer.init(adapters), []
    for _ in range(25):
        value, adapters, state = step(adapters, frozen, state)
        losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    trained = eqx.combine(adapters, frozen)
    merged = merge_model(trained)
    assert type(merged) is type(net)
    close(jax.vmap(merged)(TOKENS), jax.vmap(trained)(TOKENS), 2e-5)


@pytest.mark.slow
def test_the_frozen_rest_gets_no_gradient():
    """No contraction has the shape of the gradient of a parameter."""
    model = quantize_model(nnx_net(), ptq(), TOKENS)
    graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(lora):
        return cross_entropy(nnx.merge(graph, lora, rest)(TOKENS))

    text = jax.jit(jax.grad(loss)).lower(lora).compile().as_text()
    shapes = set(re.findall(r"= f32\[(\S+?)\]\{\S* dot\(", text))
    assert shapes & {"16,2", "2,16"}
    assert not shapes & {"16,32", "32,16"}


@pytest.mark.slow
def test_dropout_is_drawn_from_the_key_of_a_call():
    rule = LoraRule(module_path=QLORA.module_path, rank=2, dropout=0.5)
    model = quantize_model(nnx_net(), ptq(rule), TOKENS, adapter_key=jax.random.key(7))
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        variable[...] = variable[...] + 0.5
    plain = model(TOKENS)
    dropped = [model(TOKENS, dropout_key=jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.abs(np.asarray(dropped[0] - dropped[2])).max() > 1e-3
    assert np.abs(np.asarray(dropped[0] - plain)).max() > 1e-3


def test_what_can_not_be_done_is_said():
    model = quantize_model(nnx_net(), ptq(), TOKENS)
    with pytest.raises(QuantizationError, match="merge_model"):
        quantize_model(model, ptq(), TOKENS)
    with pytest.raises(QuantizationError, match="not quantized"):
        merge_model(nnx_net())
    with pytest.raises(ValueError, match="quantize_model"):
        QtProvider(QLORA)
    with pytest.raises(QuantizationError, match="example inputs"):
        quantize_model(nnx_net(), ptq())

"""quantize_model on Flax NNX."""

import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quant_numerics as qn
from interception_core import JaxtapError
from jaxtap_testkit.bridge_nets import (
    TOKENS,
    WIDTH,
    close,
    count_stored,
    dequantized,
    differs,
    nnx_classes,
    nnx_net,
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

nnx = pytest.importorskip("flax.nnx")
TraceContextError = pytest.importorskip("flax.errors").TraceContextError


def params(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def run(model, *args, **kwargs):
    """Calls a model as people do: eagerly, many small programs are compiled."""
    return nnx.jit(lambda model, *args: model(*args, **kwargs))(model, *args)


def load(model, values):
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(model, state)
    return model


@pytest.mark.slow
def test_it_computes_what_the_float_model_does_with_dequantized_weights():
    block = nnx_classes()[1]
    net = nnx_net(block=block)
    model = quantize_model(net, ptq(), TOKENS)
    assert isinstance(model, type(net))
    assert type(model).__name__ == "Net"
    assert count_stored(params(model)) == 13  # 2 blocks of 4 + 2, and the head
    result = run(model, TOKENS)
    close(result, run(load(nnx_net(block=block), dequantized(params(model))), TOKENS))
    differs(result, run(net, TOKENS))
    graph, state = nnx.split(model)
    close(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, TOKENS), result)


@pytest.mark.slow
def test_the_given_model_stays_as_it_is_and_nothing_is_copied():
    net = nnx_net()
    expected = run(net, TOKENS)
    before = params(net)
    classes = [type(module) for _, module in nnx.iter_modules(net)]
    model = quantize_model(net, qat(), TOKENS)
    quantize_model(net, ptq(), TOKENS)
    same = jax.tree.map(lambda a, b: a is b, params(net), before)
    assert all(jax.tree.leaves(same))
    # The same buffers, in Variables of its own.
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, params(model), before)))
    model.head.bias.set_value(model.head.bias.get_value() + 1)
    assert [type(module) for _, module in nnx.iter_modules(net)] == classes
    np.testing.assert_array_equal(run(net, TOKENS), expected)


@pytest.mark.slow
def test_paths_are_attributes_and_rules_go_by_them():
    rules = [
        QuantizationRule(module_path="head"),
        QuantizationRule(module_path=r"blocks/\d/attn/(query|key)", weight_qtype="int4"),
        QuantizationRule(module_path="blocks/1.*", weight_qtype="int8"),
    ]
    model = quantize_model(nnx_net(block=nnx_classes()[1]), ptq(*rules), TOKENS)
    ops = {op.op_id: op for op in model_plan(model).ops}
    assert ops["blocks/0/attn/query/dot_general:0"].qtypes == (None, "int4")
    assert ops["blocks/1/up/dot_general:0"].paths == ("args[0]['blocks'][1]['up']['kernel']",)
    assert ops["head/dot_general:0"].reason == "the rule leaves it float"
    qtypes = {
        "/".join(map(str, path)): getattr(variable.get_raw_value(), "qtype", None)
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if path[-1] in ("kernel", "embedding")
    }
    assert qtypes["blocks/0/attn/query/kernel"] == qtypes["blocks/1/attn/key/kernel"] == "int4"
    assert qtypes["blocks/1/attn/out/kernel"] == qtypes["blocks/1/down/kernel"] == "int8"
    assert (
        qtypes["head/kernel"] is qtypes["blocks/0/up/kernel"] is qtypes["embed/embedding"] is None
    )


def test_ids_are_those_of_a_plain_function_under_the_same_scopes():
    class Ups(nnx_classes()[0]):
        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block.up(x) @ block.down.kernel.get_value()
            return x

    def plain(params, tokens):
        with jax.named_scope("embed"):
            x = jnp.take(params["embed"]["embedding"], tokens, axis=0)
        for i in range(2):
            p = params["blocks"][i]
            with jax.named_scope("blocks"), jax.named_scope(str(i)), jax.named_scope("up"):
                x = jax.lax.dot_general(x, p["up"]["kernel"], (((2,), (0,)), ((), ())))
            x = x @ p["down"]["kernel"]
        return x

    net = Ups(nnx.Rngs(0))
    ops = model_plan(quantize_model(net, ptq(), TOKENS)).ops
    expected = ptq().plan(plain, params(net), TOKENS).ops
    found = [op.op_id for op in ops if op.op_name != "take"]
    assert found == [op.op_id for op in expected if op.op_name != "take"]
    assert found[:2] == ["blocks/0/up/dot_general:0", "matmul:0"]
    assert [op.paths for op in ops] == [op.paths for op in expected]


@pytest.mark.slow
def test_a_method_that_is_not_called_call_and_a_part_of_a_model():
    net = nnx_net()
    model = quantize_model(net, ptq(), TOKENS, methods=("features", "__call__"))
    reference = load(nnx_net(), dequantized(params(model)))
    features = nnx.jit(lambda model: model.features(TOKENS))
    expected = features(reference)
    close(features(model), expected)
    x = normal(2, 7, WIDTH, seed=1)
    close(run(model.blocks[1].up, x), run(reference.blocks[1].up, x))
    # One that isn't quantized itself calls parts that are.
    close(features(quantize_model(net, ptq(), TOKENS)), expected)


@pytest.mark.slow
def test_sixteen_equal_jitted_blocks_are_traced_once():
    traces = []

    class Block(nnx_classes()[2]):
        @nnx.jit
        def __call__(self, x):
            traces.append(1)
            return super().__call__(x)

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(16)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    net, x = Stack(nnx.Rngs(0)), jnp.ones((2, 3, WIDTH))
    model = quantize_model(net, qat())

    def loss(model):
        return jnp.sum(model(x) ** 2)

    nnx.eval_shape(lambda model: model(x), model)
    assert len(traces) == 1
    traces.clear()
    nnx.eval_shape(nnx.grad(loss), model)
    assert len(traces) <= 1
    traces.clear()
    plan = model_plan(quantize_model(net, ptq(), x))
    assert len(traces) <= 1  # none where the plan finds what was traced before
    assert {op.op_id for op in plan.ops} >= {f"blocks/{i}/up/dot_general:0" for i in range(16)}
    assert len(plan.weights) == 16 * 2


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_transformed_blocks(transform):
    plain = nnx_classes()[2]

    class Block(plain):
        @transform
        def __call__(self, x):
            return plain.__call__(self, x)

    model = quantize_model(nnx_net(block=Block), ptq(), TOKENS)
    assert count_stored(params(model)) == 5
    close(run(model, TOKENS), run(load(nnx_net(), dequantized(params(model))), TOKENS))
    grad = nnx.jit(nnx.grad(lambda model: jnp.sum(model(x) ** 2)))
    x = normal(2, 7, WIDTH, seed=1)
    actual, expected = (
        nnx.to_pure_dict(grad(quantize_model(net.blocks[0], qat())))
        for net in (nnx_net(block=Block), nnx_net())
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual, expected)


@pytest.mark.slow
def test_scan_over_stacked_blocks_and_a_batch_of_models():
    block = nnx_classes()[2]

    def several(count, rngs):
        return nnx.split_rngs(splits=count)(nnx.vmap(block))(rngs)

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = several(3, rngs)

        def __call__(self, x):
            step = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return step(x, self.blocks)

    net, x = Stack(nnx.Rngs(0)), jnp.ones((2, 3, WIDTH))
    model = quantize_model(net, ptq(), x)
    kernel = model.blocks.up.kernel.get_raw_value()
    assert kernel.shape == (3, WIDTH, 32)
    assert kernel.scale.shape == (3, 1, 32)
    close(run(model, x), run(load(Stack(nnx.Rngs(0)), dequantized(params(model))), x))

    graph, state = nnx.split(several(2, nnx.Rngs(0)))
    models = quantize_model(nnx.merge(graph, state), qat())
    every = nnx.jit(nnx.vmap(lambda model, x: model(x), in_axes=(0, None)))(models, x)
    first = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
    close(every[0], run(quantize_model(first, qat()), x))


class TestState:
    def net(self):
        class Net(nnx.Module):
            def __init__(self, rngs):
                self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
                self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
                self.drop = nnx.Dropout(0.5, rngs=rngs)
                self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

            def __call__(self, x, *, rngs=None):
                self.calls.set_value(self.calls.get_value() + 1)
                self.seen = nnx.Intermediate(x)
                return self.drop(self.norm(self.up(x)), rngs=rngs)

        return Net(nnx.Rngs(0))

    x = normal(8, WIDTH, seed=3)

    @pytest.mark.slow
    @pytest.mark.parametrize("provider", [ptq, qat])
    @pytest.mark.parametrize("jitted", [True, False])
    def test_statistics_counts_and_new_variables(self, provider, jitted):
        reference = self.net()
        example = () if provider is qat else (self.x,)
        model = quantize_model(self.net(), provider(), *example)
        if provider is ptq:
            load(reference, dequantized(params(model)))

        def call(model, x):
            return model(x)

        call = nnx.jit(call) if jitted else call
        for _ in range(2):
            result = call(model, self.x)
            expected = reference(self.x)
        assert model.calls.get_value() == 2
        assert model.drop.rngs.count.get_value() == reference.drop.rngs.count.get_value() == 2
        near = 2e-5 if provider is ptq else 0.05
        close(model.norm.mean.get_value(), reference.norm.mean.get_value(), near)
        close(model.norm.var.get_value(), reference.norm.var.get_value(), near)
        close(result, expected, near)  # with the same dropout
        np.testing.assert_array_equal(model.seen.get_value(), self.x)
        if provider is ptq:
            assert isinstance(model.up.kernel.get_raw_value(), qn.QArray)

    def test_random_streams_among_the_arguments(self):
        model, reference = quantize_model(self.net(), ptq(), self.x), self.net()
        load(reference, dequantized(params(model)))
        streams, others = nnx.Rngs(5), nnx.Rngs(5)
        for _ in range(2):
            close(model(self.x, rngs=streams), reference(self.x, rngs=others))
        assert streams.dropout.count.get_value() == others.dropout.count.get_value() == 2

    def test_train_and_eval(self):
        model = quantize_model(self.net(), ptq(), self.x)
        model.eval()
        np.testing.assert_array_equal(model(self.x), model(self.x))


@pytest.mark.slow
def test_it_may_be_closed_over_as_far_as_the_float_model_may():
    x = jnp.ones((2, WIDTH))
    model = quantize_model(nnx_net().blocks[0].up, ptq(), x)
    close(jax.jit(lambda x: model(x))(x), model(x))
    assert isinstance(model.kernel.get_raw_value(), qn.QArray)
    model = quantize_model(TestState().net(), ptq(), x)
    kinds = nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngCount)
    before = nnx.to_pure_dict(nnx.state(model, kinds))
    with pytest.raises(TraceContextError):
        jax.jit(lambda x: model(x))(x)
    after = nnx.to_pure_dict(nnx.state(model, kinds))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.slow
def test_it_trains_and_is_stored_afterwards():
    optax = pytest.importorskip("optax")
    model = quantize_model(nnx_net(), qat(), TOKENS)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    labels = jnp.array([0, 2])

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = jax.nn.log_softmax(model(TOKENS))
            return -jnp.mean(logits[jnp.arange(2), labels])

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]
    stored = quantize_model(model, ptq(), TOKENS)
    assert count_stored(params(stored)) == 5
    assert model_plan(model) is not model_plan(stored)
    assert (jnp.argmax(run(stored, TOKENS), 1) == labels).all()
    with pytest.raises(QuantizationError, match="already"):
        quantize_model(stored, ptq(), TOKENS)


def test_stochastic_rounding_takes_its_key():
    rule = QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform"
    )
    model = quantize_model(nnx_net().blocks[0].up, qat(rule))
    x = normal(8, WIDTH, seed=1)

    @nnx.jit
    def kernel(model, key):
        found = nnx.grad(lambda model: jnp.sum(model(x, quant_key=key) ** 2))(model)
        return found["kernel"].get_value()

    def grad(key):
        return kernel(model, key)

    first, again, other = grad(jax.random.key(0)), grad(jax.random.key(0)), grad(jax.random.key(1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    with pytest.raises(JaxtapError, match="quant_key"):
        nnx.grad(lambda model: jnp.sum(model(x)))(model)


def test_static_ranges():
    fields = {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}
    provider, net = ptq(QuantizationRule(**fields)), nnx_net().blocks[0].up
    x = normal(4, WIDTH)
    with pytest.raises(QuantizationError, match="calibrate_model"):
        quantize_model(net, provider, x)
    ranges = calibrate_model(net, provider, [(x,), (x / 2,)])
    assert list(ranges) == ["dot_general:0#lhs"]
    static = quantize_model(net, provider, x, statistics=ranges)
    differs(static(x / 2), net(x / 2))
    # The range is fixed: larger inputs are cut off, where a dynamic one would grow.
    np.testing.assert_array_equal(static(1e3 * jnp.sign(x)), static(1e6 * jnp.sign(x)))
    trained = quantize_model(net, qat(QtRule(**fields)), statistics=ranges)
    close(trained(x), static(x), 1e-6)


@pytest.mark.slow
def test_saved_and_loaded(tmp_path):
    model = quantize_model(nnx_net(), ptq(), TOKENS)
    leaves, treedef = jax.tree.flatten(nnx.to_pure_dict(nnx.state(model)))
    np.savez(tmp_path / "model.npz", *leaves)
    with np.load(tmp_path / "model.npz") as file:
        read = jax.tree.unflatten(treedef, [jnp.asarray(file[name]) for name in file.files])
    other = quantize_model(nnx_classes()[0](nnx.Rngs(1)), ptq(), TOKENS)
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, read)
    nnx.update(other, state)
    np.testing.assert_array_equal(run(other, TOKENS), run(model, TOKENS))


def test_copies_are_quantized_as_well():
    x = jnp.ones((2, WIDTH))
    model = quantize_model(nnx_net().blocks[0].up, ptq(), x)
    expected = model(x)
    for one in (nnx.clone(model), copy.deepcopy(model), nnx.merge(*nnx.split(model))):
        np.testing.assert_array_equal(one(x), expected)


def test_abstract_models_are_planned():
    net = nnx.eval_shape(lambda: TestState().net())
    model = quantize_model(net, qat(), jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))
    assert [op.op_id for op in model_plan(model).ops] == ["up/dot_general:0"]


def test_shared_modules_and_sequences_have_the_first_path():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.b = self.a
            self.c = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.relu)

        def __call__(self, x):
            return self.c(self.b(self.a(x)))

    x = jnp.ones((2, WIDTH))
    model = quantize_model(Tied(nnx.Rngs(0)), ptq(), x)
    assert model.a is model.b
    ids = [op.op_id for op in model_plan(model).ops]
    assert ids == ["a/dot_general:0", "a/dot_general:1", "c/layers/0/dot_general:0"]
    close(model(x), load(Tied(nnx.Rngs(0)), dequantized(params(model)))(x))


def test_threads_don_t_see_each_other():
    net, x = nnx_net().blocks[0].up, jnp.ones((2, WIDTH))
    models = [quantize_model(net, ptq(), x), net]
    expected = [model(x) for model in models]
    assert (expected[0] != expected[1]).any()
    wrong, start = [], threading.Barrier(4)

    def run(i):
        start.wait()
        for _ in range(3):
            if not (models[i](x) == expected[i]).all():
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Direct(nnx.Module):
    """Gives its Params themselves to functions of JAX."""

    def __init__(self):
        key = jax.random.key(0)
        self.table = nnx.Param(jax.random.normal(key, (8, 16)))
        self.w = nnx.Param(jax.random.normal(key, (16, 16)))
        self.kernel = nnx.Param(jax.random.normal(key, (3, 16, 4)))

    def __call__(self, ids):
        x = jnp.take(self.table, ids, axis=0)
        x = jnp.einsum("bti,ij->btj", x, self.w) + jnp.dot(x, self.w) + jnp.matmul(a=x, b=self.w)
        x = jax.vmap(lambda row: jnp.tensordot(row, self.w, 1))(x)
        return (
            jax.lax.conv_general_dilated(
                x, self.kernel[...], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
            )
            + jnp.concatenate([self.w, self.w])[:1, :4]
        )


@pytest.mark.slow
def test_params_are_operands_of_jaxs_functions():
    model, ids = Direct(), jnp.array([[0, 3, 5], [1, 1, 7]])
    rules = [
        QuantizationRule(op_names=("take",), weight_qtype="int8"),
        QuantizationRule(weight_qtype="int8"),
    ]
    for engine in ("trace", "patch"):
        providers = [qat(*rules[1:], engine=engine)]
        providers += [ptq(*rules)] if engine == "trace" else []
        for provider in providers:
            quantized = quantize_model(model, provider, ids)
            close(quantized(ids), model(ids), 0.03)
            if provider is providers[-1] and engine == "trace":
                assert {*model_plan(quantized).weights} == {
                    "args[0]['table']",
                    "args[0]['w']",
                    "args[0]['kernel']",
                }

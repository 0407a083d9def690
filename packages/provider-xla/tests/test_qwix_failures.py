"""Programs that Qwix 0.1.8 refuses, leaves float or gets wrong: here each is quantized as ruled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.numpy import dot
from jax.sharding import PartitionSpec as P

import quant_numerics as qn
from jaxtap_testkit.meshes import line
from jaxtap_testkit.xla_samples import draw, equations
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule

pytestmark = pytest.mark.sample(2)

INT8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
WEIGHT_ONLY = QuantizationRule(weight_qtype="int8")
W4A8 = QuantizationRule(weight_qtype="int4", act_qtype="int8")

FLOAT_DOT = ("float32", "float32", "float32")
INT8_DOT = ("int8", "int8", "int32")
FP8_DOT = ("float8_e4m3fn", "float8_e4m3fn", "float32")

LAYOUT = ("NHWC", "HWIO", "NHWC")
CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@pytest.fixture(params=[PtqProvider, QtProvider])
def make(request):
    """The class of a provider."""
    return request.param


@pytest.fixture(params=[lambda fn: fn, jax.jit], ids=["eager", "jit"])
def jitted(request):
    return request.param


def contractions(fn, *args):
    """The dtypes of both operands and of the result of every contraction in ``fn``."""
    return [
        tuple(v.aval.dtype.name for v in (*eqn.invars[:2], *eqn.outvars))
        for eqn, _ in equations(fn, *args)
        if eqn.primitive.name in CONTRACTIONS
    ]


def lowered_contractions(fn, *args):
    """The same of the program that is compiled, where derivatives are written out."""
    text = jax.jit(fn).lower(*args).as_text()
    element = r"tensor<(?:\d+x)*(\w+)>"
    types = rf"stablehlo\.dot_general .*: \({element}, {element}\) -> {element}"
    return [tuple(f"int{t[1:]}" if t[0] == "i" else t for t in m) for m in re.findall(types, text)]


def near(actual, expected, bound=0.03):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return 0 < np.linalg.norm(actual - expected) < bound * np.linalg.norm(expected)


def planned(fn, params, *args, rules=(INT8,)):
    """A plan that follows every rule, the quantized parameters, and the function for them."""
    plan = PtqProvider(rules, strict=True).plan(fn, params, *args)
    return plan, plan.quantize(params), plan.apply(fn)


# --- what is found -------------------------------------------------------------------------------


def test_a_function_imported_by_its_name(make, jitted):
    w, x = draw((8, 3), (4, 8))
    quantized = make([INT8]).apply(jitted(lambda w, x: dot(x, w)))
    assert contractions(quantized, w, x) == [INT8_DOT]
    assert near(quantized(w, x), x @ w)


def test_a_method(make, jitted):
    w, x = draw((8, 3), (4, 8))
    quantized = make([INT8]).apply(jitted(lambda w, x: x.dot(w)))
    assert contractions(quantized, w, x) == [INT8_DOT]
    assert near(quantized(w, x), x @ w)


@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.astype(jnp.float32),
        lambda w: w.T.astype(jnp.float32).T,
        lambda w: w.reshape(2, 4, 3).astype(jnp.float32).reshape(8, 3),
        lambda w: w[:, :].astype(jnp.float32),
    ],
    ids=["cast", "transpose", "reshape", "index"],
)
def test_a_weight_behind_a_cast_and_moves(make, move):
    w, x = draw((8, 3), dtype=jnp.bfloat16) + draw((4, 8))

    def model(params, x):
        return x @ move(params["w"])

    provider = make([W4A8])
    plan = provider.plan(model, {"w": w}, x)
    assert list(plan.weights) == ["args[0]['w']"]
    assert contractions(provider.apply(model), {"w": w}, x) == [INT8_DOT]
    (record,) = plan.ops
    assert (record.qtypes, record.paths) == (("int8", "int4"), ("args[0]['w']",))


def test_stored_qvalue_behind_a_cast_are_multiplied_as_they_are():
    w, x = draw((8, 3), dtype=jnp.bfloat16) + draw((4, 8))
    _, qvalue, quantized = planned(lambda w, x: x @ w.astype(jnp.float32), w, x)
    assert qvalue.qvalue.dtype == jnp.int8
    assert contractions(quantized, qvalue, x) == [INT8_DOT]
    rounds = [eqn for eqn, _ in equations(quantized, qvalue, x) if eqn.primitive.name == "round"]
    assert len(rounds) == 1  # the activation's alone
    assert near(quantized(qvalue, x), x @ w.astype(jnp.float32))


@pytest.mark.slow
def test_two_parameters_of_one_shape_are_told_apart():
    a, b, x = draw((8, 8), (8, 8), (4, 8))
    params = {"a": a, "b": b, "scale": jnp.ones((8, 8))}

    def model(params, x):
        return (x @ params["b"]) @ params["a"] + x @ (x.T @ x * params["scale"])

    plan, qvalue, quantized = planned(model, params, x)
    assert {path: weight.ops for path, weight in plan.weights.items()} == {
        "args[0]['a']": ("matmul:1",),
        "args[0]['b']": ("matmul:0",),
    }
    for name in ("a", "b"):
        assert isinstance(qvalue[name], qn.QArray)
        assert near(qn.dequantize(qvalue[name]), params[name])
    assert qvalue["scale"] is params["scale"]
    # The other two are of activations.
    assert contractions(quantized, qvalue, x) == [INT8_DOT] * 2 + [FLOAT_DOT] * 2
    assert near(quantized(qvalue, x), model(params, x), 0.1)


def test_every_one_of_many_weights_of_one_shape_is_found(make):
    weights, (x,) = draw(*[(8, 8)] * 5), draw((4, 8))

    def model(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    provider = make([W4A8])
    plan = provider.plan(model, weights, x)
    assert list(plan.weights) == [f"args[0][{i}]" for i in range(5)]
    assert contractions(provider.apply(model), weights, x) == [INT8_DOT] * 5
    assert [path for record in plan.ops for path in record.paths] == list(plan.weights)
    assert {record.qtypes for record in plan.ops} == {("int8", "int4")}


@pytest.mark.slow
def test_nested_dicts_of_plain_arrays():
    a, b, x = draw((8, 16), (16, 3), (4, 8))
    params = {"net": {"layers": [{"up": a}, {"down": b}]}}

    def model(params, x):
        first, second = params["net"]["layers"]
        return jax.nn.relu(x @ first["up"]) @ second["down"]

    plan, qvalue, quantized = planned(model, params, x)
    assert list(plan.weights) == [
        "args[0]['net']['layers'][0]['up']",
        "args[0]['net']['layers'][1]['down']",
    ]
    assert contractions(quantized, qvalue, x) == [INT8_DOT] * 2
    assert near(quantized(qvalue, x), model(params, x))


def test_a_weight_on_the_left(make):
    w, x = draw((8, 8), (8, 4))
    provider = make([W4A8])
    (record,) = provider.plan(lambda w, x: w @ x, w, x).ops
    assert (record.qtypes, record.paths) == (("int4", "int8"), ("args[0]",))
    plan, qvalue, quantized = planned(lambda w, x: w @ x, w, x)
    assert plan.weights["args[0]"].granularity.channel_axes == (0,)
    assert contractions(quantized, qvalue, x) == [INT8_DOT]


# --- which operations ----------------------------------------------------------------------------


def conv(k, x):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=LAYOUT)


def test_a_convolution_with_only_its_weight_quantized(make):
    k, x = draw((3, 3, 4, 5), (2, 6, 6, 4))
    provider = make([WEIGHT_ONLY])
    result = provider.apply(conv)(k, x)
    assert [record.qtypes for record in provider.plan(conv, k, x).ops] == [(None, "int8")]
    plan, qvalue, quantized = planned(conv, k, x, rules=[WEIGHT_ONLY])
    assert plan.weights["args[0]"].granularity.channel_axes == (3,)
    assert qvalue.qvalue.dtype == jnp.int8
    np.testing.assert_allclose(quantized(qvalue, x), result, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result, conv(qn.dequantize(qvalue), x), rtol=1e-4, atol=1e-4)
    assert near(result, conv(k, x))


def test_a_convolution_of_int4_weights_and_int8_activations(make):
    k, x = draw((3, 3, 4, 5), (2, 6, 6, 4))
    provider = make([W4A8])
    assert contractions(provider.apply(conv), k, x) == [INT8_DOT]
    assert [record.qtypes for record in provider.plan(conv, k, x).ops] == [("int8", "int4")]


def test_ragged_dot_with_stored_qvalue():
    w, x = draw((3, 8, 5), (12, 8))
    sizes = jnp.array([5, 0, 7], jnp.int32)

    def model(w, x):
        return lax.ragged_dot(x, w, sizes)

    plan, qvalue, quantized = planned(model, w, x)
    assert plan.weights["args[0]"].granularity.channel_axes == (0, 2)
    assert qvalue.scale.shape == (3, 1, 5)
    assert set(contractions(quantized, qvalue, x)) == {INT8_DOT}
    assert near(quantized(qvalue, x), model(w, x))


@pytest.mark.slow
@pytest.mark.parametrize("rules", [[INT8], [QuantizationRule(op_names=["einsum"], **{
    "weight_qtype": "int8", "act_qtype": "int8"})]], ids=["all", "einsum"])  # fmt: skip
def test_an_einsum_of_three_operands_is_quantized_in_its_parts(make, rules):
    a, b, x = draw((8, 6), (6, 5), (4, 8))

    def model(params, x):
        return jnp.einsum("bi,ij,jk->bk", x, *params)

    provider = make(rules)
    plan = provider.plan(model, [a, b], x)
    assert list(plan.weights) == ["args[0][0]", "args[0][1]"]
    assert contractions(provider.apply(model), [a, b], x) == [INT8_DOT] * 2
    assert near(provider.apply(model)([a, b], x), model([a, b], x), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        lambda w, x: jnp.dot(x, w, preferred_element_type=jnp.float32),
        lambda w, x: jnp.einsum("bi,io->bo", x, w, preferred_element_type=jnp.float32),
        lambda w, x: lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ),
        lambda w, x: lax.conv_general_dilated(
            x[None],
            w[None],
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
            preferred_element_type=jnp.float32,
        ),
    ],
    ids=["dot", "einsum", "dot_general", "conv"],
)
def test_preferred_element_type_is_kept(make, model):
    w, x = draw((8, 3), (4, 8), dtype=jnp.bfloat16)
    quantized = make([INT8]).apply(model)
    assert contractions(quantized, w, x) == [INT8_DOT]
    result = quantized(w, x)
    assert result.dtype == jnp.float32
    assert near(result, model(w, x))
    # Not a bfloat16 result made wide afterwards.
    assert (np.asarray(result.astype(jnp.bfloat16), np.float32) != np.asarray(result)).any()


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bwd_qtype", [None, "int8"])
def test_forward_mode(bwd_qtype, jitted):
    w, x = draw((8, 3), (4, 8))
    dw, dx = (jnp.ones_like(v) for v in (w, x))

    def model(w, x):
        return jnp.tanh(x @ w)

    for provider in (PtqProvider([INT8]), QtProvider([QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd_qtype)])):  # fmt: skip
        quantized = provider.apply(jitted(model))
        forward = contractions(
            lambda *args, f=quantized: jax.jvp(f, args[:2], args[2:]), w, x, dw, dx
        )
        assert forward.count(INT8_DOT) == 1
        assert set(forward) <= {INT8_DOT, FLOAT_DOT}
        value, tangent = jax.jvp(quantized, (w, x), (dw, dx))
        np.testing.assert_allclose(value, quantized(w, x), rtol=1e-6, atol=1e-6)
        slope = 1 - value**2
        np.testing.assert_allclose(tangent, slope * (dx @ w + x @ dw), rtol=1e-4, atol=1e-4)


def sharded(fn):
    """The sum over devices of what each makes of its rows."""

    def body(w, x):
        return lax.psum(fn(w, x), "d")

    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": True}
    return jax.shard_map(body, mesh=line(), **specs)


def grad_of_parts(fn):
    def body(w, x):
        w = lax.pcast(w, "d", to="varying")
        return lax.psum(jax.grad(fn)(w, x), "d")

    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": True}
    return jax.shard_map(body, mesh=line(), **specs)


@pytest.mark.slow
@pytest.mark.parametrize("bwd_qtype", [None, "int8"])
def test_gradients_in_shard_map_that_checks_varying_axes(bwd_qtype):
    w, x = draw((16, 8), (64, 16))

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    provider = QtProvider([QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd_qtype)])
    gradients = {
        "of a quantized function in shard_map": jax.grad(sharded(provider.apply(loss))),
        "of shard_map in a quantized function": jax.grad(provider.apply(sharded(loss))),
        "in shard_map": grad_of_parts(provider.apply(loss)),
        "in shard_map in a quantized function": provider.apply(grad_of_parts(loss)),
    }
    expected = jax.grad(loss)(w, x)
    for name, gradient in gradients.items():
        first, *backward = lowered_contractions(gradient, w, x)
        assert first == INT8_DOT, (name, first)
        assert backward, name
        quantized = [kind == INT8_DOT for kind in backward]
        assert quantized == [bwd_qtype is not None] * len(backward), (name, backward)
        assert near(jax.jit(gradient)(w, x), expected), name


# --- caches --------------------------------------------------------------------------------------


class Block:
    """A jitted block that counts how often it is traced."""

    def __init__(self):
        self.traces = 0
        self.run = jax.jit(self._run)

    def _run(self, w, x):
        self.traces += 1
        return jnp.tanh(x @ w)


def test_equal_blocks_share_a_trace_and_each_keeps_its_rule(make):
    block, weights, (x,) = Block(), draw(*[(8, 8)] * 6), draw((4, 8))

    def model(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                x = block.run(w, x)
        return x

    provider = make(
        [
            QuantizationRule(module_path="layer_0"),
            QuantizationRule(module_path="layer_[45]", weight_qtype="fp8", act_qtype="fp8"),
            INT8,
        ]
    )
    quantized = jax.jit(provider.apply(model))
    assert contractions(quantized, weights, x) == [FLOAT_DOT] + [INT8_DOT] * 3 + [FP8_DOT] * 2
    assert block.traces <= 3
    plan = provider.plan(model, weights, x)
    assert not plan.problems  # all rules are used
    assert [weight.rule for weight in plan.weights.values()] == [2, 2, 2, 1, 1]
    assert list(plan.weights) == [f"args[0][{i}]" for i in range(1, 6)]


def test_rules_on_equal_layers_each_apply(make):
    a, b, x = draw((8, 8), (8, 8), (4, 8))

    def model(params, x):
        for name, w in params.items():
            with jax.named_scope(name):
                x = x @ w
        return x

    rules = [
        QuantizationRule(module_path="first", weight_qtype="int8", act_qtype="int8"),
        QuantizationRule(module_path="second", weight_qtype="fp8", act_qtype="fp8"),
    ]
    params = {"first": a, "second": b}
    assert contractions(make(rules).apply(model), params, x) == [INT8_DOT, FP8_DOT]
    assert contractions(make(rules[::-1]).apply(model), params, x) == [INT8_DOT, FP8_DOT]
    plan = make(rules).plan(model, params, x)
    qtypes = [weight.qtype for weight in plan.weights.values()]
    assert qtypes == ["int8", "float8_e4m3fn"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [jax.jit(lambda w, x: jnp.tanh(x @ w)), lambda w, x: x @ w], ids=["jit", "operator"]
)
def test_what_ran_in_float_before_is_quantized(make, block):
    w, x = draw((8, 8), (4, 8))
    plain = block(w, x)
    assert contractions(block, w, x) == [FLOAT_DOT]
    quantized = make([INT8]).apply(lambda w, x: block(w, x))
    assert contractions(quantized, w, x) == [INT8_DOT]
    for fn in (quantized, jax.jit(quantized)):
        assert near(fn(w, x), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [jax.jit(lambda w, x: jnp.tanh(x @ w)), lambda w, x: x @ w], ids=["jit", "operator"]
)
def test_float_stays_float_after_a_quantized_run(make, block):
    w, x = draw((8, 8), (4, 8))
    quantized = make([INT8]).apply(lambda w, x: block(w, x))
    for fn in (quantized, jax.jit(quantized)):
        assert near(fn(w, x), block(w, x))
    jax.grad(lambda w: quantized(w, x).sum())(w)
    assert contractions(block, w, x) == [FLOAT_DOT]
    fresh = jax.jit(lambda w, x: jnp.tanh(x @ w)) if hasattr(block, "lower") else jnp.matmul
    expected = fresh(w, x) if hasattr(block, "lower") else fresh(x, w)
    np.testing.assert_array_equal(block(w, x), expected)


@pytest.mark.slow
def test_providers_one_after_the_other_share_nothing(make):
    block = jax.jit(lambda w, x: jnp.tanh(x @ w))
    w, x = draw((8, 8), (4, 8))

    def model(w, x):
        return block(w, x)

    formats = {"int8": INT8_DOT, "int4": INT8_DOT, "fp8": FP8_DOT}
    alone, after = {}, {}
    for results in (alone, after):
        for qtype, kind in formats.items():
            if results is alone:
                jax.clear_caches()
            rule = QuantizationRule(weight_qtype=qtype, act_qtype=qtype)
            quantized = make([rule]).apply(model)
            assert contractions(quantized, w, x) == [kind]
            results[qtype] = np.asarray(quantized(w, x))
    for qtype in formats:
        np.testing.assert_array_equal(after[qtype], alone[qtype])
    assert len({result.tobytes() for result in after.values()}) == 3


# --- transformations, with jit on ----------------------------------------------------------------


def run_vmap(w, x):
    return jax.vmap(lambda row: jnp.dot(row, w))(x)


def run_remat(w, x):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)


def run_scan(w, x):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]


def run_while(w, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


def run_fori(w, x):
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)


def run_cond(w, x):
    return lax.cond(x[0, 0] > 100, lambda x: x, lambda x: x @ w, x)


PROGRAMS = {
    run_vmap: (),
    run_remat: ("checkpoint", "remat2", "remat"),
    run_scan: ("scan",),
    run_while: ("while",),
    run_fori: ("scan", "while"),
    run_cond: ("cond",),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda fn: fn.__name__)
def test_transformations_are_kept_with_jit_on(make, program):
    w, x = draw((8, 8), (4, 8))
    provider = make([W4A8])
    quantized = jax.jit(provider.apply(program))
    assert contractions(quantized, w, x) == [INT8_DOT]
    kept = PROGRAMS[program]
    if kept:
        (within,) = [w for e, w in equations(quantized, w, x) if e.primitive.name == "dot_general"]
        assert set(within) & set(kept)
    (record,) = provider.plan(program, w, x).ops
    assert (record.qtypes, record.paths) == (("int8", "int4"), ("args[0]",))
    assert near(quantized(w, x), program(w, x), 0.4)

    _, qvalue, stored = planned(program, w, x)
    assert contractions(stored, qvalue, x) == [INT8_DOT]
    for fn in (stored, jax.jit(stored)):
        assert near(fn(qvalue, x), program(w, x), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", sorted(PROGRAMS.keys() - {run_while}, key=repr), ids=lambda fn: fn.__name__
)
def test_gradients_of_transformed_programs_are_quantized(program):
    w, x = draw((8, 8), (4, 8))
    w = w / 4  # a longer chain would enlarge what rounding leaves
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    quantized = QtProvider([rule]).apply(lambda w, x: jnp.sum(program(w, x) ** 2))
    gradient = jax.grad(quantized, (0, 1))
    found = lowered_contractions(gradient, w, x)
    assert len(found) >= 3  # forward, and for each of the two gradients
    assert set(found) == {INT8_DOT}
    expected = jax.grad(lambda w, x: jnp.sum(program(w, x) ** 2), (0, 1))(w, x)
    for fn in (gradient, jax.jit(gradient)):
        for actual, wanted in zip(fn(w, x), expected, strict=True):
            assert near(actual, wanted, 0.1)


def test_layers_of_a_scan_are_stored_layer_by_layer():
    w, x = draw((3, 8, 8), (4, 8))

    def model(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    plan, qvalue, quantized = planned(model, w, x)
    assert plan.weights["args[0]"].granularity.channel_axes == (0, 2)
    assert contractions(quantized, qvalue, x) == [INT8_DOT]
    assert near(quantized(qvalue, x), model(w, x), 0.1)

"""QtProvider: values, gradients, transformations, statistics and training."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from interception_core import get_provider
from jaxtap_testkit.xla_samples import PROGRAMS, conv, draw, make, stack
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule, QuantizationWarning

pytestmark = pytest.mark.sample(2)

QAT = QuantizationRule(weight_qtype="int8", act_qtype="int8")
QT = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
FP8 = QtRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn", bwd_qtype="float8_e5m2")


def gradients(fn, params, x):
    return jax.grad(lambda params: jnp.sum(fn(params, x).astype(jnp.float32) ** 2))(params)


def distance(ours, expected):
    ours, expected = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (ours, expected)
    )
    return np.linalg.norm(ours - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_inference(name):
    fn, params, x = make(name)
    providers = PtqProvider([QAT]), QtProvider([QAT]), QtProvider([QT])
    run = jax.jit(lambda params, x: [one.apply(fn)(params, x) for one in providers])
    expected, *found = (np.asarray(y, np.float64) for y in run(params, x))
    for y, rule in zip(found, (QAT, QT), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5, err_msg=str(rule))


@pytest.mark.slow
def test_a_padding_that_can_be_read_once():
    def model(k, x):
        return lax.conv_general_dilated(x, k, (1, 1), ((n, n) for n in (1, 1)))

    x, k = draw((2, 3, 6, 6), (4, 3, 3, 3))
    found = jax.jit(lambda k: gradients(QtProvider(QT).apply(model), k, x))(k)
    assert distance(found, gradients(model, k, x)) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_near_those_in_float(name):
    fn, params, x = make(name)
    params = jax.tree.map(lambda leaf: 0.4 * leaf, params)
    # QT of every program, and one of the others in turn.
    other, bound = [(QAT, 0.15), (FP8, 0.4)][list(PROGRAMS).index(name) % 2]

    @jax.jit
    def run(params, x):
        provider = QtProvider([QT])
        around = gradients(provider.apply(fn), params, x)
        inside = provider.apply(lambda params, x: gradients(fn, params, x))(params, x)
        others = gradients(QtProvider([other]).apply(fn), params, x)
        return gradients(fn, params, x), around, inside, others

    expected, around, inside, others = run(params, x)
    assert distance(around, expected) < 0.15
    assert distance(others, expected) < bound
    assert distance(inside, around) < 1e-3  # a tap around the train step, or inside of it
    for leaf, grad in zip(jax.tree.leaves(params), jax.tree.leaves(around), strict=True):
        assert (leaf.shape, leaf.dtype) == (grad.shape, grad.dtype)


@pytest.mark.parametrize("name", PROGRAMS)
def test_backward_contractions_are_of_integers(name):
    fn, params, x = make(name)
    if x.dtype == jnp.int32 or name == "while":
        return  # lookups have no contraction, and JAX differentiates no while loop of another kind
    qt = QtProvider([dataclasses.replace(QT, weights_only=False)]).apply(fn)

    def gradient(params, x):
        return jax.grad(lambda p, x: (qt(p, x).astype(jnp.float32) ** 2).sum(), (0, 1))(params, x)

    text = jax.jit(gradient).lower(params, x).as_text()
    found = [
        re.findall(r"x([a-z]\w+)>", line.split(" : ")[-1].split("->")[0])
        for line in text.splitlines()
        if re.search(r"(dot_general|convolution|ragged_dot)[ (]", line)
    ]
    # On CPU XLA sums integer convolutions in float32 where that is exact: see quant_numerics.
    dtype = "f32" if name in ("convolution", "transposed kernel") else "i8"
    assert {tuple(types[:2]) for types in found} == {(dtype, dtype)}
    assert len(found) >= (1 if "experts" in name else 3)


def test_backward_contractions_in_float8_multiply_both_formats():
    """The usual recipe: gradients in E5M2, activations and weights in E4M3."""
    (w,), (x,), (g,) = draw((64, 32)), draw((16, 64), seed=1), draw((16, 32), seed=2)

    def both(w, x):
        y, pull = jax.vjp(QtProvider(FP8).apply(jnp.dot), x, w)
        return y, *pull(g)

    for platform in ("cpu", "cuda"):
        text = jax.jit(both).trace(w, x).lower(lowering_platforms=(platform,)).as_text()
        dots = [line for line in text.splitlines() if "dot_general" in line]
        kinds = [sorted(set(re.findall(r"f8E\w+", line))) for line in dots]
        assert kinds == [["f8E4M3FN"], ["f8E4M3FN", "f8E5M2"], ["f8E4M3FN", "f8E5M2"]]
        assert all(line.endswith("xf32>") for line in dots)
    y, dx, dw = jax.jit(both)(w, x)
    w, x, g = (np.asarray(one, np.float64) for one in (w, x, g))
    assert distance(y, x @ w) < 0.06
    assert distance(dx, g @ w.T) < 0.06
    assert distance(dw, x.T @ g) < 0.06


def test_without_bwd_qtype_gradients_are_straight_through():
    (w,), x = draw((8, 6)), draw((4, 8), seed=1)[0]
    ours = jax.grad(lambda w: QtProvider([QAT]).apply(jnp.dot)(x, w).sum())(w)
    np.testing.assert_allclose(ours, jax.grad(lambda w: jnp.dot(x, w).sum())(w), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["absmax,0.5", "rms,1", "fixed,-1,1"])
def test_what_is_cut_off_has_no_gradient(method):
    rule = QuantizationRule(weight_qtype="int8", weight_calibration_method=method)
    (w,), x = draw((64, 6)), jnp.ones((1, 64))
    ours = jax.grad(lambda w: QtProvider([rule]).apply(lambda w, x: x @ w)(w, x).sum())(w)
    size = {
        "absmax,0.5": np.abs(w).max(0) / 2,
        "rms,1": np.sqrt(np.mean(np.square(w), 0)),
        "fixed,-1,1": 1.0,
    }[method]
    np.testing.assert_array_equal(ours, np.abs(w) <= size)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [QAT, QT], ids=["qat", "qt"])
def test_transformations(rule):
    (ws,), x = draw((3, 8, 8)), draw((5, 4, 8), seed=1)[0]
    qt = QtProvider([rule]).apply(stack)
    value, tangent = jax.jvp(lambda ws: qt(ws, x[0]), (ws,), (jnp.ones_like(ws),))
    _, expected = jax.jvp(lambda ws: stack(ws, x[0]), (ws,), (jnp.ones_like(ws),))
    np.testing.assert_array_equal(value, qt(ws, x[0]))
    assert distance(tangent, expected) < 0.15
    per_example = jax.jit(jax.vmap(jax.grad(lambda ws, x: qt(ws, x).sum()), (None, 0)))(ws, x)
    for i in range(5):
        one = jax.grad(lambda ws, x: qt(ws, x).sum())(ws, x[i])
        np.testing.assert_allclose(per_example[i], one, rtol=1e-3, atol=1e-3)
    rematerialized = jax.grad(lambda ws: jax.checkpoint(qt)(ws, x[0]).sum())(ws)
    np.testing.assert_allclose(
        rematerialized, jax.grad(lambda ws: qt(ws, x[0]).sum())(ws), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_gradient_accumulation():
    (w,), x = draw((8, 8)), draw((4, 2, 8), seed=1)[0]
    qt = QtProvider([QT]).apply(lambda w, x: jnp.tanh(x @ w).sum())

    @jax.jit
    def accumulated(w, batches):
        def step(total, x):
            return total + jax.grad(qt)(w, x), None

        return lax.scan(step, jnp.zeros_like(w), batches)[0]

    expected = sum(jax.grad(qt)(w, batch) for batch in x)
    np.testing.assert_allclose(accumulated(w, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_tiles_forward_and_for_the_gradient_of_the_parameter():
    rule = QtRule(
        weight_qtype="int4",
        act_qtype="int8",
        bwd_qtype="int8",
        tile_size=4,
        bwd_weight_grad_tile_size=2,
    )
    (w,), x = draw((8, 6)), draw((4, 8), seed=1)[0]
    qt = QtProvider([rule]).apply(lambda w, x: x @ w)
    ours = jax.grad(lambda w: (qt(w, x) ** 2).sum())(w)
    grids = [qn.quantize_for_dot(v, (a,), q, 4) for v, a, q in ((x, 1, "int8"), (w, 0, "int4"))]
    grid_x, grid_w = (np.asarray(qn.dequantize(q), np.float64) for q in grids)
    expected = grid_x.T @ (2 * grid_x @ grid_w)
    assert distance(ours, expected) < 0.02
    uneven = dataclasses.replace(rule, bwd_weight_grad_tile_size=3)  # of 4 rows: 3 and 1
    qt = QtProvider([uneven]).apply(lambda w, x: x @ w)
    assert distance(jax.grad(lambda w: (qt(w, x) ** 2).sum())(w), expected) < 0.02


def test_one_scale_for_all():
    rule = dataclasses.replace(QT, disable_channelwise_axes=True)
    (w,), x = draw((8, 6)), draw((4, 8), seed=1)[0]
    actual = QtProvider([rule]).apply(jnp.dot)(x, w)
    grids = [np.round(v / (s := np.abs(v).max() / 127)) * s for v in map(np.float64, (x, w))]
    np.testing.assert_allclose(actual, grids[0] @ grids[1], rtol=1e-4, atol=1e-4)


# --- stochastic rounding -------------------------------------------------------------------------

NOISY = dataclasses.replace(QT, bwd_stochastic_rounding="uniform")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
def test_stochastic_rounding_is_unbiased(method):
    rule = dataclasses.replace(
        QT, bwd_qtype="int4", bwd_stochastic_rounding=method, channelwise_noise_axes=(0, 1)
    )
    (w,), x = draw((6, 6)), jnp.eye(6)
    g = draw((6, 6), seed=2)[0]
    qt = QtProvider([rule]).apply(lambda w, x: x @ w)
    grad = jax.jit(jax.grad(lambda w, key: (qt(w, x, quant_key=key) * g).sum()))
    keys = jax.random.split(jax.random.key(0), 400)
    found = np.stack([grad(w, key) for key in keys])
    step = np.abs(g).max() / 7
    assert found.std(axis=0).max() > step / 10
    np.testing.assert_allclose(found.mean(axis=0), g, atol=5 * step / np.sqrt(400))


@pytest.mark.slow
def test_noise_differs_by_operation_by_step_and_by_key():
    ws = jnp.stack([jnp.eye(8)] * 2)
    x, g = jnp.eye(8), draw((8, 8))[0]

    def model(ws, x):
        return lax.scan(lambda h, w: (h @ w, None), x, ws)[0]

    qt = QtProvider([NOISY]).apply(model)
    grad = jax.jit(jax.grad(lambda ws, key: (qt(ws, x, quant_key=key) * g).sum()))
    first, second = grad(ws, jax.random.key(0))
    other, _ = grad(ws, jax.random.key(1))
    assert (first != second).any()
    assert (first != other).any()
    np.testing.assert_array_equal(grad(ws, jax.random.key(0))[0], first)


def test_noise_needs_a_key():
    (w,), x = draw((8, 6)), jnp.ones((4, 8))
    with pytest.raises(Exception, match="quant_key=key"):
        QtProvider([NOISY]).apply(lambda w, x: x @ w)(w, x)


# --- static ranges -------------------------------------------------------------------------------


def test_statistics_are_collected_and_used():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    provider = QtProvider([rule])
    (w,) = draw((8, 6))
    batches = [draw((4, 8), seed=s)[0] for s in range(5)]

    def model(w, x):
        return jnp.tanh(x @ w)

    statistics = provider.init_statistics(model, w, batches[0])
    assert list(statistics) == ["matmul:0#lhs"]
    train, test = (provider.apply(model, statistics, update=update) for update in (True, False))
    step = jax.jit(jax.grad(lambda w, x: train(w, x).sum()))
    for x in batches:
        step(w, x)
    expected = np.mean([np.abs(x).max(axis=1).mean() for x in batches])
    found = statistics["matmul:0#lhs"].calibration()
    np.testing.assert_allclose(found.upper, [[expected]], rtol=1e-5)
    value = jax.jit(test)(w, batches[0])
    np.testing.assert_array_equal(statistics["matmul:0#lhs"].calibration().upper, found.upper)

    # What training has seen is what inference uses.
    plan = PtqProvider([rule]).plan(model, w, batches[0])
    stored = plan.apply(model, statistics)(plan.quantize(w), batches[0])
    np.testing.assert_allclose(stored, value, rtol=1e-5, atol=1e-6)


# --- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bwd_qtype": "int9"}, "QtRule.bwd_qtype.*int8.*got 'int9'"),
        ({"bwd_calibration_method": "nearest"}, "bwd_calibration_method.*Got 'nearest'"),
        ({"bwd_weight_grad_tile_size": 0}, "bwd_weight_grad_tile_size.*Got 0"),
        ({"bwd_stochastic_rounding": "gaussian"}, "bwd_stochastic_rounding.*Got 'gaussian'"),
        ({"channelwise_noise_axes": "0"}, "channelwise_noise_axes.*Got '0'"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        QtRule(**fields)


def test_by_name_and_with_plain_rules():
    provider = get_provider("qt", rules=[QAT])
    assert isinstance(provider, QtProvider)
    assert provider.rules == (QtRule(weight_qtype="int8", act_qtype="int8"),)
    fn, params, x = make("tied")
    assert "2 of 2 parameters quantized" in str(provider.plan(fn, params, x))
    with pytest.warns(QuantizationWarning, match="rule 0 has no effect"):
        QtProvider([QtRule(module_path="x"), QT]).plan(fn, params, x)


def test_two_rules_on_equal_layers():
    block = jax.jit(lambda w, x: x @ w)

    def model(w, x):
        with jax.named_scope("a"):
            first = block(w, x)
        with jax.named_scope("b"):
            return first, block(w, x)

    (w,), x = draw((8, 8)), draw((4, 8), seed=1)[0]
    rules = [QtRule(module_path="a"), QT]
    for transform in (lambda fn: fn, jax.jit):
        first, second = transform(QtProvider(rules).apply(model))(w, x)
        np.testing.assert_array_equal(first, block(w, x))
        assert (second != first).any()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trace", "patch"])
def test_a_convolution_trains_on_both_engines(engine):
    (k,), x = draw((3, 3, 2, 5)), draw((2, 6, 6, 2), seed=1)[0]
    qt = QtProvider([QT], engine=engine).apply(conv)
    ours = jax.jit(jax.grad(lambda k: (qt(k, x) ** 2).sum()))(k)
    assert distance(ours, jax.grad(lambda k: (conv(k, x) ** 2).sum())(k)) < 0.05


def general_ragged(w, x):
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(x, w, jnp.array([3, 5], jnp.int32), numbers)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda w, x: jnp.einsum("ij,jk->k", x, w), ((5, 6), (4, 5))),
        (lambda w, x: jnp.einsum("bij,jk->bk", x, w), ((5, 6), (2, 4, 5))),
        (lambda w, x: jnp.einsum("ii,ik->k", x, w), ((5, 6), (5, 5))),
        (general_ragged, ((2, 8, 8), (8, 8))),
    ],
)
def test_rarer_forms(fn, shapes):
    w, x = draw(*shapes)
    actual = QtProvider([QT]).apply(fn)(w, x)
    np.testing.assert_allclose(actual, PtqProvider([QAT]).apply(fn)(w, x), rtol=1e-5, atol=1e-6)
    assert 0 < distance(actual, fn(w, x)) < 0.02
    ours = gradients(QtProvider([QT]).apply(fn), w, x)
    assert distance(ours, gradients(fn, w, x)) < 0.05


def gradients_of(fn, w, x, g):
    return jax.vjp(fn, w, x)[1](g)


@pytest.mark.slow
def test_either_contraction_of_the_backward_pass_has_a_format_of_its_own():
    """A rule is a Backward for each gradient."""
    w, x, g = draw((16, 8), (6, 16), (6, 8))
    how = qn.HowToQuantize("int8")
    int4 = qn.HowToQuantize("int4", tile_size=4)
    cases = {
        "act alone": ({"bwd_act_grad_qtype": "int8"}, qn.Backward("int8"), None),
        "weight alone": ({"bwd_weight_grad_qtype": "fp8"}, None, qn.Backward("fp8")),
        "both, with tiles": (
            {
                "bwd_qtype": "int8",
                "bwd_weight_grad_qtype": "int4",
                "bwd_act_grad_tile_size": 4,
                "bwd_weight_grad_tile_size": 2,
                "bwd_weight_grad_calibration_method": "absmax,0.9",
            },
            qn.Backward("int8", tile_size=4),
            qn.Backward("int4", "absmax,0.9", tile_size=2),
        ),
        "original residuals": (
            {"bwd_qtype": "int8", "bwd_original_residuals": True},
            qn.Backward("int8", residual="original"),
            qn.Backward("int8", residual="original"),
        ),
        "residuals of their own": (
            {
                "bwd_qtype": "int8",
                "bwd_act_grad_tile_size": 4,
                "bwd_weight_residual_qtype": "int4",
                "bwd_act_residual_qtype": "int8",
            },
            qn.Backward("int8", tile_size=4, residual=int4),
            qn.Backward("int8", residual=qn.HowToQuantize("int8")),
        ),
    }
    for name, (fields, of_x, of_w) in cases.items():
        rule = QtRule(weight_qtype="int8", act_qtype="int8", **fields)
        for swapped in (False, True):  # the parameter may be either operand
            dims = (((0,), (1,)), ((), ())) if swapped else (((1,), (0,)), ((), ()))

            def contraction(w, x, swapped=swapped, dims=dims):
                return lax.dot_general(w, x, dims) if swapped else lax.dot_general(x, w, dims)

            def expected(w, x, swapped=swapped, dims=dims, pair=(of_x, of_w)):
                operands, pair = ((w, x), pair[::-1]) if swapped else ((x, w), pair)
                op = qn.Matmul(dims)
                return op.train(*operands, lhs_how=how, rhs_how=how, backward=pair)

            cotangent = g.T if swapped else g
            found = gradients_of(QtProvider(rule).apply(contraction), w, x, cotangent)
            wanted = gradients_of(expected, w, x, cotangent)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bwd_weight_grad_tile_size": 4}, "neither bwd_qtype nor bwd_weight_grad_qtype"),
        (
            {"bwd_weight_grad_qtype": "int8", "bwd_act_grad_tile_size": 4},
            "neither bwd_qtype nor bwd_act_grad_qtype",
        ),
        (
            {"bwd_act_grad_qtype": "int8", "bwd_act_residual_qtype": "int8"},
            "bwd_act_residual_qtype must be None where neither bwd_qtype nor bwd_weight_grad",
        ),
        ({"bwd_original_residuals": True}, "a float backward pass has them"),
        ({"bwd_original_residuals": 1, "bwd_qtype": "int8"}, "must be None, True or False"),
        ({"bwd_qtype": "int8", "bwd_act_grad_calibration_method": "minmax"}, "symmetric"),
        ({"bwd_act_grad_qtype": "int9"}, "bwd_act_grad_qtype must be None or a qtype"),
        ({"bwd_qtype": "int8", "bwd_act_grad_tile_size": 0}, "positive number of elements"),
    ],
)
def test_backward_fields_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        QtRule(weight_qtype="int8", **fields)


RAGGED_RULES = {
    "fp8": {"weight_qtype": "fp8", "act_qtype": "fp8", "bwd_qtype": "fp8_e5m2"},
    "fp8 in tiles": {"weight_qtype": "fp8", "act_qtype": "fp8", "tile_size": 8},
    "int4 in tiles": {
        "weight_qtype": "int4",
        "act_qtype": "int8",
        "tile_size": 8,
        "bwd_qtype": "int8",
        "bwd_act_grad_tile_size": 4,
    },
    "int4 weights": {"weight_qtype": "int4", "tile_size": 4},
    "mxfp4": {"weight_qtype": "mxfp4", "act_qtype": "mxfp8"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RAGGED_RULES)
def test_grouped_contractions_in_small_formats(kind):
    """Values are float64 sums of the dequantized operands."""
    (w,), (x,), (g,) = draw((3, 32, 8)), draw((7, 32), seed=1), draw((7, 8), seed=2)
    sizes = jnp.array([3, 0, 4], jnp.int32)

    def fn(w, x):
        return lax.ragged_dot(x, w, sizes)

    rule = QtRule(**RAGGED_RULES[kind])
    inference = {k: v for k, v in RAGGED_RULES[kind].items() if not k.startswith("bwd")}
    plan = PtqProvider(QuantizationRule(**inference), strict=True).plan(fn, w, x)
    stored = plan.quantize(w)
    assert plan.weights["args[0]"].qtype == qn.get_qtype(rule.weight_qtype).name
    weight = (
        stored.restore() if not isinstance(stored, qn.PackedQArray) else qn.unpack(stored).restore()
    )
    tile = None if rule.tile_size is None else rule.tile_size
    left = (
        x
        if rule.act_qtype is None
        else qn.dequantize(qn.quantize_for_dot(x, (1,), rule.act_qtype, tile))
    )
    groups = np.repeat(np.arange(3), np.asarray(sizes))
    weight, left = np.asarray(weight, np.float64), np.asarray(left, np.float64)
    expected = np.einsum("mk,mkn->mn", left, weight[groups])
    for found in (
        jax.jit(plan.apply(fn))(stored, x),
        jax.jit(QtProvider(rule).apply(fn))(w, x),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    gw, gx = gradients_of(QtProvider(rule).apply(fn), w, x, g)
    wanted = np.zeros(w.shape)
    np.add.at(wanted, groups, np.einsum("mk,mn->mkn", np.asarray(x, np.float64), g))
    assert distance(gw, wanted) < 0.15
    exact = np.asarray(w, np.float64)[groups]
    assert distance(gx, np.einsum("mn,mkn->mk", g, exact)) < 0.15


RECIPES = {
    "float8": FP8,
    "int8": QT,
    "mxfp8": QtRule(weight_qtype="mxfp8", act_qtype="mxfp8", bwd_qtype="mxfp8"),
    "nvfp4": QtRule(weight_qtype="nvfp4", act_qtype="nvfp4", bwd_qtype="nvfp4"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_finite_where_the_largest_magnitude_is_nothing_or_huge(name):
    """Of the activation, the weight and the incoming gradient: zero, subnormal, tiny and huge."""
    magnitudes = np.array([0, 1e-42, 1e-30, 1, 1e30], np.float32)
    w, x, ct = draw((64, 32), (8, 64), (8, 32))
    scales = np.ones((3 * len(magnitudes), 3), np.float32)
    for i in range(3):
        scales[i * len(magnitudes) : (i + 1) * len(magnitudes), i] = magnitudes

    def step(scale, fn):
        y, back = jax.vjp(fn, w * scale[0], x.at[2].multiply(0) * scale[1])
        return (y, *back(ct * scale[2]))

    def product(w, x):
        return x @ w

    trained = QtProvider(RECIPES[name]).apply(product)
    found = jax.jit(lambda: lax.map(lambda one: step(one, trained), scales))()
    for scale, *results in zip(scales, *found, strict=True):
        for ours, wanted in zip(results, step(scale, product), strict=True):
            assert np.isfinite(ours).all(), scale
            largest = np.abs(wanted).max(initial=0)
            # What is below the smallest normal float32 counts as zero.
            assert np.abs(ours - wanted).max() <= max(0.3 * largest, 1e-36), scale

"""PtqProvider: what runs in integers, how exactly, and what it reports."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from interception_core import UnknownNameError, get_provider
from interception_core.testing.engine_suite.kernels import kernel_makers
from jaxtap_testkit.xla_samples import contractions
from provider_xla import (
    PtqProvider,
    QtProvider,
    QtRule,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
)

INT8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
pytestmark = [pytest.mark.sample(2), pytest.mark.usefixtures("engine")]

LAYOUT = ("NHWC", "HWIO", "NHWC")


def operations(provider, fn, *args):
    """What a plan says of the operations of a function, whatever else it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        return provider.plan(fn, *args).ops


def conv(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=LAYOUT)


def batched_dot(x, w):
    return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))


# name: function, shapes, and for each operand the axes that its scale does not depend on.
OPS = {
    "dot": (lambda x, w: jnp.dot(x, w), (5, 24), (24, 7), (1,), (0,)),
    "x.dot": (lambda x, w: x.dot(w), (5, 24), (24, 7), (1,), (0,)),
    "dot of vectors": (lambda x, w: jnp.dot(x, w), (24,), (24,), (0,), (0,)),
    "dot of 3 and 2 axes": (lambda x, w: jnp.dot(x, w), (2, 5, 24), (24, 7), (2,), (0,)),
    "operator": (lambda x, w: x @ w, (5, 24), (24, 7), (1,), (0,)),
    "matmul": (lambda x, w: jnp.matmul(x, w), (3, 5, 24), (3, 24, 7), (2,), (1,)),
    "matmul, broadcast": (lambda x, w: jnp.matmul(x, w), (3, 5, 24), (24, 7), (2,), (0,)),
    "matmul of vectors": (lambda x, w: jnp.matmul(x, w), (24,), (24,), (0,), (0,)),
    "matrix by vector": (lambda x, w: jnp.matmul(x, w), (5, 24), (24,), (1,), (0,)),
    "vector by matrix": (lambda x, w: jnp.matmul(x, w), (24,), (24, 7), (0,), (0,)),
    "einsum": (lambda x, w: jnp.einsum("bi,io->bo", x, w), (5, 24), (24, 7), (1,), (0,)),
    "einsum, attention": (
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (2, 5, 3, 8),
        (2, 6, 3, 8),
        (3,),
        (3,),
    ),
    "dot_general": (batched_dot, (3, 5, 24), (3, 24, 7), (2,), (1,)),
    "lax.dot": (lambda x, w: lax.dot(x, w), (5, 24), (24, 7), (1,), (0,)),
    "inner": (lambda x, w: jnp.inner(x, w), (5, 24), (7, 24), (1,), (1,)),
    "conv": (conv, (2, 8, 8, 3), (3, 3, 3, 5), (1, 2, 3), (0, 1, 2)),
}


@pytest.fixture(params=OPS)
def op(request):
    return OPS[request.param]


def draw(*shapes, dtype=np.float32, seed=None):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def own_dot_general(lhs, rhs, *args, **kwargs):
    return 2 * lax.dot_general(lhs, rhs, *args, **kwargs)


def int8_grid(x, axes):
    """NumPy's own quantize-dequantize: quantized values -127 to 127, absmax scale, in float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axis=axes, keepdims=True) / 127
    return np.round(x / scale) * scale


integer_dots = functools.partial(contractions, results=True)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_every_op_equals_the_grid_in_float64(transform):
    operands = {name: draw(*shapes, seed=0) for name, (_, *shapes, _, _) in OPS.items()}
    provider = PtqProvider([INT8])
    taps = {name: provider.apply(fn) for name, (fn, *_) in OPS.items()}
    found = transform(lambda given: {name: taps[name](*given[name]) for name in OPS})(operands)
    grids = {
        name: [int8_grid(x, axes) for x, axes in zip(operands[name], OPS[name][3:], strict=True)]
        for name in OPS
    }
    with jax.enable_x64(True):
        exact = jax.jit(lambda given: {name: OPS[name][0](*given[name]) for name in OPS})(grids)
    for name in OPS:
        assert found[name].dtype == jnp.float32, name
        actual, expected = np.asarray(found[name]), np.asarray(exact[name])
        # Quantized values may differ where float32 and float64 round a tie apart, by a scale.
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=0.05, err_msg=name)
        assert np.mean(np.abs(actual - expected) < 1e-4) > 0.9, name


def test_every_op_runs_in_int8_with_int32_sums(op):
    fn, x_shape, w_shape, *_ = op
    provider = PtqProvider([INT8])
    dots = integer_dots(provider.apply(fn), *draw(x_shape, w_shape))
    assert dots == [("int8", "int8", "int32")]
    assert all(record.quantized for record in operations(provider, fn, *draw(x_shape, w_shape)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_result_has_the_dtype_of_the_float_op(op, dtype):
    fn, x_shape, w_shape, *_ = op
    x, w = draw(x_shape, w_shape, dtype=dtype)
    result, expected = (jax.eval_shape(f, x, w) for f in (PtqProvider().apply(fn), fn))
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape


def test_preferred_element_type_is_kept():
    x, w = draw((4, 8), (8, 3), dtype=jnp.bfloat16)
    fn = PtqProvider().apply(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))
    assert fn(x, w).dtype == jnp.float32


@pytest.mark.slow
def test_gradients_are_those_of_the_float_op():
    operands = {name: draw(*shapes) for name, (_, *shapes, _, _) in OPS.items()}
    provider = PtqProvider()

    def gradients(fn, x, w):
        return jax.grad(lambda x, w: jnp.sum(fn(x, w)), (0, 1))(x, w)

    def all_of(given, wrap):
        return {name: gradients(wrap(OPS[name][0]), *given[name]) for name in given}

    eager = {name: operands[name] for name in ("einsum, attention", "conv")}
    expected = jax.jit(lambda given: all_of(given, lambda fn: fn))(operands)
    for ours in (
        all_of(eager, provider.apply),
        jax.jit(lambda given: all_of(given, provider.apply))(operands),
        jax.jit(lambda given: all_of(given, lambda fn: jax.jit(provider.apply(fn))))(operands),
    ):
        for name, found in ours.items():
            for a, b in zip(found, expected[name], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("side", [0, 1], ids=["lhs", "rhs"])
@pytest.mark.parametrize("value", ["zeros", "nan", "inf", "-inf", "huge", "tiny", "subnormal"])
def test_special_values_give_the_result_class_of_the_float_op(op, value, side):
    fn, x_shape, w_shape, *_ = op
    operands = draw(x_shape, w_shape)
    special = operands[side]
    if value == "zeros":
        special = jnp.zeros_like(special)
    elif value in ("huge", "tiny", "subnormal"):
        special = special * jnp.float32({"huge": 1e30, "tiny": 1e-36, "subnormal": 1e-42}[value])
    else:
        special = special.at[(0,) * special.ndim].set(float(value))
    operands[side] = special
    expected, actual = fn(*operands), PtqProvider().apply(fn)(*operands)
    finite, ours = np.isfinite(expected), np.isfinite(actual)
    if fn is conv and value in ("nan", "inf", "-inf"):
        # An image, or an output feature, shares a scale: all of it is affected, others are not.
        assert not ours[~finite].any()
        assert ours[1:].all() if side == 0 else ours[..., 1:].all()
    else:
        np.testing.assert_array_equal(ours, finite)
    if value == "zeros":
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w: x @ w, ((0, 4), (4, 3))),
        (lambda x, w: x @ w, ((2, 0), (0, 3))),
        (lambda x, w: jnp.dot(x, w), ((0,), (0,))),
        (lambda x, w: jnp.einsum("bi,bj->ij", x, w), ((0, 4), (0, 3))),
        (batched_dot, ((0, 2, 4), (0, 4, 3))),
        (conv, ((0, 8, 8, 3), (3, 3, 3, 5))),
        (conv, ((2, 0, 8, 3), (3, 3, 3, 5))),
    ],
)
def test_zero_size_operands(fn, shapes):
    x, w = draw(*shapes)
    np.testing.assert_array_equal(PtqProvider().apply(fn)(x, w), fn(x, w))


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (jnp.dot, (jnp.arange(3), jnp.arange(3)), "an operand is int32"),
        (lambda x: jnp.dot(x, 2.0), (jnp.ones(3),), "an operand is a float"),
        (lambda x: jnp.dot(x, x[0]), (jnp.ones(3),), "an operand is a scalar"),
        (
            lambda x: jnp.einsum("ij,jk,kl->il", x, x, x),
            (jnp.ones((3, 3)),),
            "3 operands are seen in their parts",
        ),
        (lambda x: jnp.einsum(x, [0, 1], x, [1, 2]), (jnp.ones((3, 3)),), "interleaved"),
        (lambda x: jnp.einsum("ii,ij->j", x, x), (jnp.ones((3, 3)),), "no label twice"),
        (
            lambda x: jnp.einsum("ij,jk->ik", x, x, _dot_general=own_dot_general),
            (jnp.ones((3, 3)),),
            "a dot_general of the program's own",
        ),
        (
            lambda x: lax.dot(x, x, preferred_element_type=jnp.int32),
            (jnp.ones((3, 3)),),
            "preferred_element_type is int32",
        ),
    ],
)
def test_what_stays_float_says_why(fn, args, reason):
    provider = PtqProvider([INT8])
    try:
        expected = fn(*args)
    except TypeError:
        with pytest.raises(TypeError):
            provider.apply(fn)(*args)
    else:
        np.testing.assert_allclose(provider.apply(fn)(*args), expected, rtol=0.02)
    first = operations(provider, lambda params, *args: fn(*args), (), *args)[0]
    assert not first.quantized
    assert reason in first.reason


def test_wrong_calls_raise_what_they_always_raised():
    x = jnp.ones((2, 3))
    for fn in (lambda: jnp.dot(x), lambda: x @ x, lambda: jnp.einsum("ij,jk->ik", x, x)):
        with pytest.raises((TypeError, ValueError)) as plain:
            fn()
        with pytest.raises(plain.type) as tapped:
            PtqProvider().apply(fn)()
        assert str(tapped.value) == str(plain.value)


def test_strict_promotion_still_refuses_mixed_operands():
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.float32)
    with pytest.raises(
        jax.errors.TypePromotionError if hasattr(jax.errors, "TypePromotionError") else ValueError
    ):
        PtqProvider().apply(lambda x, w: x @ w)(x, w)
    with jax.numpy_dtype_promotion("standard"):
        assert PtqProvider().apply(lambda x, w: x @ w)(x, w).dtype == (x @ w).dtype


# --- rules ---------------------------------------------------------------------------------------


def two_layers(params, x):
    with jax.named_scope("first"):
        x = x @ params["w"]
    with jax.named_scope("second"):
        return jnp.einsum("bi,io->bo", x, params["w"])


def layer_inputs():
    w, x = draw((8, 8), (4, 8))
    return {"w": w}, x


def test_first_match_decides():
    rules = [
        QuantizationRule(module_path="first"),
        QuantizationRule(module_path="first", weight_qtype="int8", act_qtype="int8"),
        INT8,
    ]
    with pytest.warns(QuantizationWarning, match="rule 1 has no effect"):
        plan = PtqProvider(rules).plan(two_layers, *layer_inputs())
    first, second = plan.ops
    assert (first.rule, first.quantized, first.reason) == (0, False, "the rule leaves it float")
    assert (second.rule, second.qtypes) == (2, ("int8", "int8"))


@pytest.mark.slow
def test_rules_on_equal_layers_that_share_a_jitted_block():
    block = jax.jit(lambda x, w: x @ w)

    def model(x, w):
        with jax.named_scope("first"):
            a = block(x, w)
        with jax.named_scope("second"):
            return a, block(x, w)

    provider = PtqProvider(
        [QuantizationRule(module_path="second", weight_qtype="int8", act_qtype="int8")]
    )
    x, w = draw((4, 8), (8, 8))
    plain = block(x, w)
    for fn in (provider.apply(model), jax.jit(provider.apply(model))):
        first, second = fn(x, w)
        np.testing.assert_array_equal(first, plain)
        assert np.abs(second - plain).max() > 0
    np.testing.assert_array_equal(block(x, w), plain)
    seen = [record.quantized for record in operations(provider, model, x, w)]
    assert seen == [False, False, True]


def test_op_names(engine):
    provider = PtqProvider(
        [QuantizationRule(op_names=["einsum"], weight_qtype="int8", act_qtype="int8")]
    )
    found = operations(provider, two_layers, *layer_inputs())
    by_name = {record.op_name: record for record in found}
    assert by_name["einsum"].quantized
    assert by_name["matmul"].reason == "no rule matches"
    inner = {"trace": "first/dot_general:0", "patch": "first/jit(matmul)/dot_general:0"}
    assert by_name["dot_general"].op_id == inner[engine]


def test_an_op_without_a_rule_is_looked_into():
    provider = PtqProvider(
        [QuantizationRule(op_names=["dot_general"], weight_qtype="int8", act_qtype="int8")]
    )
    x, w = draw((4, 8), (8, 3))
    dots = integer_dots(provider.apply(lambda x, w: x @ w), x, w)
    assert dots == [("int8", "int8", "int32")]


def test_a_rule_for_float_covers_the_parts():
    provider = PtqProvider([QuantizationRule(op_names=["einsum"]), INT8])
    x, w = draw((4, 8), (8, 3))
    dots = integer_dots(provider.apply(lambda x, w: jnp.einsum("bi,io->bo", x, w)), x, w)
    assert dots == [("float32",) * 3]


def test_weight_only_knows_weights_by_their_path():
    provider = PtqProvider([QuantizationRule(weight_qtype="int8")])
    params, x = layer_inputs()

    def model(params, x):
        return (x @ params["w"]) @ x.T

    result = provider.apply(model)(params, x)
    grid = int8_grid(params["w"], (0,))
    np.testing.assert_allclose(
        result, np.asarray(x, np.float64) @ grid @ np.asarray(x).T, rtol=1e-3, atol=1e-3
    )
    weight, activations = operations(provider, model, params, x)
    assert weight.qtypes == (None, "int8")
    assert weight.paths == ("args[0]['w']",)
    assert activations.reason == "the rule is for weights, and no operand is known as a parameter"


def test_numpy_weights_and_numpy_padding():
    provider = PtqProvider([QuantizationRule(weight_qtype="int8")])

    def model(params, x):
        padding = np.array([[1, 1], [1, 1]])
        return lax.conv_general_dilated(x, params["k"], [1, 1], padding, dimension_numbers=LAYOUT)

    x, k = (np.asarray(value) for value in draw((2, 8, 8, 3), (3, 3, 3, 5)))
    result = provider.apply(model)({"k": k}, x)
    np.testing.assert_allclose(result, conv(x, k), atol=0.3)
    (record,) = operations(provider, model, {"k": k}, x)
    assert record.paths == ("args[0]['k']",)


@pytest.mark.parametrize("act", [None, "int8"])
def test_a_padding_that_can_be_read_once(act):
    def model(k, x):
        return lax.conv_general_dilated(x, k, (1, 1), zip((1, 1), (1, 1), strict=True))

    x, k = draw((2, 3, 6, 6), (4, 3, 3, 3))
    provider = PtqProvider(QuantizationRule(weight_qtype="int8", act_qtype=act))
    found = jax.jit(provider.apply(model))(k, x)
    np.testing.assert_allclose(found, model(k, x), atol=0.3)
    (record,) = operations(provider, model, k, x)
    assert (record.paths, record.qtypes) == (("args[0]",), (act, "int8"))


def test_weights_on_the_left_and_as_another_argument():
    provider = PtqProvider([QuantizationRule(weight_qtype="int4")], params_argnum=1)
    x, w = draw((8, 4), (6, 8))
    (record,) = provider.plan(lambda x, w: w @ x, w, x).ops
    assert record.qtypes == ("int4", None)
    assert record.paths == ("args[1]",)


@pytest.mark.parametrize("tile", [2, 4, 8])
def test_tiles(tile):
    provider = PtqProvider(
        [QuantizationRule(weight_qtype="int4", act_qtype="int8", tile_size=tile)]
    )
    w, x = draw((8, 3), (5, 8))

    def grid(values, qmax):
        tiles = np.asarray(values, np.float64).reshape(-1, 8 // tile, tile)
        scale = np.abs(tiles).max(axis=-1, keepdims=True) / qmax
        return (np.round(tiles / scale) * scale).reshape(-1, 8)

    result = provider.apply(lambda w, x: x @ w)(w, x)
    np.testing.assert_allclose(result, grid(x, 127) @ grid(w.T, 7).T, rtol=1e-3, atol=1e-3)


# By a rule's fields: what is wrong, and which values of tile_fallback help.
MISFITS = {
    "int8": ({"tile_size": 3, "tile_fallback": None}, "tile_size 3 does not divide contracted [40]",
             "tile_fallback='divisor' or tile_fallback='channel' or tile_fallback='padded' or "
             "another tile_size"),
    "mxfp8": ({}, "the block of mxfp8, 32, does not divide contracted [40]",
              "tile_fallback='padded' or a format without blocks"),
    "mxfp4": ({"tile_fallback": "channel"}, "the block of mxfp4, 32, does not divide contracted",
              "tile_fallback='padded' or a format without blocks"),
    "nvfp4": ({"tile_fallback": None}, "the block of nvfp4, 16, does not divide contracted [40]",
              "tile_fallback='padded' or a format without blocks"),
}  # fmt: skip


@pytest.mark.parametrize("qtype", MISFITS)
def test_tiles_that_do_not_fit(qtype):
    """An error in plans and without, in training, too; with a value that it names there is none."""
    fields, reason, instead = MISFITS[qtype]
    (w,), (x,) = draw((40, 8)), draw((4, 40), seed=1)

    def fn(w, x):
        return x @ w

    def attempts(**more):
        for act in (None, qtype):
            rule = QtRule(weight_qtype=qtype, act_qtype=act, **(fields | more))
            yield lambda rule=rule: PtqProvider(rule).plan(fn, w, x)
            yield lambda rule=rule: PtqProvider(rule).apply(fn)(w, x)
            yield lambda rule=rule: QtProvider(rule).apply(fn)(w, x)
            yield lambda rule=rule: QtProvider(rule).plan(fn, w, x)

    for attempt in attempts():
        with pytest.raises(QuantizationError) as raised:
            attempt()
        assert "an operand of matmul:0" in str(raised.value)
        assert reason in str(raised.value)
        assert f"Give the rule {instead}" in str(raised.value)
    *_, plan = [attempt() for attempt in attempts(tile_fallback="padded")]
    assert plan.ops[0].quantized


def test_tiles_of_a_convolution():
    image, kernel = draw((1, 8, 8, 5), (3, 3, 5, 5))
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=5, tile_fallback=None)
    with pytest.raises(QuantizationError, match=r"convolutions of float inputs.*'channel' or"):
        PtqProvider(rule, params_argnum=1).apply(conv)(image, kernel)


# --- in programs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_control_flow_and_transformations():
    # Drawn once: four quantized contractions in a row bound their error for most draws, not for
    # all.
    x, w = draw((6, 8), (8, 8), seed=0)

    def model(w, x):
        h = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        h = lax.cond(h[0, 0] > 2, lambda h: h, lambda h: h @ w, h)
        _, rows = lax.scan(lambda c, row: (c, row @ w), 0, h)
        return jax.vmap(lambda row: jnp.dot(w, row))(rows).sum()

    quantized = PtqProvider().apply(model)
    expected = model(w, x)
    for fn in (quantized, jax.jit(quantized)):
        np.testing.assert_allclose(fn(w, x), expected, rtol=0.1, atol=2.0)
    plain_grad = jax.grad(model)(w, x)
    for fn in (jax.grad(quantized), jax.jit(jax.grad(quantized))):
        cosine = jnp.vdot(fn(w, x), plain_grad) / (
            jnp.linalg.norm(fn(w, x)) * jnp.linalg.norm(plain_grad)
        )
        assert cosine > 0.99
    dots = integer_dots(quantized, w, x)
    assert len(dots) == 4
    assert all(dot == ("int8", "int8", "int32") for dot in dots)


@pytest.mark.slow
def test_flax_and_equinox_models_by_their_paths():
    import equinox as eqx
    from flax import linen, nnx

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.Conv(8, (3, 3), name="conv")(x)).reshape(x.shape[0], -1)
            return linen.Dense(10, name="head")(x)

    (images,) = draw((4, 8, 8, 1))
    net = Net()
    variables = net.init(jax.random.key(0), images)
    provider = PtqProvider([QuantizationRule(module_path="Net/conv"), INT8])
    result = provider.apply(net.apply)(variables, images)
    np.testing.assert_allclose(result, net.apply(variables, images), atol=0.1)
    convolution, head = provider.plan(net.apply, variables, images).ops
    assert convolution.reason == "the rule leaves it float"
    assert head.op_id == "Net/head/dot_general:0"
    assert head.paths == ("args[0]['params']['head']['kernel']",)

    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    mlp = jax.vmap(eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0)))
    (x,) = draw((5, 8))
    for fn in (lambda x: linear(x), lambda x: mlp(x)):
        provider = PtqProvider()
        np.testing.assert_allclose(provider.apply(fn)(x), fn(x), atol=0.2)
        assert all(record.quantized for record in operations(provider, fn, x))


@pytest.mark.parametrize("name", ["pallas_call", "kernel", "kernel on references"])
def test_pallas_kernels_stay_as_they_are(name):
    def body(a, b, out):
        out[...] = jnp.dot(a[...], b[...])

    # It is made before the model is wrapped, as a library's kernel is.
    kernel = kernel_makers(body, jax.ShapeDtypeStruct((8, 8), jnp.float32))[name]()

    def model(x, w):
        return kernel(x, w) @ w

    x, w = draw((8, 8), (8, 8))
    provider = PtqProvider([INT8], params_argnum=1)
    assert integer_dots(provider.apply(model), x, w) == [
        ("float32",) * 3,
        ("int8", "int8", "int32"),
    ]
    seen = [record.op_id for record in operations(provider, model, w, x) if record.quantized]
    assert seen == ["matmul:0"]


@pytest.mark.slow
def test_float_is_bit_identical_before_between_and_after():
    block = jax.jit(lambda w, x: jnp.tanh(x @ w) @ w)
    w, x = draw((8, 8), (4, 8))
    before = block(w, x)
    int8, int4 = (
        PtqProvider([QuantizationRule(weight_qtype=q, act_qtype=q)]).apply(block)
        for q in ("int8", "int4")
    )
    results = [int8(w, x), block(w, x), int4(w, x), block(w, x), int8(w, x), block(w, x)]
    for plain in results[1::2]:
        np.testing.assert_array_equal(plain, before)
    np.testing.assert_array_equal(results[0], results[4])
    assert np.abs(results[0] - results[2]).max() > 0
    assert np.abs(results[0] - before).max() > 0


# --- as a plugin ---------------------------------------------------------------------------------


def test_by_name():
    provider = get_provider("ptq", rules=[INT8])
    assert isinstance(provider, PtqProvider)
    with pytest.raises(UnknownNameError, match="ptq"):
        get_provider("pqt")


def test_report_as_table_and_json():
    ops = PtqProvider([INT8]).plan(two_layers, *layer_inputs(), kernels=False).ops
    text = str(ops)
    assert "first/matmul:0" in text
    assert "2 of 2 operations quantized" in text
    assert ops.as_json()[0] == {
        "op_id": "first/matmul:0",
        "op_name": "matmul",
        "operands": ("f32[4,8]", "f32[8,8]"),
        "qtypes": ("int8", "int8"),
        "rule": 0,
        "reason": None,
        "paths": ("args[0]['w']",),
        "kernels": {},
        "adapter": None,
        "chained_to": None,
        "module_path": "first",
    }
    assert len(ops) == 2

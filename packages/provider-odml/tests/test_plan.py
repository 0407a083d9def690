"""Plans: what is decided for each kind of operation, and that both engines find the same."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jaxtap_testkit.odml_samples import MLP, MODELS, W8A8, W8A16, Cnn, avg_pool, draw, mlp, plan_of
from jaxtap_testkit.strict import checking_leaks
from provider_odml import OdmlError, OdmlRule, qat
from provider_odml.capture.ops import Scales
from provider_odml.capture.survey import survey
from provider_odml.decide.decide import Options, decide
from provider_odml.decide.decision import ConstantUse, DynamicUse, SiteUse, WeightUse

pytestmark = pytest.mark.sample(2)

W, X = draw(6, 8, seed=1), draw(4, 6)
IMAGE, KERNEL = draw(2, 8, 8, 3), draw(3, 3, 3, 5, seed=1)
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NHWC)


def decisions(plan):
    """By op id, without the outputs."""
    return {key: d for key, d in plan.decisions.items() if d.node.op.name != "output"}


def decided(plan, name):
    """The decision of the one operation of a name."""
    (found,) = [d for d in plan.decisions.values() if d.node.op.name == name]
    return found


def site_of(use):
    assert isinstance(use, SiteUse)
    return use.site


def seen(plan):
    """What must not depend on the engine or on jit."""
    rows = [
        (key, d.rule, dict(d.inputs), d.output, d.is_float, d.reason, d.fused, d.head)
        for key, d in plan.decisions.items()
    ]
    return rows, dict(plan.sites), plan.problems


# Products, and what is folded into them.


def test_a_product_has_ranges_of_input_and_output_and_a_weight_per_channel():
    plan = plan_of(lambda w, x: x @ w, W, X)
    d = decided(plan, "dot_general")
    assert d.inputs == {0: SiteUse("args[1]", observe=True), 1: WeightUse("int8", (1,), "absmax")}
    assert d.output == SiteUse("dot_general:0", observe=True)
    assert list(plan.sites) == ["args[1]", "dot_general:0"]
    assert not d.is_float


@pytest.mark.parametrize(
    ("fn", "w", "x", "axes"),
    [
        (lambda w, x: x @ w.T, (8, 6), (4, 6), (1,)),
        (lambda w, x: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), (8, 6), (4, 6), (0,)),
        (lambda w, x: jnp.einsum("bi,iho->bho", x, w), (6, 2, 4), (4, 6), (1, 2)),
        (lambda w, x: jnp.einsum("bhi,hio->bo", x, w), (2, 6, 4), (4, 2, 6), (2,)),
        (lambda w, x: jnp.einsum("bhi,hio->bho", x, w), (2, 6, 4), (4, 2, 6), ()),
        (lambda w, x: conv(x, w), (3, 3, 3, 5), (2, 8, 8, 3), (3,)),
    ],
    ids=["transposed", "contracted last", "heads", "two contracted", "batched", "convolution"],
)
def test_channels_are_the_axes_that_are_not_summed(engine, fn, w, x, axes):
    plan = plan_of(fn, draw(*w), draw(*x), engine=engine)
    (product,) = [d for d in decisions(plan).values() if d.node.op.kind is Scales.CONTRACTION]
    (use,) = [u for u in product.inputs.values() if isinstance(u, WeightUse)]
    assert use.channel_axes == axes


def test_weights_with_one_scale():
    plan = plan_of(lambda w, x: x @ w, W, X, disable_per_channel_weights=True)
    assert decided(plan, "dot_general").inputs[1] == WeightUse("int8", (), "absmax")


def conv_bias_norm_relu(params, x):
    y = conv(x, params["k"]) + params["b"]
    return jax.nn.relu((y - params["mean"]) * params["scale"] + params["shift"])


NORMED = {
    "k": KERNEL,
    **{n: draw(5, seed=i) for i, n in enumerate(("b", "mean", "scale", "shift"))},
}


def test_bias_and_batch_norm_by_hand_and_relu_are_folded_into_a_convolution(engine):
    plan = plan_of(conv_bias_norm_relu, NORMED, IMAGE, engine=engine)
    assert list(plan.sites) == ["args[1]", "relu:0"]
    *chain, last = decisions(plan).values()
    assert [d.output for d in chain] == [None] * len(chain)
    assert all(d.fused for d in [*chain[1:], last])
    assert last.output == SiteUse("relu:0", observe=True)
    assert {d.head for d in chain[1:]} == {"conv_general_dilated:0"}


@pytest.mark.slow
def test_bias_and_batch_norm_and_relu_of_flax_are_folded_into_a_convolution(engine):
    fn, params, x = MODELS["linen"]()
    plan = plan_of(fn, params, x, engine=engine)
    kept = {key: d.output for key, d in decisions(plan).items() if "Dense" not in key}
    assert kept["Cnn/Conv_0/conv_general_dilated:0"] is None
    assert kept["Cnn/BatchNorm_0/batch_norm_op:0"] is None
    assert site_of(kept["Cnn/relu:0"]) == "Cnn/relu:0"
    assert plan.chains()["Cnn/Conv_0/conv_general_dilated:0"] == "Cnn/BatchNorm_0/batch_norm_op:0"


@pytest.mark.slow
def test_the_bias_of_heads_is_folded_into_their_product(engine):
    model, x = nn.DenseGeneral((2, 4)), draw(3, 6)
    plan = plan_of(model.apply, model.init(jax.random.key(0), x), x, engine=engine)
    assert list(plan.sites) == ["args[1]", "DenseGeneral/add:0"]
    assert decided(plan, "add").fused


@pytest.mark.parametrize(
    ("bias", "folded"), [((8,), True), ((), True), ((1, 1), True), ((4, 8), False), ((4, 1), False)]
)
def test_only_what_is_the_same_but_along_the_channels_is_folded(bias, folded):
    fn, params = (lambda p, x: x @ p["w"] + p["b"]), {"w": W, "b": draw(*bias)}
    plan = plan_of(fn, params, X)
    assert decided(plan, "add").fused is folded
    assert ("dot_general:0" in plan.sites) is not folded


def test_a_reshaped_bias_is_not_folded_where_its_axis_is_no_channel():
    def fn(p, x):
        return (x @ p["w"]).reshape(8, 4) + p["b"]

    plan = plan_of(fn, {"w": W, "b": draw(4)}, X)
    assert not decided(plan, "add").fused


def test_what_two_operations_read_is_not_folded_into_one_of_them():
    def fn(p, x):
        h = x @ p["w"]
        return (h + p["b"]) * h

    plan = plan_of(fn, {"w": W, "b": draw(8)}, X)
    assert {"dot_general:0", "add:0", "mul:0"} <= set(plan.sites)
    assert not decided(plan, "add").fused


def test_a_product_of_activations_reads_the_sites_of_both():
    plan = plan_of(lambda p, x: jnp.tanh(x) @ x.T, {}, X)
    d = decided(plan, "dot_general")
    assert not any(isinstance(use, WeightUse) for use in d.inputs.values())
    assert set(plan.sites) == {"args[1]", "tanh:0", "dot_general:0"}


# One operation of each kind.


def test_arithmetic_has_scales_of_its_own_and_constants_a_range_of_theirs():
    plan = plan_of(lambda p, x: jnp.tanh(x) * p["s"] + jnp.tanh(x), {"s": draw(6)}, X)
    assert decided(plan, "mul").inputs == {1: ConstantUse("int8")}
    assert decided(plan, "add").inputs == {}
    assert {"mul:0", "add:0"} <= set(plan.sites)


@pytest.mark.parametrize("by", [2.0, "parameter"])
def test_division_by_a_constant_multiplies_with_its_inverse(by):
    plan = plan_of(lambda p, x: jnp.tanh(x) / (p if by == "parameter" else by), draw(6), X)
    assert decided(plan, "truediv").inputs == {1: ConstantUse("int8", inverted=True)}


def test_division_by_an_activation_is_an_island():
    plan = plan_of(lambda p, x: jnp.tanh(x) / x, {}, X)
    d = decided(plan, "truediv")
    assert d.is_float
    assert "division" in str(d.reason)
    assert d.output == SiteUse("div:0", observe=True)


@pytest.mark.parametrize(
    ("fn", "name", "fixed"),
    [
        (jax.nn.softmax, "softmax", (0, 255 / 256)),
        (jax.nn.sigmoid, "logistic", (0, 255 / 256)),
        (jnp.tanh, "tanh", (-1, 127 / 128)),
        (jax.nn.gelu, "gelu", None),
        (jnp.negative, "neg", None),
        (jnp.abs, "abs", None),
        (jnp.square, "square", None),
        (lambda x: x.sum(-1), "sum", None),
        (lambda x: x.mean(-1), "mean", None),
        (jax.nn.leaky_relu, "leaky_relu", None),
        (jax.nn.log_softmax, "log_softmax", None),
        (jax.nn.hard_swish, "hard_swish", None),
    ],
)
def test_functions_of_one_tensor_have_a_range_that_is_fixed_where_litert_says_so(
    engine, fn, name, fixed
):
    plan = plan_of(lambda p, x: fn(x), {}, X, engine=engine)
    d = decided(plan, name)
    assert len(decisions(plan)) == 1
    assert d.inputs == {0: SiteUse("args[1]", observe=True)}
    assert plan.sites[site_of(d.output)].fixed == fixed
    assert not d.is_float


@pytest.mark.parametrize("fn", [jax.nn.softmax, jax.nn.sigmoid, jnp.tanh])
def test_the_fixed_range_of_int16_is_that_of_32768_steps(fn):
    plan = plan_of(lambda p, x: fn(x), {}, X, rules=[W8A16])
    *_, site = plan.sites.values()
    assert site.fixed == (-32767 / 32768, 32767 / 32768)
    assert site.is_symmetric


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: jnp.clip(x, -1, 1), "clip"),
        (lambda x: jnp.pad(x, ((0, 0), (1, 1))), "pad"),
        (jax.nn.relu, "relu"),
    ],
)
def test_a_clamped_tensor_has_the_scale_of_the_output(fn, name):
    """The operation before quantizes with it, for nothing but that operation."""
    plan = plan_of(lambda p, x: fn(x.sum(-1, keepdims=True)), {}, X)
    before, after = decided(plan, "sum"), decided(plan, name)
    if before.output is not None:  # None: fused
        assert before.output == SiteUse(site_of(after.output), device_only=True)
    assert site_of(after.output) == f"{name}:0"
    assert "reduce_sum:0" not in plan.sites


def test_concatenated_tensors_share_the_scale_of_the_output():
    def fn(p, x):
        return jnp.concatenate([x.sum(-1, keepdims=True), x.mean(-1, keepdims=True)], -1)

    plan = plan_of(fn, {}, X)
    assert set(plan.sites) == {"args[1]", "concatenate:0"}
    for name in ("sum", "mean"):
        assert decided(plan, name).output == SiteUse("concatenate:0", device_only=True)
    assert decided(plan, "concatenate").output == SiteUse("concatenate:0", observe=True)


def test_a_concatenated_tensor_with_another_reader_keeps_its_scale():
    def fn(p, x):
        h = x.sum(-1, keepdims=True)
        return jnp.concatenate([h, x], -1) * h

    plan = plan_of(fn, {}, X)
    assert {"reduce_sum:0", "concatenate:0"} <= set(plan.sites)


def test_what_is_resized_and_concatenated_has_one_scale():
    """Its range is that of what is resized, too: averages are nearer to each other."""

    def fn(p, x, y):
        up = jax.image.resize(jnp.abs(x), (2, 8, 8, 3), "bilinear")
        return jnp.concatenate([up, jnp.square(y)], -1)

    plan = plan_of(fn, {}, draw(2, 4, 4, 3), draw(2, 8, 8, 3))
    assert decided(plan, "abs").output == SiteUse("concatenate:0", observe=True)
    assert decided(plan, "resize").output == SiteUse("concatenate:0", device_only=True)
    assert decided(plan, "square").output == SiteUse("concatenate:0", device_only=True)
    assert set(plan.sites) == {"args[1]", "args[2]", "concatenate:0"}
    assert plan.sites["concatenate:0"].is_joined


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: x.max(-1), "reduce_max"),
        (lambda x: x.min(-1), "reduce_min"),
        (lambda x: nn.max_pool(x, (2,), (2,)), "max_pool"),
        (lambda x: jnp.repeat(x, 2, axis=1), "repeat"),
        (lambda x: x[:, jnp.array([0, 2])], "take"),
    ],
)
def test_what_picks_values_keeps_their_scale(fn, name):
    plan = plan_of(lambda p, x: fn(jnp.tanh(x)), {}, draw(2, 4, 3))
    assert site_of(decided(plan, name).output) == "tanh:0"
    assert set(plan.sites) == {"args[1]", "tanh:0"}


@pytest.mark.parametrize("before", [jnp.tanh, jnp.sin, lambda x: x], ids=["tanh", "sin", "input"])
def test_an_average_keeps_the_scale_of_its_input(engine, before):
    fn = lambda p, x: avg_pool(before(x))  # noqa: E731
    plan = plan_of(fn, {}, draw(2, 4, 4, 1), engine=engine)
    d = decided(plan, "avg_pool")
    key = {"tanh": "tanh:0", "sin": "sin:0"}.get(getattr(before, "__name__", ""), "args[1]")
    assert site_of(d.output) == key
    assert d.inputs == ({} if key == "tanh:0" else {0: SiteUse(key, observe=True)})


@pytest.mark.parametrize(
    "look", [lambda t, i: t[i], lambda t, i: jnp.take(t, i, axis=0)], ids=["[]", "take"]
)
def test_rows_of_a_table_have_the_scale_of_the_table(engine, look):
    fn = lambda p, i: look(p["t"], i) @ p["w"]  # noqa: E731
    ids = jnp.array([[1, 4], [0, 8]])
    plan = plan_of(fn, {"t": draw(9, 6), "w": W}, ids, engine=engine)
    assert decided(plan, "take").inputs == {0: ConstantUse("int8")}
    assert set(plan.sites) == {"dot_general:0"}


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T.T,
        lambda x: x.reshape(2, 2, 6).reshape(4, 6),
        lambda x: x[None][0],
        lambda x: x[::-1],
        lambda x: lax.stop_gradient(x),
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
        lambda x: jnp.split(x, 2)[0],
        lambda x: x[1:3],
    ],
)
def test_another_form_of_a_tensor_is_the_same_tensor(engine, view):
    plan = plan_of(lambda w, x: view(jnp.tanh(x)) @ w, W, X, engine=engine)
    assert set(plan.sites) == {"args[1]", "tanh:0", "dot_general:0"}
    assert decided(plan, "dot_general").inputs == {1: WeightUse("int8", (1,), "absmax")}


def test_what_is_float_on_the_device_is_quantized_where_it_is_read():
    plan = plan_of(lambda w, x: jnp.sin(x) @ w + jnp.sin(x) @ w, W, X)
    for d in decisions(plan).values():
        assert d.is_float is (d.node.op.name == "sin")
    assert set(plan.sites) == {"sin:0", "dot_general:0", "sin:1", "dot_general:1", "add:0"}


def test_two_readers_of_a_tensor_share_its_site(engine):
    def fn(w, x):
        h = jnp.sin(x)
        return h @ w + h @ w

    plan = plan_of(fn, W, X, engine=engine)
    uses = [d.inputs[0] for d in plan.decisions.values() if d.node.op.name == "dot_general"]
    assert uses == [SiteUse("sin:0", observe=True), SiteUse("sin:0")]


def test_an_operation_that_litert_does_not_know():
    fn = lambda w, x: jnp.sinh(x @ w)  # noqa: E731
    with pytest.raises(OdmlError, match=r"sinh:0.*rule without qtypes.*strict=False"):
        plan_of(fn, W, X)
    d = decided(plan_of(fn, W, X, strict=False), "sinh")
    assert d.is_float
    assert "sinh" in str(d.reason)
    assert not plan_of(fn, W, X, rules=[OdmlRule(op_names=["dot_general"], **INT8)]).problems


INT8 = {"weight_qtype": "int8", "output_qtype": "int8"}


@pytest.mark.parametrize(
    ("fn", "rule", "name", "reason"),
    [
        (lambda x: jax.nn.selu(x), W8A8, "selu", "no integer kernel for selu"),
        (lambda x: jnp.var(x, -1), W8A8, "var", "no integer kernel for var"),
        (jax.nn.standardize, W8A8, "standardize", "no integer kernel for standardize"),
        (lambda x: jax.nn.relu6(x), W8A16, "relu6", "no int16 kernel"),
        (lambda x: jax.nn.gelu(x), W8A16, "gelu", "no int16 kernel"),
        (lambda x: jnp.concatenate([x, x]), W8A16, "concatenate", "no int16 kernel"),
        (lambda x: jnp.tanh(x) + x[:1], W8A16, "add", "no int16 of different shapes"),
    ],
)
def test_an_island_says_why(fn, rule, name, reason):
    plan = plan_of(lambda p, x: fn(x), {}, X, rules=[rule])
    d = decided(plan, name)
    assert d.is_float
    assert reason in str(d.reason)
    assert reason in str(plan)


def test_a_norm_is_an_island_between_integers(engine):
    fn, params, x = MODELS["nnx"]()
    plan = plan_of(fn, params, x, engine=engine)
    d = decided(plan, "norm_op")
    assert d.is_float
    assert "norm_op" in str(d.reason)
    assert site_of(d.output) == d.node.op_id
    names = [d.node.op.name for d in decisions(plan).values()]
    assert names == ["dot_general", "add", "norm_op", "gelu", "dot_general", "add"]


def test_parameters_alone_are_not_operations():
    """What is computed from parameters alone is a constant to the device."""
    plan = plan_of(lambda p, x: x @ jnp.tanh(p["w"] * p["s"]), {"w": W, "s": draw(8)}, X)
    assert list(decisions(plan)) == ["dot_general:0"]


# Modes.


def test_dynamic_ranges_are_for_products_of_parameters():
    rule = OdmlRule(weight_qtype="int4", input_qtype="int8")
    plan = plan_of(mlp, MLP, X, rules=[rule])
    products = [d for d in plan.decisions.values() if d.node.op.name == "dot_general"]
    for d in products:
        assert d.inputs == {0: DynamicUse((0,)), 1: WeightUse("int4", (1,), "absmax")}
    assert [d for d in plan.decisions.values() if d.is_active] == products
    assert not plan.sites


def test_blocks_run_along_what_is_contracted():
    rule = OdmlRule(weight_qtype="int4", input_qtype="int8", tile_size=32)
    w = {"table": draw(5, 32), "heads": draw(4, 16, 6), "left": draw(7, 64)}

    def fn(p, ids, x):
        h = jnp.einsum("bhd,hdm->bm", x, p["heads"])
        return p["table"][ids], h, p["left"] @ x.reshape(-1, 64).T

    ids, x = jnp.zeros(3, jnp.int32), draw(2, 4, 16)
    plan = qat(fn, [rule]).plan(w, ids, x)
    found = [use for d in plan.decisions.values() for use in d.inputs.values()]
    assert [use for use in found if isinstance(use, WeightUse)] == [
        WeightUse("int4", (2,), "absmax", 32, (0, 1)),
        WeightUse("int4", (0,), "absmax", 32, (1,)),
        WeightUse("int4", (0,), "absmax", 32, (1,)),
    ]
    assert str(plan).count("int4/32") == 3


BLOCKS = {"weight_qtype": "int4", "input_qtype": "int8", "tile_size": 32}


@pytest.mark.parametrize(
    ("fn", "w", "fields", "match"),
    [
        (lambda w, x: x @ w, (48, 8), BLOCKS, "do not divide the contracted axes, which have 48"),
        (lambda w, x: w[x[0].astype(int)], (8, 48), BLOCKS, "do not divide rows, which have 48"),
        (lambda w, x: x @ w, (64, 8), {**BLOCKS, "input_qtype": None}, "int4 alone, with input_q"),
        (lambda w, x: x @ w, (64, 8), {**BLOCKS, "weight_qtype": "int2"}, "int4 alone, with input"),
        (
            lambda w, x: jnp.einsum("bhd,hde->bhe", x.reshape(len(x), 2, -1), w),
            (2, 32, 8),
            BLOCKS,
            "one matrix of parameters alone",
        ),
        (
            lambda w, x: lax.conv(x.reshape(-1, 64, 1, 1), w, (1, 1), "SAME"),
            (8, 64, 1, 1),
            BLOCKS,
            "one matrix of parameters alone",
        ),
    ],
)
def test_blocks_that_the_device_lacks_are_told_before_training(fn, w, fields, match):
    w = draw(*w)
    x = draw(2, 48 if 48 in w.shape else 64)
    model = qat(fn, [OdmlRule(**fields)])
    with pytest.raises(OdmlError, match=match):
        model.plan(w, x)
    plan = qat(fn, [OdmlRule(**fields)], strict=False).plan(w, x)
    (use,) = [u for d in plan.decisions.values() for u in d.inputs.values() if hasattr(u, "method")]
    assert use.tile_size is None


def test_weight_only_is_for_products_of_parameters():
    plan = plan_of(mlp, MLP, X, rules=[OdmlRule(weight_qtype="int2")])
    found = [dict(d.inputs) for d in plan.decisions.values() if d.is_active]
    assert found == [{1: WeightUse("int2", (1,), "absmax")}] * 2
    assert not plan.sites


def test_a_static_rule_without_a_weight_qtype_leaves_the_product_float():
    plan = plan_of(lambda w, x: x @ w, W, X, rules=[OdmlRule(output_qtype="int8")])
    d = decided(plan, "dot_general")
    assert d.is_float
    assert "float" in str(d.reason)


# Rules.


def test_rules_by_module_path_and_a_boundary_of_int8_and_int16():
    def fn(p, x):
        with jax.named_scope("enc"):
            h = jnp.tanh(x @ p["w"])
        with jax.named_scope("dec"):
            return h @ p["v"]

    enc, dec = (
        OdmlRule(module_path="enc", **INT8),
        OdmlRule(module_path="dec", weight_qtype="int8", output_qtype="int16"),
    )
    plan = plan_of(fn, {"w": W, "v": draw(8, 3)}, X, rules=[enc, dec])
    assert {key: d.rule for key, d in decisions(plan).items()} == {
        "enc/dot_general:0": 0,
        "enc/tanh:0": 0,
        "dec/dot_general:0": 1,
    }
    assert plan.sites["enc/tanh:0"].qtype == "int8"
    boundary = plan.sites[site_of(plan.decisions["dec/dot_general:0"].inputs[0])]
    assert (boundary.tensor, boundary.qtype) == ("enc/tanh:0", "int16")


def two_products(p, x):
    return jnp.matmul(jnp.tanh(jnp.einsum("bi,io->bo", x, p["w"])), p["v"])


@pytest.mark.parametrize(
    ("names", "quantized"),
    [
        (["einsum"], ["bi,io->bo/dot_general:0"]),
        (["matmul"], ["dot_general:0"]),
        (["dot_general"], ["bi,io->bo/dot_general:0", "dot_general:0"]),
        (["tanh"], ["tanh:0"]),
        (["einsum", "tanh"], ["bi,io->bo/dot_general:0", "tanh:0"]),
    ],
)
def test_rules_by_name(engine, names, quantized):
    rule, params = OdmlRule(op_names=names, **INT8), {"w": W, "v": draw(8, 3)}
    plan = plan_of(two_products, params, X, rules=[rule], engine=engine)
    assert [key for key, d in plan.decisions.items() if d.is_active] == quantized


def test_the_first_rule_that_matches_decides():
    plan = plan_of(lambda w, x: jnp.tanh(x @ w), W, X, rules=[OdmlRule(op_names=["tanh"]), W8A8])
    assert decided(plan, "tanh").is_float
    assert decided(plan, "tanh").rule == 0
    assert decided(plan, "dot_general").rule == 1


def test_a_rule_that_decides_nothing():
    rules = [W8A8, OdmlRule(module_path="decoder.*")]
    with pytest.raises(OdmlError, match=r"rule 1 has no effect.*decoder"):
        plan_of(mlp, MLP, X, rules=rules)
    (problem,) = plan_of(mlp, MLP, X, rules=rules, strict=False).problems
    assert "rule 1" in problem


# Ranges that are given.


def test_the_ranges_of_inputs_and_outputs():
    plan = plan_of(
        lambda w, x, y: (x + y) @ w, W, X, X,
        fixed_range_for_inputs=(-1, 2), fixed_range_for_outputs=(-3, 4),
    )  # fmt: skip
    fixed = {key: site.fixed for key, site in plan.sites.items()}
    assert fixed == {
        "args[1]": (-1, 2),
        "args[2]": (-1, 2),
        "add:0": None,
        "dot_general:0": (-3, 4),
    }


def test_int16_ranges_are_symmetric():
    plan = plan_of(lambda w, x: x @ w, W, X, rules=[W8A16], fixed_range_for_inputs=(-1, 2))
    assert plan.sites["args[1]"].fixed == (-2, 2)
    assert all(site.is_symmetric for site in plan.sites.values())


@pytest.mark.slow
def test_the_range_of_outputs_is_not_that_of_a_softmax():
    plan = plan_of(lambda w, x: jax.nn.softmax(x @ w), W, X, fixed_range_for_outputs=(0, 1))
    assert plan.sites["softmax:0"].fixed == (0, 255 / 256)


# Both engines.


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_depends_neither_on_the_engine_nor_on_jit(model, engine, jit):
    fn, params, x = MODELS[model]()
    plan = plan_of(jax.jit(fn) if jit else fn, params, x, engine=engine)
    assert seen(plan) == seen(plan_of(fn, params, x, engine="trace"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nested", "equinox"])
def test_planning_leaks_no_tracer(model, engine):
    fn, params, x = MODELS[model]()
    with checking_leaks():
        assert plan_of(jax.jit(fn), params, x, engine=engine).sites


@pytest.mark.parametrize(
    ("model", "ops", "sites"),
    [
        ("linen", ["conv_general_dilated", "add", "batch_norm_op", "relu", "avg_pool",
                   "dot_general", "add", "softmax"], 4),
        ("nnx", ["dot_general", "add", "norm_op", "gelu", "dot_general", "add"], 5),
        ("equinox", ["dot_general", "add", "norm_op", "relu", "dot_general", "add"], 4),
        ("plain", ["dot_general", "add", "relu", "tanh", "concatenate", "dot_general"], 5),
        ("nested", ["dot_general", "relu", "dot_general", "relu"], 3),
    ],
)  # fmt: skip
def test_every_operation_of_a_model_is_in_its_plan(model, ops, sites, engine):
    fn, params, x = MODELS[model]()
    plan = plan_of(fn, params, x, engine=engine)
    assert [d.node.op.name for d in decisions(plan).values()] == ops
    assert len(plan.sites) == sites


@pytest.mark.parametrize("model", MODELS)
def test_types_are_enough(model):
    fn, params, x = MODELS[model]()
    is_array = lambda leaf: hasattr(leaf, "dtype")  # noqa: E731
    types = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf,
        (params, x),
    )
    assert seen(plan_of(fn, *types)) == seen(plan_of(fn, params, x))


@pytest.mark.slow
def test_training_and_evaluation_of_batch_norm_and_dropout_have_the_same_sites(engine):
    model, x = Cnn(), draw(2, 8, 8, 1)
    params = model.init(jax.random.key(0), x)

    def train(params, x):
        rngs = {"dropout": jax.random.key(1)}
        return model.apply(params, x, train=True, mutable=["batch_stats"], rngs=rngs)[0]

    evaluation = plan_of(model.apply, params, x, engine=engine)
    assert plan_of(train, params, x, engine=engine).sites == evaluation.sites


def _nnx(training):
    """A BatchNorm, a Dropout and an average; NNX has no names of modules."""
    parts = [nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))]
    graph, state = nnx.split(nnx.Sequential(*parts, nnx.Dropout(0.5, rngs=nnx.Rngs(1))))

    def fn(state, x):
        model = nnx.merge(graph, state)
        (model.train if training else model.eval)()
        x = (model(x) + 1) * 2
        return x - x.mean(1, keepdims=True)

    return fn, state


def _equinox(training):
    norm, start = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
    mapped = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    _, start = mapped(draw(4, 8), start)
    drop = eqx.nn.Dropout(0.5)

    def fn(w, x):
        keys = jax.random.split(jax.random.key(0), len(x))

        def one(x, key):
            y, _ = norm(x @ w, start, inference=not training)
            y = (drop(y, key=key, inference=not training) + 1) * 2
            return y - y.mean()

        return jax.vmap(one, axis_name="batch")(x, keys)

    return fn, W


@pytest.mark.parametrize("model", [_nnx, _equinox])
def test_training_moves_no_ids_of_modules_without_names(model):
    plans = [plan_of(*model(training), X) for training in (True, False)]
    assert seen(plans[0]) == seen(plans[1])
    assert "mean:0" in plans[0].sites


def test_a_rolled_scan_is_planned_once():
    fn = lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0]  # noqa: E731
    plan = plan_of(fn, draw(3, 6, 6), X, engine="trace")
    assert [d.node.op.name for d in decisions(plan).values()] == ["dot_general", "tanh"]
    assert all("scan" in key for key in decisions(plan))


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: jax.vmap(f, (None, 0))])
def test_transformations_inside_of_the_model_hide_nothing(engine, wrap):
    inner = wrap(lambda w, x: jnp.tanh(jax.nn.relu(x @ w)))
    if engine == "patch" and wrap is jax.checkpoint:
        with pytest.raises(OdmlError, match="checkpoint"):
            plan_of(lambda w, x: inner(w, x), W, X, engine=engine)
        return
    if wrap not in (jax.checkpoint, jax.jit):
        # A vmap that was made before the model is run can't be seen through.
        with pytest.raises(OdmlError, match=r"jax\.vmap must be called inside"):
            plan_of(lambda w, x: inner(w, x), W, X, engine=engine)
        return
    plan = plan_of(lambda w, x: inner(w, x), W, X, engine=engine)
    assert [d.node.op.name for d in decisions(plan).values()] == ["dot_general", "relu", "tanh"]
    assert set(plan.sites) == {"args[1]", "relu:0", "tanh:0"}


# The plan as such.


def test_a_plan_is_found_once_for_arguments_of_the_same_types():
    model = qat(mlp, W8A8)
    assert model.plan(MLP, X) is model.plan(MLP, X + 1)
    assert model.plan(MLP, X) is not model.plan(MLP, draw(5, 6))


def test_the_params_may_be_any_argument():
    plan = plan_of(lambda w, x: x @ w, W, X)
    other = qat(lambda x, w: x @ w, W8A8, params_argnum=1).plan(X, W)
    assert list(other.sites) == ["args[0]", "dot_general:0"]
    assert decided(other, "dot_general").inputs[1] == decided(plan, "dot_general").inputs[1]


def test_keyword_arguments_are_inputs():
    plan = qat(lambda w, *, x: x @ w, W8A8).plan(W, x=X)
    assert set(plan.sites) == {"kwargs['x']", "dot_general:0"}


def test_deciding_needs_no_program():
    """The graph is all that is decided from."""
    provider = qat(mlp, W8A8).provider
    graph = survey(provider.runs_on, mlp, "args[0]", (MLP, X), {})
    assert seen(decide(graph, [W8A8], Options())) == seen(plan_of(mlp, MLP, X))

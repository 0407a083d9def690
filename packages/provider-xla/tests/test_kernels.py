"""Kernels in plans and programs, with a package of kernels in plain JAX: see ``fake_kernels``."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import provider_xla as xla
import quant_numerics as qn
from hijax_trace import MoveError
from jaxtap_testkit import fake_kernels
from jaxtap_testkit.coded import followed
from jaxtap_testkit.fake_kernels import kernels  # noqa: F401
from jaxtap_testkit.xla_samples import PROGRAMS, draw, make
from provider_xla import (
    PrepackedWeight,
    PtqProvider,
    QuantizationError,
    QuantizationRule,
)
from provider_xla.run.contraction import quantized_contraction
from quant_numerics import Matmul

pytestmark = pytest.mark.sample(2)

W8 = QuantizationRule(weight_qtype="int8")
W4 = QuantizationRule(weight_qtype="int4")
W8A8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")


def is_packed(node):
    return isinstance(node, PrepackedWeight)


def stored_leaves(params):
    kinds = (qn.QArray, qn.PackedQArray, PrepackedWeight)
    return jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, kinds))


def both_ways(fn, rule, params, x):
    """The plan, and what a function gives with packed parameters and with quantized values."""
    plan = PtqProvider(rule).plan(fn, params, x)
    packed, qvalue = plan.quantize(params), plan.quantize(params, prepack=False)
    assert not any(map(is_packed, stored_leaves(qvalue)))
    run = jax.jit(plan.apply(fn))
    quantized_contraction.clear_cache()  # a contraction that was traced before calls nothing again
    fake_kernels.CALLS.clear()
    return plan, run(packed, x), run(qvalue, x)


def same(actual, expected, exact=False):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if exact:
        np.testing.assert_array_equal(actual, expected)
    else:
        tolerance = 1e-5 if actual.dtype == jnp.float32 else 2e-2
        scale = max(float(jnp.max(jnp.abs(expected))), 1e-6)
        difference = np.asarray(actual, np.float64) - np.asarray(expected, np.float64)
        assert np.max(np.abs(difference), initial=0) <= tolerance * scale


# How many contractions of a program run in kernels. All parameters of these are packed, but for the
# table of "tied", which is looked up and then multiplied with its transpose.
TAKEN = {
    "operator": 1,
    "left": 1,
    "transposed": 1,
    "moveaxis": 1,
    "cast": 1,
    "jit": 2,
    "closure in scan": 1,
    "scan": 1,
    "scan of scan": 1,
    "scan of remat": 1,
    "while": 1,
    "grouped queries": 4,
    "three operands": 2,
    "tied": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_what_xla_gives(name):
    fn, params, x = make(name)
    rule = [W8, W4, W8A8][list(PROGRAMS).index(name) % 3]
    plan, actual, expected = both_ways(fn, rule, params, x)
    same(actual, expected)
    found = [record.kernel for record in plan.ops if record.kernel]
    packed = list(map(is_packed, stored_leaves(plan.quantize(params))))
    if name in TAKEN:
        assert all(packed) or (name, packed) == ("tied", [False, True])
        assert len(found) == TAKEN[name]
        assert {op for op, *_ in fake_kernels.CALLS} == {target[5:] for target in found}
    else:
        assert not any(packed)
        assert not found
        assert not fake_kernels.CALLS


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "twice": "its contractions contract different axes",
        "heads": "it has batch axes",
        "tied": "a lookup",
        "reshaped, split": "its axes are cut, merged or split on the way",
        "reshaped, merged": "its axes are cut, merged or split on the way",
        "convolution": "a convolution of float activations",
        "experts": "fake.gemm_w8a16: rows in groups",
    }.items(),
)
def test_why_xla_computes_it(name, reason):
    fn, params, x = make(name)
    plan = PtqProvider(W8).plan(fn, params, x)
    reasons = [record.kernel_reason for record in plan.ops if record.kernel is None]
    assert any(reason in (why or "") for why in reasons), reasons


MADE = {
    "joined": lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1),
    "joined and turned": lambda p, x: x @ jnp.concatenate([p["a"].T, p["b"].T]).T,
    "joined rows": lambda p, x: jnp.tile(x, 2) @ jnp.concatenate([p["a"], p["b"]]),
    "stacked": lambda p, x: jnp.einsum("bk,skn->sbn", x, jnp.stack([p["a"], p["b"]])),
    "joined in a scan": lambda p, x: lax.scan(
        lambda y, _: (y[:, :6] @ jnp.concatenate([p["a"][:6], p["b"][:6]], 1), None),
        jnp.tile(x[:, :6], 2), None, 2,
    )[0],
    "joined, and alone": lambda p, x: x @ jnp.hstack([p["a"], p["b"]]) + jnp.tile(x @ p["a"], 2),
    "derived": lambda p, x: x @ (p["a"] * jnp.tanh(p["b"])),
    "derived and joined": lambda p, x: x @ jnp.concatenate([p["a"] * p["b"], p["b"]], 1),
    "normed": lambda p, x: x @ (p["a"] / jnp.linalg.norm(p["a"], axis=0)),
    "cut": lambda p, x: x[:, :5] @ p["a"][:5],
    "reversed": lambda p, x: x @ p["a"][::-1],
    "both": lambda p, x: (x @ p["a"]) @ (p["b"].T @ p["a"]),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [W8, W8A8], ids=["w8", "w8a8"])
@pytest.mark.parametrize("name", MADE)
def test_a_plan_says_what_no_kernel_computes(name, rule, kernels):  # noqa: F811
    """Also where the program makes the weight: joins, stacks or derives it."""
    a, b, x = draw((12, 6), (12, 6), (4, 12))
    plan = PtqProvider(rule).plan(MADE[name], {"a": a, "b": b}, x)
    told = {op_id for op_ids in plan.in_xla.values() for op_id in op_ids}
    lacking = {op.op_id for op in plan.ops if op.quantized and op.kernel is None}
    assert told == lacking
    assert all(op.kernel or op.kernel_reason for op in plan.ops if op.quantized)
    assert str(plan).count("in XLA: ") == len(plan.in_xla)
    assert bool(lacking) == (name not in ("derived", "derived and joined", "normed", "both"))
    if "joined" in name and "derived" not in name:
        assert any("made of several parameters" in why for why in plan.in_xla)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (QuantizationRule(weight_qtype="float8_e4m3fn"), "weights in float8_e4m3fn"),
        (QuantizationRule(weight_qtype="int16"), "weights in int16"),
        (QuantizationRule(weight_qtype="nf4"), "weights in nf4"),
        (QuantizationRule(weight_qtype="int8", weight_calibration_method="minmax"), "zero points"),
        (QuantizationRule(weight_qtype="int8", tile_size=3), "fake.gemm_w8a16: groups of 3"),
        (QuantizationRule(weight_qtype="int4", act_qtype="int8"), "weights of 4 bits"),
        (QuantizationRule(weight_qtype="int8", act_qtype="int4"), "activations in int4"),
        (QuantizationRule(act_qtype="int8"), "no parameter that is stored"),
        (
            QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True),
            "static range",
        ),
        (
            QuantizationRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="mse"),
            "another range",
        ),
    ],
)
def test_rules_that_no_kernel_follows(rule, reason):
    (w, x) = draw((12, 6), (4, 12))
    plan = PtqProvider(rule).plan(lambda w, x: x @ w, w, x)
    (record,) = plan.ops
    assert record.kernel is None
    assert reason in record.kernel_reason
    assert not is_packed(plan.quantize(w))
    assert (f"in XLA: matmul:0: {record.kernel_reason}" in str(plan)) == bool(plan.weights)


def test_kernels_can_be_refused():
    w, x = draw((12, 6), (4, 12))
    plan = PtqProvider(W8).plan(lambda w, x: x @ w, w, x, kernels=False)
    assert (plan.ops[0].kernel, plan.ops[0].kernel_reason) == (None, None)
    assert "kernel" not in str(plan)
    assert isinstance(plan.quantize(w), qn.QArray)


def test_the_kernel_is_shown():
    w, x = draw((12, 6), (4, 12))
    plan = PtqProvider(W8A8).plan(lambda w, x: x @ w, w, x)
    assert "fake.gemm_w8a8" in str(plan)
    values = json.loads(json.dumps(plan.as_json()))
    cpu = {"kernel": "fake.gemm_w8a8", "reason": None}
    assert values["ops"][0]["kernels"]["cpu"] == cpu
    assert "cpu" in values["weights"][0]["packed"]
    assert plan.bytes_after == plan.quantize(w).nbytes


def test_few_rows_and_many():
    w, x = draw((12, 6), (2, 2, 12))
    fn = lambda w, x: x @ w  # noqa: E731
    plan = PtqProvider(W8).plan(fn, w, x)
    assert plan.ops[0].kernel == "fake.gemm_w8a16"
    stored = plan.quantize(w)
    quantized_contraction.clear_cache()
    plan.apply(fn)(stored, x)
    plan.apply(fn)(stored, draw((5, 12))[0])
    assert fake_kernels.CALLS == [
        ("gemm_w8a16", (2, 2, 12), (12, 6)),
        ("gemm_w8a16", (5, 12), (12, 6)),
    ]
    assert PtqProvider(W8).plan(fn, w, draw((5, 12))[0]).ops[0].kernel == "fake.gemm_w8a16"


# A contraction in every order of axes: subscripts, shapes of activation and weight.
EINSUMS = [
    ("bi,io->bo", (5, 12), (12, 6)),
    ("bi,io->ob", (5, 12), (12, 6)),
    ("bi,oi->bo", (5, 12), (6, 12)),
    ("btd,dhe->bthe", (2, 3, 8), (8, 4, 6)),
    ("btd,dhe->hbte", (2, 3, 8), (8, 4, 6)),
    ("btd,dhe->ehtb", (2, 3, 8), (8, 4, 6)),
    ("bthe,heo->bto", (2, 3, 4, 6), (4, 6, 10)),
    ("bthe,hoe->obt", (2, 3, 4, 6), (4, 10, 6)),
    ("bteh,ohe->bto", (2, 3, 6, 4), (10, 4, 6)),
    ("dbt,hde->bhte", (8, 2, 3), (4, 8, 6)),
    ("...d,do->...o", (2, 3, 8), (8, 6)),
    ("d,do->o", (8,), (8, 6)),
    ("bd,d->b", (4, 8), (8,)),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["w8a8", "w4 in tiles"])
@pytest.mark.parametrize(("spec", "x_shape", "w_shape"), EINSUMS)
def test_einsums(spec, x_shape, w_shape, rule):
    w, x = draw(w_shape, x_shape)
    # Either operand first: each equation has both orders, and each rule.
    weight_first = (EINSUMS.index((spec, x_shape, w_shape)) % 2 == 0) == (rule == "w8a8")
    rule = W8A8 if rule == "w8a8" else QuantizationRule(weight_qtype="int4", tile_size=2)
    if weight_first:
        inputs, out = spec.split("->")
        spec = ",".join(reversed(inputs.split(","))) + "->" + out

    def fn(w, x):
        return jnp.einsum(spec, *((w, x) if weight_first else (x, w)))

    _, actual, expected = both_ways(fn, rule, w, x)
    assert len(fake_kernels.CALLS) == 1
    same(actual, expected)


def test_an_axis_of_size_1_that_is_broadcast():
    w, x = draw((1, 6), (5, 12))
    plan, actual, expected = both_ways(lambda w, x: jnp.einsum("bi,io->bo", x, w), W8, w, x)
    assert plan.ops[0].kernel_reason == "an axis of size 1 is broadcast"
    same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("lhs", [False, True])
def test_dot_general_in_any_order(lhs):
    w, x = draw((3, 8, 4, 5), (4, 7, 5, 2))

    def fn(w, x):
        dims = ((2, 3), (0, 2))
        return lax.dot_general(
            *((w, x) if lhs else (x, w)), (dims if lhs else dims[::-1], ((), ()))
        )

    _, actual, expected = both_ways(fn, W8A8, w, x)
    assert fake_kernels.CALLS == [("gemm_w8a8", (7, 2, 20), (20, 24))]
    same(actual, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("qtype", ["int2", "int3", "int4", "int5", "int6", "int7", "int8"])
def test_qvalue_survive_packing(qtype):
    (w, x) = draw((3, 8, 6, 5), (4, 8))
    rule = QuantizationRule(weight_qtype=qtype, tile_size=4)
    plan = PtqProvider(rule).plan(
        lambda w, x: lax.scan(lambda c, w: (c, jnp.einsum("bd,dhe->bhe", x, w)), 0, w)[1], w, x
    )
    qvalue, packed = plan.quantize(w, prepack=False), plan.quantize(w)
    qvalue = qn.unpack(qvalue) if isinstance(qvalue, qn.PackedQArray) else qvalue
    assert (packed.shape, packed.dtype, packed.ndim) == (w.shape, w.dtype, 4)
    assert packed.bits == (4 if qtype in ("int2", "int3", "int4") else 8)
    unpacked = packed.unpacked()
    assert unpacked.qtype == qtype
    jax.tree.map(np.testing.assert_array_equal, unpacked, qvalue)
    np.testing.assert_array_equal(packed.restore(), qvalue.restore())


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
@pytest.mark.parametrize("rule", [W8, W8A8], ids=["w8", "w8a8"])
def test_dtypes(rule, dtype, preferred):
    w, x = draw((12, 6), (4, 12), dtype=dtype)

    def fn(w, x):
        return jnp.matmul(x, w, preferred_element_type=preferred)

    _, actual, expected = both_ways(fn, rule, w, x)
    assert fake_kernels.CALLS
    same(actual, expected)


def test_float64_runs_in_xla():
    with jax.enable_x64(True):
        w, x = draw((12, 6), (4, 12), dtype=np.float64)
        plan, actual, expected = both_ways(lambda w, x: x @ w, W8, w, x)
    assert plan.ops[0].kernel_reason == "float64 numbers"
    np.testing.assert_array_equal(actual, expected)


# --- moves and other functions than the plan's ---------------------------------------------------


def stored_matrix(shape=(12, 6), rule=W8):
    w, x = draw(shape, (4, shape[-2]))
    fn = (lambda w, x: x @ w) if len(shape) == 2 else PROGRAMS["scan"][0]
    plan = PtqProvider(rule).plan(fn, w, x)
    return plan, plan.quantize(w), plan.quantize(w, prepack=False), x


def test_moves_are_those_of_the_qvalue():
    _, packed, qvalue, _ = stored_matrix((3, 8, 8))
    for primitive, params, stays in (
        ("transpose", {"permutation": (0, 2, 1)}, True),
        ("transpose", {"permutation": (2, 0, 1)}, True),
        ("convert_element_type", {"new_dtype": jnp.bfloat16}, True),
        ("reshape", {"new_sizes": (3, 64), "dimensions": None}, False),
        ("squeeze", {"dimensions": ()}, True),
        (
            "broadcast_in_dim",
            {"shape": (2, 3, 8, 8), "broadcast_dimensions": (1, 2, 3), "sharding": None},
            True,
        ),
        (
            "slice",
            {"start_indices": (1, 0, 0), "limit_indices": (3, 8, 8), "strides": None},
            True,
        ),
        (
            "slice",
            {"start_indices": (0, 0, 0), "limit_indices": (3, 8, 4), "strides": None},
            False,
        ),
        ("split", {"axis": 0, "sizes": (1, 2)}, True),
    ):
        try:
            expected = qvalue.moved(primitive, params, [qvalue])
        except MoveError:
            with pytest.raises(MoveError):
                packed.moved(primitive, params, [packed])
            continue
        actual = packed.moved(primitive, params, [packed])
        for one, other in zip(actual, expected, strict=True):
            assert is_packed(one) == stays, primitive
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(one.restore(), other.restore())
    assert followed(jnp.copy, packed).packed is packed.packed
    for primitive, params in (("convert_element_type", {"new_dtype": jnp.int8}), ("sin", {})):
        with pytest.raises(MoveError):
            packed.moved(primitive, params, [packed])


def test_an_expert_of_packed_weights_stays_packed():
    _, packed, qvalue, _ = stored_matrix((3, 8, 8))
    for fn in (lambda w: w[1], lambda w: w[w[0, 0, 0].astype(int)], lambda w: w[np.array([2, 0])]):
        actual, expected = followed(fn, packed), followed(fn, qvalue)
        assert is_packed(actual)
        np.testing.assert_array_equal(actual.restore(), expected.restore())


def test_what_is_looked_up_out_of_bounds_is_nan():
    _, packed, qvalue, x = stored_matrix((3, 8, 8))

    def fn(w, i):
        return w.at[i].get(mode="fill", fill_value=np.nan)

    for i in (2, 3, -1, np.array([0, 7])):
        actual, expected = (followed(lambda w, i=i: fn(w, i), one) for one in (packed, qvalue))
        assert is_packed(actual)
        np.testing.assert_array_equal(actual.restore(), expected.restore())
        if np.ndim(i) == 0:
            found = quantized_contraction(
                contraction_of(x), (None, None), x, actual, (), (None, None)
            )
            np.testing.assert_allclose(found, x @ expected.restore(), rtol=1e-5)


def contraction_of(x):
    return Matmul((((x.ndim - 1,), (0,)), ((), ())))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "other",
    [
        lambda w, x: w.sum() + x.sum(),
        lambda w, x: x @ w * jnp.sum(w),
        lambda w, x: jnp.take(w, jnp.arange(3), axis=0) * x.sum(),
        lambda w, x: x.T[:6].T @ w.T,
        lambda w, x: x @ w.reshape(12, 2, 3)[:, 1],
        lambda w, x: lax.scan(lambda c, row: (c + row.sum(), None), 0.0, w)[0] * x,
        lambda w, x: lax.dot_general(x, w, (((), ()), ((), ()))),
        lambda w, x: jnp.einsum("bi,io->bio", x, w),
        lambda w, x: x @ jnp.concatenate([w, w], axis=1),
        lambda w, x: w @ w.T,
    ],
)
def test_a_packed_parameter_is_right_in_any_function(other):
    plan, packed, qvalue, x = stored_matrix()
    run = jax.jit(plan.apply(other))
    same(run(packed, x), run(qvalue, x))


def test_a_parameter_that_is_taken_apart():
    # Twelve rows, and as many panels of sixteen columns: a step of a scan looks like one of either.
    w, x = draw((12, 192), (4, 12))
    plan = PtqProvider(W8).plan(lambda w, x: x @ w, w, x)

    def rows(w, x):
        return lax.scan(lambda c, row: (c + row @ jnp.ones(192), None), 0.0, w)[0]

    with pytest.raises(QuantizationError, match="along a column axis"):
        plan.apply(rows)(plan.quantize(w), x)


def test_another_rule_for_the_activation():
    _, packed, qvalue, x = stored_matrix()
    for rule in (W8A8, QuantizationRule(weight_qtype="int8", act_qtype="float8_e4m3fn")):
        run = jax.jit(PtqProvider(rule).apply(lambda w, x: x @ w))
        same(run(packed, x), run(qvalue, x))
    untouched = PtqProvider(QuantizationRule(act_qtype="int8")).apply(lambda w, x: x @ w)
    same(untouched(packed, x), untouched(qvalue, x))


def test_the_patch_engine_says_that_it_cannot():
    _, packed, _, x = stored_matrix()
    with pytest.raises(QuantizationError, match="int8 values"):
        PtqProvider(W8, engine="patch").apply(lambda w, x: x @ w)(packed, x)
    w, x = draw((12, 6), (4, 12))
    plan = PtqProvider(W8, engine="patch").plan(lambda w, x: x @ w, w, x)
    assert not is_packed(plan.quantize(w))


def test_uses_that_are_float_keep_a_parameter_unpacked():
    def fn(w, x):
        with jax.named_scope("plain"):
            y = x @ w
        return x @ w + y

    w, x = draw((12, 6), (4, 12))
    rules = [QuantizationRule(module_path="plain"), W8]
    plan = PtqProvider(rules).plan(fn, w, x)
    assert plan.ops[1].kernel_reason == "args[0] is not packed: plain/matmul:0: it stays float"
    assert not is_packed(plan.quantize(w))


# --- transformations -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", [W8, W8A8], ids=["w8", "w8a8"])
def test_transformations(rule):
    fn, params, x = make("scan")
    plan = PtqProvider(rule).plan(fn, params, x)
    packed, qvalue = plan.quantize(params), plan.quantize(params, prepack=False)
    assert is_packed(packed)
    run = plan.apply(fn)
    batch = draw((5, 4, 8), seed=3)[0]
    for transformed, given in (
        (run, x),
        (jax.jit(run), x),
        (jax.jit(jax.vmap(run, (None, 0))), batch),
        (jax.grad(lambda w, x: run(w, x).sum(), argnums=1), x),
        (lambda w, x: jax.jvp(functools.partial(run, w), (x,), (jnp.ones_like(x),))[1], x),
        (jax.checkpoint(run), x),
    ):
        same(transformed(packed, given), transformed(qvalue, given))


def test_gradients_do_not_reach_what_is_packed():
    fn, params, x = make("operator")
    plan = PtqProvider(W8A8).plan(fn, params, x)
    packed = plan.quantize(params)
    found = jax.grad(lambda w, x: plan.apply(fn)(w, x).sum(), allow_int=True)(packed, x)
    assert jax.tree.structure(found) == jax.tree.structure(packed)
    assert found.packed.qvalue.dtype == jax.dtypes.float0


# --- storing -------------------------------------------------------------------------------------


def test_packing_what_was_stored():
    fn, params, x = make("grouped queries")
    plan = PtqProvider(QuantizationRule(weight_qtype="int5")).plan(fn, params, x)
    qvalue, packed = plan.quantize(params, prepack=False), plan.quantize(params)
    again = plan.prepack(qvalue)
    assert all(map(is_packed, stored_leaves(again)))
    assert jax.tree.structure(again) == jax.tree.structure(packed)
    jax.tree.map(np.testing.assert_array_equal, again, packed)
    assert plan.prepack(packed)["q"] is packed["q"]
    assert plan.prepack(params)["q"] is params["q"]  # an array stays one
    other = {**qvalue, "q": qn.quantize(params["q"], "int8", channel_axes=(1, 2, 3))}
    with pytest.raises(QuantizationError, match=r"\['q'\] \(rule 0\) is int8.*the plan has int5"):
        plan.prepack(other)


def test_donated_parameters():
    fn, params, x = make("tied")
    plan = PtqProvider(W8).plan(fn, params, x)
    expected = plan.quantize(params)
    stored = plan.quantize(params, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, stored, expected)


def test_shardings_that_panels_allow():
    shape, mesh = (64, 4, 32), jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    x = draw((4, 64))[0]

    def fn(w, x):
        return jnp.einsum("bd,dhe->bhe", x, w)

    (weight,) = PtqProvider(W8).plan(fn, draw(shape)[0], x).weights.values()
    one = NamedSharding(mesh, PartitionSpec(None, "d"))
    assert weight.packings["cpu"].unshardable(shape, one) is None
    stored = (
        PtqProvider(W8).plan(fn, draw(shape)[0], x).quantize(jax.device_put(draw(shape)[0], one))
    )
    assert is_packed(stored)
    explicit = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    why = weight.packings["cpu"].unshardable(shape, NamedSharding(explicit, PartitionSpec()))
    assert "explicit" in why


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [W4, W8, W8A8], ids=["w4", "w8", "w8a8"])
@pytest.mark.parametrize(("shape", "tile", "groups"), [((4, 16), 32, 2), ((4, 16), 8, 8)])
def test_tiles_of_flattened_axes_are_groups_of_rows(kernels, rule, shape, tile, groups):  # noqa: F811
    def model(p, x):
        return jnp.einsum("bhd,hdo->bo", x, p["w"])

    rule = dataclasses.replace(rule, tile_size=tile)
    params, x = {"w": draw((*shape, 20))[0]}, draw((5, *shape))[0]
    plan, packed, qvalue = both_ways(model, [rule], params, x)
    (weight,) = plan.weights.values()
    assert weight.packings["cpu"].group == 64 // groups
    assert fake_kernels.CALLS
    same(packed, qvalue)
    stored = plan.quantize(params)["w"]
    same(stored.restore(), plan.quantize(params, prepack=False)["w"].restore(), exact=True)


def test_a_shorter_last_tile_is_left_to_xla(kernels):  # noqa: F811
    rule = dataclasses.replace(W4, tile_size=32, tile_fallback="padded")
    plan, packed, qvalue = both_ways(
        lambda p, x: x @ p["w"], [rule], {"w": draw((72, 20))[0]}, draw((5, 72))[0]
    )
    assert plan.ops[0].kernel_reason == "its last tile is shorter"
    assert not fake_kernels.CALLS
    same(packed, qvalue, exact=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("qtype", ["int4", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_in_16_bits_are_packed(kernels, qtype, dtype, tmp_path):  # noqa: F811
    rule = QuantizationRule(weight_qtype=qtype, tile_size=32, scale_dtype=dtype)
    params = {"w": draw((64, 32))[0]}
    plan, packed, qvalue = both_ways(lambda p, x: x @ p["w"], [rule], params, draw((5, 64))[0])
    same(packed, qvalue)
    stored = plan.quantize(params)["w"]
    assert fake_kernels.CALLS
    keeps = (qtype, dtype) == ("int4", "float16")
    assert stored.packed.scale.dtype == ("float16" if keeps else "float32")
    assert stored.nbytes == plan.weights["args[0]['w']"].bytes_after
    assert stored.unpacked().scale.dtype == dtype
    xla.save(tmp_path / "file.safetensors", {"w": stored})
    loaded = xla.load(tmp_path / "file.safetensors")["w"]
    assert loaded.scale.dtype == dtype
    same(loaded.restore(), stored.restore(), exact=True)

"""Plans: what is found, what is stored, and that the stored parameters are what runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from interception_core.testing.engine_suite.kernels import kernel_makers
from jaxtap_testkit.xla_samples import PROGRAMS, contractions, draw, make, stack, tied
from provider_xla import (
    PtqProvider,
    QtProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
)

pytestmark = pytest.mark.sample(2)

W8 = QuantizationRule(weight_qtype="int8")
W8A8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")


def is_qvalue(node):
    return isinstance(node, qn.QArray | qn.PackedQArray)


def restored(params):
    def one(leaf):
        leaf = qn.unpack(leaf) if isinstance(leaf, qn.PackedQArray) else leaf
        return qn.dequantize(leaf) if is_qvalue(leaf) else leaf

    return jax.tree.map(one, params, is_leaf=is_qvalue)


@pytest.fixture(params=PROGRAMS)
def name(request):
    return request.param


def near(actual, expected, case=""):
    assert actual.dtype == expected.dtype
    tolerance = 0.05 if expected.dtype == jnp.bfloat16 else 1e-4
    np.testing.assert_allclose(
        *(np.asarray(y, np.float64) for y in (actual, expected)), tolerance, tolerance, err_msg=case
    )


@pytest.mark.slow
def test_every_parameter_is_stored_and_used(name):
    fn, params, x = make(name)
    plan = PtqProvider([W8], strict=True).plan(fn, params, x)
    assert len(plan.weights) == len(jax.tree.leaves(params))
    stored = plan.quantize(params)
    assert all(map(is_qvalue, jax.tree.leaves(stored, is_leaf=is_qvalue)))
    run = plan.apply(fn)
    actual, expected = jax.jit(lambda w: (run(w, x), fn(restored(w), x)))(stored)
    near(actual, expected)
    if name in ("left", "scan", "while", "tied", "experts"):
        near(run(stored, x), expected, "eager")


def test_qvalue_are_what_is_multiplied(name):
    fn, params, x = make(name)
    plan = PtqProvider([dataclasses.replace(W8A8, weights_only=False)]).plan(fn, params, x)
    stored = plan.quantize(params)
    found = contractions(plan.apply(fn), stored, x)
    assert found == [("int8", "int8")] * PROGRAMS[name][3]
    text = jax.jit(plan.apply(fn)).lower(stored, x).compile().as_text()
    for leaf in jax.tree.leaves(params):
        # The arrays are no part of the program, in their shape at least.
        if leaf.ndim > 2 and name not in ("convolution", "transposed kernel"):
            assert f"f32[{','.join(map(str, leaf.shape))}]" not in text


def test_error_of_each_parameter_is_half_a_scale(name):
    fn, params, x = make(name)
    stored = PtqProvider([W8]).plan(fn, params, x).quantize(params)
    for q, leaf in zip(
        jax.tree.leaves(stored, is_leaf=is_qvalue), jax.tree.leaves(params), strict=True
    ):
        scale = np.broadcast_to(
            np.kron(
                q.scale, np.ones([n // s for n, s in zip(q.shape, q.scale.shape, strict=True)])
            ),
            q.shape,
        )
        error = np.abs(np.asarray(qn.dequantize(q), np.float64) - np.asarray(leaf, np.float64))
        assert (error <= scale * 0.5001).all()


@pytest.mark.parametrize(
    ("program", "shapes"),
    {
        "operator": [(1, 6)],
        "left": [(6, 1)],
        "transposed": [(6, 1)],
        "reshaped, split": [(1, 6)],
        "reshaped, merged": [(1, 2, 3)],
        "reshaped, contracted": [(1, 1, 6)],
        "heads": [(1, 4)],
        "twice": [(1, 1)],
        "scan": [(3, 1, 8)],
        "scan of scan": [(2, 3, 1, 8)],
        "scan of remat": [(3, 8, 1)],
        "convolution": [(1, 1, 1, 5)],
        "transposed kernel": [(5, 1, 1, 1)],
        "tied": [(16, 1), (1, 8)],
        "experts": [(4, 1, 8), (4, 1, 6)],
        "grouped queries": [(1, 2, 4), (1, 1, 1, 6), (1, 2, 2, 4), (1, 2, 4)],
    }.items(),
)
def test_scales_are_as_fine_as_all_uses_allow(program, shapes):
    fn, params, x = make(program)
    plan = PtqProvider([W8]).plan(fn, params, x)
    assert [w.granularity.scale_shape(w.shape) for w in plan.weights.values()] == shapes
    stored = jax.tree.leaves(plan.quantize(params), is_leaf=is_qvalue)
    assert [q.scale.shape for q in stored] == shapes


QTYPES = ["int2", "int3", "int4", "int5", "int7", "int8", "int16"]
QTYPES += ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4"]


@pytest.mark.slow
@pytest.mark.parametrize("qtype", QTYPES)
def test_every_format_runs_as_it_is_stored(qtype):
    made = {name: make(name) for name in ("operator", "scan", "tied")}
    params, x = ({name: one[i] for name, one in made.items()} for i in (1, 2))

    def fn(params, x):
        return {name: one(params[name], x[name]) for name, (one, _, _) in made.items()}

    plan = PtqProvider([QuantizationRule(weight_qtype=qtype)]).plan(fn, params, x)
    stored = plan.quantize(params)
    actual, expected = jax.jit(lambda w: (plan.apply(fn)(w, x), fn(restored(w), x)))(stored)
    for name, y in actual.items():
        np.testing.assert_allclose(y, expected[name], rtol=1e-3, atol=1e-3, err_msg=name)
    sizes = [q.nbytes for q in jax.tree.leaves(stored, is_leaf=is_qvalue)]
    assert sum(sizes) == plan.bytes_after == sum(w.bytes_after for w in plan.weights.values())
    assert plan.bytes_before == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("qtype", "block"), [("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)])
def test_block_formats_have_tiles_by_themselves(qtype, block):
    (ws,), x = draw((2, 64, 64)), jnp.ones((4, 64))
    plan = PtqProvider([QuantizationRule(weight_qtype=qtype)], strict=True).plan(stack, ws, x)
    stored = plan.quantize(ws)
    assert stored.scale.shape == (2, 64 // block, 64)
    if qtype == "nvfp4":
        assert stored.global_scale.shape == (2, 1, 1)  # each layer has its own
    actual = jax.jit(plan.apply(stack))(stored, x)
    np.testing.assert_allclose(actual, stack(restored(stored), x), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [4, 0.5, 8])
def test_tiles(tile):
    rule = QuantizationRule(weight_qtype="int4", tile_size=tile)
    fn, params, x = make("transposed")
    plan = PtqProvider([rule]).plan(fn, params, x)
    stored = plan.quantize(params)
    assert stored.scale.shape == (6, 1 if tile == 8 else 2)
    np.testing.assert_allclose(
        plan.apply(fn)(stored, x), fn(restored(stored), x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["absmax,0.8", "minmax", "rms,3", "percentile,99", "mse"])
def test_calibration_methods(method):
    rule = QuantizationRule(weight_qtype="int4", weight_calibration_method=method)
    fn, params, x = make("scan")
    plan = PtqProvider([rule]).plan(fn, params, x)
    stored = plan.quantize(params)
    assert (stored.zero_point is not None) == (method == "minmax")
    np.testing.assert_allclose(
        jax.jit(plan.apply(fn))(stored, x), fn(restored(stored), x), rtol=1e-3, atol=1e-3
    )


def test_nothing_is_run_or_copied():
    shape = jax.ShapeDtypeStruct

    def model(params, x):
        assert isinstance(x, jax.core.Tracer)
        return stack(params, x)

    huge = shape((1000, 100_000, 100_000), jnp.float32)  # 40 TB
    plan = PtqProvider([W8]).plan(model, huge, shape((4, 100_000), jnp.float32))
    assert plan.bytes_before == 40 * 10**12
    assert plan.bytes_after == 10 * 10**12 + 4 * 10**8


def test_shown_as_table_and_json():
    fn, params, x = make("tied")
    plan = PtqProvider([QuantizationRule(module_path="nowhere"), W8A8], strict=False)
    with pytest.warns(QuantizationWarning, match="rule 0 has no effect"):
        plan = plan.plan(fn, params, x)
    text = str(plan)
    assert "take:0" in text
    assert "args[0]['table']" in text
    assert "512 -> 192" in text
    assert "2 of 2 parameters quantized" in text
    values = json.loads(json.dumps(plan.as_json()))
    assert [w["path"] for w in values["weights"]] == ["args[0]['table']", "args[0]['w']"]
    assert values["weights"][0]["ops"] == ["take:0", "matmul:1"]
    assert values["problems"] == list(plan.problems)


def test_each_layer_is_listed_by_its_path_and_rule():
    def model(layers, x):
        for i, w in enumerate(layers):
            with jax.named_scope(f"layer_{i}"):
                x = jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x)
        return x

    ws = draw((8, 8), (8, 8), (8, 8))
    rules = [QuantizationRule(module_path="layer_1", weight_qtype="int4"), W8]
    plan = PtqProvider(rules, strict=True).plan(model, ws, jnp.ones((4, 8)))
    assert [r.op_id for r in plan.ops] == [f"layer_{i}/matmul:0" for i in range(3)]
    assert [w.qtype for w in plan.weights.values()] == ["int8", "int4", "int8"]
    stored = plan.quantize(ws)
    np.testing.assert_allclose(
        jax.jit(plan.apply(model))(stored, jnp.ones((4, 8))),
        model(restored(stored), jnp.ones((4, 8))),
        rtol=1e-4,
        atol=1e-4,
    )


def test_equal_jitted_blocks_are_read_once():
    traced = []

    @jax.jit
    def layer(w, x):
        traced.append(None)
        return jnp.tanh(x @ w)

    def model(ws, x):
        for w in ws:
            x = layer(w, x)
        return x

    ws, x = draw(*[(8, 8)] * 16), jnp.ones((4, 8))
    plan = PtqProvider([W8A8]).plan(model, ws, x)
    stored = plan.quantize(ws)
    text = jax.jit(plan.apply(model)).lower(stored, x).as_text()
    assert len(traced) == 1  # by the plan, and by nothing after it
    assert text.count("stablehlo.dot_general") == 1  # one function, called 16 times


def test_only_lookups_that_a_rule_names_are_quantized():
    def model(params, x):
        return params["table"][x].sum(axis=-1)

    params, x = {"table": draw((16, 8))[0]}, jnp.arange(4)
    with pytest.warns(QuantizationWarning, match="rule 0 has no effect"):
        assert not PtqProvider([W8]).plan(model, params, x).weights
    rule = QuantizationRule(op_names=["take"], weight_qtype="int8")
    plan = PtqProvider([rule], strict=True).plan(model, params, x)
    stored = plan.quantize(params)
    assert stored["table"].scale.shape == (16, 1)
    found = jax.jit(plan.apply(model))(stored, x)
    np.testing.assert_allclose(found, model(restored(stored), x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_lookups_out_of_bounds_are_what_they_were():
    def model(params, x):
        table = params["table"]
        rows = jnp.take(table, x, axis=0), jnp.take(table, x, axis=0, mode="clip")
        columns = jnp.take(table, x, axis=1), table[x, x]
        return (*rows, *columns, table @ table.T)

    params, x = {"table": draw((16, 8))[0]}, jnp.asarray([3, 40, 7])
    with pytest.warns(QuantizationWarning, match="alone"):
        plan = PtqProvider([W8]).plan(model, params, x)
    stored = plan.quantize(params)
    for actual, expected in zip(
        plan.apply(model)(stored, x), model(restored(stored), x), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_donated_parameters_are_deleted_one_by_one():
    fn, params, x = make("tied")
    plan = PtqProvider([W8]).plan(fn, params, x)
    expected = plan.quantize(params)
    stored = plan.quantize(params, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, stored, expected)


@pytest.mark.slow
def test_a_plan_is_applied_at_another_batch_size_and_under_transformations():
    fn, params, x = make("scan")
    plan = PtqProvider([W8]).plan(fn, params, x)
    stored = plan.quantize(params)
    fn_q, fn_r = plan.apply(fn), lambda x: fn(restored(stored), x)
    batch = draw((5, 2, 8), seed=2)[0]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(fn_q, (None, 0)))(stored, batch),
        jax.vmap(fn_r)(batch),
        rtol=1e-3,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: fn_q(stored, x).sum()))(x),
        jax.grad(lambda x: fn_r(x).sum())(x),
        rtol=1e-3,
        atol=1e-5,
    )
    _, tangent = jax.jvp(lambda x: fn_q(stored, x), (x,), (x,))
    np.testing.assert_allclose(tangent, jax.jvp(fn_r, (x,), (x,))[1], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_parameters_may_stay_arrays_in_part():
    fn, params, x = make("tied")
    plan = PtqProvider([W8]).plan(fn, params, x)
    stored = {**plan.quantize(params), "table": params["table"]}
    np.testing.assert_allclose(
        plan.apply(fn)(stored, x), fn(restored(plan.quantize(params)), x), atol=0.2
    )


# --- static ranges -------------------------------------------------------------------------------

STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


def test_static_ranges_are_those_of_the_batches():
    def model(w, x):
        return x @ w

    (w,) = draw((8, 6))
    batches = [(draw((4, 8), seed=s)[0],) for s in range(3)]
    plan = PtqProvider([STATIC], strict=True).plan(model, w, *batches[0])
    ranges = plan.calibrate(w, batches)
    (key,) = ranges
    assert key == "matmul:0#lhs"
    # The mean over examples, and batches, of the largest magnitude of an example.
    expected = np.mean([np.abs(x).max(axis=1).mean() for (x,) in batches])
    np.testing.assert_allclose(ranges[key].upper, [[expected]], rtol=1e-6)

    stored = plan.quantize(w)
    scale = expected / 127
    x = np.asarray(batches[0][0])
    grid = np.clip(np.round(x / scale), -127, 127) * scale
    np.testing.assert_allclose(
        jax.jit(plan.apply(model, ranges))(stored, x), grid @ restored(stored), rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", [lambda f: f, jax.jit, jax.checkpoint])
def test_static_ranges_of_mapped_examples(part):
    """They are those of the same examples as a batch."""

    def model(w, x):
        return part(lambda w, x: jax.vmap(lambda row: jnp.tanh(row @ w) @ w)(x))(w, x)

    (w,) = draw((8, 8))
    batches = [(draw((4, 8), seed=s)[0],) for s in range(3)]
    plan = PtqProvider([STATIC], strict=True).plan(model, w, *batches[0])
    ranges = plan.calibrate(w, batches)
    hidden = [np.tanh(np.asarray(x, np.float64) @ np.asarray(w)) for (x,) in batches]
    for key, seen in (("matmul:0#lhs", [x for (x,) in batches]), ("matmul:1#lhs", hidden)):
        expected = np.mean([np.abs(x).max(axis=1).mean() for x in seen])
        np.testing.assert_allclose(ranges[key].upper, [expected], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["scan", "grouped queries", "experts", "convolution", "jit"])
def test_static_ranges_in_programs(program):
    fn, params, x = make(program)
    rule = dataclasses.replace(STATIC, act_batch_axes=(), weights_only=False)
    plan = PtqProvider([rule]).plan(fn, params, x)
    ranges = plan.calibrate(params, [(x,), (x,)])
    assert set(ranges) == set(plan.ranges)
    stored = plan.quantize(params)
    actual, expected = jax.jit(plan.apply(fn, ranges))(stored, x), fn(params, x)
    assert np.linalg.norm(actual - expected) < 0.1 * np.linalg.norm(expected)
    assert (
        contractions(plan.apply(fn, ranges), stored, x) == [("int8", "int8")] * PROGRAMS[program][3]
    )


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_no_step_of_a_loop_is_cut_off(loop, train):
    """A joined range is that of the largest step; the mean is taken over calls."""

    def model(w, x):
        if loop == "scan":
            return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), 10 * x, w)[0]
        return lax.fori_loop(0, len(w), lambda i, c: jnp.tanh(c @ w[i]), 10 * x)

    w, batches = draw((4, 8, 8))[0], [draw((16, 8), seed=s)[0] for s in range(3)]
    rule = dataclasses.replace(STATIC, act_batch_axes=(), static_range="joined")
    if train:
        provider = QtProvider([rule], strict=True)
        ranges = provider.init_statistics(model, w, batches[0])
        for x in batches:
            jax.block_until_ready(jax.jit(provider.apply(model, ranges))(w, x))
        ((key, found),) = ((key, one.calibration()) for key, one in ranges.items())
    else:
        plan = PtqProvider([rule], strict=True).plan(model, w, batches[0])
        ((key, found),) = plan.calibrate(w, [(x,) for x in batches]).items()
    assert key == f"{loop}(<lambda>)/matmul:0#lhs"
    # The first step has the inputs, and the others what tanh returns.
    largest = [max(10 * np.abs(x).max(), 1) for x in batches]
    np.testing.assert_allclose(found.upper.ravel(), [np.mean(largest)], rtol=1e-5)


@pytest.mark.slow
def test_asymmetric_static_ranges():
    rule = QuantizationRule(
        weight_qtype="int8",
        act_qtype="int8",
        act_static_scale=True,
        act_calibration_method="minmax",
    )
    (w,), x = draw((8, 6)), jnp.abs(draw((64, 8))[0])
    plan = PtqProvider([rule]).plan(lambda w, x: x @ w, w, x)
    ranges = plan.calibrate(w, [(x,)])
    assert float(ranges["matmul:0#lhs"].lower.max()) == 0
    stored = plan.quantize(w)
    actual = plan.apply(lambda w, x: x @ w, ranges)(stored, jnp.minimum(x, 1.0))
    np.testing.assert_allclose(actual, jnp.minimum(x, 1.0) @ w, atol=0.1)


def test_static_ranges_that_are_missing():
    (w,), x = draw((8, 6)), jnp.ones((4, 8))
    plan = PtqProvider([STATIC]).plan(lambda w, x: x @ w, w, x)
    with pytest.raises(Exception, match="no statistics"):
        plan.apply(lambda w, x: x @ w)(plan.quantize(w), x)
    with pytest.raises(Exception, match="no statistics for matmul:0#lhs"):
        plan.apply(lambda w, x: x @ w, {"other#lhs": None})(plan.quantize(w), x)
    with pytest.raises(QuantizationError, match="batches is empty"):
        plan.calibrate(w, [])
    dynamic = PtqProvider([W8]).plan(lambda w, x: x @ w, w, x)
    with pytest.raises(QuantizationError, match="nothing to calibrate"):
        dynamic.calibrate(w, [(x,)])


def test_methods_of_a_plan_know_its_function():
    (w,), x = draw((8, 6)), draw((4, 8))[0]
    plan = PtqProvider([STATIC]).plan(lambda w, x: x @ w, w, x)
    found = plan.calibrate(w, [(x,)], fn=lambda w, x: (2 * x) @ w)
    expected = plan.calibrate(w, [(2 * x,)])
    np.testing.assert_array_equal(found["matmul:0#lhs"].upper, expected["matmul:0#lhs"].upper)
    with pytest.raises(TypeError, match="params must be parameters, got the function <lambda>"):
        plan.calibrate(plan.fn, [(x,)])
    with pytest.raises(TypeError, match="stored must be parameters, got the function <lambda>"):
        plan.export(plan.fn, w, x)


# --- rules and parameters that do not fit --------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([QuantizationRule(module_path="misspelt"), W8], "rule 0 has no effect"),
        ([QuantizationRule(weight_qtype="int8", op_names=["einsum"])], "rule 0 has no effect"),
        (
            [QuantizationRule(op_names=["matmul"], module_path="two", weight_qtype="int4"), W8],
            r"args\[0\]\['w'\] is ambiguous: rule 1 .* int8 for one/matmul:0, rule 0 .* int4",
        ),
    ],
)
def test_what_is_a_warning_or_with_strict_an_error(rules, message):
    def model(params, x):
        with jax.named_scope("one"):
            x = x @ params["w"]
        with jax.named_scope("two"):
            return x @ params["w"]

    params, x = {"w": draw((8, 8))[0]}, jnp.ones((4, 8))
    with pytest.warns(QuantizationWarning, match=message):
        plan = PtqProvider(rules).plan(model, params, x)
    assert plan.problems
    with pytest.raises(QuantizationError, match=message):
        PtqProvider(rules, strict=True).plan(model, params, x)


def test_an_operation_without_quantized_form():
    def model(params, x):
        return jnp.dot(params["w"], x, preferred_element_type=jnp.int32)

    params, x = {"w": jnp.ones((8, 8))}, jnp.ones(8)
    message = "dot:0.*stays float: preferred_element_type is int32"
    with pytest.warns(QuantizationWarning, match=message):
        PtqProvider([W8]).plan(model, params, x)
    with pytest.raises(QuantizationError, match="preferred_element_type is int32"):
        PtqProvider([W8], strict=True).apply(model)(params, x)


def test_integer_parameters_that_a_rule_is_about():
    params = {"layer": {"w": jnp.ones((8, 6), jnp.int32)}}
    with pytest.raises(QuantizationError, match=r"Rule 0 .*args\[0\]\['layer'\]\['w'\].*int32"):
        PtqProvider([W8]).plan(lambda p, x: x @ p["layer"]["w"], params, jnp.ones((4, 8), int))


def test_tiles_that_do_not_divide():
    rule = QuantizationRule(weight_qtype="int4", tile_size=5, tile_fallback=None)
    params, x = {"w": draw((8, 6))[0]}, jnp.ones((4, 8))
    with pytest.raises(QuantizationError, match=r"Rule 0 .*\['w'\].*tile_size 5.* \[?8"):
        PtqProvider([rule]).plan(lambda p, x: x @ p["w"], params, x)


@pytest.mark.parametrize(
    ("fallback", "tiles", "said"),
    [("divisor", {0: 6}, "tiles of"), ("channel", {}, "one scale per channel")],
)
def test_tiles_as_a_catch_all(fallback, tiles, said):
    """A convolution stem, heads that tiles don't divide, and a matmul that they do, by one rule."""

    def model(p, x):
        x = jax.nn.relu(lax.conv_general_dilated(x, p["stem"], (1,), "SAME", None, None, SPEC))
        x = x @ p["odd"]
        return jnp.einsum("bsd,dnh->bsnh", x, p["even"])

    rule = QuantizationRule(weight_qtype="int4", tile_size=8, tile_fallback=fallback)
    params = {"stem": draw((3, 5, 12))[0], "odd": draw((12, 16))[0], "even": draw((16, 2, 3))[0]}
    x = draw((2, 7, 5))[0]
    plan = PtqProvider([rule], strict=True).plan(model, params, x)
    found = {path: dict(one.granularity.tile_axes) for path, one in plan.weights.items()}
    assert found == {"args[0]['stem']": {}, "args[0]['odd']": tiles, "args[0]['even']": {0: 8}}
    assert [note.partition(" does")[0] for note in plan.notes][1] == "matmul:0: tile_size 8"
    assert said in plan.notes[0]
    assert said in plan.notes[1]
    assert "note: matmul:0" in str(plan)
    stored = plan.quantize(params)
    actual = jax.jit(plan.apply(model))(stored, x)
    np.testing.assert_allclose(actual, model(restored(stored), x), rtol=1e-3, atol=1e-3)


SPEC = ("NHC", "HIO", "NHC")


def test_what_stays_float_is_told():
    def model(p, x):
        return (x @ p["w"]) * p["scale"] + p["table"][jnp.arange(4)]

    params = {"w": draw((8, 6))[0], "scale": draw((6,))[0], "table": draw((500, 6))[0]}
    plan = PtqProvider([W8], strict=True).plan(model, params, jnp.ones((4, 8)))
    assert [(path, size) for path, size, _ in plan.floats] == [
        ("args[0]['table']", 12000),
        ("args[0]['scale']", 24),
    ]
    first, second = str(plan).splitlines()[:2]
    assert first == "1 of 3 parameters quantized: 0.01 MiB -> 0.01 MiB"
    assert second.startswith("0.01 MiB of parameters stay float: args[0]['table'] 0.01 MiB (")
    assert "take:0: no rule" in second
    assert "args[0]['scale'] 0.00 MiB (no matmul, convolution or gather uses it)" in second


def test_integers_and_scalars_are_no_problem():
    def model(p, x, ids):
        counts = jax.nn.one_hot(ids, 8, dtype=jnp.int32) @ jnp.ones((8, 3), jnp.int32)
        scaled = jax.vmap(lambda w, y: jnp.dot(w, y))(p[0], x[0, :6])
        return jnp.dot(jnp.float32(2), x @ p) + scaled + counts.sum().astype(jnp.float32)

    plan = PtqProvider([W8A8], strict=True).plan(model, draw((8, 6))[0], jnp.ones((4, 8)), IDS)
    assert {op.reason for op in plan.ops if not op.quantized} == {
        "an operand is int32",
        "an operand is a scalar",
    }


IDS = jnp.arange(4)


def test_a_rule_for_weights_only():
    """Attention scores match the next rule, or none; by default as with ``weights_only=True``."""

    def model(p, x):
        q, k = x @ p["q"], x @ p["k"]
        return q @ k.T

    params = {"q": draw((8, 6))[0], "k": draw((8, 6))[0]}
    x = jnp.ones((4, 8))
    only, all_of_them, named = (
        dataclasses.replace(W8A8, **fields)
        for fields in ({"weights_only": True}, {"weights_only": False}, {"op_names": ["matmul"]})
    )
    leave = QuantizationRule(module_path="attention")
    for rules, engine in (([W8A8], "trace"), ([only], "trace"), ([only], "patch")):
        plan = PtqProvider(rules, strict=True, engine=engine).plan(model, params, x)
        assert [(op.op_name, op.quantized) for op in plan.ops] == [
            ("matmul", True), ("matmul", True), ("matmul", False)
        ]  # fmt: skip
        assert plan.ops[-1].reason.startswith("the rule is for weights")
        assert "2 of 3 operations quantized" in str(plan)
    for rules in ([all_of_them], [named], [only, named], [W8A8, all_of_them]):
        plan = PtqProvider(rules, strict=True).plan(model, params, x)
        assert [op.quantized for op in plan.ops if not op.is_in_parts] == [True] * 3
        (note,) = plan.notes
        assert "two activations" in note

    held = params["q"]
    for rule, is_quantized in ((W8A8, True), (only, False)):
        plan = PtqProvider(rule).plan(lambda p, x: jnp.tanh(x @ p["q"]) @ held.T, params, x)
        assert plan.ops[-1].quantized is is_quantized  # it may be a weight

    def attention(p, x):
        with jax.named_scope("attention"):
            return model(p, x)

    with pytest.warns(QuantizationWarning, match="rule 1 has no effect"):
        plan = PtqProvider([leave, all_of_them]).plan(attention, params, x)
    assert not any(op.quantized for op in plan.ops)


def test_a_weight_that_can_not_be_stored_is_no_activation():
    """A rule for weights alone matches it, so that the plan says why it is not stored."""

    def model(p, x, mask):
        return jax.nn.relu(x @ p["q"]) @ (p["k"] * mask)

    params, mask = {"q": draw((8, 8))[0], "k": draw((8, 8))[0]}, jnp.ones((8, 8))
    for fields in ({}, {"weights_only": True}):
        for qtype in (None, "int8"):
            rule = QuantizationRule(weight_qtype="int8", act_qtype=qtype, **fields)
            with pytest.warns(QuantizationWarning, match="can't be stored"):
                plan = PtqProvider(rule).plan(model, params, jnp.ones((4, 8)), mask)
            (problem,) = plan.problems
            assert "args[0]['k'] can't be stored" in problem
            assert plan.ops[1].quantized is (qtype is not None)
            tapped = plan.apply(model)(plan.quantize(params), jnp.ones((4, 8)), mask)
            np.testing.assert_allclose(tapped, model(params, jnp.ones((4, 8)), mask), atol=0.1)


def test_parameters_that_the_plan_is_not_for():
    fn, params, x = make("tied")
    plan = PtqProvider([W8]).plan(fn, params, x)
    table, w = params["table"], params["w"]
    before = jax.tree.map(np.asarray, params)
    for other, message in (
        ({"table": table}, r"\['w'\] is missing"),
        ({**params, "more": w}, r"\['more'\] is unexpected"),
        ([table, w], "a tree like the plan's"),
        ({**params, "w": w[:4]}, r"\['w'\] \(rule 0\) is f32\[4,8\], but .* f32\[8,8\]"),
        ({**params, "w": w.astype(jnp.bfloat16)}, r"\['w'\] \(rule 0\) is bf16\[8,8\]"),
        ({**params, "w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, r"\['w'\].*only arrays"),
        ({**params, "w": w.at[1, 2].set(jnp.nan)}, r"\['w'\] has values .* not finite.*rule 0"),
        ({**params, "w": w.at[1, 2].set(jnp.inf)}, r"\['w'\] has values .* not finite"),
    ):
        for donate in (False, True):
            with pytest.raises(QuantizationError, match=message):
                plan.quantize(other, donate=donate)
    jax.tree.map(np.testing.assert_array_equal, params, before)  # nothing was deleted


def test_qvalue_for_another_engine():
    fn, params, x = make("operator")
    stored = PtqProvider([W8]).plan(fn, params, x).quantize(params)
    with pytest.raises(QuantizationError, match="int8 values"):
        PtqProvider([W8], engine="patch").apply(fn)(stored, x)


@pytest.mark.slow
def test_numpy_parameters_and_equinox_modules():
    import equinox as eqx

    fn, params, x = make("tied")
    params = jax.tree.map(np.asarray, params)
    plan = PtqProvider([W8]).plan(fn, params, np.asarray(x))
    np.testing.assert_allclose(plan.apply(fn)(plan.quantize(params), x), fn(params, x), atol=0.2)
    mlp = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    (rows,) = draw((5, 8))

    def model(mlp, x):
        return jax.vmap(mlp)(x)

    plan = PtqProvider([W8A8], strict=True).plan(model, mlp, rows)
    assert [w.path for w in plan.weights.values()] == [
        f"args[0].layers[{i}].weight" for i in range(3)
    ]
    stored = plan.quantize(mlp)
    np.testing.assert_allclose(plan.apply(model)(stored, rows), model(mlp, rows), atol=0.1)


def test_the_tied_program_needs_strictness_nowhere():
    fn, params, x = make("tied")
    assert tied is fn
    assert not PtqProvider([W8A8], strict=True).plan(fn, params, x).problems


def test_reasons_of_parameters_that_no_rule_matched():
    """Also of one that several operations use, and of one with a word in its name."""

    def fn(p, x):
        with jax.named_scope("encoder"):
            x = x @ p["q and k"]
        return x + p["bias"]

    (w,) = draw((8, 8))
    params, x = {"q and k": w, "bias": jnp.zeros(8)}, jnp.ones((2, 8))
    rule = QuantizationRule(module_path="decoder", weight_qtype="int8")
    with pytest.warns(QuantizationWarning, match="rule 0 has no effect"):
        plan = PtqProvider(rule).plan(fn, params, x)
    assert [(path, why) for path, _, why in plan.floats] == [
        ("args[0]['q and k']", "encoder/matmul:0: no rule matches"),
        ("args[0]['bias']", "no matmul, convolution or gather uses it"),
    ]


@pytest.mark.parametrize(
    ("name", "primitive"), [("pallas_call", "pallas_call"), ("kernel", "mpmd_map")]
)
def test_a_parameter_of_a_pallas_kernel_says_so(name, primitive):
    def body(x, w, out):
        out[...] = x[...] @ w[...]

    kernel = kernel_makers(body, jax.ShapeDtypeStruct((4, 8), jnp.float32))[name]()

    def fn(p, x):
        return kernel(x, p["a"]) @ p["b"]

    a, b = draw((8, 8), (8, 8))
    plan = PtqProvider(W8).plan(fn, {"a": a, "b": b}, jnp.ones((4, 8)))
    ((path, _, why),) = plan.floats
    assert path == "args[0]['a']"
    assert why.startswith(f"{primitive}:0: ")
    assert "it is used inside a Pallas kernel" in why
    assert list(plan.weights) == ["args[0]['b']"]


def test_a_product_of_two_parameters_says_so():
    """A stored one beside it is stored as before, and its kernel is chosen as before."""

    def fn(p, x):
        return x @ p["c"], p["a"] @ p["b"], p["c"] @ p["c"].T

    (w,) = draw((8, 8))
    with pytest.warns(QuantizationWarning, match="alone"):
        plan = PtqProvider(W8).plan(fn, dict.fromkeys("abc", w), jnp.ones((4, 8)))
    (problem,) = plan.problems
    assert problem.startswith("matmul:1 of args[0]['a'] and args[0]['b'] stays float")
    assert [*plan.weights] == ["args[0]['c']"]
    assert [(path, why.partition(":")[0]) for path, _, why in plan.floats] == [
        ("args[0]['a']", "matmul"),
        ("args[0]['b']", "matmul"),
    ]
    assert all("computes a weight" in why for *_, why in plan.floats)
    first, *products = plan.ops
    assert first.paths == ("args[0]['c']",)
    assert [op.paths for op in products] == [
        ("args[0]['a']", "args[0]['b']"),
        ("args[0]['c']", "args[0]['c']"),
    ]
    assert (
        first.kernel == PtqProvider(W8).plan(lambda p, x: x @ p, w, jnp.ones((4, 8))).ops[0].kernel
    )


UNUSED = {
    "path": (
        QuantizationRule(module_path="encodr", weight_qtype="int8"),
        "(module_path='encodr', weight_qtype='int8'): its module_path matches no operation; the "
        "module paths are 'encoder', 'decoder', the nearest is 'encoder'",
    ),
    "name": (
        QuantizationRule(op_names=["einsum"], weight_qtype="int8"),
        "no operation has its op_names; there are 'matmul'",
    ),
    "weight": (
        QuantizationRule(weight_path=r"\['wx'\]", weight_qtype="int8"),
        "its weight_path matches no parameter; the parameters are \"['v']\", "
        "\"['w']\", the nearest is \"['w']\"",
    ),
    "shadowed": (W8, "rule 0 decides about encoder/matmul:0 before it"),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_rule_that_matches_nothing_says_what_there_is(name):
    def fn(p, x):
        with jax.named_scope("encoder"):
            x = x @ p["w"]
        with jax.named_scope("decoder"):
            return x @ p["v"]

    rule, text = UNUSED[name]
    w, v = draw((8, 8), (8, 8))
    rules = [W8, rule] if name == "shadowed" else [rule, W8]
    with pytest.warns(QuantizationWarning) as found:
        PtqProvider(rules).plan(fn, {"w": w, "v": v}, jnp.ones((2, 8)))
    assert text in str(found[0].message)


def test_options_of_the_provider_are_not_the_functions():
    fn = lambda p, x: x @ p  # noqa: E731
    args = jnp.ones((4, 4)), jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"PtqProvider\(rules, strict=True\)"):
        PtqProvider(W8).plan(fn, *args, strict=True)
    plan = PtqProvider(W8).plan(lambda p, x, strict: x @ p, *args, strict=True)
    assert plan.weights


def test_equal_parameters_have_one_form():
    """The bytes of thousands of parameters are found once for each form."""
    from provider_xla.plan import weight

    def fn(p, x):
        for w in p:
            x = x @ w
        return x

    params = draw(*[(8, 24), (24, 8)] * 20)
    weight._form.cache_clear()
    plan = PtqProvider(W8).plan(fn, params, jnp.ones((2, 8)))
    assert "40 of 40 parameters quantized" in str(plan)
    assert weight._form.cache_info().misses <= 4  # packed and not, for two shapes

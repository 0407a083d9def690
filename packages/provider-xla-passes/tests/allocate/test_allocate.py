"""Plan.allocate: what it measures, what it chooses, and that the plan is that."""

import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quant_numerics as qn
from jaxtap_testkit.xla_samples import draw, make
from provider_xla import PtqProvider, QuantizationError, QuantizationRule, QuantizationWarning
from provider_xla.program.sites import Sites
from provider_xla.run.contraction import run_site

pytestmark = pytest.mark.sample(2)

W8 = QuantizationRule(weight_qtype="int8")
QTYPES = ("int2", "int4", "int8")


def is_qvalue(node):
    return isinstance(node, qn.QArray | qn.PackedQArray)


def stored_bytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params, is_leaf=is_qvalue))


def chosen(plan):
    return {path.removeprefix("args[0]"): weight.qtype for path, weight in plan.weights.items()}


def on_grid(w, bits):
    """A matrix [in, out] on the grid of symmetric integers with a scale per column, in float64."""
    w = np.asarray(w, np.float64)
    scale = np.abs(w).max(0, keepdims=True) / (2 ** (bits - 1) - 1)
    return np.round(w / scale) * scale


def mlp(params, x):
    y = jnp.tanh(x @ params["first"])
    return x @ params["beside"] + jnp.tanh(y @ params["second"]) @ params["out"]


def mlp64(params, x):
    y = np.tanh(x @ params["first"])
    return x @ params["beside"] + np.tanh(y @ params["second"]) @ params["out"]


@pytest.fixture(scope="module")
def model():
    first, beside, second, out, x = draw((12, 16), (12, 5), (16, 16), (16, 5), (32, 12))
    # What is beside is little of the output.
    return {"first": first / 4, "beside": beside / 400, "second": second / 4, "out": out}, x


def planned(params, x, rules=(W8,), fn=mlp, **config):
    return PtqProvider(rules, strict=True, **config).plan(fn, params, x)


@pytest.mark.slow
def test_errors_are_those_of_the_output_in_float64(model):
    params, x = model
    plan = planned(params, x).allocate(params, x, budget_bits=6, qtypes=("int3", "int4", "int8"))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = mlp64(wide, np.asarray(x, np.float64))

    def error_of(quantized):
        found = mlp64(quantized, np.asarray(x, np.float64))
        return np.sum((found - expected) ** 2) / np.sum(expected**2)

    bits = {"int3": 3, "int4": 4, "int8": 8}
    rows = {row.path.removeprefix("args[0]"): row for row in plan.allocation.weights}
    for key, row in rows.items():
        one = jax.tree_util.tree_map_with_path(
            lambda path, w, key=key, row=row: (
                on_grid(w, bits[row.qtype]) if jax.tree_util.keystr(path) == key else w
            ),
            wide,
        )
        assert row.error == pytest.approx(error_of(one), rel=0.02)
    for uniform in plan.allocation.uniform:
        grid = jax.tree.map(lambda w, n=bits[uniform.name]: on_grid(w, n), wide)
        assert uniform.measured == pytest.approx(error_of(grid), rel=0.02)
    grid = jax.tree_util.tree_map_with_path(
        lambda path, w: on_grid(w, bits[rows[jax.tree_util.keystr(path)].qtype]), wide
    )
    assert plan.allocation.measured == pytest.approx(error_of(grid), rel=0.02)


@pytest.mark.slow
def test_the_plan_runs_what_was_measured(model):
    params, x = model
    plan = planned(params, x).allocate(params, x, budget_bits=5, qtypes=QTYPES)
    stored = plan.quantize(params)
    actual, expected = jax.jit(plan.apply(mlp))(stored, x), mlp(params, x)
    error = float(jnp.sum((actual - expected) ** 2) / jnp.sum(expected**2))
    assert error == pytest.approx(plan.allocation.measured, rel=1e-3)
    assert [leaf.qtype for leaf in jax.tree.leaves(stored, is_leaf=is_qvalue)] == [
        row.qtype for row in plan.allocation.weights
    ]


@pytest.mark.slow
def test_bits_go_where_they_matter(model):
    params, x = model
    # Quantized values and scales of three in int8, and of the one beside in int2.
    size = (192 + 64) + (256 + 64) + (80 + 20) + (15 + 20)
    plan = planned(params, x).allocate(params, x, budget_bytes=size, qtypes=QTYPES)
    assert chosen(plan) == {
        "['beside']": "int2", "['first']": "int8", "['out']": "int8", "['second']": "int8"
    }  # fmt: skip
    assert plan.bytes_after == size
    uniform = {one.name: one for one in plan.allocation.uniform}
    assert plan.allocation.measured < uniform["int4"].measured / 2


@pytest.mark.slow
@pytest.mark.parametrize("tile", [None, 4, [None, 4]])
def test_budgets_hold_and_more_is_never_worse(model, tile):
    params, x = model
    plan, before = planned(params, x), math.inf
    elements = sum(leaf.size for leaf in jax.tree.leaves(params))
    for bits in (14, 11, 10.5) if tile == 4 else (12, 6, 5):
        made = plan.allocate(params, x, budget_bits=bits, qtypes=("int2", "int4"), tile_size=tile)
        stored = made.quantize(params, prepack=False)
        assert stored_bytes(stored) == made.bytes_after == made.allocation.bytes
        assert made.bytes_after * 8 <= bits * elements
        assert made.allocation.predicted >= (0 if before is math.inf else before) * (1 - 1e-9)
        before = made.allocation.predicted
        half = plan.allocate(
            params, x, budget_bytes=made.bytes_after, qtypes=("int2", "int4"), tile_size=tile
        )
        assert half.bytes_after <= made.bytes_after
        assert half.allocation.predicted == pytest.approx(before, rel=1e-9)


@pytest.mark.slow
def test_tiles_to_choose_from(model):
    params, x = model
    plan = planned(params, x).allocate(
        params, x, budget_bits=20, qtypes=["int4"], tile_size=[None, 4]
    )
    # Finer scales err less; and 12 and 16 can be tiled.
    assert {row.tile_size for row in plan.allocation.weights} == {4}
    assert [one.name for one in plan.allocation.uniform] == ["int4", "int4 in tiles of 4"]


def test_what_tiles_do_not_divide_has_no_such_choice():
    a, b, x = draw((12, 16), (16, 4), (8, 12))
    params = {"a": a, "b": b}

    def fn(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    plan = PtqProvider(W8).plan(fn, params, x)
    made = plan.allocate(params, x, budget_bits=12, qtypes=["int4"], tile_size=[None, 8])
    assert [row.tile_size for row in made.allocation.weights] == [None, 8]
    # Only whole ones are shown: not all parameters can be in tiles of 8.
    assert [one.name for one in made.allocation.uniform] == ["int4"]


def test_block_formats_where_they_are_possible():
    a, b, x = draw((12, 32), (32, 4), (8, 12))

    def fn(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    params = {"a": a / 3, "b": b}
    plan = PtqProvider(W8).plan(fn, params, x)
    made = plan.allocate(params, x, budget_bits=12, qtypes=["int2", "nvfp4"])
    assert chosen(made) == {"['a']": "int2", "['b']": "nvfp4"}
    only = plan.allocate(params, x, budget_bits=20, qtypes=["nvfp4"])
    assert chosen(only) == {"['a']": "int8", "['b']": "nvfp4"}  # as the plan had it
    assert made.bytes_after == stored_bytes(made.quantize(params, prepack=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "tied", "experts", "convolution", "grouped queries"])
def test_programs(name):
    fn, params, x = make(name)
    plan = PtqProvider(W8, strict=True).plan(fn, params, x)
    made = plan.allocate(params, x, budget_bits=14, qtypes=("int4", "int6"))
    assert made.problems == plan.problems == ()
    assert list(made.weights) == list(plan.weights)
    assert {op.op_id for op in made.ops} == {op.op_id for op in plan.ops}
    stored = made.quantize(params)
    assert stored_bytes(stored) == made.bytes_after
    actual, expected = jax.jit(made.apply(fn))(stored, x), fn(params, x)
    error = float(jnp.sum((actual - expected) ** 2) / jnp.sum(expected**2))
    assert error == pytest.approx(made.allocation.measured, rel=0.01)


def test_every_other_decision_of_the_rules_is_kept(model):
    params, x = model

    def fn(params, x):
        with jax.named_scope("first"):
            y = jnp.tanh(x @ params["first"])
        return x @ params["beside"] + jnp.tanh(y @ params["second"]) @ params["out"]

    rules = [
        QuantizationRule(module_path="first"),
        QuantizationRule(
            weight_path=r"\['out'\]", weight_qtype="int8", act_qtype="int8", tile_size=8
        ),
        QuantizationRule(weight_qtype="int4", weight_calibration_method="mse"),
    ]
    plan = planned(params, x, rules, fn)
    made = plan.allocate(params, x, budget_bits=9, qtypes=("int3", "int6"))
    assert made.problems == ()
    assert list(made.weights) == list(plan.weights)
    assert "args[0]['first']" not in made.weights
    last = made.weights["args[0]['out']"]
    assert dict(last.granularity.tile_axes) == {0: 8}
    assert made.weights["args[0]['second']"].method == "mse"
    by_weight = {op.paths: op.qtypes for op in made.ops if op.quantized}
    assert by_weight["args[0]['out']",] == ("int8", last.qtype)


def test_again_and_with_rules_for_single_parameters(model):
    params, x = model
    rules = [QuantizationRule(weight_path=r"\['(first|second)'\]", weight_qtype="int8"), W8]
    plan = planned(params, x, rules)
    first = plan.allocate(params, x, budget_bits=9, qtypes=QTYPES)
    # The rule for two parameters has nothing left to decide, that for all might have.
    assert sum(rule.weight_path is None for rule in first.rules.rules) == 1
    errors = first.allocation.errors
    again = first.allocate(params, x, budget_bits=6, qtypes=QTYPES, errors=errors)
    other = plan.allocate(params, x, budget_bits=6, qtypes=QTYPES, errors=errors)
    assert again.allocation == other.allocation
    assert again.problems == first.problems == ()
    assert set(again.rules.rules) == set(other.rules.rules)


@pytest.mark.slow
def test_layers_with_the_same_qtype_share_a_trace():
    ws, x = draw((6, 8, 8))[0] / 3, draw((4, 8))[0]
    params = list(ws)
    block = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fn(params, x):
        x = jnp.tanh(x)  # an input of the program is told apart from what is computed
        for w in params:
            x = block(x, w)
        return x

    plan = planned(params, x, fn=fn).allocate(params, x, budget_bits=9.5, qtypes=("int4", "int6"))
    assert set(chosen(plan).values()) == {"int4", "int6"}
    seen = set()
    sites = Sites(plan.engine, plan.rules, run_site, lambda op, problem: seen.add(op.op_id))
    jax.eval_shape(sites.tap(fn), params, x)
    assert len(seen) == 2


def test_lookups(model):
    (table, w) = draw((32, 8), (8, 8))
    params = {"table": table, "w": w}
    rules = [QuantizationRule(op_names=["take"], weight_qtype="int8"), W8]

    def fn(params, ids):
        return jnp.tanh(params["table"][ids] @ params["w"])

    ids = jnp.arange(32)
    plan = planned(params, ids, rules, fn).allocate(
        params, ids, budget_bits=10, qtypes=("int4", "int8")
    )
    stored = plan.quantize(params)
    assert stored_bytes(stored) == plan.bytes_after <= 10 * (32 * 8 + 64) / 8
    assert plan.problems == ()
    assert set(chosen(plan)) == {"['table']", "['w']"}


@pytest.mark.slow
def test_a_model_of_equinox():
    net = eqx.nn.MLP(6, 3, 16, 1, key=jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 6)), jnp.float32)

    def fn(net, x):
        return jax.vmap(net)(x)

    plan = PtqProvider(W8, strict=True).plan(fn, net, x)
    made = plan.allocate(net, x, budget_bits=10, qtypes=("int2", "int4"))
    assert len(made.weights) == 2
    error = made.apply(fn)(made.quantize(net), x) - fn(net, x)
    relative = float(jnp.sum(error**2) / jnp.sum(fn(net, x) ** 2))
    assert relative == pytest.approx(made.allocation.measured, rel=1e-3)


@pytest.mark.slow
def test_the_patch_engine_measures_the_same(model):
    params, x = model
    made = [
        planned(params, x, engine=engine).allocate(params, x, budget_bits=5, qtypes=QTYPES)
        for engine in ("trace", "patch")
    ]
    assert chosen(made[0]) == chosen(made[1])
    assert made[0].allocation == made[1].allocation
    found = made[1].apply(mlp)(params, x)  # the patch engine takes arrays
    expected = made[0].apply(mlp)(made[0].quantize(params), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_an_error_of_ones_own(model):
    params, x = model

    def first_output_only(expected, actual):
        return jnp.mean((expected[:, 0] - actual[:, 0]) ** 2)

    plan = planned(params, x).allocate(
        params, x, budget_bits=5, qtypes=QTYPES, error=first_output_only
    )
    difference = (plan.apply(mlp)(plan.quantize(params), x) - mlp(params, x))[:, 0]
    assert plan.allocation.measured == pytest.approx(float(jnp.mean(difference**2)), rel=1e-3)


def test_integers_among_the_outputs_are_not_compared(model):
    params, x = model

    def fn(params, x):
        logits = mlp(params, x)
        return {"class": logits.argmax(-1), "logits": logits, "name": "digits"}

    one = planned(params, x, fn=fn).allocate(params, x, budget_bits=5, qtypes=QTYPES)
    assert one.allocation == planned(params, x).allocate(
        params, x, budget_bits=5, qtypes=QTYPES
    ).allocation  # fmt: skip
    with pytest.raises(QuantizationError, match="returns no array of floats"):
        planned(params, x, fn=lambda p, x: mlp(p, x).argmax(-1)).allocate(
            params, x, budget_bits=5, qtypes=QTYPES
        )


def test_shown_as_table_and_json(model):
    params, x = model
    plan = planned(params, x)
    assert plan.allocation is None
    allocation = plan.allocate(params, x, budget_bits=5, qtypes=QTYPES).allocation
    text = str(allocation)
    for part in ("args[0]['out']", "allocated", "int2", "predicted", "dB", "at most"):
        assert part in text
    values = json.loads(json.dumps(allocation.as_json()))
    assert sum(one["bytes"] for one in values["weights"]) == values["bytes"] == allocation.bytes
    assert [one["name"] for one in values["uniform"]] == list(QTYPES)
    assert allocation.predicted == pytest.approx(sum(row.error for row in allocation.weights))


@pytest.mark.slow
def test_errors_are_measured_once(model):
    params, x = model
    plan = planned(params, x)
    first = plan.allocate(params, x, budget_bits=9, qtypes=QTYPES).allocation
    rows = json.loads(json.dumps(first.as_json()))["errors"]
    with pytest.raises(ValueError, match="must be a mapping by tuples of paths"):
        plan.allocate(params, x, budget_bits=8, qtypes=QTYPES, errors=rows)
    errors = {tuple(one["paths"]): one["errors"] for one in rows}
    runs = []

    def counted(expected, actual):
        runs.append(0)
        jax.debug.callback(lambda: runs.append(1))
        return jnp.sum((expected - actual) ** 2) / jnp.sum(expected**2)

    again = plan.allocate(
        params, x, budget_bits=8, qtypes=QTYPES, errors=errors, error=counted
    ).allocation
    jax.effects_barrier()
    assert sum(runs) == 1 + len(again.uniform)  # what was chosen, and each format by itself
    alone = plan.allocate(params, x, budget_bits=8, qtypes=QTYPES).allocation
    assert again.weights == alone.weights
    assert again.errors == first.errors
    # Of other candidates the rest is measured.
    more = plan.allocate(params, x, budget_bits=8, qtypes=("int2", "int6"), errors=errors)
    out = ("args[0]['out']",)
    assert more.allocation.errors[out]["int2"] == first.errors[out]["int2"]


# --- errors ---------------------------------------------------------------------------------------


def test_the_least_possible_is_named_and_enough(model):
    params, x = model
    plan = planned(params, x)
    with pytest.raises(
        QuantizationError, match=r"budget_bits=3 is too few.*takes [\d.]+ bits"
    ) as e:
        plan.allocate(params, x, budget_bits=3, qtypes=("int2", "int8"))
    least = float(str(e.value).partition("it takes ")[2].split()[0])
    made = plan.allocate(params, x, budget_bits=least, qtypes=("int2", "int8"))
    assert set(chosen(made).values()) == {"int2"}
    with pytest.raises(
        QuantizationError, match=r"budget_bytes=10 is too few.*takes \d+ bytes"
    ) as e:
        plan.allocate(params, x, budget_bytes=10, qtypes=("int2", "int8"))
    least = int(str(e.value).partition("it takes ")[2].split()[0])
    assert least == made.bytes_after
    assert plan.allocate(params, x, budget_bytes=least, qtypes=["int2"]).bytes_after == least
    with pytest.raises(QuantizationError, match="too few"):
        plan.allocate(params, x, budget_bytes=least - 1, qtypes=["int2"])


@pytest.mark.parametrize("options", [{}, {"budget_bits": 4, "budget_bytes": 100}])
def test_one_budget(model, options):
    params, x = model
    with pytest.raises(ValueError, match="one of budget_bits and budget_bytes"):
        planned(params, x).allocate(params, x, **options)


@pytest.mark.parametrize(
    ("qtypes", "message"), [((), "qtypes is empty"), ("int4", r"\['int4'\]"), (["int9"], "int9")]
)
def test_wrong_qtypes(model, qtypes, message):
    params, x = model
    with pytest.raises(ValueError, match=message):
        planned(params, x).allocate(params, x, budget_bits=5, qtypes=qtypes)


def test_a_parameter_that_the_batch_does_not_use():
    a, b, x = draw((8, 4), (8, 4), (3, 8))
    params = {"a": a, "b": b}

    def fn(params, x):
        return jax.lax.cond(
            x[0, 0] > 100, lambda p: x @ p["a"], lambda p: x @ p["b"], params
        )  # fmt: skip

    plan = PtqProvider(W8, strict=True).plan(fn, params, x)
    with pytest.raises(QuantizationError, match=r"args\[0\]\['a'\] does not change the output"):
        plan.allocate(params, x, budget_bits=14, qtypes=["int4", "int8"])
    zero = params | {"a": jnp.zeros_like(a)}
    assert (
        chosen(plan.allocate(zero, x, budget_bits=14, qtypes=["int4", "int8"]))["['a']"] == "int4"
    )


def test_two_parameters_in_one_contraction():
    a, b, x = draw((8, 4), (8, 2), (3, 8))
    params = {"a": a, "b": b}

    def fn(params, x):
        return x @ jnp.concatenate([params["a"], params["b"]], 1)

    plan = PtqProvider(W8, strict=True).plan(fn, params, x)
    both = plan.allocate(params, x, budget_bits=40, qtypes=["int8"])
    assert set(chosen(both).values()) == {"int8"}
    least = plan.allocate(params, x, budget_bits=40, qtypes=["int4"]).bytes_after
    with pytest.raises(QuantizationError, match="has another parameter, too"):
        plan.allocate(params, x, budget_bytes=least + 10, qtypes=["int4", "int8"])


def test_nothing_to_allocate(model):
    params, x = model
    plan = PtqProvider(QuantizationRule(act_qtype="int8")).plan(mlp, params, x)
    with pytest.raises(QuantizationError, match="nothing to allocate"):
        plan.allocate(params, x, budget_bits=5)


def test_other_parameters_than_the_plans(model):
    params, x = model
    with pytest.raises(QuantizationError, match="a tree like the plan's"):
        planned(params, x).allocate({"out": params["out"]}, x, budget_bits=5)


def test_parameters_that_are_not_finite(model):
    params, x = model
    broken = params | {"out": params["out"].at[0, 0].set(jnp.nan)}
    with pytest.raises(QuantizationError, match="not finite"):
        planned(params, x).allocate(broken, x, budget_bits=5, qtypes=QTYPES)


@pytest.mark.slow
def test_outputs_that_are_not_finite(model):
    params, x = model
    with pytest.raises(QuantizationError, match="must be one finite number"):
        planned(params, x).allocate(params, x.at[0, 0].set(jnp.nan), budget_bits=5, qtypes=QTYPES)


def test_allocation_with_scales_in_float16():
    def model(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    # int8 scales of "b" would be too small for float16, int4's are not.
    params = {"a": draw((64, 32))[0], "b": draw((32, 32))[0] * 5e-4}
    x = draw((5, 64))[0]
    rule = QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")
    plan = PtqProvider([rule]).plan(model, params, x)
    found = plan.allocate(params, x, budget_bits=8.8, qtypes=["int4", "int8", "mxfp4"])
    weights = found.weights
    assert [(w.qtype, w.scale_dtype) for w in weights.values()] == [
        ("int8", "float16"),
        ("int8", None),
    ]
    stored = found.quantize(params)
    assert {name: stored[name].nbytes for name in "ab"} == {"a": 64 * 32 + 128, "b": 32 * 32 + 128}


@pytest.mark.parametrize("key", ["w", "q and k", "a, b", "it's", "rule 0 has no effect: x"])
def test_any_name_has_the_facts_of_a_plain_one(key):
    params = {key: draw((16, 16))[0], "o": draw((16, 8))[0]}
    x, path = draw((4, 16))[0], f"args[0][{key!r}]"
    rules = [QuantizationRule(weight_qtype="int8"), QuantizationRule(module_path="none")]
    with pytest.warns(QuantizationWarning, match="has no effect"):
        plan = PtqProvider(rules).plan(lambda p, x: (x @ p[key]) @ p["o"], params, x)
    found = plan.allocate(params, x, budget_bits=11, qtypes=["int4", "int8"])
    rows = sorted((row.path == path, row.elements) for row in found.allocation.weights)
    assert rows == [(False, 128), (True, 256)]
    assert len(found.problems) == 1
    assert sorted(paths == (path,) for paths in found.allocation.errors) == [False, True]


def test_the_function_is_called_with_the_names_of_the_plan(model):
    def fn(params, x, *, also=False):
        return mlp(params, x) * 2 if also else x @ params["first"]

    params, x = model
    plan = PtqProvider(W8).plan(fn, params, x, also=True)
    made = plan.allocate(params, x, budget_bits=6, qtypes=QTYPES)
    same = planned(params, x, fn=lambda params, x: fn(params, x, also=True))
    assert len(made.weights) == 4
    assert made.weights == same.allocate(params, x, budget_bits=6, qtypes=QTYPES).weights
    of_half = planned(params, x).allocate(params, x, budget_bits=6, qtypes=QTYPES)
    assert made.allocation.measured == pytest.approx(of_half.allocation.measured)


def test_arrays_by_name_have_no_values_to_measure_with(model):
    params, x = model
    plan = PtqProvider(W8).plan(lambda params, *, x: mlp(params, x), params, x=x)
    with pytest.raises(QuantizationError, match=r"a call with x by name\. Pass them by"):
        plan.allocate(params, budget_bits=6, qtypes=QTYPES)
    plan = PtqProvider(W8).plan(mlp, params, x=x)
    assert plan.allocate(params, x, budget_bits=6, qtypes=QTYPES).weights

"""plan.optimize: every program, what stays as it is and why, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import provider_xla as xla
import provider_xla_passes.optimize as driver
from interception_core import JaxtapError
from jaxtap_testkit.meshes import line, put
from jaxtap_testkit.xla_samples import PROGRAMS, contractions, draw, make
from provider_xla import (
    Awq,
    Gptq,
    Hadamard,
    PtqProvider,
    QuantizationError,
    QuantizationRule,
    Ranges,
    SmoothQuant,
    TransformedWeight,
    Wanda,
)

pytestmark = pytest.mark.sample(2)

W4 = QuantizationRule(weight_qtype="int4")
W8A8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
LEFT = {
    "convolution": "not a plain matmul",
    "transposed kernel": "not a plain matmul",
    "tied": "take:0 uses it too",
    "indexed": "take:0 uses it too",
    "experts": "not a plain matmul",
    "heads": "batch axes",
    "twice": "different axes",
    "cond": "different axes",
    "vmap over examples": "different axes",
    "reshaped, split": "split",
    "reshaped, merged": "split",
    "reshaped, contracted": "split",
}


def relative(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program(name):
    fn, params, x = make(name)
    plan = PtqProvider(W8A8).plan(fn, params, x)
    stored, report = plan.optimize(params, [(x,)], [Hadamard(), SmoothQuant(), Gptq()])
    run = plan.apply(fn)
    found = jax.jit(lambda p, *stored: [fn(p, x), *(run(one, x) for one in stored)])
    expected, plain, result = found(params, plan.quantize(params), stored)
    assert relative(result, expected) < max(0.02, 2 * relative(plain, expected))
    assert [row.path for row in report] == list(plan.weights)
    reasons = [row.reasons.get("", "") for row in report]
    assert any(LEFT[name] in why for why in reasons) if name in LEFT else not any(reasons)
    if name not in LEFT:
        assert any(isinstance(x, TransformedWeight) for x in jax.tree.leaves(
            stored, is_leaf=lambda x: isinstance(x, TransformedWeight)
        ))  # fmt: skip
        # Quantized values reach all contractions, through scans and transposes: rotations are float
        # contractions.
        found, wanted = (
            [dtypes for dtypes in contractions(plan.apply(fn), one, x) if "int8" in dtypes]
            for one in (stored, plan.quantize(params))
        )
        assert found == wanted


def two_layers(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"].T


TWO = dict(zip(("up", "down"), draw((8, 12), (6, 12)), strict=True))
X = draw((20, 8), seed=1)[0]


@pytest.mark.slow
def test_jit_vmap_and_gradients():
    plan = PtqProvider(W4).plan(two_layers, TWO, X)
    stored, _ = plan.optimize(TWO, [(X,)], [Hadamard(), Awq(clip=1)])
    run = plan.apply(two_layers)
    restored = jax.tree.map(
        lambda w: w.restore(), stored, is_leaf=lambda w: isinstance(w, TransformedWeight)
    )
    expected = two_layers(restored, X)
    np.testing.assert_allclose(jax.jit(run)(stored, X), expected, atol=1e-4)
    mapped = jax.vmap(run, in_axes=(None, 0))(stored, X.reshape(4, 5, 8))
    np.testing.assert_allclose(mapped.reshape(20, 6), expected, atol=1e-4)
    # Straight through: the gradient is that of the float function of what is stored.
    actual = jax.grad(lambda x: run(stored, x).sum())(X)
    np.testing.assert_allclose(
        actual, jax.grad(lambda x: two_layers(restored, x).sum())(X), atol=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_other_dtypes(dtype):
    params = jax.tree.map(lambda w: w.astype(dtype), TWO)
    x = X.astype(dtype)
    plan = PtqProvider(W8A8).plan(two_layers, params, x)
    stored, _ = plan.optimize(params, [(x,)], [SmoothQuant(), Hadamard(), Gptq()])
    assert stored["up"].dtype == dtype
    result = plan.apply(two_layers)(stored, x)
    assert result.dtype == dtype
    assert relative(result.astype(np.float32), two_layers(TWO, X)) < 0.05


def test_other_uses_get_the_parameter():
    """A norm of the parameter, beside its contraction, and a lookup that the plan did not know."""

    def fn(w, x):
        return x @ w + jnp.square(w).sum()

    (w,) = draw((8, 12))
    plan = PtqProvider(W8A8).plan(fn, w, X)
    stored, _ = plan.optimize(w, [(X,)], [Hadamard()])
    assert relative(plan.apply(fn)(stored, X), fn(w, X)) < 0.02

    def other(w, x):
        return (x @ w)[:, :8] + w[jnp.array([1, 2]), :8].sum() + (w.T @ w).sum() + w[:, 0]

    assert relative(plan.apply(other)(stored, X), other(w, X)) < 0.02


def stacked(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return lax.scan(layer, x, params)[0]


@pytest.mark.slow
@pytest.mark.parametrize("passes", [[SmoothQuant(), Hadamard()], [Awq(), Gptq()]])
def test_each_step_has_scales_of_its_own(passes):
    fn = stacked
    (params,) = draw((3, 8, 8))
    rule = W8A8 if isinstance(passes[0], SmoothQuant) else W4
    plan = PtqProvider(rule).plan(fn, params, X)
    stored, _ = plan.optimize(params, [(X,), (X / 2,)], passes)
    by = stored.steps[0].by
    assert by.shape == (3, 8)
    x = [np.asarray(X), np.asarray(X) / 2]
    for i in range(3):
        single = PtqProvider(rule).plan(lambda w, x: x @ w, params[i], x[0])
        alone, _ = single.optimize(params[i], [(value,) for value in x], passes)
        np.testing.assert_allclose(alone.steps[0].by, by[i], rtol=1e-4)
        if rule is W4:  # signs are of the path and the shape
            np.testing.assert_array_equal(alone.inner.qvalue, stored.inner.qvalue[i])
        x = [np.tanh(value @ np.asarray(params[i])) for value in x]
    limit = 0.03 if rule is W8A8 else 0.25
    assert relative(jax.jit(plan.apply(fn))(stored, X), fn(params, X)) < limit


def test_a_parameter_of_several_contractions_has_the_sum_of_their_activations():
    def fn(w, x):
        return jnp.tanh(x @ w) @ w

    (w,) = draw((8, 8))
    plan = PtqProvider(W4).plan(fn, w, X)
    stored, _ = plan.optimize(w, [(X,)], [Gptq()])
    both = np.concatenate([X, np.tanh(X @ w)])
    alone = PtqProvider(W4).plan(lambda w, x: x @ w, w, both)
    expected, _ = alone.optimize(w, [(both,)], [Gptq()])
    np.testing.assert_array_equal(stored.qvalue, expected.qvalue)


def test_gram_matrices_in_parts_give_the_same(monkeypatch):
    plan = PtqProvider(W4).plan(two_layers, TWO, X)
    whole = plan.optimize(TWO, [(X,)], [Gptq()])
    monkeypatch.setattr(driver, "GRAM_BYTES", 1)
    parts = plan.optimize(TWO, [(X,)], [Gptq()])
    assert parts.report == whole.report
    for a, b in zip(jax.tree.leaves(parts.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_passes_it_is_quantize():
    plan = PtqProvider(W4).plan(two_layers, TWO, X)
    stored, report = plan.optimize(TWO, [(X,)], [])
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(plan.quantize(TWO)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(row.rounded > 0 and not row.after for row in report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Static ranges cut off")
def test_static_ranges_are_those_of_the_transformed_activation():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    x = X * jnp.where(jnp.arange(8) == 2, 100, 1)
    plan = PtqProvider(rule).plan(two_layers, TWO, x)
    stored, _ = plan.optimize(TWO, [(x,)], [SmoothQuant()])
    with pytest.raises(JaxtapError, match=r"no statistics for matmul:0#lhs \(transformed\)"):
        plan.apply(two_layers, plan.calibrate(TWO, [(x,)]))(stored, x)
    statistics = plan.calibrate(stored, [(x,)])
    range_ = statistics["matmul:0#lhs (transformed)"]
    # The mean over the rows, which are the batch axis, of what the contraction is given.
    expected = np.abs(x / stored["up"].steps[0].by).max(1).mean()
    np.testing.assert_allclose(range_.upper.reshape(()), expected, rtol=1e-5)
    result = plan.apply(two_layers, statistics)(stored, x)
    assert relative(result, two_layers(TWO, x)) < 0.1


@pytest.mark.slow
def test_low_bits_are_packed_inside():
    rule = QuantizationRule(weight_qtype="int3")
    plan = PtqProvider(rule).plan(two_layers, TWO, X)
    stored, _ = plan.optimize(TWO, [(X,)], [Hadamard()])
    assert type(stored["up"].inner).__name__ == "PackedQArray"
    assert stored["up"].nbytes == plan.quantize(TWO)["up"].nbytes + 8
    result = jax.jit(plan.apply(two_layers))(stored, X)
    restored = jax.tree.map(
        lambda w: w.restore(), stored, is_leaf=lambda w: isinstance(w, TransformedWeight)
    )
    np.testing.assert_allclose(result, two_layers(restored, X), atol=1e-4)


def test_donate_deletes_at_the_end():
    params = jax.tree.map(jnp.copy, TWO)
    plan = PtqProvider(W4).plan(two_layers, params, X)
    plan.optimize(params, [(X,)], [Gptq()], donate=True)
    assert all(leaf.is_deleted() for leaf in params.values())


def test_what_is_refused():
    plan = PtqProvider(W4).plan(two_layers, TWO, X)
    with pytest.raises(QuantizationError, match="batches is empty"):
        plan.optimize(TWO, [], [Gptq()])
    with pytest.raises(TypeError, match="passes such as Gptq"):
        plan.optimize(TWO, [(X,)], [Gptq])
    for passes in (
        [Gptq(), Hadamard()],
        [Gptq(), Gptq()],
        [Wanda(), Awq()],
        [Gptq(), Wanda()],
        [Gptq(), Ranges()],
        [Ranges(), Hadamard()],
    ):
        with pytest.raises(ValueError, match="can't follow"):
            plan.optimize(TWO, [(X,)], passes)
    with pytest.raises(QuantizationError, match="not finite"):
        plan.optimize(TWO, [(X * jnp.inf,)], [Gptq()])
    with pytest.raises(QuantizationError, match=r"can't solve for args.*larger damping"):
        plan.optimize(TWO, [(X[:2],)], [Gptq(damping=0)])
    with pytest.raises(QuantizationError, match="a tree like the plan's"):
        plan.optimize({"up": TWO["up"]}, [(X,)], [Gptq()])
    patch = PtqProvider(W4, engine="patch").plan(two_layers, TWO, X)
    with pytest.raises(QuantizationError, match="engine='trace'"):
        patch.optimize(TWO, [(X,)], [Gptq()])


@pytest.mark.parametrize(
    ("make_pass", "field"),
    [
        (lambda: SmoothQuant(1.5), "alpha"),
        (lambda: Hadamard(12), "block"),
        (lambda: Hadamard(weight_path="("), "weight_path"),
        (lambda: Gptq(damping=-1), "damping"),
        (lambda: Gptq(block=0), "block"),
        (lambda: Awq(grid=0), "grid"),
        (lambda: Awq(clip=0), "clip"),
        (lambda: Ranges(steps=0), "steps"),
        (lambda: Ranges(fits=-1), "fits"),
    ],
)
def test_numbers_out_of_range(make_pass, field):
    with pytest.raises(ValueError, match=rf"\.{field} must be"):
        make_pass()


@pytest.mark.parametrize("given", ["4:2", "2:2", "0:4", "2", "2:4:8", 2, "a:b"])
def test_sparsity_that_is_none(given):
    with pytest.raises(ValueError, match=r"sparsity must be None or 'N:M'"):
        QuantizationRule(weight_qtype="int8", sparsity=given)


def test_sparsity_needs_qvalue_and_is_not_for_training():
    with pytest.raises(ValueError, match="sparsity must be None where weight_qtype is None"):
        QuantizationRule(sparsity="2:4")
    with pytest.raises(ValueError, match="training keeps parameters dense"):
        xla.QtProvider(QuantizationRule(weight_qtype="int8", sparsity="2:4"))


@pytest.mark.parametrize("name", ["scan", "transposed", "reshaped, merged", "convolution", "twice"])
def test_sparsity_goes_along_what_is_contracted(name):
    fn, params, x = make(name)
    rule = QuantizationRule(weight_qtype="int8", sparsity="1:2")
    provider = PtqProvider(rule)
    if name == "twice":
        with pytest.warns(xla.QuantizationWarning, match="its uses contract no common axis"):
            plan = provider.plan(fn, params, x)
        assert plan.weights["args[0]"].sparsity is None
        return
    plan = provider.plan(fn, params, x)
    axis = {"scan": 1, "transposed": 1, "reshaped, merged": 0, "convolution": 2}[name]
    values = np.asarray(plan.quantize(params).restore())
    pairs = np.moveaxis(values, axis, -1).reshape(-1, 2)
    given = np.moveaxis(np.asarray(params), axis, -1).reshape(-1, 2)
    assert ((pairs != 0).sum(1) == 1).all()
    np.testing.assert_array_equal(np.abs(pairs).argmax(1), np.abs(given).argmax(1))


def test_sparsity_that_does_not_divide_is_said():
    (w,) = draw((6, 5))
    rule = QuantizationRule(weight_qtype="int8", sparsity="2:4")
    with pytest.warns(xla.QuantizationWarning, match="4 does not divide 6"):
        PtqProvider(rule).plan(lambda w, x: x @ w, w, X[:, :6])


def test_the_report():
    params = {**TWO, "kernel": draw((3, 3, 1, 2))[0]}

    def fn(params, x):
        y = lax.conv_general_dilated(
            x.reshape(1, 20, 8, 1), params["kernel"], (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return two_layers(params, x) + y.sum()

    plan = PtqProvider(W4).plan(fn, params, X)
    _, report = plan.optimize(params, [(X,)], [Hadamard(), SmoothQuant(), Gptq()])
    text = str(report)
    assert "rounding" in text
    assert "SmoothQuant: its activations stay float" in text
    rows = {row["path"]: row for row in report.as_json()}
    assert rows["args[0]['kernel']"]["rounded"] is None
    assert "not a plain matmul" in rows["args[0]['kernel']"]["reasons"][""]
    assert list(rows["args[0]['up']"]["after"]) == ["Hadamard", "SmoothQuant", "Gptq"]
    twice = plan.optimize(params, [(X,)], [Hadamard(), Hadamard(seed=1)]).report
    assert list(twice[0].after or twice[1].after) == ["Hadamard", "Hadamard 2"]


@pytest.mark.slow
def test_sharded_parameters():
    mesh = line()
    x, w = draw((16, 64), (64, 32))
    rows = put(mesh, x)

    def model(w, x):
        return jax.nn.relu(x @ w)

    plan = PtqProvider(QuantizationRule(weight_qtype="int4", tile_size=8)).plan(model, w, x)
    for spec in (P(None, "d"), P("d", None)):
        given = put(mesh, w, *spec)
        stored, _ = plan.optimize(given, [(rows,)], [Hadamard(), Gptq()])
        qvalue = stored.inner.qvalue
        assert qvalue.sharding.is_equivalent_to(given.sharding, 2), qvalue.sharding
        expected = model(stored.restore(), x)
        result = jax.jit(plan.apply(model))(stored, rows)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3, err_msg=str(spec))
    specs = {"in_specs": (P(), P("d")), "out_specs": P("d")}
    around = jax.shard_map(plan.apply(model), mesh=mesh, **specs)
    np.testing.assert_allclose(jax.jit(around)(stored, x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("act", [None, "int8"])
def test_a_shorter_last_tile(act):
    def model(p, x):
        x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"])[0]
        return jnp.einsum("bk,nk->bn", x, p["out"])

    rule = QuantizationRule(
        weight_qtype="int8", act_qtype=act, tile_size=32, tile_fallback="padded"
    )
    params = {"layers": draw((3, 72, 72))[0] / 8, "out": draw((5, 72))[0]}
    x = draw((4, 72))[0]
    plan = PtqProvider([rule], strict=True).plan(model, params, x)
    found = plan.optimize(params, [(x,)], [Gptq()]).params["out"]
    assert found.scale.shape == (5, 3)
    assert np.abs(found.restore() - params["out"]).max() < 0.1


def test_a_batch_that_is_not_a_tuple():
    (w, x) = draw((64, 32), (4, 64))
    plan = PtqProvider("int4").plan(lambda w, x: x @ w, w, x)
    for batches in ([x], x, [{"x": x}]):
        with pytest.raises(QuantizationError, match=r"hold tuples.*\[\(x,\)\], got "):
            plan.optimize(w, batches, [Gptq()])


def test_passes_of_one_name_are_numbered():
    class Own(SmoothQuant):
        @property
        def name(self):
            return "my own"

    params, x = {"w": draw((16, 8))[0]}, draw((32, 16))[0]
    plan = PtqProvider("int8").plan(lambda p, x: x @ p["w"], params, x)
    _, report = plan.optimize(params, [(x,)], [Own(), Own()])
    assert list(report[0].after) == ["my own", "my own 2"]

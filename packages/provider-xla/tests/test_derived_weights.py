"""Weights that are parts of parameters, or computed from them, are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax import lax

from jaxtap_testkit.weight_idioms import IDIOMS, MASKS, W, X, draw
from provider_xla import (
    PtqProvider,
    QtProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
    StoreMismatchError,
    load,
    quantize_file,
    save,
)

RULES = {
    "weights": QuantizationRule(weight_qtype="int8"),
    "both": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
}


def plan_of(fn, params, rule, **options):
    return PtqProvider([rule], strict=True).plan(fn, params, X, **options)


def relative(actual, expected):
    return np.linalg.norm(np.asarray(actual) - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", IDIOMS)
def test_stored_and_trained(name):
    """Each is stored in integers, and gives what the float program gives, but for rounding.

    Training sees the values that inference has, and the gradient of the float program.
    """
    fn, params = IDIOMS[name]
    plans = {key: plan_of(fn, params, rule, kernels=False) for key, rule in RULES.items()}
    stored = {key: plan.quantize(params) for key, plan in plans.items()}
    for key, plan in plans.items():
        assert plan.weights
        leaves = jax.tree.leaves(stored[key])
        # Floats are scales alone.
        floats = sum(x.nbytes for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))
        assert floats <= sum(x.nbytes for x in jax.tree.leaves(params)) / 4
        assert sum(x.nbytes for x in leaves) == plan.bytes_after

    @jax.jit
    def run(params, stored):
        def pulled(fn):
            y, pull = jax.vjp(lambda p: fn(p, X), params)
            (slope,) = pull(jnp.asarray(draw(*y.shape, seed=5)))
            return y, slope

        inferred = {key: plan.apply(fn)(stored[key], X) for key, plan in plans.items()}
        trained = {
            key: pulled(QtProvider([rule], strict=True).apply(fn)) for key, rule in RULES.items()
        }
        return pulled(fn), inferred, trained

    (expected, slope), inferred, trained = run(jax.tree.map(jnp.asarray, params), stored)
    # What is contracted along both of its axes is stored with one scale.
    tolerance = 0.015 if name == "masked and used twice" else 1e-3
    for key in RULES:
        assert relative(inferred[key], np.asarray(expected)) < 0.015, key
        y, found = trained[key]
        assert relative(y, np.asarray(inferred[key])) < tolerance, key
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(slope), strict=True):
            assert relative(one, np.asarray(other)) < 0.1, key


def adapted(params, x):
    w, a, b, gain, mask, key = (params[one] for one in ("w", "a", "b", "gain", "mask", "noise"))
    noise = jax.random.normal(key, w.shape)
    return (x @ ((w + a @ b + noise) * gain * mask.astype(x.dtype))) * gain + x @ b.sum(0)[:, None]


@pytest.mark.parametrize("jit", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
def test_no_stored_value_outlives_what_it_is_computed_from(jit):
    """Another array among the stored parameters counts, or is an error that names it.

    It may be a parameter of which nothing else is stored, one that stays a float array, one of
    integers, or a key.
    """
    params = {
        "w": draw(16, 16, seed=1),
        "a": draw(16, 2, seed=2),
        "b": draw(2, 16, seed=3),
        "gain": draw(16, seed=4),
        "mask": np.tri(16, dtype=np.int8),
        "noise": jax.random.key(6),
    }
    others = {name: x[::-1].copy() for name, x in params.items() if name != "noise"}
    others["noise"] = jax.random.key(7)
    x = draw(3, 16, seed=5)
    plan = PtqProvider(RULES["weights"], strict=True).plan(adapted, params, x)
    stored, run = plan.quantize(params), jit(plan.apply(adapted))
    assert relative(run(stored, x), adapted(params, x)) < 0.02
    errors = {}
    for name, new in others.items():
        try:
            found = run({**stored, name: new}, x)
        except QuantizationError as error:
            errors[name] = str(error)
        else:
            assert relative(found, adapted({**params, name: new}, x)) < 0.02, name
    # With the parameter that a derived weight is stored beside, that goes, too.
    (held,) = (name for name, text in errors.items() if f"args[0]['{name}']" not in text)
    assert held == "a"
    assert len(errors) > 1


def test_what_can_not_be_stored_is_told():
    """A loop steps through a mask, and not through the parameter: its steps are not known apart."""

    def fn(p, x):
        return lax.scan(lambda c, m: (c + x @ (p * m), None), jnp.zeros((4, 6)), MASKS)[0]

    message = r"scan\(.*matmul:0: its weight mul\(args\[0\], constant\[step\]\) can't be stored"
    with pytest.warns(QuantizationWarning, match=message):
        assert not PtqProvider([RULES["both"]]).plan(fn, W, X).weights
    with pytest.raises(QuantizationError, match=message):
        plan_of(fn, W, RULES["both"])


def test_two_parameters_are_a_part_of_a_weight():
    plan = plan_of(IDIOMS["low rank"][0], IDIOMS["low rank"][1], RULES["both"])
    part, whole = plan.ops
    assert (
        part.reason == "all operands come from parameters: it computes a weight, or a part of one"
    )
    assert whole.qtypes == ("int8", "int8")
    assert plan.absorbed == {"args[0]['w']", "args[0]['a']", "args[0]['b']"}


def test_what_the_program_does_not_use_is_stored_for_others():
    other = draw(8, 4, seed=5)
    params = {"w": W, "gain": jnp.float32(2), "other": other}

    def fn(p, x):
        return x @ (p["w"] * p["gain"])

    def another(p, x):
        return x @ p["other"]

    plan = plan_of(fn, params, RULES["weights"])
    assert plan.absorbed == {"args[0]['w']", "args[0]['gain']"}
    assert "no matmul, convolution or gather uses it" in plan.explain("other")
    stored = plan.quantize(params)
    np.testing.assert_array_equal(stored["other"], other)

    scales = np.abs(np.asarray(other, np.float64)).max(0) / 127
    rounded = np.round(np.asarray(other, np.float64) / scales) * scales
    y = jax.jit(plan.apply(another))(stored, X)
    np.testing.assert_allclose(y, np.asarray(X, np.float64) @ rounded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_closed_over_is_not_a_parameter(rule):
    """Contractions of two values that both come from parameters are parts of one, and no fault."""
    params = {"q": W, "k": -W}
    fn = lambda p: jax.nn.softmax((X @ p["q"]) @ (X @ p["k"]).T)  # noqa: E731
    plan = PtqProvider([RULES[rule]], strict=True).plan(fn, params)
    assert sorted(plan.weights) == ["args[0]['k']", "args[0]['q']"]
    assert not plan.problems


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ""])
@pytest.mark.parametrize("name", ["index", "concatenate", "weight norm", "low rank", "steps"])
def test_saved_and_loaded(name, suffix, tmp_path):
    fn, params = IDIOMS[name]
    plan = plan_of(fn, params, RULES["weights"])
    stored, path = plan.quantize(params), tmp_path / f"stored{suffix}"
    save(path, stored, plan)
    again = load(path, plan=plan)
    assert jax.tree.structure(again) == jax.tree.structure(stored)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(stored), strict=True):
        np.testing.assert_array_equal(one, other)
    other = PtqProvider([QuantizationRule(weight_qtype="int4")]).plan(fn, params, X)
    with pytest.raises(StoreMismatchError, match=r"int8.* -> .*int4"):
        load(path, plan=other)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["index", "concatenate", "weight norm", "low rank", "steps"])
def test_quantized_from_a_file(name, tmp_path):
    fn, params = IDIOMS[name]
    params = params if isinstance(params, dict) else {"params": params}
    run = fn if isinstance(IDIOMS[name][1], dict) else lambda p, x: fn(p["params"], x)
    plan = plan_of(run, jax.eval_shape(lambda: params), RULES["weights"])
    safetensors.numpy.save_file(params, tmp_path / "float.safetensors")
    expected = plan.quantize(params)
    for found in (
        quantize_file(plan, tmp_path / "float.safetensors"),
        quantize_file(plan, tmp_path / "float.safetensors", tmp_path / "stored.safetensors")
        or load(tmp_path / "stored.safetensors", plan=plan),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)

"""Facts: what plans say does not depend on how parameters and operations are named."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from provider_xla import (
    PtqProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
    model_plan,
    quantize_model,
)
from provider_xla.program.facts import Code, joined

W8 = QuantizationRule(weight_qtype="int8")
NAMES = [
    "q and k",
    "a, b",
    "it's",
    'say "x"',
    "a/b",
    "0",
    "w #2",
    "{rule}",
    "tile_size 8",
    "in parts",
    "rule 0 has no effect: x",
    "a'] and args[0]['b",
]


def planned(rules, fn, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        return PtqProvider(rules).plan(fn, *args)


def array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def quoted(name):
    return f"args[0][{name!r}]"


@functools.cache
def told(key):
    params = {key: array(0, 16, 16), "o": array(1, 16, 8)}
    x = array(2, 4, 16)

    def fn(p, x):
        return (x @ p[key]) @ p["o"]

    def of_activations(p, x):
        return (x @ (p[key] * x[:1].T)) @ p["o"]

    path = quoted(key)
    unmatched = planned([QuantizationRule(module_path="none", weight_qtype="int8")], fn, params, x)
    tiled = QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=8)
    scaled = planned([tiled], of_activations, params, x)
    return [
        {at == path: why for at, _, why in unmatched.floats},
        {at == path: why.replace(path, "PATH") for at, _, why in scaled.floats},
        [text.replace(path, "PATH") for text in scaled.problems],
        [at == path for at in scaled.weights],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_has_the_facts_of_a_plain_one(name):
    """Reasons and problems: all but the name is as with a plain name."""

    plain, found = told("w"), told(name)
    assert found == plain
    unmatched, _, problems, _ = found
    assert unmatched == {True: "matmul:0: no rule matches", False: "matmul:1: no rule matches"}
    (problem,) = problems
    assert problem.startswith("matmul:0 of PATH: PATH can't be stored: the program multiplies")


def test_an_equinox_module_with_odd_keys():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        heads: dict
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return sum(x @ head for head in self.heads.values())

    keys = jax.random.split(jax.random.key(0), 2)
    heads = {"q and k": array(0, 8, 8), "a, b": array(1, 8, 8)}
    net = Net(heads, [eqx.nn.Linear(8, 8, key=key, use_bias=False) for key in keys])
    params, static = eqx.partition(net, eqx.is_array)
    plan = planned([W8], lambda p, x: jax.vmap(eqx.combine(p, static))(x), params, array(2, 3, 8))
    expected = [".layers[0].weight", ".layers[1].weight", ".heads['q and k']", ".heads['a, b']"]
    assert {path for op in plan.ops for path in op.paths} == {f"args[0]{one}" for one in expected}
    assert (plan.floats, plan.problems) == ((), ())


def test_a_weight_of_two_parameters_keeps_both_paths():
    """Record, adapters and lookups know each parameter."""
    params = {"q and k": array(0, 8, 8), "v": array(1, 8, 8), "small": array(2, 8, 2)}
    x = jnp.abs(array(3, 4, 8))

    def fn(p, x):
        table = jnp.concatenate([p["q and k"], p["v"]])
        return (x @ table.T) @ table @ p["small"] + table[x[:, 0].astype(int)].sum()

    plan = planned([W8], fn, params, x)
    both = (quoted("q and k"), quoted("v"))
    assert [op.paths for op in plan.ops] == [both, both, (quoted("small"),), both]
    assert "args[0]['q and k'] and args[0]['v']" in str(plan)
    assert plan.as_json()["ops"][0]["paths"] == both


@pytest.mark.parametrize("engine", ["trace", "patch"])
def test_a_weight_that_a_matmul_uses_is_not_said_to_be_unused(engine):
    params, x = {"w": array(0, 8, 8)}, array(1, 4, 8)
    rule = QuantizationRule(module_path="none", weight_qtype="int8")

    def why(fn):
        with pytest.warns(QuantizationWarning, match="rule 0 has no effect"):
            plan = PtqProvider([rule], engine=engine).plan(fn, params, x)
        ((_, _, why),) = plan.floats
        return why

    programs = [
        lambda p, x: x @ p["w"],
        lambda p, x: x @ (p["w"] * x[:1].T),
        lambda p, x: jnp.einsum("ab,bc,cd->ad", x, p["w"], p["w"]),
        lambda p, x: jnp.einsum(x, [0, 1], p["w"], [1, 2]),
        lambda p, x: jnp.concatenate([p["w"], x]) @ p["w"],
        lambda p, x: x @ jax.nn.softmax(p["w"]),
        lambda p, x: jax.jit(jnp.inner)(x, p["w"]),
        lambda p, x: jax.lax.ragged_dot(x, p["w"][None], jnp.asarray([4])),
    ]
    found = [why(fn) for fn in programs]
    # The patch engine knows parameters alone, and says so.
    unknown = "no matmul, convolution or lookup is known to use it"
    assert set(found) - {unknown if engine == "patch" else None}, found
    for one in found:
        assert "no rule matches" in one or (engine == "patch" and one == unknown)


def test_a_function_of_weights_is_not_fused():
    params, x = {"w": array(0, 8, 8)}, array(1, 4, 8)
    rules = [QuantizationRule(op_names=["softmax"], kernel="fused"), W8]
    plan = planned(rules, lambda p, x: jax.nn.softmax(x @ jax.nn.softmax(p["w"])), params, x)
    assert (plan.floats, [op.op_id for op in plan.ops]) == (
        (),
        ["softmax:0", "matmul:0", "softmax:1"],
    )
    assert plan.ops[0].why == Code.COMPUTES_WEIGHT()
    assert [one.derived is not None for one in plan.weights.values()] == [True]


def test_an_einsum_that_is_seen_in_its_parts_does_not_count():
    """Whatever the reason why it is read in parts."""
    x = array(0, 4, 4)
    programs = {
        "interleaved": lambda p, x: jnp.einsum(x, [0, 1], p, [1, 2]),
        "3 operands": lambda p, x: jnp.einsum("ab,bc,cd->ad", x, p, p),
        "no label twice": lambda p, x: jnp.einsum("aa,ab->b", x, p),
        "summed first": lambda p, x: jnp.einsum("ab,bc->a", x, p),
    }
    for reason, fn in programs.items():
        plan = planned([W8], fn, array(1, 4, 4), x)
        assert reason in plan.ops[0].reason
        parts = [op for op in plan.ops if not op.is_in_parts]
        assert all(op.quantized for op in parts)
        assert f"{len(parts)} of {len(parts)} operations quantized" in str(plan)


def test_tiles_that_do_not_divide_are_an_error_and_nothing_else_is():
    params, x = {"tile_size": array(0, 9, 8)}, array(1, 4, 9)
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=4, tile_fallback=None)
    with pytest.raises(QuantizationError, match="tile_size 4 does not divide contracted"):
        planned([rule], lambda p, x: x @ p["tile_size"], params, x)


def test_a_fact_is_a_value_and_its_text():
    fact = Code.MISFIT(tile=8, sizes=(9, 4))
    assert fact == Code.MISFIT(tile=8, sizes=(9, 4))
    assert hash(fact) == hash(Code.MISFIT(tile=8, sizes=(9, 4)))
    assert str(fact) == "tile_size 8 does not divide contracted [9, 4]"
    paths = ("args[0]['{rule} and k']", "args[0]['b']")
    problem = Code.STAYS_FLOAT(op_id="a/dot:0", paths=paths, rule=3, why=fact)
    assert (problem.code, problem.rule, problem.paths) == (Code.STAYS_FLOAT, 3, paths)
    assert str(problem) == f"a/dot:0 of {joined(paths)} stays float: {fact} (rule 3)"
    assert str(Code.STAYS_FLOAT(op_id="a", rule=0, why=fact)) == f"a stays float: {fact} (rule 0)"


def test_an_nnx_model_with_odd_names():
    nnx = pytest.importorskip("flax.nnx")

    names = ("q and k", "a, b", "0", "tile_size")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.heads = nnx.Dict({name: nnx.Linear(8, 8, rngs=rngs) for name in names})

        def __call__(self, x):
            return sum(self.heads[name](x) for name in names)

    net = Net(nnx.Rngs(0))
    model = quantize_model(net, PtqProvider([W8]), array(0, 3, 8))
    plan = model_plan(model)
    assert len(plan.weights) == 4
    assert {op.paths for op in plan.ops if op.quantized} == {(path,) for path in plan.weights}
    assert plan.problems == ()
    assert {why for _, _, why in plan.floats} == {"no matmul, convolution or gather uses it"}
    np.testing.assert_allclose(model(array(0, 3, 8)), net(array(0, 3, 8)), atol=0.1)

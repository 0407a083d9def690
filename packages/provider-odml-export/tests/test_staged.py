"""A program staged for export: traced once, by the plan of training, with ids that loops keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import W8A8, normal
from provider_odml.features import equations_in
from provider_odml_export.exporting.loops import Plain
from provider_odml_export.exporting.staged import operation_p
from provider_odml_export.exporting.written_out import planned

W, X = normal(3, 4, 4) / 2, normal(2, 4, seed=1)


def layer(c, w):
    return jnp.tanh(c @ w), None


def nested(w, x):
    outer = lax.scan(lambda c, _: (lax.scan(layer, c, w)[0], None), x, None, length=2)[0]
    return lax.scan(layer, outer, w)[0]


def by_hand(w, x):
    """``nested`` in float64 of NumPy."""
    c = np.float64(x)
    for one in [*np.float64(w)] * 3:
        c = np.tanh(c @ one)
    return c


def test_an_operation_keeps_its_id_in_each_step():
    model = odml.qat(nested, W8A8)
    program = planned(model, (W, X), {})
    held = {eqn.params["operation"].place.at(()) for eqn in equations_in(program.staged.jaxpr)
            if eqn.primitive is operation_p}  # fmt: skip
    assert held == set(model.plan(W, X).decisions)
    products = [one for one in program.plan.decisions if "dot_general" in one]
    inner = [f"scan(layer)[{i},{j}]/dot_general:0" for i in range(2) for j in range(3)]
    assert products == [*inner, *(f"scan(layer)[{i}]/dot_general:1" for i in range(3))]
    for op_id in products:
        assert program.plan.decisions[op_id].rule == 0
    np.testing.assert_allclose(program.run(Plain(), [W, X]), by_hand(W, X), rtol=1e-5)


def test_export_traces_a_planned_model_once():
    """What training has planned is not planned again."""
    traced = []

    def counted(w, x):
        traced.append(x)
        return jnp.tanh(x @ w[0])

    model = odml.qat(counted, W8A8)
    stats = model.calibrate(W, [(X,)])
    before = len(traced)
    artifact = model.export(W, stats, X)
    assert len(traced) == before + 1
    again = odml.export(counted, W, stats, W8A8, X)
    assert again.model == artifact.model


def test_a_branch_that_a_counter_takes_is_the_only_one():
    def fn(w, x):
        def step(state, w):
            i, c = state
            return (i + 1, lax.cond(i % 2 == 0, lambda: jnp.tanh(c @ w), lambda: c @ w)), None

        return lax.scan(step, (0, x), w)[0][1]

    program = planned(odml.qat(fn, W8A8), (W, X), {})
    products = [d.node for d in program.plan.decisions.values() if "dot_general" in d.node.op_id]
    assert len(products) == 3
    assert not any(node.is_chosen for node in products)
    np.testing.assert_allclose(program.run(Plain(), [W, X]), fn(W, X), rtol=1e-5)


def test_a_loop_without_steps():
    def fn(w, x):
        last, ys = lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, w[:0])
        return last @ w[0], ys

    program = planned(odml.qat(fn, W8A8), (W, X), {})
    last, ys = program.run(Plain(), [W, X])
    np.testing.assert_allclose(last, X @ W[0], rtol=1e-6)
    assert ys.shape == (0, *X.shape)


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_are_stacked_in_the_order_of_the_rows(reverse):
    def fn(w, x):
        def step(c, w):
            c = jnp.tanh(c @ w)
            return c, (c, jnp.argmax(c, -1))

        return lax.scan(step, x, w, reverse=reverse)[1]

    program = planned(odml.qat(fn, W8A8), (W, X), {})
    for found, expected in zip(program.run(Plain(), [W, X]), fn(W, X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_model_that_takes_a_derivative():
    """The operation under it keeps its id; the derivative is that of what it computes."""

    def fn(w, x):
        y, slope = jax.value_and_grad(lambda x: jnp.tanh(x @ w[0]).sum())(x)
        return y, slope @ w[1]

    program = planned(odml.qat(fn, W8A8, strict=False), (W, X), {})
    for found, expected in zip(program.run(Plain(), [W, X]), fn(W, X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def with_custom_jvp(f):
    f = jax.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[1]))
    return f


def with_custom_vjp(f):
    f = jax.custom_vjp(f)
    f.defvjp(lambda w, x: (f(w, x), (w, x)), lambda kept, g: (0 * kept[0], g))
    return f


HOLDERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": with_custom_jvp,
    "custom_vjp": with_custom_vjp,
    "closed_call": lambda f: lambda w, x: jax.closure_convert(f, w, x)[0](w, x),
    "linear_solve": lambda f: (
        lambda w, x: lax.custom_linear_solve(lambda y: y / 2, f(w, x), lambda matvec, b: 2 * b)
    ),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x),
    "while": lambda f: (
        lambda w, x: lax.while_loop(
            lambda state: state[0] < 2, lambda state: (state[0] + 1, f(w, state[1])), (0, x)
        )[1]
    ),
    "fori_loop": lambda f: lambda w, x: lax.fori_loop(0, 2, lambda i, x: f(w, x), x),
    "map": lambda f: lambda w, x: lax.map(lambda x: f(w, x), x),
}


# The patch engine sees nothing in the others, or says that it can't follow their operands.
OF_BOTH = ("jit", "vmap", "fori_loop", "map")


@pytest.mark.parametrize(
    ("engine", "holder"),
    [*(("trace", name) for name in HOLDERS), *(("patch", name) for name in OF_BOTH)],
)
def test_operations_in_whatever_holds_them(engine, holder):
    def fn(w, x):
        return HOLDERS[holder](lambda w, x: jnp.tanh(x @ w))(w[0], x)

    program = planned(odml.qat(fn, W8A8, strict=False, engine=engine), (W, X), {})
    products = [one for one in program.plan.decisions.values() if one.node.op.name == "dot_general"]
    assert products
    assert all(one.rule == 0 for one in products)
    np.testing.assert_allclose(program.run(Plain(), [W, X]), fn(W, X), rtol=1e-5)

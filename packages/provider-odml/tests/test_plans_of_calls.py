"""A plan is made once for calls of one kind, and never used for calls of another."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import provider_odml as odml

W, X = jnp.eye(4), jnp.ones((2, 4))
RULE = odml.OdmlRule(weight_qtype="int8", output_qtype="int8")


@dataclasses.dataclass
class Options:
    """They have an ``__eq__`` and so no hash."""

    act: str = "tanh"
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])


class Opaque:
    """It is equal to itself alone, whatever it holds."""

    act = "tanh"


class Holder:
    """A pytree whose structure holds what has no hash."""

    def __init__(self, x, options):
        self.x, self.options = x, options


jax.tree_util.register_pytree_node(
    Holder, lambda one: ((one.x,), one.options), lambda options, xs: Holder(*xs, options)
)


def model(w, x, options):
    y = x @ w
    return jnp.tanh(y) if options.act == "tanh" else jnp.abs(y)


def of_holder(w, holder):
    return model(w, holder.x, holder.options)


def ops(plan):
    return {decision.node.op.name for decision in plan.decisions.values()}


def test_equal_options_have_one_plan():
    quantized = odml.qat(model, RULE)
    plan = quantized.plan(W, X, Options())
    assert quantized.plan(2 * W, X + 1, Options()) is plan
    assert quantized.plan(W, jax.ShapeDtypeStruct(X.shape, X.dtype), Options()) is plan
    assert quantized.plan(W, X, Options(sizes=[1])) is not plan
    assert quantized.plan(W, X[:1], Options()) is not plan


@pytest.mark.parametrize("options", [Options, Opaque], ids=["compared", "opaque"])
def test_options_that_change_have_another_plan(options):
    """Also if they are the same object, with the same id, and equal to themselves."""
    quantized, options = odml.qat(model, RULE), options()
    assert "tanh" in ops(quantized.plan(W, X, options))
    options.act = "abs"
    assert ops(quantized.plan(W, X, options)) >= {"abs"}
    assert "tanh" not in ops(quantized.plan(W, X, options))


def test_options_in_a_structure_are_compared():
    quantized, options = odml.qat(of_holder, RULE), Options()
    plan = quantized.plan(W, Holder(X, options))
    assert quantized.plan(W, Holder(X, Options())) is plan
    options.act = "abs"
    assert "abs" in ops(quantized.plan(W, Holder(X, options)))
    assert quantized.plan(W, Holder(X, Options())) is plan


def test_options_of_reused_ids():
    """Python gives the id of an object that is gone to the next one."""
    quantized, found, seen = odml.qat(model, RULE), [], set()
    for act in ("tanh", "abs") * 8:
        options = Opaque()
        options.act = act
        seen.add(id(options))
        found.append(act in ops(quantized.plan(W, X, options)))
        del options
    assert all(found)
    assert len(seen) < 16


@pytest.mark.parametrize(("value", "other"), [(1, True), (1, 1.0), (0, False)])
def test_equal_numbers_of_other_types_have_other_plans(value, other):
    quantized = odml.qat(lambda w, x, number: x @ w, RULE)
    assert quantized.plan(W, X, value) is not quantized.plan(W, X, other)
    assert quantized.plan(W, X, value) is quantized.plan(W, X, value)


def test_functions_count_by_what_they_are():
    quantized = odml.qat(lambda w, x, act: act(x @ w), RULE)
    plan = quantized.plan(W, X, jax.nn.relu)
    assert quantized.plan(W, X, jax.nn.relu) is plan
    assert "tanh" in ops(quantized.plan(W, X, jnp.tanh))


def test_calibration_compiles_once_for_equal_options():
    traced = []

    def counted(w, x, options):
        traced.append(options)
        return model(w, x, options)

    quantized = odml.qat(counted, RULE)
    quantized.plan(W, X, Options())
    before = len(traced)
    batches = [(scale * X, Options()) for scale in (1, 2, 3)]
    stats = quantized.calibrate(W, batches)
    assert len(traced) == before + 1
    assert float(stats["args[1]"].calibration().upper) == 2

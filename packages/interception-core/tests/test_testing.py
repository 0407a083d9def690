"""What interception_core.testing ships beside the suites: programs, models, plugins."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import interception_core
from interception_core import EngineSpec, UnknownNameError, hookimpl, testing
from interception_core.testing.forms import FORMS, STEPS
from interception_core.testing.programs import FORM_NAMES, Block, Form, Program, Step, programs
from jaxtap_testkit.processes import run_python

pytestmark = pytest.mark.sample(2)


def drawn(strategy, examples):
    """Returns what the strategy gives in a run that is the same every time."""
    found = []

    @settings(
        max_examples=examples,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(program):
        found.append(program)

    draw()
    return found


def depth(node):
    if isinstance(node, Step):
        return 0
    if isinstance(node, Form):
        return 1 + max(map(depth, node.blocks))
    return max(map(depth, node.nodes))


def names(node):
    if isinstance(node, Step):
        return {node.name}
    inside = node.blocks if isinstance(node, Form) else node.nodes
    return set().union(*map(names, inside), {node.name} if isinstance(node, Form) else ())


@pytest.mark.slow
def test_the_programs_of_the_suite_are_many_and_use_every_form_and_step():
    each = -(-300 // len(FORM_NAMES))
    found = {program for form in FORM_NAMES for program in drawn(programs(form), each)}
    assert len(found) >= 280
    assert set().union(*(names(program.body) for program in found)) == {*FORMS, *STEPS}
    depths = [depth(program.body) for program in found]
    assert min(depths) == 1
    assert max(depths) == 4
    assert sum(depth >= 3 for depth in depths) > 50


def test_the_same_programs_are_drawn_every_time():
    assert drawn(programs("scan"), 10) == drawn(programs("scan"), 10)


def test_the_outermost_form_and_the_depth_can_be_chosen():
    for program in drawn(programs("cond", max_depth=2), 10):
        (form,) = [node for node in program.body.nodes if isinstance(node, Form)]
        assert form.name == "cond"
        assert depth(program.body) <= 2
    with pytest.raises(ValueError, match="Unknown form 'con'"):
        programs("con")


@pytest.mark.parametrize("form", FORM_NAMES)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_form_has_a_value_and_a_gradient(form, rows):
    blocks = (Block((Step("dot"),)), Block((Step("tanh"),)), Block((Step("bias"),)))
    count = {"cond": 2, "switch": 3}.get(form, 1)
    program = Program(Block((Form(form, blocks[:count]),)), rows)
    value, grads = jax.jit(jax.value_and_grad(program))(*program.args())
    assert np.isfinite(value)
    assert all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize("step", sorted(STEPS))
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_every_step_keeps_the_shape(step, shape):
    params, _ = Program(Block(()), 1).args()
    x = jnp.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
    result = STEPS[step](x, jax.tree.map(jnp.asarray, params))
    assert (result.shape, result.dtype) == (shape, jnp.float32)
    assert np.isfinite(result).all()


def test_a_program_can_be_read():
    body = Block((Form("cond", (Block((Step("dot"), Step("tanh"))), Block((Step("bias"),)))),))
    assert repr(Program(body, 2)) == (
        "Program of 2 rows:\n    cond:\n        dot\n        tanh\n    or:\n        bias\n"
    )


def test_models_have_names_of_their_own():
    models = testing.models()
    assert len({model.name for model in models}) == len(models) == 8
    assert all(len(set(model.ids)) == len(model.ids) for model in models)


def test_plugins_are_installed_for_the_length_of_a_test(monkeypatch):
    module = types.ModuleType("acme_plugin_of_a_test")
    spec = EngineSpec("acme", "an engine", "interception_core:PatchEngine")
    module.API, module.jaxtap_register_engines = (1, 1), hookimpl(lambda: [spec])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = interception_core.declared_specs(EngineSpec)
    with testing.installed_plugins(module.__name__, without={"interception-core"}):
        names = [spec.name for spec in interception_core.declared_specs(EngineSpec)]
        assert "acme" in names
        assert "patch" not in names
        assert interception_core.get_engine("acme").disable_jit is False
    assert interception_core.declared_specs(EngineSpec) == before
    with pytest.raises(UnknownNameError):
        interception_core.get_engine("acme")


@pytest.mark.slow
def test_interception_core_does_not_need_it():
    """pytest and Hypothesis are for those who test engines."""
    code = (
        "import sys, interception_core as ic\n"
        "for name in ic.__all__: getattr(ic, name)\n"
        "print([m for m in ('pytest', 'hypothesis', 'interception_core.testing') "
        "if m in sys.modules])"
    )
    assert run_python("-c", code).stdout.strip() == "[]"

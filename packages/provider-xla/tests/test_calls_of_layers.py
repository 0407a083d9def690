"""What one more layer costs to trace, as calls of Python functions."""

import functools

import jax
import jax.numpy as jnp
import pytest

from hijax_trace import TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.programs import python_calls
from provider_xla import PtqProvider, QuantizationRule

FEW, MANY = 8, 40
BETWEEN = {"nothing": lambda x: x, "tanh": jnp.tanh, "relu": jax.nn.relu}
# Times the calls that the float layer with tanh takes. It was 1.5, 1.8 and 1.8 where each tapped
# call entered a scope, each call of jax.numpy was staged by JAX's rules, and weights were taken
# apart thrice. Beside tanh, since what relu takes in float depends on what the process did before.
MOST = {"nothing": 1.3, "tanh": 1.55, "relu": 1.6}


def calls(fn, *args):
    """Return how many Python functions are called while a function is traced."""
    new = jax.jit(lambda *args: fn(*args))  # JAX has traced the one before
    return python_calls(new.trace, *args)


@pytest.fixture(scope="module")
def taps_of_another_program():
    """Functions that another interceptor tapped once are not tapped for the plan's."""
    handlers = dict.fromkeys(("jax.nn.relu", "jax.numpy.tanh"), lambda call, x: NotImplemented)
    TraceEngine().wrap(lambda x: jax.nn.relu(jnp.tanh(x)), Interceptor(handlers))(jnp.ones(3))


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.usefixtures("taps_of_another_program")
def test_a_layer_more_of_a_quantized_program(between):
    w, x = normal(24, 24), jnp.ones((3, 24))

    def model(params, x, act=BETWEEN[between]):
        for i, layer in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = x + act(x @ layer["up"]) @ layer["down"]
        return x

    def more(fn, params):
        """Calls for a layer more, without what is done once."""
        counts = []
        for count in (FEW, MANY):
            calls(fn, params[:count], x)
            counts.append(calls(fn, params[:count], x))
        return (counts[1] - counts[0]) / (MANY - FEW)

    params = [{"up": w, "down": w} for _ in range(MANY)]
    plan = PtqProvider(QuantizationRule(weight_qtype="int8", act_qtype="int8")).plan(
        model, params, x
    )
    stored = plan.quantize(params)
    quantized = more(plan.apply(model), stored)
    plain = more(functools.partial(model, act=jnp.tanh), params)
    assert quantized <= MOST[between] * plain, (quantized, plain)

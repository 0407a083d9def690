"""What one more layer costs to trace, as calls of Python functions."""

import sys

import jax
import jax.numpy as jnp
import pytest

from jaxtap_testkit.numbers import normal
from provider_xla import PtqProvider, QuantizationRule

FEW, MANY = 8, 40
BETWEEN = {"nothing": lambda x: x, "tanh": jnp.tanh, "relu": jax.nn.relu}
# Times the calls that the float layer takes. It was 1.9, 1.8 and 1.1 where each tapped call entered
# a scope, each call of jax.numpy was staged by JAX's rules, and weights were taken apart thrice.
MOST = {"nothing": 1.6, "tanh": 1.55, "relu": 1.0}


def calls(fn, *args):
    """Return how many Python functions are called while a function is traced."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    old = sys.getprofile()
    sys.setprofile(profile)
    try:
        jax.jit(lambda *args: fn(*args)).trace(*args)  # another function: JAX traces it again
    finally:
        sys.setprofile(old)
    return count


@pytest.mark.parametrize("between", BETWEEN)
def test_a_layer_more_of_a_quantized_program(between):
    act, w, x = BETWEEN[between], normal(24, 24), jnp.ones((3, 24))

    def model(params, x):
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
    ratio = more(plan.apply(model), stored) / more(model, params)
    assert ratio <= MOST[between], ratio

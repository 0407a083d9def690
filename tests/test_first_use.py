"""The first use of a package: what ran before is not traced again, and nothing is printed."""

from jaxtap_testkit.processes import run_python

CODE = """
import hijax_trace as hx, interception_core, provider_xla as xla, te_ffi_kernels as te
import jax, jax.numpy as jnp

traces = []
def product(w, x):
    traces.append(x.shape)
    return x @ w
def kernels(x):
    traces.append(x.shape)
    return te.softmax(te.softmax(x) * 7.0, None, 2.0)
w, x = jnp.ones((64, 32)), jnp.ones((4, 64))
first, second = jax.jit(product), jax.jit(kernels)
first(w, x)
for _ in range(3):
    second(x)
plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")).plan(
    lambda w, x: x @ w, w, x
)
jax.jit(plan.apply(lambda w, x: x @ w))(plan.quantize(w), x)
box = hx.Box(x)
hx.jit(lambda: box.set(box.get().astype(jnp.bfloat16)))()
xla.QtProvider(xla.QtRule(weight_qtype="int8")).apply(lambda w, x: x @ w)(w, x)
first(w, x)
second(x)
print("traces:", len(traces))
"""


def test_functions_that_ran_before_stay_compiled_and_nothing_is_logged():
    done = run_python("-c", CODE, JAXTAP_DEBUG="0")
    assert (done.stdout, done.stderr) == ("traces: 2\n", "")

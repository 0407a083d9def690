"""Quantized inference and training beside float and Qwix: trace, compile, run, memory."""

import functools
import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import linen
from networks import Net, ScannedNet, X
from paired import compare

import provider_xla as xla

# Qwix's, and the padding of scans that flax makes.
pytestmark = pytest.mark.filterwarnings("ignore:'VariableState':DeprecationWarning")

SIDES = {side: side for side in ("float", "jaxtap", "qwix")}
W8A8 = {"weight_qtype": "int8", "act_qtype": "int8"}
RULES = {
    "int8": W8A8,
    "int8 weights": {"weight_qtype": "int8"},
    "training, int8": W8A8,
    "training, int8 and back": {**W8A8, "bwd_qtype": "int8"},
}
NETS = {"16 layers": Net(), "scan of 24": ScannedNet()}


def trained(apply, params):
    """Returns the function that is timed, and its parameters."""

    def loss(params, x):
        return jnp.mean(apply(params, x) ** 2)

    return jax.value_and_grad(loss), params


@functools.cache
def parameters(name):
    return NETS[name].init(jax.random.key(0), X)


def make_side(side, name, case):
    net, params, fields = NETS[name], parameters(name), RULES[case]
    training = case.startswith("training")
    if side == "float":
        return trained(net.apply, params) if training else (net.apply, params)
    if side == "jaxtap":
        if training:
            return trained(xla.QtProvider(xla.QtRule(**fields)).apply(net.apply), params)
        plan = xla.PtqProvider(xla.QuantizationRule(**fields)).plan(net.apply, params, X)
        return plan.apply(net.apply), plan.quantize(params)
    if training:
        provider = qwix.QtProvider([qwix.QtRule(**fields)])
        return trained(qwix.quantize_model(net, provider).apply, params)
    model = qwix.quantize_model(net, qwix.PtqProvider([qwix.QuantizationRule(**fields)]))
    # Qwix can't quantize the stacked parameters of a scan; its init makes others like them.
    return model.apply, jax.jit(model.init)(jax.random.key(0), X)


def cold():
    """Before each: no cache of JAX's, and no garbage of the side before."""
    jax.clear_caches()
    gc.collect()


@pytest.fixture(params=NETS)
def net(request):
    return request.param


@pytest.fixture(params=RULES)
def case(request):
    return request.param


def test_trace(benchmark, net, case):
    def make(side):
        fn, params = make_side(side, net, case)
        return lambda: jax.jit(lambda *args: fn(*args)).trace(params, X)

    compare(benchmark, SIDES, make, rounds=5, unit="ms", setup=cold)


def test_trace_lower_compile(benchmark, net, case):
    def make(side):
        fn, params = make_side(side, net, case)
        return lambda: jax.jit(lambda *args: fn(*args)).lower(params, X).compile()

    compare(benchmark, SIDES, make, rounds=3, unit="ms", setup=cold)


def test_step(benchmark, net, case):
    def make(side):
        fn, params = make_side(side, net, case)
        compiled = jax.jit(fn).lower(params, X).compile()
        return lambda: jax.tree.leaves(compiled(params, X))[0]

    compare(benchmark, SIDES, make, rounds=40, unit="ms")


class Wide(linen.Module):
    """Contractions large enough that they are what a step takes its time for."""

    @linen.compact
    def __call__(self, x):
        for i in range(4):
            x = linen.gelu(linen.Dense(1024, name=f"dense_{i}")(x))
        return x


NETS_LARGE, ROWS = Wide(), np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)


@pytest.mark.parametrize("case", ["int8", "training, int8", "training, int8 and back"])
def test_step_of_4_layers_of_1024(benchmark, case, monkeypatch):
    monkeypatch.setitem(NETS, "wide", NETS_LARGE)
    monkeypatch.setattr(sys.modules[__name__], "X", jnp.asarray(ROWS))

    def make(side):
        fn, params = make_side(side, "wide", case)
        compiled = jax.jit(fn).lower(params, ROWS).compile()
        return lambda: jax.tree.leaves(compiled(params, ROWS))[0]

    compare(benchmark, SIDES, make, rounds=15, unit="ms")


QUANTIZE = """
import resource, threading, time
import jax, jax.numpy as jnp
from provider_xla import PtqProvider, QuantizationRule

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def model(ws, x):
    for w in ws:
        x = x @ w
    return x

x = jnp.ones((4, 4096))
plan = PtqProvider([QuantizationRule(weight_qtype="int8")]).plan(
    model, [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 16, x)
one = jnp.ones((4096, 4096))
from provider_xla.plan.weight import prepack_leaf, quantize_leaf
first = plan.weights["args[0][0]"]
jax.block_until_ready(prepack_leaf(first, quantize_leaf(first, one)))  # compiled before
del one
ws = [jax.block_until_ready(jnp.full((4096, 4096), i + 1.0)) for i in range(16)]
before, peak, stop = rss(), 0, False
def watch():
    global peak
    while not stop:
        peak = max(peak, rss())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
stored = plan.quantize(ws{donate})
seconds = time.perf_counter() - start
stop = True
thread.join()
print((peak - before) / 2**20, (rss() - before) / 2**20, seconds)
"""


@pytest.mark.parametrize("donate", ["", ", donate=True"], ids=["kept", "donated"])
def test_peak_memory_while_quantizing_1_gib(benchmark, donate):
    """Beyond the float parameters: at most what is quantized, and one parameter more."""
    command = [sys.executable, "-c", QUANTIZE.replace("{donate}", donate)]

    def run():
        output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        return tuple(map(float, output.split()))

    peak, after, seconds = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info["mib"] = {"peak": peak, "after": after, "seconds": seconds}
    assert (
        peak <= 256 + 64 + 32
    )  # quantized values of all, one float parameter, and what the process needs

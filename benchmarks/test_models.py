"""Trace and compile time of a 16-layer model: tapped, and in int8."""

import gc

import jax
import pytest
import qwix
from networks import LAYERS, Net, X
from paired import compare
from sides import WRAPPERS

from provider_xla import PtqProvider, QuantizationRule

pytestmark = pytest.mark.filterwarnings("ignore:'VariableState':DeprecationWarning")  # Qwix's

TARGETS = {
    name: (lambda proceed, *args, **kwargs: proceed(*args, **kwargs))
    for name in ("jax.lax.dot_general", "jax.lax.conv_general_dilated", "jax.numpy.einsum")
}


NET = Net()
PARAMS = NET.init(jax.random.key(0), X)
INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}
EVERY_SECOND = f".*layer_({'|'.join(str(i) for i in range(0, LAYERS, 2))})/.*"


def in_int8(wrap, path=".*"):
    if wrap is WRAPPERS["plain"]:
        return NET.apply
    if wrap is WRAPPERS["jaxtap"]:
        return PtqProvider([QuantizationRule(module_path=path, **INT8)]).apply(NET.apply)
    rule = qwix.QuantizationRule(module_path=path, **INT8)
    return qwix.quantize_model(NET, qwix.QtProvider([rule])).apply


CASES = {
    "tapped, all let run": lambda wrap: wrap(NET.apply, TARGETS),
    "int8": in_int8,
    "int8 in every second layer": lambda wrap: in_int8(wrap, EVERY_SECOND),
}


def cold():
    """Before each: no cache of JAX's, and no garbage of the side before."""
    jax.clear_caches()
    gc.collect()


@pytest.fixture(params=CASES)
def model(request):
    return CASES[request.param]


def test_16_layers_trace(benchmark, model):
    def make(wrap):
        fn = model(wrap)
        return lambda: jax.jit(lambda *args: fn(*args)).trace(PARAMS, X)

    compare(benchmark, WRAPPERS, make, rounds=11, unit="ms", setup=cold)


def test_16_layers_trace_and_compile(benchmark, model):
    def make(wrap):
        fn = model(wrap)
        return lambda: jax.jit(lambda *args: fn(*args)).lower(PARAMS, X).compile()

    compare(benchmark, WRAPPERS, make, rounds=5, unit="ms", setup=cold)


def test_16_layers_run(benchmark, model):
    def make(wrap):
        compiled = jax.jit(model(wrap)).lower(PARAMS, X).compile()
        return lambda: compiled(PARAMS, X)

    compare(benchmark, WRAPPERS, make, rounds=100, unit="ms")

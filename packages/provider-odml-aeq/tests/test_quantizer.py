from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.litert_samples import NHWC, program
from provider_odml import OdmlError
from provider_odml_aeq.quantizer import Entry, key_of, quantize_file
from provider_odml_export.litert import Runner, convert, read

pytestmark = pytest.mark.sample(2)

RNG = np.random.default_rng(0)
FIRST = RNG.normal(size=(128, 64)).astype(np.float32) / 11
KERNEL = RNG.normal(size=(3, 3, 1, 8)).astype(np.float32) / 3
LAST = RNG.normal(size=(8, 128)).astype(np.float32) / 3
X = RNG.normal(size=(4, 128)).astype(np.float32)
RUNS = {"main": [{"a0": X}]}
ENTRIES = {
    "dynamic_int8": Entry(),
    "dynamic_int4": Entry(weight_bits=4),
    "dynamic_int4_block32": Entry(weight_bits=4, block_size=32),
    "dynamic_int4_block128": Entry(weight_bits=4, block_size=128),
    "weight_only_int8": Entry(mode="weight_only"),
    "weight_only_int4": Entry(mode="weight_only", weight_bits=4),
    "static_int8": Entry(mode="static"),
    "static_int16": Entry(mode="static", activation_bits=16),
}


def net(x):
    with jax.named_scope("first"):
        x = jax.nn.relu(x @ jnp.asarray(FIRST))
    with jax.named_scope("conv"):
        x = x.reshape(-1, 8, 8, 1)
        x = jax.lax.conv_general_dilated(
            x, jnp.asarray(KERNEL), (1, 1), "SAME", dimension_numbers=NHWC
        )
    with jax.named_scope("last"):
        return x.mean((1, 2)) @ jnp.asarray(LAST)


@pytest.fixture(scope="module")
def model():
    return convert([program(net, X)], strict=False)


def quantized(model, entry, calibration=None, **others):
    """Quantize all operations by ``entry``; those of a named scope by another, or not (None)."""
    entries = {}
    for graph, op in read(model).ops():
        names = [graph.tensors[i].name for i in (*op.outputs, *op.inputs) if i >= 0]
        scopes = [s for s in others if s == op.name or any(f"/{s}/" in name for name in names)]
        found = others[scopes[-1]] if scopes else entry
        if found is not None:
            entries[key_of(graph, op)] = found
    return quantize_file(model, entries, calibration)


def _weights(model):
    """The types of the weights, by the named scope of their operation."""
    found = {}
    for graph in read(model).subgraphs:
        for tensor in graph.tensors:
            for name in ("first", "conv", "last"):
                is_scale = tensor.dtype == "float16"
                if f"/{name}/" in tensor.name and tensor.nbytes > 64 and not is_scale:
                    found[name] = tensor.dtype
    return found


def _error(model):
    exact = np.asarray(net(X), np.float64)
    found = Runner(model).run("main", a0=X)["o0"]
    return np.abs(found - exact).max() / np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["min_max_uniform", "octav", "mse", "gptq"])
@pytest.mark.parametrize("name", ENTRIES)
def test_modes(model, name, algorithm):
    if algorithm == "mse" and "block" in name:
        with pytest.raises(OdmlError, match="algorithm 'mse', got"):
            replace(ENTRIES[name], algorithm=algorithm)
        return
    found = quantized(model, replace(ENTRIES[name], algorithm=algorithm), RUNS)
    kind = "int4" if "int4" in name else "int8"
    types = _weights(found)
    assert (types["first"], types["last"]) == (kind, kind)
    assert _error(found) < (0.6 if kind == "int4" else 0.1)
    one = read(found).signatures["main"]
    assert (one.inputs["a0"].dtype, one.outputs["o0"].dtype) == ("float32", "float32")
    # GPTQ is for FULLY_CONNECTED; what else there is stays in float.
    is_static = name.startswith("static")
    assert bool(read(found).float_ops()) == (not is_static or algorithm == "gptq")


@pytest.mark.parametrize("size", [32, 128])
def test_scales_of_blocks(model, size):
    found = quantized(model, None, first=Entry(weight_bits=4, block_size=size))
    (graph,) = read(found).subgraphs
    (weights,) = [tensor for tensor in graph.tensors if tensor.block_size]
    assert (weights.dtype, weights.shape, weights.block_size) == ("int4", (64, 128), size)
    assert weights.scale.shape == (64, 128 // size)
    values = weights.data.reshape(64, -1, size) * weights.scale[..., None]
    steps = np.repeat(weights.scale, size, axis=1)
    assert (np.abs(values.reshape(64, 128) - FIRST.T) <= steps * 0.51).all()


def test_weights_that_a_block_does_not_divide_have_a_scale_per_channel(model):
    (graph,) = read(quantized(model, ENTRIES["dynamic_int4_block32"])).subgraphs
    (last,) = [t for t in graph.tensors if "/last/" in t.name and t.dtype == "int4"]
    assert (last.shape, last.block_size, last.scale.shape) == ((128, 8), 0, (128,))


def test_a_broken_model_of_the_library_is_refused(model):
    static = ENTRIES["static_int8"]
    with pytest.raises(OdmlError, match=r"wrote a broken model: .*got 4096"):
        quantized(model, static, RUNS, FULLY_CONNECTED=replace(static, algorithm="gptq"))


def test_each_operation_gets_its_entry(model):
    found = quantized(model, Entry(), first=Entry(weight_bits=4), conv=None)
    assert _weights(found) == {"first": "int4", "conv": "float32", "last": "int8"}


def test_small_weights_stay_float(model):
    found = quantized(model, Entry(min_elements=5000))
    assert _weights(found) == {"first": "int8", "conv": "float32", "last": "float32"}


def test_what_an_algorithm_is_not_made_for_gets_min_max(model):
    assert _weights(quantized(model, Entry(algorithm="gptq"), RUNS))["conv"] == "int8"


@pytest.mark.slow
def test_signatures_that_share_a_bias_of_different_scales():
    bias = np.linspace(-1, 1, 64, dtype=np.float32)

    def layer(x):
        return x @ jnp.asarray(FIRST) + jnp.asarray(bias)

    inputs = {"one": X, "two": X[:2] * np.float32(8)}
    found = convert([program(layer, x, name=name) for name, x in inputs.items()], strict=False)
    runs = {name: [{"a0": x}] for name, x in inputs.items()}
    runner = Runner(quantized(found, ENTRIES["static_int8"], runs))
    for name, x in inputs.items():
        exact = x.astype(np.float64) @ FIRST + bias
        error = np.abs(runner.run(name, a0=x)["o0"] - exact).max()
        assert error < 0.02 * np.abs(exact).max()


def test_calibration_is_needed(model):
    for entry in (ENTRIES["static_int8"], Entry(algorithm="gptq")):
        assert entry.needs_calibration
        with pytest.raises(OdmlError, match="calibration must have the inputs of a run"):
            quantized(model, entry)
    assert not ENTRIES["dynamic_int4"].needs_calibration


def test_a_signature_that_is_not_there(model):
    with pytest.raises(OdmlError, match="ai-edge-quantizer can't"):
        quantized(model, ENTRIES["static_int8"], {"other": [{"a0": X}]})


def test_nothing_quantized(model):
    with pytest.raises(OdmlError, match="quantized nothing"):
        quantized(model, None, conv=Entry(weight_bits=2, block_size=32))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"weight_bits": 3}, r"weight_bits must be one of \[8, 4, 2\], got 3"),
        ({"activation_bits": 4}, "activation_bits must"),
        ({"mode": "float"}, "mode must be .*, got 'float'"),
        ({"algorithm": "best"}, "algorithm must"),
        ({"block_size": 48}, "block_size must be one of .*, got 48"),
        ({"block_size": 32, "mode": "static"}, "block_size must be 0 with mode 'static'"),
    ],
)
def test_entries_that_can_not_be(fields, match):
    with pytest.raises(OdmlError, match=match):
        Entry(**fields)

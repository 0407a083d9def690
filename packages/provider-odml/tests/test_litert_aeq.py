import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.litert_samples import NHWC, program
from provider_odml.errors import MissingExtraError, OdmlError
from provider_odml.litert import (
    PRESETS,
    AeqRecipe,
    AeqRule,
    Runner,
    convert,
    names_of_op,
    quantize_weights,
    read,
)

pytestmark = pytest.mark.sample(2)

RNG = np.random.default_rng(0)
FIRST = RNG.normal(size=(128, 64)).astype(np.float32) / 11
KERNEL = RNG.normal(size=(3, 3, 1, 8)).astype(np.float32) / 3
LAST = RNG.normal(size=(8, 128)).astype(np.float32) / 3
X = RNG.normal(size=(4, 128)).astype(np.float32)
STATIC = [name for name in PRESETS if name.startswith("static")]


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
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(model, preset, algorithm):
    if algorithm == "mse" and "block" in preset:
        with pytest.raises(OdmlError, match="other than 'mse'"):
            AeqRecipe.preset(preset, algorithm)
        return
    recipe = AeqRecipe.preset(preset, algorithm)
    found = quantize_weights(model, recipe, {"main": [{"a0": X}]})
    kind = "int4" if "int4" in preset else "int8"
    types = _weights(found)
    assert (types["first"], types["last"]) == (kind, kind)
    assert _error(found) < (0.6 if kind == "int4" else 0.1)
    one = read(found).signatures["main"]
    assert (one.inputs["a0"].dtype, one.outputs["o0"].dtype) == ("float32", "float32")
    # GPTQ is for FULLY_CONNECTED; what else there is stays in float.
    assert bool(read(found).float_ops()) == (preset not in STATIC or algorithm == "gptq")


@pytest.mark.parametrize("size", [32, 128])
def test_scales_of_blocks(model, size):
    recipe = AeqRecipe((AeqRule("/first/", weight_bits=4, block_size=size),))
    (graph,) = read(quantize_weights(model, recipe)).subgraphs
    (weights,) = [tensor for tensor in graph.tensors if tensor.block_size]
    assert (weights.dtype, weights.shape, weights.block_size) == ("int4", (64, 128), size)
    assert weights.scale.shape == (64, 128 // size)
    values = weights.data.reshape(64, -1, size) * weights.scale[..., None]
    steps = np.repeat(weights.scale, size, axis=1)
    assert (np.abs(values.reshape(64, 128) - FIRST.T) <= steps * 0.51).all()


def test_weights_that_a_block_does_not_divide_have_a_scale_per_channel(model):
    (graph,) = read(quantize_weights(model, AeqRecipe.preset("dynamic_int4_block32"))).subgraphs
    (last,) = [t for t in graph.tensors if "/last/" in t.name and t.dtype == "int4"]
    assert (last.shape, last.block_size, last.scale.shape) == ((128, 8), 0, (128,))


def test_a_broken_model_of_the_library_is_refused(model):
    dense = AeqRule(operation="FULLY_CONNECTED", mode="static", algorithm="gptq")
    recipe = AeqRecipe((AeqRule(mode="static"), dense))
    with pytest.raises(OdmlError, match=r"wrote a broken model: .*4096 stored bytes"):
        quantize_weights(model, recipe, {"main": [{"a0": X}]})


def test_the_last_rule_that_matches_holds(model):
    recipe = AeqRecipe(
        (AeqRule(), AeqRule("/first/", weight_bits=4), AeqRule("/conv/", mode="none"))
    )
    found = quantize_weights(model, recipe)
    assert _weights(found) == {"first": "int4", "conv": "float32", "last": "int8"}


def test_the_operation_that_makes_an_output_is_found_by_its_weights(model):
    (graph,) = read(model).subgraphs
    last = next(op for op in graph.ops if graph.outputs[0] in op.outputs)
    assert "/last/" not in graph.tensors[graph.outputs[0]].name
    assert "/last/" in names_of_op(graph, last)
    found = quantize_weights(model, AeqRecipe((AeqRule("/last/"),)))
    assert _weights(found) == {"first": "float32", "conv": "float32", "last": "int8"}


def test_rules_by_operation_and_size(model):
    found = quantize_weights(model, AeqRecipe((AeqRule(operation="DEPTHWISE_CONV_2D"),)))
    assert _weights(found) == {"first": "float32", "conv": "int8", "last": "float32"}
    found = quantize_weights(model, AeqRecipe((AeqRule(min_elements=5000),)))
    assert _weights(found) == {"first": "int8", "conv": "float32", "last": "float32"}


def test_what_an_algorithm_is_not_made_for_gets_min_max(model):
    found = quantize_weights(model, AeqRecipe.preset("dynamic_int8", "gptq"), {"main": [{"a0": X}]})
    assert _weights(found)["conv"] == "int8"


@pytest.mark.slow
def test_signatures_that_share_a_bias_of_different_scales():
    bias = np.linspace(-1, 1, 64, dtype=np.float32)

    def layer(x):
        return x @ jnp.asarray(FIRST) + jnp.asarray(bias)

    inputs = {"one": X, "two": X[:2] * np.float32(8)}
    found = convert([program(layer, x, name=name) for name, x in inputs.items()], strict=False)
    runs = {name: [{"a0": x}] for name, x in inputs.items()}
    runner = Runner(quantize_weights(found, AeqRecipe.preset("static_int8"), runs))
    for name, x in inputs.items():
        exact = x.astype(np.float64) @ FIRST + bias
        error = np.abs(runner.run(name, a0=x)["o0"] - exact).max()
        assert error < 0.02 * np.abs(exact).max()


def test_calibration_is_needed(model):
    for recipe in (AeqRecipe.preset("static_int8"), AeqRecipe.preset("dynamic_int8", "gptq")):
        assert recipe.needs_calibration
        with pytest.raises(OdmlError, match="needs calibration"):
            quantize_weights(model, recipe)
    assert not AeqRecipe.preset("dynamic_int4").needs_calibration


def test_a_signature_that_is_not_there(model):
    with pytest.raises(OdmlError, match="ai-edge-quantizer can't"):
        quantize_weights(model, AeqRecipe.preset("static_int8"), {"other": [{"a0": X}]})


def test_no_rule_for_the_model(model):
    with pytest.raises(OdmlError, match=r"No rule .* it has .*FULLY_CONNECTED"):
        quantize_weights(model, AeqRecipe((AeqRule("/nowhere/"),)))


def test_nothing_quantized(model):
    recipe = AeqRecipe((AeqRule("/conv/", weight_bits=2, block_size=32),))
    with pytest.raises(OdmlError, match="quantized nothing"):
        quantize_weights(model, recipe)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"weight_bits": 3}, r"weight_bits is 3; it can be one of \[8, 4, 2\]"),
        ({"activation_bits": 4}, "activation_bits"),
        ({"mode": "float"}, "mode is 'float'"),
        ({"algorithm": "best"}, "algorithm"),
        ({"block_size": 48}, "block_size is 48"),
        ({"block_size": 32, "mode": "static"}, "for mode 'dynamic'"),
        ({"regex": "("}, "regex"),
    ],
)
def test_rules_that_can_not_be(fields, match):
    with pytest.raises(OdmlError, match=match):
        AeqRule(**fields)


def test_no_such_preset():
    with pytest.raises(OdmlError, match=r"no preset 'int3'; there are \['dynamic_int8'"):
        AeqRecipe.preset("int3")


def test_a_missing_quantizer(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ai_edge_quantizer", None)
    monkeypatch.delitem(sys.modules, "ai_edge_quantizer.quantizer", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'provider-odml\[aeq\]'"):
        quantize_weights(model, AeqRecipe.preset("dynamic_int8"))

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import interception_core as core
import provider_odml as odml
from provider_odml_aeq import AeqBackend
from provider_odml_export.litert import read

pytestmark = pytest.mark.sample(2)

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 40, (4, 6)).astype(np.int32)
DYNAMIC = {"weight_qtype": "int8", "input_qtype": "int8"}


class Net(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(40, 32, name="embed")(ids)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(x)
        x = nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm(name="norm")(x)))
        return nn.Dense(32, name="down")(x).mean(1)


@cache
def params():
    return Net().init(jax.random.key(0), IDS)


def export(*rules, io="float", **options):
    return odml.export(
        Net().apply, params(), None, rules, IDS, io=io, backend=AeqBackend(**options)
    )


def types(artifact):
    """The types of the parameters, by module: those in the file."""
    found = {}
    for graph in read(artifact.model).subgraphs:
        for op in graph.ops:
            for tensor in (graph.tensors[i] for i in op.inputs if i >= 0):
                for name in ("embed", "query", "key", "value", "out", "up", "down"):
                    is_weight = tensor.nbytes and len(tensor.shape) == 2
                    # The table has no name of its own.
                    at_embed = op.name == "EMBEDDING_LOOKUP" and name == "embed"
                    if is_weight and (f"/{name}/" in tensor.name or at_embed):
                        found[name] = tensor.dtype
    return found


def _sqnr(artifact):
    expected = np.asarray(Net().apply(params(), IDS), np.float64)
    (name,) = read(artifact.model).signatures["serving_default"].inputs
    found = artifact.run(**{name: IDS})["output_0"]
    return 10 * np.log10(np.sum(expected**2) / np.sum((found - expected) ** 2))


def test_the_first_rule_that_matches_holds():
    artifact = export(
        odml.OdmlRule(module_path=".*/down", weight_qtype="int4", input_qtype="int8"),
        odml.OdmlRule(module_path=".*/(query|embed)"),
        odml.OdmlRule(op_names=["einsum", "dot_general", "take"], **DYNAMIC),
    )  # fmt: skip
    integers = dict.fromkeys(("key", "value", "out", "up"), "int8")
    assert types(artifact) == {**integers, "down": "int4", "query": "float32", "embed": "float32"}
    report = artifact.report
    assert {one.operation: one.dtype for one in report.weights} == {
        **{f"Net/attention/{name}/dot_general:0": "int8" for name in ("key", "value", "out")},
        "Net/up/dot_general:0": "int8",
        "Net/down/dot_general:0": "int4",
    }
    floats = {one.operation: one.reason for one in report.floats}
    assert floats["Net/embed/gather:0"] == floats["Net/attention/query/dot_general:0"]
    assert floats["Net/embed/gather:0"] == "its rule has no qtypes"


@pytest.mark.slow
def test_dynamic_is_compared_with_jax_in_float():
    artifact = export(odml.OdmlRule(**DYNAMIC))
    report = artifact.report
    assert list(types(artifact).values()) == ["int8"] * 7
    assert (report.backend, report.sites, report.sqnr_floor) == ("aeq", (), 15.0)
    assert report.outputs[0].sqnr == pytest.approx(_sqnr(artifact), abs=0.01)
    assert report.outputs[0].sqnr > 30
    assert not any("no operation of the file" in one.reason for one in report.floats)
    assert "the backend aeq" in report.to_html()


def test_static_ranges_are_of_the_sample_data():
    artifact = export(odml.OdmlRule(weight_qtype="int8", output_qtype="int8"), io="int8")
    assert set(types(artifact).values()) == {"int8"}
    (output,) = read(artifact.model).signatures["serving_default"].outputs.values()
    assert output.dtype == "int8"
    expected = np.asarray(Net().apply(params(), IDS))
    step = float(np.ptp(expected)) / 255
    assert output.scale[0] == pytest.approx(step, rel=0.2)
    # The norm alone stays in float, as in the plan.
    assert [one.operation for one in artifact.report.floats] == ["Net/norm/norm_op:0"]
    kinds = {op.name for _, op in read(artifact.model).float_ops()}
    assert not kinds & {"FULLY_CONNECTED", "BATCH_MATMUL", "SOFTMAX", "GELU"}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["min_max_uniform", "gptq"])
def test_blocks_of_int4(algorithm):
    rule = odml.OdmlRule(weight_qtype="int4", input_qtype="int8", tile_size=32)
    artifact = export(rule, algorithm=algorithm)
    assert set(types(artifact).values()) == {"int4"}
    sizes = {one.operation: one.block_size for one in artifact.report.weights}
    assert sizes["Net/up/dot_general:0"] == sizes["Net/down/dot_general:0"] == 32
    # Four bits a value, and nothing left in float under their name.
    for one in artifact.report.weights:
        assert one.nbytes == np.prod(one.shape) / 2
    assert artifact.report.outputs[0].sqnr == pytest.approx(_sqnr(artifact), abs=0.01)
    assert artifact.report.outputs[0].sqnr > 8


def test_too_much_noise_is_an_error_that_says_how_much():
    with pytest.raises(odml.MismatchError, match=r"must have 90\.0 dB .*, got \d+\.\d dB"):
        export(odml.OdmlRule(**DYNAMIC), min_sqnr=90.0)


def test_signatures_with_calibration_of_their_own():
    weight = RNG.normal(size=(16, 8)).astype(np.float32) / 4

    def fn(params, x):
        with jax.named_scope("first"):
            return jnp.tanh(x @ params["w"])

    def other(params, x):
        with jax.named_scope("second"):
            return x @ params["w"] * 2

    x = RNG.normal(size=(4, 16)).astype(np.float32)
    signatures = {
        "one": odml.Signature((x,), outputs=("y",)),
        "two": odml.Signature((x * 5,), fn=other, outputs=("y",)),
    }
    runs = {"one": [{"x": x}], "two": [{"x": x * 10}]}
    artifact = odml.export(
        fn, {"w": weight}, None, odml.OdmlRule(weight_qtype="int8", output_qtype="int8"),
        signatures=signatures, backend=AeqBackend(calibration=runs), io="int8",
    )  # fmt: skip
    found = read(artifact.model).signatures
    scales = [float(found[name].inputs["x"].scale[0]) for name in ("one", "two")]
    assert scales[0] == pytest.approx(np.ptp(x) / 255, rel=0.1)
    assert scales[1] == pytest.approx(10 * np.ptp(x) / 255, rel=0.1)
    assert {one.signature for one in artifact.report.outputs} == {"one", "two"}


@pytest.mark.slow
def test_what_ai_edge_quantizer_can_not_do_is_an_error():
    with pytest.raises(odml.OdmlError, match="quantized nothing"):
        export(odml.OdmlRule(weight_qtype="int2"))


def test_rules_without_qtypes_are_an_error():
    with pytest.raises(odml.OdmlError, match="A rule must be for an operation of the file"):
        export(odml.OdmlRule())


@pytest.mark.parametrize(
    ("fields", "algorithm", "match"),
    [
        ({}, "octav", "block_size must be 0 with mode 'static' or 'weight_only'"),
        ({"input_qtype": "int8"}, "mse", "algorithm 'mse', got 32"),
    ],
)
def test_blocks_that_the_library_lacks_are_an_error(fields, algorithm, match):
    rule = odml.OdmlRule(op_names=["take"], weight_qtype="int4", tile_size=32, **fields)
    with pytest.raises(odml.OdmlError, match=match):
        export(rule, algorithm=algorithm)


def test_a_plugin_declares_the_backend():
    assert core.get_export_backend("aeq", algorithm="mse") == AeqBackend(algorithm="mse")
    assert isinstance(core.get_export_backend("aeq"), odml.ExportBackend)
    with pytest.raises(odml.OdmlError, match="Did you mean 'aeq'"):
        odml.export(Net().apply, params(), None, odml.OdmlRule(**DYNAMIC), IDS, backend="aqe")


def test_an_algorithm_that_the_library_lacks():
    with pytest.raises(odml.OdmlError, match=r"algorithm must be one of \['min_max_uniform'"):
        AeqBackend(algorithm="best")


@pytest.mark.slow
def test_calibration_of_a_signature_that_is_not_there():
    rule = odml.OdmlRule(weight_qtype="int8", output_qtype="int8")
    with pytest.raises(odml.OdmlError, match=r"must be of the signatures .*, got \['other'\]"):
        export(rule, calibration={"other": [{"ids": IDS}]})


def test_a_table_that_is_a_product_s_parameter_too():
    table = RNG.normal(size=(40, 32)).astype(np.float32)

    def fn(params, ids):
        return jnp.take(params["table"], ids, axis=0) @ params["table"].T

    int4 = {**DYNAMIC, "weight_qtype": "int4"}
    rules = (odml.OdmlRule(op_names=["take"], **DYNAMIC), odml.OdmlRule(**int4))
    artifact = odml.export(fn, {"table": table}, None, rules, IDS[0], backend="aeq")
    found = {one.operation: (one.dtype, one.nbytes) for one in artifact.report.weights}
    assert found == {"gather:0": ("int8", 40 * 32), "dot_general:0": ("int4", 40 * 16)}
    assert artifact.report.floats == ()


def test_a_product_without_a_name_in_the_file_is_found_by_what_follows():
    weights = [RNG.normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(2)]
    bias = RNG.normal(size=16).astype(np.float32)

    def fn(params, x):
        # As Equinox does it: the file has the constant as it is, under no name.
        for weight in params:
            x = jax.vmap(lambda row, weight=weight: jax.nn.relu(weight @ row + bias))(x)
        return x

    x = RNG.normal(size=(4, 16)).astype(np.float32)
    first, second = "dot_general:0", "dot_general:1"
    for rules, expected in (
        ([odml.OdmlRule(**DYNAMIC)], {first: 256, second: 256}),
        ([odml.OdmlRule(weight_qtype="int4")], {first: 128, second: 128}),
    ):
        artifact = odml.export(fn, weights, None, rules, x, backend="aeq")
        assert {one.operation: one.nbytes for one in artifact.report.weights} == expected
        assert not any("no operation of the file" in one.reason for one in artifact.report.floats)

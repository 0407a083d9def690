"""Export: programs of all kinds, compared with LiteRT operation by operation, and with float."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import (
    DYNAMIC,
    W8A8,
    W8A16,
    WEIGHTS,
    decibels,
    exported,
    normal,
    results_of,
    signal_to_noise,
    together,
)
from provider_odml_export.exporting import verify
from provider_odml_export.litert import read

pytestmark = pytest.mark.sample(2)


def scan(params, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]


def two_readers(params, x):
    y = x @ params
    return jnp.concatenate([y, x], -1) + jnp.concatenate([x, y], -1)


def masked_attention(params, x):
    q, k, v = (jnp.reshape(x @ w, (2, 6, 2, 4)) for w in params)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def lookups(params, ids):
    return params["table"][ids] @ params["w"]


def elementwise(params, x):
    y = x @ params
    largest = (jnp.maximum(y, x) - x) / 3.0
    return largest + jnp.sum(y, -1, keepdims=True) + jax.nn.sigmoid(y) * y - y**2


def convolutions(params, x):
    layout = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, params["w"], (2, 2), "SAME", dimension_numbers=layout)
    y = jax.nn.relu6(y + 1.0)
    y = jax.image.resize(y, (2, 8, 8, 8), "bilinear")
    return jnp.mean(y, (1, 2)) @ params["u"]


def along_one_axis(params, x):
    layout = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, params, (1,), "SAME", dimension_numbers=layout) + 1.0


def heads(params, x):
    h = jnp.einsum("bti,ihd->bthd", x, params["w"]) + params["b"]
    return jnp.einsum("bthd,hdo->bto", h, params["o"])


def own_jit(params, x):
    block = jax.jit(lambda h, w: jax.nn.relu(h @ w))
    return block(block(x, params), params)


def padded(params, x):
    return jnp.pad(jnp.clip(x @ params, -1.0, 1.0), ((0, 0), (1, 1))) * 2.0


def rms_norm(params, x):
    h = x @ params["w"]
    scale = lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return jax.nn.silu(h * scale * params["s"])


CASES = {
    "scan": (scan, normal(3, 8, 8), (normal(4, 8, seed=1),)),
    "two readers": (two_readers, normal(8, 8), (normal(4, 8, seed=1),)),
    "attention": (masked_attention, list(normal(3, 8, 8)), (normal(2, 6, 8, seed=1),)),
    "lookups": (
        lookups,
        {"table": normal(20, 8), "w": normal(8, 4, seed=1)},
        (jnp.arange(12).reshape(2, 6),),
    ),
    "elementwise": (elementwise, normal(8, 8), (normal(4, 8, seed=1),)),
    "convolutions": (
        convolutions,
        {"w": normal(3, 3, 3, 8), "u": normal(8, 4, seed=1)},
        (normal(2, 8, 8, 3, seed=2),),
    ),
    "one axis": (along_one_axis, normal(3, 8, 8), (normal(2, 16, 8, seed=1),)),
    "heads": (
        heads,
        {"w": normal(8, 2, 4), "b": normal(2, 4, seed=1), "o": normal(2, 4, 8, seed=2)},
        (normal(3, 5, 8, seed=3),),
    ),
    "own jit": (own_jit, normal(8, 8), (normal(4, 8, seed=1),)),
    "padded": (padded, normal(8, 8), (normal(4, 8, seed=1),)),
    "rms norm": (rms_norm, {"w": normal(8, 8), "s": normal(8, seed=1)}, (normal(4, 8, seed=2),)),
}


def export_of(names, rule=W8A8):
    """Export programs as one. Return the artifact, and signal to noise of each."""
    cases = {name: CASES[name] for name in names}
    artifact = exported(*together(cases), rule=rule)
    found = {name: decibels(*both) for name, both in results_of(artifact, cases).items()}
    return artifact, found


@pytest.mark.slow
def test_static_int8():
    artifact, found = export_of(CASES)
    assert max(site.lsb for site in artifact.report.sites) <= 1.01
    assert min(found.values()) > 15, found


def test_static_int16():
    artifact, found = export_of(["scan", "heads", "convolutions", "one axis"], W8A16)
    assert {site.qtype for site in artifact.report.sites} == {"int16"}
    # Step i of a loop has the range of all steps.
    assert found.pop("scan") > 15
    assert min(found.values()) > 30, found


@pytest.mark.parametrize("rule", [DYNAMIC, WEIGHTS], ids=["dynamic", "weight-only"])
def test_without_static_ranges(rule):
    names = "heads", "one axis", "lookups"
    artifact, found = export_of(names, rule)
    assert not artifact.report.sites
    assert artifact.report.bytes_by_dtype["int8"] >= sum(
        leaf.size for leaf in jax.tree.leaves([CASES[name][1] for name in names]) if leaf.ndim > 2
    )
    assert min(found.values()) > 20, found


def test_a_lookup_in_a_table_that_stays_float():
    fn, params, args = CASES["lookups"]
    artifact = odml.export(fn, params, None, odml.OdmlRule(), *args)
    (found,) = artifact.run(ids=np.asarray(args[0])).values()
    wanted = np.asarray(params["table"], np.float64)[args[0]] @ np.asarray(params["w"], np.float64)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert "int8" not in artifact.report.bytes_by_dtype


def test_what_constant_indices_pick():
    """Of an input and of what is computed, in rows, columns and both."""

    def fn(params, x):
        y = jnp.take(x[jnp.array([2, 0, 1])], jnp.arange(8)[::-1], axis=1) @ params
        return y[jnp.array([1, 1, 0])] @ params

    x, params = normal(3, 8), normal(8, 8, seed=1)
    artifact = exported(fn, params, x)
    assert signal_to_noise(fn, params, [x], artifact) > 25
    assert {site.qtype for site in artifact.report.sites} == {"int8"}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [W8A8, W8A16])
def test_tensors_of_no_elements(rule):
    """A scan by halves multiplies slices of which the last hold nothing."""

    def fn(params, x):
        def joined(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        slopes = jnp.broadcast_to(jax.nn.sigmoid(params["a"]), x.shape)
        return lax.associative_scan(joined, (slopes, x), axis=1)[1] @ params["w"]

    x, params = normal(2, 3, 8), {"a": normal(8, seed=1), "w": normal(8, 4, seed=2)}
    artifact = exported(fn, params, x, rule=rule)
    assert signal_to_noise(fn, params, [x], artifact) > 25


@pytest.mark.slow
def test_parameters_of_four_and_two_bits_are_stored_packed():
    _, params, args = CASES["heads"]

    def fn(params, x):
        with jax.named_scope("four"):
            x = heads(params["four"], x)
        with jax.named_scope("two"):
            return heads(params["two"], x)

    rules = [
        odml.OdmlRule(module_path=f"{name}.*", weight_qtype=qtype, output_qtype="int8")
        for name, qtype in (("four", "int4"), ("two", "int2"))
    ]
    both = {"four": params, "two": params}
    stats = odml.qat(fn, rules).calibrate(both, [args])
    report = odml.export(fn, both, stats, rules, *args).report
    for qtype, bits in (("int4", 4), ("int2", 2)):
        assert report.bytes_by_dtype[qtype] == 2 * 8 * 8 * bits // 8


def test_several_signatures_with_names_of_their_own():
    params, x = normal(8, 4), normal(3, 8, seed=1)
    fn = lambda w, x: {"logits": x @ w, "scores": jax.nn.softmax(x @ w)}  # noqa: E731
    stats = odml.qat(fn, [W8A8]).calibrate(params, [(x,)])
    wanted = {
        "three": odml.Signature((x,), inputs=("features",)),
        "one": (x[:1],),
    }
    artifact = odml.export(fn, params, stats, [W8A8], signatures=wanted)
    three = artifact.run("three", features=np.asarray(x))
    one = artifact.run("one", x=np.asarray(x[:1]))
    assert set(three) == set(one) == {"logits", "scores"}
    np.testing.assert_array_equal(three["logits"][:1], one["logits"])


@pytest.mark.slow
def test_integer_inputs_and_outputs():
    fn, params, args = CASES["heads"]
    artifact = exported(fn, params, *args, io="int8")
    (signature,) = read(artifact.model).signatures.values()
    assert {t.dtype for t in (*signature.inputs.values(), *signature.outputs.values())} == {"int8"}


@functools.cache
def exported_heads():
    """Return the statistics of one program, and its artifact."""
    fn, params, args = CASES["heads"]
    stats = odml.qat(fn, [W8A8]).calibrate(params, [args])
    return stats, odml.export(fn, params, stats, [W8A8], *args)


def test_a_file_is_written_whole(tmp_path):
    _, artifact = exported_heads()
    path = artifact.save(tmp_path / "m.tflite")
    assert path.read_bytes() == artifact.model
    assert list(tmp_path.iterdir()) == [path]


def test_a_difference_is_an_error_that_names_the_operation(monkeypatch):
    """A grid that JAX and the file don't share, as a wrong kernel would make it."""
    stats, _ = exported_heads()
    honest = verify.run

    def wrong(model, one):
        found = honest(model, one)
        return {k: v + 0.5 if k.startswith("site_") else v for k, v in found.items()}

    monkeypatch.setattr(verify, "run", wrong)
    fn, params, args = CASES["heads"]
    with pytest.raises(odml.MismatchError, match=r"dot_general:0"):
        odml.export(fn, params, stats, [W8A8], *args)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"io": "int4"}, "io must be 'float' or 'int8', got 'int4'"),
        ({"backend": "tf"}, "Unknown export backend 'tf'.*provider-odml-aeq"),
        ({"signatures": {}}, "signatures must map names"),
    ],
)
def test_bad_arguments(options, match):
    fn, params, args = CASES["heads"]
    with pytest.raises(odml.OdmlError, match=match):
        odml.export(fn, params, None, [WEIGHTS], *args, **options)


def test_types_are_no_sample_data():
    fn, params, _ = CASES["heads"]
    with pytest.raises(odml.OdmlError, match="must be sample data"):
        odml.export(fn, params, None, [WEIGHTS], jax.ShapeDtypeStruct((3, 5, 8), jnp.float32))


def test_static_ranges_need_statistics():
    fn, params, args = CASES["heads"]
    with pytest.raises(odml.ManifestError, match="stats must have the ranges of"):
        odml.export(fn, params, None, [W8A8], *args)
    stats = odml.qat(fn, [W8A8]).init(params, *args)
    with pytest.raises(odml.ManifestError, match="must have seen every site"):
        odml.export(fn, params, stats, [W8A8], *args)


def test_the_program_of_a_converter_of_ones_own():
    """OdmlConversionProvider's function is what the file computes."""
    fn, params, args = CASES["heads"]
    stats, artifact = exported_heads()
    provider = odml.OdmlConversionProvider([W8A8], params, stats)
    found = jax.jit(provider.apply(fn))(params, *args)
    (device,) = artifact.run(x=np.asarray(args[0])).values()
    assert np.abs(np.asarray(found)).max() > 0
    step = artifact.report.sites[-1].scale
    assert np.abs(np.asarray(found) - device).max() <= 1.01 * step
    assert "quant.fake_quant" in jax.jit(provider.apply(fn)).lower(params, *args).as_text()


def test_a_rule_may_be_for_one_signature_alone():
    params = {"a": normal(8, 4), "b": normal(8, 4, seed=1)}

    def under(name):
        def fn(p, x):
            with jax.named_scope(name):
                return x @ p[name]

        return fn

    rules = [odml.OdmlRule(module_path=name, weight_qtype=qtype)
             for name, qtype in (("a", "int8"), ("b", "int4"))]  # fmt: skip
    x = normal(3, 8, seed=2)
    signatures = {name: odml.Signature((x,), fn=under(name)) for name in "ab"}
    art = odml.export(under("a"), params, None, rules, signatures=signatures)
    assert [one.dtype for one in art.report.weights] == ["int8", "int4"]
    with pytest.raises(odml.OdmlError, match=r"rule 1 has no effect"):
        odml.export(under("a"), params, None, rules, signatures={"a": signatures["a"]})

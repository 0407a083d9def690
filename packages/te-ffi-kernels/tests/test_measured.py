"""Where kernels are not chosen since XLA was measured to be faster."""

import functools
import itertools

import jax
import numpy as np
import pytest

import te_ffi_kernels as te
from interception_core import KernelCall, KernelSpec, declared_specs, read_table
from interception_core.cli.bench import bench_of
from te_ffi_kernels import _measured, _supports

OURS = [spec for spec in declared_specs(KernelSpec) if spec.target.startswith("te_ffi_kernels.")]
MEASURED = ("matmul", "attention")
BENCHED = [spec for spec in OURS if spec.bench.partition(":")[2] in MEASURED]
"""Those that are refused where XLA is faster."""
ISAS = ("generic", "neon", "neon_dot", "neon_i8mm", "avx2", "avx_vnni", "avx512", "amx")


@pytest.fixture
def measured(monkeypatch):
    """Make this the table, with the given ratios by rows or positions."""

    def make(target, along, ratios, isa=None, **labels):
        rows = [{**labels, along: at, "ratio": ratio} for at, ratio in ratios.items()]
        table = {f"te_ffi_kernels.{target}": {isa or te.isa(): rows}}
        monkeypatch.setattr(_measured, "_table", lambda: table)

    return make


def matmul(rows, dtype="bfloat16", k=4096, n=4096):
    operands = [jax.ShapeDtypeStruct((rows, k), dtype), jax.ShapeDtypeStruct((k, n), "int8")]
    return _supports.matmul(KernelCall.of("gemm_w8a16", "cpu", operands, group=0, bits=8))


def test_a_matmul_that_is_slower_is_refused(measured):
    measured("gemm_w8a16", "rows", {1: 0.2, 128: 1.2}, dtype="bfloat16", k=4096, n=4096)
    assert matmul(127) is True
    reason = f"XLA is faster on {te.isa()} from 128 rows on (measured with k=4096, n=4096)"
    assert matmul(128) == matmul(1000) == reason
    assert matmul(128, "float16") == reason
    assert matmul(128, "float32") is True
    assert matmul(128, k=0) == "nothing is contracted"


def test_convolutions_that_are_slower_are_refused(monkeypatch):
    """Of few input features; and where integers have no instructions, of floats at many places."""

    def asked(op, rows, k, isa, n=65, **how):
        monkeypatch.setattr(_supports, "instruction_set", lambda: isa)
        operands = [
            jax.ShapeDtypeStruct((rows, k), "float32"),
            jax.ShapeDtypeStruct((k, n), "int8"),
        ]
        how = {"group": 0, "bits": 8} | how
        one = functools.partial(KernelCall.of, op, "cpu", operands, **how)
        assert _supports.matmul(one()) is True
        return _supports.matmul(one(convolves=True))

    widening = ("avx2", "neon")  # without instructions for int8
    rows = jax.export.symbolic_shape("rows")[0]
    for op in ("gemm_w8a8", "gemm_w8a16"):
        assert asked(op, 1, 64, "generic") == "XLA is faster on generic at convolutions"
        for isa in ISAS[1:]:
            assert "fewer than 64 input features" in asked(op, 1, 63, isa)
            assert asked(op, 128, 64, isa) is True
            for many in (129, rows):
                found = asked(op, many, 64, isa)
                if op == "gemm_w8a16" and isa in widening:
                    assert f"faster on {isa} at convolutions of floats at more than 128" in found
                else:
                    assert found is True
    # Windows have a kernel of int8 that is faster there, for weights without groups or tables.
    for isa in set(ISAS) - {"generic", *widening}:
        assert "conv_w8a8 is faster at 2048 places" in asked("gemm_w8a8", 2048, 64, isa, 64)
        assert "conv_w4a8 is faster at 2048 places" in asked("gemm_w4a8", 4000, 64, isa, 8)
        for places in (2047, rows):
            assert asked("gemm_w8a8", places, 64, isa, 64) is True
        assert asked("gemm_w8a8", 2048, 64, isa, 65) is True
        assert asked("gemm_w4a8", 2048, 64, isa, 64, group=32) is True
        assert asked("gemm_w4a8", 2048, 64, isa, 64, table="nf4") is True
        assert asked("gemm_w8a16", 2048, 64, isa, 64) is True
    for isa in widening:
        assert asked("gemm_w8a8", 2048, 64, isa, 64) is True


def test_other_instruction_sets_say_nothing(measured):
    other = next(isa for isa in ("generic", "avx2") if isa != te.isa())
    measured("gemm_w8a16", "rows", {1: 9.0}, isa=other, dtype="bfloat16", k=4096, n=4096)
    assert matmul(1) is True
    measured("gemm_w8a8", "rows", {1: 9.0}, dtype="bfloat16", k=4096, n=4096)
    assert matmul(1) is True


@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_that_is_slower_is_refused(measured, heads_first):
    ratios = {128: 1.5, 512: 0.9}
    measured("decode_attention", "positions", ratios, dtype="int8", heads=16, kv_heads=4)

    def asked(positions):
        cache = (2, 4, positions, 64) if heads_first else (2, positions, 4, 64)
        shapes = [((2, 1, 4, 4, 64), "float32"), (cache, "int8"), (cache, "int8")]
        operands = itertools.starmap(jax.ShapeDtypeStruct, shapes)
        call = KernelCall.of("decode_attention", "cpu", operands, heads_first=heads_first)
        return _supports.attention(call)

    assert "with 1 to 511 positions" in asked(100)
    assert asked(512) is True


def test_the_table_is_of_kernels_and_cases_that_are_timed():
    cases = {spec.target: spec for spec in BENCHED}
    for target, variants in read_table(_measured.TABLE).items():
        labels = [set(case.labels) for case in _cases(cases[target])]
        assert set(variants) <= set(ISAS)
        for row in itertools.chain(*variants.values()):
            assert row["ratio"] > 0
            assert set(row) - {"ratio"} in labels


def _cases(spec):
    bench = bench_of(spec)
    assert bench.table == _measured.TABLE
    return list(bench.cases)


@pytest.mark.sample(2)
@pytest.mark.parametrize("spec", BENCHED, ids=lambda spec: spec.op)
def test_what_is_timed_is_the_same_on_both_sides(spec):
    """A table of different computations would say nothing."""
    by_dtype = {case.labels["dtype"]: case for case in reversed(_cases(spec))}
    for dtype, case in by_dtype.items():
        fn, operands = case.make()
        other, given = case.others["float"]()
        found, expected = fn(*operands), other(*given)
        assert found.shape == expected.shape
        if dtype == "int8":  # the other's cache is of other numbers
            continue
        error = np.linalg.norm(np.float64(found) - np.float64(expected))
        assert error < 2e-2 * np.linalg.norm(np.float64(expected))


def test_kernels_with_weights_and_attention_are_timed():
    assert {spec.op for spec in BENCHED} == {
        "gemm_w8a8", "gemm_w8a16", "gemm_w4a16", "gemm_w4a8", "decode_attention",
    }  # fmt: skip

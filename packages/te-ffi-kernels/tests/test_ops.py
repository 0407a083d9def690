"""The calls that ``jaxtap ops`` reads signatures off, and ``jaxtap bench`` times."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from interception_core import KernelSpec, declared_specs
from interception_core.cli import main
from interception_core.cli.bench import bench_of
from interception_core.kernels.select import chosen_kernel

OURS = [spec for spec in declared_specs(KernelSpec) if spec.target.startswith("te_ffi_kernels.")]
DOCUMENT = Path(__file__).parents[3] / "docs" / "ops.md"


def described(capsys, *ops):
    assert main(["ops", "--json", *ops]) == 0
    return {one["op"]: one for one in json.loads(capsys.readouterr().out)}


def test_the_signature_of_an_op(capsys):
    op = described(capsys, "gemm_w8a8")["gemm_w8a8"]
    assert {"target": "te_ffi_kernels.gemm_w8a8", "platform": "cpu"} in op["kernels"]
    for call, dtype in zip(op["calls"], ("float32", "bfloat16"), strict=True):
        assert call["labels"]["dtype"] == dtype
        assert call["operands"][0] == f"{dtype}[1,1024]"
        assert call["operands"][1].startswith("uint8[")
        assert call["results"] == [f"{dtype}[1,1024]"]
        assert call["attributes"] == {"group": "int64", "k": "int64", "n": "int64"}


def test_attributes_in_a_dictionary(capsys):
    (call, _) = described(capsys, "act_lu")["act_lu"]["calls"]
    found = call["attributes"]["act_params"]["clamped_swiglu"]
    assert found == {"limit": "float32", "alpha": "float32", "glu_linear_offset": "float32"}
    assert main(["ops", "act_lu"]) == 0
    assert "act_params: {clamped_swiglu: {limit: float32, " in capsys.readouterr().out


def test_an_op_that_is_unknown(capsys):
    assert main(["ops", "gemm_w8a9"]) == 1
    assert "got 'gemm_w8a9'. Did you mean 'gemm_w8a" in capsys.readouterr().err


@pytest.mark.slow
def test_all_ops_are_described_as_documented(capsys):
    """docs/ops.md is what ``jaxtap ops`` prints."""
    assert main(["ops", *sorted({spec.op for spec in OURS})]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.endswith("(cuda)")]
    assert "\n".join(lines) == DOCUMENT.read_text().split("```")[1].strip()
    for spec in OURS:
        assert f"  kernel      {spec.target} (cpu)" in lines
    assert len([line for line in lines if line.startswith("    operands")]) >= 2 * len(OURS) - 6


@pytest.mark.slow
@pytest.mark.parametrize("spec", OURS, ids=lambda spec: spec.op)
def test_what_is_timed_is_the_same_with_and_without_the_kernel(spec):
    case = next(iter(bench_of(spec).cases))
    fn, operands = case.make()
    found = []
    for kernel in (spec, None):
        jax.clear_caches()
        with chosen_kernel(spec.op, spec.platform, kernel):
            found.append(jax.tree.leaves(jax.jit(lambda *given: fn(*given))(*operands)))
    jax.clear_caches()
    assert any(np.asarray(one).size for one in found[0])
    for one, other in zip(*found, strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.linalg.norm(one - other) <= 2e-2 * np.linalg.norm(other)

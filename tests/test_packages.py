"""Each package installs by itself, with what it needs and nothing else."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"
NEEDS = {
    "interception-core": ["interception-core"],
    "hijax-trace": ["interception-core", "hijax-trace"],
    "quant-numerics": ["interception-core", "hijax-trace", "quant-numerics"],
    "provider-xla": ["interception-core", "hijax-trace", "quant-numerics", "provider-xla"],
    "provider-odml": ["interception-core", "hijax-trace", "quant-numerics", "provider-odml"],
    "te-ffi-kernels": ["interception-core", "te-ffi-kernels"],
    "te-ffi-kernels-cuda13": ["interception-core", "te-ffi-kernels", "te-ffi-kernels-cuda13"],
}
CHECKS = {
    "interception-core": "import interception_core as ic; assert len(ic.plugins()) == 1; "
    "ic.get_engine('patch')",
    "hijax-trace": "import interception_core as ic, hijax_trace as ht; "
    "assert isinstance(ic.get_engine(), ht.TraceEngine); ht.Box(1).get()",
    "quant-numerics": "import quant_numerics as qn; qn.quantize([1.0, 2.0], 'int8')",
    "provider-xla": "import interception_core as ic; ic.get_provider('qt').apply(len); "
    "import jax.numpy as jnp; w = jnp.eye(4); "
    "plan = ic.get_provider('ptq').plan(jnp.dot, w, w); "
    "plan.apply(jnp.dot)(plan.quantize(w), w)",
    "provider-odml": "import interception_core as ic, jax.numpy as jnp, provider_odml as odml; "
    "w = jnp.eye(4); model = ic.get_provider('odml-qat').apply(jnp.dot); "
    "stats = model.init(w, w); model(w, w, quant_stats=stats); assert len(stats) == 2\n"
    "try: odml.export(jnp.dot, w, stats, [model.provider.rules[0]], w)\n"
    "except odml.MissingExtraError as error: assert error.extra == 'litert'\n"
    "else: raise AssertionError('exported without a converter')",
    "te-ffi-kernels": "import jax.numpy as jnp, te_ffi_kernels as te; "
    "w = te.pack_w8(jnp.eye(4, dtype=jnp.int8), jnp.ones((1, 4))); "
    "assert (te.gemv_w8(jnp.ones(4), w) == 1).all(); assert te.warm_counts()",
    "te-ffi-kernels-cuda13": "import te_ffi_kernels_cuda13 as kernels; "
    "assert 'no kernels' in kernels.status(); import jax.numpy as jnp, te_ffi_kernels as te; "
    "assert (te.softmax(jnp.zeros((2, 4))) == 0.25).all()",
}
if importlib.util.find_spec("te_ffi_kernels") is None:
    # There is no compiler: see CONTRIBUTING.md.
    del NEEDS["te-ffi-kernels"], NEEDS["te-ffi-kernels-cuda13"]


@pytest.mark.parametrize("package", NEEDS)
def test_in_an_empty_environment(package, tmp_path):
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "this test needs uv: run the tests with `uv run pytest`"
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    folders = [str(PACKAGES / name) for name in NEEDS[package]]

    def run(*command):
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=600,
            env=os.environ | {"JAXTAP_CUDA": "OFF"},  # nvcc takes its time
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    run(uv, "venv", "--python", sys.executable, str(environment))
    run(uv, "pip", "install", "--python", str(python), *folders)
    run(str(python), "-W", "error", "-c", CHECKS[package])
    installed = run(uv, "pip", "list", "--python", str(python))
    for other in NEEDS.keys() - set(NEEDS[package]):
        assert other not in installed

"""A kernel from a distribution of its own takes the place of one of ours in a program."""

import shutil
import subprocess

import jax
import pytest

from jaxtap_testkit.processes import run_python
from jaxtap_testkit.wheels import build_wheel, install_wheel

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static int64_t calls = 0;

// gemm_w8a8 as its description has it: slow, simple, and for one scale per column.
static ffi::Error Gemm(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> buffer,
                       ffi::ResultBuffer<ffi::F32> y, int64_t k, int64_t n, int64_t group) {
  if (group != 0) return ffi::Error::InvalidArgument("acme: groups");
  ++calls;
  const int64_t panel = buffer.dimensions()[1];
  std::vector<int8_t> qvalue(k);
  for (int64_t row = 0; row < x.dimensions()[0]; ++row) {
    const float* in = x.typed_data() + row * k;
    float most = 0;
    for (int64_t i = 0; i < k; ++i) most = std::fmax(most, std::fabs(in[i]));
    const float scale = std::fmax(most * (1.0f / 127.0f), 0x1p-126f);
    for (int64_t i = 0; i < k; ++i) {
      qvalue[i] = static_cast<int8_t>(std::nearbyint(in[i] / scale));
    }
    for (int64_t column = 0; column < n; ++column) {
      const uint8_t* from = buffer.typed_data() + column / 16 * panel + 64;
      float column_scale;
      std::memcpy(&column_scale, from + 4 * (column % 16), 4);
      int32_t sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += qvalue[i] * (from[64 + i / 4 * 64 + column % 16 * 4 + i % 4] - 128);
      }
      y->typed_data()[row * n + column] = static_cast<float>(sum) * scale * column_scale;
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(AcmeGemm, Gemm,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("group"));

extern "C" int64_t AcmeCalls() { return calls; }
extern "C" int AcmeMinor() { return XLA_FFI_API_MINOR; }
"""

PLUGIN = """
from interception_core import KernelSpec, hookimpl

API = (1, 1)


@hookimpl
def jaxtap_register_kernels():
    return [
        KernelSpec(
            target="acme_gemm.gemm",
            platform="cpu",
            handlers="acme_gemm.library:handlers",
            op="gemm_w8a8",
            supports="acme_gemm.library:supports",
            priority=10,
        )
    ]
"""

LIBRARY = """
import ctypes
from pathlib import Path

import jax
from interception_core import FfiTarget

library = ctypes.CDLL(str(Path(__file__).with_name("gemm.so")))


def handlers():
    stages = {"execute": jax.ffi.pycapsule(library.AcmeGemm)}
    return {"acme_gemm.gemm": FfiTarget(stages=stages, api_version=(0, library.AcmeMinor()))}


PARTS = ("index", "group_sizes", "rotation", "x_scale", "bias", "residual", "clamps")


def supports(call):
    plain = not any(map(call.param, ("group", *PARTS)))
    return plain and call.operands[0].dtype == "float32"
"""

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-gemm"
version = "1.0"
dependencies = ["interception-core"]

[project.entry-points.jaxtap]
acme-gemm = "acme_gemm.plugin"

[tool.hatch.build.targets.wheel]
packages = ["acme_gemm"]
artifacts = ["*.so"]
"""

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import provider_xla as xla

def model(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]

rng = np.random.default_rng(0)
params = {"up": rng.normal(size=(40, 70)), "down": rng.normal(size=(70, 20))}
params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
x = jnp.asarray(rng.normal(size=(6, 40)), jnp.float32)
plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")).plan(
    model, params, x)
stored, run = plan.quantize(params), jax.jit(plan.apply(model))
y = np.asarray(run(stored, x))
print(*(record.kernel for record in plan.ops), y.tobytes().hex()[:400], sep="\\n")
"""

CALLS = """
from acme_gemm.library import library
library.AcmeCalls.restype = __import__("ctypes").c_int64
print(library.AcmeCalls())
"""


@pytest.fixture(scope="module")
def installed(built_once):
    """A folder that the wheel is installed in."""
    compiler = shutil.which("c++")
    assert compiler, "te-ffi-kernels is here, so the compiler that built it should be too"
    files = {
        "acme_gemm/gemm.cc": SOURCE,
        "acme_gemm/plugin.py": PLUGIN,
        "acme_gemm/library.py": LIBRARY,
        "acme_gemm/__init__.py": "",
        "pyproject.toml": PROJECT,
    }

    def build(folder):
        source = folder / "gemm.cc"
        source.write_text(SOURCE)
        library = folder / "source" / "acme_gemm" / "gemm.so"
        library.parent.mkdir(parents=True)
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off"]
        headers = f"-I{jax.ffi.include_dir()}"
        subprocess.run([compiler, *flags, headers, source, "-o", library], check=True)
        install_wheel(build_wheel(folder / "source", files), folder / "site")

    return built_once("kernel", build) / "site"


def test_it_replaces_ours_and_nobody_s_code_is_touched(installed, capsys):
    # In tiles there are groups, which it does not support.
    in_tiles = PROGRAM.replace("70", "80").replace(
        'act_qtype="int8"', 'act_qtype="int8", tile_size=8'
    )
    code = PROGRAM + CALLS + in_tiles + CALLS
    printed = run_python("-c", code, PYTHONPATH=str(installed)).stdout.splitlines()
    ours = ["te_ffi_kernels.gemm_w8a8"] * 2
    *found, result, calls = printed[:4]
    assert (found, calls) == (["acme_gemm.gemm"] * 2, "2")
    assert (printed[4:6], printed[-1]) == (ours, "2")
    exec(PROGRAM, {})  # in this process, which does not have it
    assert capsys.readouterr().out.splitlines() == [*ours, result]

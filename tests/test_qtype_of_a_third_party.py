"""A number format from a distribution of its own: that of examples/nf3_format."""

from pathlib import Path

import pytest

from jaxtap_testkit.processes import run_python
from jaxtap_testkit.wheels import build_wheel, install_wheel

EXAMPLE = Path(__file__).parent.parent / "examples" / "nf3_format"

USE = """
import sys
import interception_core as core

assert [spec.name for spec in core.declared_specs(core.QTypeSpec)] == ["nf3"]
assert "jax" not in sys.modules and "nf3_format.formats" not in sys.modules

import jax, jax.numpy as jnp, numpy as np
import quant_numerics as qn

kind = qn.get_qtype("nf3")
assert qn.get_qtype("nf3") is kind and len(kind.codebook) == 8
rng = np.random.default_rng(0)
w, x = rng.normal(size=(192, 24)).astype("f"), rng.normal(size=(5, 192)).astype("f")
dims = (((1,), (0,)), ((), ()))

# The nearest entry of the codebook, times the float16 scale of its block.
book = np.asarray(kind.codebook)
blocks = w.astype("d").reshape(3, 64, 24)
scale = np.abs(blocks).max(1, keepdims=True).astype("f").astype(np.float16).astype("d")
index = np.abs((blocks / scale)[..., None] - book).argmin(-1)
expected = (book[index] * scale).reshape(w.shape)

q = qn.quantize_for_dot(w, (0,), "nf3")
assert q.scale.shape == (3, 24) and q.scale.dtype == jnp.float16
np.testing.assert_allclose(qn.dequantize(q), expected, rtol=1e-6, atol=1e-7)
product = x.astype("d") @ expected
for stored in (q, qn.pack(q), jax.jit(qn.pack)(q), jax.jit(lambda q: q.T.T)(q)):
    np.testing.assert_allclose(qn.dot_general(x, stored, dims), product, rtol=1e-4, atol=1e-4)
packed = qn.pack(q)
assert packed.nbytes == 192 * 24 * 3 // 8 + 3 * 24 * 2
assert (qn.unpack(packed).qvalue == q.qvalue).all()

faked = qn.fake_quant(w.T, "nf3", channel_axes=(0,), tile_axes={1: 64})
np.testing.assert_allclose(faked, expected.T, rtol=1e-6, atol=1e-7)
how = qn.HowToQuantize("nf3")
train = lambda w: qn.Matmul(dims).train(x, w, lhs_how=None, rhs_how=how).sum()
np.testing.assert_allclose(jax.grad(train)(w), np.tile(x.sum(0)[:, None], 24), rtol=1e-5, atol=1e-5)

try:
    qn.get_qtype("nf33")
except ValueError as error:
    assert "nf3, nf4" in str(error) and "Did you mean 'nf3'" in str(error), error
else:
    raise AssertionError("nf33 is no format")
"""


@pytest.fixture(scope="module")
def site(built_once):
    """A folder that the wheel is installed in."""
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    texts = {str(path.relative_to(EXAMPLE)): path.read_text() for path in files}

    def build(folder):
        install_wheel(build_wheel(folder / "source", texts), folder / "site")

    return built_once("qtype", build) / "site"


def test_it_quantizes_packs_multiplies_and_trains(site):
    doctor = "\nfrom interception_core.cli import main\nmain(['doctor'])\n"
    done = run_python("-c", USE + doctor, PYTHONPATH=str(site))
    line = "nf3: 8 quantiles of the normal distribution (3 bits in uint4, float16 scales, blocks of"
    assert f"{line} 64)" in done.stdout

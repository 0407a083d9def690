"""Every instruction set that this machine has gives the same bits, each in one process.

Many rows of bfloat16 are left out: AMX multiplies them with weights in bfloat16.
"""

import hashlib

import pytest

import te_ffi_kernels as te
from jaxtap_testkit.processes import run_python

CODE = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import te_ffi_kernels as te

rng = np.random.default_rng(0)
digest = hashlib.sha256()
for op, pack, most in ((te.gemm_w8a8, te.pack_w8, 127), (te.gemm_w8a16, te.pack_w8, 127),
                       (te.gemv_w4, te.pack_w4, 7), (te.gemm_w4a8, te.pack_w4, 7),
                       (te.gemv_w4, lambda c, s: te.pack_w4(c, s.astype(jnp.float16)), 7)):
    for m, k, n, groups in ((1, 1, 1, 1), (1, 64, 16, 1), (2, 65, 17, 1), (7, 63, 15, 1),
                            (17, 200, 70, 1), (33, 128, 33, 1), (5, 192, 40, 4), (16, 320, 31, 2),
                            (6, 2080, 35, 2), (9, 600, 20, 1)):
        qvalue = jnp.asarray(rng.integers(-most, most + 1, (k, n)), jnp.int8)
        scale = jnp.asarray(rng.uniform(0.01, 0.1, (groups, n)), jnp.float32)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            rows = min(m, 15) if dtype == jnp.bfloat16 and op is te.gemv_w4 else m
            x = jnp.asarray(rng.normal(size=(rows, k)), dtype)
            digest.update(np.asarray(op(x, pack(qvalue, scale)), np.float32).tobytes())
            if k % 32 == 0:
                turn = {"signs": jnp.where(jnp.arange(k) % 3 == 0, -1, 1).astype(jnp.int8)}
                y = op(x, pack(qvalue, scale), rotation=32, **turn)
                digest.update(np.asarray(y, np.float32).tobytes())
print(te.isa(), digest.hexdigest())
"""


def run(isa):
    return run_python("-c", CODE, JAXTAP_ISA=isa).stdout.split()


@pytest.fixture(scope="module")
def generic():
    return run("generic")


def test_generic_is_everywhere():
    assert te.isas()[0] == "generic"


@pytest.mark.slow
@pytest.mark.parametrize("isa", te.isas()[1:])
def test_same_bits(isa, generic):
    assert generic[0] == "generic"
    assert len(generic[1]) == len(hashlib.sha256().hexdigest())
    assert run(isa) == [isa, generic[1]]

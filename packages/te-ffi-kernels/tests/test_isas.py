"""Each instruction set of this machine, in a process of its own.

Packed matmuls and quantization have the same bits with all of them, attention over a cache is that
of its reference.
"""

import pytest

import te_ffi_kernels as te
from jaxtap_testkit.processes import run_python

CODE = """
import hashlib
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
import te_ffi_kernels as te

rng, digest = np.random.default_rng(0), hashlib.sha256()

def run(fn, *given):
    for array in jax.tree.leaves(jax.jit(fn)(*given)):
        digest.update(np.asarray(array).tobytes())

# Many rows of bfloat16 are left out: AMX and AVX512-BF16 multiply them with weights in bfloat16.
SHAPES = ((1, 1, 1, 1), (1, 64, 16, 1), (2, 65, 17, 1), (7, 63, 15, 1), (17, 200, 70, 1),
          (33, 128, 33, 1), (5, 192, 40, 4), (16, 320, 31, 2), (6, 2080, 35, 2), (9, 600, 20, 1))
for op, pack, most in ((te.gemm_w8a8, te.pack_w8, 127), (te.gemm_w8a16, te.pack_w8, 127),
                       (te.gemm_w4a16, te.pack_w4, 7), (te.gemm_w4a8, te.pack_w4, 7),
                       (te.gemm_w4a16, lambda c, s: te.pack_w4(c, s.astype(jnp.float16)), 7)):
    cases = []
    for m, k, n, groups in SHAPES:
        qvalue = np.asarray(rng.integers(-most, most + 1, (k, n)), np.int8)
        scale = np.asarray(rng.uniform(0.01, 0.1, (groups, n)), np.float32)
        rows = [np.asarray(rng.normal(size=(m, k)), np.float32)]
        if k in (65, 192, 200, 600):
            rows += [rows[0].astype(np.float16)]
            rows += [rows[0].astype(ml_dtypes.bfloat16)[: 15 if op is te.gemm_w4a16 else m]]
        cases.append((qvalue, scale, rows))

    def products(cases):
        for qvalue, scale, rows in cases:
            w, k = pack(qvalue, scale), len(qvalue)
            signs = jnp.where(jnp.arange(k) % 3 == 0, -1, 1).astype(jnp.int8)
            for x in rows:
                yield op(x, w)
                if k % 32 == 0:
                    yield op(x, w, rotation=32, signs=signs)

    run(lambda cases: list(products(cases)), cases)

for table, scales, group in (("e2m1", "float8_e8m0fnu", 32), ("e2m1", "float8_e4m3fn", 16),
                             ("iq4_nl", "float16", 32), ("nf4", "float32", 64)):
    for m, n in ((1, 17), (3, 40), (14, 33)):
        places = np.asarray(rng.integers(0, 16, (192, n)), np.int8)
        scale = jnp.asarray(rng.uniform(0.01, 0.1, (192 // group, n)), scales)
        more = {"column_scale": jnp.linspace(1, 2, n)} if scales == "float8_e4m3fn" else {}
        rows = [np.asarray(rng.normal(size=(m, 192)), dtype) for dtype in ("f", ml_dtypes.bfloat16)]
        w = te.pack_w4(places, scale, table=table, **more)
        run(lambda rows: [op(x, w) for x in rows for op in (te.gemm_w4a16, te.gemm_w4a8)], rows)

one, zero = np.ones((1,), np.float32), np.zeros((1,), np.float32)
extra = np.zeros((0,), np.uint32), zero, np.zeros((1, 1), ml_dtypes.bfloat16)

def quantized(arrays):
    for x in arrays:
        for mode in (1, 64) + ((2,) if len(x) == 96 else ()):
            for out in ("float8_e4m3fn", "float8_e5m2") + (("int8",) if mode != 2 else ()):
                found = te.dbias_quantize(x, one * 3, zero, *extra, out, mode, 2, -1)
                yield from found[:5]
                yield te.dequantize(found[0], zero, zero, found[2], x.dtype, mode)

for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
    arrays = []
    shapes = (7, 9), (33, 31), (96, 160)
    if dtype == np.float32:
        shapes += (0, 5), (1, 1), (15, 17), (63, 65), (127, 129)
    for shape in shapes:
        x = np.asarray(rng.normal(size=shape) * 100, np.float32)
        x.reshape(-1)[::37] = np.nan
        arrays.append(x.astype(dtype))
    run(lambda arrays: list(quantized(arrays)), arrays)

def matmuls(pairs):
    for lhs, rhs in pairs:
        given = lhs, one, rhs[None], one, zero[:0], jnp.full(1, len(lhs), jnp.int32), one, zero
        yield te.grouped_gemm_v2(*given, "float32", ((1,), (1,)), 1)

run(lambda pairs: list(matmuls(pairs)), [
    [np.asarray(rng.integers(-127, 128, s), np.int8) for s in ((m, k), (k, n))]
    for m, n, k in ((1, 1, 1), (5, 17, 33), (12, 32, 256), (13, 33, 257), (100, 70, 300))
])
print(te.isa(), digest.hexdigest())

q = jnp.asarray(rng.normal(size=(2, 2, 8, 40)), jnp.float32)
lengths = jnp.array([150, 77])
caches = {}
for cache in ("float32", "bfloat16", "float16", "int8"):
    kv = [jnp.asarray(rng.integers(-100, 100, (2, 2, 150, 40)), cache) for _ in range(2)]
    caches[cache] = kv if cache == "int8" else [x * 0.01 for x in kv]

def attend(module):
    found = {}
    for cache, kv in caches.items():
        scales = {}
        if cache == "int8":
            scales = dict.fromkeys(("key_scale", "value_scale"), jnp.full((2, 2, 150), 0.01))
        options = {"window": 90, "softcap": 4.0, **scales}
        found[cache] = module.decode_attention(q, *kv, lengths, **options)
    return found

found, wanted = jax.jit(lambda: (attend(te), attend(te.reference)))()
for cache in caches:
    np.testing.assert_allclose(found[cache], wanted[cache], rtol=1e-5, atol=2e-6, err_msg=cache)
"""


@pytest.mark.slow
def test_every_instruction_set():
    assert te.isas()[0] == "generic"
    found = {}
    for isa in te.isas():
        name, found[isa] = run_python("-c", CODE, JAXTAP_ISA=isa).stdout.split()
        assert name == isa
    assert len(set(found.values())) == 1, found
    assert len(found["generic"]) == 64

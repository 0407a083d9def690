"""Checks te-ffi-kernels, as it is installed, against NumPy in float64: one op of each kind.

It needs nothing but the package, and takes seconds: tools/try_aarch64 runs it in qemu. Give it the
name of an instruction set to check that this is the one that kernels use.
"""

import sys
import time

import jax.numpy as jnp
import numpy as np

import te_ffi_kernels as te

random = np.random.default_rng(45)


def numbers(*shape):
    return random.standard_normal(shape, np.float32)


def quantized(x, axes):
    """Whole numbers from -127 to 127 and their scale, as kernels round: by float32 quotients."""
    scale = np.abs(x).max(axes, keepdims=True) * np.float32(1 / 127)
    return np.rint(x / scale).astype(np.float64), scale.astype(np.float64)


def check(name, found, expected, bound):
    """Compare the norm of an error with that of the result."""
    error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    print(
        f"{'ok' if error <= bound else 'WRONG':<6}{name:<44}{error:.1e} of {bound:.0e}", flush=True
    )
    return error <= bound


def matmuls():
    for rows in (1, 7, 64):  # one row, a few, and blocks of them have separate code
        x = numbers(rows, 256)
        whole, scale = quantized(x, 1)
        for bits, pack, digits, floats in (
            (8, te.pack_w8, te.gemm_w8a8, te.gemm_w8a16),
            (4, te.pack_w4, te.gemm_w4a8, te.gemm_w4a16),
        ):
            most = 2 ** (bits - 1)
            qvalue = random.integers(-most, most, (256, 72))
            for groups in (1, 8):
                scales = random.uniform(0.001, 0.01, (groups, 72)).astype(np.float32)
                weight = pack(jnp.asarray(qvalue, jnp.int8), jnp.asarray(scales))
                plain = qvalue * np.repeat(scales.astype(np.float64), 256 // groups, 0)
                name = f"int{bits} in {groups} groups, {rows} rows"
                yield check(
                    f"{name}, floats", floats(x, weight), x.astype(np.float64) @ plain, 1e-4
                )
                if groups == 1:
                    yield check(f"{name}, int8", digits(x, weight), whole @ plain * scale, 1e-6)


def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attention():
    q, k, v = numbers(2, 40, 4, 32), numbers(2, 40, 2, 32), numbers(2, 40, 2, 32)
    keys, values = (np.repeat(x.astype(np.float64), 2, 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), keys) / np.sqrt(32)
    scores = np.where(np.tri(40, dtype=bool), scores, -np.inf)
    expected = np.einsum("bhqk,bkhd->bqhd", softmax(scores), values)
    kinds = "NO_BIAS", "CAUSAL_MASK", "BSHD_BSHD_BSHD", "VANILLA_SOFTMAX"
    found = te.fused_attn((q, k, v), None, None, None, *kinds, 32**-0.5, 0.0, False)
    yield check("attention, causal", found, expected, 1e-6)
    caches = [jnp.asarray(x.transpose(0, 2, 1, 3)) for x in (k, v)]
    found = te.decode_attention(jnp.asarray(q[:, -1:]), *caches, 40)
    yield check("attention of the last query over a cache", found, expected[:, -1:], 1e-6)


def convolution(x, weight, groups, stride):
    """Of images [images, h, w, channels], 3 x 3, with zeros of one pixel around."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    of_group, outputs = x.shape[3] // groups, weight.shape[1] // groups
    total = 0
    for tap in range(9):
        i, j = divmod(tap, 3)
        part = padded[:, i : i + x.shape[1] : stride, j : j + x.shape[2] : stride]
        rows = weight[tap * of_group : (tap + 1) * of_group].reshape(of_group, groups, outputs)
        part = part.reshape(*part.shape[:3], groups, of_group)
        total = total + np.einsum("nyxgc,cgo->nyxgo", part, rows)
    return total.reshape(*total.shape[:3], -1)


def convolutions():
    for groups, n in ((1, 40), (24, 24)):
        for stride in (1, 2):
            x = numbers(2, 9, 10, 24)
            qvalue = random.integers(-128, 128, (9 * 24 // groups, n))
            scale = random.uniform(0.001, 0.01, (1, n)).astype(np.float32)
            weight = te.pack_w8(jnp.asarray(qvalue, jnp.int8), jnp.asarray(scale))
            options = {"strides": (stride, stride), "padding": [(1, 1), (1, 1)], "groups": groups}
            name = f"convolution in {groups} groups, stride {stride}"
            whole, of_image = quantized(x, (1, 2, 3))
            expected = convolution(whole, qvalue, groups, stride) * scale * of_image
            found = te.conv_w8a8(x, weight, (3, 3), **options)
            yield check(f"{name}, int8", found, expected, 1e-6)
            if groups > 1:
                expected = convolution(x.astype(np.float64), qvalue, groups, stride) * scale
                found = te.conv_w8a16(x, weight, (3, 3), **options)
                yield check(f"{name}, floats", found, expected, 1e-6)


def main():
    start = time.monotonic()
    print("instruction set:", te.isa(), "of", *te.isas())
    wanted = sys.argv[1:] or [te.isa()]
    if wanted != [te.isa()]:
        print(f"kernels must use {wanted[0]}, got {te.isa()}")
        return 1
    results = [good for group in (matmuls, attention, convolutions) for good in group()]
    # References in plain JAX would pass, too.
    ran = sorted(name for name, count in te.warm_counts().items() if count)
    print("kernels that ran:", *ran)
    print(f"{sum(results)} of {len(results)} checks passed in {time.monotonic() - start:.0f} s")
    return 0 if all(results) and len(ran) >= 8 else 1


if __name__ == "__main__":
    sys.exit(main())

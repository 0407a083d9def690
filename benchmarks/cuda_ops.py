"""The ops that have CUDA kernels: each of them called, and each beside XLA and beside a copy.

    python benchmarks/cuda_ops.py exercise        # all kernels, small: for compute-sanitizer
    python benchmarks/cuda_ops.py measure OUT.json

Runs where JAX puts arrays. With --tiny, sizes are those of a rehearsal, and bfloat16 is the
only dtype.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from functools import partial

import cuda_experts
import jax
import jax.numpy as jnp
import numpy as np

import te_ffi_kernels as te
from te_ffi_kernels import reference

ONE, ZERO = np.ones((1,), np.float32), np.zeros((1,), np.float32)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
KINDS = ("scaled", "scaled_masked", "scaled_upper_triang_masked")
MODES = {"tensor": 1, "mx": 2, "channel": 64}
MATMULS = {8: te.gemv_w8, 4: te.gemv_w4}
NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = (("gelu",), ("silu", "linear"), ("squared_relu",), ("clamped_silu", "clamped_linear"))
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
CAUSAL, BOTTOM_RIGHT = 2, 4
ROUNDS, CALLS = 15, 10


def quantize(x, module=te, mode=1, layout=2, out=jnp.float8_e4m3fn, dbias=False):
    """dbias_quantize without what only NVFP4 takes."""
    extra = np.zeros((0,), np.uint32), ZERO, np.zeros((1, 1), jnp.bfloat16)
    rest = (out, mode, layout, -1, None, dbias)
    return module.dbias_quantize(x, jnp.asarray(ONE), jnp.asarray(ZERO), *extra, *rest)


def dequantize(qvalue, scales, module=te, mode=1, dtype=jnp.bfloat16):
    """Quantized values by row."""
    return module.dequantize(qvalue, jnp.asarray(ZERO), jnp.asarray(ZERO), scales, dtype, mode)


def backward(dz, y, kind, module=te):
    """The gradient of a softmax's logits."""
    rest = (None, None) if kind == "scaled_masked" else (None,)
    return getattr(module, f"{kind}_softmax_bwd")(dz, y, *rest, 1.0)


def matmul(lhs, lhs_scale, rhs, rhs_scale, bias, mode, out=jnp.bfloat16, module=te, **options):
    """gemm_v2 of factors that both have what is contracted last."""
    alpha, beta = jnp.asarray(ONE), jnp.asarray(ZERO)
    dims = ((1,), (1,))
    given = (lhs, lhs_scale, rhs, rhs_scale, bias, alpha, beta, out, dims, mode)
    return module.gemm_v2(*given, **options)


def factors(m, n, k, mode, code, dtype=jnp.bfloat16):
    """(lhs, its scales, rhs, its scales), in quantized values where there is a mode."""
    found = []
    for rows in (m, n):
        x = normal(rows, k, dtype=dtype)
        if mode == 0:
            found += [x, jnp.zeros((0,))]
        else:
            qvalue, _, scales, *_ = quantize(x, mode=mode, layout=0, out=code)
            found += [qvalue, scales]
    return found


def packed(k, n, bits, groups=1):
    """A weight."""
    rng, most = np.random.default_rng(), 2 ** (bits - 1) - 1
    qvalue = jnp.asarray(rng.integers(-most, most + 1, (k, n)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.5, 1, (groups, n)), jnp.float32)
    return (te.pack_w8 if bits == 8 else te.pack_w4)(qvalue, scale)


def norm(x, gamma, kind, module=te, **outputs):
    """A norm's results, its statistics last."""
    return module.normalization_fwd(x, gamma, gamma, False, 1e-5, kind, **outputs)


def norm_backward(dz, x, mu, rsigma, gamma, kind, module=te):
    """The gradient of a norm."""
    return module.normalization_bwd(dz, x, mu, rsigma, gamma, gamma, False, 1e-5, kind)


def act(x, names, module=te, **outputs):
    """An activation of [..., parts, columns]."""
    return module.act_lu(x, names, **outputs)


def act_backward(dz, x, names, module=te, dbias=True, **outputs):
    """The gradient of an activation."""
    return module.quantize_dact_dbias(dz, x, names, dbias, **outputs)


def grouped(x, sizes, module=te, mode=1, layout=2, out=jnp.float8_e4m3fn):
    """grouped_quantize of groups that all have the scale 1."""
    sizes = jnp.asarray(sizes, jnp.int32)
    return module.grouped_quantize(x, jnp.ones(sizes.shape), sizes, out, mode, layout)


def route(logits, module=te, topk=8, score="softmax", dense=False, **options):
    """A router's weights and map; with `dense`, its scores for the loss."""
    given = options | {"score_function": score, "compute_aux_scores": dense}
    return module.fused_topk_with_score_function(logits, topk, **given)


def route_backward(grad, logits, module=te, **options):
    """The gradient of a router's logits."""
    return jax.vjp(lambda x: route(x, module, **options)[0], logits)[1](grad)[0]


def loss_and_slope(probs, counts, module=te):
    """The router's loss, and its gradient."""
    return jax.value_and_grad(module.fused_moe_aux_loss)(probs, counts, 8, 0.01)


def attend(q, k, v, mask=0, bias=None, lengths=None, layout=9, softmax=0, dropout=0.0, **options):
    """Attention, of packed segments where the layout has them."""
    descriptor = None
    if lengths is not None:
        descriptor = te.SequenceDescriptor.from_seqlens(lengths)
    if layout >= 10:
        places = jnp.zeros((q.shape[0], 2), jnp.int32) + jnp.asarray([0, q.shape[1] // 2])
        descriptor = te.SequenceDescriptor.from_seqlens_and_offsets(places // 2 + 5, places)
        options["max_segments_per_seq"] = 2
    seed = jnp.zeros((2,), jnp.uint32)
    kind = 0 if bias is None else 2
    scale = q.shape[-1] ** -0.5
    args = (bias, descriptor, seed, kind, mask, layout, softmax, scale, dropout, True)
    return te.fused_attn((q, k, v), *args, **options)


def normal(*shape, dtype):
    """Numbers that no program knows."""
    return jnp.asarray(np.random.default_rng().normal(size=shape), dtype)


def exercise():
    """Calls each kernel on sizes at which its ways part."""
    for dtype in DTYPES.values():
        for shape in ((64, 128), (96, 160), (67, 33)):
            x = normal(*shape, dtype=dtype)
            for mode in MODES.values():
                if mode == MODES["mx"] and shape[0] % 32:
                    continue
                for layout in (0, 1, 2):
                    for out in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)[: 2 + (mode != 2)]:
                        found = quantize(x, mode=mode, layout=layout, out=out, dbias=True)
                        if layout != 1:
                            dequantize(found[0], found[2], mode=mode, dtype=dtype)
        for k in (33, 64, 512, 1025, 4096):
            x = normal(2, 3, 7, k, dtype=dtype)
            mask = jnp.asarray(np.random.default_rng().integers(0, 2, (2, 1, 7, k)), jnp.uint8)
            for kind in KINDS:
                y = te.softmax(x, mask, 1.0, kind)
                jax.block_until_ready(backward(x, y, kind))
        exercise_norms(dtype)
        exercise_activations(dtype)
        exercise_groups(dtype)
        exercise_router(dtype)
        cuda_experts.exercise(dtype)
        exercise_attention(dtype)
    for m, n, k in ((96, 160, 64), (33, 70, 96)):
        for mode in (0, *MODES.values()):
            for code in (jnp.float8_e4m3fn, jnp.int8)[: 1 + (mode in (1, 64))]:
                given = factors(m, n, k, mode, code)
                for bias in (jnp.zeros((0,)), normal(n, dtype=jnp.bfloat16)):
                    for gelu in (False, True):
                        jax.block_until_ready(matmul(*given, bias, mode, fuse_gelu=gelu))
    exercise_packed()
    jax.effects_barrier()
    print("every kernel ran")


def exercise_packed():
    """Packs weights and multiplies with them, as ``exercise`` does."""
    for bits, groups, k in ((8, 1, 192), (8, 3, 192), (8, 1, 2100), (4, 1, 190), (4, 3, 192)):
        weight = packed(k, 70, bits, groups)
        for dtype in DTYPES.values():
            for rows in (1, 8, 9, 70, 130, 260):
                x = normal(rows, k, dtype=dtype)
                jax.block_until_ready(MATMULS[bits](x, weight))
                jax.block_until_ready((te.gemm_w8a8 if bits == 8 else te.gemm_w4a8)(x, weight))
    jax.block_until_ready(te.gemm_w8a16(normal(3, 192, dtype=jnp.float32), packed(192, 70, 8, 1)))


def exercise_norms(dtype):
    """Calls the norms' kernels, as ``exercise`` does."""
    for kind in NORMS:
        for shape in ((67, 33), (96, 160), (7, 1024), (3, 4104), (3, 9000)):
            x, gamma = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype)
            *_, mu, rsigma = norm(x, gamma, kind, output_amax_when_no_scaling=True)
            jax.block_until_ready(norm_backward(x, x, mu, rsigma, gamma, kind))
            for mode in (*MODES.values(), 3):
                if mode == MODES["mx"] and shape != (96, 160):
                    continue
                for layout in (0, 1, 2):
                    found = norm(x, gamma, kind, scaling_mode=mode, q_layout=layout)
                    jax.block_until_ready(found)


def exercise_activations(dtype):
    """Calls the activations' kernels, as ``exercise`` does."""
    for names in ACTIVATIONS:
        for rows, cols in ((67, 33), (96, 160)):
            x = normal(rows, len(names), cols, dtype=dtype)
            dz = normal(rows, cols, dtype=dtype)
            act(x, names, output_amax_when_no_scaling=True)
            act_backward(dz, x, names, output_amax_when_no_scaling=True)
            for mode in (*MODES.values(), 3):
                if mode == MODES["mx"] and rows != 96:
                    continue
                for layout in (0, 1, 2):
                    act(x, names, scaling_mode=mode, q_layout=layout)
                    found = act_backward(dz, x, names, scaling_mode=mode, q_layout=layout)
                    jax.block_until_ready(found)


def exercise_groups(dtype):
    """Calls the kernels for groups, as ``exercise`` does."""
    for sizes, cols in (([64, 0, 96], 160), ([3, 70, 1], 33), ([0], 64)):
        x = normal(sum(sizes), cols, dtype=dtype)
        for mode in (*MODES.values(), 3):
            if mode == MODES["mx"] and cols == 33:
                continue
            for layout in (0, 1, 2):
                jax.block_until_ready(grouped(x, sizes, mode=mode, layout=layout))


def exercise_router(dtype):
    """Calls the router's kernels, as ``exercise`` does."""
    for experts in (16, 48, 96, 250, 400, 600):
        x = normal(7, experts, dtype=dtype)
        for score in SCORES:
            for options in ({}, {"num_groups": 2, "group_topk": 1}, {"dense": True}):
                given = {"score": score, "routing_map_format": experts % 3 % 2} | options
                jax.block_until_ready(route_backward(x, x, **given))
        if experts == 600:
            bias = normal(experts, dtype=dtype)
            jax.block_until_ready(route(x, score="sigmoid", expert_bias=bias))
    for tokens in (0, 7, 300):
        probs = normal(tokens, 100, dtype=dtype)
        jax.block_until_ready(loss_and_slope(probs, jnp.ones((100,), jnp.int32)))


def exercise_attention(dtype):
    """Calls attention and its gradient, as ``exercise`` does; in float32 it's plain JAX."""
    q, k, v = (normal(2, 72, heads, 32, dtype=dtype) for heads in (4, 2, 2))
    offset = jnp.zeros((1, 4, 1, 1))
    lengths = jnp.asarray([72, 9]), jnp.asarray([72, 0])
    for options in (
        {},
        {"mask": CAUSAL},
        {"mask": CAUSAL, "window_size": (9, 0)},
        {"mask": BOTTOM_RIGHT + 1, "lengths": lengths},
        {"mask": 1, "lengths": lengths, "softmax": 2, "softmax_offset": offset},
        {"bias": normal(1, 4, 72, 72, dtype=dtype)},
        {"dropout": 0.1},
        {"mask": 3, "layout": 14},
    ):
        run = lambda q, k, v, options=options: attend(q, k, v, **options)  # noqa: E731
        out, back = jax.vjp(run, q, k, v)
        jax.block_until_ready(back(out))


def size_of(tree):
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compare(sides, args):
    """Seconds of a call of each side: medians, sides in turn, of some calls one after the other."""
    compiled = {name: jax.jit(fn).lower(*args).compile() for name, fn in sides.items()}
    results = {name: jax.block_until_ready(run(*args)) for name, run in compiled.items()}
    seconds = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, run in compiled.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                out = run(*args)
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - start) / CALLS)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return medians, size_of(args) + size_of(results["kernel"])


def cases(side, dtype):
    """(name, function of (module, operands), operands)."""
    x = normal(side, side, dtype=dtype)
    for name, mode in MODES.items():
        for layout, text in ((0, "by row"), (2, "both ways")):
            yield (
                f"quantize, {name}, {text}",
                lambda m, x, mode=mode, at=layout: quantize(x, m, mode, at),
                (x,),
            )
        qvalue, _, scales, *_ = quantize(x, mode=mode, layout=0)
        run = lambda m, c, s, mode=mode: dequantize(c, s, m, mode, dtype)  # noqa: E731
        yield f"dequantize, {name}", run, (qvalue, scales)
    for k in (512, 4096):
        rows = side * side // (8 * 128 * k) or 1
        logits = normal(rows, 8, 128, k, dtype=dtype)
        mask = jnp.zeros((1, 1, 128, k), jnp.uint8)
        for kind in KINDS:
            forward = lambda m, x, mask, kind=kind: m.softmax(x, mask, 1.0, kind)  # noqa: E731
            yield f"{kind}_softmax, rows of {k}", forward, (logits, mask)
            back = lambda m, dz, y, kind=kind: backward(dz, y, kind, m)  # noqa: E731
            yield f"{kind}_softmax, gradient, rows of {k}", back, (logits, logits)
    yield from norm_cases(side, dtype)
    yield from activation_cases(side, dtype)
    yield from expert_cases(side, dtype)


def norm_cases(side, dtype):
    """Those of the norms, as ``cases`` has them."""
    for k in (1024, 4096):
        x, gamma = normal(side * side // k, k, dtype=dtype), normal(k, dtype=dtype)
        for kind in NORMS:
            forward = lambda m, x, gamma, kind=kind: norm(x, gamma, kind, m)  # noqa: E731
            yield f"{kind}, rows of {k}", forward, (x, gamma)
            back = lambda m, *args, kind=kind: norm_backward(*args, kind, m)  # noqa: E731
            *_, mu, rsigma = norm(x, gamma, kind)
            yield f"{kind}, gradient, rows of {k}", back, (x, x, mu, rsigma, gamma)
            for name, mode in MODES.items():
                qvalue = lambda m, x, gamma, kind=kind, mode=mode: norm(  # noqa: E731
                    x, gamma, kind, m, scaling_mode=mode
                )
                yield f"{kind}, {name} by row, rows of {k}", qvalue, (x, gamma)


def activation_cases(side, dtype):
    """Those of the activations, as ``cases`` has them."""
    for names in ACTIVATIONS[:2]:
        text = ", ".join(names)
        x, dz = normal(side, len(names), side, dtype=dtype), normal(side, side, dtype=dtype)
        for name, mode in {"numbers": 0, **MODES}.items():
            forward = lambda m, x, names=names, mode=mode: act(  # noqa: E731
                x, names, m, scaling_mode=mode
            )
            yield f"{text}, {name}", forward, (x,)
            back = lambda m, dz, x, names=names, mode=mode: act_backward(  # noqa: E731
                dz, x, names, m, False, scaling_mode=mode
            )
            yield f"{text}, gradient, {name}", back, (dz, x)


def expert_cases(side, dtype):
    """Those of mixtures of experts, as ``cases`` has them."""
    x = normal(side, side // 4, dtype=dtype)
    sizes = jnp.full((8,), side // 8, jnp.int32)
    for name, mode in MODES.items():
        yield (
            f"grouped_quantize, {name}, both ways, 8 groups",
            lambda m, x, sizes, mode=mode: grouped(x, sizes, m, mode),
            (x, sizes),
        )
    for experts in (64, 256):
        logits = normal(side * side // 8 // experts, experts, dtype=dtype)
        groups = {"num_groups": 8, "group_topk": 4, "score": "sigmoid"}
        for text, options in (("softmax", {}), ("sigmoid in groups", groups)):
            text = f"router, {text}, 8 of {experts}"
            run = lambda m, x, options=options: route(x, m, **options)  # noqa: E731
            yield text, run, (logits,)
            back = lambda m, dz, x, options=options: route_backward(dz, x, m, **options)  # noqa: E731
            yield f"{text}, with its gradient", back, (logits, logits)
        counts = jnp.ones((experts,), jnp.int32)
        yield (
            f"router, loss of {experts} with its gradient",
            lambda m, probs, counts: loss_and_slope(probs, counts, m),
            (logits, counts),
        )
    yield from cuda_experts.cases(side, dtype)


def matmuls(side):
    """(name, function of quantized values and of floats, the same in XLA, operands, operations)."""
    floats = [normal(side, side, dtype=jnp.bfloat16) for _ in range(2)]
    none = jnp.zeros((0,))

    def in_xla(lhs, lhs_scale, rhs, rhs_scale, x, w):
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

    for name, mode, code in (
        ("bf16", 0, None),
        ("float8, tensor", 1, jnp.float8_e4m3fn),
        ("float8, channel", 64, jnp.float8_e4m3fn),
        ("float8, mx", 2, jnp.float8_e4m3fn),
        ("int8, channel", 64, jnp.int8),
    ):

        def run(lhs, lhs_scale, rhs, rhs_scale, x, w, mode=mode):
            return matmul(lhs, lhs_scale, rhs, rhs_scale, none, mode)

        args = (*factors(side, side, side, mode, code), *floats)
        # Where there is no kernel, the op is plain JAX, and not in quantized values.
        if "te_ffi_kernels.gemm_v2" in jax.jit(run).lower(*args).as_text():
            yield f"gemm_v2, {name}", run, in_xla, args, 2 * side**3


ROWS = (1, 4, 8, 9, 16, 32, 64, 128, 129, 256, 257, 512, 1024, 2048, 4096)
"""The rows at which ways part, and those between: limits are set from these."""


def packed_matmuls(side):
    """As `matmuls`, of rows with packed weights, and the bytes that must be read."""
    w = normal(side, side, dtype=jnp.bfloat16)
    for run, bits in (
        (te.gemm_w8a16, 8),
        (te.gemv_w4, 4),
        (te.gemm_w8a8, 8),
        (te.gemm_w4a8, 4),
    ):
        for group in (0, 32, 128):
            weight = packed(side, side, bits, side // group if group else 1)
            for rows in ROWS:
                x = normal(rows, side, dtype=jnp.bfloat16)
                kernel = lambda x, weight, w, run=run: run(x, weight)  # noqa: E731
                label = f"{run.__name__}, {rows} rows" + (f", groups of {group}" if group else "")
                in_xla = lambda x, weight, w: x @ w  # noqa: E731
                yield label, kernel, in_xla, (x, weight, w), 2 * rows * side**2, weight.nbytes


def packing(side):
    """As `cases`, of packing a weight."""
    qvalue = jnp.asarray(np.random.default_rng().integers(-7, 8, (side, side), np.int8))
    scale = jnp.ones((1, side))
    for bits in MATMULS:
        run = lambda m, *given, bits=bits: getattr(m, f"pack_w{bits}")(*given)  # noqa: E731
        yield f"pack_w{bits}", run, (qvalue, scale)


def attentions(side):
    """As `matmuls`, beside XLA's own call of cuDNN, forward and with gradients."""
    length, heads = max(side // 2, 8), 16
    on_gpu = jax.default_backend() == "gpu"
    in_xla = partial(jax.nn.dot_product_attention, implementation="cudnn" if on_gpu else None)
    for size in (64, 128):
        args = tuple(normal(2, length, heads, size, dtype=jnp.bfloat16) for _ in range(3))
        for causal in (False, True):
            ours = partial(attend, mask=CAUSAL if causal else 0)
            theirs = partial(in_xla, is_causal=causal)
            # Two matmuls, of which a causal mask needs half; five more for gradients.
            flops = 4 * 2 * heads * length**2 * size // (2 if causal else 1)
            name = f"attention, heads of {size}{', causal' if causal else ''}"
            yield name, ours, theirs, args, flops
            both = [
                jax.grad(lambda *qkv, fn=fn: jnp.sum(fn(*qkv).astype(jnp.float32)), (0, 1, 2))
                for fn in (ours, theirs)
            ]
            yield f"{name}, with gradients", *both, args, flops * 7 // 2


def measure(path, side):
    """Writes seconds and bytes of each case and of a copy, and operations of matmuls."""
    found = []
    for label, dtype in DTYPES.items():
        x = normal(side, side, dtype=dtype)
        seconds, moved = compare({"kernel": jnp.negative}, (x,))
        copy = moved / seconds["kernel"]
        more = packing(side) if dtype == jnp.float32 else ()
        for name, run, args in itertools.chain(cases(side, dtype), more):
            sides = {"kernel": partial(run, te), "xla": partial(run, reference)}
            seconds, moved = compare(sides, args)
            found.append(
                {
                    "case": f"{name}, {label}",
                    "seconds": seconds,
                    "bytes": moved,
                    "copy_bytes_per_second": copy,
                }
            )
            print(found[-1], file=sys.stderr)
    half = side // 2
    for name, run, in_xla, args, flops, *read in itertools.chain(
        matmuls(half), packed_matmuls(half), attentions(half)
    ):
        seconds, _ = compare({"kernel": run, "xla": in_xla}, args)
        found.append({"case": name, "seconds": seconds, "flops": flops})
        if read:
            found[-1] |= {"read": read[0], "copy_bytes_per_second": copy}
        print(found[-1], file=sys.stderr)
    device = jax.devices()[0]
    run = {"device": device.device_kind, "jax": jax.__version__, "side": side, "results": found}
    with open(path, "w") as file:
        json.dump(run, file, indent=1)


def main():
    """Does what the command line says."""
    global ROUNDS, ROWS
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("exercise", "measure"))
    parser.add_argument("out", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        ROUNDS, ROWS = 2, ROWS[:1]
        for label in ("f32", "f16"):
            del DTYPES[label]
    if args.what == "exercise":
        exercise()
        return
    measure(args.out, 256 if args.tiny else 16384)


if __name__ == "__main__":
    main()

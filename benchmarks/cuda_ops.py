"""The ops that have CUDA kernels: one call of each family, and each beside XLA and beside a copy.

    python benchmarks/cuda_ops.py calls           # each family once: which kernels ran, which not
    python benchmarks/cuda_ops.py measure OUT.json [--only packed matmuls attention references]

Runs where JAX puts arrays. What is measured is written after each case, most important cases first,
so that a run that is cut off has them. With --tiny, sizes are those of a rehearsal.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
import traceback
from functools import partial

import cuda_experts
import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
import te_ffi_kernels as te
from te_ffi_kernels import reference

ONE, ZERO = np.ones((1,), np.float32), np.zeros((1,), np.float32)
KINDS = ("scaled", "scaled_masked", "scaled_upper_triang_masked")
MODES = {"tensor": 1, "mx": 2, "channel": 64}
MATMULS = {8: te.gemm_w8a16, 4: te.gemm_w4a16}
NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = (("gelu",), ("silu", "linear"), ("squared_relu",), ("clamped_silu", "clamped_linear"))
CAUSAL = 2
ROUNDS, CALLS = 5, 3
ROWS = (1, 8, 16, 17, 32, 128, 512, 4096)
COPIES, MOST_BYTES = 16, 6e9
"""Of each operand, as many as there is memory for: the GPU's cache has 50 MB."""


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


def factors(m, n, k, mode, codes, dtype=jnp.bfloat16):
    """(lhs, its scales, rhs, its scales), in quantized values of `codes` where there is a mode."""
    found = []
    for rows, code in zip((m, n), codes, strict=True):
        x = normal(rows, k, dtype=dtype)
        if mode == 0:
            found += [x, jnp.zeros((0,))]
        else:
            qvalue, _, scales, *_ = quantize(x, mode=mode, layout=0, out=code)
            found += [qvalue, scales]
    return found


def packed(k, n, bits, groups=1):
    """A weight."""
    most = 2 ** (bits - 1) - 1
    qvalue = jnp.clip(jnp.round(normal(k, n, dtype=jnp.float32) * most / 3), -most, most)
    scale = 0.5 + jnp.abs(normal(groups, n, dtype=jnp.float32))
    return (te.pack_w8 if bits == 8 else te.pack_w4)(qvalue.astype(jnp.int8), scale)


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


@functools.cache
def pool():
    """Numbers that arrays are filled with, again and again: to draw all takes seconds."""
    return jnp.asarray(np.random.default_rng().normal(size=(1 << 20) + 7), jnp.float32)


def normal(*shape, dtype):
    """Numbers that no program knows."""
    return jnp.resize(pool(), shape).astype(dtype)


def families():
    """(name, op, function, operands) of one call of each family, small."""
    bf16, none = jnp.bfloat16, jnp.zeros((0,))
    x, row = normal(96, 160, dtype=bf16), normal(160, dtype=bf16)
    logits = normal(2, 3, 7, 64, dtype=bf16)
    for name, mode in MODES.items():
        run = partial(quantize, mode=mode)
        yield f"dbias_quantize, {name}", "dbias_quantize", run, (x,)
        qvalue, _, scales, *_ = quantize(x, mode=mode, layout=0)
        run = partial(dequantize, mode=mode)
        yield f"dequantize, {name}", "dequantize", run, (qvalue, scales)
    yield "softmax", "scaled_softmax_forward", te.softmax, (logits,)
    run = partial(backward, kind="scaled")
    yield "softmax, gradient", "scaled_softmax_backward", run, (logits, logits)
    for kind in NORMS:
        yield kind, "norm_forward", partial(norm, kind=kind), (x, row)
        given = x, x, *norm(x, row, kind)[-2:], row
        yield f"{kind}, gradient", "norm_backward", partial(norm_backward, kind=kind), given
    pairs, names = normal(96, 2, 160, dtype=bf16), ("silu", "linear")
    yield "activation", "act_lu", partial(act, names=names), (pairs,)
    run = partial(act_backward, names=names)
    yield "activation, gradient", "dact_dbias_quantize", run, (x, pairs)
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    for m, n, k in ((96, 160, 64), (33, 70, 96)):
        for name, mode, codes in (
            ("bf16", 0, (None, None)),
            ("float8, channel", 64, (e4m3, e4m3)),
            ("int8, channel", 64, (jnp.int8, jnp.int8)),
            ("float8, tensor", 1, (e4m3, e4m3)),
            ("float8 e5m2 x e4m3", 1, (e5m2, e4m3)),
        ):
            run = partial(matmul, mode=mode)
            given = (*factors(m, n, k, mode, codes), none)
            yield f"gemm_v2, {name}, {m} x {k} x {n}", "gemm_v2", run, given
    for bits, groups in ((8, 1), (4, 1), (4, 3)):
        weight = packed(96, 70, bits, groups)
        for rows in (1, 9, 130, 260):
            for run in (MATMULS[bits], te.gemm_w8a8 if bits == 8 else te.gemm_w4a8):
                name = f"{run.__name__}, {rows} rows, {groups} groups"
                yield name, run.__name__, run, (normal(rows, 96, dtype=bf16), weight)
    run = lambda x: grouped(x, [64, 0, 96])  # noqa: E731
    yield "grouped_quantize", "grouped_quantize", run, (normal(160, 160, dtype=bf16),)
    scores, counts = normal(7, 96, dtype=bf16), jnp.ones((96,), jnp.int32)
    yield "router", "fused_topk_with_score_function", route, (scores,)
    yield "router's loss", "fused_moe_aux_loss", loss_and_slope, (scores, counts)
    tokens, probs = normal(300, 160, dtype=bf16), normal(300, 40, dtype=bf16)
    run = partial(cuda_experts.there_and_back, te, align=16)
    given = tokens, cuda_experts.routed(300, 40), probs
    yield "tokens to experts and back", "permute_with_mask_map", run, given
    given = (
        normal(37, 64, dtype=bf16),
        normal(3, 64, 48, dtype=bf16),
        jnp.asarray([3, 0, 29], jnp.int32),
    )
    run = partial(cuda_experts.multiply, te)
    yield "matmuls of groups", "grouped_gemm_v2", run, given
    run = lambda x: te.topk(x, 100)  # noqa: E731
    yield "topk", "topk", run, (normal(3, 5000, dtype=bf16),)
    qkv = tuple(normal(2, 72, heads, 32, dtype=bf16) for heads in (4, 2, 2))
    for name, options in {
        "attention": {},
        "attention, causal": {"mask": CAUSAL},
        "attention in a window": {"mask": CAUSAL, "window_size": (9, 0)},
        "attention, padded": {"mask": 1, "lengths": (jnp.asarray([72, 9]), jnp.asarray([72, 0]))},
        "attention with dropout": {"dropout": 0.1},
        "attention of segments": {"mask": 3, "layout": 14},
    }.items():
        run = partial(attend, **options)
        yield name, "fused_attn_forward", run, qkv
        slopes = lambda q, k, v, run=run: jax.vjp(run, q, k, v)[1](q)  # noqa: E731
        yield f"{name}, gradient", "fused_attn_backward", slopes, qkv


def is_finite(tree):
    """Whether no number is NaN or infinite; a byte may be anything."""
    floats = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1
    ]
    return all(bool(jnp.isfinite(leaf).all()) for leaf in floats)


def calls():
    """Calls each family. Prints which ran as a kernel, and returns whether none failed."""
    good = True
    for name, op, run, args in families():
        start = time.perf_counter()
        try:
            lowered = jax.jit(run).lower(*args)
            found = jax.block_until_ready(lowered.compile()(*args))
            kernel = f"te_ffi_kernels.{op}" in lowered.as_text()
            what = "kernel" if kernel else "plain JAX"
            if not is_finite(found):
                good, what = False, f"{what}, NOT FINITE"
        except Exception:  # one that fails is named, and the others are called all the same
            good, what = False, f"FAILED\n{traceback.format_exc(limit=-3)}"
        print(f"{name:45} {time.perf_counter() - start:6.2f} s  {what}", flush=True)
    return good


def size_of(tree):
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compare(sides):
    """Seconds of a call of each side, a (function, operands): medians, sides in turn.

    A program calls a side once for each of several copies of its operands: no operand is still in a
    cache, and what starting a program takes (a tenth of a millisecond, where some kernels need a
    fiftieth) is divided by their number.
    """
    programs, seconds = {}, {name: [] for name in sides}
    for name, (fn, args) in sides.items():
        leaves, tree = jax.tree.flatten(args)
        count = int(min(COPIES, max(2, MOST_BYTES // size_of(args))))
        sets = [leaves, *([jnp.copy(leaf) for leaf in leaves] for _ in range(count - 1))]
        each = jax.jit(lambda *sets, fn=fn, tree=tree: [fn(*tree.unflatten(one)) for one in sets])
        jax.block_until_ready(each(*sets))
        programs[name] = each, sets
    for _ in range(ROUNDS):
        for name, (run, sets) in programs.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                out = run(*sets)
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - start) / CALLS / len(sets))
            del out
    return {name: statistics.median(found) for name, found in seconds.items()}


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


def moved(run, args):
    """Bytes of operands and results."""
    return size_of(args) + size_of(jax.eval_shape(run, *args))


def multiply_int8(x, weight):
    """Rows are rounded to int8 first, as plans do it."""
    return qn.matmul(qn.quantize(x, "int8", channel_axes=(0,)), weight)


def packed_matmuls(side):
    """(label, sides of which "xla" is in bfloat16, what is known of them) of rows with weights."""
    w = normal(side, side, dtype=jnp.bfloat16)
    forms = {}
    for bits, group, ops in (
        (8, None, (te.gemm_w8a16, te.gemm_w8a8)),
        (4, 128, (te.gemm_w4a16, te.gemm_w4a8)),
        (4, 32, (te.gemm_w4a16,)),
    ):
        text = f", groups of {group}" if group else ""
        weight = packed(side, side, bits, side // group if group else 1)
        for run in ops:
            forms[f"{run.__name__}{text}"] = run, weight
        if group == 32:
            continue
        # What a plan runs where it packs no weight.
        tiles = {0: group} if group else None
        weight = qn.quantize(w, f"int{bits}", channel_axes=(1,), tile_axes=tiles)
        forms[f"XLA, int{bits}{text}"] = qn.matmul, weight
        if not group:
            forms["XLA, int8 times int8"] = multiply_int8, weight
    for rows in ROWS:
        x = normal(rows, side, dtype=jnp.bfloat16)
        sides, known = {"xla": (jnp.matmul, (x, w))}, {}
        for name, (run, weight) in forms.items():
            sides[name] = run, (x, weight)
            known[name] = {"flops": 2 * rows * side**2}
            if not name.startswith("XLA"):
                known[name]["read"] = weight.nbytes
        yield f"{rows} rows, ", sides, known


def matmuls(side):
    """The same of quantized matmuls, ours and XLA's own, beside bfloat16."""
    x, w = (normal(side, side, dtype=jnp.bfloat16) for _ in range(2))
    none, dims = jnp.zeros((0,)), (((1,), (1,)), ((), ()))
    e4m3, e5m2, int8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
    sides = {"xla": (partial(jax.lax.dot_general, dimension_numbers=dims), (x, w))}
    for name, mode, codes, in_xla in (
        ("bf16", 0, (None, None), False),
        ("float8, tensor", 1, (e4m3, e4m3), True),
        ("float8 e5m2 x e4m3, tensor", 1, (e5m2, e4m3), True),
        ("float8, channel", 64, (e4m3, e4m3), False),
        ("int8, channel", 64, (int8, int8), True),
    ):
        given = factors(side, side, side, mode, codes)
        run = partial(matmul, mode=mode)
        # Where there is no kernel, the op is plain JAX, and not in quantized values.
        text = jax.jit(run).lower(*given, none).as_text()
        label = f"gemm_v2, {name}"
        label += "" if "te_ffi_kernels.gemm_v2" in text else " (no kernel)"
        sides[label] = run, (*given, none)
        if in_xla:
            out = jnp.int32 if codes[0] == int8 else jnp.bfloat16
            own = partial(jax.lax.dot_general, dimension_numbers=dims, preferred_element_type=out)
            sides[f"XLA's own dot, {name}"] = own, (given[0], given[2])
    yield "", sides, {name: {"flops": 2 * side**3} for name in sides}


def attentions(side):
    """The same of attention beside XLA's own call of cuDNN, forward and with gradients."""
    length, heads, size = max(side // 2, 8), 16, 128
    on_gpu = jax.default_backend() == "gpu"
    in_xla = partial(jax.nn.dot_product_attention, implementation="cudnn" if on_gpu else None)
    args = tuple(normal(2, length, heads, size, dtype=jnp.bfloat16) for _ in range(3))
    for causal in (True, False):
        ours = partial(attend, mask=CAUSAL if causal else 0)
        theirs = partial(in_xla, is_causal=causal)
        # Two matmuls, of which a causal mask needs half; five more for gradients.
        flops = 4 * 2 * heads * length**2 * size // (2 if causal else 1)
        name = f"attention, heads of {size}{', causal' if causal else ''}"
        yield "", {"xla": (theirs, args), name: (ours, args)}, {name: {"flops": flops}}
        slopes = f"{name}, with gradients"
        both = {
            label: (
                jax.grad(lambda *qkv, fn=fn: fn(*qkv).astype(jnp.float32).sum(), (0, 1, 2)),
                args,
            )
            for label, fn in (("xla", theirs), (slopes, ours))
        }
        yield "", both, {slopes: {"flops": flops * 7 // 2}}


def packing(side):
    """As `cases`, of packing a weight."""
    qvalue = jnp.ones((side, side), jnp.int8)
    scale = jnp.ones((1, side))
    for bits in MATMULS:
        run = lambda m, *given, bits=bits: getattr(m, f"pack_w{bits}")(*given)  # noqa: E731
        yield f"pack_w{bits}", run, (qvalue, scale)


FIRST = (
    "quantize, tensor, by row",
    "quantize, tensor, both ways",
    "quantize, channel, both ways",
    "dequantize, tensor",
    "scaled_softmax, rows of 4096",
    "scaled_softmax, gradient, rows of 4096",
    "rmsnorm, rows of 4096",
    "rmsnorm, gradient, rows of 4096",
    "silu, linear, numbers",
)
"""Of the cases beside a copy, those that are measured first."""


def of_references(side):
    """The cases beside the ops' references in XLA: those of FIRST before the others."""
    found = [*cases(side, jnp.bfloat16), *packing(side)]
    # Stable: among the others the order stays.
    for name, run, args in sorted(found, key=lambda case: case[0] not in FIRST):
        sides = {name: (partial(run, te), args), "xla": (partial(run, reference), args)}
        yield "", sides, {name: {"bytes": moved(*sides[name])}}


PARTS = {
    "packed": packed_matmuls,
    "matmuls": matmuls,
    "attention": attentions,
    "references": of_references,
}


def measure(path, side, parts):
    """Writes seconds of each case and its bytes or operations, after each case."""
    device, found = jax.devices()[0], []
    # A negation reads and writes one array.
    given = jnp.negative, (normal(side, side, dtype=jnp.bfloat16),)
    copy = moved(*given) / compare({"copy": given})["copy"]
    print(f"a copy: {copy / 1e12:.2f} TB/s", flush=True)
    for prefix, sides, known in itertools.chain(*(PARTS[part](side) for part in parts)):
        try:
            seconds = compare(sides)
        except Exception:  # the others are measured all the same
            print(
                f"{prefix}{', '.join(sides)}: FAILED\n{traceback.format_exc(limit=-2)}", flush=True
            )
            continue
        for name in sides:
            if name == "xla" or name not in known:
                continue
            two = {"kernel": seconds[name], "xla": seconds["xla"]}
            row = {"case": prefix + name, "seconds": two, "copy_bytes_per_second": copy}
            found.append(row | known[name])
            ours, theirs = two["kernel"] * 1e6, two["xla"] * 1e6
            print(
                f"{row['case']:60} {ours:9.1f} us, XLA {theirs:9.1f}, {theirs / ours:.2f} x",
                flush=True,
            )
        run = {"device": device.device_kind, "jax": jax.__version__, "side": side, "results": found}
        with open(path, "w") as file:
            json.dump(run, file, indent=1)


def main():
    """Does what the command line says."""
    global ROUNDS, ROWS, COPIES
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("calls", "measure"))
    parser.add_argument("out", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    if args.tiny:
        ROUNDS, ROWS, COPIES = 2, ROWS[:1], 2
    if args.what == "calls":
        sys.exit(0 if calls() else 1)
    measure(args.out, 256 if args.tiny else 8192, args.only)


if __name__ == "__main__":
    main()

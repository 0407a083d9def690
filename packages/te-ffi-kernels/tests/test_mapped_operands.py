"""Every op under ``vmap``, any three of its operands mapped or not, in all combinations.

The calls are those that ``jaxtap ops`` reads signatures off, in tiny sizes, and a few with the
operands that these lack. Each op that such a call reaches is called with its operands as they are.
"""

import contextlib
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import te_ffi_kernels as te
from te_ffi_kernels import _bench, _bench_others
from te_ffi_kernels.op import Op

MATMULS = ("gemm_w8a8", "gemm_w8a16", "gemm_w4a16", "gemm_w4a8")
PARTS = ("bias", "residual")
KINDS = ((), ("index",), ("group_sizes",), PARTS, ("index", *PARTS))
"""What matmuls are given beside x and a weight."""
ROWS, K, N = 8, 64, 48
SIZES = {2: (64, 32), 4: (2, 8, 2, 16)}
"""By number of axes: small sizes of what ``_bench_others`` calls."""


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def multiplied(rng, op, kind):
    weight = _bench._packed(4 if "w4" in op else 8, K, N)
    given = {
        "bias": normal(rng, N),
        "residual": normal(rng, ROWS, N),
        "index": jnp.int32(1),
        "group_sizes": jnp.full(4, ROWS // 4, jnp.int32),
    }
    if {"index", "group_sizes"} & {*kind}:
        weight = jax.tree.map(lambda one: jnp.stack([one] * 4), weight)
    getattr(te, op)(normal(rng, ROWS, K), weight, **{name: given[name] for name in kind})


def rotated(rng):
    weight = _bench._packed(8, K, N)
    signs = jnp.asarray(rng.choice([-1, 1], K), jnp.int8)
    given = {"bias": normal(rng, N), "residual": normal(rng, ROWS, N)}
    te.gemm_w8a8(normal(rng, ROWS, K), weight, signs=signs, rotation=32, **given)


def scaled(rng):
    weight, given = _bench._packed(4, K, N), {"bias": normal(rng, N)}
    te.gemm_w4a8(normal(rng, ROWS, K), weight, x_scale=jnp.float32(rng.uniform(0.01, 0.1)), **given)


def convolved(rng, scaled):
    given = {"bias": normal(rng, 16), "residual": normal(rng, 2, 3, 4, 16), "clamp": (-1.0, 1.0)}
    given |= {"x_scale": jnp.float32(rng.uniform(0.01, 0.1))} if scaled else {}
    te.conv_w8a8(normal(rng, 2, 5, 6, 4), _bench._packed(8, 36, 16), (3, 3), **given)


def convolved_floats(rng):
    given = {"bias": normal(rng, 16), "residual": normal(rng, 2, 3, 4, 16), "clamp": (-1.0, 1.0)}
    weight = _bench._packed(8, 9, 16)
    te.conv_w8a16(normal(rng, 2, 5, 6, 16), weight, (3, 3), groups=16, **given)


def rows_of_experts(rng):
    stack = jax.tree.map(lambda one: jnp.stack([one] * 3), _bench._packed(8, K, N))
    index, sizes = (jnp.asarray(rng.permutation(x), jnp.int32) for x in ([0, 2], [3, 5]))
    te.gemm_w8a8(normal(rng, ROWS, K), stack, index=index, group_sizes=sizes)


def looked_up_rows(rng):
    te.packed_take(_bench._packed(4, K, N), jnp.asarray(rng.integers(0, K, 5), jnp.int32), axis=0)


def cached(rng, stacked, per_sequence):
    lead = (3,) if stacked else ()
    cache = (*lead, 2, 2, 8, 16)
    keys, values = (jnp.asarray(rng.integers(-127, 128, cache), jnp.int8) for _ in "kv")
    scales = [jnp.asarray(rng.uniform(0.01, 0.1, cache[:-1]), jnp.float32) for _ in "kv"]
    mask = jnp.asarray(rng.random((2 if per_sequence else 1, 1, 8)) < 0.8)
    length = jnp.asarray(rng.integers(3, 8, (2,) if per_sequence else ()), jnp.int32)
    index = jnp.int32(rng.integers(3)) if stacked else None
    te.decode_attention(
        normal(rng, 2, 2, 4, 16), keys, values, length,
        key_scale=scales[0], value_scale=scales[1], mask=mask, index=index,
    )  # fmt: skip


def attention(rng, softmax, *, padded):
    kinds = te.AttnBiasType.POST_SCALE_BIAS, te.AttnMaskType.NO_MASK
    sequences = None
    if padded:
        kinds = kinds[0], te.AttnMaskType.PADDING_MASK
        lengths = [jnp.asarray(rng.integers(2, 9, 2), jnp.int32) for _ in "qk"]
        sequences = te.SequenceDescriptor.from_seqlens(tuple(lengths))
    qkv = tuple(normal(rng, 2, 8, 2, 16) for _ in range(3))
    offset = None if softmax == "VANILLA_SOFTMAX" else normal(rng, 1, 2, 1, 1)

    def run(qkv, bias, offset):
        layout, softmax_type = te.QKVLayout.BSHD_BSHD_BSHD, te.AttnSoftmaxType[softmax]
        given = qkv, bias, sequences, None, *kinds, layout, softmax_type, 0.25, 0.0, True
        return te.fused_attn(*given, softmax_offset=offset)

    out, back = jax.vjp(run, qkv, normal(rng, 1, 2, 8, 8), offset)
    back(normal(rng, *out.shape))


def quantized(rng, mode, layout):
    given = "int8", te.ScalingMode[mode], te.QuantizeLayout[layout]
    one, scale = jnp.ones(8), jnp.asarray(rng.uniform(1, 2, 1), jnp.float32)
    x, amax = normal(rng, 16, 8), jnp.asarray(rng.uniform(0, 3, 1), jnp.float32)
    te.normalization_fwd(x, one, one, False, 1e-5, "layernorm", *given, scale, amax)
    te.act_lu(x[:, None], ("gelu",), None, *given, scale, amax)
    te.quantize_dact_dbias(x[::-1], x[:, None], ("gelu",), True, None, *given, scale, amax)
    nothing = jnp.zeros(0, jnp.float32)
    te.dbias_quantize(
        x, scale, amax, nothing.astype(jnp.uint32), nothing, nothing, *given, is_dbias=True
    )


def scaled_matmul(rng):
    lhs, rhs = (jnp.asarray(rng.normal(size=s), jnp.float8_e4m3fn) for s in ((16, 32), (8, 32)))
    scales = [jnp.asarray(rng.uniform(0.5, 2, 1), jnp.float32) for _ in range(4)]
    te.gemm_v2(
        lhs, scales[0], rhs, scales[1], normal(rng, 8), scales[2], 0 * scales[3], "float32",
        ((1,), (1,)), te.ScalingMode.CURRENT_TENSOR_SCALING,
    )  # fmt: skip


def routed(rng):
    te.fused_topk_with_score_function(
        normal(rng, 16, 8), 2, score_function="sigmoid", expert_bias=normal(rng, 8)
    )


MORE = {
    "rotated": rotated,
    "scaled": scaled,
    "convolved": functools.partial(convolved, scaled=False),
    "convolved, scaled": functools.partial(convolved, scaled=True),
    "convolved floats": convolved_floats,
    "rows of experts": rows_of_experts,
    "looked up rows": looked_up_rows,
    **{
        f"cached {stacked} {each}": functools.partial(cached, stacked=stacked, per_sequence=each)
        for stacked in (False, True)
        for each in (False, True)
    },
    **{
        f"attention {softmax} {padded}": functools.partial(
            attention, softmax=softmax, padded=padded
        )
        for softmax in ("VANILLA_SOFTMAX", "LEARNABLE_SOFTMAX")
        for padded in (False, True)
    },
    **{
        f"quantized {mode} {layout}": functools.partial(quantized, mode=mode, layout=layout)
        for mode in ("DELAYED_TENSOR_SCALING", "CURRENT_TENSOR_SCALING")
        for layout in ("ROWWISE", "ROWWISE_COLWISE")
    },
    "scaled matmul": scaled_matmul,
    "routed": routed,
}


def benched(op):
    make, sizes = _bench_others._CALLS[op]
    return make("float32", SIZES[len(sizes[0])])


CALLS = {
    **{" ".join([op, *kind]): functools.partial(multiplied, op=op, kind=kind)
       for op in MATMULS for kind in KINDS},
    **{op: lambda rng, op=op: (lambda fn, given: fn(*given))(*benched(op))
       for op in _bench_others._CALLS},
    **MORE,
}  # fmt: skip


OF_ALL = "fake_quantize"
"""Under ``vmap`` of its rows it has one range for all, as its own tests of ``vmap`` say."""


FOUND = []


def record(op, config, *operands):
    FOUND.append((op, config, operands))


@pytest.fixture(scope="module", autouse=True)
def no_caches():
    """A function that was traced before records nothing, and one that is traced here would."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def ops_of(call, seed):
    """Return the ops that a call reaches, each with its config and operands."""
    run, generator = Op.__call__, np.random.default_rng

    def recorded(self, config, *operands):
        # Operands of a gradient are known where it runs, not where it is traced.
        jax.debug.callback(functools.partial(record, self, config), *operands)
        with jax.disable_jit(False):
            return run(self, config, *operands)

    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "__call__", recorded)
        # Other numbers for each seed.
        patch.setattr(np.random, "default_rng", lambda of=0: generator([seed, of]))
        _bench._packed.cache_clear()
        stack.enter_context(jax.disable_jit())
        stack.callback(_bench._packed.cache_clear)
        FOUND.clear()
        call(np.random.default_rng(9))
        jax.effects_barrier()
    return FOUND[:]


def varied(x, y):
    """Return two operands that differ, where the call has the same twice."""
    x, y = np.asarray(x), np.asarray(y)
    if jnp.issubdtype(x.dtype, jnp.floating) and (x == y).all():
        y = (1.5 * y.astype(np.float32)).astype(y.dtype)
    return np.stack([x, y])


def in_scan(fn):
    def looped(*operands):
        found = lax.scan(lambda carry, _: (carry, fn(*operands)), 0, None, length=1)[1]
        return jax.tree.map(lambda x: x[0], found)

    return looped


CHECKED = {}
"""By op, config and shapes: the first call that reached it, whose case checks it."""


@pytest.mark.parametrize("name", [name for name in CALLS if name != OF_ALL])
@pytest.mark.sample(1)
def test_all_combinations(name):
    first, second = (ops_of(CALLS[name], seed) for seed in (0, 1))
    assert [call[:2] for call in first] == [call[:2] for call in second]
    assert first
    for (op, config, one), (_, _, other) in zip(first, second, strict=True):
        shapes = tuple((np.shape(x), str(jnp.result_type(x))) for x in one)
        if CHECKED.setdefault((id(op), config, shapes), name) == name:
            check(functools.partial(op, config), one, other)


def check(fn, one, other):
    # What is empty stands for an operand that a call lacks.
    whole = [i for i, x in enumerate(one) if np.size(x)]
    stacks = {i: varied(one[i], other[i]) for i in whole}
    maps = [
        which
        for which in itertools.product((0, 1), repeat=len(whole))
        # None, all, one, or all but one: any three operands have all their combinations.
        if min(sum(which), len(whole) - sum(which)) <= 1
    ]
    single = jax.jit(fn)

    def called(places):
        at = dict(zip(whole, places, strict=True))
        found = single(*(stacks[i][at[i]] if i in at else x for i, x in enumerate(one)))
        return [as_floats(x) for x in jax.tree.leaves(found)]

    wanted = {which: called(which) for which in maps}
    # In a loop, each operand alone: the rule is the same there.
    cases = [(which, False) for which in maps[1:]]
    cases += [(which, True) for which in maps[1:] if sum(which) in (1, len(whole))]

    @jax.jit
    def mapped(stacks):
        found = []
        for which, nested in cases:
            at = dict(zip(whole, which, strict=True))
            axes = [0 if at.get(i) else None for i in range(len(one))]
            operands = [
                (stacks[i] if at[i] else stacks[i][0]) if i in at else jnp.asarray(x)
                for i, x in enumerate(one)
            ]
            run = in_scan(fn) if nested else fn
            found.append(jax.tree.leaves(jax.vmap(run, axes)(*operands)))
        return found

    for (which, nested), found in zip(cases, jax.device_get(mapped(stacks)), strict=True):
        for x, *of_each in zip(found, wanted[maps[0]], wanted[which], strict=True):
            y = np.stack(of_each)
            assert x.shape == y.shape, which
            # Few rows of floats have more bits in kernels than many.
            near = 1e-4 * np.abs(np.nan_to_num(y, posinf=0, neginf=0)).max(initial=0)
            name = f"mapped: {which}, in a loop: {nested}"
            np.testing.assert_allclose(as_floats(x), y, 1e-4, near, err_msg=name)


def as_floats(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.slow
def test_no_op_is_left_out():
    reached = {id(op) for call in CALLS.values() for op, *_ in ops_of(call, 0)}
    ours = {
        f"{module.__name__}.{name}": value
        for module in list(sys.modules.values())
        if module.__name__.startswith("te_ffi_kernels")
        for name, value in vars(module).items()
        if isinstance(value, Op)
    }
    assert not [name for name, op in ours.items() if id(op) not in reached]

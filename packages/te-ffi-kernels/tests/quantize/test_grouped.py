"""grouped_quantize: each group as dbias_quantize does it with one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te_ffi_kernels as te
from jaxtap_testkit import examples
from jaxtap_testkit.te import formats as expected
from jaxtap_testkit.te.formats import raw
from te_ffi_kernels import QuantizeLayout, ScalingMode, reference

pytestmark = pytest.mark.sample(2)

# The reference is XLA's, whose quotients are off by one on GPUs.
ULPS = 0 if jax.default_backend() == "cpu" else 1
REFERENCE = jax.jit(reference.grouped_quantize, static_argnums=range(3, 8))


@st.composite
def problems(draw):
    mode = draw(st.sampled_from([ScalingMode(1), ScalingMode(2), ScalingMode(3), ScalingMode(64)]))
    layout = draw(st.sampled_from(list(QuantizeLayout)))
    unit = 32 if mode.is_mx and layout.has_colwise else 1
    sizes = np.array(draw(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=4))) * unit
    cols = draw(st.sampled_from([32, 96] if mode.is_mx else [1, 17, 64, 70]))
    middle = draw(st.sampled_from([None, 3]))
    length = sizes.sum() + draw(st.sampled_from([0, 4])) * unit
    shape = (length, cols) if middle is None else (length, middle, cols)
    out = draw(st.sampled_from(list(expected.FORMATS)[: 2 if mode.is_mx else 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = jnp.asarray(rng.normal(size=shape) * 9, jnp.float32)
    x = x.astype(draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])))
    scale = jnp.asarray(rng.uniform(1, 40, len(sizes)), jnp.float32)
    return x, scale, sizes, out, mode, layout


@examples(20)
@given(problems())
def test_each_group_by_itself(problem):
    x, scale, sizes, out, mode, layout = problem
    args = (x, scale, jnp.asarray(sizes, jnp.int32), out, mode, layout, -1, None)
    found = te.grouped_quantize(*args)
    for one, other in zip(found, REFERENCE(*args), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        away = np.abs(raw(one).astype(np.int64) - raw(other))
        assert away.max(initial=0) <= (ULPS if one.dtype == jnp.float32 else 0)
    matrix = np.asarray(x).astype(np.float32).reshape(-1, x.shape[-1])
    rows_each = x.shape[1] if x.ndim == 3 else 1
    parts = [[], [], [], []]
    start = 0
    for size, factor, amax in zip(sizes * rows_each, scale, found[4], strict=True):
        part = matrix[start : start + size]
        start += size
        for axis, at in ((1, 0), (0, 1)):
            if not (layout.has_rowwise, layout.has_colwise)[at]:
                continue
            if mode.is_mx:
                qvalue, scales = expected.mx(part, out, axis)
            elif mode is ScalingMode.CHANNEL_SCALING:
                qvalue, scales = expected.per_channel(part, out, axis)
            else:
                qvalue = expected.per_tensor(part, factor, out)
                scales = (np.float32(1) / np.asarray(factor))[None]
            turned = axis == 0 and not mode.is_mx
            parts[at].append(raw(qvalue.T if turned else qvalue).ravel())
            parts[at + 2].append(raw(scales).ravel())
        assert amax == (np.abs(part).max(initial=0) if mode.is_tensor else 0)
    for i, wanted in enumerate((layout.has_rowwise, layout.has_colwise) * 2):
        if wanted:
            # Of rows that no group has, all is zero.
            rest = np.zeros(found[i].size - sum(map(len, parts[i])), parts[i][0].dtype)
            np.testing.assert_array_equal(raw(found[i]), np.concatenate([*parts[i], rest]))
        else:
            assert raw(found[i]).tolist() == [0]


def grouped(sizes, mode=1, layout=0):
    x = jnp.ones((64, 64))
    sizes = jnp.asarray(sizes, jnp.int32)
    ones = jnp.ones(sizes.shape)
    return jax.block_until_ready(
        te.grouped_quantize(x, ones, sizes, jnp.float8_e4m3fn, mode, layout)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sizes", "mode", "message"),
    [
        ([32, 33], 1, r"the sum of group_sizes must.*got 65"),
        ([65, -1], 1, r"group_sizes\[1\] must.*got -1"),
        ([33, 31], 2, r"the rows of group_sizes\[0\] must be a multiple of 32.*got 33"),
    ],
)
def test_groups_that_cannot_be(sizes, mode, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"grouped_quantize: {message}"):
        grouped(sizes, mode, 2)
    grouped([32, 32], mode, 2)


@pytest.mark.slow
def test_vmap():
    x = jnp.arange(2 * 6 * 4, dtype=jnp.float32).reshape(2, 6, 4)
    sizes = jnp.asarray([[2, 4], [6, 0]], jnp.int32)
    run = lambda x, sizes: te.grouped_quantize(  # noqa: E731
        x, jnp.ones(2), sizes, jnp.float8_e4m3fn, 3, 2
    )
    found = jax.vmap(run)(x, sizes)
    for i in range(2):
        for one, other in zip(found, run(x[i], sizes[i]), strict=True):
            np.testing.assert_array_equal(raw(one[i]), raw(other))

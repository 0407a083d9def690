"""What a handler learns of arrays that a program cuts out of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hijax_trace import StridedView, TraceEngine, shared_array
from interception_core import Interceptor

B, S, H, D = 2, 5, 4, 8
TOGETHER = {
    "split": lambda x: [
        part.reshape(B, S, H, D) for part in jnp.split(x.reshape(B, S, -1), 3, axis=-1)
    ],
    "split of heads": lambda x: jnp.split(x.reshape(B, S, 3 * H, D), 3, axis=2),
    "indexed": lambda x: [x.reshape(B, S, 3, H, D)[:, :, i] for i in range(3)],
    "moved": lambda x: list(jnp.moveaxis(x.reshape(B, S, 3, H, D), 2, 0)),
    "unstacked": lambda x: list(jnp.unstack(x.reshape(B, S, 3, H, D), axis=2)),
    "of something computed": lambda x: jnp.split(
        jnp.tanh(x.reshape(B, S, 3 * H, D)) + 1, 3, axis=2
    ),
    "sizes in front": lambda x: [x.reshape(B, S, H, D, 3)[..., i] for i in range(3)],
}
APART = {
    "computed": lambda x: [2.0 * part for part in jnp.split(x.reshape(B, S, 3 * H, D), 3, axis=2)],
    "others": lambda x: [x.reshape(3, B, S, H, D)[0], jnp.ones((B, S, H, D)), x[: B * S * H * D]],
    "copied": lambda x: [
        jnp.moveaxis(x.reshape(B, S, 3, H, D), i, 0).reshape(-1)[: B * S * H * D] for i in (0, 1, 2)
    ],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TOGETHER)
def test_parts_of_one_array(name):
    found = []
    x = jnp.arange(3.0 * B * S * H * D)

    def run(x):
        parts = TOGETHER[name](x)
        source, lying = shared_array(parts)
        found.append(lying)
        return parts, source

    parts, source = jax.jit(run)(x)
    flat = np.asarray(source).reshape(-1)
    assert flat.size == x.size
    for part, one in zip(parts, found[0], strict=True):
        assert isinstance(one, StridedView)
        bytes_of = tuple(4 * n for n in one.strides)
        view = np.lib.stride_tricks.as_strided(flat[one.offset :], part.shape, bytes_of)
        np.testing.assert_array_equal(view, part)


@pytest.mark.parametrize("name", APART)
def test_parts_of_none(name):
    found = []
    jax.eval_shape(
        lambda x: found.append(shared_array(APART[name](x))), jnp.arange(3.0 * B * S * H * D)
    )
    assert found == [None]


def test_arrays_that_are_not_staged():
    x = jnp.ones(3)
    assert shared_array([x, x, x]) is None


@pytest.mark.slow
def test_in_a_handler():
    found = []

    def handler(call, spec, x, y):
        found.append(shared_array([x, y]))
        return call.proceed(spec, x, y)

    def program(x):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.einsum("ab,ab->a", first, second)

    tapped = TraceEngine().wrap(program, Interceptor({"jax.numpy.einsum": handler}))
    jax.jit(tapped)(jnp.ones((3, 8)))
    (source, lying) = found[0]
    assert source.shape == (3, 8)
    assert lying == [StridedView(0, (8, 1)), StridedView(4, (8, 1))]

"""Kernels: the body of a Pallas kernel is how an operation is computed, not the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .base import Suite, abstractly, arrays, close, once, times

TARGET = "jax.numpy.dot"

halved = jax.jit(lambda x, w: jnp.dot(x, w) / 2)
"""The kernels and the program call it, and each must get its own trace."""


def body(x: Any, w: Any, out: Any) -> None:
    """Write ``x @ w @ w @ w / 4``."""
    out[...] = lax.fori_loop(0, 2, lambda i, c: halved(c, w[...]), jnp.dot(x[...], w[...]))


def kernel_makers(body: Callable, out: Any) -> dict[str, Callable[[], Callable]]:
    """Return functions that make the same kernel of two matrices, by name.

    Args:
        body: takes references of the operands and of the result.
        out: the type of the result.
    """
    # Not at the top: it takes a while, and nobody else needs it.
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    if jax.__version_info__ < (0, 11):
        mesh = tpu.create_tensorcore_mesh("core", num_cores=1)
    else:
        make: Any = tpu.TensorCoreMesh  # pyrefly: ignore [missing-attribute]
        mesh = make(axis_name="core", num_cores=1)

    def on_references() -> Callable:
        kernel: Any = pallas.kernel(body, mesh=mesh, interpret=True)

        def run(x: Any, w: Any) -> Any:
            result = jax.new_ref(jnp.zeros(out.shape, out.dtype))
            kernel(jax.new_ref(x), jax.new_ref(w), result)
            return result[...]

        return run

    return {
        "pallas_call": lambda: pallas.pallas_call(body, out_shape=out, interpret=True),
        "kernel": lambda: pallas.kernel(body, out_type=out, mesh=mesh, interpret=True),
        "kernel on references": on_references,
    }


def programs(name: str) -> list[Callable]:
    """Return programs with a kernel: one that makes it, and one that has it already."""
    make = kernel_makers(body, jax.ShapeDtypeStruct((4, 4), jnp.float32))[name]
    made = make()
    return [
        lambda x, w: halved(make()(x, w), w),
        lambda x, w: halved(made(x, w), w),
        lambda x, w: made(halved(x, w), w),
    ]


class KernelSuite(Suite):
    """Pallas kernels in the program."""

    @pytest.mark.parametrize("name", ["pallas_call", "kernel"])
    def test_the_body_of_a_kernel_runs_as_it_is(self, name: str) -> None:
        x, w = arrays((4, 4), (4, 4))
        a, b = np.asarray(x, np.float64), np.asarray(w, np.float64)
        for program in programs(name):
            close(jax.jit(self.wrap(program, {TARGET: times(3)}))(x, w), 3 * a @ b @ b @ b @ b / 8)

    @pytest.mark.parametrize("name", ["pallas_call", "kernel", "kernel on references"])
    def test_the_body_of_a_kernel_is_not_shown(self, name: str) -> None:
        x, w = arrays((4, 4), (4, 4))
        targets = [(TARGET,), ("jax.lax.dot_general",)]
        targets += [("primitive:dot_general",)] * self.primitives
        for program in programs(name):
            for one in targets:
                assert len(once(self.first_calls(program, (x, w), one, abstractly))) == 1

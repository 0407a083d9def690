"""KernelConformance for the kernels of handlers.cc, right and wrong; test_ffi.py runs it."""

import jax
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from interception_core import KernelSpec, declared_specs, register_kernel
from interception_core.testing import KernelConformance

FLOATS = st.floats(-100, 100, width=32)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


def op_of(target):
    def op(x, *, factor):
        (spec,) = [spec for spec in declared_specs(KernelSpec) if spec.target == target]
        result = jax.ShapeDtypeStruct(x.shape, np.float32)
        call = jax.ffi.ffi_call(register_kernel(spec), result, vmap_method="broadcast_all")
        return call(x, factor=np.float32(factor))

    return staticmethod(op)


class Suite(KernelConformance):
    tolerance = 1e-6
    examples = 20

    def cases(self):
        return [
            ((np.linspace(-1, 1, rows * 3, dtype=np.float32).reshape(rows, 3),), {"factor": 0.7})
            for rows in (1, 2, 4)
        ]

    def reference(self, x, *, factor):
        return x.astype(np.float64) * float(np.float32(factor))


class TestScale(Suite):
    target, op = "acme.Scale", op_of("acme.Scale")


class TestGenerated(Suite):
    target, op = "acme.Scale", op_of("acme.Scale")

    def cases(self):
        operands = st.tuples(hnp.arrays(np.float32, SHAPES, elements=FLOATS))
        return st.tuples(operands, st.fixed_dictionaries({"factor": FLOATS}))


class TestShort(Suite):
    target, op = "acme.Short", op_of("acme.Short")


class TestStale(Suite):
    target, op = "acme.Stale", op_of("acme.Stale")


class TestOneRow(Suite):
    target, op = "acme.OneRow", op_of("acme.OneRow")

    def cases(self):
        return [((np.arange(3, dtype=np.float32),), {"factor": 0.7})]


class TestCareless(Suite):
    target, op = "acme.Careless", op_of("acme.Careless")


class TestNonEmpty(Suite):
    target = "acme.Scale"

    @staticmethod
    def op(x, *, factor):
        return op_of("acme.Scale").__func__(x, factor=factor / x.size * x.size)


class TestElsewhere(Suite):
    target, op = "acme.Scale", staticmethod(lambda x, *, factor: x * np.float32(factor))


class TestUndeclared(Suite):
    target, op = "acme.nothing", op_of("acme.Scale")

"""FormatConformance: what every number format does. Needs pytest."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn

__all__ = ["FormatConformance"]

_DIMS = (((1,), (0,)), ((), ()))


# Whole functions as programs: XLA compiles each operation alone where they run outside of jit. The
# format itself is a part of the key, as another one may have had its name.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized(weight: Any, name: str, kind: Any) -> Any:
    return qn.quantize_for_dot(weight, (0,), name)


_dequantized, _packed, _unpacked = map(jax.jit, (qn.dequantize, qn.pack, qn.unpack))


class FormatConformance:
    """The tests of a number format; subclass it in a test module.

    ::

        class TestNf3(FormatConformance):
            qtype = "nf3"
            tolerance = 0.2

    References are computed by NumPy in float64, from the quantized values and scales alone.

    Attributes:
        qtype: the format's name, as its spec has it.
        tolerance: relative error of normally distributed values, in the root mean square.
    """

    qtype: ClassVar[str]
    tolerance: ClassVar[float] = 0.5

    @property
    def kind(self) -> Any:
        """Return the format."""
        return qn.get_qtype(self.qtype)

    def weight(self, shape: tuple[int, int] = (192, 24), seed: int = 0) -> np.ndarray:
        """Return normally distributed float32 values, some columns much larger than others."""
        rng = np.random.default_rng(seed)
        return (rng.normal(size=shape) * 10.0 ** rng.integers(-2, 3, shape[1])).astype(np.float32)

    def quantized(self, shape: tuple[int, int] = (192, 24), seed: int = 0) -> Any:
        """Return ``weight``, quantized as the right-hand side of a matmul."""
        return self._quantized(self.weight(shape, seed))

    def _quantized(self, weight: Any) -> Any:
        return _quantized(weight, self.qtype, self.kind)

    def test_is_one_format(self) -> None:
        assert self.kind.name == self.qtype
        assert qn.get_qtype(self.qtype) is self.kind

    def test_stored_as_it_says(self) -> None:
        q = self.quantized()
        assert q.qvalue.dtype == self.kind.storage_dtype
        assert q.scale.dtype == self.kind.scale_dtype
        if self.kind.block is not None:
            assert q.scale.shape == (192 // self.kind.block, 24)

    def test_error(self) -> None:
        weight, found = self.weight(), np.asarray(_dequantized(self.quantized()), np.float64)
        error = np.sqrt(np.square(found - weight).mean(0) / np.square(weight).mean(0)).max()
        assert error <= self.tolerance, f"the error is {error:.3g}, above {self.tolerance:g}"

    def test_dequantizes_to_what_values_stand_for(self) -> None:
        q = self.quantized()
        np.testing.assert_allclose(_dequantized(q), _exact(q), rtol=1e-5, atol=1e-30)

    def test_each_value_is_the_nearest(self) -> None:
        """No value of the format is nearer, up to a rounding error."""
        q, weight = self.quantized(), self.weight().astype(np.float64)
        scale = _wide_scale(q)
        book = _book(self.kind)
        wanted = weight / scale
        above = np.searchsorted(book, wanted).clip(1, len(book) - 1)
        nearest = np.minimum(np.abs(wanted - book[above - 1]), np.abs(wanted - book[above])) * scale
        distance = np.abs(_exact(q) - weight)
        # XLA may round to small floats by way of float16, and so twice.
        slack = 1e-3 if self.kind.kind == "float" else 1e-6
        assert (distance <= nearest + 1e-5 * scale + slack * np.abs(weight)).all()

    def test_values_of_the_format_come_back(self) -> None:
        """What was quantized once is quantized to itself."""
        if self.kind.codebook is not None and self.kind.codebook[0] != -self.kind.codebook[-1]:
            return  # the scale of a range, and that of its largest value, differ
        first = np.asarray(_dequantized(self.quantized()))
        again = _dequantized(self._quantized(first))
        np.testing.assert_allclose(again, first, rtol=2e-2, atol=1e-6 * float(abs(first).max()))

    def test_zero(self) -> None:
        q = self._quantized(np.zeros((192, 24), np.float32))
        assert not np.asarray(_dequantized(q)).any()
        if not self.kind.has_zero:
            return
        mixed = self.weight()
        mixed[::2] = 0
        found = np.asarray(_dequantized(self._quantized(mixed)))
        assert not found[::2].any()

    def test_sign(self) -> None:
        found, weight = np.asarray(_dequantized(self.quantized())), self.weight()
        # Without a zero, what is nearest to 0 has one sign.
        least = 0 if self.kind.has_zero else np.abs(_book(self.kind)).min()
        slack = least * _wide_scale(self.quantized())
        assert ((found * weight >= 0) | (np.abs(found) <= slack * 1.001)).all()

    def test_small_and_large(self) -> None:
        """Very small and very large values stay finite."""
        most = min(float(jnp.finfo(self.kind.scale_dtype).max), 1e30) * self.kind.qmax / 4
        for value in (1e-30, most):
            weight = np.full((192, 24), value, np.float32)
            found = np.asarray(_dequantized(self._quantized(weight)))
            assert np.isfinite(found).all(), value
        np.testing.assert_allclose(found, weight, rtol=0.5)

    def test_packed(self) -> None:
        q = self.quantized()
        values = q.qvalue.size * self.kind.bits / 8
        if not self.kind.packable:
            assert self.kind.storage_bits == self.kind.bits
            return
        packed = _packed(q)
        again = _unpacked(packed)
        np.testing.assert_array_equal(again.qvalue, q.qvalue)
        np.testing.assert_array_equal(again.scale, q.scale)
        assert packed.nbytes <= values + q.scale.nbytes + 64, f"{packed.nbytes} bytes"

    def test_matmul(self) -> None:
        q = self.quantized()
        x = np.random.default_rng(1).normal(size=(5, 192)).astype(np.float32)
        expected = x.astype(np.float64) @ _exact(q)
        dot = jax.jit(lambda x, stored: qn.dot_general(x, stored, _DIMS))
        for stored in (q, _packed(q)) if self.kind.packable else (q,):
            found = np.asarray(dot(x, stored), np.float64)
            most = np.abs(expected).max(0)
            assert (np.abs(found - expected) <= 1e-3 * most).all()

    def test_jit_and_vmap(self) -> None:
        weights = np.stack([self.weight(seed=seed) for seed in range(3)])

        def quantize(weight: Any) -> Any:
            return qn.quantize_for_dot(weight, (0,), self.qtype)

        mapped = jax.jit(jax.vmap(lambda weight: qn.dequantize(quantize(weight))))(weights)
        for seed in range(3):
            alone = qn.dequantize(quantize(weights[seed]))  # outside of jit
            np.testing.assert_allclose(mapped[seed], alone, rtol=1e-5, atol=1e-30)

    def test_is_a_pytree(self) -> None:
        q = self.quantized()
        leaves, structure = jax.tree.flatten(q)
        again = jax.tree.unflatten(structure, leaves)
        assert again.qtype == self.qtype
        assert jax.eval_shape(lambda: q).qtype == self.qtype

    def test_gradient(self) -> None:
        """Straight through: that of the float matmul."""
        x = np.random.default_rng(1).normal(size=(5, 192)).astype(np.float32)
        how = qn.HowToQuantize(self.qtype)

        def loss(weight: Any) -> Any:
            return qn.Matmul(_DIMS).train(x, weight, lhs_how=None, rhs_how=how).sum()

        expected = np.tile(x.sum(0)[:, None], 24)
        found = jax.jit(jax.grad(loss))(self.weight())
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def _wide_scale(q: Any) -> np.ndarray:
    scale = np.asarray(q.scale, np.float64)
    if q.global_scale is not None:
        scale = scale * np.asarray(q.global_scale, np.float64)
    for axis, (size, count) in enumerate(zip(q.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, size // count, axis)
    return scale


def _exact(q: Any) -> np.ndarray:
    values = np.asarray(q.qvalue).astype(np.float64)
    book = qn.get_qtype(q.qtype).codebook
    if book is not None:
        values = np.asarray(book)[values.astype(np.int64)]
    return values * _wide_scale(q)


def _book(kind: Any) -> np.ndarray:
    """Return all numbers that quantized values stand for, ascending."""
    if kind.codebook is not None:
        return np.asarray(kind.codebook)
    if kind.kind == "int":
        return np.arange(-kind.qmax, kind.qmax + 1)
    every = np.arange(2**kind.bits, dtype=np.uint8).view(kind.storage_dtype).astype(np.float64)
    return np.unique(every[np.abs(every) <= kind.qmax])

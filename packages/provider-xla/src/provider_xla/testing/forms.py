"""StoredFormConformance: what every stored form does in programs and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn

from .. import PtqProvider, QuantizationRule, load, save

_K, _N, _STEPS = 64, 24, 3


def _bias(w: Any, x: Any) -> Any:
    return x @ w + jnp.arange(_N, dtype=x.dtype)


def _from_the_left(w: Any, x: Any) -> Any:
    return jnp.einsum("kn,bk->nb", w, x)


def _transposed(w: Any, x: Any) -> Any:
    return jnp.einsum("nk,bk->bn", w.T, x)


def _columns(w: Any, x: Any) -> Any:
    return x @ w[:, 4:12]


def _mapped(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: row @ w)(x)


def _in_a_branch(w: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: -x @ w)


def _as_an_array(w: Any, x: Any) -> Any:
    return jnp.sin(w).sum() + x @ w


PROGRAMS: dict[str, Callable[..., Any]] = {
    "a matmul": lambda w, x: x @ w,
    "with a bias": _bias,
    "from the left": _from_the_left,
    "transposed": _transposed,
    "some columns": _columns,
    "mapped": _mapped,
    "in a branch": _in_a_branch,
    "as an array besides": _as_an_array,
}
"""Programs of a weight [64, 24] and an activation [5, 64]."""


class StoredFormConformance:
    """The tests that every stored form passes. Subclass it in a test module.

    ::

        class TestSplit(StoredFormConformance):
            def make(self, w):
                return SplitWeight(...)

    References are computed by NumPy in float64, from what the form restores.

    Attributes:
        tolerance: how far the restored array may be from the array: root mean square, relative.
    """

    tolerance: ClassVar[float] = 0.05

    def make(self, w: jax.Array) -> Any:
        """Return the stored form of a float32 array [64, 24]."""
        raise NotImplementedError(f"{type(self).__name__}.make(w) must return a stored form.")

    def weight(self, seed: int = 0) -> jax.Array:
        """Return normally distributed numbers [64, 24]."""
        return jnp.asarray(np.random.default_rng(seed).normal(size=(_K, _N)), jnp.float32)

    def activation(self) -> jax.Array:
        """Return normally distributed numbers [5, 64]."""
        return jnp.asarray(np.random.default_rng(9).normal(size=(5, _K)), jnp.float32)

    def test_stands_for_the_array(self) -> None:
        w = self.weight()
        form = self.make(w)
        assert isinstance(form, qn.StoredForm)
        assert (form.shape, form.dtype, form.ndim) == ((_K, _N), jnp.float32, 2)
        found = np.asarray(form.restore(), np.float64)
        error = np.sqrt(np.square(found - w).mean() / np.square(w).mean())
        assert error <= self.tolerance, f"the error is {error:.3g}, above {self.tolerance:g}"
        assert form.nbytes < w.nbytes

    def test_is_a_pytree(self) -> None:
        form = self.make(self.weight())
        again = jax.tree.unflatten(*reversed(jax.tree.flatten(form)))
        np.testing.assert_array_equal(again.restore(), form.restore())
        types = jax.eval_shape(lambda form: form, form)
        assert (types.shape, types.qtype) == (form.shape, form.qtype)
        np.testing.assert_allclose(
            jax.jit(lambda form: form.restore())(form), form.restore(), rtol=1e-6, atol=1e-6
        )

    def test_is_portable(self) -> None:
        form = self.make(self.weight()).portable()
        assert form.platform is None
        np.testing.assert_allclose(form.restore(), self.make(self.weight()).restore(), rtol=1e-6)

    def test_programs(self) -> None:
        """Programs contract with it, or with the array that it restores."""
        *others, last = PROGRAMS
        self._check(others)
        self._check([last])  # alone, so that no other use may have the array

    def test_int8_activations(self) -> None:
        self._check(["a matmul", "transposed", "with a bias"], 0.03, act_qtype="int8")

    def test_training_leaves_it(self) -> None:
        """Gradients by the activation are those of the restored array."""
        form, x = self.make(self.weight()), self.activation()
        run = self._applied(PROGRAMS["a matmul"])
        found = jax.jit(jax.grad(lambda x: jnp.sin(run(form, x)).sum()))(x)
        w = np.asarray(form.restore(), np.float64)
        expected = np.cos(np.asarray(x, np.float64) @ w) @ w.T
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)

    def test_steps_of_a_loop(self) -> None:
        def stack(ws: Any, x: Any) -> Any:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w @ w.T), None), x, ws)[0]

        forms = [self.make(self.weight(seed)) for seed in range(_STEPS)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *forms)
        ws, x = jnp.stack([self.weight(seed) for seed in range(_STEPS)]), self.activation() / 50
        rule = QuantizationRule(weight_qtype="int8")
        run = PtqProvider(rule).plan(stack, ws, x).apply(stack)
        expected = np.asarray(x, np.float64)
        for form in forms:
            w = np.asarray(form.restore(), np.float64)
            expected = np.tanh(expected @ w @ w.T)
        np.testing.assert_allclose(jax.jit(run)(stacked, x), expected, rtol=2e-3, atol=2e-3)

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        form = self.make(self.weight())
        save(tmp_path / "a.safetensors", {"w": form})
        (again,) = load(tmp_path / "a.safetensors").values()
        assert type(again) is type(form.portable())
        assert jax.tree.structure(again) == jax.tree.structure(form.portable())
        for found, expected in zip(
            jax.tree.leaves(again), jax.tree.leaves(form.portable()), strict=True
        ):
            np.testing.assert_array_equal(found, expected)

    def test_exported(self) -> None:
        form = self.make(self.weight())
        exported = jax.export.export(jax.jit(lambda form: form.restore()))(form)
        again = jax.export.deserialize(exported.serialize())
        np.testing.assert_allclose(again.call(form), form.restore(), rtol=1e-6, atol=1e-6)

    def _applied(self, program: Callable[..., Any], **fields: Any) -> Callable[..., Any]:
        rule = QuantizationRule(weight_qtype="int8", **fields)
        return PtqProvider(rule).plan(program, self.weight(), self.activation()).apply(program)

    def _check(self, names: Sequence[str], error: float = 1e-3, **fields: Any) -> None:
        """Compare programs, which are planned and compiled as one, with themselves in float64."""

        def together(w: Any, x: Any) -> dict[str, Any]:
            return {name: PROGRAMS[name](w, x) for name in names}

        form, x = self.make(self.weight()), self.activation()
        found = jax.jit(self._applied(together, **fields))(form, x)
        with jax.enable_x64(True):
            wide = (np.asarray(value, np.float64) for value in (form.restore(), x))
            expected = jax.tree.map(np.asarray, jax.jit(together)(*wide))
        for name in names:
            most = np.abs(expected[name]).max()
            off = np.abs(np.asarray(found[name], np.float64) - expected[name]).max()
            assert off <= error * most, name

"""KernelConformance: what every kernel does, whatever its op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from jax import lax

from .. import JaxtapError, KernelSpec, declared_specs, register_kernel

Case: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""The operands of a call, arrays all, and its parameters."""

_REFUSALS = (TypeError, ValueError, jax.errors.JaxRuntimeError, JaxtapError)


class KernelConformance:
    """The tests that every kernel passes. Subclass it in a test module.

    ::

        class TestSoftcap(KernelConformance):
            target = "acme_softcap.softcap"
            op = staticmethod(acme_softcap.softcap)

            def cases(self):
                return [((np.ones((2, 3), np.float32),), {"cap": 5.0})]

            def reference(self, x, *, cap):
                return cap * np.tanh(x.astype(np.float64) / cap)

    A test that cannot hold for a kernel is taken out by name, where a reader sees it:
    ``test_vmap = None``.

    Attributes:
        target: the FFI target of the kernel, as its spec has it.
        platform: the platform of the kernel.
        op: the function under test, ``op(*operands, **params)``. It must end up in this kernel
            for every case.
        tolerance: how far a result may be from the reference: absolutely for small numbers,
            relatively for large ones. 0: not at all.
        examples: how many cases of a strategy are tried; a fifth of them under each
            transformation.
    """

    target: ClassVar[str]
    platform: ClassVar[str] = "cpu"
    op: ClassVar[Callable[..., Any]]
    tolerance: ClassVar[float] = 1e-6
    examples: ClassVar[int] = 50

    def cases(self) -> Sequence[Case] | SearchStrategy[Case]:
        """Return the calls to try: a list or a strategy."""
        raise NotImplementedError(f"{type(self).__name__}.cases() must return calls to try.")

    def reference(self, *operands: np.ndarray, **params: Any) -> Any:
        """Return the result of a call, computed in another way.

        The operands are NumPy arrays. The result may be of a wider dtype.
        """
        raise NotImplementedError(f"{type(self).__name__}.reference() must compute the result.")

    def empty_cases(self) -> Sequence[Case]:
        """Return a call without rows.

        Operands of the shape of the first one lose their rows with it; if the reference can't
        compute that, the first one alone; if not that either, all with as many rows.
        """
        for operands, params in self._some():
            first = np.shape(operands[0])
            if not first:
                continue
            alike = [np.shape(x) == first for x in operands]
            alone = [i == 0 for i in range(len(operands))]
            as_many = [np.shape(x)[:1] == first[:1] for x in operands]
            for without in (alike, alone, as_many):
                call = tuple(x[:0] if cut else x for x, cut in zip(operands, without, strict=True))
                try:
                    self.reference(*map(np.asarray, call), **params)
                except Exception:
                    continue  # what sizes an op takes is known to its reference alone
                return [(call, params)]
        raise AssertionError("the reference computes no case without rows: define empty_cases()")

    def wrong_cases(self) -> Sequence[Case]:
        """Return calls that must be refused: each operand once as complex numbers."""
        operands, params = self._some()[0]
        return [
            (tuple(_complex(x) if i == wrong else x for i, x in enumerate(operands)), params)
            for wrong in range(len(operands))
        ]

    @property
    def spec(self) -> KernelSpec:
        """The kernel's declaration, which an installed plugin must have."""
        found = [
            spec
            for spec in declared_specs(KernelSpec)
            if (spec.target, spec.platform) == (self.target, self.platform)
        ]
        known = ", ".join(sorted(spec.key for spec in declared_specs(KernelSpec))) or "none"
        assert found, f"no plugin declares {self.target}@{self.platform}; declared: {known}"
        return found[0]

    def test_it_can_be_registered_more_than_once(self) -> None:
        for _ in range(2):
            assert register_kernel(self.spec) == self.target
        assert jax.devices(self.platform)

    def test_the_op_ends_up_in_this_kernel(self) -> None:
        """Otherwise the tests below would be about something else."""

        def check(operands: Sequence[Any], params: Mapping[str, Any]) -> None:
            text = self._jitted(params).lower(*operands).as_text()
            assert f"@{self.target}(" in text, f"{self.target} is not in the program:\n{text}"

        self._each(check, self._few)

    def test_equals_the_reference(self) -> None:
        self._each(self._equals, self.examples)

    def test_jit(self) -> None:
        """Compiled twice, and called twice each time: the same bits."""

        def check(operands: Sequence[Any], params: Mapping[str, Any]) -> None:
            results = []
            for _ in range(2):
                fn = self._jitted(params)
                results += [fn(*operands), fn(*operands)]
                jax.clear_caches()
            self._compare(results[0], operands, params)
            for other in results[1:]:
                jax.tree.map(_same, other, results[0])

        self._each(check, self._few)

    @pytest.mark.parametrize("which", ["first", "all"])
    def test_vmap(self, which: str) -> None:
        """Over the first operand, and over all."""

        def check(operands: Sequence[Any], params: Mapping[str, Any]) -> None:
            rows, stacked, axes = _stacked(operands, which)
            fn = jax.jit(jax.vmap(lambda *args: type(self).op(*args, **params), in_axes=axes))
            self._compare_rows(fn(*stacked), rows, params)

        self._each(check, self._few)

    def test_scan(self) -> None:
        def check(operands: Sequence[Any], params: Mapping[str, Any]) -> None:
            rows, stacked, _ = _stacked(operands, "all")

            @jax.jit
            def fn(*stacked: Any) -> Any:
                return lax.scan(lambda _, x: (None, type(self).op(*x, **params)), None, stacked)[1]

            self._compare_rows(fn(*stacked), rows, params)

        self._each(check, self._few)

    def test_export(self) -> None:
        """An exported program is read back from bytes."""

        def check(operands: Sequence[Any], params: Mapping[str, Any]) -> None:
            allowed = [jax.export.DisabledSafetyCheck.custom_call(self.target)]
            exported = jax.export.export(
                self._jitted(params), platforms=[self.platform], disabled_checks=allowed
            )(*operands)
            assert self.target.encode() in exported.mlir_module_serialized
            self._compare(jax.jit(exported.call)(*operands), operands, params)

        self._each(check, self._few)

    def test_empty_operands(self) -> None:
        for operands, params in self.empty_cases():
            self._compare(self._jitted(params)(*operands), operands, params)

    def test_wrong_operands_are_refused(self) -> None:
        """And the right ones still work."""
        for operands, params in self.wrong_cases():
            with pytest.raises(_REFUSALS):
                jax.block_until_ready(self._jitted(params)(*operands))
            self._each(self._equals, self._few)

    @property
    def _few(self) -> int:
        return -(-self.examples // 5)

    def _jitted(self, params: Mapping[str, Any]) -> Any:
        # A new function each time: nothing that was traced before is found again.
        return jax.jit(lambda *operands: type(self).op(*operands, **params))

    def _equals(self, operands: Sequence[Any], params: Mapping[str, Any]) -> None:
        self._compare(type(self).op(*map(jnp.asarray, operands), **params), operands, params)

    def _compare(self, actual: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> None:
        expected = self.reference(*map(np.asarray, operands), **params)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        jax.tree.map(self._close, actual, expected)

    def _compare_rows(self, actual: Any, rows: list, params: Mapping[str, Any]) -> None:
        for index, operands in enumerate(rows):
            self._compare(jax.tree.map(lambda x, i=index: x[i], actual), operands, params)

    def _close(self, actual: Any, expected: Any) -> None:
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.shape == expected.shape
        assert not (actual.dtype.kind == "c" and expected.dtype.kind != "c")
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            actual.astype(wide), expected.astype(wide), rtol=self.tolerance, atol=self.tolerance
        )

    def _each(self, check: Callable[[Sequence[Any], Mapping[str, Any]], None], most: int) -> None:
        """Call `check` for each case, or `most` of a strategy."""
        cases = self.cases()
        if not isinstance(cases, SearchStrategy):
            assert cases, "cases() returned no cases"
            for operands, params in cases:
                check(operands, params)
            return

        @settings(
            max_examples=most,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
        )
        @given(cases)
        def run(case: Case) -> None:
            check(*case)

        run()

    def _some(self) -> list[Case]:
        """Return a few cases."""
        found: list[Case] = []
        self._each(lambda operands, params: found.append((operands, params)), 20)
        return found


def _complex(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float32).astype(np.complex64)


def _stacked(operands: Sequence[Any], which: str) -> tuple[list, list, tuple]:
    """Return three calls, their stacked operands, and the mapped axes.

    The calls differ where floating-point numbers are: packed or integer operands may have a form
    that does not survive a change.
    """
    first, *others = operands
    varied = _three(first)
    rest = [_three(x) if which == "all" else [np.asarray(x)] * 3 for x in others]
    rows = [list(row) for row in zip(varied, *rest, strict=True)]
    stacked = [np.stack(varied)]
    stacked += [np.stack(copies) if which == "all" else copies[0] for copies in rest]
    axes = (0, *((0 if which == "all" else None) for _ in others))
    return rows, stacked, axes


def _three(x: Any) -> list[np.ndarray]:
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return [x] * 3
    # Powers of two keep every other digit.
    return [x * np.asarray(factor, x.dtype) for factor in (1, -0.5, 0.25)]


def _same(actual: Any, expected: Any) -> None:
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes(), (
        f"the same call gave {actual!r} and {expected!r}"
    )

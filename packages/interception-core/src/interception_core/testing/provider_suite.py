"""ProviderConformance: what every provider does, whatever it quantizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .. import Interceptor, StorablePlan, get_provider, loaded, primitive_names
from ..interceptor import PRIMITIVE_PREFIX

Case: TypeAlias = tuple[Callable[..., Any], Sequence[Any]]
"""A function of parameters and other arguments, and these."""


class ProviderConformance:
    """The tests that every provider passes. Subclass it in a test module.

    ::

        class TestAcme(ProviderConformance):
            provider = "acme"
            config = {"bits": 4}
            tolerance = 0.2

    A test that cannot hold for a provider is taken out by name, where a reader sees it:
    ``test_gradient = None``.

    Attributes:
        provider: its name, as its spec has it.
        config: what ``get_provider`` passes to its factory.
        tolerance: how far results may be from those in float: the largest error, relative to the
            largest float result.
    """

    provider: ClassVar[str]
    config: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 0.1

    def cases(self) -> Sequence[Case]:
        """Return functions that the provider changes, with their arguments.

        The first argument holds the parameters: a pytree of float32 arrays. The second is a batch
        of rows. By default: matmuls, in a chain, in a loop over layers, and with an activation.
        """
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

        x = normal(8, 32)

        def dense(params: Any, x: Any) -> Any:
            return jax.nn.relu(x @ params["up"]) @ params["down"]

        def layers(params: Any, x: Any) -> Any:
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]

        return [
            (dense, ({"up": normal(32, 64), "down": normal(64, 16)}, x)),
            (layers, (normal(3, 32, 32), x)),
        ]

    def make(self) -> Any:
        """Return a new provider of this name and config."""
        return get_provider(self.provider, **self.config)

    def test_taps_what_exists(self) -> None:
        interceptor = self.make().interceptor()
        assert isinstance(interceptor, Interceptor)
        primitives = {PRIMITIVE_PREFIX + name for name in primitive_names()}
        found = [target in primitives or loaded(target) is not None for target in interceptor]
        assert any(found), f"none of {sorted(interceptor)} exists"

    def test_changes_the_result_a_little(self) -> None:
        for fn, args in self.cases():
            exact, quantized = fn(*args), self.make().apply(fn)(*args)
            self._close(quantized, exact)
            assert _differ(quantized, exact), f"{fn.__name__} is as it is without the provider"

    def test_jit_around(self) -> None:
        for fn, args in self.cases():
            apply = self.make().apply(fn)
            _equal(jax.jit(apply)(*args), apply(*args))

    def test_jit_inside(self) -> None:
        """Operations in a jitted function are tapped, too."""
        for fn, args in self.cases():
            _equal(self.make().apply(jax.jit(fn))(*args), self.make().apply(fn)(*args))

    def test_loops(self) -> None:
        """A loop's body is tapped as it is outside."""
        for fn, (params, *others) in self.cases():

            def looped(params: Any, *others: Any, fn: Any = fn) -> Any:
                return lax.map(
                    lambda one: fn(params, *one), jax.tree.map(lambda x: x[None], others)
                )

            result = self.make().apply(looped)(params, *others)
            expected = self.make().apply(fn)(params, *others)
            _equal(jax.tree.map(lambda x: x[0], result), expected)

    def test_vmap(self) -> None:
        for fn, (params, *others) in self.cases():
            two = jax.tree.map(lambda x: jnp.stack([x, x]), others)
            axes = (None, *(0 for _ in others))
            result = jax.vmap(self.make().apply(fn), in_axes=axes)(params, *two)
            exact = fn(params, *others)
            for i in range(2):
                self._close(jax.tree.map(lambda x, i=i: x[i], result), exact)

    def test_gradient(self) -> None:
        """The gradient is finite, and zero only where the float one is."""
        for fn, (params, *others) in self.cases():
            apply = self.make().apply(fn)

            found = jax.grad(_summed(apply))(params, *others)
            exact = jax.grad(_summed(fn))(params, *others)
            for one, expected in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
                assert np.isfinite(one).all()
                assert one.shape == expected.shape
                assert np.any(one) or not np.any(expected)

    @pytest.mark.parametrize("order", ["float first", "quantized first"])
    def test_the_float_function_stays_as_it_is(self, order: str) -> None:
        """The jitted functions share no traces, in either order."""
        for fn, args in self.cases():
            jitted = jax.jit(lambda *args, fn=fn: fn(*args))
            if order == "float first":
                exact = jitted(*args)
                quantized = self.make().apply(jitted)(*args)
            else:
                quantized = self.make().apply(jitted)(*args)
                exact = jitted(*args)
            _equal(exact, jax.jit(lambda *args, fn=fn: fn(*args))(*args), exactly=True)
            assert _differ(quantized, exact)
            _equal(jitted(*args), exact, exactly=True)

    def test_two_of_a_kind_do_not_meet(self) -> None:
        for fn, args in self.cases():
            first, second = self.make().apply(fn), self.make().apply(fn)
            _equal(first(*args), second(*args), exactly=True)
            _equal(first(*args), second(*args), exactly=True)

    def test_plan(self) -> None:
        """A plan, if there is one, is made of types and runs."""
        if not hasattr(self.make(), "plan"):
            return
        for fn, (params, *others) in self.cases():
            types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
            plan = self.make().plan(fn, types, *others)
            assert str(plan).strip(), "a plan prints what it does"
            assert list(plan.problems) == []
            assert len(plan.weights) == len(jax.tree.leaves(params))
            stored = plan.quantize(params)
            result = jax.jit(plan.apply(fn))(stored, *others)
            self._close(result, fn(params, *others))

    def test_plan_is_stored(self) -> None:
        """A plan with ``manifest`` or ``stored_types`` can be stored."""
        if not hasattr(self.make(), "plan"):
            return
        for fn, (params, *others) in self.cases():
            plan = self.make().plan(fn, params, *others)
            if not hasattr(plan, "manifest") and not hasattr(plan, "stored_types"):
                return
            assert isinstance(plan, StorablePlan), "manifest needs stored_types, and vice versa"
            manifest = plan.manifest()
            assert json.loads(json.dumps(manifest, allow_nan=False)) == manifest
            provider = get_provider(manifest["provider"], **manifest["config"])
            assert provider.plan(fn, params, *others).manifest() == manifest
            stored, types = plan.quantize(params), plan.stored_types()
            assert jax.tree.structure(stored) == jax.tree.structure(types)
            for one, like in zip(jax.tree.leaves(stored), jax.tree.leaves(types), strict=True):
                assert isinstance(one, jax.Array), "what is stored is made of arrays"
                assert (one.shape, one.dtype) == (like.shape, like.dtype)

    def _close(self, actual: Any, expected: Any) -> None:
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for one, exact in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            one, exact = np.asarray(one, np.float64), np.asarray(exact, np.float64)
            assert one.shape == exact.shape
            error = np.abs(one - exact).max() / np.abs(exact).max()
            assert error <= self.tolerance, f"the error is {error:.3g}, above {self.tolerance:g}"


def _summed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(jnp.sum(x) for x in jax.tree.leaves(fn(*args)))


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(not np.array_equal(x, y) for x, y in pairs)


def _equal(actual: Any, expected: Any, exactly: bool = False) -> None:
    """Assert that two results of the same operations are equal."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if exactly:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)

"""BridgeConformance: what every bridge to a framework does. Needs pytest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import quant_numerics as qn
from interception_core import find_bridge

from .. import (
    PtqProvider,
    QtProvider,
    QuantizationRule,
    Rule,
    merge_model,
    model_plan,
    quantize_model,
)

__all__ = ["BridgeConformance"]

_TAKEN = object()


class BridgeConformance:
    """The tests that every bridge passes. Subclass it in a test module.

    ::

        class TestAcme(BridgeConformance):
            def model(self):
                return acme.Net(...)

            def inputs(self):
                return (x,)

    Switch a test off by name if it cannot hold for a framework: ``test_adapters_merge = None``.

    Attributes:
        method: the method that is called and quantized.
        tolerance: how far results in int8 may be from those in float: the largest error, relative
            to the largest float result.
    """

    method: ClassVar[str] = "__call__"
    tolerance: ClassVar[float] = 0.05

    def model(self) -> Any:
        """Return a new float model with at least two matmuls."""
        raise NotImplementedError(f"{type(self).__name__}.model() must return a model.")

    def inputs(self) -> tuple[Any, ...]:
        """Return the inputs of a call."""
        raise NotImplementedError(f"{type(self).__name__}.inputs() must return inputs.")

    def run(self, model: Any) -> Any:
        """Return what the method of a model returns for the inputs: arrays."""
        return getattr(model, self.method)(*self.inputs())

    def quantized(self, model: Any, provider: Any = None, **options: Any) -> Any:
        """Return a model quantized in int8 weights, or as a provider says."""
        provider = provider or PtqProvider(QuantizationRule(weight_qtype="int8"))
        return quantize_model(
            model, provider, *self.inputs(), methods=(self.method,), prepack=False, **options
        )

    def test_parameters_are_the_model_s_arrays(self) -> None:
        model = self.model()
        leaves = [x for x in jax.tree.leaves(find_bridge(model).parameters(model)) if _is_array(x)]
        assert len(leaves) >= 2
        assert len({id(leaf) for leaf in leaves}) == len(leaves), "an array is there twice"

    def test_function_is_the_method(self) -> None:
        model = self.model()
        bridge = find_bridge(model)
        fn = bridge.function(model, self.method)
        parameters = bridge.parameters(model)
        self._close(fn(parameters, *self.inputs()), self.run(model), 1e-5)
        zeros = jax.tree.map(lambda x: x * 0 if _is_array(x) else x, parameters)
        changed = fn(zeros, *self.inputs())
        assert _differ(changed, self.run(model)), "the function does not use its parameters"
        self._close(self.run(model), self.run(self.model()), 0)

    def test_quantized_is_of_the_same_kind(self) -> None:
        model = self.model()
        made = self.quantized(model)
        assert isinstance(made, type(model))
        assert made is not model
        found = find_bridge(made)
        assert type(found) is type(find_bridge(model))
        assert found.quantized(made) is not None
        assert found.quantized(model) is None

    def test_parameters_are_stored_quantized(self) -> None:
        made = self.quantized(self.model())
        assert self._planned(made).weights
        leaves = jax.tree.leaves(
            find_bridge(made).parameters(made), is_leaf=lambda x: isinstance(x, qn.QArray)
        )
        stored = [leaf for leaf in leaves if isinstance(leaf, qn.QArray)]
        assert len(stored) >= 2
        assert {leaf.qtype for leaf in stored} == {"int8"}

    def test_result_is_near_float(self) -> None:
        model = self.model()
        exact, result = self.run(model), self.run(self.quantized(model))
        self._close(result, exact, self.tolerance)
        assert _differ(result, exact)

    def test_result_is_the_plan_s(self) -> None:
        """Check that the method equals the plan's function on stored parameters."""
        model = self.model()
        made = self.quantized(model)
        bridge = find_bridge(model)
        fn = self._planned(made).apply(bridge.function(model, self.method))
        self._close(self.run(made), fn(bridge.parameters(made), *self.inputs()), 1e-5)

    def test_given_model_stays_as_it_is(self) -> None:
        model = self.model()
        before = self.run(model)
        kind = type(model)
        self.run(self.quantized(model))
        assert type(model) is kind
        self._close(self.run(model), before, 0)

    def test_two_models_do_not_meet(self) -> None:
        """Quantized in two ways: each keeps its own."""
        model = self.model()
        four = PtqProvider(QuantizationRule(weight_qtype="int4"))
        first, second = self.quantized(model), self.quantized(model, four)
        results = [self.run(first), self.run(second), self.run(first), self.run(second)]
        self._close(results[0], results[2], 0)
        self._close(results[1], results[3], 0)
        assert _differ(results[0], results[1])

    def test_copies(self) -> None:
        made = self.quantized(self.model())
        self._close(self.run(copy.deepcopy(made)), self.run(made), 0)

    def test_jit(self) -> None:
        model = self.model()
        made = self.quantized(model)
        bridge = find_bridge(model)
        fn = self._planned(made).apply(bridge.function(model, self.method))
        arrays, rest = _parted(bridge.parameters(made), _is_array)
        jitted = jax.jit(lambda arrays: fn(_joined(arrays, rest), *self.inputs()))
        self._close(jitted(arrays), self.run(made), 1e-3)

    def test_trained_quantized(self) -> None:
        """With a QtProvider parameters stay float, and have gradients."""
        model = self.model()
        provider = QtProvider(QuantizationRule(weight_qtype="int8"))
        made = self.quantized(model, provider)
        bridge = find_bridge(made)
        parameters = bridge.parameters(made)
        fn = provider.apply(bridge.function(model, self.method))
        floats, rest = _parted(parameters, _is_float)

        def loss(floats: Any) -> Any:
            result = jax.tree.leaves(fn(_joined(floats, rest), *self.inputs()))
            return sum(x.sum() for x in result if _is_array(x))

        gradients = jax.tree.leaves(jax.grad(loss)(floats))
        assert all(np.isfinite(one).all() for one in gradients)
        assert any(np.any(one) for one in gradients)
        self._close(self.run(made), fn(parameters, *self.inputs()), 1e-5)

    def test_adapters_merge(self) -> None:
        """A rule gives adapters, and ``merge_model`` a float model: needs provider-xla[lora]."""
        pytest.importorskip("provider_xla_lora")
        model = self.model()
        provider = PtqProvider(Rule(weight="int8", lora=2))
        made = self.quantized(model, provider)
        merged = merge_model(made)
        assert type(merged) is type(model)
        assert find_bridge(merged).quantized(merged) is None
        self._close(self.run(merged), self.run(made), 1e-2)

    def _planned(self, made: Any) -> Any:
        plan = model_plan(made)
        assert plan is not None, "rebuild keeps what it was given, which has the plan"
        return plan

    def _close(self, actual: Any, expected: Any, tolerance: float) -> None:
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for one, exact in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            one, exact = np.asarray(one, np.float64), np.asarray(exact, np.float64)
            assert one.shape == exact.shape
            error = np.abs(one - exact).max() / np.abs(exact).max()
            assert error <= tolerance, f"the error is {error:.3g}, above {tolerance:g}"


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(not np.array_equal(x, y) for x, y in pairs)


def _is_float(x: Any) -> bool:
    return _is_array(x) and np.issubdtype(x.dtype, np.floating)


def _parted(tree: Any, wanted: Callable[[Any], bool]) -> tuple[list[Any], tuple[Any, list[Any]]]:
    """Return a tree's wanted leaves, and what ``_joined`` needs besides."""
    leaves, structure = jax.tree.flatten(tree)
    found = [leaf for leaf in leaves if wanted(leaf)]
    return found, (structure, [_TAKEN if wanted(leaf) else leaf for leaf in leaves])


def _joined(found: list[Any], rest: tuple[Any, list[Any]]) -> Any:
    structure, leaves = rest
    remaining = iter(found)
    whole = [next(remaining) if leaf is _TAKEN else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, whole)

"""The protocols of providers and their plans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from .interceptor import Interceptor


@runtime_checkable
class Provider(Protocol):
    """An object that quantizes functions. ``get_provider`` returns one.

    A provider may also have:

    - ``plan(fn, params, *args, **kwargs)``, which returns a ``ProviderPlan`` without running
      anything. ``jaxtap plan --provider NAME`` prints it.
    - ``params_argnum``: the index of the argument with the parameters (default 0).
    - ``strict``: whether problems of a plan are errors (default False).
    - ``keeps_floats``: whether parameters stay float arrays, as in training. By default the
      parameters of a provider with ``plan`` are stored as ``plan.quantize`` returns them.
    - ``call_options``: names of additional keyword arguments of the functions that it returns, such
      as ``("quant_key",)``.

    Attributes:
        engine: the name of the engine that it runs on; None for the best that is installed.
        disable_jit: whether that engine runs with jit off.
    """

    engine: str | None
    disable_jit: bool

    def interceptor(self) -> Interceptor:
        """Return the tapped operations and their handlers."""
        ...

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a quantized function, which takes stored parameters or arrays."""
        ...


@runtime_checkable
class ProviderPlan(Protocol):
    """A plan of what a provider does to a function.

    A plan may also have:

    - ``as_json()``, which returns JSON's types for ``jaxtap plan --json``.
    - ``report(params, *args)``, which measures it. ``jaxtap report`` prints the result, and
      ``--json`` writes its ``as_json()``.
    - ``ranges``: the activations whose range must be measured. If there are any, ``quantize_model``
      needs ``statistics``, and the plan has ``calibrate(params, batches, fn=None)`` and the
      provider ``apply_measured(fn, statistics)``.
    - ``ops``: records of operations (``op_id``, ``rule``, ``weight``, ``operands``), from which
      ``quantize_model`` knows which rules can't be followed.
    - ``adapters``, with ``init_adapters(key)``: adapters beside stored parameters.
    - ``prepack``, an option of ``quantize`` that ``quantize_model(prepack=False)`` passes on.
    - ``quantized_types(params)``, the types of what ``quantize`` returns for types of parameters,
      if ``jax.eval_shape`` can't tell them.
    - ``manifest()`` and ``stored_types()``: see ``StorablePlan``.

    Attributes:
        problems: the rules that can't be followed, and why: one line of text each.
        weights: the parameters that are stored, by path or in a list.
    """

    problems: Collection[str]
    weights: Any

    def quantize(self, params: Any) -> Any:
        """Return the stored parameters, in the same tree."""
        ...

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of stored parameters."""
        ...


@runtime_checkable
class StorablePlan(ProviderPlan, Protocol):
    """A plan that ``provider_xla.save`` stores with its parameters and ``load`` checks.

    What ``quantize`` returns must then be a pytree of arrays: register a class of stored
    parameters with ``jax.tree_util.register_dataclass``.
    """

    def manifest(self) -> Mapping[str, Any]:
        """Return what made the plan, as JSON's types.

        ``"provider"`` is the name that the provider is registered with, and ``"config"`` the
        keyword arguments of its factory: ``get_provider(name, **config)`` makes the provider
        again. Other keys say what else must be equal for stored parameters to fit, such as formats.
        """
        ...

    def stored_types(self) -> Any:
        """Return the tree that ``quantize`` returns, as jax.ShapeDtypeStruct.

        ``jax.eval_shape(plan.quantize, types_of_params)`` gives it.
        """
        ...

"""What a provider is, and what its plan is: protocols, for third parties and for our own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from .interceptor import Interceptor


@runtime_checkable
class Provider(Protocol):
    """Something that quantizes functions. ``get_provider`` returns one.

    A provider may also have:

    - ``plan(fn, params, *args, **kwargs)``, which returns a ``ProviderPlan`` and runs nothing:
      ``jaxtap plan --provider NAME`` prints it.
    - ``params_argnum``: index of the argument that holds the parameters (default 0).
    - ``strict``: whether problems of a plan are errors (default False).
    - ``keeps_floats``: whether parameters stay float arrays, as in training. By default those of a
      provider with ``plan`` are stored as ``plan.quantize`` returns them, and others stay.
    - ``call_options``: names of the keyword arguments that the functions it returns take beside
      those of the given ones, such as ``("quant_key",)``.

    Attributes:
        engine: the name of the engine that it runs on; None is the best that is installed.
        disable_jit: whether that engine is to run with jit off.
    """

    engine: str | None
    disable_jit: bool

    def interceptor(self) -> Interceptor:
        """Return which operations are tapped, and by what."""
        ...

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` quantized: it takes stored parameters, or arrays."""
        ...


@runtime_checkable
class ProviderPlan(Protocol):
    """What a provider does to a function. It prints itself.

    A plan may also have:

    - ``as_json()``, which returns JSON's types: ``jaxtap plan --json`` writes it.
    - ``report(params, *args)``, which measures it: ``jaxtap report`` prints what it returns, and
      ``--json`` writes its ``as_json()``.
    - ``ranges``: the activations whose range has to be measured; where there are any,
      ``quantize_model`` needs ``statistics``, and ``provider.apply_measured(fn, statistics)`` and
      ``calibrate(fn, params, batches)`` are there, too.
    - ``ops``: records of operations (``op_id``, ``rule``, ``weight``, ``operands``), by which
      ``quantize_model`` tells what can't be followed.
    - ``lora``, with ``init_adapters(key)``: adapters beside stored parameters.
    - ``prepack``, as an option of ``quantize``: needed where ``quantize_model(prepack=False)`` is.
    - ``manifest()`` and ``stored_types()``: see ``StorablePlan``.

    Attributes:
        problems: what of the rules can't be followed: one line of text each.
        weights: the parameters that are stored, by path or in a list.
    """

    problems: Collection[str]
    weights: Any

    def quantize(self, params: Any) -> Any:
        """Return the parameters as they are stored, in the same tree."""
        ...

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn``, to be called with stored parameters."""
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

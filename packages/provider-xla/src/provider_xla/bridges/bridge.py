"""Bridge: how a framework's model object is taken apart and rebuilt."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from interception_core import Provider, ProviderPlan

from ..errors import QuantizationError
from ..forms import is_kept


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """How a model object is quantized: its provider, plan and methods.

    Attributes:
        provider: the provider.
        made: the plan, or what makes it again in the process that a pickle was loaded in.
        methods: names of the methods that are quantized.
        statistics: the ranges of activations with a static one, or None.
    """

    provider: Provider
    made: ProviderPlan | functools.partial[ProviderPlan] | None
    methods: tuple[str, ...]
    statistics: Mapping[str, Any] | None = None

    @functools.cached_property
    def plan(self) -> ProviderPlan | None:
        """The provider's plan for the model; None if there were no example inputs."""
        return self.made() if isinstance(self.made, functools.partial) else self.made

    def __getstate__(self) -> dict[str, Any]:
        made = vars(self).get("plan", self.made)
        if hasattr(made, "again"):
            # Many processes that get a model never look at its plan, which takes a trace to make.
            function, args = made.__reduce__()
            made = functools.partial(function, *args)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"made": made}

    def __repr__(self) -> str:
        return f"Quantized({type(self.provider).__name__})"

    @property
    def has_adapters(self) -> bool:
        """Return whether a rule gives parameters an adapter."""
        rules = getattr(self.provider, "rules", ())
        return any(getattr(rule, "adapts", False) for rule in rules)

    # Frameworks copy a model with what it carries; this is the same for all copies.
    def __copy__(self) -> Quantized:
        return self

    def __deepcopy__(self, memo: Any) -> Quantized:
        return self

    def key_of(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove the provider's options, such as a random key, from keyword arguments."""
        names = getattr(self.provider, "call_options", ())
        return {name: kwargs.pop(name) for name in names if name in kwargs}

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn(parameters, *args, **kwargs)`` with its operations quantized."""
        if self.statistics is None:
            return self.provider.apply(fn)
        return self.provider.apply_measured(fn, self.statistics)  # type: ignore[attr-defined]


class Bridge(abc.ABC):
    """Base of bridges, which a plugin declares by ``BridgeSpec``.

    ``quantize_model`` asks for the parameters and for the model as a function of them, makes the
    plan, stores the parameters, and has the model built again around those.
    """

    @abc.abstractmethod
    def parameters(self, model: Any) -> Any:
        """Return a model's parameters as a pytree of arrays; None without any."""

    @abc.abstractmethod
    def function(self, model: Any, method: str) -> Callable[..., Any]:
        """Return a method of a model as a function of its parameters.

        The function is called as ``fn(parameters, *args, **kwargs)`` with the tree of
        ``parameters``, and traced. It must not change the model. The name scopes that it opens are
        the module paths in rules.
        """

    @abc.abstractmethod
    def rebuild(self, model: Any, parameters: Any, quantized: Quantized) -> Any:
        """Return a new model of the same kind with other parameters.

        Args:
            model: the model, which stays as it is.
            parameters: the tree of ``parameters``. Its leaves may be quantized values with scales
                (``quant_numerics.QArray``, ``PrepackedWeight``), or have an adapter
                (``AdaptedWeight``).
            quantized: how it is quantized, hashable by identity. Each of the new model's methods in
                ``quantized.methods`` must run ``quantized.apply(fn)(parameters, *args, **kwargs)``
                with an ``fn`` as ``function`` returns it.
        """

    def caches(self, model: Any) -> Any:
        """Return the KV caches that a model's methods update; None without any.

        Returns:
            A tree of arrays, or of their types.
        """
        return None

    def step(self, model: Any, method: str) -> Callable[..., Any]:
        """Return a method as a function of parameters and caches.

        It is like the function of ``function``, but is called as ``fn(parameters, caches, *args,
        **kwargs)`` with the tree of ``caches``, and returns the result and the updated tree.
        """
        raise NotImplementedError(f"{type(self).__name__} has models with caches, and no step().")

    def with_caches(self, model: Any, caches: Any) -> Any:
        """Return a model that ``rebuild`` returned, with other caches.

        Args:
            model: the model, which may be changed.
            caches: the tree of ``caches``, of which leaves may be a ``CacheArray``.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement with_caches().")

    def rest(self, model: Any) -> Any:
        """Return what a model holds beside its parameters, for ``save_model``; None without any.

        Returns:
            A tree of arrays, or of their types.
        """
        return None

    def with_rest(self, model: Any, rest: Any) -> Any:
        """Return a model that ``rebuild`` or ``restore`` returned, with another rest.

        Args:
            model: the model, which may be changed.
            rest: the tree of ``rest``.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement with_rest().")

    def quantized(self, model: Any) -> Quantized | None:
        """Return how a model is quantized; None if it is float."""
        return None

    def restore(self, model: Any, parameters: Any) -> Any:
        """Return a float model of the class that was quantized.

        Args:
            model: one that ``rebuild`` returned. ``parameters`` of it returns what ``rebuild``
                was given.
            parameters: its parameters, float arrays.
        """
        raise QuantizationError(
            f"The bridge of {type(model).__name__} makes no float models. Merge its parameters: "
            "plan.merge(params, adapters)."
        )


def keeps_floats(provider: Provider) -> bool:
    """Return whether parameters stay float arrays; see ``interception_core.Provider``."""
    return getattr(provider, "keeps_floats", not hasattr(provider, "plan"))


def holds_kept(tree: Any) -> bool:
    """Return whether parameters are stored, or have adapters, anywhere in a tree."""
    return any(map(is_kept, jax.tree.leaves(tree, is_leaf=is_kept)))


def path_of(keys: tuple[Any, ...]) -> str:
    """Return a path as rules write it: ``blocks/0/attn``."""
    return "/".join(map(_shown, keys))


def _shown(key: Any) -> str:
    for field in ("name", "idx", "key"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)

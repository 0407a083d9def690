"""quantize_model: the model object of any framework with a bridge."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from interception_core import Provider, ProviderPlan, hides_frames

from ..errors import QuantizationError, check_has
from ..extras import bridge_of, feature
from ..forms import restored
from ..plan.plan import is_ours
from ..program.arrays import as_batch, takes_any
from ..providers.given import provider_of
from ..run.static.statistics import read
from .bridge import Bridge, Quantized, holds_kept, keeps_floats


@hides_frames
def quantize_model(
    model: Any,
    provider: Provider | Any,
    *args: Any,
    methods: Collection[str] = ("__call__",),
    prepack: bool = True,
    statistics: Mapping[str, Any] | None = None,
    adapter_key: jax.Array | None = None,
    **kwargs: Any,
) -> Any:
    """Return a quantized model of the same kind; the given one stays float.

    With a ``PtqProvider`` parameters are stored as quantized values and scales, where the model
    holds its parameters, and the methods run on those. With a ``QtProvider`` they stay the float
    arrays of the given model (which are not copied), and the methods run quantized and are
    differentiated so.

    If a rule of a ``PtqProvider`` gives adapters, parameters get them to train: ``nnx.LoRAParam``
    variables beside the ``nnx.Param`` of an NNX module, the collection ``"lora"`` of a Linen
    module, and an ``AdaptedWeight`` instead of the parameter of an Equinox module, where
    ``adapter_mask`` tells what to train. If a rule has a dropout, methods also take
    ``dropout_key=``, a random key; without one nothing is dropped.

    With a ``CacheRule("cache")`` the model's KV caches are held quantized where they are:
    ``nnx.Cache`` variables, and the collection ``"cache"`` of a Linen module that is bound with
    ``mutable=["cache"]``. ``model_plan(model).quantize_cache`` makes a cache that is an input.

    Args:
        model: an NNX module, a Linen module (bound to its variables where they are to be stored:
            ``net.bind(variables)``), an Equinox module, or an object of another framework that a
            plugin has a bridge for. A model that was quantized for training is quantized again
            from its parameters. The parameters may be types (``nnx.eval_shape``,
            ``jax.eval_shape``), and the call may be traced: then so are the stored parameters, to
            be loaded or restored (``load_model``).
        provider: the name of a preset, a rule or rules; or a ``PtqProvider``, a ``QtProvider``, or
            any ``interception_core.Provider``. Rules name modules by the framework's own paths.
        args: example inputs of the first of ``methods``, or their types
            (``jax.ShapeDtypeStruct``): nothing is run on them. A ``PtqProvider`` needs them; with
            a ``QtProvider`` they are for finding what rules can't be followed before training.
        methods: names of the methods that run quantized, of the model and of its parts; other
            methods may call them. The plan is for the first: parameters that only the others use
            are quantized at each call.
        prepack: whether to pack parameters for the kernels of this machine that run their
            contractions; False for quantized values and scales, to be saved and used anywhere.
        statistics: the ranges of activations whose rules have ``act_static_scale``: what
            ``calibrate_model`` returns. None takes those of a model that was quantized for
            training. With a ``QtProvider`` a model without any collects them: each call adds its
            own, as in ``QtProvider.apply``. Ranges that are given stay as they are.
        adapter_key: random key that adapters begin with; None is ``jax.random.key(0)``.
        kwargs: more of the example inputs.

    Returns:
        The quantized model: an object of a subclass of the model's class. ``model_plan`` returns
        its plan.

    Raises:
        UnknownNameError: there is no bridge for such a model. The known ones are listed.
        TypeError: ``provider`` is none of these, or ``model`` is a class or a function.
        QuantizationError: the parameters are quantized already; example inputs are needed, or a
            rule needs statistics, and there are none; or rules do not fit: see
            ``PtqProvider.plan``.

    Warns:
        QuantizationWarning: what ``PtqProvider.plan`` warns about. Errors with ``strict=True``.
    """
    provider = provider_of(provider)
    bridge, plan, held = planned(model, provider, args, methods, kwargs)
    parameters = bridge.parameters(model)
    if not keeps_floats(provider) and parameters is not None:
        if plan is None:
            raise QuantizationError(
                "quantize_model needs example inputs to find out how each parameter is used, and "
                "there are none. Pass them after the provider, as the model takes them: "
                "quantize_model(model, provider, x). Types are enough (jax.ShapeDtypeStruct)."
            )
        # A plan without the option packs for no kernel, so that there is nothing to leave out.
        packs = takes_any(plan.quantize, {"prepack"})
        options = {} if prepack or not packs else {"prepack": False}
        is_abstract = _is_abstract(parameters)
        quantize = functools.partial(plan.quantize, **options)
        if not is_abstract:
            stored = quantize(parameters)
        elif hasattr(plan, "quantized_types"):
            stored = plan.quantized_types(parameters, **options)
        else:
            stored = jax.eval_shape(quantize, parameters)
        if getattr(plan, "adapters", None):
            key = jax.random.key(0) if adapter_key is None else adapter_key
            init = plan.init_adapters
            adapters = jax.eval_shape(init, key) if is_abstract else init(key)
            stored = feature("plan-put-adapters")(plan, stored, adapters)
    else:
        stored = parameters
    ranges = {**getattr(plan, "ranges", {})}
    if keeps_floats(provider):
        ranges |= getattr(plan, "trained_ranges", {})
    # A model without values is to be loaded, with its ranges.
    if ranges and statistics is None and _has_values(parameters):
        statistics = _collected(bridge, model, provider, plan)
        if statistics is None:
            raise QuantizationError(
                f"{len(ranges)} activations have a static range, and there are no statistics. "
                "Measure them: statistics = calibrate_model(model, provider, batches), and pass "
                "statistics=statistics."
            )
    quantized = Quantized(provider, plan, tuple(methods), statistics)
    made = bridge.rebuild(model, stored, quantized)
    return feature("model-put-caches")(bridge, made, plan, held) if held else made


def _collected(
    bridge: Bridge, model: Any, provider: Provider, plan: Any
) -> Mapping[str, Any] | None:
    """Return the statistics that a model collects, or that it has collected; None without."""
    before = bridge.quantized(model)
    found = None if before is None else before.statistics
    if not keeps_floats(provider):
        # As they are now: training may go on, and inference must not follow.
        return None if found is None else read(found)
    if found is None and hasattr(plan, "empty_statistics"):
        return plan.empty_statistics()
    return found


def _is_abstract(parameters: Any) -> bool:
    """Return whether parameters are types alone."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(parameters))


def _has_values(parameters: Any) -> bool:
    """Return whether parameters are neither types nor those of a trace."""
    kinds = jax.ShapeDtypeStruct | jax.core.Tracer
    return not any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(parameters))


@hides_frames
def calibrate_model(
    model: Any,
    provider: Provider | Any,
    batches: Iterable[Sequence[Any]],
    *,
    methods: Collection[str] = ("__call__",),
) -> Mapping[str, Any]:
    """Measure the static ranges of a float model's activations, in float.

    Args:
        model: a model as ``quantize_model`` takes it.
        provider: as ``quantize_model`` takes it, with rules that have ``act_static_scale=True``.
        batches: each the inputs of a call, as a tuple.
        methods: the first is called; pass the same to ``quantize_model``.

    Returns:
        The ranges by operation: a pytree for ``quantize_model(..., statistics=...)``, to be saved
        with the model.

    Raises:
        QuantizationError: no rule has ``act_static_scale``, there is no batch, the model holds no
            parameters, or they are stored as quantized values.
    """
    provider, batches = provider_of(provider), list(map(as_batch, batches))
    if not batches:
        raise QuantizationError("There is nothing to calibrate from: batches is empty.")
    bridge, plan, _ = planned(model, provider, batches[0], methods, {})
    if plan is None:
        raise QuantizationError(
            "This model holds no parameters to calibrate with. Bind a Linen module first: "
            "calibrate_model(net.bind(variables), provider, batches)."
        )
    check_has(plan, "calibrate", "calibrate_model")
    fn = bridge.function(model, next(iter(methods)))
    return plan.calibrate(bridge.parameters(model), batches, fn=fn)


@hides_frames
def plan_model(
    model: Any,
    provider: Provider | Any,
    *args: Any,
    methods: Collection[str] = ("__call__",),
    **kwargs: Any,
) -> ProviderPlan:
    """Find what rules do to a model object, without quantizing it.

    Args:
        model: a float model as ``quantize_model`` takes it.
        provider: as ``quantize_model`` takes it.
        args: example inputs of the first of ``methods``, or their types.
        methods: as for ``quantize_model``.
        kwargs: more of the example inputs.

    Raises:
        QuantizationError: as ``quantize_model``; or there are no inputs, or no parameters.
    """
    _, plan, _ = planned(model, provider_of(provider), args, methods, kwargs)
    if plan is None:
        raise QuantizationError(
            f"plan_model needs a {type(model).__name__} with parameters, and example inputs. Bind "
            "a Linen module first, and pass the inputs after the provider."
        )
    return plan


def model_plan(model: Any) -> ProviderPlan | None:
    """Return the plan of a model that ``quantize_model`` returned.

    None if it was made without example inputs.

    Raises:
        QuantizationError: the model is not quantized.
    """
    quantized = bridge_of(model).quantized(model)
    if quantized is None:
        raise QuantizationError(
            f"This {type(model).__name__} is not quantized. Pass what quantize_model returned."
        )
    return quantized.plan


def merge_model(model: Any) -> Any:
    """Return a float model with the adapters of a quantized one added.

    Args:
        model: what ``quantize_model`` returned, with adapters. It stays as it is.

    Returns:
        A model of the class that was quantized, with float parameters. Run it, or quantize it
        again.

    Raises:
        QuantizationError: the model is not quantized, holds no parameters, or holds only the
            derived weights of one.
    """
    bridge = bridge_of(model)
    quantized = bridge.quantized(model)
    parameters = bridge.parameters(model)
    if quantized is None or parameters is None:
        what = "is not quantized" if quantized is None else "holds no parameters"
        raise QuantizationError(
            f"This {type(model).__name__} {what}, so that there is nothing to merge. Pass what "
            "quantize_model returned."
        )
    if _is_stored_by_another(quantized):
        raise QuantizationError(
            f"merge_model needs a plan of provider-xla, which knows what its parameters were, got "
            f"a {type(quantized.plan).__name__}. Keep the float model."
        )
    return bridge.restore(model, restored(parameters, "args[0]"))


def _is_stored_by_another(quantized: Quantized | None) -> bool:
    """Return whether another provider's plan stored a model's parameters, in that one's forms."""
    if quantized is None or keeps_floats(quantized.provider):
        return False
    return quantized.plan is not None and not is_ours(quantized.plan)


def planned(
    model: Any,
    provider: Provider,
    args: Sequence[Any],
    methods: Collection[str],
    kwargs: Mapping[str, Any],
) -> tuple[Any, Any, Mapping[str, Any]]:
    """Check the arguments; return the bridge, the plan (or None) and the caches.

    Arguments: see ``quantize_model``. The caches are those that the model holds, by the name of the
    argument that the plan has for them.
    """
    if isinstance(model, type):
        raise TypeError(
            f"quantize_model takes a model object, and {model.__name__} is a class. Build one."
        )
    if inspect.isroutine(model):
        raise TypeError(
            f"quantize_model takes a model object, and {model.__name__} is a function. Plan it: "
            "plan = provider.plan(fn, params, *inputs), or jaxtap.plan(fn, params, *inputs, "
            "rules=...); then plan.quantize(params) and plan.apply()."
        )
    bridge = bridge_of(model)
    argnum = getattr(provider, "params_argnum", 0)
    if argnum != 0:
        raise QuantizationError(
            "quantize_model finds the parameters of a model itself, and the provider has "
            f"params_argnum={argnum}. Leave that out."
        )
    if isinstance(methods, str) or not methods:
        raise QuantizationError(
            f"methods must be a sequence of method names, such as ('__call__',). Got {methods!r}."
        )
    for name in methods:
        if not callable(getattr(model, name, None)):
            raise QuantizationError(f"{type(model).__name__} has no method {name!r} to quantize.")
    parameters = bridge.parameters(model)
    # Only forms of provider-xla can be told from floats, and merged.
    of_another = _is_stored_by_another(bridge.quantized(model))
    if of_another or holds_kept(parameters):
        merged = "" if of_another else ", or what merge_model returns"
        raise QuantizationError(
            f"The parameters of this {type(model).__name__} are quantized already, or have "
            f"adapters. Quantize the float model{merged}."
        )
    if parameters is None and (args or kwargs):
        raise QuantizationError(
            f"This {type(model).__name__} holds no parameters, so that there is nothing to plan "
            "for the example inputs. Bind a Linen module first: "
            "quantize_model(net.bind(variables), provider, ...); or leave the inputs out."
        )
    make_plan = getattr(provider, "plan", None)
    of_caches = bool(getattr(provider, "cache_rules", ()))
    if parameters is None and of_caches:
        raise QuantizationError(
            f"A {type(model).__name__} must hold its variables for a CacheRule, got one that is "
            "not bound. Bind it: quantize_model(net.bind(variables, mutable=['cache']), provider, "
            "x); or plan the function that calls net.apply."
        )
    if parameters is None or make_plan is None or not (args or kwargs):
        return bridge, None, {}
    method, held = next(iter(methods)), {}
    if of_caches:
        fn, held = feature("model-with-caches")(bridge, model, method, provider, kwargs)
    else:
        fn = bridge.function(model, method)
    return bridge, make_plan(fn, parameters, *args, **kwargs, **held), held

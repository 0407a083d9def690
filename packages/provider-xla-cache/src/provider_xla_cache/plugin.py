"""What provider-xla-cache declares to jaxtap. Must not import jax."""

from interception_core import FeatureSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return what plans do with caches."""
    return [
        FeatureSpec(
            name="plan-find-caches",
            summary="find how the arguments of cache rules are carried",
            run="provider_xla_cache.find:find_caches",
        ),
        FeatureSpec(
            name="plan-with-caches",
            summary="run a function with caches in int8",
            run="provider_xla_cache.use:with_caches",
        ),
        FeatureSpec(
            name="model-with-caches",
            summary="a method of a model as a function of its caches",
            run="provider_xla_cache.use:planned_function",
        ),
        FeatureSpec(
            name="model-put-caches",
            summary="put caches in int8 into a model",
            run="provider_xla_cache.use:put_caches",
        ),
        FeatureSpec(
            name="plan-quantize-cache",
            summary="quantize the caches of an argument",
            run="provider_xla_cache.use:quantize_cache",
        ),
    ]

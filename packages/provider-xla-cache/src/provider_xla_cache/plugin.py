"""What provider-xla-cache declares to jaxtap. Must not import jax."""

from interception_core import FeatureSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return what plans and models do with caches."""
    return [
        FeatureSpec(name, summary, f"provider_xla_cache.{run}")
        for name, summary, run in (
            (
                "plan-find-caches",
                "find how arguments of cache rules are carried",
                "find:find_caches",
            ),
            ("plan-with-caches", "run a function with caches in int8", "use:with_caches"),
            ("plan-quantize-cache", "quantize caches of an argument", "use:quantize_cache"),
            ("model-with-caches", "a method as a function of its caches", "use:planned_function"),
            ("model-put-caches", "put caches in int8 into a model", "use:put_caches"),
        )
    ]

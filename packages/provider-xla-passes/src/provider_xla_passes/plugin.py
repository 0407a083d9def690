"""What provider-xla-passes declares to jaxtap. Must not import jax."""

from interception_core import FeatureSpec, FormSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return what ``plan.optimize`` and ``plan.allocate`` do."""
    return [
        FeatureSpec(
            name="plan-optimize",
            summary="round parameters by passes over data",
            run="provider_xla_passes.optimize:optimize",
        ),
        FeatureSpec(
            name="plan-allocate",
            summary="choose formats for a budget",
            run="provider_xla_passes.allocate.allocate:allocate",
        ),
    ]


@hookimpl
def jaxtap_register_forms() -> list[FormSpec]:
    """Return the form of parameters whose channels were transformed."""
    return [
        FormSpec(
            name="transformed",
            summary="quantized values with maps for the activations",
            form="provider_xla_passes:TransformedWeight",
        )
    ]

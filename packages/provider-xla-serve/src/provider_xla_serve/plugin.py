"""What provider-xla-serve declares to jaxtap. Must not import jax."""

from interception_core import FeatureSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return what ``plan.export`` does."""
    return [
        FeatureSpec(
            name="plan-export",
            summary="put a program into a file",
            run="provider_xla_serve.make:export",
        )
    ]

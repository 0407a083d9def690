"""What provider-odml declares to jaxtap. Must not import jax."""

from interception_core import ProviderSpec, hookimpl

API = (1, 0)


@hookimpl
def jaxtap_register_providers() -> list[ProviderSpec]:
    """Return the provider for training."""
    return [
        ProviderSpec(
            name="odml-qat",
            summary="trains a program for LiteRT: tensors rounded as the device rounds them",
            factory="provider_odml:OdmlQatProvider",
        )
    ]

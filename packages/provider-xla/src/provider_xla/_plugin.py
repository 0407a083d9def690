"""What provider-xla declares to jaxtap. Must not import jax."""

from interception_core import CommandSpec, ProviderSpec, hookimpl

API = (1, 0)


@hookimpl
def jaxtap_register_providers() -> list[ProviderSpec]:
    """Returns the provider for inference."""
    return [
        ProviderSpec(
            name="ptq",
            summary="post-training quantization: matrix products and convolutions in int8",
            factory="provider_xla:PtqProvider",
        )
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Returns the demo."""
    return [
        CommandSpec(
            name="demo",
            summary="train two small models on handwritten digits and run them in int8",
            run="provider_xla._demo:run",
            configure="provider_xla._demo:configure",
        )
    ]

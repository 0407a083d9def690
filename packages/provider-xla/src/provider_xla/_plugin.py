"""What provider-xla declares to jaxtap. Must not import jax."""

from interception_core import CommandSpec, ProviderSpec, hookimpl

API = (1, 0)


@hookimpl
def jaxtap_register_providers() -> list[ProviderSpec]:
    """Returns the providers for inference and for training."""
    return [
        ProviderSpec(
            name="ptq",
            summary="post-training quantization: parameters and products in int8, int4, fp8",
            factory="provider_xla:PtqProvider",
        ),
        ProviderSpec(
            name="qt",
            summary="quantized training: products in int8, int4 or fp8, forward and backward",
            factory="provider_xla:QtProvider",
        ),
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Returns the demo, which ``jaxtap demo --provider xla`` runs."""
    return [
        CommandSpec(
            name="demo-xla",
            summary="train two small models on handwritten digits and run them in int8 and int4",
            run="provider_xla._demo:run",
            configure="provider_xla._demo:configure",
        )
    ]

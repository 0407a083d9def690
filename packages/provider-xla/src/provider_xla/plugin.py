"""What provider-xla declares to jaxtap. Must not import jax."""

from interception_core import CommandSpec, ProviderSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_providers() -> list[ProviderSpec]:
    """Return the providers for inference and for training."""
    return [
        ProviderSpec(
            name="ptq",
            summary="post-training quantization: parameters and contractions in int8, int4, fp8",
            factory="provider_xla:PtqProvider",
        ),
        ProviderSpec(
            name="qt",
            summary="quantized training: contractions in int8, int4 or fp8, forward and backward",
            factory="provider_xla:QtProvider",
        ),
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the commands for plans."""
    return [
        CommandSpec(
            name="plan",
            summary="print what quantization rules do to a JAX function; nothing is run",
            run="provider_xla.cli.command:run_plan",
            configure="provider_xla.cli.command:configure_plan",
        ),
        CommandSpec(
            name="explain",
            summary="print why one operation or parameter is quantized as it is",
            run="provider_xla.cli.command:run_explain",
            configure="provider_xla.cli.command:configure_explain",
        ),
        CommandSpec(
            name="presets",
            summary="print the rules that have a name: what they do, bytes, kernels here",
            run="provider_xla.cli.command:run_presets",
            configure="provider_xla.cli.command:configure_presets",
        ),
    ]

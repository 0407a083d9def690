"""What provider-xla-formats declares to jaxtap. Must not import jax."""

from interception_core import CommandSpec, FeatureSpec, FormSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_forms() -> list[FormSpec]:
    """Return the stored form that holds another one, with minima."""
    return [
        FormSpec(
            name="affine",
            summary="quantized values with a float minimum per group",
            form="provider_xla_formats:AffineWeight",
        ),
    ]


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return how arrays with zero points are packed."""
    return [
        FeatureSpec(
            name="pack-zero-points",
            summary="minima for zero points, which kernels don't know",
            run="provider_xla_formats.affine:with_minimum",
        ),
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the command for files of float parameters."""
    return [
        CommandSpec(
            name="quantize",
            summary="quantize the parameters in a file by the plan of a JAX function",
            run="provider_xla_formats.command:run_quantize",
            configure="provider_xla_formats.command:configure_quantize",
        ),
    ]

"""What provider-xla-report declares to jaxtap. Must not import jax."""

from interception_core import CommandSpec, FeatureSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return what ``plan.report`` does."""
    return [
        FeatureSpec(
            name="plan-report",
            summary="measure errors, bytes and times",
            run="provider_xla_report.measure:make_report",
        )
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the command for a function in a file."""
    return [
        CommandSpec(
            name="report",
            summary="measure what quantization costs a JAX function: error, bytes, time",
            run="provider_xla_report.command:run_report",
            configure="provider_xla_report.command:configure_report",
        )
    ]

"""What provider-odml-export declares to jaxtap. Must not import jax."""

from interception_core import CommandSpec, DoctorCheck, FeatureSpec, ProviderSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_providers() -> list[ProviderSpec]:
    """Return the provider for conversion."""
    return [
        ProviderSpec(
            name="odml-conversion",
            summary="the program that LiteRT's converter is given, as a JAX function",
            factory="provider_odml_export:OdmlConversionProvider",
        )
    ]


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return what ``QatModel.export`` does."""
    return [
        FeatureSpec(
            name="odml-export",
            summary="write a trained program to a verified .tflite",
            run="provider_odml_export.exporting.export:export_model",
        )
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the demo, which ``jaxtap demo --provider odml`` runs."""
    return [
        CommandSpec(
            name="demo-odml",
            summary="train a model for the device, export it to a .tflite and run that in LiteRT",
            run="provider_odml_export.demo:run",
            configure="interception_core.demo_kit:configure",
        )
    ]


@hookimpl
def jaxtap_doctor_checks() -> list[DoctorCheck]:
    """Return the check of the libraries that export needs."""
    return [
        DoctorCheck(
            name="litert",
            summary="the libraries that convert and run a .tflite",
            run="provider_odml_export.doctor:litert",
        )
    ]

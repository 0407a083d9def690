"""quant-numerics' plugin module: what it adds to jaxtap. Must not import jax."""

from interception_core import DoctorCheck, FormSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_forms() -> list[FormSpec]:
    """Return quantized values with scales, packed or not."""
    return [
        FormSpec("qarray", "quantized values with scales", "quant_numerics:QArray"),
        FormSpec("packed", "the same as planes of bits", "quant_numerics:PackedQArray"),
    ]


@hookimpl
def jaxtap_doctor_checks() -> list[DoctorCheck]:
    """Return the check of number formats."""
    return [
        DoctorCheck(
            name="qtypes",
            summary="every number format that a plugin declares can be made",
            run="quant_numerics.formats.qtypes:formats",
        )
    ]

"""quant-numerics' plugin module: what it adds to jaxtap. Must not import jax."""

from interception_core import DoctorCheck, hookimpl

API = (1, 0)


@hookimpl
def jaxtap_doctor_checks() -> list[DoctorCheck]:
    """Return the check of number formats."""
    return [
        DoctorCheck(
            name="qtypes",
            summary="every number format that a plugin declares can be made",
            run="quant_numerics.formats.check:formats",
        )
    ]

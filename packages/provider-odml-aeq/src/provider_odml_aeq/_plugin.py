"""What provider-odml-aeq declares to jaxtap. Must not import jax."""

from interception_core import ExportBackendSpec, hookimpl

API = (1, 6)


@hookimpl
def jaxtap_register_export_backends() -> list[ExportBackendSpec]:
    """Return the backend that quantizes with ai-edge-quantizer."""
    return [
        ExportBackendSpec(
            name="aeq",
            summary="ai-edge-quantizer: octav, mse, gptq, and scales of blocks",
            factory="provider_odml_aeq:AeqBackend",
        )
    ]

"""What provider-xla-models declares to jaxtap. Must not import jax."""

from interception_core import BridgeSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_bridges() -> list[BridgeSpec]:
    """Return the bridges of the frameworks whose model objects can be quantized."""
    return [
        BridgeSpec(
            name="nnx",
            summary="modules of Flax NNX",
            factory="provider_xla_models.nnx:NnxBridge",
            model="flax.nnx:Module",
            install="provider-xla[nnx]",
        ),
        BridgeSpec(
            name="linen",
            summary="modules of Flax Linen",
            factory="provider_xla_models.linen:LinenBridge",
            model="flax.linen:Module",
            install="provider-xla[linen]",
        ),
        BridgeSpec(
            name="equinox",
            summary="modules of Equinox",
            factory="provider_xla_models.equinox:EquinoxBridge",
            model="equinox:Module",
            install="provider-xla[equinox]",
        ),
    ]

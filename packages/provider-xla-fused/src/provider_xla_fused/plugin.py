"""What provider-xla-fused declares to jaxtap. Must not import jax."""

from interception_core import FeatureSpec, hookimpl

API = (1, 7)
NAMES = ("attention", "gelu", "layer_norm", "rms_norm", "silu", "softmax")


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return the functions that a kernel computes, by what rules call them."""
    return [
        FeatureSpec(
            name=f"fused-{name}",
            summary=f"compute {name} by a kernel, for rules with kernel='fused'",
            run=f"provider_xla_fused.functions:{name}",
        )
        for name in NAMES
    ]

"""What this distribution declares to jaxtap. Must not import jax."""

from interception_core import QTypeSpec, hookimpl

API = (1, 4)


@hookimpl
def jaxtap_register_qtypes():
    return [
        QTypeSpec(
            name="nf3",
            summary="8 quantiles of the normal distribution",
            factory="nf3_format.formats:nf3",
        )
    ]

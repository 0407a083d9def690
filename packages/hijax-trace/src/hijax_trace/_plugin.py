"""hijax-trace's plugin module: what it adds to jaxtap. Must not import jax."""

from interception_core import EngineSpec, hookimpl

API = (1, 0)


@hookimpl
def jaxtap_register_engines() -> list[EngineSpec]:
    """Returns the engine that works by tracing."""
    return [
        EngineSpec(
            name="trace",
            summary="traces the program once and shows each operation of it, under jit",
            factory="hijax_trace._tap.engine:TraceEngine",
        )
    ]

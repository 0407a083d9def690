"""hijax-trace's plugin: its engine and command. It must not import jax."""

from interception_core import CommandSpec, EngineSpec, hookimpl

API = (1, 0)


@hookimpl
def jaxtap_register_engines() -> list[EngineSpec]:
    """Return TraceEngine's spec."""
    return [
        EngineSpec(
            name="trace",
            summary="traces the program once and shows each operation of it, under jit",
            factory="hijax_trace.engine:TraceEngine",
            priority=20,
        )
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the command ``jaxtap trace``."""
    return [
        CommandSpec(
            name="trace",
            summary="print the operations of a JAX function: ids, operands, where they come from",
            run="hijax_trace.cli.command:run",
            configure="hijax_trace.cli.command:configure",
        )
    ]

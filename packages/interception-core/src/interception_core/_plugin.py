"""interception-core's plugin, declared as a third party's would be."""

from .plugins.hookspecs import hookimpl
from .plugins.specs import CommandSpec, DoctorCheck, EngineSpec

API = (1, 1)


@hookimpl
def jaxtap_register_engines() -> list[EngineSpec]:
    """Return PatchEngine's spec."""
    return [
        EngineSpec(
            name="patch",
            summary="replaces functions and primitives while the program runs or is traced",
            factory="interception_core.patch.engine:PatchEngine",
            priority=10,
        )
    ]


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the commands that this package adds to ``jaxtap``."""
    return [
        CommandSpec(
            name="plugins",
            summary="list the installed plugins and whether they were loaded",
            run="interception_core.cli.plugins:run",
            configure="interception_core.cli.plugins:configure",
        ),
        CommandSpec(
            name="doctor",
            summary="check versions, devices, plugins and the environment",
            run="interception_core.cli.doctor:run",
            configure="interception_core.cli.doctor:configure",
        ),
        CommandSpec(
            name="new",
            summary="make a distribution for a provider, a kernel, a bridge or a number format",
            run="interception_core.cli.new:run",
            configure="interception_core.cli.new:configure",
        ),
        CommandSpec(
            name="bench",
            summary="time a kernel beside the op's reference and the kernel that it displaces",
            run="interception_core.cli.bench:run",
            configure="interception_core.cli.bench:configure",
        ),
        CommandSpec(
            name="ops",
            summary="list the ops that have kernels, and what a kernel of each is called with",
            run="interception_core.cli.ops:run",
            configure="interception_core.cli.ops:configure",
        ),
        CommandSpec(
            name="demo",
            summary="show what a provider does, on handwritten digits",
            run="interception_core.cli.demo:run",
            configure="interception_core.cli.demo:configure",
        ),
    ]


@hookimpl
def jaxtap_doctor_checks() -> list[DoctorCheck]:
    """Return the checks of the installation."""
    return [
        DoctorCheck(
            name="versions",
            summary="Python, jax and jaxlib are of supported versions",
            run="interception_core.cli.checks:versions",
        ),
        DoctorCheck(
            name="devices",
            summary="JAX's backends initialise",
            run="interception_core.cli.checks:devices",
        ),
        DoctorCheck(
            name="plugins",
            summary="every installed plugin loads",
            run="interception_core.cli.checks:plugins",
        ),
        DoctorCheck(
            name="kernels",
            summary="every kernel for a platform of this machine can be registered",
            run="interception_core.cli.checks:kernels",
        ),
        DoctorCheck(
            name="environment",
            summary="no environment variable changes how programs run unnoticed",
            run="interception_core.cli.checks:environment",
        ),
    ]

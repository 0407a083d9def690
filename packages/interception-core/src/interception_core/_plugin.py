"""interception-core's plugin, declared as a third party's would be."""

from .plugins.hookspecs import hookimpl
from .plugins.specs import CommandSpec, DoctorCheck, EngineSpec

API = (1, 1)

_CLI = "interception_core.cli"


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
    """Return the commands that this package adds to ``jaxtap``: modules of `cli`."""
    summaries = {
        "plugins": "list the installed plugins and whether they were loaded",
        "doctor": "check versions, devices, plugins and the environment",
        "new": "make a distribution for a provider, a kernel, a bridge or a number format",
        "bench": "time a kernel beside the op's reference and the kernel that it displaces",
        "ops": "list the ops that have kernels, and what a kernel of each is called with",
        "completion": "print what makes a shell complete commands, options and files",
        "demo": "show what a provider does, on handwritten digits",
    }
    return [
        CommandSpec(name, summary, f"{_CLI}.{name}:run", f"{_CLI}.{name}:configure")
        for name, summary in summaries.items()
    ]


@hookimpl
def jaxtap_doctor_checks() -> list[DoctorCheck]:
    """Return the checks of the installation: functions of `cli.checks`."""
    summaries = {
        "versions": "Python, jax and jaxlib are of supported versions",
        "devices": "JAX's backends initialise",
        "plugins": "every installed plugin loads",
        "kernels": "every kernel for a platform of this machine can be registered",
        "environment": "no environment variable changes how programs run unnoticed",
    }
    return [
        DoctorCheck(name, summary, f"{_CLI}.checks:{name}") for name, summary in summaries.items()
    ]

"""What jaxtap declares to itself: the demo of provider-xla. Must not import jax."""

from interception_core import CommandSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the command of the demo."""
    return [
        CommandSpec(
            name="demo-xla",
            summary="train two small models on handwritten digits, and run them in int8 and int4",
            run="jaxtap.demo.command:run",
            configure="interception_core.demo_kit:configure",
        ),
    ]

"""What jaxtap-llm declares to jaxtap. Must not import jax."""

from interception_core import CommandSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_commands() -> list[CommandSpec]:
    """Return the command of language models, which has commands."""
    return [
        CommandSpec(
            name="llm",
            summary="language models: quantize a folder, generate, fine-tune, export; a demo",
            run="jaxtap_llm.cli:run",
            configure="jaxtap_llm.cli:configure",
        ),
    ]

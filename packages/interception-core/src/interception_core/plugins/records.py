"""PluginRecord: what became of one installed plugin."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..errors import one_line

Status: TypeAlias = Literal["ok", "failed", "disabled", "conflict"]
Phase: TypeAlias = Literal["metadata", "import", "api", "hooks", "declare"]


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one installed plugin. `plugins()` returns one for each.

    Attributes:
        name: the entry-point name; `JAXTAP_DISABLE_PLUGINS` takes it.
        distribution: the distribution that brings the plugin, such as ``"acme-quant"``.
        version: the version of that distribution.
        module: the plugin module, as the entry point gives it.
        status: ``"ok"``; ``"failed"``: left out; ``"disabled"``: left out on request;
            ``"conflict"``: works but for the names that another plugin claims as well.
        phase: the last phase that was reached, so for a failed plugin the one that failed:
            ``"metadata"`` (the entry point), ``"import"`` (of the module), ``"api"`` (the
            version), ``"hooks"`` (their names and arguments) or ``"declare"`` (what they return).
        error: why the plugin failed or what it conflicts with, or None. Its cause and
            traceback are kept.
        provides: what was declared, as ``"provider:acme"``.
        notes: what the plugin should not do but is not left out for.
    """

    name: str
    distribution: str
    version: str
    module: str
    status: Status
    phase: Phase
    error: BaseException | None = None
    provides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The plugin and where it comes from, for messages."""
        return f"plugin {self.name!r} ({self.distribution} {self.version})"

    @property
    def reason(self) -> str:
        """Why the plugin failed, in one line; empty when it did not."""
        return "" if self.error is None else f"{self.phase}: {one_line(self.error)}"

    def as_json(self) -> dict[str, Any]:
        """Returns the record as built-in types that `json` can write."""
        error = self.error
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.module,
            "status": self.status,
            "phase": self.phase,
            "error": error and {"type": type(error).__name__, "message": str(error)},
            "provides": list(self.provides),
            "notes": list(self.notes),
        }

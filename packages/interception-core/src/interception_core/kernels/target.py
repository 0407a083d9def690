"""FfiTarget: the compiled handlers of one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PluginError
from ..plugins.specs import is_version

STAGES = ("instantiate", "prepare", "initialize", "execute")
"""The stages of a handler, in the order in which XLA runs them."""

_TYPE = ("type_id", "type_info")


@dataclass(frozen=True, slots=True)
class FfiTarget:
    """The handlers of one FFI target.

    A kernel's `handlers` returns a mapping of target names to these.

    Args:
        stages: the `PyCapsule` of the handler for ``"execute"``, and for ``"instantiate"``,
            ``"prepare"`` and ``"initialize"`` if the kernel has them.
        api_version: (major, minor) of the XLA FFI headers that the handlers were compiled with:
            ``XLA_FFI_API_MAJOR`` and ``XLA_FFI_API_MINOR``.
        types: by name, the types of the handlers' states, each with its ``"type_id"`` and
            ``"type_info"`` capsules. The whole process shares the names, so start them with the
            package, as for targets.

    Raises:
        PluginError: a field has the wrong type or form.
    """

    stages: Mapping[str, Any]
    api_version: tuple[int, int]
    types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            not isinstance(self.stages, Mapping)
            or "execute" not in self.stages
            or not set(self.stages) <= set(STAGES)
        ):
            given = list(self.stages) if isinstance(self.stages, Mapping) else self.stages
            raise PluginError(
                "FfiTarget.stages must map 'execute', and optionally "
                f"{', '.join(map(repr, STAGES[:-1]))}, to capsules, got {given!r}. Use these names."
            )
        for stage, capsule in self.stages.items():
            _check_capsule(f"stages[{stage!r}]", capsule)
        if not is_version(self.api_version):
            raise PluginError(
                f"FfiTarget.api_version must be a tuple of two ints, got {self.api_version!r}. "
                "Pass (XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR) of the headers that the handlers were "
                "compiled with, such as (0, 3)."
            )
        if not isinstance(self.types, Mapping):
            raise PluginError(
                f"FfiTarget.types must map type names to capsules, got {self.types!r}. Pass a "
                "dictionary."
            )
        for name, capsules in self.types.items():
            if not isinstance(name, str) or not isinstance(capsules, Mapping):
                raise PluginError(
                    "FfiTarget.types must map type names to mappings, got "
                    f"{name!r}: {capsules!r}. Pass a mapping of 'type_id' and 'type_info'."
                )
            if "type_id" not in capsules or not set(capsules) <= set(_TYPE):
                raise PluginError(
                    f"FfiTarget.types[{name!r}] must have 'type_id', and optionally 'type_info', "
                    f"got {list(capsules)!r}. Use these names."
                )
            for part, capsule in capsules.items():
                _check_capsule(f"types[{name!r}][{part!r}]", capsule)


def _check_capsule(where: str, value: Any) -> None:
    # types.CapsuleType needs Python 3.13.
    if type(value).__name__ != "PyCapsule":
        raise PluginError(
            f"FfiTarget.{where} must be a PyCapsule, got {value!r}. Make one with "
            "jax.ffi.pycapsule() or nanobind's nb::capsule."
        )

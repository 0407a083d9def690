"""What extras bring: packages with features of plans, stored forms and functions, and libraries."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from interception_core import JaxtapError, UnknownNameError, find_bridge, get_feature

PACKAGES = {
    "provider_xla_cache": "cache",
    "provider_xla_formats": "gguf",
    "provider_xla_fused": "fused",
    "provider_xla_lora": "lora",
    "provider_xla_models": "models",
    "provider_xla_passes": "passes",
    "provider_xla_report": "report",
    "provider_xla_serve": "export",
}
"""The extras that bring packages of ours, which declare what they add."""

_LIBRARIES = {"msgspec": "safetensors"}
"""The extras that bring libraries which modules import as they are loaded."""

_OF_FEATURES = {
    "fused-softmax": "provider_xla_fused",
    "plan-allocate": "provider_xla_passes",
    "plan-optimize": "provider_xla_passes",
    "adapter-lora": "provider_xla_lora",
    "plan-apply-adapters": "provider_xla_lora",
    "plan-find-adapters": "provider_xla_lora",
    "plan-init-adapters": "provider_xla_lora",
    "plan-put-adapters": "provider_xla_lora",
    "run-adapters": "provider_xla_lora",
    "rule-lora": "provider_xla_lora",
    "pack-zero-points": "provider_xla_formats",
    "model-put-caches": "provider_xla_cache",
    "model-with-caches": "provider_xla_cache",
    "plan-find-caches": "provider_xla_cache",
    "plan-quantize-cache": "provider_xla_cache",
    "plan-with-caches": "provider_xla_cache",
    "plan-export": "provider_xla_serve",
    "plan-report": "provider_xla_report",
}
_OF_FORMS = {"affine": "provider_xla_formats", "transformed": "provider_xla_passes"}


class MissingExtraError(JaxtapError, ImportError):
    """A library that one of the package's extras brings is not installed."""


def require_extra(module: str, extra: str) -> Any:
    """Import a module of an extra.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name.partition(".")[0]):
            raise
        raise MissingExtraError(
            f"{module} is missing: run pip install 'provider-xla[{extra}]'"
        ) from error


def feature(name: str) -> Callable[..., Any]:
    """Return the function of a feature, such as ``"plan-optimize"`` for ``plan.optimize``.

    Raises:
        MissingExtraError: the package that brings it is not installed.
        UnknownNameError: no plugin has it, and no extra brings it.
        PluginError: as ``interception_core.get_feature``.
    """
    try:
        return get_feature(name)
    except UnknownNameError as error:
        package = _OF_FEATURES.get(name, "")
        # One that is installed may have failed, or be disabled: the error says so.
        if not package or importlib.util.find_spec(package) is not None:
            raise
        raise missing(name.replace("-", ".", 1).replace("-", "_"), package) from error


def explained(what: str, error: ModuleNotFoundError) -> ImportError:
    """Return the error of a name whose package or library is missing; others as they are."""
    if error.name in PACKAGES:
        return missing(what, error.name)
    if error.name in _LIBRARIES:
        extra = _LIBRARIES[error.name]
        return MissingExtraError(
            f"{what} needs {error.name}, which is missing: run pip install 'provider-xla[{extra}]'"
        )
    return error


def missing(what: str, package: str, extra: str | None = None) -> MissingExtraError:
    """Return the error of what a package of ``PACKAGES`` brings, which is missing."""
    return MissingExtraError(
        f"{what} is of {package.replace('_', '-')}, which is missing: run pip install "
        f"'provider-xla[{extra or PACKAGES[package]}]'"
    )


_FRAMEWORKS = {"flax.nnx": "nnx", "flax.linen": "linen", "equinox": "equinox"}
"""The extras that bring bridges, by the modules of frameworks."""


def bridge_of(model: Any) -> Any:
    """Return the bridge of a model object.

    Raises:
        MissingExtraError: the package that has it is not installed.
        UnknownNameError: no plugin has one.
        PluginError: as ``interception_core.find_bridge``.
    """
    try:
        return find_bridge(model)
    except UnknownNameError as error:
        package = "provider_xla_models"
        if importlib.util.find_spec(package) is not None:
            raise
        for framework, extra in _FRAMEWORKS.items():
            if any(f"{cls.__module__}.".startswith(f"{framework}.") for cls in type(model).__mro__):
                what = f"the bridge of {framework}"
                raise missing(what, package, extra) from error
        raise


def install_form(kind: str) -> str:
    """Return what to do for a stored form that no installed package has."""
    if (package := _OF_FORMS.get(kind)) is None:
        return "Install the package whose form it is"
    return f"Run pip install 'provider-xla[{PACKAGES[package]}]'"

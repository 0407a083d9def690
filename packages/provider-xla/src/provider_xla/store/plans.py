"""Plans that files can hold: provider-xla's and others'."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from interception_core import StorablePlan

from .errors import StoreError

if TYPE_CHECKING:
    from ..plan.plan import Plan

_OURS = ("params", "prefix", "weights", "derived", "rules", "adapters")
"""What ``save`` and ``load`` read of a plan of provider-xla."""


def is_ours(plan: Any) -> TypeGuard[Plan]:
    """Return whether a plan has what provider-xla's have."""
    return all(hasattr(plan, name) for name in _OURS)


def check_storable(plan: Any, call: str) -> None:
    """Check that a file can hold a plan.

    Raises:
        StoreError: ``plan`` is not a plan, or is another provider's without ``manifest`` and
            ``stored_types``.
    """
    if plan is None or is_ours(plan) or isinstance(plan, StorablePlan):
        return
    instead = "leave plan out" if call == "save" else "pass template= and leave plan out"
    raise StoreError(
        f"plan must have manifest() and stored_types(), got a {type(plan).__name__} without. Add "
        f"them (interception_core.StorablePlan), or {instead}."
    )


def check_ours(plan: Any, call: str) -> None:
    """Raise StoreError unless a plan is provider-xla's."""
    if not is_ours(plan):
        raise StoreError(
            f"{call} needs a plan of provider-xla, got a {type(plan).__name__}. Save what "
            "plan.quantize returns instead."
        )


def manifest_of(plan: StorablePlan) -> dict[str, Any]:
    """Return another provider's plan as a file stores it.

    Raises:
        StoreError: the manifest is not JSON, or lacks the provider's name or config.
    """
    found = plan.manifest()
    try:
        text = json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{type(plan).__name__}.manifest() must return JSON's types, got {found!r}: {error}."
        ) from error
    result = json.loads(text)
    name, config = (result.get(key) for key in ("provider", "config"))
    if not isinstance(name, str) or not isinstance(config, dict):
        raise StoreError(
            f'{type(plan).__name__}.manifest() must have a name as "provider" and an object as '
            f'"config", got {name!r} and {config!r}.'
        )
    return result


def manifest_changes(stored: Any, planned: Any, at: str = "") -> Iterator[str]:
    """Yield where two manifests differ, a line each."""
    if isinstance(stored, Mapping) and isinstance(planned, Mapping):
        for key in [*stored, *(key for key in planned if key not in stored)]:
            below = f"{at}.{key}" if at else str(key)
            yield from manifest_changes(stored.get(key), planned.get(key), below)
    elif stored != planned:
        yield f"{at}: {stored!r} -> {planned!r}"

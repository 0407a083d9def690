"""The versions of JAX that this package works with, by its metadata."""

from __future__ import annotations

from importlib.metadata import requires, version

from .errors import JaxtapError

DISTRIBUTION = "interception-core"


class OldJaxError(JaxtapError, ImportError):
    """A JAX that lacks what jaxtap is built on."""


def check_jax() -> None:
    """Raise where JAX is older than jaxtap works with.

    A newer one may work: ``jaxtap doctor`` tells of it.

    Raises:
        OldJaxError: it is older.
    """
    # Not at the top: it is imported with jax, not before.
    from packaging.requirements import Requirement
    from packaging.version import Version

    needs = {need.name: need for need in map(Requirement, requires(DISTRIBUTION) or ())}
    found = version("jax")
    least = [one.version for one in needs["jax"].specifier if one.operator == ">="]
    if any(Version(found) < Version(one) for one in least):
        raise OldJaxError(
            f"jaxtap needs JAX {' and '.join(least)} or newer, got {found}. Run pip install "
            f"--upgrade '{needs['jax']}'."
        )

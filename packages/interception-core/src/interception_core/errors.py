"""The errors and warnings that jaxtap raises on purpose.

Every error derives from `JaxtapError`, so that programs and the command line can tell jaxtap's
refusals from bugs with one ``except``.
"""

import difflib
from collections.abc import Iterable

# Of a longer list, such as the targets of JAX, an error gives the nearest names alone.
_LISTED = 20
_NEAREST = 8


class JaxtapError(Exception):
    """Base class of every error that jaxtap raises on purpose."""


class TargetError(JaxtapError):
    """An interception target, or a handler for one, cannot be used."""


class PluginError(JaxtapError):
    """A plugin, or something that a plugin declared, cannot be used.

    Where another exception is the reason, it is chained as ``__cause__``.
    """


class KernelError(PluginError):
    """A kernel can't be registered with XLA.

    The message names the kernel's plugin and target.
    """


class UnknownNameError(JaxtapError, LookupError):
    """A name that nothing is registered under.

    Attributes:
        kind: the kind of thing, such as ``"provider"``.
        given: the name that was asked for.
        known: the registered names, sorted.
        nearest: the known name most like `given`, or None.
    """

    kind: str = ""
    given: str = ""
    known: tuple[str, ...] = ()
    nearest: str | None = None


class PluginWarning(UserWarning):
    """A plugin was left out, or does what it should not."""


def nearest_name(given: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `given`, or None."""
    folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(given.casefold(), folded, n=1)
    return folded[matches[0]] if matches else None


def unknown_name(
    kind: str, given: object, known: Iterable[str], hint: str = ""
) -> UnknownNameError:
    """Return the error for a name that nothing is registered under.

    Args:
        kind: the kind of thing, in the singular, such as ``"provider"``.
        given: the name that was asked for.
        known: the registered names.
        hint: a sentence for the end of the message, or empty.

    Returns:
        An `UnknownNameError` whose message gives the nearest name and the known ones.
    """
    names = tuple(sorted(set(known)))
    near = nearest_name(given, names) if isinstance(given, str) else None
    sentences = [f"Unknown {kind} {given!r}."]
    if near is not None:
        sentences.append(f"Did you mean {near!r}?")
    if not names:
        sentences.append(f"No {kind} is registered.")
    elif len(names) <= _LISTED:
        sentences.append(f"Known {kind}s: {', '.join(names)}.")
    else:
        nearby = difflib.get_close_matches(str(given), names, n=_NEAREST, cutoff=0.0)
        sentences.append(f"Nearest of the {len(names)} known {kind}s: {', '.join(nearby)}.")
    if hint:
        sentences.append(hint)
    error = UnknownNameError(" ".join(sentences))
    error.kind, error.given, error.known, error.nearest = kind, str(given), names, near
    return error


def one_line(error: BaseException) -> str:
    """Describe an exception in one line.

    Args:
        error: any exception.

    Returns:
        Its type and the first line of its text, such as ``"ModuleNotFoundError: No module
        named 'acme'"``. Errors of jaxtap are described without their type.
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if text and isinstance(error, JaxtapError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

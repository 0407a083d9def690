"""The errors and the warning that jaxtap raises on purpose, and how they are worded.

Every error derives from `JaxtapError`, so that a program (and the command line)
can tell jaxtap's own refusals from bugs with one ``except``.
"""

import difflib
from collections.abc import Iterable

# Of a longer list than this (the tap targets, say), only what is near is of use.
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
    """A kernel cannot be registered with XLA. The message names its plugin and its target."""


class UnknownNameError(JaxtapError, LookupError):
    """A name that nothing is registered under.

    Attributes:
        kind: what was looked up, such as ``"provider"``.
        given: the name that was asked for.
        known: the names that would have worked, sorted.
        nearest: the known name most like `given`, or None.
    """

    kind: str = ""
    given: str = ""
    known: tuple[str, ...] = ()
    nearest: str | None = None


class PluginWarning(UserWarning):
    """An installed plugin was left out, or does something that it should not."""


def nearest_name(given: str, known: Iterable[str]) -> str | None:
    """Returns the known name most like `given`, letter case ignored, or None if none is near."""
    folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(given.casefold(), folded, n=1)
    return folded[matches[0]] if matches else None


def unknown_name(
    kind: str, given: object, known: Iterable[str], hint: str = ""
) -> UnknownNameError:
    """Words the error for a name that nothing is registered under. The caller raises it.

    Args:
        kind: what was looked up, in the singular, such as ``"provider"``.
        given: the name that was asked for.
        known: the names that would have worked.
        hint: a sentence for the end of the message, if any.

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
    """Describes an exception in one line, for lists and warnings.

    Args:
        error: any exception.

    Returns:
        Its type and the first line of its text, such as ``"ModuleNotFoundError: No module
        named 'acme'"``; the type is left out for jaxtap's own errors, whose text says enough.
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if text and isinstance(error, JaxtapError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

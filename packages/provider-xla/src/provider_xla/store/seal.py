"""Seal: a text that holds its SHA-256, computed with zeros there."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

FIELD = "jaxtap.sha256"
BLANK = "0" * 64
# Inside a JSON string the quotes would be escaped, so only the field itself matches.
_FIELD = re.compile(rb'"jaxtap\.sha256":"([0-9a-f]{64})"')


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces, in ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def seal(text: bytes) -> bytes:
    """Return a JSON text with the checksum in ``jaxtap.sha256``."""
    (found,) = _FIELD.finditer(text)
    digest = hashlib.sha256(text).hexdigest().encode()
    return text[: found.start(1)] + digest + text[found.end(1) :]


def is_intact(text: bytes) -> bool | None:
    """Return whether a sealed text is intact; None without a checksum."""
    found = list(_FIELD.finditer(text))
    if len(found) != 1:
        return None if not found else False
    start, end = found[0].span(1)
    digest = hashlib.sha256(text[:start] + BLANK.encode() + text[end:]).hexdigest()
    return digest.encode() == text[start:end]

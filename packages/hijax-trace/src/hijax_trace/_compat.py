"""The only place of hijax-trace that touches private JAX, or depends on its version.

Each name says for which versions it holds; all were checked on 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

# ---- Staging and re-emitting programs: what _tap/ needs ----


# ---- High-level types: what _types/ needs ----

"""Form: what proxies in one place of a carry must share."""

from __future__ import annotations

from collections.abc import Hashable

import jax

from .array_proxy import ArrayProxy


def form_of(proxy: ArrayProxy) -> Hashable:
    """Return a proxy's structure with the shapes and dtypes of its arrays."""
    leaves, treedef = jax.tree.flatten(proxy)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

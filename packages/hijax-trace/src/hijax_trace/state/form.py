"""Form: what two proxies have in common, so that one can take the place of the other."""

from __future__ import annotations

from collections.abc import Hashable

import jax

from ..proxy.array_proxy import ArrayProxy


def form_of(proxy: ArrayProxy) -> Hashable:
    """Return what is equal for proxies of one form: their structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(proxy)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

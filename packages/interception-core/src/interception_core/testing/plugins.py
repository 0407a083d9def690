"""Other plugins than the installed ones, for the length of a test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator

from ..plugins import host
from ..plugins.records import PluginRecord, discover


@contextlib.contextmanager
def installed_plugins(*modules: str, without: Collection[str] = ()) -> Iterator[None]:
    """Let plugin modules be installed meanwhile, and some plugins not.

    Plugins are loaded again within and afterwards, so nothing is kept of what they were asked. JAX
    traces functions again within, since traces have the kernels that there were, and has what it
    traced before afterwards.

    Args:
        *modules: plugin modules that no distribution declares, such as ``"acme_quant.plugin"``.
            The name of such a plugin is that of its module.
        without: the names of installed plugins to leave out.
    """

    def found() -> Iterator[PluginRecord]:
        yield from (plugin for plugin in discover() if plugin.name not in without)
        yield from (PluginRecord(module, module, module, "0") for module in modules)

    host.reset(host.Host(found))
    try:
        with _traced_apart():
            yield
    finally:
        host.reset()


def _traced_apart() -> contextlib.AbstractContextManager[object]:
    """Return a context that JAX's keys of traces tell from all others, if JAX is there."""
    if "jax" not in sys.modules:
        return contextlib.nullcontext()
    from ..cache_key import CacheKey  # imports jax

    return CacheKey()(True)

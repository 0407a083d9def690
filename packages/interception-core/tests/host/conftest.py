"""Plugins without an installation: modules made on the spot, and a host that finds only them."""

import re
import sys
import types
from pathlib import Path

import pytest

from interception_core import PluginRecord, hookimpl
from interception_core.plugins import host as _host

DOCS = Path(__file__).parents[4] / "docs" / "plugins.md"


@pytest.fixture
def declare(monkeypatch):
    """Makes a plugin module, whose hooks are given as what they return or as functions."""

    def make(name, *, distribution=None, api=(1, 0), **hooks):
        module = types.ModuleType(f"{name}_plugin_of_{distribution}".replace("-", "_"))
        if api is not None:
            module.API = api
        for hook, result in hooks.items():
            function = result if callable(result) else lambda result=result: result
            setattr(module, hook, hookimpl(function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return PluginRecord(name, module.__name__, distribution or f"{name}-dist", "1.0")

    return make


@pytest.fixture
def host():
    """Makes the given plugins the only ones, under the given environment."""

    def install(*found, **environ):
        host = _host.Host(lambda: found, environ)
        _host.reset(host)
        return host

    yield install
    _host.reset()


@pytest.fixture(scope="session")
def guide():
    """The text of docs/plugins.md."""
    if not DOCS.exists():
        pytest.skip("docs/plugins.md is in a checkout, and not in the sdist")
    return DOCS.read_text()


@pytest.fixture(scope="session")
def guide_blocks(guide):
    """Its code blocks, by the name in the comment on their first line."""
    blocks = re.findall(r"```\w+\n# (\S+)\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == guide.count("```") // 2, "every code block begins with its name"
    return dict(blocks)

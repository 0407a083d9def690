import inspect

import pluggy
import pytest

from interception_core._plugins import hookspecs as _hookspecs
from interception_core._plugins.hookspecs import API_VERSION, HOOKS, PROJECT


def declared_hooks():
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(_hookspecs)
    return sorted(vars(manager.hook))


def test_the_hooks_are_these():
    assert declared_hooks() == sorted(HOOKS)
    assert sorted(HOOKS) == [
        "jaxtap_doctor_checks",
        "jaxtap_register_commands",
        "jaxtap_register_engines",
        "jaxtap_register_kernels",
        "jaxtap_register_providers",
    ]


@pytest.mark.parametrize("hook", declared_hooks())
class TestEveryHook:
    def test_says_what_it_returns(self, hook):
        assert f"`{HOOKS[hook].__name__}`" in inspect.getdoc(getattr(_hookspecs, hook))

    def test_takes_nothing(self, hook):
        assert not inspect.signature(getattr(_hookspecs, hook)).parameters

    def test_is_in_the_guide(self, hook, guide):
        assert f"| `{hook}()` | `{HOOKS[hook].__name__}` objects |" in guide


@pytest.mark.parametrize("spec", HOOKS.values())
def test_every_spec_is_in_the_guide_with_its_fields(spec, guide):
    fields = inspect.signature(spec).parameters.values()
    shown = ", ".join(
        field.name
        if field.default is field.empty
        else f"{field.name}={field.default!r}".replace("'", '"')
        for field in fields
    )
    assert f"`{spec.__name__}({shown})`" in guide


def test_the_api_version_is_in_the_guide(guide):
    assert f"it is `{API_VERSION}` now" in guide

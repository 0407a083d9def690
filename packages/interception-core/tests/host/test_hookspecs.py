import inspect

import pluggy
import pytest

from interception_core.plugins.hookspecs import (
    ALL_HOOKS,
    API_VERSION,
    HOOKS,
    HOOKSPECS,
    PROJECT,
    SELECT,
)


def declared_hooks():
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HOOKSPECS)
    return sorted(vars(manager.hook))


def test_the_hooks_are_these():
    assert declared_hooks() == sorted(ALL_HOOKS)
    assert sorted(ALL_HOOKS) == [
        "jaxtap_doctor_checks",
        "jaxtap_register_bridges",
        "jaxtap_register_commands",
        "jaxtap_register_engines",
        "jaxtap_register_export_backends",
        "jaxtap_register_features",
        "jaxtap_register_forms",
        "jaxtap_register_kernels",
        "jaxtap_register_providers",
        "jaxtap_register_qtypes",
        "jaxtap_select_kernel",
    ]


@pytest.mark.parametrize("hook", HOOKS)
class TestEveryDeclaringHook:
    def test_takes_nothing(self, hook):
        assert not inspect.signature(getattr(HOOKSPECS, hook)).parameters

    def test_is_in_the_guide(self, hook, guide):
        assert f"| `{hook}()` | `{HOOKS[hook].__name__}` objects |" in guide


class TestTheChoosingHook:
    def test_its_arguments_are_described(self):
        hook = getattr(HOOKSPECS, SELECT)
        assert list(inspect.signature(hook).parameters) == ["call", "candidates"]
        for name in inspect.signature(hook).parameters:
            assert f"{name}: " in inspect.getdoc(hook)

    def test_is_in_the_guide(self, guide):
        assert f"| `{SELECT}(call, candidates)` |" in guide


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_api_version_is_in_the_guide(guide):
    assert f"it is `{API_VERSION}` now" in guide

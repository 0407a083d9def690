import dataclasses

import pytest

from interception_core import EngineSpec, PluginError, PluginRecord, ProviderSpec, UnknownNameError
from interception_core.plugins.registry import build


def provider(name, factory="builtins:dict"):
    return ProviderSpec(name, "a provider", factory)


def status(registry):
    return {record.name: record.status for record in registry.records}


def names(registry, wanted=ProviderSpec):
    return [claim.spec.name for claim in registry.of(wanted)]


@pytest.fixture
def acme(declare):
    return declare("acme", jaxtap_register_providers=[provider("acme"), provider("acme-more")])


@pytest.fixture
def rival(declare):
    return declare("rival", jaxtap_register_providers=[provider("acme"), provider("rival")])


@pytest.fixture
def broken():
    return PluginRecord("broken", "no_such_module_here", "broken-dist", "0.3")


def test_a_broken_plugin_leaves_the_others_alone(acme, broken):
    registry = build([broken, acme], {})
    assert status(registry) == {"broken": "failed", "acme": "ok"}
    assert names(registry) == ["acme", "acme-more"]
    assert registry.get(ProviderSpec, "acme").spec == provider("acme")
    (line,) = registry.warnings
    assert line.startswith("plugin 'broken' (broken-dist 0.3) is left out. import: ModuleNotFound")
    assert "\n" not in line


@pytest.mark.parametrize(
    "hooks",
    [
        {"jaxtap_register_provider": []},
        {"jaxtap_register_providers": lambda config: []},
        {"jaxtap_register_providers": lambda: 1 / 0},
        {"api": (9, 0)},
    ],
    ids=["an unknown hook", "a wrong signature", "an error", "another API"],
)
def test_a_fault_in_a_hook_leaves_plugins_before_and_after_alone(declare, hooks):
    plugins = [
        declare(name, jaxtap_register_providers=[provider(name)]) for name in ("before", "then")
    ]
    choose = {"jaxtap_select_kernel": lambda call, candidates: None}
    registry = build([plugins[0], declare("faulty", **hooks, **choose), plugins[1]], {})
    assert status(registry) == {"before": "ok", "faulty": "failed", "then": "ok"}
    assert names(registry) == ["before", "then"]
    assert [name for name, _ in registry.manager.list_name_plugin()] == ["before", "then"]
    assert not registry.manager.hook.jaxtap_select_kernel.get_hookimpls()


def test_a_module_is_one_plugin(acme):
    again = dataclasses.replace(acme, name="again")
    registry = build([acme, again], {})
    assert status(registry) == {"acme": "ok", "again": "failed"}
    assert names(registry) == ["acme", "acme-more"]
    assert "which the plugin 'acme' is, too. Leave out one of" in str(registry.records[1].error)


def test_the_registry_cannot_be_changed(acme):
    registry = build([acme], {})
    with pytest.raises(TypeError):
        registry.claims["provider", "x"] = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        registry.records = ()


class TestConflict:
    def test_the_contested_name_is_nobodys_and_the_others_stay(self, acme, rival):
        registry = build([acme, rival], {})
        assert status(registry) == {"acme": "conflict", "rival": "conflict"}
        assert names(registry) == ["acme-more", "rival"]
        assert registry.get(ProviderSpec, "acme-more")
        assert registry.get(ProviderSpec, "rival")
        with pytest.raises(PluginError) as caught:
            registry.get(ProviderSpec, "acme")
        assert str(caught.value) == (
            "A provider name must be claimed by one plugin, got 'acme', which is claimed by "
            "plugin 'acme' (acme-dist 1.0) and by plugin 'rival' (rival-dist 1.0), so neither is "
            "used. Disable one: JAXTAP_DISABLE_PLUGINS=acme or JAXTAP_DISABLE_PLUGINS=rival."
        )

    def test_each_record_says_so_and_warns_once(self, acme, rival):
        registry = build([acme, rival], {})
        for record in registry.records:
            assert "acme-dist" in record.reason
            assert "rival-dist" in record.reason
            assert "provider:acme" in record.provides
        assert len(registry.warnings) == 2

    def test_disabling_one_gives_the_name_to_the_other(self, acme, rival):
        registry = build([acme, rival], {"JAXTAP_DISABLE_PLUGINS": "acme"})
        assert status(registry) == {"acme": "disabled", "rival": "ok"}
        assert registry.get(ProviderSpec, "acme").owner.name == "rival"
        assert not registry.warnings

    def test_the_same_name_of_another_kind_is_no_conflict(self, acme, declare):
        engine = EngineSpec("acme", "an engine", "a:b")
        other = declare("other", jaxtap_register_engines=[engine])
        assert set(status(build([acme, other], {})).values()) == {"ok"}

    def test_a_failed_plugin_claims_nothing(self, acme, declare):
        other = declare("other", api=(9, 0), jaxtap_register_providers=[provider("acme")])
        registry = build([acme, other], {})
        assert registry.get(ProviderSpec, "acme").owner.name == "acme"

    def test_two_distributions_with_one_plugin_name(self, declare):
        found = [
            declare("acme", distribution=name, jaxtap_register_providers=[provider(name)])
            for name in ("first", "second")
        ]
        registry = build(found, {})
        assert [record.status for record in registry.records] == ["conflict", "conflict"]
        assert not names(registry)
        with pytest.raises(PluginError, match="distributions first and second; neither is loaded"):
            registry.get(ProviderSpec, "acme")


class TestUnknown:
    def test_gives_the_nearest_and_the_known(self, acme):
        registry = build([acme], {})
        with pytest.raises(UnknownNameError, match=r"Did you mean 'acme'\? Known providers: acme,"):
            registry.get(ProviderSpec, "acmee")

    def test_a_failed_plugin_is_asked_for_by_its_name(self, acme, broken):
        registry = build([acme, broken], {})
        with pytest.raises(PluginError, match=r"'broken' \(broken-dist 0.3\) failed") as caught:
            registry.get(ProviderSpec, "broken")
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)

    def test_a_failed_plugin_may_have_had_any_other_name(self, acme, broken):
        registry = build([acme, broken], {})
        with pytest.raises(UnknownNameError, match="no_such_module_here") as caught:
            registry.get(ProviderSpec, "other")
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)

    def test_a_disabled_plugin_is_mentioned(self, acme):
        registry = build([acme], {"JAXTAP_DISABLE_PLUGINS": "acme"})
        with pytest.raises(UnknownNameError, match="Disabled by JAXTAP_DISABLE_PLUGINS: acme"):
            registry.get(ProviderSpec, "acme")

    def test_a_contested_name_is_not_among_the_known(self, acme, rival):
        registry = build([acme, rival], {})
        with pytest.raises(UnknownNameError) as caught:
            registry.get(ProviderSpec, "other")
        assert caught.value.known == ("acme-more", "rival")


class TestDisabled:
    @pytest.mark.parametrize("value", ["broken", " broken ,", ",broken,acme-x"])
    def test_a_disabled_plugin_is_not_imported(self, acme, broken, value):
        registry = build([acme, broken], {"JAXTAP_DISABLE_PLUGINS": value})
        assert status(registry) == {"acme": "ok", "broken": "disabled"}
        record = registry.records[1]
        assert (record.phase, record.error) == ("metadata", None)

    def test_an_unknown_name_is_warned_about(self, acme):
        registry = build([acme], {"JAXTAP_DISABLE_PLUGINS": "acmee"})
        assert registry.warnings == (
            "JAXTAP_DISABLE_PLUGINS names 'acmee', which is not an installed plugin. "
            "Did you mean 'acme'?",
        )


class TestStrict:
    def test_every_broken_plugin_is_named(self, acme, rival, broken):
        registry = build([acme, broken, rival], {"JAXTAP_STRICT_PLUGINS": "1"})
        with pytest.raises(PluginError, match="JAXTAP_STRICT_PLUGINS is set") as caught:
            registry.raise_if_strict()
        for name in ("acme", "broken", "rival"):
            assert f"plugin {name!r}" in str(caught.value)
        assert caught.value.__cause__ is registry.broken[0].error

    @pytest.mark.parametrize("value", ["", "0"])
    def test_off(self, broken, value):
        build([broken], {"JAXTAP_STRICT_PLUGINS": value}).raise_if_strict()

    def test_nothing_is_raised_where_nothing_is_broken(self, acme, broken):
        environ = {"JAXTAP_STRICT_PLUGINS": "1", "JAXTAP_DISABLE_PLUGINS": "broken"}
        build([acme, broken], environ).raise_if_strict()

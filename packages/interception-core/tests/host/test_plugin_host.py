import importlib
import inspect
import sys
import threading
import time
import types
import warnings

import pytest

import interception_core
from interception_core import (
    EngineSpec,
    KernelSpec,
    PluginError,
    PluginRecord,
    PluginWarning,
    ProviderSpec,
    UnknownNameError,
    declared_specs,
    get_engine,
    get_provider,
)
from interception_core.plugins import host as _host
from interception_core.plugins.records import discover

BROKEN = PluginRecord("broken", "no_such_module_here", "broken-dist", "0.3")


class Provider:
    engine = "patch"
    disable_jit = False

    def __init__(self, bits=8, **others):
        self.bits, self.others = bits, others

    def interceptor(self):
        return None

    def apply(self, fn):
        return fn


class Engine:
    def wrap(self, fn, interceptor):
        return fn


@pytest.fixture
def acme(declare, monkeypatch):
    """A plugin whose specs name objects of a module made here."""
    module = types.ModuleType("acme_implementation")
    module.Provider, module.Engine, module.data = Provider, Engine, 3
    module.half = lambda: types.SimpleNamespace(engine="patch", apply=None)
    module.nothing = lambda: None
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def spec(kind, name, attribute):
        return kind(name, "a summary", f"{module.__name__}:{attribute}")

    return declare(
        "acme-plugin",
        jaxtap_register_providers=[
            spec(ProviderSpec, "acme", "Provider"),
            spec(ProviderSpec, "half", "half"),
            spec(ProviderSpec, "missing", "no_such_attribute"),
            spec(ProviderSpec, "data", "data"),
        ],
        jaxtap_register_engines=[
            spec(EngineSpec, "acme", "Engine"),
            spec(EngineSpec, "nothing", "nothing"),
        ],
        jaxtap_register_kernels=[KernelSpec("acme.gemm", "cpu", "a:b", "gemm")],
    )


class TestByName:
    def test_a_provider_is_built_with_its_config(self, acme, host):
        host(acme)
        provider = get_provider("acme", bits=4, name="mine")
        assert isinstance(provider, Provider)
        assert (provider.bits, provider.others) == (4, {"name": "mine"})

    def test_an_engine_is_built_with_its_config(self, acme, host):
        host(acme)
        assert isinstance(get_engine("acme"), Engine)
        with pytest.raises(TypeError):
            get_engine("acme", no_such_option=1)

    def test_what_is_not_a_provider_is_refused(self, acme, host):
        host(acme)
        with pytest.raises(PluginError) as caught:
            get_provider("half")
        assert "lacks: whether that engine runs with jit off; interceptor()" in str(caught.value)
        assert "Provider 'half' of plugin 'acme-plugin' (acme-plugin-dist 1.0)" in str(caught.value)

    def test_what_is_not_an_engine_is_refused(self, acme, host):
        host(acme)
        with pytest.raises(PluginError, match=r"lacks: wrap\(fn, interceptor\)"):
            get_engine("nothing")

    def test_a_factory_that_cannot_be_loaded(self, acme, host):
        host(acme)
        with pytest.raises(PluginError, match="cannot load 'acme_implementation") as caught:
            get_provider("missing")
        assert isinstance(caught.value.__cause__, AttributeError)
        with pytest.raises(PluginError, match="must be callable"):
            get_provider("data")

    def test_an_unknown_name(self, acme, host):
        host(acme)
        with pytest.raises(UnknownNameError, match="Did you mean 'acme'"):
            get_provider("acne")
        with pytest.raises(UnknownNameError, match="Unknown engine 'acne'"):
            get_engine("acne")

    def test_the_engine_of_the_highest_priority_is_the_default(self, acme, declare, host):
        own = [found for found in discover() if found.distribution == "interception-core"]
        at = "acme_implementation:Engine"
        shy = declare("shy", jaxtap_register_engines=[EngineSpec("a-shy", "an engine", at)])
        host(*own, shy)
        assert isinstance(get_engine(), interception_core.PatchEngine)
        bold = declare("bold", jaxtap_register_engines=[EngineSpec("bold", "one", at, priority=99)])
        host(*own, shy, bold)
        assert isinstance(get_engine(), Engine)

    def test_no_engine_at_all(self, host):
        host()
        with pytest.raises(UnknownNameError, match="Unknown engine 'patch'"):
            get_engine()


def test_the_specs_can_be_listed(acme, host):
    host(acme)
    assert [spec.name for spec in declared_specs(ProviderSpec)] == [
        "acme",
        "data",
        "half",
        "missing",
    ]
    assert [spec.name for spec in declared_specs(EngineSpec)] == ["acme", "nothing"]
    assert [spec.target for spec in declared_specs(KernelSpec)] == ["acme.gemm"]
    (record,) = interception_core.plugins()
    assert record.name == "acme-plugin"


class TestWarnings:
    def test_once_per_broken_plugin_and_process(self, acme, host):
        host(acme, BROKEN, PluginRecord("worse", "", "worse-dist", "1"))
        with pytest.warns(PluginWarning) as caught:
            get_provider("acme")
        assert len(caught) == 2
        assert {record.filename for record in caught} == {__file__}
        with warnings.catch_warnings(record=True) as later:
            warnings.simplefilter("always")
            get_provider("acme")
            interception_core.plugins()
        assert later == []

    def test_warnings_that_are_errors_do_not_spoil_the_host(self, acme, host):
        host(acme, BROKEN)
        with pytest.raises(PluginWarning):
            get_provider("acme")
        assert get_provider("acme").bits == 8

    def test_strict_raises_every_time_and_warns_never(self, acme, host):
        host(acme, BROKEN, JAXTAP_STRICT_PLUGINS="1")
        for _ in range(2):
            with pytest.raises(PluginError, match="broken-dist"):
                get_provider("acme")


class TestLoading:
    def test_happens_once_whichever_thread_comes_first(self, declare):
        loads = []

        def slow():
            loads.append(threading.get_ident())
            time.sleep(0.05)
            return []

        found = declare("slow", jaxtap_register_providers=slow)
        host = _host.Host(lambda: [found], {})
        barrier = threading.Barrier(8)
        seen = []

        def ask():
            barrier.wait()
            seen.append(host.registry())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(loads) == 1
        assert len(seen) == 8
        assert len({id(registry) for registry in seen}) == 1

    def test_a_plugin_that_asks_for_plugins_is_told_not_to(self, declare, host):
        found = declare("loop", jaxtap_register_providers=lambda: declared_specs(ProviderSpec))
        host(found)
        with pytest.warns(PluginWarning, match="must not ask for plugins while it is being loaded"):
            (record,) = interception_core.plugins()
        assert (record.status, record.phase) == ("failed", "declare")

    def test_an_interrupted_load_is_done_again(self, declare):
        answers = [KeyboardInterrupt, list]

        def ask():
            answer = answers.pop(0)
            if answer is KeyboardInterrupt:
                raise answer
            return answer()

        host = _host.Host(lambda: [declare("acme", jaxtap_register_providers=ask)], {})
        with pytest.raises(KeyboardInterrupt):
            host.registry()
        assert host.registry().records[0].status == "ok"


class TestPackage:
    def test_every_public_name_is_there(self):
        for name in interception_core.__all__:
            assert getattr(interception_core, name) is not None
            assert name in dir(interception_core)

    def test_a_function_is_not_hidden_by_the_folder_of_its_name(self):
        assert inspect.ismodule(importlib.import_module("interception_core.plugins"))
        assert isinstance(interception_core.plugins(), tuple)

    def test_it_knows_its_version(self):
        from importlib.metadata import version

        assert interception_core.__version__ == version("interception-core")

    def test_an_unknown_attribute_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="'interception_core' has no attribute 'nope'"):
            interception_core.nope  # noqa: B018

    def test_its_own_plugin_provides_the_patch_engine(self, host):
        host(*[found for found in discover() if found.distribution == "interception-core"])
        assert [spec.name for spec in declared_specs(EngineSpec)] == ["patch"]
        assert isinstance(get_engine("patch"), interception_core.PatchEngine)

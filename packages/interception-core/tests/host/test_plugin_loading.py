import sys

import pytest

from interception_core import (
    DoctorCheck,
    EngineSpec,
    KernelSpec,
    PluginError,
    PluginRecord,
    ProviderSpec,
    hookimpl,
)
from interception_core.plugins import loading as _loading
from interception_core.plugins.hookspecs import SELECT

SPEC = ProviderSpec("acme", "ternary weights", "acme:Acme")


def load(found, strict=False):
    return _loading.load(_loading.new_manager(), found, strict)


def refused(found, phase, message):
    manager = _loading.new_manager()
    record = _loading.load(manager, found)
    assert (record.status, record.phase, record.specs) == ("failed", phase, ())
    assert not manager.get_plugins(), "what failed must not stay registered"
    assert message in str(record.error)
    return record


def test_a_plugin_declares_its_specs(declare):
    kernel = KernelSpec("acme.gemm", "cpu", "acme:handlers", "gemm_w8a8")
    found = declare(
        "acme", jaxtap_register_providers=[SPEC], jaxtap_register_kernels=lambda: iter([kernel])
    )
    record = load(found)
    assert record.specs == (SPEC, kernel)
    assert record.status == "ok"
    assert record.phase == "declare"
    assert record.error is None
    assert record.provides == ("provider:acme", "kernel:acme.gemm@cpu")
    assert (record.distribution, record.version) == ("acme-dist", "1.0")


def test_a_plugin_may_declare_nothing(declare):
    assert load(declare("acme")).status == "ok"


class TestMetadata:
    @pytest.mark.parametrize("value", ["", "acme:plugin", "acme plugin", "acme..plugin"])
    def test_the_entry_point_names_a_module(self, value):
        refused(PluginRecord("acme", value, "d", "1"), "metadata", "must name a plugin module")

    def test_what_discovery_could_not_read_is_kept(self):
        error = ValueError("unreadable")
        record = refused(PluginRecord("acme", "", "d", "1", error=error), "metadata", "unreadable")
        assert record.error is error


class TestImport:
    @pytest.fixture
    def module(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)

        def write(source):
            (tmp_path / "written_plugin.py").write_text(source)
            monkeypatch.delitem(sys.modules, "written_plugin", raising=False)
            return PluginRecord("acme", "written_plugin", "d", "1")

        yield write
        sys.modules.pop("written_plugin", None)

    @pytest.mark.parametrize(
        ("source", "error"),
        [
            ("import no_such_module_here", ModuleNotFoundError),
            ("1 / 0", ZeroDivisionError),
            ("raise SystemExit(3)", SystemExit),
            ("def (", SyntaxError),
            ("from interception_core import no_such_name", ImportError),
        ],
    )
    def test_any_failure_is_a_record_with_its_traceback(self, module, source, error):
        record = load(module(source))
        assert (record.status, record.phase) == ("failed", "import")
        assert type(record.error) is error
        assert record.error.__traceback__ is not None

    def test_stopping_the_program_is_not_a_failure_of_the_plugin(self, module):
        with pytest.raises(KeyboardInterrupt):
            load(module("raise KeyboardInterrupt"))

    @pytest.mark.parametrize("where", ["module", "hook"])
    def test_importing_jax_is_noted_and_strictly_refused(
        self, module, where, tmp_path, monkeypatch
    ):
        # A stand-in: importing the real one twice is not possible.
        (tmp_path / "jax.py").write_text("")
        found = module(
            "from interception_core import hookimpl\n"
            f"API = (1, 0)\n{'import jax' if where == 'module' else ''}\n"
            "@hookimpl\ndef jaxtap_register_providers():\n"
            f"    {'import jax' if where == 'hook' else ''}\n    return []\n"
        )
        monkeypatch.delitem(sys.modules, "jax")
        record = load(found)
        assert record.status == "ok"
        assert "must not import jax, and it does" in record.notes[0]

        del sys.modules["jax"], sys.modules["written_plugin"]
        record = load(found, strict=True)
        assert (record.status, record.phase, record.specs) == ("failed", "import", ())
        assert "must not import jax, and it does" in str(record.error)


class TestApi:
    @pytest.mark.parametrize(
        ("api", "message"),
        [
            (None, "Add `API = (1, 7)`"),
            ("1.0", "tuple of two ints"),
            ((1,), "tuple of two ints"),
            ((1, 0, 0), "tuple of two ints"),
            ((1, True), "tuple of two ints"),
            ([1, 0], "tuple of two ints"),
            ((2, 0), "Upgrade interception-core"),
            ((1, 8), "Upgrade interception-core"),
            ((0, 9), "Upgrade the plugin"),
        ],
    )
    def test_refused(self, declare, api, message):
        refused(declare("acme", api=api), "api", message)

    def test_an_older_minor_version_is_taken(self, declare, monkeypatch):
        monkeypatch.setattr(_loading, "API_VERSION", (1, 3))
        assert load(declare("acme", api=(1, 0))).status == "ok"


class TestHooks:
    def test_a_misspelt_hook_is_refused(self, declare):
        found = declare("acme", jaxtap_register_provider=[SPEC])
        record = refused(found, "hooks", "Did you mean 'jaxtap_register_providers'?")
        assert "'jaxtap_register_provider', which is not a hook" in str(record.error)
        assert record.error.__cause__ is not None

    def test_a_marked_function_of_any_name_must_be_a_hook(self, declare):
        refused(declare("acme", register_providers=[SPEC]), "hooks", "which is not a hook")

    @pytest.mark.parametrize("name", ["jaxtap_register_providers", "jaxtap_register_provider"])
    def test_an_unmarked_function_is_refused(self, declare, name):
        found = declare("acme")
        setattr(sys.modules[found.module], name, lambda: [SPEC])
        refused(found, "hooks", "Put `@hookimpl` above it")

    def test_an_argument_too_many_is_refused(self, declare):
        found = declare("acme", jaxtap_register_providers=lambda config: [SPEC])
        record = refused(found, "hooks", "config")
        assert "\n" not in str(record.error)

    def test_an_optional_hook_may_be_newer_than_this_host(self, declare):
        found = declare("acme", jaxtap_register_providers=[SPEC])
        module = sys.modules[found.module]
        module.jaxtap_from_the_future = hookimpl(optionalhook=True)(lambda: [1])
        assert load(found).status == "ok"

    def test_data_and_modules_may_have_such_names(self, declare):
        found = declare("acme")
        sys.modules[found.module].jaxtap_settings = {"a": 1}
        assert load(found).status == "ok"


class TestDeclare:
    def test_an_error_in_a_hook_is_kept(self, declare):
        def broken():
            raise RuntimeError("no licence")

        found = declare("acme", jaxtap_register_engines=[], jaxtap_register_providers=broken)
        record = refused(found, "declare", "no licence")
        assert type(record.error) is RuntimeError

    def test_an_error_in_a_generator_is_kept(self, declare):
        def broken():
            yield SPEC
            raise RuntimeError("half way")

        refused(declare("acme", jaxtap_register_providers=broken), "declare", "half way")

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (None, "must return a list of ProviderSpec objects, got None"),
            (SPEC, "must return a list of ProviderSpec objects"),
            (3, "must return a list of ProviderSpec objects"),
            (["acme"], "must return ProviderSpec objects, got 'acme'"),
            ("acme", "must return ProviderSpec objects, got 'a'"),
            ([EngineSpec("acme", "s", "a:b")], "must return ProviderSpec objects, got EngineSpec"),
            ([SPEC, SPEC], "must declare each provider once, got 'acme' twice"),
        ],
    )
    def test_a_wrong_result_is_refused(self, declare, result, message):
        refused(declare("acme", jaxtap_register_providers=result), "declare", message)

    def test_a_wrong_field_is_refused(self, declare):
        found = declare("acme", jaxtap_doctor_checks=lambda: [DoctorCheck("a", "b", "c")])
        record = refused(found, "declare", "DoctorCheck.run")
        assert isinstance(record.error, PluginError)

    def test_a_wrapper_is_refused(self, declare):
        def wrapper():
            return (yield)

        found = declare("acme")
        module = sys.modules[found.module]
        module.jaxtap_register_providers = hookimpl(wrapper=True)(wrapper)
        refused(found, "declare", "there is nothing to wrap")

    def test_a_wrapper_that_chooses_is_refused(self, declare):
        def wrapper(call, candidates):
            return (yield)

        found = declare("acme")
        module = sys.modules[found.module]
        module.jaxtap_select_kernel = hookimpl(wrapper=True)(wrapper)
        refused(found, "declare", "jaxtap_select_kernel must not be a wrapper")

    def test_choosing_is_not_done_while_loading(self, declare):
        def choose(call, candidates):
            raise AssertionError("called")

        manager = _loading.new_manager()
        assert _loading.load(manager, declare("acme")).status == "ok"
        found = declare("chooser", jaxtap_select_kernel=choose)
        assert _loading.load(manager, found).status == "ok"
        assert not _loading.implementations(manager, SELECT, "acme")
        assert _loading.implementations(manager, SELECT, "chooser")

    def test_the_same_name_in_two_kinds_is_fine(self, declare):
        found = declare(
            "acme",
            jaxtap_register_providers=[SPEC],
            jaxtap_register_engines=[EngineSpec("acme", "s", "a:b")],
        )
        assert load(found).provides == ("provider:acme", "engine:acme")

import json
import re
import sys
import types
from pathlib import Path

import jax
import pytest

from interception_core import CheckResult, DoctorCheck, KernelSpec, PluginRecord, missing_kernels
from interception_core.cli import checks as _checks
from interception_core.cli import main

OWN = PluginRecord("interception-core", "interception_core._plugin", "interception-core", "0.1.0")
BROKEN = PluginRecord("broken", "no_such_module_here", "broken-dist", "0.3")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("JAX_DISABLE_JIT", "JAXTAP_STRICT_PLUGINS", "JAXTAP_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checks(declare, monkeypatch):
    """A plugin whose doctor checks are the given functions."""
    module = types.ModuleType("acme_checks")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(**functions):
        for name, function in functions.items():
            setattr(module, name, function)
        specs = [DoctorCheck(name, f"is {name}", f"acme_checks:{name}") for name in functions]
        return declare("acme", jaxtap_doctor_checks=specs)

    return make


def doctor(capsys):
    status = main(["doctor", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is (status == 0)
    return status, {check["name"]: check["results"] for check in content["checks"]}


class TestDoctor:
    def test_this_installation_is_healthy(self, host, capsys):
        host(OWN)
        status, found = doctor(capsys)
        assert status == 0, found
        assert sorted(found) == ["devices", "environment", "kernels", "plugins", "versions"]
        assert found["devices"][0]["message"].startswith(jax.default_backend())

    def test_prints_lines(self, host, checks, capsys):
        host(OWN, checks(disk=lambda: [CheckResult("warn", "nearly full", "delete something")]))
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert "disk: is disk\n  warn  nearly full\n        delete something\n" in out
        assert out.splitlines()[-1].endswith("2 warn, 0 fail")

    @pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
    def test_exits_with_1_when_a_check_fails(self, host, checks, capsys, status, code):
        host(OWN, checks(disk=lambda: [CheckResult(status, "full")]))
        assert doctor(capsys)[0] == code

    def test_a_check_that_raises_has_failed_and_the_others_go_on(self, host, checks, capsys):
        def half():
            yield CheckResult("ok", "so far")
            raise SystemExit("enough")

        host(
            OWN,
            checks(
                raises=lambda: 1 / 0,
                half=half,
                wrong=lambda: CheckResult("ok", "m"),
                wrong_item=lambda: ["ok"],
                empty=lambda: [],
            ),
        )
        status, found = doctor(capsys)
        assert status == 1
        (raised,) = found["raises"]
        assert raised["status"] == "fail"
        assert raised["message"] == "ZeroDivisionError: division by zero"
        assert "plugin 'acme'" in raised["hint"]
        assert found["half"][0]["message"] == "SystemExit: enough"
        assert "must return a list of CheckResult" in found["wrong"][0]["message"]
        assert "must return CheckResult objects, got 'ok'" in found["wrong_item"][0]["message"]
        assert found["empty"] == [{"status": "ok", "message": "nothing to report", "hint": ""}]
        assert "versions" in found

    def test_a_check_that_cannot_be_loaded_has_failed(self, host, declare, capsys):
        check = DoctorCheck("gone", "is gone", "no_such_module_here:x")
        host(OWN, declare("acme", jaxtap_doctor_checks=[check]))
        status, found = doctor(capsys)
        assert status == 1
        assert "cannot load 'no_such_module_here:x'" in found["gone"][0]["message"]

    def test_strict_does_not_stop_it(self, host, capsys):
        host(OWN, BROKEN, JAXTAP_STRICT_PLUGINS="1")
        status, found = doctor(capsys)
        assert status == 1
        assert "versions" in found


class TestPlugins:
    def test_a_failed_plugin_fails(self, host):
        host(OWN, BROKEN)
        own, broken = _checks.plugins()
        assert own.status == "ok"
        assert broken.status == "fail"
        assert "ModuleNotFoundError" in broken.message
        assert "JAXTAP_DISABLE_PLUGINS=broken" in broken.hint

    def test_a_conflict_fails(self, host, declare, checks):
        check = DoctorCheck("versions", "a rival", "a:b")
        host(OWN, declare("rival", jaxtap_doctor_checks=[check]))
        assert [result.status for result in _checks.plugins()] == ["fail", "fail"]

    def test_a_disabled_one_does_not(self, host):
        host(BROKEN, JAXTAP_DISABLE_PLUGINS="broken")
        (result,) = _checks.plugins()
        assert (result.status, result.message[-8:]) == ("ok", "disabled")


class TestKernels:
    def test_of_a_platform_that_is_not_here(self, host, declare):
        kernel = KernelSpec("acme.gemm", "cuda", "acme:handlers", "gemm")
        host(OWN, declare("acme", jaxtap_register_kernels=[kernel]))
        missing, result = _checks.kernels()
        assert missing.status == "warn"
        assert missing.message == (
            "XLA computes everything: no kernel for cpu is installed: install te-ffi-kernels"
        )
        assert (result.status, result.message[-31:]) == ("ok", "no cuda here to register it for")

    def test_that_a_disabled_plugin_may_have(self, host, declare):
        host(OWN, declare("acme"), JAXTAP_DISABLE_PLUGINS="acme")
        (result,) = _checks.kernels()
        assert result.message.endswith("te-ffi-kernels (Disabled by JAXTAP_DISABLE_PLUGINS: acme)")
        assert missing_kernels("tpu").startswith("no kernel for tpu is installed (Disabled")

    def test_that_cannot_be_registered(self, host, declare):
        kernel = KernelSpec("acme.gone", "cpu", "no_such_module_here:handlers", "gemm")
        host(OWN, declare("acme", jaxtap_register_kernels=[kernel]))
        (result,) = _checks.kernels()
        assert result.status == "fail"
        assert "Kernel 'acme.gone@cpu' of plugin 'acme' (acme-dist 1.0)" in result.message
        assert "no_such_module_here" in result.message


class TestVersions:
    def statuses(self, monkeypatch, **versions):
        monkeypatch.setattr(_checks, "_installed", versions.get)
        python, *others = _checks.versions()
        assert python.status == "ok"
        return [result.status for result in others]

    def test_supported(self, monkeypatch):
        assert self.statuses(monkeypatch, jax="0.10.2", jaxlib="0.10.2") == ["ok", "ok"]
        assert self.statuses(monkeypatch, jax="0.12.9", jaxlib="0.12.9+cuda") == ["ok", "ok"]

    @pytest.mark.parametrize("jax_version", ["0.10.1", "0.13.0", "0.9.0"])
    def test_unsupported_jax(self, monkeypatch, jax_version):
        found = self.statuses(monkeypatch, jax=jax_version, jaxlib=jax_version)
        assert found == ["fail", "ok"]

    def test_jaxlib_of_another_version_or_none(self, monkeypatch):
        assert self.statuses(monkeypatch, jax="0.11.0", jaxlib="0.10.2") == ["ok", "fail"]
        assert self.statuses(monkeypatch, jax="0.11.0") == ["ok", "fail"]

    def test_no_jax(self, monkeypatch):
        assert self.statuses(monkeypatch) == ["fail"]

    def test_a_wrong_python(self, monkeypatch):
        monkeypatch.setattr(_checks.platform, "python_version", lambda: "3.9.0")
        assert next(iter(_checks.versions())).status == "fail"


class TestDevices:
    def test_no_backend(self, monkeypatch):
        def refuse(*platform):
            raise RuntimeError("no such backend")

        monkeypatch.setenv("JAX_PLATFORMS", "cuda")
        monkeypatch.setattr(jax, "devices", refuse)
        (result,) = _checks.devices()
        assert result.status == "fail"
        assert "no such backend" in result.message
        assert "JAX_PLATFORMS=cuda" in result.hint

    def test_a_gpu_plugin_that_does_not_start(self, monkeypatch):
        cpu = jax.devices("cpu")

        def devices(*platform):
            if platform:
                raise RuntimeError("no driver")
            return cpu

        entries = [types.SimpleNamespace(name="xla_cuda13"), types.SimpleNamespace(name="other")]
        monkeypatch.setattr(jax, "devices", devices)
        monkeypatch.setattr(_checks, "entry_points", lambda group: entries)
        default, gpu = _checks.devices()
        assert default.status == "ok"
        assert gpu.status == "warn"
        assert "xla_cuda13 is installed, but cuda does not start" in gpu.message


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch):
        monkeypatch.setattr(_checks.os, "environ", {})

    def found(self, **variables):
        _checks.os.environ.update(variables)
        return [(result.status, result.message) for result in _checks.environment()]

    def test_nothing(self):
        assert self.found() == []

    @pytest.mark.parametrize("value", ["0", "false", "OFF", ""])
    def test_jit_is_on(self, value):
        assert self.found(JAX_DISABLE_JIT=value) == []

    @pytest.mark.parametrize("value", ["1", "true"])
    def test_jit_is_off(self, value):
        ((status, message),) = self.found(JAX_DISABLE_JIT=value)
        assert status == "warn"
        assert "op by op" in message

    def test_ours_are_listed(self):
        assert self.found(JAXTAP_DEBUG="1", JAXTAP_ACME_CACHE="x", HOME="/") == [
            ("ok", "JAXTAP_ACME_CACHE=x"),
            ("ok", "JAXTAP_DEBUG=1: errors have a traceback, and logs go to stderr"),
        ]

    def test_those_of_the_kernels_are_known(self):
        """Every variable that the documentation names is one that the check explains."""
        root = Path(__file__).parents[4]
        pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("packages/*/README.md")]
        named = {name for page in pages for name in re.findall(r"JAXTAP_[A-Z_]+", page.read_text())}
        assert len(named) >= 5
        assert named <= set(_checks._VARIABLES)

    def test_a_misspelt_one_is_noticed(self):
        ((status, message),) = self.found(JAXTAP_STRICT_PLUGIN="1")
        assert (status, message) == ("warn", "JAXTAP_STRICT_PLUGIN is set, which nothing reads")

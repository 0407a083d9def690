import dataclasses

import pytest

from interception_core import (
    BridgeSpec,
    CheckResult,
    CommandSpec,
    DoctorCheck,
    EngineSpec,
    ExportBackendSpec,
    FeatureSpec,
    FormSpec,
    KernelSpec,
    PluginError,
    ProviderSpec,
    QTypeSpec,
)
from interception_core.plugins.paths import is_path, resolve

KERNEL = {"target": "acme.gemm", "platform": "cpu", "handlers": "acme:handlers", "op": "gemm_w8a8"}
VALID = [
    ProviderSpec("acme", "ternary weights", "acme.provider:Acme"),
    EngineSpec("patch-2.0_b", "an engine", "acme:Engine.build"),
    KernelSpec(**KERNEL),
    KernelSpec(**KERNEL, supports="acme:supports", priority=-1, summary="fast", apply="acme:f"),
    KernelSpec(**KERNEL, workspace="acme:memory"),
    BridgeSpec("acme", "acme's models", "acme.bridge:Acme", "acme:Model"),
    BridgeSpec("acme", "acme's models", "acme.bridge:Acme", "acme:Model", install="acme[x]"),
    QTypeSpec("nf3", "8 quantiles", "acme.formats:nf3"),
    ExportBackendSpec("acme", "ternary weights", "acme.files:Ternary"),
    FeatureSpec("plan-prune", "zeros", "acme.prune:prune"),
    FormSpec("acme-split", "two formats added", "acme.forms:Split"),
    CommandSpec("plan", "plan it", "acme:run"),
    CommandSpec("plan", "plan it", "acme:run", "acme:configure"),
    DoctorCheck("driver", "the driver is there", "acme:check"),
    CheckResult("warn", "old driver", hint="upgrade it"),
]


@pytest.mark.parametrize("spec", VALID, ids=lambda spec: type(spec).__name__)
def test_specs_are_frozen_and_hashable(spec):
    assert hash(spec) == hash(dataclasses.replace(spec))
    field = dataclasses.fields(spec)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, field, "other")


def test_the_key_of_a_kernel_has_its_platform():
    assert KernelSpec(**KERNEL).key == "acme.gemm@cpu"


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: ProviderSpec("Acme", "s", "a:b"), "ProviderSpec.name"),
        (lambda: ProviderSpec("", "s", "a:b"), "ProviderSpec.name"),
        (lambda: ProviderSpec(None, "s", "a:b"), "ProviderSpec.name"),
        (lambda: ProviderSpec("two words", "s", "a:b"), "ProviderSpec.name"),
        (lambda: ProviderSpec("acme", "", "a:b"), "ProviderSpec.summary"),
        (lambda: ProviderSpec("acme", "two\nlines", "a:b"), "ProviderSpec.summary"),
        (lambda: ProviderSpec("acme", 3, "a:b"), "ProviderSpec.summary"),
        (lambda: ProviderSpec("acme", "s", "a.b"), "ProviderSpec.factory"),
        (lambda: ProviderSpec("acme", "s", dict), "ProviderSpec.factory"),
        (lambda: EngineSpec("x", "s", "a:b-c"), "EngineSpec.factory"),
        (lambda: EngineSpec("x", "s", ":b"), "EngineSpec.factory"),
        (lambda: EngineSpec("x", "s", "a:b", priority="high"), "EngineSpec.priority"),
        (lambda: KernelSpec(**{**KERNEL, "target": "gemm"}), "KernelSpec.target"),
        (lambda: KernelSpec(**{**KERNEL, "platform": "CPU"}), "KernelSpec.platform"),
        (lambda: KernelSpec(**{**KERNEL, "handlers": None}), "KernelSpec.handlers"),
        (lambda: KernelSpec(**{**KERNEL, "op": ""}), "KernelSpec.op"),
        (lambda: KernelSpec(**KERNEL, supports="nope"), "KernelSpec.supports"),
        (lambda: KernelSpec(**KERNEL, workspace="nope"), "KernelSpec.workspace"),
        (lambda: KernelSpec(**KERNEL, apply="nope"), "KernelSpec.apply"),
        (lambda: KernelSpec(**KERNEL, priority=1.5), "KernelSpec.priority"),
        (lambda: KernelSpec(**KERNEL, priority=True), "KernelSpec.priority"),
        (lambda: QTypeSpec("NF3", "s", "a:b"), "QTypeSpec.name"),
        (lambda: QTypeSpec("x", "s", "a.b"), "QTypeSpec.factory"),
        (lambda: ExportBackendSpec("AEQ", "s", "a:b"), "ExportBackendSpec.name"),
        (lambda: FeatureSpec("x", "s", "a.b"), "FeatureSpec.run"),
        (lambda: FormSpec("x", "s", "a.b"), "FormSpec.form"),
        (lambda: BridgeSpec("x", "s", "a:b-c", "a:B"), "BridgeSpec.factory"),
        (lambda: BridgeSpec("x", "s", "a:b", "a.B"), "BridgeSpec.model"),
        (lambda: BridgeSpec("x", "s", "a:b", "a:B", 3), "BridgeSpec.install"),
        (lambda: CommandSpec("x", "s", "a:"), "CommandSpec.run"),
        (lambda: CommandSpec("x", "s", "a:b", "c"), "CommandSpec.configure"),
        (lambda: DoctorCheck("x", "s", "a b:c"), "DoctorCheck.run"),
        (lambda: CheckResult("error", "m"), "CheckResult.status"),
        (lambda: CheckResult("ok", None), "CheckResult.message"),
        (lambda: CheckResult("ok", "m", None), "CheckResult.hint"),
    ],
)
def test_a_wrong_field_is_named(build, field):
    with pytest.raises(PluginError, match=rf"^{field} must be .*, got .*\.$"):
        build()


def test_a_path_has_a_module_and_an_attribute():
    assert is_path("a:b")
    assert is_path("a.b_1:C.d")
    for wrong in ("", ":", "a", "a:b:c", "a..b:c", "a:b()", ".a:b", "a: b", 3, None):
        assert not is_path(wrong)


class TestResolve:
    def test_finds_dotted_attributes(self):
        assert resolve("collections:OrderedDict.fromkeys", "x")("ab") == {"a": None, "b": None}

    @pytest.mark.parametrize(
        ("path", "cause"),
        [("no_such_module_here:x", ImportError), ("json:no_such_attribute", AttributeError)],
    )
    def test_keeps_the_cause(self, path, cause):
        with pytest.raises(PluginError, match=f"Provider 'p': cannot load '{path}'") as caught:
            resolve(path, "Provider 'p'")
        assert isinstance(caught.value.__cause__, cause)

    def test_wants_something_to_call(self):
        with pytest.raises(PluginError, match="'string:digits' must be callable"):
            resolve("string:digits", "Provider 'p'")

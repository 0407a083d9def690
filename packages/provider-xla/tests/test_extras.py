"""What a package of an extra brings, where it is not installed."""

import importlib.util
import subprocess
import sys
import types

import jax.numpy as jnp
import pytest

import interception_core as core
import provider_xla as xla
from interception_core.testing import installed_plugins
from provider_xla import extras
from provider_xla.features import Code


@pytest.fixture
def missing(monkeypatch):
    """Leave a package out: ``missing("provider_xla_passes")``."""
    find, tried = importlib.util.find_spec, extras.importlib.import_module

    def leave_out(package):
        def find_spec(name, *args):
            return None if name.partition(".")[0] == package else find(name, *args)

        def import_module(name, *args):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=package)
            return tried(name, *args)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(importlib, "import_module", import_module)
        return installed_plugins(without={package.replace("_", "-")})

    return leave_out


def planned():
    w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
    return w, x, xla.PtqProvider("int8").plan(lambda w, x: x @ w, w, x)


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("provider_xla_passes", "passes", lambda plan, w, x: plan.optimize(w, [(x,)], [])),
        ("provider_xla_passes", "passes", lambda plan, w, x: plan.allocate(w, x, budget_bits=9)),
        ("provider_xla_passes", "passes", lambda plan, w, x: xla.Wanda),
        ("provider_xla_cache", "cache", lambda plan, w, x: plan.quantize_cache(x, 1)),
        ("provider_xla_cache", "cache", lambda plan, w, x: xla.CacheRule),
        ("provider_xla_serve", "export", lambda plan, w, x: plan.export(plan.quantize(w), x)),
        ("provider_xla_report", "report", lambda plan, w, x: plan.report(w, x)),
        ("provider_xla_formats", "gguf", lambda plan, w, x: xla.rules_of),
        ("provider_xla_lora", "lora", lambda plan, w, x: plan.init_adapters(None)),
        ("provider_xla_lora", "lora", lambda plan, w, x: xla.Rule(weight="int8", lora=8)),
        ("provider_xla_lora", "lora", lambda plan, w, x: xla.PtqProvider("qlora")),
    ],
)
def test_what_to_install(missing, monkeypatch, package, extra, call):
    for name in ("Wanda", "rules_of", "CacheRule"):  # a name that was used stays
        monkeypatch.delattr(xla, name, raising=False)
    w, x, plan = planned()
    name = package.replace("_", "-")
    with (
        missing(package),
        pytest.raises(ImportError, match=rf"is of {name}.*'provider-xla\[{extra}\]'"),
    ):
        call(plan, w, x)
    plan.apply()(plan.quantize(w), x)


def test_what_to_install_for_fused_functions(missing):
    provider = xla.PtqProvider(xla.QuantizationRule(kernel="fused"))
    with (
        missing("provider_xla_fused"),
        pytest.raises(ImportError, match=r"'provider-xla\[fused\]'"),
    ):
        provider.plan(jnp.tanh, jnp.ones(4))


def test_what_to_install_for_a_model(missing):
    linen = pytest.importorskip("flax.linen")
    model = linen.Dense(4)
    with (
        missing("provider_xla_models"),
        pytest.raises(ImportError, match=r"is of provider-xla-models.*'provider-xla\[linen\]'"),
    ):
        xla.quantize_model(model, "int8", jnp.ones((2, 4)))
    with (
        missing("provider_xla_models"),
        pytest.raises(core.UnknownNameError, match="of a class"),
    ):
        xla.quantize_model(object(), "int8", jnp.ones((2, 4)))


WITHOUT_MSGSPEC = """
import sys
sys.modules["msgspec"] = None  # importing it says that it is not installed
import provider_xla as xla
print(xla.quantize_model, xla.calibrate_model, xla.plan_model, xla.model_plan, xla.merge_model)
try:
    xla.save_model
except ImportError as error:
    print(error)
"""


def test_models_need_no_library_of_files():
    """A framework's extra brings none: only their files do."""
    run = [sys.executable, "-c", WITHOUT_MSGSPEC]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "save_model needs msgspec" in done.stdout
    assert "'provider-xla[safetensors]'" in done.stdout


def test_what_to_install_for_a_form():
    assert extras.install_form("affine") == "Run pip install 'provider-xla[gguf]'"
    assert extras.install_form("transformed") == "Run pip install 'provider-xla[passes]'"
    assert extras.install_form("acme") == "Install the package whose form it is"


def test_a_feature_that_no_package_of_ours_has():
    with pytest.raises(core.UnknownNameError, match="acme-feature"):
        extras.feature("acme-feature")


def test_a_rule_of_a_third_party(monkeypatch):
    """It stands among the rules of a provider, and says what is wrong with it."""

    class Rule:
        feature = "acme-arguments"

        def __str__(self):
            return "a rule of Acme"

    def find(rules, engine, argnum, fn, args, kwargs):
        return {}, [Code.NO_CACHE(cache_rule=rule) for rule in rules]

    module = types.ModuleType("acme_arguments")
    module.API, module.find = (1, 7), find
    spec = core.FeatureSpec("acme-arguments", "find arguments", "acme_arguments:find")
    module.jaxtap_register_features = core.hookimpl(lambda: [spec])
    monkeypatch.setitem(sys.modules, "acme_arguments", module)
    with installed_plugins("acme_arguments"):
        provider = xla.PtqProvider(["int8", Rule()])
        with pytest.warns(xla.QuantizationWarning, match="no array matches a rule of Acme"):
            plan = provider.plan(jnp.dot, jnp.ones((8, 4)), jnp.ones((4, 2)))
    assert plan.problems == ("no array matches a rule of Acme",)


def test_a_disabled_plugin_is_not_said_to_be_missing(monkeypatch):
    w, x, plan = planned()
    with installed_plugins(without={"provider-xla-passes"}):
        if importlib.util.find_spec("provider_xla_passes") is not None:
            with pytest.raises(core.UnknownNameError, match="plan-optimize"):
                plan.optimize(w, [(x,)], [])

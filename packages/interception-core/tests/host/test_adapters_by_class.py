"""Which adapter a model object gets: by the names of its classes, with nothing imported."""

import sys
import types

import pytest

from interception_core import (
    AdapterSpec,
    PluginError,
    UnknownNameError,
    adapters,
    find_adapter,
)


def model_class(module, name="Model", bases=()):
    return type(name, bases, {"__module__": module})


class Adapter:
    def __init__(self, name):
        self.name = name

    def parameters(self, model): ...

    def function(self, model, method): ...

    def rebuild(self, model, parameters, quantized): ...


@pytest.fixture
def implementation(monkeypatch):
    """A module with factories of adapters, under a name that specs can give."""
    module = types.ModuleType("acme_adapters")
    module.acme = lambda: Adapter("acme")
    module.deep = lambda: Adapter("deep")
    module.half = lambda: object()
    monkeypatch.setitem(sys.modules, "acme_adapters", module)
    return module


def spec(name, model, factory="acme", **more):
    return AdapterSpec(name, "models", f"acme_adapters:{factory}", model, **more)


@pytest.fixture
def two(declare, host, implementation):
    """One framework, and another that is built on it."""
    specs = [
        spec("acme", "acme.nn:Model", install="acme[all]"),
        spec("deep", "deep:Net", factory="deep"),
    ]
    host(declare("frameworks", jaxtap_register_adapters=specs, api=(1, 2)))


def test_a_model_is_known_by_a_class_in_the_package_or_below(two):
    assert [one.name for one in adapters()] == ["acme", "deep"]
    base = model_class("acme.nn.core.base")
    mine = model_class("my_program", "Mine", (base,))
    assert find_adapter(base()).name == "acme"
    assert find_adapter(mine()).name == "acme"


@pytest.mark.parametrize(
    "other",
    [
        model_class("acme.nnx"),
        model_class("acme"),
        model_class("acme.nn", "Models"),
        model_class("my_program", "acme.nn.Model"),
        dict,
    ],
)
def test_others_are_not(two, other):
    with pytest.raises(UnknownNameError) as caught:
        find_adapter(other())
    assert caught.value.kind == "adapter"
    assert caught.value.known == ("acme", "deep")
    for part in (
        "'acme' for acme.nn.Model (acme[all])",
        "'deep' for deep.Net.",
        other.__qualname__,
    ):
        assert part in str(caught.value)


def test_the_nearest_class_decides(two):
    base = model_class("acme.nn")
    net = model_class("deep.layers", "Net", (base,))
    mine = model_class("my_program", "Mine", (net,))
    assert find_adapter(mine()).name == "deep"


def test_two_adapters_for_one_class(declare, host, implementation):
    one = declare("one", jaxtap_register_adapters=[spec("acme", "acme:Model")])
    two = declare("two", jaxtap_register_adapters=[spec("rival", "acme:Model")])
    host(one, two)
    with pytest.raises(PluginError, match=r"'one' .*'two' .*JAXTAP_DISABLE_PLUGINS=one or "):
        find_adapter(model_class("acme")())
    host(one, two, JAXTAP_DISABLE_PLUGINS="two")
    assert find_adapter(model_class("acme")()).name == "acme"


def test_what_a_factory_must_return(declare, host, implementation):
    host(declare("half", jaxtap_register_adapters=[spec("half", "acme:Model", factory="half")]))
    with pytest.raises(PluginError, match="lacks: parameters"):
        find_adapter(model_class("acme")())


def test_a_plugin_that_failed_is_told(declare, host):
    def fails():
        raise RuntimeError("no driver")

    host(declare("broken", jaxtap_register_adapters=fails))
    with (
        pytest.warns(UserWarning, match="broken"),
        pytest.raises(UnknownNameError, match=r"There are: none.*no driver"),
    ):
        find_adapter(3)

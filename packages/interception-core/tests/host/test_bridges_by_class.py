"""Which bridge a model object gets: by the names of its classes, with nothing imported."""

import sys
import types

import pytest

from interception_core import (
    BridgeSpec,
    PluginError,
    UnknownNameError,
    declared_specs,
    find_bridge,
)


def model_class(module, name="Model", bases=()):
    return type(name, bases, {"__module__": module})


class Bridge:
    def __init__(self, name):
        self.name = name

    def parameters(self, model): ...

    def function(self, model, method): ...

    def rebuild(self, model, parameters, quantized): ...


@pytest.fixture
def implementation(monkeypatch):
    """A module with factories of bridges, under a name that specs can give."""
    module = types.ModuleType("acme_bridges")
    module.acme = lambda: Bridge("acme")
    module.deep = lambda: Bridge("deep")
    module.half = lambda: object()
    monkeypatch.setitem(sys.modules, "acme_bridges", module)
    return module


def spec(name, model, factory="acme", **more):
    return BridgeSpec(name, "models", f"acme_bridges:{factory}", model, **more)


@pytest.fixture
def two(declare, host, implementation):
    """One framework, and another that is built on it."""
    specs = [
        spec("acme", "acme.nn:Model", install="acme[all]"),
        spec("deep", "deep:Net", factory="deep"),
    ]
    host(declare("frameworks", jaxtap_register_bridges=specs, api=(1, 2)))


def test_a_model_is_known_by_a_class_in_the_package_or_below(two):
    assert [one.name for one in declared_specs(BridgeSpec)] == ["acme", "deep"]
    base = model_class("acme.nn.core.base")
    mine = model_class("my_program", "Mine", (base,))
    assert find_bridge(base()).name == "acme"
    assert find_bridge(mine()).name == "acme"


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
        find_bridge(other())
    assert caught.value.kind == "bridge"
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
    assert find_bridge(mine()).name == "deep"


def test_two_bridges_for_one_class(declare, host, implementation):
    one = declare("one", jaxtap_register_bridges=[spec("acme", "acme:Model")])
    two = declare("two", jaxtap_register_bridges=[spec("rival", "acme:Model")])
    host(one, two)
    with pytest.raises(PluginError, match=r"'one' .*'two' .*JAXTAP_DISABLE_PLUGINS=one or "):
        find_bridge(model_class("acme")())
    host(one, two, JAXTAP_DISABLE_PLUGINS="two")
    assert find_bridge(model_class("acme")()).name == "acme"


def test_what_a_factory_must_return(declare, host, implementation):
    host(declare("half", jaxtap_register_bridges=[spec("half", "acme:Model", factory="half")]))
    with pytest.raises(PluginError, match="lacks: parameters"):
        find_bridge(model_class("acme")())


def test_a_plugin_that_failed_is_told(declare, host):
    def fails():
        raise RuntimeError("no driver")

    host(declare("broken", jaxtap_register_bridges=fails))
    with (
        pytest.warns(UserWarning, match="broken"),
        pytest.raises(UnknownNameError, match=r"There are: none.*no driver"),
    ):
        find_bridge(3)

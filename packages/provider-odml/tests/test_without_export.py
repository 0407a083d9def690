"""Without provider-odml-export: training works, and what exports says what to install."""

import pickle
import sys

import jax.numpy as jnp
import pytest

import provider_odml as odml
from interception_core.testing import installed_plugins

EXPORTS = ("Artifact", "ConversionError", "OdmlConversionProvider", "Signature", "export")


@pytest.fixture
def alone(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "provider_odml_export"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "provider_odml_export", None)
    for name in EXPORTS:  # which the package keeps once they are imported
        monkeypatch.delitem(vars(odml), name, raising=False)
    with installed_plugins(without={"provider-odml-export"}):
        yield


@pytest.mark.parametrize("name", EXPORTS)
def test_names_say_what_to_install(alone, name):
    assert name in odml.__all__
    text = rf"provider_odml\.{name} is of provider-odml-export, .*'provider-odml\[export\]'"
    with pytest.raises(odml.MissingExtraError, match=text) as caught:
        getattr(odml, name)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.extra) == (str(caught.value), "export")


def test_training_works(alone):
    w, x = jnp.eye(4), jnp.arange(8.0).reshape(2, 4)
    quantized = odml.qat(lambda w, x: x @ w, odml.OdmlRule(weight_qtype="int8"))
    assert jnp.abs(quantized(w, x) - x).max() < 0.1
    text = r"QatModel\.export is of provider-odml-export, .*'provider-odml\[export\]'"
    with pytest.raises(odml.MissingExtraError, match=text):
        quantized.export(w, None, x)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'exports'"):
        _ = odml.exports

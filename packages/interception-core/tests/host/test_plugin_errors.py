import pickle

import pytest

from interception_core import JaxtapError, PluginError, TargetError, UnknownNameError
from interception_core.errors import nearest_name, one_line, unknown_name


def test_every_error_is_a_jaxtap_error():
    for error in (PluginError, TargetError, UnknownNameError):
        assert issubclass(error, JaxtapError)
    assert issubclass(UnknownNameError, LookupError)


class TestUnknownName:
    def test_gives_the_nearest_and_the_known(self):
        error = unknown_name("provider", "acm", ["qt", "acme", "ptq"])
        assert str(error) == (
            "Unknown provider 'acm'. Did you mean 'acme'? Known providers: acme, ptq, qt."
        )
        assert (error.kind, error.given, error.nearest) == ("provider", "acm", "acme")
        assert error.known == ("acme", "ptq", "qt")

    def test_says_so_when_nothing_is_near_or_known(self):
        assert (
            str(unknown_name("engine", "x", [])) == "Unknown engine 'x'. No engine is registered."
        )
        assert "Did you mean" not in str(unknown_name("engine", "zzz", ["patch"]))

    def test_puts_the_hint_last(self):
        assert str(unknown_name("engine", "x", ["y"], "Install z.")).endswith("y. Install z.")

    def test_does_not_list_hundreds(self):
        error = unknown_name("target", "jax.numpy.dott", [*map(str, range(500)), "jax.numpy.dot"])
        assert "Did you mean 'jax.numpy.dot'?" in str(error)
        assert "Nearest of the 501 known targets: " in str(error)
        assert str(error).count(", ") == 7

    @pytest.mark.parametrize("given", [None, 3])
    def test_takes_what_is_not_a_name(self, given):
        assert f"Unknown provider {given}." in str(unknown_name("provider", given, ["acme"]))

    def test_can_be_pickled(self):
        error = pickle.loads(pickle.dumps(unknown_name("provider", "acm", ["acme"])))
        assert "acme" in str(error)
        assert error.nearest == "acme"


def test_nearest_ignores_case():
    assert nearest_name("PATCH", ["patch", "trace"]) == "patch"


def test_one_line():
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(PluginError("Says enough.")) == "Says enough."

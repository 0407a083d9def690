"""The suite of all engines, in two tiers."""

import contextlib

import jax
import pytest

from interception_core.testing import EngineConformance


class TieredConformance(EngineConformance):
    """What of the suite is in the full tier alone."""

    @pytest.mark.slow
    def test_two_hundred_concurrent_cold_starts(self):
        super().test_two_hundred_concurrent_cold_starts()

    @pytest.mark.slow
    def test_concurrent_eager_cold_starts(self):
        super().test_concurrent_eager_cold_starts()


FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
"""Flags with which JAX 0.12 stages some functions in other ways. Older versions have no such
flags, or unfinished ones."""
SETTINGS = [*((name,) for name in FLAGS), FLAGS] if jax.__version_info__ >= (0, 12) else [()]


def cases(test, argument):
    """Return the cases of a test of the suite."""
    marks = (mark.args for mark in test.pytestmark if mark.name == "parametrize")
    return next(list(values) for name, values, *_ in marks if name == argument)


def of_flags(test, argument="form"):
    """Return those that are about what the flags change."""
    words = ("checkpoint", "remat", "custom_jvp", "custom_vjp")
    found = [name for name in cases(test, argument) if any(word in name for word in words)]
    assert len(found) >= 3, "no case of a kind would be left out unseen"
    return found


@contextlib.contextmanager
def flags_set(names):
    """Set flags of JAX."""
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, True)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class ConformanceWithFlags:
    """What of the suite is about functions that JAX's flags change, with each flag and with all."""

    primitives = disables_jit = labels_jit = False

    @pytest.fixture(autouse=True, params=SETTINGS, ids=lambda names: " ".join(names) or "none")
    def _flags(self, request):
        with flags_set(request.param):
            yield

    @property
    def whole(self):
        """The whole suite, of which some tests are run."""
        names = ("engine", "primitives", "disables_jit", "labels_jit", "examples")
        return type("Whole", (EngineConformance,), {n: getattr(self, n) for n in names})()

    @pytest.mark.parametrize(
        "transformation", of_flags(EngineConformance.test_transformed_and_tapped, "transformation")
    )
    def test_transformed(self, transformation):
        self.whole.test_transformed_and_tapped(transformation)
        self.whole.test_transformed_inside(transformation)
        self.whole.test_nothing_changes_where_handlers_let_everything_run(transformation)

    @pytest.mark.parametrize("form", of_flags(EngineConformance.test_isolation_in_every_order))
    @pytest.mark.parametrize("mode", cases(EngineConformance.test_isolation_in_every_order, "mode"))
    def test_isolation(self, form, mode):
        for order in ("plain first", "one interceptor then another"):
            self.whole.test_isolation_in_every_order(order, form, mode)

    @pytest.mark.parametrize("form", of_flags(EngineConformance.test_isolation_of_gradients))
    def test_gradients(self, form):
        self.whole.test_isolation_of_gradients(form, jax.jit)
        if self.primitives:
            self.whole.test_a_primitive_below_a_gradient(form)

    @pytest.mark.parametrize("mode", ["eager", "outer jit", "inner jit"])
    @pytest.mark.parametrize("form", of_flags(EngineConformance.test_isolation_in_every_order))
    def test_primitives(self, form, mode):
        if self.primitives:
            self.whole.test_a_primitive_in_every_form(form, mode)
        else:
            self.whole.test_primitives_are_refused()

    @pytest.mark.parametrize(
        "form", of_flags(EngineConformance.test_generated_programs_keep_their_bits)
    )
    def test_generated_programs(self, form):
        self.whole.test_generated_programs_keep_their_bits(form)

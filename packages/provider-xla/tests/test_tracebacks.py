"""Errors of a user's model: their tracebacks show the user's frames."""

import os
import traceback

import jax
import jax.numpy as jnp
import pytest

import interception_core
import provider_xla as xla

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

RULE = xla.QuantizationRule(weight_qtype="int8")
OURS = ("interception_core", "hijax_trace", "quant_numerics", "provider_xla")
W, X = jnp.ones((16, 4)), jnp.ones((2, 16))


def fails(y, x):
    """Fails for any batch but that of three rows, as a user's code may."""
    return y + jnp.ones(7) if x.shape[0] != 3 else y


def program(w, x):
    return fails(jax.jit(lambda x: x @ w)(x), x)


class Nnx(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return fails(self.linear(x), x)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return fails(linen.Dense(4)(x), x)


class Equinox(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return fails(jax.vmap(self.linear)(x), x)


def calls():
    """Yield what a user calls, by name."""
    ptq, qt = xla.PtqProvider(RULE), xla.QtProvider(RULE)
    three = jnp.ones((3, 16))
    plan = ptq.plan(program, W, three)
    stored = plan.quantize(W)
    yield "plan", lambda: ptq.plan(program, W, X)
    yield "plan.apply", lambda: plan.apply(program)(stored, X)
    yield "jit", lambda: jax.jit(plan.apply(program))(stored, X)
    yield "provider.apply", lambda: ptq.apply(program)(W, X)
    yield "grad", lambda: jax.grad(lambda w: qt.apply(program)(w, X).sum())(W)
    bound = Linen().bind(Linen().init(jax.random.key(0), three))
    models = [Nnx(), bound, Equinox(eqx.nn.Linear(16, 4, key=jax.random.key(0)))]
    for model in models:
        name = type(model).__name__
        yield f"quantize_model of {name}", lambda model=model: xla.quantize_model(model, ptq, X)
        quantized = xla.quantize_model(model, ptq, three)
        yield f"quantized {name}", lambda quantized=quantized: quantized(X)


def frames_of(call):
    with pytest.raises((ValueError, TypeError), match="shapes") as caught:
        call()
    return traceback.extract_tb(caught.value.__traceback__)


def is_ours(frame):
    return any(f"{os.sep}{name}{os.sep}" in frame.filename for name in OURS)


def test_errors_of_a_model_show_no_frames_of_ours():
    for name, call in calls():
        frames = frames_of(call)
        assert [frame.name for frame in frames if frame.filename == __file__][-1] == "fails", name
        ours = [frame for frame in frames if is_ours(frame)]
        assert not ours, (name, ours)


def test_jaxs_setting_shows_them():
    before = jax.config.jax_traceback_filtering
    try:
        jax.config.update("jax_traceback_filtering", "off")
        _, call = next(calls())
        assert any(map(is_ours, frames_of(call)))
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_an_engine_of_a_third_party_hides_its_frames(tmp_path):
    path, names = tmp_path / "acme_engine.py", {}
    exec(compile("def run(fn):\n    return fn()\n", str(path), "exec"), names)
    shown = interception_core.hides_frames(lambda: names["run"](lambda: 1 // 0))
    for hidden in (False, True):
        if hidden:
            interception_core.hide_frames(tmp_path)
        with pytest.raises(ZeroDivisionError) as caught:
            shown()
        found = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
        assert (str(path) in found) != hidden

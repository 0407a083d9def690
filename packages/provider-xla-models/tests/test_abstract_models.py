"""Models without values: quantized as types, to be loaded or restored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla

eqx = pytest.importorskip("equinox")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
ocp = pytest.importorskip("orbax.checkpoint")

X = jnp.linspace(-1, 1, 32).reshape(2, 16)
RULES = {
    "int8": xla.QuantizationRule(weight_qtype="int8"),
    "static": xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True),
}


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs)])

    def __call__(self, x):
        return self.blocks[0](self.dropout(self.norm(self.linear(x))))


class LinenNet(linen.Module):
    """Its parameters have metadata, as those of MaxText."""

    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
        x = linen.BatchNorm(use_running_average=True)(linen.Dense(16, kernel_init=init)(x))
        return linen.Dense(16)(x)


def nnx_net():
    net = NnxNet(nnx.Rngs(0))
    net(X + 1)  # statistics that differ from those at the beginning
    net.eval()
    return net


def bound(variables):
    return LinenNet().bind(variables)


def of_linen():
    variables = LinenNet().init(jax.random.key(0), X)
    stats = jax.tree.map(lambda x: x + 0.25, variables["batch_stats"])
    return {**variables, "batch_stats": stats}


def equinox_net(key):
    return eqx.nn.Linear(16, 4, key=key)


def abstract_nnx():
    net = nnx.eval_shape(lambda: NnxNet(nnx.Rngs(1)))
    net.eval()
    return net


def cases():
    """Yield a model, the same without values, and an input."""
    yield nnx_net(), abstract_nnx(), X
    variables = of_linen()
    yield bound(variables), bound(jax.eval_shape(lambda: variables)), X
    key = jax.random.key(0)
    yield equinox_net(key), eqx.filter_eval_shape(equinox_net, key), X[0]


def test_what_is_saved_is_loaded_into_types(tmp_path):
    provider = xla.PtqProvider(RULES["static"])
    for i, (model, abstract, x) in enumerate(cases()):
        ranges = xla.calibrate_model(model, provider, [(x,)])
        quantized = xla.quantize_model(model, provider, x, statistics=ranges)
        file = tmp_path / (f"{i}.safetensors" if i else "folder")
        xla.save_model(file, quantized)
        empty = xla.quantize_model(abstract, provider, x)
        loaded = xla.load_model(file, empty)
        assert type(loaded) is type(quantized)
        assert (loaded(x) == quantized(x)).all()
        # The empty one stays as it was.
        held = jax.tree.leaves(empty.variables if i == 1 else empty)
        assert not any(isinstance(leaf, jax.Array) for leaf in held)


def test_float_models_are_saved(tmp_path):
    for i, (model, _, x) in enumerate(cases()):
        xla.save_model(tmp_path / f"{i}", model)
        loaded = xla.load_model(tmp_path / f"{i}", model)
        assert type(loaded) is type(model)
        assert (loaded(x) == model(x)).all()


def test_a_file_without_the_other_variables_is_an_error(tmp_path):
    model = xla.quantize_model(nnx_net(), xla.PtqProvider(RULES["int8"]), X)
    path = tmp_path / "a.safetensors"
    xla.save(path, nnx.to_pure_dict(nnx.state(model, nnx.Param)), xla.model_plan(model))
    with pytest.raises(xla.StoreError, match=r"differs in .*norm/mean.* Save such a model by"):
        xla.load_model(path, model)
    with pytest.raises(xla.QuantizationError, match="Bind a Linen module"):
        xla.save_model(path, LinenNet())


def test_models_are_quantized_within_a_trace():
    """The types of what a trace stores are those of what is stored."""
    provider = xla.PtqProvider(RULES["int8"])
    want = jax.tree.leaves(nnx.state(xla.quantize_model(nnx_net(), provider, X)))
    traced = nnx.eval_shape(lambda: xla.quantize_model(nnx_net(), provider, X))
    got = jax.tree.leaves(nnx.state(traced))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    make = lambda key: eqx.nn.Linear(16, 4, key=key)  # noqa: E731
    key = jax.random.key(0)
    stored = eqx.filter_jit(lambda key: xla.quantize_model(make(key), provider, X[0]))(key)
    np.testing.assert_allclose(stored(X[0]), make(key)(X[0]), atol=0.05)


def test_parameters_are_quantized_within_a_trace():
    plan = xla.PtqProvider(RULES["int8"]).plan(lambda w, x: x @ w, X.T, X)
    want = plan.quantize(X.T)
    for prepack in (True, False):
        got = jax.jit(lambda w, prepack=prepack: plan.quantize(w, prepack=prepack))(X.T)
        assert jax.tree.structure(got) == jax.tree.structure(plan.quantize(X.T, prepack=prepack))
    np.testing.assert_array_equal(plan.apply(plan.fn)(want, X), plan.apply(plan.fn)(got, X))


def test_orbax_restores_into_types(tmp_path):
    provider = xla.PtqProvider(RULES["int8"])
    model = xla.quantize_model(nnx_net(), provider, X, prepack=False)
    state = nnx.state(model, nnx.Not(nnx.RngState))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        empty = xla.quantize_model(abstract_nnx(), provider, X, prepack=False)
        types = nnx.to_pure_dict(nnx.state(empty, nnx.Not(nnx.RngState)))
        restored = checkpointer.restore(tmp_path / "state", types)
    found = nnx.state(empty, nnx.Not(nnx.RngState))
    nnx.replace_by_pure_dict(found, restored)
    nnx.update(empty, found)
    assert (empty(X) == model(X)).all()

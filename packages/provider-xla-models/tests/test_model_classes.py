"""Quantized models as Python objects: their classes, methods, copies and pickles."""

import copy
import importlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.processes import run_python

cloudpickle = pytest.importorskip("cloudpickle")
eqx = pytest.importorskip("equinox")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

INT8 = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8"))
X = jnp.linspace(-1, 1, 32).reshape(2, 16)


def weight(seed):
    return normal(16, 16, seed=seed) / 4


class NnxLayer(nnx.Module):
    def fused(self, x):
        raise NotImplementedError

    def update(self, x):
        raise NotImplementedError

    def __call__(self, x):
        # As frameworks ask what a class overrides.
        assert type(self).fused is NnxLayer.fused
        assert type(self).__call__ is NnxLayer.__call__
        assert self.fused.__func__ is NnxLayer.fused
        assert not any("fused" in vars(cls) for cls in type(self).__mro__ if cls is not NnxLayer)
        assert type(self).update is not NnxLayer.update
        return self.update(x)


class NnxNet(NnxLayer):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.w = nnx.Param(weight(1))
        self.mask = nnx.Param(jnp.where(weight(2) > 0, 1.0, 0.0))

    def update(self, x):
        return self.encode(self.norm(self.linear(x))) @ (self.w * self.mask)

    def encode(self, x):
        return self._project(x)

    def _project(self, x):
        return x @ self.w

    def twice(self, x):
        return self(self(x))


class EquinoxLayer(eqx.Module):
    def fused(self, x):
        raise NotImplementedError

    def __call__(self, x):
        assert type(self).fused is EquinoxLayer.fused
        assert type(self).__call__ is EquinoxLayer.__call__
        assert self.fused.__func__ is EquinoxLayer.fused
        return self.update(x)


class EquinoxNet(EquinoxLayer):
    linear: eqx.nn.Linear
    w: jax.Array

    def update(self, x):
        return self.encode(jax.vmap(self.linear)(x)) @ jnp.square(self.w)

    def encode(self, x):
        return self._project(x)

    def _project(self, x):
        return x @ self.w

    def twice(self, x):
        return self(self(x))


class LinenNet(linen.Module):
    def setup(self):
        self.linear = linen.Dense(16)
        self.w = self.param("w", lambda key: weight(1))

    def __call__(self, x):
        return self.encode(self.linear(x)) @ jnp.square(self.w)

    def encode(self, x):
        return self._project(x)

    def _project(self, x):
        return x @ self.w

    def twice(self, x):
        return self(self(x))


def models():
    linen_net = LinenNet()
    yield NnxNet()
    yield EquinoxNet(eqx.nn.Linear(16, 16, key=jax.random.key(3)), weight(1))
    yield linen_net.bind(linen_net.init(jax.random.key(0), X))


def near(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=0.05)


@pytest.mark.slow
def test_a_class_overrides_what_it_did_before():
    # The models' __call__ asserts it, in the quantized program.
    for model in models():
        quantized = xla.quantize_model(model, INT8, X)
        near(quantized(X), model(X))
        assert isinstance(quantized, type(model))
        assert type(quantized).__name__ == type(model).__name__
        assert type(quantized).encode is type(model).encode or isinstance(model, LinenNet)


def test_a_method_that_is_not_named_says_so_where_it_meets_stored_weights():
    for model in models():
        quantized = xla.quantize_model(model, INT8, X)
        near(quantized.twice(X), model.twice(X))  # calls what is quantized
        name = type(model).__name__
        with pytest.raises(xla.QuantizationError, match=rf"{name}\.encode must be one of") as error:
            quantized.encode(X)
        assert "methods=('__call__', 'encode')" in str(error.value)
        both = xla.quantize_model(model, INT8, X, methods=("__call__", "encode"))
        near(both.encode(X), model.encode(X))


def test_stored_weights_outside_say_what_to_do():
    stored = INT8.plan(lambda w, x: x @ w, weight(0), X).quantize(weight(0))
    for use in (
        lambda: X @ stored,
        lambda: stored @ X.T,
        lambda: jnp.dot(X, stored),
        lambda: jnp.einsum("ab,bc->ac", X, stored),
        lambda: jax.jit(jnp.dot)(X, stored),
        lambda: 2 * stored,
        lambda: -stored,
        lambda: stored.mean(),
        lambda: stored.at[0].set(1),
        lambda: np.asarray(stored),
        lambda: np.sum(stored),
        lambda: float(stored),
    ):
        with pytest.raises(TypeError, match=r"must be an argument of a function that TraceEngine"):
            use()
    assert not hasattr(stored, "mean")
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
        stored.nothing  # noqa: B018


def test_models_are_pickled_and_copied():
    for model in models():
        quantized = xla.quantize_model(model, INT8, X)
        want, table = quantized(X), str(xla.model_plan(quantized))
        for how in (
            lambda one: pickle.loads(pickle.dumps(one)),
            lambda one: cloudpickle.loads(cloudpickle.dumps(one)),
            lambda one: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(one)))),
            copy.copy,
            copy.deepcopy,
        ):
            other = how(quantized)
            assert type(other) is type(quantized)
            assert (other(X) == want).all()
        # Its derived weights hold programs, and are found again by a trace.
        assert xla.model_plan(quantized).derived
        other = pickle.loads(pickle.dumps(quantized))
        assert str(xla.model_plan(other)) == table


def test_parts_of_an_nnx_model_are_pickled():
    quantized = xla.quantize_model(NnxNet(), INT8, X)
    graph, state = nnx.split(quantized)
    for one in (pickle, cloudpickle):
        other = nnx.merge(one.loads(one.dumps(graph)), one.loads(one.dumps(state)))
        assert (other(X) == quantized(X)).all()


def program(params, x):
    return x @ params["w"] @ jnp.tril(params["w"])


def test_plans_are_pickled():
    params = {"w": weight(0)}
    rule = xla.QuantizationRule(weight_qtype="int4", tile_size=8, scale_dtype="float16")
    for provider in (INT8, xla.PtqProvider(rule, strict=False)):
        plan = provider.plan(program, {"w": params["w"] * 1e-6}, X)  # float16 can't hold its scales
        for one in (pickle, cloudpickle):
            other = one.loads(one.dumps(plan))
            assert str(other) == str(plan)
            assert other.weights.keys() == plan.weights.keys()
            for path, weight_plan in plan.weights.items():
                assert other.weights[path].scale_dtype == weight_plan.scale_dtype
            stored = other.quantize(params)
            assert jax.tree.structure(stored) == jax.tree.structure(plan.quantize(params))
            assert (other.apply(program)(stored, X) == plan.apply(program)(stored, X)).all()
        assert copy.deepcopy(plan) is plan


@pytest.mark.slow
def test_another_process_runs_a_pickled_model(tmp_path, monkeypatch):
    (tmp_path / "pickled_net.py").write_text(
        "import equinox as eqx\n"
        "class Net(eqx.Module):\n"
        "    linear: eqx.nn.Linear\n"
        "    def __call__(self, x): return self.linear(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("pickled_net")
    model = net.Net(eqx.nn.Linear(16, 4, key=jax.random.key(0)))
    rule = xla.QuantizationRule(weight_qtype="int8")
    quantized = xla.quantize_model(model, xla.PtqProvider(rule), jnp.ones(16))
    with (tmp_path / "model.pkl").open("wb") as file:
        pickle.dump((quantized, quantized(jnp.ones(16))), file)
    read = """if True:
        import pickle, jax, provider_xla as xla
        with open("model.pkl", "rb") as file:
            model, want = pickle.load(file)
        assert (model(jax.numpy.ones(16)) == want).all()
        assert len(xla.model_plan(model).weights) == 1
    """
    run_python("-c", read, cwd=tmp_path, PYTHONPATH=str(tmp_path))

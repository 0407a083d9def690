"""Conformance of the engines: sites, ids, statistics, and the file that is exported."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from jaxtap_testkit.odml_samples import MLP, W8A8, avg_pool, draw, mlp, nnx_block
from provider_odml import Signature, qat
from provider_odml_export.exporting import export as exporting
from provider_odml_export.litert import read


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(4, (3, 3))(x)))
        return nn.softmax(nn.Dense(3)(avg_pool(x).reshape(x.shape[0], -1)))


def conv():
    model, x = Conv(), draw(2, 6, 6, 1)
    return model.apply, jax.jit(model.init)(jax.random.key(0), x), x


ENGINES = ("trace", "patch")


@pytest.fixture(scope="module")
def both():
    """Of each engine: the plan and the statistics of three models as one program; the files."""
    models = [conv(), nnx_block(), (mlp, MLP, draw(4, 6))]

    def fn(params, *inputs):
        return [model[0](p, x) for model, p, x in zip(models, params, inputs, strict=True)]

    params, inputs = [model[1] for model in models], [model[2] for model in models]
    found, files = [], []
    with jax.numpy_dtype_promotion("standard"):  # a fixture of a module is made outside of _strict
        for engine in ENGINES:
            model = qat(fn, W8A8, engine=engine)
            batches = [[scale * x for x in inputs] for scale in (1, 2)]
            found.append((model.plan(params, *inputs), model.calibrate(params, batches)))
            # The same statistics for both: ranges may differ in the last bit. What is exported is
            # not compared with JAX again: the files are compared.
            signature = Signature(inputs)
            planned = exporting._planned(*exporting._call(model, params, signature))
            one = exporting._exported("main", signature, planned, found[0][1])
            files.append(exporting._converted([one], 600.0, probing=False))
    return found, files


@pytest.mark.slow
def test_sites_and_ids(both):
    ((plan, _), (other, _)), _ = both
    assert list(plan.decisions) == list(other.decisions)
    assert dict(plan.sites) == dict(other.sites)


def test_statistics(both):
    ((_, stats), (_, other)), _ = both
    assert stats.manifest == other.manifest
    np.testing.assert_allclose(stats.state, other.state, rtol=1e-5, atol=1e-7)


def described(model):
    """What is in a file, without the names of its tensors."""
    found = []
    for graph in read(model).subgraphs:
        tensors = [
            (
                tensor.shape,
                tensor.dtype,
                None if tensor.scale is None else tensor.scale.tolist(),
                None if tensor.zero_point is None else tensor.zero_point.tolist(),
                tensor.quantized_dimension,
                None if tensor.data is None else tensor.data.tobytes(),
            )
            for tensor in graph.tensors
        ]
        ops = [
            (op.name, op.fused_activation, [tensors[i] for i in op.inputs if i >= 0],
             [tensors[i] for i in op.outputs])
            for op in graph.ops
        ]  # fmt: skip
        found.append(ops)
    return found


def test_files(both):
    _, (model, other) = both
    assert described(model) == described(other)


@pytest.mark.slow
def test_what_is_compared_is_not_nothing(both):
    _, (model, _) = both
    (ops,) = described(model)
    assert any(name == "FULLY_CONNECTED" for name, *_ in ops)
    assert any(dtype == "int8" for *_, outputs in ops for _, dtype, *_ in outputs)

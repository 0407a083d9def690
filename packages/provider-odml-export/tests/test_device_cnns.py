"""CNNs as people train them, small: in integers throughout, and near the float program."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml
from jaxtap_testkit.odml_exports import decibels, exported, results_of, together
from jaxtap_testkit.odml_samples import fake_quant_weight

pytestmark = [pytest.mark.slow, pytest.mark.sample(1)]


def folded(x, act=lambda x: x):
    """A BatchNorm with running averages, which the device folds."""
    return act(nn.BatchNorm(use_running_average=True)(x))


def conv(x, features, size=1, stride=1, **options):
    shape = (size, size), (stride, stride)
    return nn.Conv(features, *shape, use_bias=False, **options)(x)


def depthwise(x, size, stride=1):
    return conv(x, x.shape[-1], size, stride, feature_group_count=x.shape[-1])


def mobilenet_v2(x):
    """Inverted residuals, one with a shortcut and one with a stride."""
    x = folded(conv(x, 8, 3, 2), nn.relu6)
    for stride in (1, 2):
        y = folded(depthwise(folded(conv(x, 16), nn.relu6), 3, stride), nn.relu6)
        y = folded(conv(y, 8))
        x = x + y if stride == 1 else y
    return nn.Dense(5)(x.mean((1, 2)))


def mobilenet_v3(x):
    """Squeeze and excite, hard swish and hard sigmoid."""
    x = folded(conv(x, 8, 3, 2), nn.hard_swish)
    y = folded(depthwise(x, 5), nn.hard_swish)
    z = nn.relu(nn.Conv(4, (1, 1))(y.mean((1, 2), keepdims=True)))
    y = y * nn.hard_sigmoid(nn.Conv(8, (1, 1))(z))
    return nn.Dense(5)(nn.hard_swish(nn.Dense(8)((x + folded(conv(y, 8))).mean((1, 2)))))


def resnet(x):
    """A stem with a pool, and a block whose shortcut is a convolution with a stride."""
    x = nn.max_pool(folded(conv(x, 8, 7, 2), nn.relu), (3, 3), (2, 2), padding="SAME")
    y = folded(conv(folded(conv(x, 12, 3, 2), nn.relu), 12, 3))
    x = nn.relu(folded(conv(x, 12, 1, 2)) + y)
    return nn.Dense(5)(x.mean((1, 2)))


def unet(x):
    """One way up by a transposed convolution, another by resizing."""
    a = folded(conv(x, 6, 3), nn.relu)
    b = folded(conv(nn.max_pool(a, (2, 2), (2, 2)), 8, 3), nn.relu)
    c = nn.relu(nn.Conv(8, (3, 3), (2, 2))(b))
    b = jnp.concatenate([b, folded(nn.ConvTranspose(8, (3, 3), (2, 2))(c), nn.relu)], -1)
    up = jax.image.resize(nn.relu(nn.Conv(6, (3, 3))(b)), (*a.shape[:3], 6), "bilinear")
    return nn.Conv(2, (1, 1))(jnp.concatenate([a, up], -1))


def strides(x):
    """Strides that are larger than the window, and those of pools."""
    x = nn.relu(nn.Conv(6, (2, 2), (3, 3))(x))
    x = nn.avg_pool(nn.Conv(8, (1, 1), (2, 2), feature_group_count=2)(x), (1, 1), (2, 2))
    return nn.Dense(3)(x.reshape(x.shape[0], -1))


def crnn(x):
    """An LSTM over the columns of what convolutions find."""
    x = nn.relu(folded(conv(x, 4, 3, 4)))
    x = x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
    return nn.Dense(3)(nn.RNN(nn.OptimizedLSTMCell(6))(x)[:, -1])


NETS = (mobilenet_v2, mobilenet_v3, resnet, unet, strides, crnn)


def live(rng, path, leaf):
    """Parameters as training leaves them: averages that are not 0 and 1, a channel that is dead."""
    name, shape = jax.tree_util.keystr(path), leaf.shape
    if "'var'" in name:
        return jnp.asarray(rng.uniform(0.3, 2, shape), jnp.float32)
    if "'mean'" in name or "'bias'" in name:
        return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)
    if "'scale'" in name:
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32).at[1].set(0)
    return leaf


@functools.cache
def cases():
    rng, found = np.random.default_rng(0), {}
    image = jnp.asarray(rng.normal(size=(2, 16, 16, 3)), jnp.float32)
    for net in NETS:
        module = type(
            net.__name__, (nn.Module,), {"__call__": nn.compact(lambda _, x, f=net: f(x))}
        )()
        variables = jax.jit(module.init)(jax.random.key(len(found)), image)
        variables = jax.tree_util.tree_map_with_path(functools.partial(live, rng), variables)
        found[net.__name__] = module.apply, variables, (image,)
    return found


@pytest.mark.parametrize(("qtype", "least"), [("int8", 22), ("int4", 4)])
def test_static_ranges(qtype, least):
    """``export`` holds each tensor to one step."""
    rule = odml.OdmlRule(weight_qtype=qtype, output_qtype="int8")
    fn, params, args = together(cases())
    art = exported(fn, params, args, rule=rule)
    ratios = {name: decibels(*pair) for name, pair in results_of(art, cases()).items()}
    assert min(ratios.values()) > least, ratios
    # What joins the steps of the LSTM is float.
    assert {row.place.partition("/")[0] for row in art.report.sites if row.is_float} <= {"crnn"}


@pytest.mark.parametrize(("factor", "quantizes"), [(0.1, 1), (10, 2)])
def test_a_skip_connection_is_requantized_in_integers_where_its_scale_is_another(factor, quantizes):
    """What is concatenated has one scale. A skip connection has that of its other reader."""
    rng = np.random.default_rng(0)
    shapes = {"first": (6, 8), "second": (8, 8), "last": (16, 3)}
    params = {k: jnp.asarray(rng.normal(size=v), jnp.float32) for k, v in shapes.items()}
    params["second"] *= factor

    def fn(params, x):
        kept = nn.relu(x @ params["first"])
        deep = nn.relu(kept @ params["second"])
        return jnp.concatenate([kept, deep], -1) @ params["last"]

    x = jnp.asarray(rng.normal(size=(16, 6)), jnp.float32)
    model = odml.qat(fn, odml.OdmlRule(weight_qtype="int8", output_qtype="int8"))
    art = model.export(params, model.calibrate(params, [(x,)]), x)
    assert art.report.ops["QUANTIZE"] == quantizes
    assert art.report.ops["DEQUANTIZE"] == 1
    assert max(site.lsb for site in art.report.sites) < 1.01
    (found,) = art.run(
        **dict(zip(art.report.signatures[0].inputs, [np.asarray(x)], strict=True))
    ).values()
    assert decibels(found, np.asarray(fn(params, x))) > 30


def test_a_batch_norm_whose_offset_is_far_larger_than_its_slope_is_folded():
    """As of inputs that nobody normalized: rounding the offset is not what a batch does."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(folded(conv(x, 6, 3), nn.relu).mean((1, 2)))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 3)) * 1e4, jnp.float32)
    params = jax.jit(Net().init)(jax.random.key(0), x)
    params["batch_stats"]["BatchNorm_0"] = {"mean": jnp.full(6, -5e4), "var": jnp.full(6, 1e8)}
    model = odml.qat(Net().apply, odml.OdmlRule(weight_qtype="int8", output_qtype="int8"))
    with warnings.catch_warnings():
        # Of so large numbers the device has no finer scale.
        warnings.simplefilter("ignore", odml.OdmlWarning)
        art = model.export(params, model.calibrate(params, [(x,)]), x)
    given = dict.fromkeys(art.report.signatures[0].inputs, np.asarray(x))
    (found,) = art.run(**given).values()
    assert decibels(found, np.asarray(Net().apply(params, x))) > 35


def test_a_batch_norm_in_training_mode():
    """It can't be folded: what it makes of a convolution depends on the batch."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(conv(x, 6, 3))
            return nn.Dense(3)(nn.relu(x).mean((1, 2)))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 3)) + 1, jnp.float32)
    params = jax.jit(Net().init)(jax.random.key(0), x)

    def fn(params, x):
        return Net().apply(params, x, mutable=["batch_stats"])[0]

    static = odml.OdmlRule(weight_qtype="int8", output_qtype="int8")
    with pytest.raises(odml.OdmlError, match=r"on each example alone at export, got .*batch_norm"):
        exported(fn, params, x, rule=static)
    apart = odml.qat(fn, [odml.OdmlRule(op_names=["batch_norm_op"]), static])
    art = apart.export(params, apart.calibrate(params, [(x,)]), x)
    dynamic = odml.OdmlRule(weight_qtype="int8", input_qtype="int8")
    for one in (art, exported(fn, params, x, rule=dynamic)):
        given = dict.fromkeys(one.report.signatures[0].inputs, np.asarray(x))
        (found,) = one.run(**given).values()
        assert decibels(found, np.asarray(fn(params, x))) > 35


def test_dynamic_ranges():
    rule = odml.OdmlRule(weight_qtype="int8", input_qtype="int8")
    fn, params, args = together(cases())
    found = results_of(exported(fn, params, args, rule=rule), cases())
    ratios = {name: decibels(*pair) for name, pair in found.items()}
    assert min(ratios.values()) > 25, ratios


def test_weights_of_four_bits():
    """The float program of kernels that NumPy rounds, with a scale for each output channel."""
    fn, params, args = together(cases())
    found = results_of(exported(fn, params, args, rule=odml.OdmlRule(weight_qtype="int4")), cases())

    def rounded(path, leaf):
        is_kernel = "'kernel'" in jax.tree_util.keystr(path)
        return np.float32(fake_quant_weight(leaf, 7, (leaf.ndim - 1,))) if is_kernel else leaf

    for name, (ours, _) in found.items():
        apply, variables, inputs = cases()[name]
        expected = apply(jax.tree_util.tree_map_with_path(rounded, variables), *inputs)
        most = float(jnp.abs(expected).max())
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4 * most, err_msg=name)

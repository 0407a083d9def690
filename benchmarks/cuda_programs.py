"""Quantized programs on a GPU beside the same on its machine's CPU: equal but for rounding.

    python benchmarks/cuda_programs.py

Stores parameters in each format, and runs dense, convolving, looking, scanning and expert-choosing
programs with them; trains in each recipe. One line for each: how far the GPU's result is from the
CPU's, relative, and which kernels it took. Exits with 1 where one fails or is further away than
rounding explains. With --tiny, formats take turns.
"""

import argparse
import concurrent.futures
import os
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np

import provider_xla as xla
import quant_numerics as qn

# Reference and result multiply float32 as float32.
jax.config.update("jax_default_matmul_precision", "highest")
MOST = 0.03
"""Of a result's norm: a value on the edge between two quantized ones may fall to either side."""

TILED = {"weight_qtype": "int4", "tile_size": 32}
STORED = {
    "int8": {"weight_qtype": "int8"},
    "int8 x int8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int4": TILED,
    "int4 x int8": TILED | {"act_qtype": "int8"},
    "int2": {"weight_qtype": "int2", "tile_size": 32},
    "nf4": {"weight_qtype": "nf4", "tile_size": 32},
    "float8": {"weight_qtype": "float8_e4m3fn"},
    "float8 x float8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "float8 e5m2": {"weight_qtype": "float8_e5m2", "act_qtype": "float8_e4m3fn"},
    "mxfp8": {"weight_qtype": "mxfp8"},
    "mxfp8 x mxfp8": {"weight_qtype": "mxfp8", "act_qtype": "mxfp8"},
    "mxfp4": {"weight_qtype": "mxfp4"},
    "nvfp4": {"weight_qtype": "nvfp4"},
    "nvfp4 x nvfp4": {"weight_qtype": "nvfp4", "act_qtype": "nvfp4"},
    "int8, minmax": {"weight_qtype": "int8", "weight_calibration_method": "minmax"},
}

BLOCKS = "mxfp8", "mxfp4", "nvfp4"


def recipe(forward, backward, **fields):
    return xla.QtRule(weight_qtype=forward, act_qtype=forward, bwd_qtype=backward, **fields)


STATIC = {"act_static_scale": True, "weight_static_scale": True, "bwd_static_scale": True}
RANDOM = {"bwd_stochastic_rounding": "uniform", "channelwise_noise_axes": (0, -1)}
TRAINED = {
    "int8": recipe("int8", "int8"),
    "int8, rounded at random": recipe("int8", "int8", **RANDOM),
    "float8": recipe("float8_e4m3fn", "float8_e5m2"),
    "float8, one scale": recipe("float8_e4m3fn", "float8_e5m2", disable_channelwise_axes=True),
    "float8, delayed scaling": recipe(
        "float8_e4m3fn", "float8_e5m2", **STATIC, static_average=qn.AmaxHistory(length=4)
    ),
    "mxfp8": recipe("mxfp8", "mxfp8"),
    "nvfp4": recipe("nvfp4", "nvfp4"),
    "float8, quantization-aware": xla.QtRule(weight_qtype="float8_e4m3fn"),
    "nvfp4, quantization-aware": xla.QtRule(weight_qtype="nvfp4"),
    "int4, quantization-aware": xla.QtRule(weight_qtype="int4", act_qtype="int8", tile_size=32),
}


def dense(params, x):
    x = jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]
    return jnp.einsum("bd,dhk->bhk", x, params["heads"])


def convolving(params, x):
    x = x.reshape(-1, 8, 8, 4)
    for name, groups in (("dense", 1), ("depthwise", 32)):
        x = jax.lax.conv_general_dilated(
            x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )  # fmt: skip
    return x


def looking(params, x):
    tokens = jnp.argsort(x[:, :16]) % 8
    return params["table"][tokens] @ params["table"].T


def scanning(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x[0]), x[:, :64], params["layers"])


def choosing(params, x):
    sizes = jnp.asarray([1, 0, x.shape[0] - 3, 2], jnp.int32)
    return jax.lax.ragged_dot(x, params["experts"], sizes)


def mapped(params, x):
    return jax.vmap(lambda x: x @ params["up"])(x)


PROGRAMS = {
    dense: {"up": (256, 128), "bias": (128,), "down": (128, 64), "heads": (64, 4, 32)},
    convolving: {"dense": (3, 3, 4, 32), "depthwise": (3, 3, 1, 32)},
    looking: {"table": (64, 64)},
    scanning: {"layers": (3, 64, 64)},
    choosing: {"experts": (4, 256, 64)},
    mapped: {"up": (256, 128)},
}


def given(program, rows):
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=shape).astype(np.float32) / 8
        for name, shape in PROGRAMS[program].items()
    }
    return params, rng.normal(size=(rows, 256)).astype(np.float32)


def stored(program, rule, rows, device, packed):
    """Return the result of stored parameters and the kernels that it took."""
    with jax.default_device(device):
        params, x = jax.tree.map(jnp.asarray, given(program, rows))
        plan = xla.PtqProvider(xla.QuantizationRule(**rule)).plan(program, params, x)
        params = plan.quantize(params)
        platform = "cpu" if device.platform == "cpu" else "cuda"
        if packed:
            params = plan.convert(params, platform)
        lowered = jax.jit(plan.apply(program)).lower(params, x)
        text = lowered.as_text()
        names = sorted({part.split("(")[0] for part in text.split("@te_ffi_kernels.")[1:]})
        return lowered.compile()(params, x), ", ".join(names)


def trained(program, rule, rows, device, _):
    """Return the gradients of the third step; statistics know ranges by then."""
    with jax.default_device(device):
        params, x = jax.tree.map(jnp.asarray, given(program, rows))

        def loss(params, x):
            return sum(jnp.mean(leaf**2) for leaf in jax.tree.leaves(program(params, x)))

        provider = xla.QtProvider(rule)
        fn = provider.apply(loss)
        if rule.act_static_scale:
            fn = provider.apply(loss, provider.init_statistics(loss, params, x))
        key = {"quant_key": jax.random.key(7)} if rule.bwd_stochastic_rounding else {}
        step = jax.jit(jax.value_and_grad(fn))
        return [step(params, x, **key) for _ in range(3)][-1], ""


def away(found, expected):
    """The norm of the difference of two pytrees, relative."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    size = sum((b**2).sum() for _, b in pairs)
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / size)


def check(run, program, name, rule, rows, packed=False):
    """Return whether both agree, and a line about it."""
    label = f"{run.__name__} {program.__name__}, {name}, {rows} rows{', packed' * packed}"
    try:
        found, kernels = run(program, rule, rows, jax.devices()[0], packed)
        expected, _ = run(program, rule, rows, jax.devices("cpu")[0], False)
        error = away(found, expected)
    except Exception:  # the others are checked all the same
        return False, f"{label}: FAILED\n{traceback.format_exc(limit=-4)}"
    good = error <= MOST  # not so of NaN
    return good, f"{label}: {error:.1e} away{'' if good else ', TOO FAR'}, {kernels or 'XLA'}"


def cases(tiny):
    """(how it runs, program, name of the rule, rule, rows, whether weights are packed)."""
    number = 0
    for program in PROGRAMS:
        for kind, (name, rule) in enumerate(STORED.items()):
            if tiny and kind % len(PROGRAMS) != number % len(PROGRAMS):
                continue
            if program is convolving and rule["weight_qtype"] in BLOCKS:
                continue  # their tiles do not divide 36 and 9
            yield stored, program, name, rule, 32
            if program is dense:
                yield stored, program, name, rule, 4, True
        number += 1
        for name, rule in TRAINED.items():
            if program is convolving and rule.weight_qtype in BLOCKS:
                continue
            if program in (dense, scanning, convolving) and not (tiny and rule.act_static_scale):
                yield trained, program, name, rule, 32


def main():
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    bad = total = 0
    # XLA compiles without Python.
    with concurrent.futures.ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as threads:
        checks = [threads.submit(check, *case) for case in cases(args.tiny)]
        for done in concurrent.futures.as_completed(checks):
            good, line = done.result()
            print(line, flush=True)
            bad, total = bad + (not good), total + 1
    print(f"{total} programs, {bad} failed")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

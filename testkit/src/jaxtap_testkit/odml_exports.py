"""Exports with one rule, and the error of LiteRT's results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import provider_odml as odml

W8A8 = odml.OdmlRule(weight_qtype="int8", output_qtype="int8")
W8A16 = odml.OdmlRule(weight_qtype="int8", output_qtype="int16")
DYNAMIC = odml.OdmlRule(weight_qtype="int8", input_qtype="int8")
WEIGHTS = odml.OdmlRule(weight_qtype="int8")


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def exported(fn, params, *args, rule=W8A8, **options) -> odml.Artifact:
    stats = None
    if rule.is_static:
        stats = odml.qat(fn, [rule], strict=False).calibrate(params, [args])
    return odml.export(fn, params, stats, [rule], *args, strict=False, **options)


def signal_to_noise(fn, params, args, artifact) -> float:
    """Return the signal-to-noise ratio of the first output, in decibels."""
    expected = np.float64(jax.tree.leaves(fn(params, *args))[0])
    names = artifact.report.signatures[0].inputs
    found = artifact.run(**dict(zip(names, map(np.asarray, args), strict=True)))
    return decibels(np.float64(next(iter(found.values()))), expected)


def together(cases: dict):
    """Return programs as one, that is traced and converted once.

    Args:
        cases: by name, a function, its parameters, and its arguments.

    Returns:
        A function of all parameters and all arguments, by name, and those.
    """

    def fn(params, args):
        return [case[0](params[name], *args[name]) for name, case in cases.items()]

    return fn, {name: case[1] for name, case in cases.items()}, {n: c[2] for n, c in cases.items()}


def results_of(artifact, cases: dict) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the first result of each of the programs, in LiteRT and in float."""
    fn, params, args = together(cases)
    names = artifact.report.signatures[0].inputs
    inputs = zip(names, map(np.asarray, jax.tree.leaves(args)), strict=True)
    found, count, results = artifact.run(**dict(inputs)), 0, {}
    for name, out in zip(cases, fn(params, args), strict=True):
        leaves = jax.tree.leaves(out)
        results[name] = np.float64(found[f"output_{count}"]), np.float64(leaves[0])
        count += len(leaves)
    return results


def decibels(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the signal-to-noise ratio of a result."""
    noise = max(np.sum((found - expected) ** 2), 1e-30)
    return 10 * float(np.log10(np.sum(expected**2) / noise))

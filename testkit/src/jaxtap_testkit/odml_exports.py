"""Exports with one rule, and the error of LiteRT's results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import provider_odml as odml

W8A8 = odml.OdmlRule(weight_qtype="int8", act_qtype="int8")
W8A16 = odml.OdmlRule(weight_qtype="int8", act_qtype="int16")
DYNAMIC = odml.OdmlRule(weight_qtype="int8", act_qtype="int8", act_static_scale=False)
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
    expected = np.asarray(jax.tree.leaves(fn(params, *args))[0], np.float64)
    names = artifact.report.signatures[0].inputs
    found = artifact.run(**dict(zip(names, map(np.asarray, args), strict=True)))
    error = np.asarray(next(iter(found.values())), np.float64) - expected
    return 10 * float(np.log10(np.sum(expected**2) / max(np.sum(error**2), 1e-30)))

"""Flax models quantized for LiteRT by Qwix: its training model, and its model for conversion."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import qwix
from flax import linen

from provider_odml import OdmlRule
from provider_odml_export.litert import Program, Runner, convert

MODES = {
    "W8A8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "W4A8": {"weight_qtype": "int4", "act_qtype": "int8"},
    "W8A16": {"weight_qtype": "int8", "act_qtype": "int16"},
    "dynamic": {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": False},
    "weight-only": {"weight_qtype": "int8"},
}


def our_rule(mode: str) -> OdmlRule:
    """Returns the rule of a mode in our words: ours has a name for each meaning of act_qtype."""
    fields = dict(MODES[mode])
    name = "output_qtype" if fields.pop("act_static_scale", True) else "input_qtype"
    acts = fields.pop("act_qtype", None)
    return OdmlRule(**fields, **{name: acts})


class QwixModel:
    """A module of Flax Linen with the rules of one mode.

    Args:
        module: takes images, and ``train``.
        mode: out of ``MODES``.
    """

    def __init__(self, module: linen.Module, mode: str):
        self._module = module
        self._rules = [qwix.QuantizationRule(**MODES[mode])]
        self._model = qwix.quantize_model(module, qwix.OdmlQatProvider(self._rules))

    def calibrate(self, variables: Any, batches: list[np.ndarray]) -> Any:
        """Returns Qwix's statistics of some batches."""

        @jax.jit
        def step(state, x):
            return self._model.apply({**variables, **state}, x, mutable=["quant_stats"])[1]

        state: Any = {}
        for x in batches:
            state = step(state, x)
        return state

    def train(self, variables: Any, state: Any, digits: Any, *, epochs: int, rate: float) -> Any:
        """Trains on, as ``odml_models.train`` does. Returns variables and statistics."""
        from jaxtap_testkit.odml_models import BATCH

        steps = epochs * (len(digits.train_images) // BATCH)
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
        moments = optimizer.init(variables["params"])

        def loss(params, variables, images, labels):
            logits, others = self._model.apply(
                {**variables, "params": params}, images, train=True,
                mutable=["batch_stats", "quant_stats"],
            )  # fmt: skip
            own = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return own, others

        @jax.jit
        def step(variables, moments, images, labels):
            gradients, others = jax.grad(loss, has_aux=True)(
                variables["params"], variables, images, labels
            )
            updates, moments = optimizer.update(gradients, moments)
            params = optax.apply_updates(variables["params"], updates)
            return {**variables, **others, "params": params}, moments

        variables = {**variables, **state}
        rng = np.random.default_rng(0)
        for _ in range(epochs):
            order = rng.permutation(len(digits.train_images))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = order[start : start + BATCH]
                variables, moments = step(
                    variables, moments, digits.train_images[batch], digits.train_labels[batch]
                )
        return variables, {k: variables.pop(k) for k in ["quant_stats"] if k in variables}

    def logits(self, variables: Any, state: Any, x: np.ndarray) -> np.ndarray:
        """Returns the logits with fake quantization."""
        return np.asarray(jax.jit(self._model.apply)({**variables, **state}, x))

    def convert(self, variables: Any, state: Any, x: np.ndarray) -> bytes:
        """Converts Qwix's model for conversion with our chain from StableHLO to LiteRT."""
        stats = state.get("quant_stats", {})
        provider = qwix.OdmlConversionProvider(self._rules, variables["params"], stats)
        model = qwix.quantize_model(self._module, provider)

        def serving(x):
            return model.apply(variables, x)

        exported = jax.export.export(jax.jit(serving), platforms=["cpu"])(
            jax.ShapeDtypeStruct(x.shape, x.dtype)
        )
        program = Program("serving_default", exported.mlir_module_serialized, ("x",), ("logits",))
        return convert([program])

    def litert(self, variables: Any, state: Any, x: np.ndarray) -> np.ndarray:
        """Returns the logits of LiteRT."""
        return Runner(self.convert(variables, state, x)).run("serving_default", x=x)["logits"]

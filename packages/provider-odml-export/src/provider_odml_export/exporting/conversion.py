"""OdmlConversionProvider: the program that the converter gets, as a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from provider_odml import OdmlQatProvider, OdmlRule, QuantStats
from provider_odml.features import INT8, Replay, check_statistics, split

from .collect import collect
from .emit import Device
from .grids import checked, grids_of
from .written_out import planned


class OdmlConversionProvider(OdmlQatProvider):
    """Emits a program for LiteRT's converter: tensors on their grids, told by composites.

    ``export`` is what to use for a .tflite. This is its program as a JAX function, for those who
    bring a converter; run in JAX, it computes what the file does.

    Args:
        rules: those of training.
        params: the parameters: arrays, which become constants.
        quant_stats: the statistics; None if no rule has a static range.
        options: of ``OdmlQatProvider``, as in training.
    """

    def __init__(
        self,
        rules: OdmlRule | Iterable[OdmlRule] = (INT8,),
        params: Any = None,
        quant_stats: QuantStats | None = None,
        **options: Any,
    ):
        super().__init__(rules, **options)
        check_statistics("quant_stats", quant_stats)
        self._params = params
        self._stats = quant_stats

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:  # pyrefly: ignore[bad-override]
        """Return ``fn`` as the device computes it, with the provider's parameters.

        Raises (at the call):
            ManifestError: the statistics are not those of the program.
        """

        model = super().apply(fn)

        @functools.wraps(fn, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            full = list(args)
            full[self.params_argnum] = self._params
            with jax.ensure_compile_time_eval():
                # A tracer is not a sample; the constants don't depend on what the program is given.
                samples = jax.tree.map(_sample, tuple(full))
                named = jax.tree.map(_sample, kwargs)
                program = planned(model, samples, named)
                self.check(program.trained)
                stats = checked([program.trained], self._stats)
                grids = grids_of(program.plan, stats, program.origins)
                constants = collect(program, grids, split((samples, named))[0])
            device = Device(grids, constants, converting=False)
            return program.run(Replay(program.plan, device), split((tuple(full), kwargs))[0])

        return call


def _sample(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.core.Tracer) else leaf

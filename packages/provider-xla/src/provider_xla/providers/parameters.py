"""What a plan does with parameters: quantize, pack, optimize, merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..cache.find import parameters_of
from ..cache.use import quantize_cache
from ..lora import tree
from ..plan import abstract, quantize
from ..plan.plan import PlanData

if TYPE_CHECKING:
    from ..passes.base import Pass
    from ..passes.optimize import Optimized


@dataclasses.dataclass(frozen=True)
class ParameterPlan(PlanData):
    """What a plan does with parameters and other arrays that it stores."""

    def quantize(self, params: Any, *, donate: bool = False, prepack: bool = True) -> Any:
        """Quantize parameters one by one, with a progress bar on terminals.

        Each parameter keeps its sharding. At its peak this needs, beside ``params``, the parameters
        that are quantized so far and a copy of one parameter.

        Args:
            params: the same tree as the plan's, of arrays.
            donate: whether to delete each parameter as soon as its quantized values are made. All
                are checked first, so that nothing is deleted if one can't be quantized.
            prepack: whether to pack parameters for the kernels that run their contractions. False
                gives quantized values and scales, to be saved: see ``prepack``.

        Returns:
            The tree with a ``quant_numerics.QArray`` instead of each quantized parameter
            (a ``PackedQArray`` for 3, 5, 6 and 7 bits, which JAX has no dtypes for), or a
            ``PrepackedWeight``.

        Raises:
            QuantizationError: ``params`` is another tree or has other shapes or dtypes than the
                plan; a leaf is not an array; values are not finite; or scales don't fit their
                dtype. It names the parameter and its rule, and nothing is changed.
        """
        return quantize.quantize(self, params, donate=donate, prepack=prepack)

    def quantized_types(self, params: Any, *, prepack: bool = True) -> Any:
        """Return the types of what ``quantize`` would store, to compile without parameters.

        Args:
            params: the same tree as the plan's, of arrays or ``jax.ShapeDtypeStruct``. The
                shardings of the result follow from theirs.
            prepack: as for ``quantize``.

        Returns:
            The tree that ``quantize`` returns, with a ``jax.ShapeDtypeStruct`` for each array:
            ``jax.jit(plan.apply(fn)).lower(types, ...)`` takes it. Nothing is computed.

        Raises:
            QuantizationError: ``params`` is another tree, or has other shapes or dtypes.
        """
        return abstract.quantized_types(self, params, prepack=prepack)

    def prepack(self, params: Any) -> Any:
        """Pack quantized parameters for the kernels that compute their contractions.

        ``quantize`` does this for the platform that they are on. This method is for parameters that
        were stored without it; ``convert`` packs for other platforms.

        Args:
            params: what ``quantize(..., prepack=False)`` returned, here or elsewhere.

        Returns:
            The tree with a ``PrepackedWeight`` for each parameter that the plan has a kernel for.
            A parameter that is sharded along a contracted axis, or within a panel, stays
            unpacked. One that is packed already stays the same.

        Raises:
            QuantizationError: a parameter is quantized in another way than the plan says.
        """
        return quantize.prepack(self, params)

    def convert(self, params: Any, platform: str | None = None) -> Any:
        """Convert stored parameters for the kernels of another platform.

        Quantized values and scales are the same in every form, bit for bit. Nothing is moved to
        other devices.

        Args:
            params: what ``quantize``, ``optimize`` or ``load`` returned, here or elsewhere.
            platform: ``"cpu"``, ``"gpu"``, ``"cuda"``, ...; None for quantized values and scales,
                which run everywhere.

        Returns:
            The tree. A parameter that the plan has no kernel for on that platform is a ``QArray``
            or ``PackedQArray``.
        """
        return quantize.convert(self, params, platform)

    def optimize(
        self,
        params: Any,
        batches: Iterable[Sequence[Any]],
        passes: Sequence[Pass],
        *,
        donate: bool = False,
        prepack: bool = True,
    ) -> Optimized:
        """Quantize the parameters as ``quantize`` does, after passes that look at data.

        The function runs in float on the batches. What is measured at its contractions decides how
        parameters are transformed and rounded. The function needs no change: each parameter
        carries the maps that its activations go through.

        Args:
            params: the same tree as the plan's, of arrays.
            batches: each the other arguments of a call, as a tuple.
            passes: such as ``[Hadamard(), Gptq()]``, run one after the other. An empty list only
                rounds.
            donate: whether to delete the parameters at the end.
            prepack: as for ``quantize``.

        Returns:
            The stored parameters, with a ``TransformedWeight`` for each that was transformed, and
            a report. Parameters that passes can't change (of convolutions, lookups, contractions
            with batch axes and such) are quantized as by ``quantize``; the report says why.

        Raises:
            QuantizationError: as ``quantize``; there is no batch; activations are not finite; or
                the plan is for the patch engine.
            TypeError: ``passes`` holds something else than passes.
            ValueError: the passes are in an order that can't work.
        """
        from ..passes.optimize import optimize

        return optimize(self, params, batches, passes, donate=donate, prepack=prepack)

    def quantize_cache(self, value: Any, argument: int | str | None = None) -> Any:
        """Quantize the caches of an argument, for the function of ``apply``.

        The function of ``apply`` quantizes caches that are still float. If they are quantized
        before, the first call takes less memory, and can donate them like all others.

        Args:
            value: an argument of the plan's function: arrays, or types for lowering.
            argument: its name or position. None if the plan carries caches of only one argument.

        Returns:
            The tree with a ``CacheArray`` for each array that the plan carries quantized, sharded
            as the array is.

        Raises:
            QuantizationError: ``value`` is another tree, or has another shape or dtype than the
                plan says; or the plan carries caches of several arguments, and none is named.
        """
        return quantize_cache(self.caches, value, argument, parameters_of(self.fn))

    def init_adapters(self, key: jax.Array, dtype: Any = None) -> dict[str, dict[str, jax.Array]]:
        """Make adapters for ``apply`` and ``merge``, which change nothing before training.

        Args:
            key: random key.
            dtype: float dtype; None is float32.

        Returns:
            For each parameter in ``lora``, by its pytree path, ``"a"`` and ``"b"``, of ``a_shape``
            and ``b_shape``. A is uniform in ±1/sqrt(fan_in), as in the code of the LoRA paper
            (arXiv:2106.09685), and B is zero. If the parameter is only looked up, A is zero and B
            normal.

        Raises:
            QuantizationError: no rule gives a parameter an adapter, or dtype is not a float.
        """
        return tree.init_adapters(self, key, dtype)

    def merge(self, params: Any, adapters: Mapping[str, Mapping[str, jax.Array]]) -> Any:
        """Return float parameters with adapters added: ``W + (alpha / rank) * A B``.

        Args:
            params: the plan's parameters, quantized or not.
            adapters: as ``init_adapters`` makes them, trained.

        Returns:
            The tree of float arrays, in which quantized ones are dequantized. Run it, or
            ``quantize`` it.

        Raises:
            QuantizationError: ``adapters`` has other paths or shapes than the plan.
        """
        return tree.merge(self, params, adapters)

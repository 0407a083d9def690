"""Plan: what rules do to a program and its parameters, before anything is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from interception_core import Engine, PatchEngine

from ..errors import QuantizationError
from ..program.arrays import is_array, of_arrays
from ..program.record import OpRecord, Report
from ..program.sites import Rules, Site, Sites, short
from ..run.static import Observation, StaticRange, Statistics, key_of
from ..run.transformed import TransformedWeight
from .weight import WeightPlan, is_stored

if TYPE_CHECKING:
    from ..allocate.allocation import Allocation
    from ..lora.plan import LoraPlan
    from ..passes.base import Pass
    from ..passes.optimize import Optimized
    from ..report.results import QualityReport

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What rules do to a program and its parameters. ``print(plan)`` shows it as a table.

    Attributes:
        ops: every operation: its rule and its parameter, or why it stays float.
        weights: every parameter that is quantized, by pytree path.
        problems: where rules can't be followed.
        ranges: the activations with a static range, by site and side.
        allocation: what ``allocate`` gave each parameter, and why; None of other plans.
        lora: the adapters of parameters that rules with a rank are about, by pytree path.
        absorbed: parameters of which nothing is stored: derived weights are all that uses them.
        notes: what is done that no rule says, such as another tile size where the rule's does not
            divide.
    """

    ops: Report
    weights: Mapping[str, WeightPlan]
    problems: tuple[str, ...]
    ranges: Mapping[str, StaticRange]
    _rules: Rules = dataclasses.field(repr=False)
    _engine: Engine = dataclasses.field(repr=False)
    _argnum: int = dataclasses.field(repr=False)
    _leaves: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(repr=False)
    _fn: Callable[..., Any] = dataclasses.field(repr=False)
    # The tree of parameters, with types for arrays.
    _params: Any = dataclasses.field(repr=False)
    allocation: Allocation | None = None
    lora: Mapping[str, LoraPlan] = dataclasses.field(default_factory=dict, kw_only=True)
    absorbed: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)
    notes: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters as they are."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self._leaves.values())

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters when those of ``weights`` are quantized."""
        kept = self._leaves.keys() - self.weights.keys() - self.absorbed
        floats = sum(self._leaves[path].size * self._leaves[path].dtype.itemsize for path in kept)
        return floats + sum(weight.bytes_after for weight in self.weights.values())

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        return {
            "ops": self.ops.as_json(),
            "weights": [weight.as_json() for weight in self.weights.values()],
            "lora": [adapter.as_json() for adapter in self.lora.values()],
            "problems": list(self.problems),
            "notes": list(self.notes),
            "floats": [list(one) for one in self.floats],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    @property
    def floats(self) -> tuple[tuple[str, int, str], ...]:
        """The parameters that stay float: path, bytes, and why, the largest first."""
        found = []
        for path, leaf in self._leaves.items():
            if path not in self.weights and path not in self.absorbed:
                found.append((path, leaf.size * leaf.dtype.itemsize, self._why_float(path)))
        return tuple(sorted(found, key=lambda one: -one[1]))

    def _why_float(self, path: str) -> str:
        ops = [op for op in self.ops if path in (op.weight or "").split(" and ")]
        if not ops:
            return "no matmul, convolution or lookup uses it"
        first = next((op for op in ops if op.rule is not None), ops[0])
        why = "no rule matches" if first.rule is None else first.reason or "it can't be stored"
        return f"{first.op_id}: {why}"

    def __str__(self) -> str:
        table = self.ops.table({path: weight.bytes for path, weight in self.weights.items()})
        before, after = (f"{n / 2**20:.2f} MiB" for n in (self.bytes_before, self.bytes_after))
        count = sum(path in self.weights or path in self.absorbed for path in self._leaves)
        lines = [f"{count} of {len(self._leaves)} parameters quantized: {before} -> {after}"]
        floats = self.floats
        line = f"{sum(size for _, size, _ in floats) / 2**20:.2f} MiB of parameters stay float"
        shown = [f"{path} {size / 2**20:.2f} MiB ({why})" for path, size, why in floats[:3]]
        shown += [f"{len(floats) - 3} more"] * (len(floats) > 3)
        lines.append(": ".join(filter(None, [line, ", ".join(shown)])))
        derived = [weight.derived for weight in self.weights.values() if weight.derived]
        lines += [f"derived: {one.path}, of {', '.join(one.leaves)}" for one in derived]
        if self.lora:
            numbers = sum(adapter.size for adapter in self.lora.values())
            lines.append(f"{len(self.lora)} parameters have adapters: {numbers:,} numbers to train")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "", table])

    def quantize(self, params: Any, *, donate: bool = False, prepack: bool = True) -> Any:
        """Quantizes the parameters, one after the other, with a progress bar on a terminal.

        Each keeps its sharding. At its peak this needs, beside ``params``, what is quantized so
        far and a copy of one parameter.

        Args:
            params: the same tree as the plan's, of arrays.
            donate: whether each parameter is deleted as soon as its codes are made. All are
                looked at first, so that nothing is deleted if one can't be quantized.
            prepack: whether parameters whose products run in kernels are packed for these; False
                for codes and scales alone, to be saved: see ``prepack``.

        Returns:
            The tree with a ``quant_numerics.QArray`` in place of each quantized parameter
            (a ``PackedQArray`` for 3, 5, 6 and 7 bits, which JAX has no dtypes for), or a
            ``PrepackedWeight``.

        Raises:
            QuantizationError: another tree, other shapes or dtypes, leaves that are no arrays,
                values that are not finite. Names the parameter and its rule. Nothing is
                changed then.
        """
        from .quantize import quantize

        return quantize(self, params, donate=donate, prepack=prepack)

    def prepack(self, params: Any) -> Any:
        """Packs quantized parameters for the kernels that compute their products.

        ``quantize`` does it by itself. This is for parameters that were stored without: a packed
        one is for the packages that are installed here.

        Args:
            params: what ``quantize(..., prepack=False)`` returned, here or elsewhere.

        Returns:
            The tree with a ``PrepackedWeight`` in place of what the plan has a kernel for. One
            that is sharded along an axis that is contracted, or within 16 columns, stays what it
            is, and so does what is packed already.

        Raises:
            QuantizationError: a parameter was quantized in another way than the plan's.
        """
        from .quantize import prepack

        return prepack(self, params)

    def optimize(
        self,
        params: Any,
        batches: Iterable[Sequence[Any]],
        passes: Sequence[Pass],
        *,
        donate: bool = False,
        prepack: bool = True,
    ) -> Optimized:
        """Quantizes the parameters as ``quantize`` does, after passes that look at data.

        The function is run in float on the batches, and what is measured at its products decides
        how parameters are transformed and rounded. The function stays what it is: what becomes of
        an activation goes along with the parameter.

        Args:
            params: the same tree as the plan's, of arrays.
            batches: each the other arguments of a call, as a tuple.
            passes: such as ``[Hadamard(), Gptq()]``, one after the other; none rounds alone.
            donate: whether the parameters are deleted at the end.
            prepack: as for ``quantize``.

        Returns:
            The stored parameters, in which a ``TransformedWeight`` stands for each parameter that
            was transformed, and a report. Parameters that passes can't change (of convolutions,
            lookups, products with batch axes and such) are quantized as by ``quantize``; the
            report says why.

        Raises:
            QuantizationError: as ``quantize``; there is no batch; activations are not finite; the
                plan is for the patch engine.
            TypeError, ValueError: what is no pass, or passes in an order without a meaning.
        """
        from ..passes.optimize import optimize

        return optimize(self, params, batches, passes, donate=donate, prepack=prepack)

    def apply(self, fn: Callable[P, R], statistics: Statistics | None = None) -> Callable[P, R]:
        """Returns ``fn`` for parameters that ``quantize`` returned.

        Put a ``jax.jit`` around it, or around what calls it: eagerly, each parameter is also
        dequantized at each call. Arguments: see ``PtqProvider.apply``.

        Where rules have a rank it also takes ``adapters``, of ``init_adapters``, and in training
        ``dropout_key``, a random key, new at each step; without one nothing is dropped.
        """
        from ..lora.apply import apply
        from ..run.ptq import PtqProvider

        provider = PtqProvider(
            self._rules.rules, params_argnum=self._argnum, engine=_engine_name(self._engine)
        )
        return apply(self, fn, provider.apply(fn, statistics), statistics)

    def init_adapters(self, key: jax.Array, dtype: Any = None) -> dict[str, dict[str, jax.Array]]:
        """Makes adapters for ``apply`` and ``merge``, which change nothing before training.

        Args:
            key: random key.
            dtype: float dtype; None is float32.

        Returns:
            By the pytree path of each parameter in ``lora`` its ``"a"`` and ``"b"``, of
            ``a_shape`` and ``b_shape``. A is uniform in ±1/sqrt(fan_in), as in the code of the
            LoRA paper (arXiv:2106.09685), and B zero; of a parameter that is only looked up A is
            zero and B normal.

        Raises:
            QuantizationError: no rule gives a parameter an adapter, or dtype is no float.
        """
        from ..lora.tree import init_adapters

        return init_adapters(self, key, dtype)

    def merge(self, params: Any, adapters: Mapping[str, Mapping[str, jax.Array]]) -> Any:
        """Adds adapters to their parameters, ``W + (alpha / rank) * A B``, for good.

        Args:
            params: the plan's parameters, quantized or not.
            adapters: as ``init_adapters`` makes them, trained.

        Returns:
            The tree of float arrays, those that were quantized dequantized: to be run as it is,
            or ``quantize``d.

        Raises:
            QuantizationError: other paths or shapes than the plan's.
        """
        from ..lora.tree import merge

        return merge(self, params, adapters)

    def calibrate(
        self, fn: Callable[..., Any], params: Any, batches: Iterable[Sequence[Any]]
    ) -> Statistics:
        """Measures the static ranges of activations, in float, with a progress bar.

        Args:
            fn: the function that the plan is for.
            params: its parameters: arrays; or, where ``optimize`` has transformed some, what that
                returned, since the ranges are those of the transformed activations.
            batches: each the other arguments of a call, as a tuple.

        Returns:
            The mean range over the batches, by site: a pytree for ``apply``, to be saved with the
            parameters. The steps of a loop share one range, in which all of them fit.

        Raises:
            QuantizationError: no rule has ``act_static_scale``, or there is no batch.
        """
        from tqdm import tqdm

        if not self.ranges:
            raise QuantizationError(
                "There is nothing to calibrate: no rule that decides an operation has "
                "act_static_scale=True."
            )
        from ..run.ptq import prepared

        statistics = self.empty_statistics(params)

        stored = not isinstance(self._engine, PatchEngine)

        def measured(*args: Any) -> Any:
            observation = Observation(statistics)

            def run(site: Site) -> Any:
                observation.observe(site)
                return NotImplemented

            sites = Sites(self._rules, run, _ignore, keyed=False)
            result = prepared(self._engine.wrap(fn, sites.interceptor), stored)(*args)
            observation.finish()
            return result

        jitted = None
        for batch in tqdm(batches, desc="calibrating", unit="batch", disable=None):
            args = list(batch)
            args.insert(self._argnum, params)
            call, arrays = of_arrays(measured, args, {})
            jitted = jitted or jax.jit(call)
            jax.block_until_ready(jitted(arrays))
        if jitted is None:
            raise QuantizationError("There is nothing to calibrate from: batches is empty.")
        return {key: one.calibration() for key, one in statistics.items()}

    def report(
        self,
        params: Any,
        *batch: Any,
        batches: Iterable[Sequence[Any]] | None = None,
        statistics: Statistics | None = None,
        stored: Any = None,
        time: bool = True,
    ) -> QualityReport:
        """Measures what quantization costs on data, operation by operation and end to end.

        The function runs in float; each operation that is quantized is computed from the same
        float operands in both ways. Then the quantized program runs as a whole.

        Args:
            params: the function's parameters: arrays.
            batch: its other arguments.
            batches: several of those instead, each as a tuple; of the shapes of the first.
            statistics: the ranges that rules with ``act_static_scale`` need: what ``calibrate``
                returns.
            stored: the parameters as ``optimize`` or ``load`` returned them; None for what
                ``quantize`` makes of ``params``.
            time: whether to time operations and programs, too, each compiled by itself.

        Returns:
            The report: ``print`` it, or ``save_html`` it.

        Raises:
            QuantizationError: the parameters are not the plan's; there is no batch.
            JaxtapError: a static range is needed and there is none.
        """
        from ..report.measure import make_report

        if batches is not None and batch:
            raise TypeError("Give the arguments of one batch, or batches=, not both.")
        batches = [batch] if batches is None else batches
        return make_report(self, params, batches, statistics, stored, time)

    def allocate(
        self,
        params: Any,
        *batch: Any,
        budget_bits: float | None = None,
        budget_bytes: int | None = None,
        qtypes: Iterable[Any] = ("int2", "int3", "int4", "int5", "int6", "int7", "int8"),
        tile_size: int | float | Sequence[int | float | None] | None = None,
        error: Callable[[Any, Any], Any] | None = None,
        errors: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Plan:
        """Returns a plan that gives each parameter the qtype that its bits are best spent on.

        Of all choices within the budget it is the one with the least error of the output, as far
        as the errors of single parameters add up. Each is measured, with a progress bar: the
        function is run in float once for every parameter and qtype.

        Args:
            params: the parameters: arrays.
            batch: the other arguments of a call: real data, a few dozen examples.
            budget_bits: average bits per element of the parameters that the plan quantizes,
                scales included.
            budget_bytes: instead, of all parameters, those that stay float included, as
                ``bytes_after`` counts them where nothing is packed for kernels.
            qtypes: the formats to choose from. A parameter that can't have one, because tiles do
                not divide it, has no such choice.
            tile_size: elements per scale, as in a rule, or a sequence of those to choose from, in
                which None is one scale per channel. None leaves it to the rules.
            error: a function of what ``fn`` returns in float and with quantized parameters, that
                returns a scalar, 0 or more. None is the squared error over the squared norm,
                the mean over the floating arrays.
            errors: ``allocation.errors`` of a plan that was allocated for the same batch; what is
                there isn't measured again.

        Returns:
            The plan. Its rules are these with one for each chosen format (``weight_path``) before
            the rule that it narrows; ``plan.allocation`` shows the choice. A parameter that a
            loop takes in steps is one.

        Raises:
            QuantizationError: the budget is too small, and says what is needed; nothing is
                quantized; a parameter has no effect on the output for this batch; two parameters
                are multiplied with each other.
            ValueError: no budget, or two; a qtype that isn't one.
        """
        from ..allocate.allocate import allocate

        return allocate(
            self,
            params,
            batch,
            budget_bits=budget_bits,
            budget_bytes=budget_bytes,
            qtypes=qtypes,
            tile_size=tile_size,
            error=error,
            errors=errors,
        )

    def empty_statistics(self, params: Any = None) -> dict[str, qn.Statistics]:
        """Returns statistics for each activation with a static range, with nothing in them.

        Args:
            params: what ``optimize`` returned, where the function is run with that.
        """
        found, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
        turned = {
            self._prefix + jax.tree_util.keystr(path)
            for path, leaf in found
            if isinstance(leaf, TransformedWeight)
        }
        ops = {record.op_id for record in self.ops if record.weight in turned}
        return {
            key_of(key, key.rpartition("#")[0] in ops): qn.Statistics(
                (1,) * one.ndim, symmetric=one.symmetric
            )
            for key, one in self.ranges.items()
        }

    @property
    def _prefix(self) -> str:
        return self._rules.params

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raises QuantizationError unless parameters are those that the plan is for."""
        arrays = {path for path, leaf in given.items() if path in self._leaves or is_array(leaf)}
        for path in sorted(self._leaves.keys() ^ arrays):
            where = "the plan has and the parameters have not" if path in self._leaves else (
                "the parameters have and the plan has not"
            )  # fmt: skip
            raise QuantizationError(
                f"The parameters are another tree than the plan's: {path} is one that {where}. "
                "Make the plan for these parameters."
            )
        for path, expected in self._leaves.items():
            leaf = given[path]
            about = f"{path}{self._because(path)}"
            if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape"):
                raise QuantizationError(
                    f"{about} is {leaf!r}, and only arrays can be quantized. Plan with abstract "
                    "parameters, quantize real ones."
                )
            if leaf.shape != expected.shape or leaf.dtype != expected.dtype:
                raise QuantizationError(
                    f"{about} is {short(leaf)}, but the plan was made for {short(expected)}. "
                    "Make the plan for these parameters."
                )

    def _because(self, path: str) -> str:
        weight = self.weights.get(path)
        return "" if weight is None else f" (rule {weight.rule})"


def _engine_name(engine: Engine) -> str:
    return "patch" if isinstance(engine, PatchEngine) else "trace"


def _ignore(record: OpRecord, problem: str | None) -> None:
    return None

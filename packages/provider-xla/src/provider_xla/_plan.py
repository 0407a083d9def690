"""Plan: what rules do to a program and its parameters, before anything is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from interception_core import Engine, PatchEngine

from ._errors import QuantizationError
from ._report import OpRecord, Report
from ._sites import Rules, Site, Sites, is_array, short
from ._static import StaticRange, Statistics, observe
from ._weights import WeightPlan, is_stored, prepack_leaf, quantize_leaf

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
    """

    ops: Report
    weights: Mapping[str, WeightPlan]
    problems: tuple[str, ...]
    ranges: Mapping[str, StaticRange]
    _rules: Rules = dataclasses.field(repr=False)
    _engine: Engine = dataclasses.field(repr=False)
    _argnum: int = dataclasses.field(repr=False)
    _leaves: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(repr=False)

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters as they are."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self._leaves.values())

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters when those of ``weights`` are quantized."""
        return self.bytes_before + sum(
            w.bytes_after - w.bytes_before for w in self.weights.values()
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        return {
            "ops": self.ops.as_json(),
            "weights": [weight.as_json() for weight in self.weights.values()],
            "problems": list(self.problems),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def __str__(self) -> str:
        table = self.ops.table({path: weight.bytes for path, weight in self.weights.items()})
        before, after = (f"{n / 2**20:.2f} MiB" for n in (self.bytes_before, self.bytes_after))
        lines = [table, f"{len(self.weights)} of {len(self._leaves)} parameters quantized: "
                 f"{before} -> {after}"]  # fmt: skip
        return "\n".join(lines)

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
        from tqdm import tqdm

        found, treedef = jax.tree_util.tree_flatten_with_path(params)
        given = {self._prefix + jax.tree_util.keystr(path): leaf for path, leaf in found}
        self._check(given)
        if donate:
            for path, weight in self.weights.items():
                weight.check_finite(given[path])
        leaves = []
        total = sum(getattr(leaf, "nbytes", 0) for leaf in given.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="quantizing", disable=None) as bar:
            for path, leaf in given.items():
                size = getattr(leaf, "nbytes", 0)
                if path in self.weights:
                    weight = self.weights[path]
                    stored = quantize_leaf(weight, leaf, check=not donate)
                    if donate and isinstance(leaf, jax.Array):
                        leaf.delete()
                    leaves.append(prepack_leaf(weight, stored) if prepack else stored)
                else:
                    leaves.append(leaf)
                bar.update(size)
        return jax.tree.unflatten(treedef, leaves)

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
        found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
        leaves = []
        for path, leaf in found:
            weight = self.weights.get(self._prefix + jax.tree_util.keystr(path))
            if weight is not None and isinstance(leaf, qn.QArray | qn.PackedQArray):
                leaf = prepack_leaf(weight, leaf)
            leaves.append(leaf)
        return jax.tree.unflatten(treedef, leaves)

    def apply(self, fn: Callable[P, R], statistics: Statistics | None = None) -> Callable[P, R]:
        """Returns ``fn`` for parameters that ``quantize`` returned.

        Put a ``jax.jit`` around it, or around what calls it: eagerly, each parameter is also
        dequantized at each call. Arguments: see ``PtqProvider.apply``.
        """
        from ._ptq import PtqProvider

        provider = PtqProvider(
            self._rules.rules, params_argnum=self._argnum, engine=_engine_name(self._engine)
        )
        return provider.apply(fn, statistics)

    def calibrate(
        self, fn: Callable[..., Any], params: Any, batches: Iterable[Sequence[Any]]
    ) -> Statistics:
        """Measures the static ranges of activations, in float, with a progress bar.

        Args:
            fn: the function that the plan is for.
            params: its parameters: arrays.
            batches: each the other arguments of a call, as a tuple.

        Returns:
            The mean range over the batches, by site: a pytree for ``apply``, to be saved with the
            parameters. The steps of a scan share one range.

        Raises:
            QuantizationError: no rule has ``act_static_scale``, or there is no batch.
        """
        from tqdm import tqdm

        if not self.ranges:
            raise QuantizationError(
                "There is nothing to calibrate: no rule that decides an operation has "
                "act_static_scale=True."
            )
        statistics = self.empty_statistics()

        def run(site: Site) -> Any:
            observe(statistics, site)
            return NotImplemented

        sites = Sites(self._rules, run, _ignore, keyed=False)
        tapped = jax.jit(self._engine.wrap(fn, sites.interceptor))
        count = 0
        for batch in tqdm(batches, desc="calibrating", unit="batch", disable=None):
            args = list(batch)
            args.insert(self._argnum, params)
            jax.block_until_ready(tapped(*args))
            count += 1
        if not count:
            raise QuantizationError("There is nothing to calibrate from: batches is empty.")
        return {key: one.calibration() for key, one in statistics.items()}

    def empty_statistics(self) -> dict[str, qn.Statistics]:
        """Returns statistics for each activation with a static range, with nothing in them."""
        return {
            key: qn.Statistics((1,) * one.ndim, symmetric=one.symmetric)
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

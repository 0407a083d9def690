"""PtqProvider: post-training quantization for inference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jax.extend import source_info_util

from interception_core import Interceptor, OpCall, get_engine, untapped

from ._ops import OPS, StaysFloat, TappedOp, check_tile, quantized_product
from ._paths import PathKeys
from ._report import OpRecord, Report
from ._rules import QuantizationRule

P = ParamSpec("P")
R = TypeVar("R")

# Operations have the source line of the program, not that of the provider.
source_info_util.register_exclusion(str(Path(__file__).parent))

INT8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")


class PtqProvider:
    """Runs matrix products and convolutions in integers, as rules say. JIT stays on.

    Both operands are quantized when the operation runs, with absmax scales: one per row of the
    activations and one per output channel of the weights. Two quantized operands are multiplied
    as int8 with int32 sums and rescaled in float32. Gradients are the float operation's
    (straight-through). Use one provider per model: the report is the provider's.

    Args:
        rules: the first rule that matches an operation decides; an operation without a match
            stays float, but the tapped operations that it consists of are looked at. Default:
            int8 for everything.
        params_argnum: index of the positional argument that holds the parameters: an operand
            that is a leaf of it is a weight.
        engine: the name of the engine that ``apply`` uses: "trace", which also finds weights
            behind transposes, casts, scans and in nested jitted functions, or "patch". The
            default is "trace" where hijax-trace is installed.

    Raises:
        TypeError: ``rules`` holds something else than rules.
    """

    disable_jit = False

    def __init__(
        self,
        rules: QuantizationRule | Iterable[QuantizationRule] = (INT8,),
        *,
        params_argnum: int = 0,
        engine: str | None = None,
    ):
        self.engine = engine
        self.rules = (rules,) if isinstance(rules, QuantizationRule) else tuple(rules)
        for rule in self.rules:
            if not isinstance(rule, QuantizationRule):
                raise TypeError(
                    f"PtqProvider takes QuantizationRules, got {rule!r}. Write for example "
                    "QuantizationRule(weight_qtype='int8', act_qtype='int8')."
                )
        self._params = f"args[{params_argnum}]"
        self._records: dict[tuple, OpRecord] = {}
        self._used: set[int] = set()
        self._rule = functools.lru_cache(maxsize=None)(self._find_rule)
        handlers: dict[str, Callable[..., Any]] = {
            target: functools.partial(self._handle, op) for target, op in OPS.items()
        }
        handlers["jax.experimental.pallas.pallas_call"] = _leave_kernel
        # What decides is the rule, so paths that no rule tells apart share JAX's traces.
        path_key = PathKeys(rule.module_path for rule in self.rules)
        self._interceptor = Interceptor(handlers, path_key=path_key)

    def interceptor(self) -> Interceptor:
        """Returns the interceptor, the same each time: what it traces is cached under it."""
        return self._interceptor

    def apply(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Returns ``fn`` with its operations quantized by the rules."""
        return get_engine(self.engine).wrap(fn, self.interceptor())

    def report(self) -> Report:
        """Returns every operation seen so far, with its rule or the reason why it stays float."""
        return Report(self._records.values())

    def get_unused_rules(self) -> list[QuantizationRule]:
        """Returns the rules that decided nothing so far: perhaps a misspelt path."""
        return [rule for i, rule in enumerate(self.rules) if i not in self._used]

    def _find_rule(self, op_name: str, module_path: str) -> int | None:
        matches = (i for i, r in enumerate(self.rules) if r.matches(op_name, module_path))
        return next(matches, None)

    def _handle(self, op: TappedOp, call: OpCall, *args: Any, **kwargs: Any) -> Any:
        # lax.dot_general consists of lax.dot alone: the same operation, asked a second time.
        if op.name in call.within:
            return NotImplemented
        index = self._rule(op.name, call.module_path)
        if index is not None:
            self._used.add(index)
        try:
            product, operands = op.read(args, kwargs)
        except StaysFloat as reason:
            self._record(op, call, args, index, reason=str(reason))
            return NotImplemented
        if index is None:
            self._record(op, call, operands, None, reason="no rule matches")
            return NotImplemented
        rule = self.rules[index]
        try:
            weights = [self._weight(call, operand) for operand in operands]
            qtypes = _qtypes(rule, weights)
            check_tile(product, operands, rule.tile_size)
        except StaysFloat as reason:
            self._record(op, call, operands, index, reason=str(reason))
            # The rule is about the whole operation: its parts are not looked at.
            return call.proceed(*args, **kwargs)
        self._record(op, call, operands, index, qtypes, weights)
        try:
            return quantized_product(product, qtypes, rule.tile_size, *operands)
        except (TypeError, ValueError):
            # A call that is wrong in itself gets the error that it always got.
            call.proceed(*args, **kwargs)
            raise

    def _weight(self, call: OpCall, operand: Any) -> str | None:
        """Returns the pytree path of the parameter that the operand is, if it is one."""
        path = call.operand(operand).provenance
        return path if path is not None and path.startswith(self._params) else None

    def _record(
        self,
        op: TappedOp,
        call: OpCall,
        operands: Sequence[Any],
        rule: int | None,
        qtypes: tuple[str | None, str | None] = (None, None),
        weights: Sequence[str | None] = (),
        reason: str | None = None,
    ) -> None:
        shapes = tuple(_short(operand) for operand in operands if hasattr(operand, "shape"))
        key = (call.op_id, shapes)
        if key not in self._records:
            weight = " and ".join(filter(None, weights)) or None
            self._records[key] = OpRecord(call.op_id, op.name, shapes, qtypes, rule, reason, weight)


def _leave_kernel(call: OpCall, *args: Any, **kwargs: Any) -> Any:
    """A Pallas kernel computes on blocks in memory that it manages: it stays as it was written."""
    return untapped(call.proceed(*args, **kwargs))


def _qtypes(rule: QuantizationRule, weights: Sequence[str | None]) -> tuple[str | None, str | None]:
    """Returns the qtype of both operands. Raises StaysFloat if both stay float."""
    lhs, rhs = (rule.act_qtype if weight is None else rule.weight_qtype for weight in weights)
    if lhs is None and rhs is None:
        if rule.weight_qtype is None:
            raise StaysFloat("the rule leaves it float")
        raise StaysFloat("the rule is for weights, and no operand is known as a parameter")
    return lhs, rhs


def _short(x: Any) -> str:
    return f"{_SHORT.get(x.dtype.name, x.dtype.name)}{list(x.shape)}".replace(" ", "")


_SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}

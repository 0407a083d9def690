"""Sites: find and read a program's operations that rules match."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import is_followed, scaled_inputs
from interception_core import Engine, Interceptor, OpCall, UnknownNameError
from quant_numerics import Contraction

from ..rules.rule import ANY_PATH, QuantizationRule
from .arrays import by_position, is_array
from .facts import IN_PARTS, Code, Fact
from .fused import FusedOp, fused_ops
from .matching import PathKeys, Rules, Weight, follows_values, remedies
from .ops import OPS, Readings, StaysFloat, TappedOp
from .record import Decided, OpRecord, choices, subject_of

P = ParamSpec("P")
R = TypeVar("R")

SIDES = ("lhs", "rhs")


@dataclass(frozen=True)
class Site:
    """One operation that a rule quantizes.

    Attributes:
        call: the call.
        contraction: what it computes.
        operands: of what.
        extras: its other arrays.
        rule: the rule that decides.
        index: the number of that rule.
        weights: the weight that each operand is; None for activations.
        hows: how each operand is quantized; None where it stays float.
        is_linear: whether JAX transposes the operation: no activation or gradient is quantized.
    """

    call: OpCall
    contraction: Contraction
    operands: tuple[Any, Any]
    extras: tuple[Any, ...]
    rule: QuantizationRule
    index: int
    weights: tuple[Weight | None, Weight | None]
    hows: tuple[qn.HowToQuantize | None, qn.HowToQuantize | None]
    is_linear: bool = False

    def key(self, side: int) -> str:
        """Return the key of an operand's statistics."""
        return f"{self.call.op_id}#{SIDES[side]}"

    def is_static(self, side: int) -> bool:
        """Return whether an operand has a static range."""
        activation = self.weights[side] is None and self.hows[side] is not None
        return activation and bool(self.rule.act_static_scale)


Record = Callable[[OpRecord, Fact | None], None]
"""Takes an operation's record, and why its rule can't be followed; None if it can."""


Leave = Callable[[OpCall, Contraction, tuple[Any, Any], tuple[Any, ...]], None]
"""Takes a contraction that stays float: the call, the contraction, its operands, other arrays."""

_WHOLE = ("conv_general_dilated", "dot_general", "ragged_dot_general")
"""Operations that call no other tapped operation."""


def ignore(record: OpRecord, problem: Fact | None) -> None:
    """Take an operation, and do nothing."""


def as_it_is(call: OpCall, *operands: Any, **params: Any) -> Any:
    """Leave an operation as it is: a lookup to the engine, which gathers stored rows."""
    return NotImplemented


class Sites:
    """A provider's handlers: find the rule, read the call, pass a Site on.

    Args:
        engine: the engine that will ask them.
        rules: the rules.
        run: called with a Site; returns the result of the operation, or NotImplemented to let
            it run as it is, with nothing in it tapped.
        record: called for every operation seen.
        refuse: called for those whose rule can't be followed, and may raise an error.
        lookup: the handler of gathers and of slices that begin at an index, which may be lookups
            of parameters. Only an engine that follows values has them with JIT on, and hands
            stored parameters to them.
        leave: called for each contraction that stays float, or None. An operation that calls
            another one, which is visited separately, doesn't count.
        remark: called with a call, and what is done with it that its rule does not say.
        keyed: whether operations in jitted functions share a trace if no rule tells apart their
            module paths and the parameters among their operands. False asks about each call. By
            default they do unless rules have static ranges, of which each call has its own.
        is_given: whether the program is given floats besides its parameters, so that arrays that
            it closes over are not data.
        is_pure: whether none of these functions does more than return a result or raise an
            error; see ``Interceptor``.
        decided: what the plan of the program decided, which must hold for its parameters here;
            None without a plan, or while one is made.

    Attributes:
        products: the rules that have quantized a product of activations, where a plan is applied.
    """

    def __init__(
        self,
        engine: Engine,
        rules: Rules,
        run: Callable[[Site], Any],
        record: Record = ignore,
        *,
        refuse: Record = ignore,
        lookup: Callable[..., Any] = as_it_is,
        leave: Leave | None = None,
        remark: Callable[[OpCall, Fact], None] = lambda call, done: None,
        keyed: bool | None = None,
        is_given: bool = False,
        is_pure: bool = False,
        decided: Decided | None = None,
    ):
        keyed = not rules.is_static if keyed is None else keyed
        self.engine = engine
        self._rules = rules
        self._is_given = is_given
        self._readings = Readings()
        self._leave = leave
        self._remark = remark
        self._run = run
        self._record = record
        self._refuse = refuse
        self._decided = decided
        self.products: set[int] = set()
        self._surveys = not keyed
        # Whether it matters if an activation has the elements of a parameter.
        self._tells_weights = self._surveys or any(rule.leaves_activations for rule in rules.rules)
        handlers: dict[str, Callable[..., Any]] = {
            target: functools.partial(self._handle, op) for target, op in OPS.items()
        }
        if follows_values(engine):  # in all sites: the same targets share JAX's traces
            handlers["primitive:custom_linear_solve"] = self._leave_solver
            for name in _pallas_primitives():
                handlers[f"primitive:{name}"] = functools.partial(self._note_reader, Code.PALLAS)
            handlers["hijax_trace.carried_stacks"] = as_it_is  # XLA would copy caches
            handlers["hijax_trace.opaque_call"] = functools.partial(self._note_reader, Code.OPAQUE)
            handlers["primitive:gather"] = lookup
            if rules.looks_up:  # JAX writes ``table[i]`` of a scalar as a slice
                handlers["primitive:dynamic_slice"] = lookup
        # By the last part of the target, which is what `call.within` of operations inside has.
        self._fused: dict[str, str] = {}
        if any(rule.kernel is not None for rule in rules.rules):
            for target, (fused, function) in fused_ops().items():
                handlers[target] = functools.partial(self._fuse, fused, function)
                self._fused[target.rpartition(".")[2]] = fused.name
            self._fused.pop("__call__", None)  # of many classes
        keys: dict[str, Any] = {"is_pure": is_pure}
        if keyed:
            # Rules decide, so paths that no rule tells apart can share JAX's traces.
            told = [rule.module_path for rule in rules.rules if rule.module_path != ANY_PATH]
            keys["path_key"] = PathKeys(told) if told else lambda path: None
            keys["origin_key"] = rules.origin_key
            if decided is not None:
                keys["origin_key"] = _origin_keys(rules, decided)
        self.interceptor = Interceptor(handlers, **keys)

    def tap(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return a function whose operations are asked about."""
        return by_position(self.engine.wrap(fn, self.interceptor), fn, self._rules.argnum)

    def _handle(self, op: TappedOp, call: OpCall, *args: Any, **kwargs: Any) -> Any:
        # lax.dot_general consists of lax.dot alone: the same operation, asked a second time.
        if op.name in call.within:
            return NotImplemented
        if self._is_fused_around(call):
            return call.proceed(*args, **kwargs)
        # To rules, the parts of an einsum of several operands are einsums.
        names = (op.name, "einsum") if "einsum" in call.within else (op.name,)
        reading, unread, decisions = None, None, {}
        try:
            reading, decisions = self._readings.read(op, args, kwargs)
        except StaysFloat as error:
            unread = error.why
        if reading is None:
            values = [value for value in (*args, *kwargs.values()) if is_array(value)]
        else:
            values = reading.operands
        among = self._rules.weights(call, values)
        paths, has_weight = self._rules.paths(among), any(among.found)
        scaled, made, unfollowed, is_one = {}, (), False, has_weight
        if reading is not None and not has_weight and self._tells_weights:
            expressions = [one for x in values if (one := call.expression(x)) is not None]
            scaled = self._scaled(expressions)
            if self._is_given and not scaled:
                found = [one.judged(self._rules.is_parameter) for one in expressions]
                made = tuple(sorted({path for one in found for path in one.paths}))
            unfollowed = not all(map(is_followed, expressions))
            # A weight that can't be stored is one nevertheless, but a state, as a cache, is not.
            is_one = unfollowed or not all(scaled.values())
            # What a program closes over, such as a model's parameters, may be a weight.
            is_unknown = not expressions or any(one.inputs == 0 for one in expressions)
            is_one = True if is_one else None if is_unknown else False
        asked = names, call.module_path, paths
        index = self._rules.find(*asked, is_one)
        rule = None if index is None else self._rules.rules[index]
        if reading is None:
            assert unread is not None
            in_parts = unread.code in IN_PARTS
            # Scaling is never a problem, other operands only if a parameter stays float by them.
            is_common = unread.code in (Code.NO_ARRAY, Code.NO_FLOAT)
            wrong = rule is not None and not in_parts and rule.is_acting
            wrong = wrong and unread.code is not Code.SCALAR and (has_weight or not is_common)
            # If the parts are visited, it is they that use the parameters.
            used = () if in_parts else among.paths
            self._note(op, call, args, index, unread, used, problem=unread if wrong else None)
            if wrong and has_weight:
                self._check(call, used, index, why=unread)
            return NotImplemented
        contraction, operands, extras = reading
        if rule is None or index is None:
            # The rule that would match if an operand were a weight.
            index = self._rules.find(*asked)
            if index is None:
                why = Code.NO_RULE()
            else:
                why = unstorable(scaled) if scaled else Code.NO_WEIGHT()
                if made and self._rules.rules[index].weight_qtype is not None:
                    why = Code.MADE_AT_CALLS(paths=made)
            # What consists of others is left whole where rules say the same about its parts.
            is_left = index is not None and not self._rules.names_operations
            is_whole = is_left or op.name in _WHOLE
            index = index if is_whole else None
            problem = why if why.code is Code.MADE_AT_CALLS and is_whole else None
            paths = (*among.paths, *scaled, *made)
            self._note(op, call, operands, index, why, paths, problem=problem)
            # If no rule names operations, none matches a part of this one either.
            if is_whole or not self._rules.names_operations:
                self._check(call, among.paths, index, why=why)
            if self._leave is not None and is_whole:
                self._leave(call, contraction, operands, extras)
            return call.proceed(*args, **kwargs) if is_left else NotImplemented
        weights = among.found
        if among.is_part:
            self._note(op, call, operands, index, Code.COMPUTES_WEIGHT(), among.paths)
            return call.proceed(*args, **kwargs)
        sides = tuple(weight is not None for weight in weights)
        if (index, sides) not in decisions:
            decisions[index, sides] = self._rules.decide(index, contraction, operands, sides)
        hows, remarks, why, wrong = decisions[index, sides]
        is_linear = any(map(call.is_linear, operands))
        if is_linear and why is None:
            pairs = zip(hows, sides, strict=True)
            floats = tuple(how if is_weight else None for how, is_weight in pairs)
            if not any(floats) and not (rule.adapts and any(sides)):
                why = Code.LINEAR()
            elif floats != hows:
                remarks = (*remarks, Code.LINEAR())
            hows = floats
        for remark in remarks:
            self._remark(call, remark)
        is_lost = (scaled or made or unfollowed) and not has_weight
        if self._surveys and is_lost and rule.weight_qtype is not None:
            lost = unstorable(scaled) if scaled else Code.UNFOLLOWED()
            lost = Code.MADE_AT_CALLS(paths=made) if made and not scaled else lost
            why = why if any(hows) else lost
            paths = (*scaled, *made)
            self._note(op, call, operands, index, why, paths, hows, problem_of(lost))
        if why is not None:
            problem = why if wrong else None
            if wrong and any(sides) and rule.weight_qtype is not None:
                sizes = contraction.tiled_sizes([operand.shape for operand in operands], hows)
                problem = Code.UNFIT(why=why, others=remedies(sizes, hows))
            self._note(op, call, operands, index, why, among.paths, problem=problem)
            self._check(call, among.paths, index, why=why, is_linear=is_linear)
            if self._leave is not None:
                self._leave(call, contraction, operands, extras)
            # The rule is about the whole operation: its parts are not looked at.
            return call.proceed(*args, **kwargs)
        ndims = operands[0].ndim, operands[1].ndim
        self._note(
            op,
            call,
            operands,
            index,
            None,
            among.paths,
            hows,
            beside=among.beside,
            subject=subject_of(contraction, ndims),
        )
        self._check(call, among.paths, index, hows, is_linear=is_linear)
        if self._decided is not None and not any(sides):
            self.products.add(index)
        site = Site(call, contraction, operands, extras, rule, index, weights, hows, is_linear)  # type: ignore[arg-type]
        if self._decided is not None and any(map(site.is_static, (0, 1))):
            self._decided.check_range(site.call, contraction, ndims, among.paths)
        try:
            result = self._run(site)
        except (TypeError, ValueError):
            # A call that is wrong in itself gets the error that it always got.
            call.proceed(*args, **kwargs)
            raise
        if result is not NotImplemented:
            return result
        result = call.proceed(*args, **kwargs)
        # In the quantized program this result is a new array, and not a weight, whatever it is
        # computed from. The copy makes it one for the survey, too.
        return jax.tree.map(jnp.copy, result) if self._surveys else result

    def _fuse(
        self, op: FusedOp, function: Callable[..., Any], call: OpCall, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute a function by a kernel's op, where its rule asks for it."""
        if op.leaves is not None and op.leaves(kwargs, self._are_weights(call, args)):
            return NotImplemented
        index = self._rules.find((op.name,), call.module_path)
        if index is None or self._is_fused_around(call):
            return NotImplemented
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
        record = record_of(call, op.name, arrays, index)
        if arrays and all(self._are_weights(call, arrays)):
            # It is computed once and stored.
            self._tell(dataclasses.replace(record, why=Code.COMPUTES_WEIGHT()))
            return NotImplemented
        if self._rules.rules[index].kernel is None:
            self._tell(dataclasses.replace(record, why=Code.LEFT_TO_XLA()))
            return NotImplemented
        try:
            name, arrays, run, kernels = op.read(function, args, kwargs)
        except (StaysFloat, UnknownNameError) as error:
            why = Code.READ(text=str(error))
            problem = None if op.is_written else why
            self._tell(dataclasses.replace(record, why=why), problem)
            return NotImplemented
        if op.placed is not None:
            kernels = op.placed(call, name, arrays, kernels)
        shown = tuple(map(short, arrays))
        found = choices(name, arrays)
        self._tell(dataclasses.replace(record, operands=shown, kernels=found))
        try:
            return run(kernels)
        except (TypeError, ValueError):
            # A call that is wrong in itself gets the error that it always got.
            call.proceed(*args, **kwargs)
            raise

    def _are_weights(self, call: OpCall, values: Sequence[Any]) -> list[bool]:
        kinds = (call.kind(value, self._rules.is_parameter) for value in values)
        return [kind is not None and kind.kind in ("view", "derived") for kind in kinds]

    def _leave_solver(self, call: OpCall, *operands: Any, **params: Any) -> Any:
        """Leave a solver as it is if it computes a weight.

        Else its products would be quantized at each call, and their result would be no weight.
        """
        kinds = [call.kind(x, self._rules.is_parameter) for x in operands]
        if any(
            one is None or one.kind == "activation" or (one.is_dynamic and one.is_known)
            for one in kinds
        ):
            return NotImplemented
        paths = tuple(sorted({path for one in kinds if one is not None for path in one.paths}))
        if not paths:
            return NotImplemented
        index = self._rules.find((call.op_name,), call.module_path, self._rules.below(paths))
        why = Code.COMPUTES_WEIGHT()
        self._tell(record_of(call, call.op_name, operands, index, why, paths))
        return call.proceed(*operands, **params)

    def _note_reader(self, why: Code, call: OpCall, *operands: Any, **params: Any) -> Any:
        """Record which parameters a primitive reads as arrays."""
        if not self._surveys:
            return NotImplemented
        arrays = [x for x in operands if is_array(x)]
        found = [self._rules.weights(call, (x,)).found[0] for x in arrays]
        paths = tuple(path for weight in found if weight is not None for path in weight.paths)
        index = None
        if paths and why is Code.OPAQUE:
            asked = (call.op_name,), call.module_path, self._rules.below(paths)
            index = self._rules.find(*asked, True)
        is_problem = index is not None and self._rules.rules[index].weight_qtype is not None
        record = record_of(call, call.op_name, arrays, index, why(), paths)
        self._tell(record, why() if is_problem else None)
        return NotImplemented

    def _scaled(self, expressions: Sequence[Any]) -> dict[str, bool]:
        """Return what ``scaled_inputs`` does, for all operands."""
        found = [
            scaled_inputs(one, self._rules.is_parameter, [*expressions[:i], *expressions[i + 1 :]])
            for i, one in enumerate(expressions)
        ]
        return {path: is_written for paths in found for path, is_written in paths.items()}

    def _is_fused_around(self, call: OpCall) -> bool:
        """Return whether a rule matches a function around this operation.

        Then its parts are not looked at, fused or not.
        """
        if not self._fused:
            return False
        names = [self._fused[name] for name in call.within if name in self._fused]
        rules = [self._rules.find((name,), call.module_path) for name in names]
        return any(i is not None and self._rules.rules[i].kernel is not None for i in rules)

    def _note(
        self,
        op: TappedOp,
        call: OpCall,
        operands: Sequence[Any],
        index: int | None,
        why: Fact | None,
        paths: tuple[str, ...],
        hows: Sequence[qn.HowToQuantize | None] = (None, None),
        problem: Fact | None = None,
        **more: Any,
    ) -> None:
        # Ids are not read without need: see `decided`.
        if self._record is not ignore or (self._refuse is not ignore and problem is not None):
            record = record_of(call, op.name, operands, index, why, paths, hows)
            self._tell(dataclasses.replace(record, **more), problem)

    def _tell(self, record: OpRecord, problem: Fact | None = None) -> None:
        self._record(record, problem)
        if problem is not None:
            self._refuse(record, problem)

    def _check(
        self,
        call: OpCall,
        paths: Sequence[str],
        index: int | None,
        hows: Sequence[qn.HowToQuantize | None] = (None, None),
        why: Fact | None = None,
        is_linear: bool = False,
    ) -> None:
        """Hold an operation against the plan that is applied."""
        if self._decided is not None:
            self._decided.check(call, paths, index, hows, why, is_linear)


def _origin_keys(rules: Rules, decided: Decided) -> Callable[[str], Hashable]:
    """Return a function from an input's path to a key: whether rules or the plan tell it apart.

    Equal keys are one object. They are compared for each operation of each trace, and else that
    would go through all fields of rules.
    """
    own: dict[Hashable, Hashable] = {}

    def key(path: str) -> Hashable:
        found = rules.origin_key(path), decided.key(path)
        return own.setdefault(found, found)

    return functools.lru_cache(maxsize=None)(key)


def _pallas_primitives() -> tuple[str, str]:
    """Return the primitives of ``pallas_call`` and of ``kernel``, which exist from now on."""
    import jax.experimental.pallas  # noqa: F401  # it makes them

    return "pallas_call", "mpmd_map"


def record_of(
    call: OpCall,
    op_name: str,
    operands: Sequence[Any],
    index: int | None,
    why: Fact | None = None,
    paths: tuple[str, ...] = (),
    hows: Sequence[qn.HowToQuantize | None] = (None, None),
) -> OpRecord:
    """Return the record of a call, of which ``operands`` that are arrays are shown."""
    shown = tuple(short(x) for x in operands if is_array(x))
    lhs, rhs = (None if how is None else how.qtype for how in hows)
    path = call.module_path
    return OpRecord(call.op_id, op_name, shown, (lhs, rhs), index, why, paths, module_path=path)


def unstorable(paths: Mapping[str, bool]) -> Fact:
    """Return why parameters that ``scaled_inputs`` names stay float."""
    return (Code.STATE if all(paths.values()) else Code.SCALED)(paths=paths)


def problem_of(why: Fact) -> Fact | None:
    """Return the problem with parameters that can't be stored: a state, as a cache, is none."""
    return None if why.code is Code.STATE else why


def short(x: Any) -> str:
    """Return dtype and shape as ``f32[8,64]``."""
    return f"{_SHORT.get(x.dtype.name, x.dtype.name)}{list(x.shape)}".replace(" ", "")


_SHORT: Mapping[str, str] = {"float32": "f32", "float64": "f64", "float16": "f16"} | {
    "bfloat16": "bf16"
}

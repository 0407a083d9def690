"""Holders: primitives that hold programs, such as calls, loops and branches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .. import compat

SAME, SLICE, CHANGES = "same", "slice", "changes"
"""The kinds of a body's inputs; see ``Body.kinds``."""


@dataclass(frozen=True, slots=True)
class Body:
    """One program that a primitive holds.

    Attributes:
        jaxpr: open or closed.
        inputs: for each input, the number of the equation's operand that it is, or None.
        kinds: for each input, how it is the operand: SAME; SLICE, one step along axis 0; CHANGES,
            in a loop's first step alone.
        carry: the inputs that a loop carries from step to step.
        label: its name in op ids; "" if its operations count as the caller's.
        length: how many steps it is run for: 0 if it is not the body of a loop, None if only a run
            can tell.
        linear: the inputs in which it must be linear whatever the operands are.
        step: the program that computes the next carry; None if it does itself.
    """

    jaxpr: Any
    inputs: tuple[int | None, ...]
    kinds: tuple[str, ...]
    carry: range = range(0)
    label: str = ""
    length: int | None = 0
    linear: frozenset[int] = frozenset()
    step: Body | None = None

    def stepped(self, index: int) -> tuple[Body, int]:
        """Return the program that computes the next carry, and its input for a carried one."""
        if self.step is None:
            return self, index
        return self.step, index - self.carry.start + self.step.carry.start

    def unchanged(self) -> dict[int, int]:
        """Return the results that a loop's steps do not change, each with its operand."""
        carry = ((i, k) for i, k in enumerate(self.carry) if self.kinds[k] == SAME)
        return {i: k for i, at in carry if (k := self.inputs[at]) is not None}


@dataclass(frozen=True, slots=True)
class Holder:
    """How a primitive holds programs.

    Attributes:
        bodies: ``bodies(params, operand_count)`` returns its programs.
        rebuild: ``rebuild(params, jaxprs, extra)`` returns its parameters with other programs, the
            ``i``th of which takes ``extra[i]`` more leading inputs.
        places: ``places(params)`` returns, for each program, where the operands for those inputs
            are inserted; -1 if the primitive can't take more operands.
        results: which results are known from its programs: "same", all; "branches", those on which
            all programs agree; "carry", the carry that the loop does not change; "none". See
            ``told_by``.
        hoists: whether its programs can't have constants, only operands.
        more_steps: ``more_steps(params, count)`` returns its parameters with ``count`` more
            trailing operands that a loop steps along.
        context: ``context(params)`` returns the context manager to trace its programs in.
        constant: the bodies whose operands JAX never differentiates, by number.
    """

    bodies: Callable[[dict[str, Any], int], list[Body]]
    rebuild: Callable[[dict[str, Any], list[Any], list[int]], dict[str, Any]]
    places: Callable[[dict[str, Any]], list[int]] = lambda params: [0]
    results: str = "same"
    hoists: bool = False
    more_steps: Callable[[dict[str, Any], int], dict[str, Any]] = lambda params, count: params
    context: Callable[[dict[str, Any]], contextlib.AbstractContextManager] = lambda params: (
        contextlib.nullcontext()
    )
    constant: frozenset[int] = frozenset()


def _all_same(jaxpr: Any, first: int, label: str = "") -> Body:
    count = len(compat.open_of(jaxpr).invars)
    return Body(jaxpr, tuple(range(first, first + count)), (SAME,) * count, label=label)


def _carried(jaxpr: Any, consts: int, carry: int) -> tuple[str, ...]:
    """Return the kinds of a loop's carry: SAME if unchanged."""
    jaxpr = compat.open_of(jaxpr)
    return tuple(
        SAME if jaxpr.outvars[i] is jaxpr.invars[consts + i] else CHANGES for i in range(carry)
    )


def is_counter(body: Body, place: int) -> bool:
    """Return whether a loop's step adds a constant to the carry of an input, and no more."""
    if place not in body.carry:
        return False
    step, number = body.stepped(place)
    jaxpr = compat.open_of(step.jaxpr)
    before, after = jaxpr.invars[number], jaxpr.outvars[number - step.carry.start]
    made = next((eqn for eqn in reversed(jaxpr.eqns) if after in eqn.outvars), None)
    if made is None or made.primitive.name != "add":
        return False
    others = [atom for atom in made.invars if atom is not before]
    return len(others) == 1 and type(others[0]) is compat.Literal


def _jit_rebuild(params: dict[str, Any], jaxprs: list[Any], extra: list[int]) -> dict[str, Any]:
    (more,) = extra
    unspecified = compat.UNSPECIFIED
    return {
        **params,
        "jaxpr": jaxprs[0],
        "in_shardings": (unspecified,) * more + tuple(params["in_shardings"]),
        "in_layouts": (None,) * more + tuple(params["in_layouts"]),
        "donated_invars": (False,) * more + tuple(params["donated_invars"]),
    }


def _scan_bodies(params: dict[str, Any], operands: int) -> list[Body]:
    jaxpr = params["jaxpr"]
    consts, carry = compat.scan_parts(params)
    stepped = consts + carry
    kinds = (SAME,) * consts + _carried(jaxpr, consts, carry) + (SLICE,) * (operands - stepped)
    carried = range(consts, stepped)
    label, length = compat.label(jaxpr), params["length"]
    return [Body(jaxpr, tuple(range(operands)), kinds, carried, label, length)]


def _while_bodies(params: dict[str, Any], operands: int) -> list[Body]:
    cond, body = params["cond_nconsts"], params["body_nconsts"]
    carry = range(cond + body, operands)
    kinds = _carried(params["body_jaxpr"], body, len(carry))

    def part(name: str, consts: range) -> Body:
        jaxpr, count = params[name], len(consts)
        inputs, carried = (*consts, *carry), range(count, count + len(carry))
        return Body(jaxpr, inputs, (SAME,) * count + kinds, carried, compat.label(jaxpr), None)

    step = part("body_jaxpr", range(cond, cond + body))
    return [dataclasses.replace(part("cond_jaxpr", range(cond)), step=step), step]


def _while_rebuild(params: dict[str, Any], jaxprs: list[Any], extra: list[int]) -> dict[str, Any]:
    return {
        "cond_nconsts": params["cond_nconsts"] + extra[0],
        "cond_jaxpr": jaxprs[0],
        "body_nconsts": params["body_nconsts"] + extra[1],
        "body_jaxpr": jaxprs[1],
    }


def _solve_bodies(params: dict[str, Any], operands: int) -> list[Body]:
    """Return the programs of a linear solve: functions of their constants and a vector."""
    found, first = [], 0
    for consts, jaxpr in zip(params["const_lengths"], params["jaxprs"], strict=True):
        if jaxpr is not None:
            vector = range(consts, len(compat.open_of(jaxpr).invars))
            # Each is called with vectors that no operand of the equation is.
            inputs = (*range(first, first + consts), *[None] * len(vector))
            kinds, label = (SAME,) * len(inputs), compat.label(jaxpr)
            found.append(Body(jaxpr, inputs, kinds, label=label, linear=frozenset(vector)))
        first += consts
    return found


def _solve_places(params: dict[str, Any]) -> list[int]:
    lengths = params["const_lengths"]
    starts = itertools.accumulate(lengths, initial=0)
    return [start for start, jaxpr in zip(starts, params["jaxprs"], strict=False) if jaxpr]


def _solve_rebuild(params: dict[str, Any], jaxprs: list[Any], extra: list[int]) -> dict[str, Any]:
    lengths, old = params["const_lengths"], params["jaxprs"]
    given = iter(zip(jaxprs, extra, strict=True))
    made = [(None, 0) if jaxpr is None else next(given) for jaxpr in old]
    counts = [count + more for count, (_, more) in zip(lengths, made, strict=True)]
    new = type(old)(*(jaxpr for jaxpr, _ in made))
    return {**params, "const_lengths": type(lengths)(*counts), "jaxprs": new}


def _linear_call_bodies(params: dict[str, Any], operands: int) -> list[Body]:
    body = _all_same(params["callee"], 0)
    linear = range(params["num_callee_consts"] + params["num_res"], operands)
    return [dataclasses.replace(body, linear=frozenset(linear))]


def _custom_vmap_rebuild(
    params: dict[str, Any], jaxprs: list[Any], extra: list[int]
) -> dict[str, Any]:
    (more,) = extra
    if not more:
        return {**params, "call": jaxprs[0]}
    in_tree, rule = compat.rule_after(params["in_tree"], params["rule"], more)
    return {**params, "call": jaxprs[0], "in_tree": in_tree, "rule": rule}


HOLDERS: dict[Any, Holder] = {
    compat.jit_p: Holder(lambda params, n: [_all_same(params["jaxpr"], 0)], _jit_rebuild),
    compat.scan_p: Holder(
        _scan_bodies,
        lambda params, jaxprs, extra: {
            **compat.more_scan_consts(params, extra[0]),
            "jaxpr": jaxprs[0],
        },
        results="carry",
        more_steps=compat.more_scan_steps,
    ),
    compat.while_p: Holder(
        _while_bodies, _while_rebuild, lambda params: [0, params["cond_nconsts"]], "carry"
    ),
    # Branches share their operands: ``entering.share`` gives each the new operands of all.
    compat.cond_p: Holder(
        lambda params, n: [_all_same(one, 1, compat.label(one)) for one in params["branches"]],
        lambda params, jaxprs, extra: {**params, "branches": tuple(jaxprs)},
        lambda params: [1] * len(params["branches"]),
        "branches",
    ),
    compat.shard_map_p: Holder(
        lambda params, n: [_all_same(params["jaxpr"], 0)],
        lambda params, jaxprs, extra: {
            **params,
            "jaxpr": jaxprs[0],
            "in_specs": (PartitionSpec(),) * extra[0] + tuple(params["in_specs"]),
        },
        hoists=True,
        context=compat.in_shard_map,
    ),
    # The derivative of a linear solve is made of that of ``matvec``, the first.
    compat.linear_solve_p: Holder(
        _solve_bodies, _solve_rebuild, _solve_places, "none", constant=frozenset([1, 2, 3])
    ),
    # The rule that transposes it stays, as the backward rule of a ``custom_vjp`` does.
    compat.linear_call_p: Holder(
        _linear_call_bodies,
        lambda params, jaxprs, extra: {
            **params,
            "callee": jaxprs[0],
            "num_callee_consts": params["num_callee_consts"] + extra[0],
        },
    ),
    compat.custom_vmap_p: Holder(
        lambda params, n: [_all_same(params["call"], 0)], _custom_vmap_rebuild
    ),
}

_DEFERRED = Holder(
    lambda params, n: [_all_same(params["function"].jaxpr, 0)],
    # Only of what a handler made: ``deriving`` makes the others.
    lambda params, jaxprs, extra: {"function": params["function"].again(jaxprs[0])},
    lambda params: [-1],
)

CUSTOM_CALLS = frozenset([compat.custom_jvp_call_p, compat.custom_vjp_call_p])


def custom_body(primitive: Any, params: dict[str, Any], operands: int) -> Body | None:
    """Return the function of a call with custom derivative rules; None for other equations.

    It is not a ``Holder``, because its rules belong to the program as well; see ``custom``.
    """
    if primitive in CUSTOM_CALLS:
        return _body_of((params["call_jaxpr"], tuple(range(operands))))
    if primitive is compat.call_hi_primitive_p and compat.is_custom_prim(params["_prim"]):
        return _body_of(compat.prim_program(params["_prim"]))
    return None


def _body_of(held: tuple[Any, tuple[int, ...]] | None) -> Body:
    """Return a program whose inputs are operands of these numbers."""
    assert held is not None
    jaxpr, inputs = held
    return Body(jaxpr, inputs, (SAME,) * len(inputs))


_PRIM = Holder(
    lambda params, n: [_body_of(compat.prim_program(params["_prim"]))],
    lambda params, jaxprs, extra: {
        "_prim": compat.prim_with_program(params["_prim"], jaxprs[0], extra[0])
    },
    hoists=True,
)
"""Of the HiPrims that JAX makes of ``jax.checkpoint``."""

_KERNELS = frozenset(
    {
        "pallas_call",
        "mpmd_map",
        "core_map",
        "custom_partitioning",
        "reduce",
        "reduce_and",
        "reduce_or",
        "reduce_window",
        "select_and_scatter",
        "sort",
        "call_hi_primitive_linearized",
    }
)
"""Primitives whose jaxprs tell how they are computed, and are not a part of the program."""


_TAKE_MORE = frozenset({"remat2", "checkpoint", "closed_call", "core_call", "eval_jaxpr"})
"""Primitives that need no other parameters for more leading operands of their body."""

Slot = tuple[str, int | None]
"""A parameter, and the place in it where it is a tuple."""


def _slots(params: dict[str, Any]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for name, value in params.items():
        if isinstance(value, compat.JAXPRS):
            slots.append((name, None))
        elif isinstance(value, tuple):
            slots += [(name, i) for i, part in enumerate(value) if isinstance(part, compat.JAXPRS)]
    return tuple(slots)


def _generic(slots: tuple[Slot, ...], takes_more: bool) -> Holder:
    """Return the holder of an unknown primitive with jaxprs in these parameters.

    It has no bodies unless it calls one program with its operands. Others are held for purposes
    that nobody knows: a library's solver evaluates, differentiates and transposes its operator.
    """

    def bodies(params: dict[str, Any], operands: int) -> list[Body]:
        (name, place), *others = slots
        jaxpr = params[name] if place is None else params[name][place]
        is_call = not others and len(compat.open_of(jaxpr).invars) == operands
        return [Body(jaxpr, tuple(range(operands)), (SAME,) * operands)] if is_call else []

    def rebuild(params: dict[str, Any], jaxprs: list[Any], extra: list[int]) -> dict[str, Any]:
        params = dict(params)
        if "prevent_cse" in params:
            params["prevent_cse"] = compat.more_flags(params["prevent_cse"], extra[0])
        for (name, place), jaxpr in zip(slots, jaxprs, strict=True):
            if place is None:
                params[name] = jaxpr
            else:
                parts = list(params[name])
                parts[place] = jaxpr
                whole = type(params[name])
                params[name] = whole(*parts) if hasattr(whole, "_fields") else whole(parts)
        return params

    places = [0 if takes_more else -1] * len(slots)
    return Holder(bodies, rebuild, lambda params: places, hoists=takes_more)


def holder_of(primitive: Any, params: dict[str, Any]) -> Holder | None:
    """Return the holder of an equation, or None if there is none."""
    holder = HOLDERS.get(primitive)
    if holder is not None:
        return holder
    if primitive is compat.deferred_p:
        # Programs and maps of programs are parts of the program, their derivatives are not.
        return None if params["function"].jaxpr is None else _DEFERRED
    if primitive is compat.call_hi_primitive_p:
        prim = params["_prim"]
        held = None if compat.is_custom_prim(prim) else compat.prim_program(prim)
        return None if held is None else _PRIM
    if primitive in CUSTOM_CALLS or primitive.name in _KERNELS or "scatter" in primitive.name:
        return None
    slots = _slots(params)
    return _generic(slots, primitive.name in _TAKE_MORE) if slots else None


def programs_in(eqn: Any) -> list[Any]:
    """Return the jaxprs of an equation of a primitive in ``HOLDERS``, staged or being staged."""
    bodies = HOLDERS[eqn.primitive].bodies(eqn.params, compat.operand_count(eqn))
    return [body.jaxpr for body in bodies]


def told_by(eqn: Any) -> tuple[Sequence[Body], str] | None:
    """Return the programs that tell an equation's results, and how: see ``Holder.results``.

    None if no program tells them.
    """
    custom = custom_body(eqn.primitive, eqn.params, len(eqn.invars))
    if custom is not None:
        return [custom], "same"
    holder = holder_of(eqn.primitive, eqn.params)
    if holder is None or holder.results == "none":
        return None
    bodies, count = holder.bodies(eqn.params, len(eqn.invars)), len(eqn.outvars)
    if holder.results == "carry":
        # The last body makes the step. The condition of a while loop comes before it.
        return bodies[-1:], holder.results
    # A primitive that nobody knows may hold a program for another purpose.
    tells = bodies and all(len(compat.open_of(body.jaxpr).outvars) == count for body in bodies)
    return (bodies, holder.results) if tells else None


class Called(NamedTuple):
    """The program of a function's call.

    Attributes:
        jaxpr: the program, a ``jax.extend.core.Jaxpr``. Its ``outvars`` are the call's results.
        inputs: its input variables: first those of constants, then those of the call's operands.
        consts: the values of the constants.
    """

    jaxpr: Any
    inputs: Sequence[Any]
    consts: Sequence[Any]


def called(eqn: Any) -> Called | None:
    """Return the program of a function that an equation calls.

    Such functions are jitted ones, and those with custom derivative rules. With TraceEngine, they
    are also those that the program maps by ``vmap``.

    Args:
        eqn: an equation, a ``jax.extend.core.JaxprEqn``.

    Returns:
        The program; None for loops, branches and other equations, and for a call that the program
        differentiates: its derivative shares what is made of the call.
    """
    is_derived = (
        eqn.primitive is compat.deferred_p and eqn.params["function"].program.is_differentiated
    )
    jaxpr = None if is_derived else called_program(eqn)
    if jaxpr is None:
        return None
    opened = compat.open_of(jaxpr)
    return Called(opened, compat.inputs_of(opened), compat.consts_of(jaxpr))


def called_program(eqn: Any) -> Any:
    """Return the closed jaxpr of a function that an equation calls, as ``called`` does.

    Of a call that the program differentiates, too.
    """
    if eqn.primitive is compat.jit_p:
        return eqn.params["jaxpr"]
    if eqn.primitive is compat.deferred_p:
        return eqn.params["function"].jaxpr
    body = custom_body(eqn.primitive, eqn.params, len(eqn.invars))
    return None if body is None else body.jaxpr


def holds_programs(eqn: Any) -> bool:
    """Return whether an equation is a call, a loop, a branch or another holder of programs.

    A kernel does not count, nor does what combines two elements in a scatter.

    Args:
        eqn: an equation, a ``jax.extend.core.JaxprEqn``.
    """
    if not compat.holds_jaxprs(eqn):
        return False
    held = holder_of(eqn.primitive, eqn.params)
    return held is not None or custom_body(eqn.primitive, eqn.params, len(eqn.invars)) is not None


def opaque_call(*values: Any, **params: Any) -> Any:
    """Stand for primitives that hold programs of which nobody knows the purpose.

    Programs do not call it. TraceEngine asks a handler of this function about primitives of
    libraries that hold programs, unless they call one program with the operands. What
    they hold is not tapped.

    Args:
        values: the operands.
        params: the primitive's parameters.
    """
    raise TypeError("opaque_call stands for primitives of libraries, and can't be called.")


def is_opaque(primitive: Any, params: dict[str, Any], operands: int) -> bool:
    """Return whether a primitive holds programs of which nobody knows the purpose."""
    holder = holder_of(primitive, params)
    return holder is not None and not holder.bodies(params, operands)

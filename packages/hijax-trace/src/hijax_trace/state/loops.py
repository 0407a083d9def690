"""Loops, branches and ``shard_map`` that carry array proxies.

They are made by JAX's functions, which accept a proxy as a carry because it is a pytree. A carried
proxy must have the same form in all steps. Otherwise the loop carries the array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from .. import compat
from ..dataflow.holders import HOLDERS, programs_in
from ..proxy.array_proxy import Lost, form_of, is_proxy
from .restage import as_array

Run = Callable[[Any, Sequence[Any]], list[Any]]
"""Runs an open jaxpr on values, proxies among them."""


def types_of(fn: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, with types instead of arrays."""
    return jax.eval_shape(lambda args: fn(*args), args)


def _function(run: Run, closed: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a jaxpr as a function of a list of values."""
    jaxpr, consts = compat.open_of(closed), compat.consts_of(closed)
    return lambda values: run(jaxpr, [*consts, *values])


def labelled(results: Sequence[Any], eqn: Any) -> list[Any]:
    """Give the bodies of a new loop the labels of the original, for op ids. Return its results."""
    staged = (leaf for leaf in jax.tree.leaves(list(results)) if compat.is_staged(leaf))
    made = next((compat.producer(leaf)[1] for leaf in staged), None)
    if made is not None and made.primitive is eqn.primitive:
        again = list(map(compat.labelled, programs_in(made), programs_in(eqn)))
        rebuild = HOLDERS[eqn.primitive].rebuild
        made.params.update(rebuild(made.params, again, [0] * len(again)))
    return list(results)


def _settled(
    step: Callable[[list[Any], list[Any]], Sequence[Any]],
    carry: list[Any],
    xs: list[Any],
    atoms: Sequence[Any],
    loop: str,
    body: Any,
) -> list[Any]:
    """Return the carry with arrays for proxies that change form.

    Args:
        step: returns the carry after a step, from the carry before it and ``xs``.
        xs: the types of one step's part of the operands that the loop steps along.
        atoms: the operands of the loop that are its carry.
        loop: the loop's name, for reasons.
    """
    # Restoring one proxy may change the form of another, so try until nothing changes.
    while True:
        after = types_of(step, carry, xs)
        changed = [
            i
            for i, (value, new) in enumerate(zip(carry, after, strict=True))
            if is_proxy(value) and not (is_proxy(new) and form_of(new) == form_of(value))
        ]
        if not changed:
            return carry
        for i in changed:
            carry[i].on_dropped(f"{loop} carries {_made_by(compat.open_of(body), i)}")
            carry[i] = as_array(carry[i], atoms[i].aval)


def _made_by(jaxpr: Any, index: int) -> str:
    """Describe in words how a jaxpr makes a result."""
    maker = next((eqn for eqn in jaxpr.eqns if jaxpr.outvars[index] in eqn.outvars), None)
    if maker is None:
        return "another value in its place"
    return f"what {maker.params.get('name', maker.primitive.name)} makes of it"


def _fitted(results: Sequence[Any], carry: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
    """Return a step's carry with arrays wherever the loop's carry has arrays."""
    pairs = zip(results, carry, atoms, strict=True)
    return [x if is_proxy(before) else as_array(x, atom.aval) for x, before, atom in pairs]


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``lax.scan`` apart from the body and the arrays."""
    names = ("reverse", "length", "unroll", "_split_transpose")
    return {name: params[name] for name in names if name in params}


def _scan(run: Run, eqn: Any, operands: list[Any]) -> list[Any]:
    params, call = eqn.params, _function(run, eqn.params["jaxpr"])
    first, count = compat.scan_parts(params)
    stepped = first + count
    consts, carry, xs = operands[:first], operands[first:stepped], operands[stepped:]
    for i, x in enumerate(xs):
        if is_proxy(x) and isinstance(lost := x.step(0), Lost):
            x.on_dropped(lost.why)
            xs[i] = as_array(x, eqn.invars[stepped + i].aval)
    outs = compat.open_of(params["jaxpr"]).outvars[:count]
    steps = jax.tree.map(lambda leaf: compat.step_type(compat.typeof(leaf)), xs)

    def step(carry: list[Any], x: list[Any]) -> list[Any]:
        return call([*consts, *carry, *x])[:count]

    carry = _settled(step, carry, steps, eqn.invars[first:stepped], "scan", params["jaxpr"])

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = call([*consts, *carry, *x])
        return _fitted(results[:count], carry, outs), results[count:]

    after, ys = lax.scan(body, carry, xs, **scan_options(params))
    return labelled([*after, *ys], eqn)


def _while(run: Run, eqn: Any, operands: list[Any]) -> list[Any]:
    params = eqn.params
    consts, more = params["cond_nconsts"], params["body_nconsts"]
    first, second = operands[:consts], operands[consts : consts + more]
    carry, atoms = operands[consts + more :], eqn.invars[consts + more :]
    test, call = _function(run, params["cond_jaxpr"]), _function(run, params["body_jaxpr"])
    outs = compat.open_of(params["body_jaxpr"]).outvars

    def step(carry: list[Any], xs: list[Any]) -> list[Any]:
        return call([*second, *carry])

    carry = _settled(step, carry, [], atoms, "while", params["body_jaxpr"])

    def cond(carry: list[Any]) -> Any:
        return test([*first, *carry])[0]

    def body(carry: list[Any]) -> list[Any]:
        return _fitted(call([*second, *carry]), carry, outs)

    return labelled(lax.while_loop(cond, body, carry), eqn)


def _cond(run: Run, eqn: Any, operands: list[Any]) -> list[Any]:
    branches, (index, *values) = eqn.params["branches"], operands
    calls = [_function(run, branch) for branch in branches]
    found = [types_of(call, values) for call in calls]
    agree = [
        all(map(is_proxy, column)) and len(set(map(form_of, column))) == 1
        for column in zip(*found, strict=True)
    ]
    for column, is_one in zip(zip(*found, strict=True), agree, strict=True):
        for one in column if not is_one else ():
            if is_proxy(one):
                one.on_dropped("branches return it in different forms")

    def branch(call: Callable[..., Any], closed: Any) -> Callable[..., list[Any]]:
        atoms = compat.open_of(closed).outvars

        def fn(*values: Any) -> list[Any]:
            columns = zip(call(values), agree, atoms, strict=True)
            return [x if is_one else as_array(x, atom.aval) for x, is_one, atom in columns]

        return fn

    return labelled(lax.switch(index, list(map(branch, calls, branches)), *values), eqn)


def _shard_map(run: Run, eqn: Any, operands: list[Any]) -> list[Any] | None:
    params, call = eqn.params, _function(run, eqn.params["jaxpr"])
    operands = list(operands)
    for i, (x, spec) in enumerate(zip(operands, params["in_specs"], strict=True)):
        axes = [axis for axis, names in enumerate(spec) if names is not None]
        if is_proxy(x) and any(len({leaf.shape[axis] for leaf in jax.tree.leaves(x)}) > 1
                               for axis in axes):  # fmt: skip
            x.on_dropped("shard_map cuts it where elements share scales")
            operands[i] = as_array(x, eqn.invars[i].aval)

    def body(*values: Any) -> list[Any]:
        return call(values)

    options = compat.shard_map_options(params)
    return list(jax.shard_map(body, out_specs=list(params["out_specs"]), **options)(*operands))


RULES: Mapping[Any, Callable[[Run, Any, list[Any]], list[Any] | None]] = {
    compat.scan_p: _scan,
    compat.while_p: _while,
    compat.cond_p: _cond,
    compat.shard_map_p: _shard_map,
}
"""By primitive: ``rule(run, eqn, operands)`` returns an equation's results on proxies."""

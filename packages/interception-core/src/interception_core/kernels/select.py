"""What programs ask of the declared kernels: an op's function, its kernel, scratch memory.

The kernel of a call is kept until the plugins are loaded again. So plugins are asked once per
different call, and a program that is traced again gets the same kernel. A process that meets new
shapes for ever keeps the last MOST answers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import PluginError, PluginWarning, one_line, unknown_name
from ..log import logger
from ..plugins import host as _host
from ..plugins.hookspecs import SELECT
from ..plugins.kernel_call import KernelCall
from ..plugins.loading import implementations
from ..plugins.paths import resolve
from ..plugins.registry import Claim, Registry
from ..plugins.specs import KernelSpec

_log = logger("kernels")


class KernelChoice(NamedTuple):
    """The result of `select_kernel`.

    Attributes:
        spec: the kernel, or None if no kernel can take the call.
        reason: why it was chosen, or why there is none, in one line.
    """

    spec: KernelSpec | None
    reason: str


MOST = 4096
"""Answers that are kept; one is about 1 KB."""

# By registry, because a choice depends on the loaded plugins.
_choices: WeakKeyDictionary[Registry, dict[KernelCall, KernelChoice]] = WeakKeyDictionary()


# By op and platform: the kernel that all calls get; None for no kernel.
_given: ContextVar[Mapping[tuple[str, str], KernelSpec | None]] = ContextVar(
    "kernels", default=MappingProxyType({})
)


@contextlib.contextmanager
def chosen_kernel(op: str, platform: str, kernel: KernelSpec | None) -> Iterator[None]:
    """Let `select_kernel` choose one kernel, or none, for all calls.

    Programs that were traced before keep their kernel: call ``jax.clear_caches()`` first.
    """
    token = _given.set({**_given.get(), (op, platform): kernel})
    try:
        yield
    finally:
        _given.reset(token)


def select_kernel(
    op: str, platform: str, operands: Iterable[Any] = (), **params: Any
) -> KernelChoice:
    """Choose the kernel for a call.

    Of the kernels for the op and the platform, those whose `supports` accepts the call are
    candidates. The first plugin (by name) whose `jaxtap_select_kernel` picks a candidate decides.
    If no plugin does, the candidate with the highest priority is taken.

    Args:
        op: the op, such as ``"gemm_w8a8"``.
        platform: the platform as JAX spells it in lowering, such as ``"cpu"``.
        operands: objects with `.shape` and `.dtype`, such as arrays and tracers.
        **params: the static parameters of the call, which must be hashable.

    Returns:
        The choice. A `supports` or a hook that raises is skipped, with a `PluginWarning` the first
        time.

    Raises:
        TypeError: an operand has no shape or dtype, or a parameter can't be hashed.
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    registry = _host.ready()
    call = KernelCall.of(op, platform, operands, **params)
    given = _given.get()
    if (op, platform) in given:
        return KernelChoice(given[op, platform], "chosen for all calls")
    choices = _choices.setdefault(registry, {})
    choice = choices.get(call)
    if choice is None:
        choice, faults = _choose(registry, call)
        choice = choices.setdefault(call, choice)
        while len(choices) > MOST:
            with contextlib.suppress(StopIteration, RuntimeError):  # another thread changed it
                choices.pop(next(iter(choices)), None)
        chosen = choice.spec.target if choice.spec else "no kernel"
        _log.debug("%s: %s (%s)", call, chosen, choice.reason)
        for fault in faults:
            warnings.warn(fault, PluginWarning, stacklevel=2)
    return choice


def _choose(registry: Registry, call: KernelCall) -> tuple[KernelChoice, list[str]]:
    """Return the choice, and the faults of plugins."""
    rivals = [
        claim
        for claim in registry.of(KernelSpec)
        if (claim.spec.op, claim.spec.platform) == (call.op, call.platform)
    ]
    if not rivals:
        return KernelChoice(None, f"no kernel for {call.op} on {call.platform}"), []
    # The sort is stable and claims are sorted by key, so equal priorities have an order, too.
    rivals.sort(key=lambda claim: -claim.spec.priority)
    candidates, refusals, faults = [], [], []
    for claim in rivals:
        refusal, fault = _refusal(claim, call)
        if fault:
            faults.append(fault)
        if refusal:
            refusals.append(f"{claim.spec.target}: {refusal}")
        else:
            candidates.append(claim.spec)
    if not candidates:
        return KernelChoice(None, "; ".join(refusals)), faults

    given = {"call": call, "candidates": tuple(candidates)}
    for plugin in registry.records:
        for one in implementations(registry.manager, SELECT, plugin.name):
            try:
                answer = one.function(*(given[name] for name in one.argnames))
                spec = _picked(answer, candidates)
            except (Exception, SystemExit) as error:
                faults.append(f"{SELECT} of {plugin.label} failed: {one_line(error)}")
                continue
            if spec is not None:
                return KernelChoice(spec, f"picked by {plugin.label}"), faults
    best = candidates[0]
    passed = f"; not {'; '.join(refusals)}" if refusals else ""
    return KernelChoice(best, f"priority {best.priority} of {len(candidates)}{passed}"), faults


def _refusal(claim: Claim[KernelSpec], call: KernelCall) -> tuple[str, str]:
    """Return why a kernel can't take a call, and its plugin's fault."""
    path = claim.spec.supports
    if path is None:
        return "", ""
    try:
        answer = resolve(path, claim.label)(call)
        if not isinstance(answer, bool | str):
            raise PluginError(
                f"It must return a bool or a str that tells why not, got {answer!r}. Return True, "
                "False or a reason."
            )
    except (Exception, SystemExit) as error:
        return (
            f"its supports failed: {one_line(error)}",
            f"{claim.label} is passed over: {path!r} failed for {call}: {one_line(error)}",
        )
    if answer is True:
        return "", ""
    return (answer or "it does not support the call"), ""


def _picked(answer: Any, candidates: list[KernelSpec]) -> KernelSpec | None:
    if answer is None:
        return None
    for spec in candidates:
        if answer in (spec, spec.target):
            return spec
    raise PluginError(
        "It must return None, a candidate or a candidate's target, got "
        f"{answer!r}. Return one of {', '.join(spec.target for spec in candidates)}, or None."
    )


def get_op(op: str, /) -> Callable[..., Any]:
    """Return the function that programs call for an op.

    Args:
        op: the op, such as ``"gemm_w8a8"``.

    Returns:
        The `apply` of the op's kernel with the highest priority, among those that declare one.

    Raises:
        UnknownNameError: no kernel with an `apply` implements the op.
        PluginError: the function can't be imported.
    """
    claims = _host.ready().of(KernelSpec)
    callable_ones = [claim for claim in claims if claim.spec.apply is not None]
    found = [claim for claim in callable_ones if claim.spec.op == op]
    if not found:
        bare = [claim.spec.target for claim in claims if claim.spec.op == op]
        hint = f"{', '.join(bare)} implements it, without an apply to call it by." if bare else ""
        raise unknown_name("op", op, (claim.spec.op for claim in callable_ones), hint)
    best = max(found, key=lambda claim: claim.spec.priority)
    return resolve(best.spec.apply or "", best.label)


def kernel_workspace(
    spec: KernelSpec, operands: Iterable[Any], results: Iterable[Any], **attributes: Any
) -> int | None:
    """Return the bytes of scratch memory that a kernel needs.

    Args:
        spec: the kernel, from `select_kernel`.
        operands: the operands of the target: objects with `.shape` and `.dtype`. In a sharded
            program they are those of one device.
        results: the results of the target without that memory, as ``operands``.
        **attributes: the attributes of the call, which must be hashable.

    Returns:
        The bytes, which the target gets as one more result; None if it has no such result.

    Raises:
        PluginError: `workspace` can't be loaded, fails, or returns something else.
        TypeError: an operand has no shape or dtype, or an attribute can't be hashed.
    """
    if spec.workspace is None:
        return None
    owner = f"the kernel {spec.key!r}"
    call = KernelCall.of(spec.op, spec.platform, operands, **attributes)
    avals = KernelCall.of(spec.op, spec.platform, results).operands
    ask = resolve(spec.workspace, owner)
    try:
        found = ask(call, avals)
    except Exception as error:
        raise PluginError(
            f"{owner}: its workspace {spec.workspace!r} failed for {call}: {one_line(error)}"
        ) from error
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and found >= 0):
        return found
    raise PluginError(
        f"{owner}: its workspace {spec.workspace!r} must return bytes, an int of 0 or more, or "
        f"None, got {found!r} for {call}. Return the size of the scratch memory."
    )

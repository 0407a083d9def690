"""select_kernel: which of the declared kernels a call gets.

The answer for a call is kept until the plugins are loaded again. So plugins are asked once per
different call, and a program that is traced again gets the same kernel. A process that meets new
shapes for ever keeps the last MOST answers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import PluginError, PluginWarning, one_line
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

    Args:
        op: the op.
        platform: the platform.
        kernel: the kernel; None for none.
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

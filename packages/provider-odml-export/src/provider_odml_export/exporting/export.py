"""export: a function, its parameters and its statistics, to a verified .tflite."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from provider_odml import OdmlError, OdmlQatProvider, OdmlRule, QatModel, QuantStats
from provider_odml.features import INT8, check_statistics, split

from ..errors import OdmlWarning
from ..litert import Program, convert, integer_io, read
from .backend import ExportBackend, export_with, find_backend
from .blocks import marked, with_blocks
from .collect import collect
from .grids import checked, grids_of
from .loops import Plain
from .mismatch import check_outputs, check_sites
from .once import check_random
from .program import Exported, filled, places_of
from .report import Artifact, Report
from .signature import Signature, input_names, output_names, signatures_of
from .verify import OutputResult, SiteResult, compare_outputs, compare_own, compare_sites
from .written_out import WrittenOut, planned


def export(
    fn: Callable[..., Any],
    params: Any,
    stats: QuantStats | None,
    rules: OdmlRule | Iterable[OdmlRule] = (INT8,),
    *args: Any,
    signatures: Mapping[str, Signature | Sequence[Any]] | None = None,
    io: Literal["float", "int8"] = "float",
    backend: str | ExportBackend = "converter",
    timeout: float = 600.0,
    **options: Any,
) -> Artifact:
    """Export a function to a .tflite that was compared with JAX.

    Args:
        fn: called as ``fn(params, *args)``: as in training, or its form for inference.
        params: the parameters: arrays, stored in the file.
        stats: the statistics of training or calibration; None if no rule has a static range.
        rules: those of training.
        args: the other arguments: arrays of sample data, of the shapes that the file is for.
        signatures: instead of ``args``, the arguments by name of the signature; see ``Signature``.
        io: whether inputs and outputs of the file are floats, or the integers inside.
        backend: "converter" exports what was trained. An ``ExportBackend``, or the name under
            which a plugin declares one, quantizes the float program by the rules instead, and
            finds its own ranges: ``stats`` may be None.
        timeout: seconds that the converter may take.
        options: of ``OdmlQatProvider``, as in training.

    Returns:
        The file, and what was found out about it. ``save`` writes it.

    Warns:
        OdmlWarning: the range of a tensor costs far more than those of others: the sample data are
            rounded to it with an SQNR that is 10 dB below theirs.

    Raises:
        ManifestError: the statistics are not those of this program; shows how they differ.
        ConversionError: the converter failed.
        MismatchError: an operation computes something else on the device; names it.
        OdmlError: arguments that don't fit.
    """
    if not callable(fn):
        raise OdmlError(f"fn must be a function fn(params, *args), got a {type(fn).__name__}.")
    model = OdmlQatProvider(rules, **options).apply(fn)
    return export_model(
        model, params, stats, *args, signatures=signatures, io=io, backend=backend, timeout=timeout
    )


def export_model(
    model: QatModel,
    params: Any,
    stats: QuantStats | None,
    *args: Any,
    signatures: Mapping[str, Signature | Sequence[Any]] | None = None,
    io: Literal["float", "int8"] = "float",
    backend: str | ExportBackend = "converter",
    timeout: float = 600.0,
) -> Artifact:
    """Export a function by the plan that it was trained by: what ``QatModel.export`` does.

    Args:
        model: what ``qat`` returned.
        params: see ``export``, as the others.
        stats: the statistics.
        args: sample data.
        signatures: arguments by name.
        io: "float" or "int8".
        backend: what quantizes the program.
        timeout: seconds.
    """
    if io not in ("float", "int8"):
        raise OdmlError(f"io must be 'float' or 'int8', got {io!r}.")
    check_statistics("stats", stats)
    quantizer = find_backend(backend)
    wanted = signatures_of(signatures, args)
    calls = [_call(model, params, one) for one in wanted.values()]
    # A rule may be for one of the signatures alone.
    model.provider.check(*(own.unchecked_plan(given, {}) for own, given in calls))
    programs = [_planned(own, given) for own, given in calls]
    if not quantizer:  # a backend finds its own ranges
        stats = checked([one.program.trained for one in programs], stats)
    exported = [
        _exported(name, signature, one, None if quantizer else stats)
        for (name, signature), one in zip(wanted.items(), programs, strict=True)
    ]
    if quantizer:
        return export_with(quantizer, exported, model.provider.rules, io, timeout)
    exported = marked(exported)
    file = _converted(exported, timeout, probing=False)
    if io == "int8":
        file = integer_io(file)
    sites, outputs = _verified(file, exported, timeout)
    report = Report.of([one.plan for one in exported], sites, outputs, read(file))
    if report.warnings:
        text = "\n".join(f"- {one}" for one in report.warnings)
        warnings.warn(f"The file is as it was trained, and these ranges fit badly:\n{text}",
                      OdmlWarning, stacklevel=3)  # fmt: skip
    return Artifact(file, report)


@dataclass(frozen=True)
class _Planned:
    """The function of a signature.

    Attributes:
        model: the function.
        args: its arguments, with the parameters.
        program: the same with its loops written out, and its plans.
    """

    model: QatModel
    args: tuple
    program: WrittenOut


def _call(model: QatModel, params: Any, signature: Signature) -> tuple[QatModel, tuple]:
    """Return the function of a signature, and its arguments with the parameters."""
    provider = model.provider
    model = model if signature.fn is None else provider.apply(signature.fn)
    given = list(signature.args)
    # NumPy's arrays are constants to a trace, that JAX can't use everywhere.
    given.insert(provider.params_argnum, jax.tree.map(_as_jax, params))
    return model, tuple(given)


def _planned(model: QatModel, args: tuple) -> _Planned:
    program = planned(model, args, {})
    places = places_of(args, model.provider.params_argnum, keys=True)
    leaves = jax.tree.leaves(args)

    def run(inputs: list[Any]) -> Any:
        return program.run(Plain(), split((filled(args, places, inputs), {}))[0])

    check_random(jax.make_jaxpr(run)([leaves[place] for place in places]))
    return _Planned(model, args, program)


def _exported(name: str, signature: Signature, one: _Planned, stats: QuantStats | None) -> Exported:
    argnum, program = one.model.provider.params_argnum, one.program
    grids = {} if stats is None else grids_of(program.plan, stats, program.origins)
    return Exported(
        name,
        program,
        one.args,
        places_of(one.args, argnum),
        grids,
        collect(program, grids, split((one.args, {}))[0]),
        input_names(one.model.fn, signature, argnum),
        output_names(signature, program.staged.out),
    )


def _converted(exported: Sequence[Exported], timeout: float, probing: bool) -> bytes:
    programs: list[Program] = [one.converted(probing) for one in exported]
    return with_blocks(convert(programs, timeout=timeout), exported)


def _verified(
    model: bytes, exported: Sequence[Exported], timeout: float
) -> tuple[list[SiteResult], list[OutputResult]]:
    """Compare the file with JAX.

    Raises:
        MismatchError: they differ.
    """
    sites: list[SiteResult] = []
    outputs: list[OutputResult] = []
    probed: dict[str, Any] = {}
    probe = b""
    if any(one.probes for one in exported):
        probe = _converted(exported, timeout, probing=True)
        for one in exported:
            found, probed[one.name], made = compare_sites(probe, one)
            sites, outputs = [*sites, *found], [*outputs, *made]
    check_sites(sites)
    check_outputs(outputs)
    outputs = []
    for one in exported:
        results = compare_outputs(model, one, probed.get(one.name))
        if not all(result.same for result in results):
            found, results = compare_own(model, probe, one, probed[one.name])
            check_sites(found)
            own = {site.place: site for site in found}
            sites = [
                own.get(site.place, site) if site.signature == one.name else site for site in sites
            ]
        outputs += results
    check_outputs(outputs)
    return sites, outputs


def _as_jax(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

"""What ``jaxtap doctor`` says of number formats."""

from collections.abc import Iterator

from interception_core import CheckResult, PluginError, QTypeSpec, declared_specs
from quant_numerics.formats.qtypes import QTYPES, get_qtype


def formats() -> Iterator[CheckResult]:
    """Report this package's formats, and try each that a plugin declares."""
    yield CheckResult("ok", f"{len(QTYPES)} of quant-numerics: {', '.join(QTYPES)}")
    for spec in declared_specs(QTypeSpec):
        if spec.name in QTYPES:
            yield CheckResult(
                "fail",
                f"the qtype {spec.name!r} of a plugin is hidden by quant-numerics' own",
                f"rename it: {spec.factory} is never called",
            )
            continue
        try:
            kind = get_qtype(spec.name)
        except (PluginError, ValueError) as error:
            yield CheckResult("fail", str(error), f"look at {spec.factory}")
        else:
            parts = [
                f"{kind.bits} bits in {kind.storage_dtype.name}",
                f"{kind.scale_dtype.name} scales",
            ]
            parts += [] if kind.block is None else [f"blocks of {kind.block}"]
            yield CheckResult("ok", f"{spec.name}: {spec.summary} ({', '.join(parts)})")

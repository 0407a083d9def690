"""The page of a report: one file of HTML and CSS."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from .results import Results
from .verify import SiteResult

_TOP = 60.0
"""Decibels at which a bar is full."""

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --dim: #5b6470; --line: #d9dee4;
  --rail: #e8ecf0; --bar: #2f6db5; --bad: #b3261e; --head: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e4e7ea; --dim: #9aa4af;
  --line: #333a42; --rail: #2a3037; --bar: #6ea8e6; --bad: #ff8a80; --head: #1c2126; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1320px; padding: 1.25rem; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; color: var(--dim); max-width: 75ch; }
code, .num { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .87em; }
code { overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: .75rem 2rem; margin: 1rem 0 0; }
dl div { min-width: 6rem; }
dt { color: var(--dim); font-size: .85rem; }
dd { margin: 0; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.parts { display: flex; gap: 2px; height: 1.5rem; margin: .5rem 0; }
.parts span { background: var(--c); min-width: 3px; border-radius: 2px; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: 0;
  list-style: none; }
.key i { display: inline-block; width: .75rem; height: .75rem; background: var(--c);
  border-radius: 2px; margin-right: .4rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .35rem .6rem; text-align: left; vertical-align: top;
  border-top: 1px solid var(--line); }
thead th { border-top: 0; background: var(--head); color: var(--dim); font-weight: 600;
  white-space: nowrap; }
td.num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.num { text-align: right; font-family: inherit; font-size: inherit; }
td:first-child { min-width: 9rem; }
.bar { display: grid; grid-template-columns: 5.5rem 1fr; gap: .5rem; align-items: center;
  min-width: 12rem; }
.bar b { font-weight: 400; text-align: right; white-space: nowrap; }
.rail { display: block; height: .55rem; border-radius: 3px; background: var(--rail);
  overflow: hidden; }
.rail i { display: block; height: 100%; background: var(--bar); }
.bad .rail i { background: var(--bad); }
.bad b { color: var(--bad); }
small { color: var(--dim); display: block; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; }
details ul { margin: .25rem 0 .5rem; padding-left: 1.5rem; columns: 26rem auto; }
@media (max-width: 640px) {
  body { padding: .9rem; }
  .wide { border: 0; overflow-x: visible; }
  thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  table, tbody, tr, td { display: block; }
  tr { border: 1px solid var(--line); border-radius: 6px; padding: .4rem .6rem;
    margin-bottom: .5rem; }
  td, td.num { border: 0; padding: .1rem 0; text-align: left; white-space: normal;
    display: grid; grid-template-columns: 6.5rem 1fr; gap: .5rem; }
  td::before { content: attr(data-name); color: var(--dim); font-family: system-ui, sans-serif;
    font-size: .85rem; }
  td:empty { display: none; }
  .bar { min-width: 0; }
}
"""

_COLORS = {"int8": "#2f6db5", "int4": "#1d8a6b", "int2": "#7a9c1e", "int16": "#6b58b8",
           "int32": "#8a94a0", "int64": "#6c7681", "float32": "#c2571a", "float16": "#d48b2a",
           "bfloat16": "#b98a3c"}  # fmt: skip


def page(report: Results) -> str:
    """Returns a report as one page that needs nothing else."""
    body = "".join(
        (_summary(report), _bytes(report), _signatures(report), _outputs(report), _sites(report),
         _weights(report), _floats(report), _operations(report))
    )  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Export report</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def _summary(report: Results) -> str:
    total, worst = sum(report.ops.values()), min((o.sqnr for o in report.outputs), default=None)
    facts = [("File", _size(report.file_bytes or sum(report.bytes_by_dtype.values()))),
             ("Operations", str(total)), ("of them in float", str(report.float_ops)),
             ("Quantized places", str(len(report.sites)))]  # fmt: skip
    if report.sites:
        facts.append(("Greatest difference", f"{max(s.lsb for s in report.sites):.2f} LSB"))
    if worst is not None:
        facts.append(("Least SQNR of outputs", _number(worst, " dB")))
    if report.backend != "converter":
        how = f"Quantized after training by the backend {report.backend!r}; outputs are compared "
        how += "with JAX in float."
        if report.sqnr_floor is not None:
            how += f" Each was held to {_number(report.sqnr_floor)} dB at least."
    else:
        how = "Exported as it was trained; LiteRT is compared with JAX's fake quantization."
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    listed = "".join(f"<li>{escape(one)}</li>" for one in report.warnings)
    bad = f"<h2>Ranges to look at</h2>\n<ul>{listed}</ul>\n" if listed else ""
    return f"<h1>Export report</h1>\n<p>{escape(how)}</p>\n<dl>{items}</dl>\n{bad}"


def _bytes(report: Results) -> str:
    total = sum(report.bytes_by_dtype.values())
    if not total:
        return ""
    sizes = sorted(report.bytes_by_dtype.items(), key=lambda item: -item[1])
    parts = "".join(
        f'<span style="--c:{_color(kind)};flex:{count} 0 0" title="{escape(kind)}"></span>'
        for kind, count in sizes
    )
    key = "".join(
        f'<li><i style="--c:{_color(kind)}"></i>{escape(kind)} {_size(count)}, '
        f"{count / total:.1%}</li>"
        for kind, count in sizes
    )
    return (
        f'<h2>Constants: {_size(total)}</h2>\n<div class="parts" aria-hidden="true">{parts}</div>'
        f'<ul class="key">{key}</ul>\n'
    )


def _signatures(report: Results) -> str:
    rows = [(_code(one.name), _names(one.inputs), _names(one.outputs)) for one in report.signatures]
    return _section("Signatures", "", ("signature", "inputs", "outputs"), rows)


def _outputs(report: Results) -> str:
    note = "Error: the greatest difference from JAX over the greatest magnitude."
    rows = [
        (_code(o.signature), _code(o.name), _text(f"{o.error:.3%}"), _sqnr(o.sqnr))
        for o in report.outputs
    ]
    return _section("Outputs", note, ("signature", "output", "#error", "SQNR, dB"), rows)


def _sites(report: Results) -> str:
    note = (
        "LSB: the greatest difference between LiteRT and JAX where both get the same codes, in "
        "steps of the scale; the bar is full at what is allowed. SQNR: of both programs run by "
        f"themselves, and of LiteRT and the float program; the bar is full at {_TOP:.0f} dB."
    )
    head = ("place", "operation", "type", "#scale", "#zero point", "LSB", "SQNR, dB",
            "SQNR to float, dB")  # fmt: skip
    rows = [_site(one, len(report.signatures) > 1) for one in report.sites]
    return _section(f"Quantized places: {len(rows)}", note, head, rows)


def _site(one: SiteResult, named: bool) -> tuple[str, ...]:
    place = _code(one.place) + (f"<small>{escape(one.signature)}</small>" if named else "")
    if one.is_float:
        place += f"<small>in float: {escape(one.reason or 'its rule says so')}</small>"
    share = one.lsb / one.tolerance if one.tolerance else math.inf
    lsb = _bar(f"{one.lsb:.2f} of {one.tolerance:.2f}", share, not one.lsb <= one.tolerance)
    return (
        f"<div>{place}</div>", _text(one.op_name), _text(one.qtype), _text(f"{one.scale:.4g}"),
        _text(str(one.zero_point)), lsb, _sqnr(one.sqnr), _sqnr(one.float_sqnr),
    )  # fmt: skip


def _weights(report: Results) -> str:
    most = max((one.nbytes for one in report.weights), default=0)
    rows = [
        (
            _code(one.operation),
            _text(one.dtype + (f", blocks of {one.block_size}" if one.block_size else "")),
            _text(" x ".join(map(str, one.shape)) or "1"),
            _bar(_size(one.nbytes), one.nbytes / most if most else 0.0),
        )
        for one in report.weights
    ]
    note = "Each as an operation reads it; equal ones are stored once."
    head = ("operation", "type", "shape", "size")
    return _section(f"Quantized parameters: {len(rows)}", note, head, rows)


def _floats(report: Results) -> str:
    reasons: dict[str, list[str]] = {}
    for one in report.floats:
        reasons.setdefault(one.reason, []).append(one.operation)
    groups = sorted(reasons.items(), key=lambda item: -len(item[1]))
    if not groups:
        return "<h2>In float: nothing</h2>\n"
    found = "".join(
        f"<details open><summary>{escape(reason)}: {len(names)}</summary><ul>"
        + "".join(f"<li>{_code(name)}</li>" for name in names)
        + "</ul></details>\n"
        for reason, names in groups
    )
    count = len(report.floats)
    return f"<h2>In float: {count} operation{'s' if count > 1 else ''} of the program</h2>\n{found}"


def _operations(report: Results) -> str:
    most = max(report.ops.values(), default=0)
    counts = sorted(report.ops.items(), key=lambda item: (-item[1], item[0]))
    rows = [(_code(name), _bar(str(count), count / most)) for name, count in counts]
    return _section("Operations of the file", "", ("operation", "count"), rows)


def _section(title: str, note: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table under its title; ``#`` begins the names of columns of numbers."""
    rows = list(rows)
    if not rows:
        return ""
    names = [name.removeprefix("#") for name in head]
    kinds = [' class="num"' if name.startswith("#") else "" for name in head]
    pairs = list(zip(names, kinds, strict=True))
    top = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in pairs)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{kind} data-name="{escape(name)}">{cell}</td>'
            for (name, kind), cell in zip(pairs, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    told = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<h2>{escape(title)}</h2>\n{told}<div class="wide"><table><thead><tr>{top}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>\n"
    )


def _sqnr(value: float) -> str:
    return _bar(_number(value), value / _TOP, value < 0)


def _bar(text: str, share: float, bad: bool = False) -> str:
    width = 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
    kind = "bar bad" if bad else "bar"
    return (
        f'<div class="{kind}"><b class="num">{escape(text)}</b><span class="rail" '
        f'aria-hidden="true"><i style="width:{width:.1%}"></i></span></div>'
    )


def _names(types: dict[str, str]) -> str:
    lines = (f"{_code(name)} <small>{escape(kind)}</small>" for name, kind in types.items())
    return "<div>" + "".join(lines) + "</div>"


def _number(value: float, unit: str = "") -> str:
    if math.isnan(value):
        return "not a number"
    return ("equal" if value > 0 else "none") if math.isinf(value) else f"{value:.1f}{unit}"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"


def _color(kind: str) -> str:
    return _COLORS.get(kind, "#8a94a0")


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _text(text: str) -> str:
    return f"<span>{escape(text)}</span>"

"""``jaxtap plugins``: print the installed plugins and their status."""

import argparse
import json
from collections.abc import Iterable, Iterator

from ..plugins import host as _host
from ..plugins.hookspecs import API_VERSION
from ..plugins.records import PluginRecord

_HEADER = ("name", "distribution", "version", "status", "provides")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the plugins.

    Returns:
        1 if `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken, else 0.
    """
    registry = _host.loaded()
    if args.json:
        content = [record.as_json() for record in registry.records]
        print(json.dumps({"api": list(API_VERSION), "plugins": content}, indent=2))
    else:
        print("\n".join(table(registry.records)))
    return int(registry.strict and bool(registry.broken))


def table(records: Iterable[PluginRecord]) -> Iterator[str]:
    """Yield the table's lines, with reasons and notes below each plugin."""
    records = tuple(records)
    rows = [_HEADER, *map(_row, records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    yield lines[0]
    for record, line in zip(records, lines[1:], strict=True):
        yield line
        for detail in filter(None, (record.reason, *record.notes)):
            yield f"    {detail}"


def _row(record: PluginRecord) -> tuple[str, ...]:
    provides = ", ".join(record.provides) or "-"
    return (record.name, record.distribution, record.version, record.status, provides)

# SPDX-License-Identifier: MIT
"""What people see: plain text by rich for a terminal, HTML for a notebook. Takes the values of commands.py.

Names of targets come from anywhere: they are escaped for HTML, never read as markup, and shown without control
characters.
"""

from __future__ import annotations

import html
import io
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_WIDTH = 130  # columns of plain text where no terminal says otherwise
_BAR = 40  # columns of a bar in plain text

Row = Mapping[str, Any]


def size(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float | None) -> str:
    """0.0123 -> "12.3 ms", 75 -> "1 min 15 s"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def share(part: float, whole: float) -> float:
    """part / whole, between 0 and 1; 0 when there is no whole."""
    return min(1.0, max(0.0, part / whole)) if whole else 0.0


def clean(value: object) -> str:
    """One line of printable text: control characters and lone surrogates are shown as escapes."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def ago(when: float) -> str:
    """How long ago, from seconds since the epoch."""
    return f"{duration(max(0.0, time.time() - when))} ago"


# --- plain text -----------------------------------------------------------------------------------


def short(loader: str) -> str:
    """ "transformers.BertModel.from_pretrained" -> "BertModel"; a plain function keeps its name."""
    parts = loader.split(".")
    return parts[-2] if len(parts) > 2 and parts[-1].startswith("from_") else loader


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> str:
    """A table as text; `right` names the columns that are set flush right. The last column takes what is left, at
    least 16 cells: in a narrow terminal lines get too long for it rather than ids too short to be used."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        last = column == columns[-1]
        drawn.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=not last)
    texts = [[Text(clean(cell)) for cell in row] for row in rows]
    for row in texts:
        drawn.add_row(*row)
    widths = [
        max([len(column), *(text.cell_len for text in cells)]) for column, *cells in zip(columns, *texts, strict=True)
    ]
    return _render(drawn, sum(widths[:-1]) + 2 * len(columns) + min(16, widths[-1]))


def _render(renderable: Any, at_least: int = 0) -> str:
    from rich.console import Console

    out = io.StringIO()
    width = max(_terminal_width(), at_least)
    Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None).print(renderable)
    return textwrap.dedent("\n".join(line.rstrip() for line in out.getvalue().splitlines())).strip("\n")


def _terminal_width() -> int:
    import shutil

    return max(60, shutil.get_terminal_size((_WIDTH, 24)).columns)


def bar(part: float, whole: float) -> str:
    """A bar of text."""
    filled = round(share(part, whole) * _BAR)
    return "█" * filled + "░" * (_BAR - filled)


def entries_text(rows: Sequence[Row]) -> str:
    """`list`."""
    if not rows:
        return "no entries"
    columns = ("id", "size", "hits", "native", "used", "mapped", "pin", "loader", "target")
    return table(columns, [_entry_cells(row) for row in rows], right=("size", "hits", "native", "mapped"))


def _entry_cells(row: Row) -> tuple[str, ...]:
    return (
        row["id"],
        size(row["nbytes"]),
        str(row["hits"]),
        duration(row["native_seconds"]),
        ago(row["last_used"]),
        str(row["mapped_by"]),
        "pinned" if row["pinned"] else "",
        short(row["loader"]),
        row["target"],
    )


def records_text(rows: Sequence[Row]) -> str:
    """`why`, and what a cell loaded: one line per load."""
    if not rows:
        return "no loads"
    cells = [
        (
            row["outcome"],
            duration(row["seconds"]),
            duration(row.get("native_seconds")),
            size(row["nbytes"]) if row.get("nbytes") else "",
            short(row["loader"]),
            f"{row['target']}: {row['reason']}" if row.get("reason") else row["target"],
        )
        for row in rows
    ]
    columns = ("outcome", "time", "native", "size", "loader", "target: reason")
    return table(columns, cells, right=("time", "native", "size"))


def status_text(found: Row) -> str:
    """`status`."""
    if found.get("disabled"):
        first = "OVERMIND_DISABLE is set: loads are native"
    elif found["running"]:
        first = (
            f"daemon {found['daemon_pid']} (version {found['version']}) is running for "
            f"{duration(found['uptime_seconds'])}: {found['entries']} entries, "
            f"{size(found['used'])} of {size(found['budget'])}; the daemon itself {size(found['daemon_rss'])}"
        )
    elif "error" in found:
        first = f"no daemon can be used, loads are native: {found['error']}"
    else:
        first = "no daemon is running; the first load starts one"
    lines = (first, zygotes_text(found["zygotes"]), f"folder {found['folder']}", f"log    {found['log']}")
    return "\n".join(map(clean, lines))


def _zygotes(rows: Sequence[Row]) -> str:
    return f"{len(rows)} zygote{'' if len(rows) == 1 else 's'}"


def zygotes_text(rows: Sequence[Row]) -> str:
    """How many there are, and their memory."""
    if not rows:
        return "no zygotes: no imports are kept ready"
    return f"{_zygotes(rows)} with imports ready: {size(sum(row['memory'] for row in rows))}"


def stop_text(found: Row) -> str:
    """`stop`."""
    first = f"stopped; {found['entries']} entries given up" if found["stopped"] else "no daemon was running"
    return f"{first}; {_zygotes(found['zygotes'])} ended" if found["zygotes"] else first


def stats_text(found: Row) -> str:
    """`stats`, without colour."""
    lines = []
    if found.get("process"):
        lines.append(_process_line(found["process"]))
    lines.extend(starts_lines(found))
    store = found["store"]
    if store is None:
        return "\n".join([*lines, "no daemon is running; the first load starts one"])
    lines.append(_store_line(store))
    for name in ("used", "pinned", "mapped"):
        lines.append(f"{name:<7}{bar(store[name], store['budget'])} {size(store[name])} of {size(store['budget'])}")
    lines.append("")
    lines.append(entries_text(found["entries"]))
    return "\n".join(lines)


def _process_line(process: Row) -> str:
    return (
        f"this process: {process['loads']} loads, {process['hits']} hits ({process['hit_rate']:.0%}), "
        f"{process['misses']} misses, {process['bypasses']} bypasses; {duration(process['seconds_saved'])} saved"
    )


def starts_lines(found: Row) -> list[str]:
    """One line for each zygote, and one for the last start that used none."""
    lines = [
        f"zygote {row['pid']} for {row['mode']} {clean(row['target'])}: {row['modules']} modules imported, "
        f"{size(row['memory'])}, {row['forks']} started, {row['running']} running, used {ago(row['last_used'])}"
        for row in found.get("zygotes") or ()
    ]
    if plain := found.get("plain_start"):
        lines.append(f"last plain start {ago(plain['when'])}, of {clean(plain['target'])}: {clean(plain['reason'])}")
    return lines


def _store_line(store: Row) -> str:
    return (
        f"store, since {ago(time.time() - store['uptime_seconds'])}: {store['hits']} hits ({store['hit_rate']:.0%}), "
        f"{store['misses']} misses, {store['published']} published, {store['evicted']} evicted, "
        f"{store['refused']} refused; hits stood for {duration(store['native_seconds_served'])} of native loads"
    )


def event_text(event: Row) -> str:
    """One line of `monitor`."""
    moment = time.strftime("%H:%M:%S", time.localtime(event["when"]))
    parts = [moment, f"{event['event']:<9}"]
    if event.get("id"):
        parts.append(str(event["id"]))
    if event.get("nbytes"):
        parts.append(f"{size(event.get('written') or 0)} of " if event["event"] == "progress" else "")
        parts[-1] += size(event["nbytes"])
    if event.get("bytes_per_second"):
        parts.append(f"{size(event['bytes_per_second'])}/s")
    parts += [str(event[name]) for name in ("loader", "target", "reason") if event.get(name)]
    return clean("  ".join(parts))


# --- notebook --------------------------------------------------------------------------------------


class Stats:
    """`%overmind stats`: a table where HTML is shown, text elsewhere. A value of its own, not live."""

    def __init__(self, found: Row) -> None:
        self.found = found

    def __repr__(self) -> str:
        return stats_text(self.found)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": stats_text(self.found), "text/html": stats_html(self.found)}


_COLOURS = {"used": "#4c78a8", "pinned": "#f58518", "mapped": "#54a24b"}
_MEANING = {
    "used": "all entries",
    "pinned": "kept from eviction",
    "mapped": "in use by live kernels",
}


def stats_html(found: Row) -> str:
    """`stats` as one HTML element without scripts or outside resources."""
    parts = []
    if found.get("process"):
        parts.append(_line_html(_process_line(found["process"])))
    parts.extend(_line_html(line) for line in starts_lines(found))
    store = found["store"]
    if store is None:
        parts.append(_line_html("no daemon is running; the first load starts one"))
    else:
        parts.append(_line_html(_store_line(store)))
        parts.append(_memory_html(store))
        parts.append(_entries_html(found["entries"]))
    return f'<div class="overmind-stats">{"".join(parts)}</div>'


def _text(value: object) -> str:
    return html.escape(clean(value), quote=True)


def _line_html(line: str) -> str:
    return f'<p style="margin:0.3em 0">{_text(line)}</p>'


def _memory_html(store: Row) -> str:
    rows = []
    for name, colour in _COLOURS.items():
        percent = 100 * share(store[name], store["budget"])
        rows.append(
            f'<tr><td style="text-align:left">{name}</td><td style="width:24em"><div role="meter" '
            f'aria-label="{name}" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent:.0f}" '
            f'style="width:24em;height:0.8em;border:1px solid #8888">'
            f'<div style="width:{percent:.2f}%;height:100%;background:{colour}"></div></div></td>'
            f'<td style="text-align:left">{size(store[name])} of {size(store["budget"])}, {_MEANING[name]}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _entries_html(rows: Sequence[Row]) -> str:
    if not rows:
        return "<p>no entries</p>"
    names = ("id", "size", "hits", "native load", "last used", "mapped by", "pin", "loader", "target")
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in names)
    body = []
    for row in rows:
        cells = "".join(f'<td style="text-align:left">{_text(cell)}</td>' for cell in _entry_cells(row))
        body.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"

# SPDX-License-Identifier: MIT
"""What people see, on made-up figures: nothing may be lost, nothing may break out of its cell."""

from __future__ import annotations

import time
from html.parser import HTMLParser
from typing import Any

import pytest
from overmind import display

EVIL = '<script>alert("x")</script>&[bold red]\x1b[31m\n\udcff'


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "id": "0123456789abcdef",
        "key": "00" * 32,
        "loader": "torch.load",
        "target": "/models/a.pt",
        "nbytes": 3 << 30,
        "created": time.time() - 4000,
        "last_used": time.time() - 65,
        "native_seconds": 2.5,
        "hits": 7,
        "mapped_by": 2,
        "pinned": True,
        **changes,
    }


def store(**changes: Any) -> dict[str, Any]:
    return {
        "budget": 8 << 30,
        "used": 4 << 30,
        "pinned": 2 << 30,
        "mapped": 1 << 30,
        "hits": 30,
        "misses": 10,
        "hit_rate": 0.75,
        "published": 9,
        "evicted": 1,
        "refused": 2,
        "uptime_seconds": 7300.0,
        "native_seconds_served": 17.5,
        **changes,
    }


PROCESS = {"loads": 4, "hits": 3, "misses": 1, "bypasses": 0, "hit_rate": 0.75, "seconds_saved": 12.0}


class Page(HTMLParser):
    """Collects tags, text, and whether every tag that was opened was closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.styles += [value or "" for name, value in attrs if name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert display.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.0123, "12.3 ms"), (2.5, "2.5 s"), (59.99, "60.0 s"), (75, "1 min 15 s"), (7300, "2 h 1 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert display.duration(seconds) == text


def test_bars_stay_in_their_bounds() -> None:
    assert {len(display.bar(part, whole)) for part, whole in [(0, 1), (1, 1), (9, 1), (1, 0), (-1, 1)]} == {40}
    assert display.bar(1, 2).count("█") == 20


def test_text_of_stats_says_all_of_it() -> None:
    text = display.stats_text({"store": store(), "entries": [entry()], "process": PROCESS})
    for part in ("75%", "12.0 s saved", "4.0 GiB of 8.0 GiB", "2.0 GiB", "1.0 GiB", "0123456789abcdef", "torch.load"):
        assert part in text
    assert "17.5 s of native loads" in text


def test_stats_without_a_daemon() -> None:
    found = {"store": None, "entries": [], "process": PROCESS}
    assert "no daemon" in display.stats_text(found)
    assert "no daemon" in Page(display.stats_html(found)).text


def test_html_of_stats_is_well_formed_and_has_bars_to_scale() -> None:
    page = Page(display.stats_html({"store": store(), "entries": [entry(), entry(pinned=False)], "process": PROCESS}))
    assert page.open == []
    widths = [style for style in page.styles if style.startswith("width:") and "%" in style]
    assert [style.split(";")[0] for style in widths] == ["width:50.00%", "width:25.00%", "width:12.50%"]
    assert page.tags.count("tr") == 3 + 1 + 2
    for part in ("75%", "8.0 GiB", "12.0 s saved", "pinned", "2.5 s", "/models/a.pt"):
        assert part in page.text


def test_names_can_not_break_out_of_their_cell() -> None:
    found = {"store": store(), "entries": [entry(target=EVIL, loader=EVIL)], "process": None}
    page = Page(display.stats_html(found))
    assert "script" not in page.tags
    assert page.text.count('<script>alert("x")</script>&[bold red]\\x1b[31m\\n\\udcff') == 2
    plain = display.stats_text(found)
    assert "\x1b" not in plain
    plain.encode()
    assert "red]" in plain, "markup is shown, not obeyed"


def test_the_loader_is_shown_by_its_class() -> None:
    assert display.short("transformers.BertModel.from_pretrained") == "BertModel"
    assert display.short("torch.load") == "torch.load"
    assert display.short("mine.from_file") == "mine.from_file"


def test_records_and_events_are_one_line_each_and_clean() -> None:
    record = {
        "outcome": "bypass",
        "seconds": 0.5,
        "native_seconds": 0.5,
        "nbytes": 0,
        "loader": "torch.load",
        "target": "a\x1b]0;title\x07",
        "reason": "map_location is a function",
    }
    text = display.records_text([record])
    assert "bypass" in text and "500.0 ms" in text
    assert "\x1b" not in text and "\x07" not in text
    assert display.records_text([]) == "no loads"
    event = {"event": "progress", "when": 0.0, "id": "ab", "nbytes": 2048, "written": 1024, "target": "x\ny"}
    line = display.event_text(event)
    assert "1.0 KiB of 2.0 KiB" in line and "\n" not in line


def test_a_notebook_gets_html_and_a_terminal_text() -> None:
    shown = display.Stats({"store": store(), "entries": [entry()], "process": PROCESS})
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"] == repr(shown)


def test_no_entries() -> None:
    assert display.entries_text([]) == "no entries"
    assert "no entries" in Page(display.stats_html({"store": store(), "entries": []})).text


def test_ids_stay_whole_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [entry(loader="pathlib.Path.read_bytes", target="/a/rather/long/path" * 8)]
    text = display.entries_text(rows)
    assert "0123456789abcdef" in text and "pathlib.Path.read_bytes" in text
    assert "/a/rather/long/path" * 8 in "".join(line[-16:].strip() for line in text.splitlines()[2:])

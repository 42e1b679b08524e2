# SPDX-License-Identifier: MIT
"""Kept messages are said again as if the load had said them here."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import pytest
from overmind import replay


class LibraryWarning(UserWarning):
    """A category that has to be found by its name."""


def kept(message: Any) -> Any:
    """As it comes back from an entry."""
    return json.loads(json.dumps(message))


def warning(category: type[Warning] = UserWarning) -> Any:
    return kept(replay.of_warning(category("careful"), category, logging.__file__, 7))


def test_a_warning_keeps_its_text_category_and_place() -> None:
    sys.modules.setdefault(__name__, sys.modules[LibraryWarning.__module__])
    with pytest.warns(LibraryWarning, match="careful") as caught:
        replay.replay([warning(LibraryWarning)])
    assert (caught[0].filename, caught[0].lineno) == (logging.__file__, 7)
    with pytest.warns(UserWarning, match="careful"):
        replay.replay([["w", "no_such_library", "Gone", "careful", "gone.py", 1]])


def test_the_filters_of_this_process_decide() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        replay.replay([warning()])
        assert not seen
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", module="logging")
        replay.replay([warning()])
        assert not seen
        warnings.resetwarnings()
        warnings.simplefilter("default")
        replay.replay([warning(), warning()])
        assert len(seen) == 1, "once for each place, as natively"
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            replay.replay([warning(), warning()])


def record(level: int, text: str, *args: object, **extra: Any) -> Any:
    made = logging.LogRecord("library.part", level, "/x/file.py", 12, text, args, extra.get("exc_info"), "function")
    return kept(replay.of_record(made))


def test_a_record_keeps_its_text_level_and_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "library"):
        replay.replay([record(logging.WARNING, "%d of %s", 1, "2"), record(logging.INFO, "100%")])
    first, second = caplog.records
    assert (first.name, first.levelno, first.getMessage(), first.pathname, first.lineno, first.funcName) == (
        "library.part", logging.WARNING, "1 of 2", "/x/file.py", 12, "function",
    )  # fmt: skip
    assert second.getMessage() == "100%"


def test_the_levels_of_this_process_decide(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "library"):
        replay.replay([record(logging.WARNING, "quiet"), record(logging.ERROR, "loud")])
    assert [found.getMessage() for found in caplog.records] == ["loud"]


def test_a_traceback_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("inside")
    except ValueError:
        message = record(logging.ERROR, "failed", exc_info=sys.exc_info())
    with caplog.at_level(logging.INFO, "library"):
        replay.replay([message])
    assert "ValueError: inside" in caplog.text


def test_what_transformers_says_once_is_said_once() -> None:
    from transformers.utils import logging as library

    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logger = library.get_logger("transformers.overmind_once")
    logger.addHandler(handler)
    try:
        logger.warning_once("only 1 of %d", 2)
        made = kept(replay.of_record(seen[-1]))
        replay.replay([made])
        replay.replay([made])
    finally:
        logger.removeHandler(handler)
    assert [one.getMessage() for one in seen] == ["only 1 of 2", "only 1 of 2"], "the native one, one for both hits"
    assert {one.funcName for one in seen} == {"warning_once"}

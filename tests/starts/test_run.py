# SPDX-License-Identifier: MIT
"""`overmind run script` beside `python script`: the same to see, whether plain or from a zygote."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starts import Outcome, forked, native, outcome, overmind_run, warm

CASES = Path(__file__).with_name("run_cases.py")

TABLE: list[list[str]] = [
    ["argv", "a b", "--x", ""],
    ["frames"],
    ["modules"],
    ["streams"],
    ["exit_code", "0"],
    ["exit_code", "7"],
    ["exit_code", "300"],
    ["exit_text"],
    ["exit_none"],
    ["hard_exit"],
    ["killed", str(int(signal.SIGTERM))],
    ["killed", str(int(signal.SIGKILL))],
    ["killed", str(int(signal.SIGUSR1))],
    ["interrupted"],
    ["error"],
    ["hook"],
    ["broken_hook"],
    ["at_exit"],
    ["threads"],
    ["environment"],
    ["place"],
    ["locales"],
    ["flags"],
    ["signals"],
    ["limits"],
    ["warning"],
    ["descriptors"],
    ["pickled"],
    ["processes"],
    ["pool"],
    ["fork_exit"],
    ["loops"],
    ["logs"],
    ["imports_of_main"],
    ["self_import"],
    ["trees"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A runtime folder with a zygote for the script of cases, and that script."""
    from conftest import stop_daemon

    folder = tmp_path_factory.mktemp("run")
    script = folder / "run_cases.py"
    shutil.copy(CASES, script)
    runtime = Path(f"/tmp/ov-{os.getpid()}-run")
    runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERMIND_RUNTIME_DIR", str(runtime))
        patch.setenv("HF_HUB_OFFLINE", "1")
        warm(runtime, str(script), "processes")
        yield runtime, script
        stop_daemon(runtime)
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.mark.parametrize("words", TABLE, ids=lambda words: "-".join(words)[:30])
def test_the_same_as_python(place: tuple[Path, Path], words: list[str]) -> None:
    runtime, script = place
    environment = {**os.environ, "ONLY_HERE": "1"} if words == ["environment"] else None
    expected = native(str(script), *words, env=environment)
    plain = outcome(overmind_run(str(script), *words), env={**(environment or os.environ), "OVERMIND_ZYGOTE": "0"})
    assert _normal(plain) == _normal(expected)
    if environment is None:
        assert forked(runtime, str(script), *words) == expected


def _normal(found: Outcome) -> Outcome:
    """Without the switch that the plain start is told to be one with."""
    return Outcome(
        found.code, found.out.replace("('OVERMIND_ZYGOTE', '0'), ", "").replace(", 'OVERMIND_ZYGOTE'", ""), found.err
    )


def test_a_relative_name_from_another_folder(place: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, script = place
    name = os.path.relpath(script, tmp_path)
    assert forked(runtime, name, "argv", cwd=tmp_path) == native(name, "argv", cwd=tmp_path)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert forked(runtime, "./link.py", "argv", cwd=tmp_path) == native("./link.py", "argv", cwd=tmp_path)


@pytest.mark.parametrize("words", [["SCRIPT", "working_folder"], ["-m", "this"]], ids=["script", "module"])
def test_in_a_folder_that_was_deleted(place: tuple[Path, Path], tmp_path: Path, words: list[str]) -> None:
    _runtime, script = place
    words = [str(script) if word == "SCRIPT" else word for word in words]
    gone = tmp_path / "gone"
    command = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec "

    def there(*start: str, **environment: str) -> Outcome:
        return outcome(["sh", "-c", command + shlex.join([*start, *words])], env={**os.environ, **environment})

    expected = there(sys.executable)
    assert expected.code == 0
    assert there(*overmind_run(), OVERMIND_ZYGOTE="0") == expected
    assert there(*overmind_run()) == expected


def test_standard_input(place: tuple[Path, Path]) -> None:
    runtime, script = place
    data = b"first line\n\xff\x00\x01" + b"x" * 100_000
    assert forked(runtime, str(script), "stdin", input=data) == native(str(script), "stdin", input=data)


def test_streams_that_are_files(place: tuple[Path, Path], tmp_path: Path) -> None:
    _runtime, script = place
    (tmp_path / "in").write_text("abc\ndef\n")
    texts = []
    for command in (overmind_run(str(script), "streams"), [os.sys.executable, str(script), "streams"]):  # type: ignore[attr-defined]
        with open(tmp_path / "in") as given, open(tmp_path / "out", "w") as out:
            subprocess.run(command, stdin=given, stdout=out, stderr=out, check=True, timeout=60)
        texts.append((tmp_path / "out").read_text())
    assert texts[0] == texts[1]


def test_each_run_has_its_own_random_numbers(place: tuple[Path, Path]) -> None:
    runtime, script = place
    found = [json.loads(forked(runtime, str(script), "random_numbers").out) for _ in range(3)]
    assert len({row[0] for row in found}) == len({row[1] for row in found}) == 3

# SPDX-License-Identifier: MIT
"""S13: exceptions of another type, failures that are remembered, warnings that nobody sees.

A cache that loads elsewhere wraps the error, and `except OSError` no longer catches it; one that remembers the failure
fails again after the user has fixed the file. And what the native load says (transformers' LOAD REPORT of missing and
unexpected keys, warnings, log records) must be heard in this notebook, on a hit as on a miss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Oracle
from parity.cases import rooted

MYLIB = """
import logging
import warnings

log = logging.getLogger("mylib.reader")


class OwnError(Exception):
    def __init__(self, path, code):
        super().__init__(path, code)
        self.code = code


def fails(path):
    with open(path) as file:
        text = file.read()
    if text == "bad":
        raise OwnError(path, 17)
    if text == "chained":
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error
    if text == "stop":
        raise SystemExit(4)
    if text == "interrupt":
        raise KeyboardInterrupt
    return [text]


def talks(path):
    with open(path) as file:
        text = file.read()
    warnings.warn("old format", DeprecationWarning, stacklevel=2)
    warnings.warn("slow: %s" % text, UserWarning)
    log.warning("read %d letters of %s", len(text), "file", extra={"letters": len(text)})
    log.info("details")
    return [text]
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    (folder / "mylib.py").write_text(MYLIB)
    (folder / "words").write_text("abc")
    start = rooted(folder) + "import mylib\n"
    oracle.nat(start + "import tiny\ntiny.bert(root + '/m', seed=1)")
    return start


FACE = """
import traceback
def face(make):
    try:
        return ["loaded", describe(make())]
    except BaseException as error:
        frames = [f.name for f in traceback.extract_tb(error.__traceback__) if "/overmind/" not in f.filename]
        inner = [type(e).__name__ if e is not None else None for e in (error.__cause__, error.__context__)]
        return [type(error).__module__ + "." + type(error).__name__, [str(a) for a in error.args], frames[-1], inner,
                error.__suppress_context__, [k.__name__ for k in type(error).__mro__]]
"""


@pytest.mark.parametrize(
    "call, kind",
    [
        ("BertForMaskedLM.from_pretrained('/nope')", "OSError"),
        ("AutoTokenizer.from_pretrained('/nope')", "OSError"),
        ("BertForMaskedLM.from_pretrained(root + '/m', dtype='nonsense')", "Exception"),
        ("BertForMaskedLM.from_pretrained(root + '/m', bad_word=1)", "TypeError"),
        ("torch.load(root + '/garbage')", "UnpicklingError"),
        ("torch.load(root + '/absent')", "FileNotFoundError"),
        ("torch.load(root)", "IsADirectoryError"),
        ("torch.load()", "TypeError"),
        ("torch.load(root + '/words', nonsense=1)", "Exception"),
        ("load_file(root + '/garbage')", "SafetensorError"),
        ("load_file(root + '/absent')", "FileNotFoundError"),
        ("AutoencoderKL.from_pretrained('/nope')", "OSError"),
        ("DiffusionPipeline.from_pretrained(root + '/m')", "OSError"),
        ("load(mylib.fails, root + '/bad')", "OwnError"),
        ("load(mylib.fails, root + '/chained')", "ValueError"),
        ("load(mylib.fails, root + '/stop')", "SystemExit"),
        ("load(mylib.fails, root + '/interrupt')", "KeyboardInterrupt"),
        ("load(mylib.fails)", "TypeError"),
    ],
)
def test_the_same_exception(oracle: Oracle, before: str, folder: Path, call: str, kind: str) -> None:
    for name in ("bad", "chained", "stop", "interrupt"):
        (folder / name).write_text(name)
    (folder / "garbage").write_bytes(b"\x93\xff neither pickle nor zip" * 9)
    body = (
        before
        + FACE
        + "from diffusers import AutoencoderKL, DiffusionPipeline\nfrom safetensors.torch import load_file\n"
        + "from transformers import AutoTokenizer, BertForMaskedLM\n"
        + f"value = face(lambda: {call})"
    )
    native = oracle.nat(body).value
    assert kind in native[5], f"the native load gave {native[:2]}"
    for _ in range(2):
        run = oracle.run(body)
        assert run.value == native
        assert "hit" not in run.outcomes


def test_a_failure_is_not_remembered(oracle: Oracle, before: str, folder: Path) -> None:
    body = (
        before
        + FACE
        + "value = [face(lambda: torch.load(root + '/late.pt'))[0], face(lambda: load(mylib.fails, root + '/late'))[0]]"
    )
    (folder / "late.pt").write_bytes(b"garbage")
    (folder / "late").write_text("bad")
    assert oracle.run(body).value == ["_pickle.UnpicklingError", "mylib.OwnError"]
    oracle.nat(before + "torch.save(torch.ones(2), root + '/late.pt')")
    (folder / "late").write_text("good")
    assert oracle.run(body).value == ["loaded", "loaded"]


def test_retry_in_one_process(oracle: Oracle, before: str, folder: Path) -> None:
    body = (
        before
        + FACE
        + """
import os, tiny
from transformers import BertForMaskedLM
where = root + "/later" + str(os.getpid())
value = [face(lambda: BertForMaskedLM.from_pretrained(where))[0]]
tiny.bert(where, seed=2)
value.append(type(BertForMaskedLM.from_pretrained(where)).__name__)
value.append(face(lambda: torch.load(where + "/t.pt"))[0])
torch.save({"x": torch.ones(2)}, where + "/t.pt")
value.append(torch.load(where + "/t.pt")["x"].tolist())
"""
    )
    right = ["builtins.OSError", "BertForMaskedLM", "builtins.FileNotFoundError", [1.0, 1.0]]
    assert oracle.nat(body).value == right
    assert oracle.run(body).value == right


def test_the_error_behind_a_hit(oracle: Oracle, before: str, folder: Path) -> None:
    """Cached, then the file goes bad, then good again."""
    body = before + FACE + "value = face(lambda: load(mylib.fails, root + '/words'))"
    assert oracle.hit(body).value[0] == "loaded"
    (folder / "words").write_text("bad")
    native = oracle.nat(body).value
    assert native[:2] == ["mylib.OwnError", [str(folder / "words"), "17"]] and oracle.run(body).value == native
    (folder / "words").write_text("better")
    assert oracle.run(body).value == oracle.nat(body).value


def test_the_traceback_ends_in_the_loader(oracle: Oracle, before: str, folder: Path) -> None:
    (folder / "bad").write_text("bad")
    run = oracle.run(before + "load(mylib.fails, root + '/bad')", check=False)
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    assert lines[-1] == f"mylib.OwnError: ('{folder / 'bad'}', 17)"
    assert any("mylib.py" in line and "in fails" in line for line in lines)
    assert "During handling of the above exception" not in run.stderr
    assert "direct cause" not in run.stderr


REPORT = """
import io, logging
from transformers import BertModel
from transformers.utils import logging as theirs
theirs.disable_progress_bar()
stream = io.StringIO()
handler = logging.StreamHandler(stream)
handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
logging.getLogger("transformers").addHandler(handler)
m = BertModel.from_pretrained(root + "/m", add_pooling_layer=False)
value = stream.getvalue()
"""


def test_the_load_report_on_a_hit(oracle: Oracle, before: str) -> None:
    native = oracle.nat(before + REPORT)
    run = oracle.hit(before + REPORT)
    assert "cls.predictions" in run.value and "UNEXPECTED" in run.value
    # And on stderr, by transformers' own handler.
    assert "cls.predictions" in native.stderr
    spoken = [line for line in native.stderr.splitlines() if "cls." in line or "UNEXPECTED" in line or "REPORT" in line]
    assert spoken and all(line in run.stderr for line in spoken)


def test_the_load_report_of_a_quiet_notebook(oracle: Oracle, before: str) -> None:
    """Cached by a notebook that listens, asked for by one that does not, and the reverse."""
    quiet = REPORT.replace(
        "theirs.disable_progress_bar()", "theirs.disable_progress_bar()\ntheirs.set_verbosity_error()"
    )
    assert "UNEXPECTED" in oracle.hit(before + REPORT).value
    for _ in range(2):
        run = oracle.run(before + quiet)
        assert run.value == "" and "UNEXPECTED" not in run.stderr
    assert "UNEXPECTED" in oracle.run(before + REPORT).value


LISTEN = """
import logging, warnings
class Keep(logging.Handler):
    def emit(self, record):
        kept.append([record.name, record.levelname, record.getMessage(), record.funcName, record.lineno,
                     record.pathname, record.letters, list(map(str, record.args))])
kept = []
logging.getLogger("mylib").addHandler(Keep())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got = load(mylib.talks, root + "/words")
value = [got, kept, [[w.category.__name__, str(w.message), w.filename == mylib.__file__] for w in caught]]
"""


def test_warnings_and_log_records_of_a_custom_loader(oracle: Oracle, before: str) -> None:
    run = oracle.by(before + LISTEN)
    got, kept, caught = run.value
    assert got == ["abc"]
    assert [record[:4] for record in kept] == [["mylib.reader", "WARNING", "read 3 letters of file", "talks"]]
    assert kept[0][6] == 3
    assert [(kind, text) for kind, text, *_ in caught] == [
        ("DeprecationWarning", "old format"),
        ("UserWarning", "slow: abc"),
    ]


def test_warnings_as_errors(oracle: Oracle, before: str) -> None:
    """A filter that makes a warning an error makes the cached load raise too."""
    plain = before + FACE + "value = face(lambda: load(mylib.talks, root + '/words'))"
    assert oracle.by(plain).value[0] == "loaded"
    strict = (
        before
        + "import warnings\nwarnings.simplefilter('error', UserWarning)\n"
        + FACE
        + ("value = face(lambda: load(mylib.talks, root + '/words'))[:2]")
    )
    native = oracle.nat(strict).value
    assert native == ["builtins.UserWarning", ["slow: abc"]]
    assert oracle.run(strict).value == native
    assert oracle.run(strict).value == native
    assert oracle.by(plain).value[0] == "loaded"


def test_a_warning_that_names_the_caller(oracle: Oracle, before: str) -> None:
    """stacklevel=2: Python shows a DeprecationWarning only where it names the notebook itself, and names the line of
    this call, not of the one that was cached."""

    def said(run: Any) -> list[str]:
        return [line.strip() for line in run.stderr.splitlines() if "DeprecationWarning: old" in line]

    for lines in (0, 3):
        body = before + "\n" * lines + "{}\nimport inspect\nvalue = inspect.currentframe().f_lineno - 2"
        native = oracle.nat(body.format("mylib.talks(root + '/words')"))
        assert said(native) == [f"<run>:{native.value}: DeprecationWarning: old format"]
        for _ in range(2):
            run = oracle.run(body.format("load(mylib.talks, root + '/words')"))
            assert said(run) == [f"<run>:{run.value}: DeprecationWarning: old format"], run.outcomes


def test_a_warning_of_a_loader_that_is_patched_names_the_caller(oracle: Oracle, folder: Path) -> None:
    import torch

    path = folder / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    body = (
        f"import inspect, torch\nvalue = inspect.currentframe().f_lineno; torch.load({str(path)!r}, weights_only=False)"
    )
    for run in (oracle.nat(body), oracle.run(body), oracle.run(body)):
        places = [line for line in run.stderr.splitlines() if "TorchScript archive" in line]
        assert [place.partition(" ")[0] for place in places] == [f"<run>:{run.value}:"], run.stderr


def test_warnings_on_stderr(oracle: Oracle, before: str) -> None:
    run = oracle.by(before + "load(mylib.talks, root + '/words')\nvalue = 1")
    assert run.stderr.count("UserWarning: slow: abc") == 1
    assert run.stderr.count("read 3 letters of file") == 1


MAKES = """
import torch


def dense(path):
    with open(path) as file:
        return torch.eye(int(file.read()))


def sparse(path):
    return dense(path).to_sparse_csr()


def quantised(path):
    return torch.quantize_per_tensor(dense(path), 0.1, 10, torch.quint8)
"""

HEARD = """
import warnings, makes

def said(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(%r)
        make()
    return [[w.category.__name__, str(w.message), w.filename, w.lineno] for w in caught]

value = [said(lambda: %s) for _ in range(2)]
"""


@pytest.mark.parametrize("filter", ["always", "default"])
@pytest.mark.parametrize(
    "call",
    [
        "torch.load(root + '/csr.pt')",
        "torch.load(root + '/quantised.pt')",
        "load(makes.sparse, root + '/three')",
        "load(makes.quantised, root + '/three')",
    ],
)
def test_what_torch_says_once(oracle: Oracle, before: str, folder: Path, call: str, filter: str) -> None:
    """Making the first sparse or quantised tensor of a process: a restore makes one as the load does."""
    (folder / "makes.py").write_text(MAKES)
    (folder / "two").write_text("2")
    (folder / "three").write_text("3")
    oracle.nat(
        before
        + """
import makes
torch.save(makes.sparse(root + "/three"), root + "/csr.pt")
torch.save(makes.quantised(root + "/three"), root + "/quantised.pt")
"""
    )
    first, second = oracle.by(before + HEARD % (filter, call)).value  # on a busy machine so small a hit is "not faster"
    assert first and not second
    # An entry that was made where torch had said it already.
    call = call.replace("three", "two")
    (folder / "csr.pt").touch()
    (folder / "quantised.pt").touch()
    native = oracle.nat(before + HEARD % (filter, call)).value
    deaf = "makes.sparse(root + '/three')\nmakes.quantised(root + '/three')\ntorch.load(root + '/quantised.pt')\n"
    assert oracle.run(before + "import makes\n" + deaf + HEARD % (filter, call)).value == [[], []]
    run = oracle.run(before + HEARD % (filter, call))
    assert "miss" not in run.outcomes and run.value[1] == []
    assert [heard[:2] for heard in run.value[0]] == [heard[:2] for heard in native[0]]

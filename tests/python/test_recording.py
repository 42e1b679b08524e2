# SPDX-License-Identifier: MIT
"""What one native load read, said, and left changed; and that watching it changes nothing."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import settle
from overmind import _core, dependencies, journal, key, replay
from overmind.loader import Loader
from overmind.recording import Recording
from overmind.records import LoadRecord
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

GENERIC = Loader(name="overmind.load")
MODEL = Loader(
    name="transformers.PreTrainedModel.from_pretrained",
    target="pretrained_model_name_or_path",
    hub=True,
    libraries=("transformers", "torch"),
)
SAFETENSORS = Loader(name="safetensors.torch.load_file", target="filename", libraries=("torch", "safetensors"))
PIPELINE = Loader(name="pipeline", embeds_modules=True)
TORCH = Loader(name="torch.load", target="f", libraries=("torch",))


@pytest.fixture(autouse=True)
def old_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file may be newer than the process that tests it, right after it was edited."""
    monkeypatch.setattr("overmind.modules.PROCESS_START_NS", 1 << 62)


def work(*args: Any, **kwargs: Any) -> None:
    """Stands for a loader; what it does is given by the test."""


def request(*args: Any, **kwargs: Any) -> key.Request:
    return key.make_request(GENERIC, work, args, kwargs, None)


def record(load: Callable[[], Any], *args: Any, **kwargs: Any) -> Recording:
    with Recording(request(*args, **kwargs)) as recording:
        load()
    return recording


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    settle(folder)
    return folder


def paths(recording: Recording) -> set[str]:
    return {dependency[0] for dependency in recording.dependencies}


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertTokenizerFast, BertConfig])
def test_every_file_of_a_model_is_a_dependency(tiny: Path, kind: Any) -> None:
    call = key.make_request(MODEL, kind.from_pretrained, (str(tiny),), {}, kind)
    with Recording(call) as recording:
        kind.from_pretrained(str(tiny))
    assert recording.refusal is None
    assert {str(tiny), *map(str, tiny.iterdir())} <= paths(recording)
    json.dumps([recording.dependencies, recording.messages])
    assert dependencies.changed(recording.dependencies) is None


def test_a_file_that_only_rust_opens_is_a_dependency(tmp_path: Path) -> None:
    file = str(tmp_path / "w.safetensors")
    save_file({"w": torch.zeros(4)}, file)
    settle(tmp_path)
    with Recording(key.make_request(SAFETENSORS, load_file, (file,), {}, None)) as recording:
        load_file(file)
    assert recording.refusal is None
    assert file in paths(recording)
    save_file({"w": torch.ones(4)}, file)
    assert dependencies.changed(recording.dependencies) is not None


def test_a_mapped_file_is_a_dependency_of_a_load_that_does_not_name_it(tmp_path: Path) -> None:
    file = str(tmp_path / "w.safetensors")
    save_file({"w": torch.zeros(1 << 16)}, file)
    settle(tmp_path)
    kept = []
    recording = record(lambda: kept.append(load_file(file)))
    assert recording.refusal is None
    assert file in paths(recording)


def test_a_relative_path_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("x")
    settle(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "data") in paths(record(lambda: Path("data").read_text()))


@pytest.mark.parametrize(
    ("library", "draw"),
    [
        ("random", random.random),
        ("numpy", lambda: np.random.rand()),
        ("torch", lambda: torch.rand(1)),
        ("torch", lambda: torch.manual_seed(0)),
        ("random", lambda: random.seed(1)),
        ("numpy", lambda: np.random.seed(1)),
    ],
)
def test_random_numbers_that_a_load_draws_are_noticed(library: str, draw: Callable[[], Any]) -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        assert library in (record(draw).refusal or "")
        assert record(lambda: random.Random(1).random()).refusal is None
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


IMPORTING = """
import sys
from overmind import _core, key, modules
modules.PROCESS_START_NS = 1 << 62
from overmind.loader import Loader
from overmind.recording import Recording
def work(body):
    exec(body)
import types
home = types.ModuleType("home"); home.__file__ = sys.argv[0]
for body in ("import torch, numpy", "import torch; torch.rand(1)", "import torch; torch.manual_seed(0)",
             "import numpy.random; numpy.random.rand()", "import numpy.random; numpy.random.seed(0)"):
    import os
    pid = os.fork()
    if pid: os.waitpid(pid, 0); continue
    request = key.make_request(Loader("x"), len, ((),), {}, None)
    with Recording(request) as recording:
        work(body)
    print(recording.refusal, flush=True)
    os._exit(0)
"""


def test_a_library_that_the_load_itself_imports_is_watched_as_well(tmp_path: Path) -> None:
    lines = run(IMPORTING).splitlines()
    assert lines[0] == "None"
    assert ["torch" in line for line in lines[1:3]] == [True, True]
    assert ["numpy" in line for line in lines[3:5]] == [True, True]


@pytest.mark.parametrize("moved", [None, "overmind_newest", "json"])
def test_own_modules_that_a_load_imports_are_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: str | None
) -> None:
    """Also when the load takes an older module out of sys.modules and puts it back, the newest one say."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("overmind_newest", "overmind_within"):
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    settle(tmp_path)
    for name in ("overmind_within", "overmind_newest"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("overmind_newest")

    def load() -> None:
        importlib.import_module("overmind_within")
        if moved is not None:
            sys.modules[moved] = sys.modules.pop(moved)

    recording = record(load)
    assert recording.refusal is None
    assert str(tmp_path / "overmind_within.py") in paths(recording)
    assert str(tmp_path / "overmind_newest.py") not in paths(recording)


def run(source: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    prelude = "import overmind; overmind.__path__ = " + repr(list(sys.modules["overmind"].__path__)) + "\n"
    done = subprocess.run([sys.executable, "-c", prelude + source], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def changed_argument(change: Callable[[Any], Any], value: Any) -> str:
    return record(lambda: change(value), thing=value).refusal or ""


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"": None}, lambda files: files.update({"": b"filled"})),  # torch.jit.load's _extra_files
        (lambda: [[1]], lambda parts: parts[0].append(2)),
        (lambda: [[1]], lambda parts: parts.__setitem__(0, [1])),  # equal, and another object
        (lambda: {"a": 1, "b": 2}, lambda parts: parts.update(a=parts.pop("a"))),  # another order
        (lambda: {1}, lambda parts: parts.add(2)),
        (lambda: bytearray(b"1"), lambda parts: parts.extend(b"2")),
        (lambda: BertConfig(), lambda config: setattr(config, "x", 1)),
        (lambda: torch.zeros(2), lambda tensor: tensor.add_(1)),
        (lambda: [1], lambda parts: parts.append(object())),
    ],
)
def test_k06_a_load_that_changes_its_arguments_is_not_cached(make: Any, change: Any) -> None:
    assert "changed its argument" in changed_argument(change, make())
    assert "'thing'" in changed_argument(change, make())
    assert changed_argument(lambda value: None, make()) == ""


def test_k06_an_embedded_module_that_the_load_changes_is_noticed() -> None:
    vae = torch.nn.Linear(2, 2)
    with Recording(key.make_request(PIPELINE, work, (), {"vae": vae}, None)) as recording:
        vae.eval()
    assert recording.refusal == "it changed its argument 'vae'"


def test_k06_native_loads_leave_their_config_alone(tiny: Path) -> None:
    config = BertConfig.from_pretrained(str(tiny))
    kwargs = {"config": config, "key_mapping": {"x": "y"}}
    with Recording(key.make_request(MODEL, BertForMaskedLM.from_pretrained, (tiny,), kwargs, BertForMaskedLM)) as seen:
        BertForMaskedLM.from_pretrained(tiny, **kwargs)
    assert seen.refusal is None


def test_warnings_and_records_are_kept_and_still_shown(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers.test")

    def load() -> None:
        warnings.warn("careful", FutureWarning, stacklevel=1)
        logger.warning("%d missing keys", 3)
        logger.debug("not for anybody")

    with pytest.warns(FutureWarning, match="careful"), caplog.at_level(logging.WARNING):
        recording = record(load)
    assert [record.getMessage() for record in caplog.records] == ["3 missing keys"]
    assert [message[0] for message in recording.messages] == ["w", "l"]
    caplog.clear()
    with pytest.warns(FutureWarning, match="careful") as caught:
        replay.replay(json.loads(json.dumps(recording.messages)))
    assert caught[0].filename == __file__
    assert [record.getMessage() for record in caplog.records] == ["3 missing keys"]


def test_s13_the_load_report_is_kept(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tmp_path)
    BertForMaskedLM.from_pretrained(str(tiny)).bert.save_pretrained(folder)
    settle(tmp_path)
    with Recording(key.make_request(MODEL, BertForMaskedLM.from_pretrained, (folder,), {}, BertForMaskedLM)) as seen:
        BertForMaskedLM.from_pretrained(folder)
    assert any("MISSING" in str(message) for message in seen.messages)
    assert "torch" in (seen.refusal or "")  # the missing weights were drawn


def test_messages_of_an_import_are_left_to_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit imports the module as well: said again besides, its messages would come twice."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"overmind_says_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text("import logging, warnings\nlogging.warning('in')\nwarnings.warn('in')\n")
    settle(tmp_path)

    def load() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            __import__(name)
            logging.warning("out")

    assert [message[3] for message in record(load).messages] == ["out"]


def test_other_settings_of_torch_than_the_key_knows() -> None:
    """Another thread may set them between the key and the load; a load may leave them changed."""
    asked = request()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with Recording(asked) as late:
            torch.set_default_dtype(before)
        with Recording(asked) as leaves:
            torch.set_default_dtype(torch.float64)
    finally:
        torch.set_default_dtype(before)
    for recording in (late, leaves):
        assert recording.refusal is not None and "float64" in recording.refusal


def test_messages_of_threads_that_the_load_starts_are_kept_and_of_others_not() -> None:
    logger = logging.getLogger("library")
    say, said, done = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        say.wait(10)
        logger.warning("from elsewhere")
        said.set()
        done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()

    def load() -> None:
        say.set()
        assert said.wait(10)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(logger.warning, "from a worker").result()

    recording = record(load)
    done.set()
    thread.join()
    assert [message[3] for message in recording.messages] == ["from a worker"]


def hooks() -> tuple[Any, Any]:
    return logging.getLogRecordFactory(), warnings.showwarning


def test_two_loads_at_a_time_keep_apart_and_restore_everything() -> None:
    before = hooks()
    barrier = threading.Barrier(2, timeout=20)
    found: dict[str, list[Any]] = {}

    def one(name: str, rounds: int) -> None:
        def load() -> None:
            barrier.wait()
            logging.getLogger("library").warning(name)
            open(os.devnull).close()
            barrier.wait()

        for _ in range(rounds):
            found[name] = [message[3] for message in record(load).messages]
            assert found[name] == [name]
            barrier.wait()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(one, name, 20) for name in ("a", "b")]:
            future.result(60)
    assert found == {"a": ["a"], "b": ["b"]}
    assert hooks() == before


def test_hooks_that_somebody_put_over_ours_stay_and_work() -> None:
    before = hooks()
    seen: list[str] = []

    def load() -> None:
        inner = logging.getLogRecordFactory()

        def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
            seen.append("theirs")
            return inner(*args, **kwargs)

        logging.setLogRecordFactory(factory)

    try:
        record(load)
        assert logging.getLogRecordFactory() is not before[0]
        recording = record(lambda: logging.getLogger("library").warning("once"))
        assert [message[3] for message in recording.messages] == ["once"]
        assert seen == ["theirs"]
    finally:
        logging.setLogRecordFactory(before[0])
    assert hooks() == before


def test_a_load_inside_a_load_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    settle(tmp_path)
    inner: list[Recording] = []

    def load() -> None:
        def nested() -> None:
            (tmp_path / "data").read_text()
            logging.getLogger("library").warning("inner")

        inner.append(record(nested))

    outer = record(load)
    assert inner[0].dependencies == inner[0].messages == []
    assert str(tmp_path / "data") in paths(outer)
    assert [message[3] for message in outer.messages] == ["inner"]


@pytest.mark.parametrize("error", [OSError("nope"), KeyboardInterrupt(), SystemExit(3)])
def test_s13_exceptions_pass_unchanged_and_everything_is_restored(error: BaseException) -> None:
    before = hooks()

    def load() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        record(load)
    assert raised.value is error
    assert raised.value.__context__ is None
    assert hooks() == before
    assert record(lambda: None).refusal is None, "the next load is recorded as ever"


def test_a_fault_of_the_recording_itself_never_reaches_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hooks()

    def broken() -> Any:
        raise RuntimeError("broken")

    ran = []
    for name in ("start_recording", "stop_recording"):
        with monkeypatch.context() as patch:
            patch.setattr(f"overmind.recording._core.{name}", broken)
            assert "broken" in (record(lambda: ran.append(1)).refusal or "")
        with contextlib.suppress(Exception):
            sys.modules["overmind._core"].stop_recording()
        assert hooks() == before
    assert ran == [1, 1]


def test_a_file_that_changes_during_the_load_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("x")
    settle(tmp_path)

    def load() -> None:
        file.read_text()
        rewrite = os.open(file, os.O_WRONLY)  # as another process would: not this load's own write
        os.write(rewrite, b"y")
        os.close(rewrite)

    assert "data" in (record(load).refusal or "")


def test_a_load_that_leaves_a_file_is_refused(tmp_path: Path) -> None:
    assert "wrote" in (record(lambda: (tmp_path / "out").write_text("x")).refusal or "")

    def spool() -> None:
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            file.write(b"x")

    assert record(spool).refusal is None
    assert record(lambda: io.StringIO().write("x")).refusal is None
    assert builtins.open is open


@pytest.mark.parametrize("name", ["history.jsonl", "launcher.log", "start.lock", "p0123456789abcdef"])
def test_overminds_own_files_are_not_the_loads(runtime: Path, name: str) -> None:
    """A thread that a load started ends a load of its own meanwhile, a kernel asks why, a zygote has learned."""
    folder = Path(_core.config().instance_dir)
    folder.mkdir(mode=0o700)
    own = folder / name
    own.write_text("")

    def work_of_overmind() -> None:
        journal.append(LoadRecord("other.load", "/else", "hit", "", 0.1))
        with own.open("a") as file:
            file.write("x")
        own.read_text()
        os.listdir(folder)

    def load() -> None:
        thread = threading.Thread(target=work_of_overmind)
        thread.start()
        thread.join()

    recording = record(load)
    assert recording.refusal is None
    assert not [path for path in paths(recording) if path.startswith(str(folder))]


def test_a_file_of_overminds_that_the_call_names_counts(runtime: Path) -> None:
    folder = Path(_core.config().instance_dir)
    folder.mkdir(mode=0o700)
    (folder / "log").write_text("x")
    settle(folder)
    assert str(folder / "log") in paths(record(lambda: (folder / "log").read_text(), folder / "log"))


def test_random_state_is_cheap_to_compare() -> None:
    from overmind.recording import _RandomState

    best = min(_timed(lambda: _RandomState().consumed()) for _ in range(50))
    assert best < 0.002, "100 us each way on a quiet machine; the limit leaves room for a busy one"


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun

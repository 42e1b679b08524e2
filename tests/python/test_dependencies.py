# SPDX-License-Identifier: MIT
"""Files, folders and code that a load read: every way in which they change is seen."""

from __future__ import annotations

import importlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import settle
from overmind import dependencies, modules
from overmind.dependencies import Opened, Refused
from overmind.encoding import Uncacheable


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text("{}")
    (folder / "unet" / "weights.bin").write_bytes(b"weights")
    (folder / "untouched").mkdir()
    (folder / "untouched" / "file").write_text("")
    settle(folder)
    settle(folder / "untouched" / "file")
    return folder


def opened(model: Path, *paths: Path, mode: str = "r", generic: bool = False) -> list[list[object]]:
    events = [("open", str(path), mode) for path in paths]
    return Opened(time.time_ns(), [str(model)], [], generic).collect(events)


def rewrite_in_place(path: Path) -> None:
    """The same size, and mtime set back: only ctime tells."""
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "rewritten": lambda m: (m / "config.json").write_text("{} "),
    "rewritten in place": lambda m: rewrite_in_place(m / "config.json"),
    "weights that Rust opened": lambda m: rewrite_in_place(m / "model.safetensors"),
    "in a subfolder": lambda m: rewrite_in_place(m / "unet" / "weights.bin"),
    "deleted": lambda m: (m / "model.safetensors").unlink(),
    "added": lambda m: (m / "adapter_config.json").write_text("{}"),
    "added in a subfolder": lambda m: (m / "unet" / "extra").write_text(""),
    "renamed": lambda m: (m / "config.json").rename(m / "other.json"),
    "replaced": lambda m: os.replace(m / "model.safetensors", m / "config.json"),
    "gone": lambda m: m.rename(m.with_name("elsewhere")),
    "a missing file appears": lambda m: (m.parent / "beside").write_text(""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(model: Path, name: str) -> None:
    found = opened(model, model / "config.json", model / "unet" / "config.json", model.parent / "beside")
    assert dependencies.changed(found) is None
    CHANGES[name](model)
    reason = dependencies.changed(found)
    assert reason is not None
    assert str(model.parent) in reason


@pytest.mark.parametrize("kind", ["shared", "read-only", "private"])
def test_a_file_that_is_mapped_for_writing_is_refused(model: Path, kind: str) -> None:
    """A second write to a page that is dirty already leaves no trace in the file's times."""
    weights = model / "unet" / "weights.bin"
    protection = mmap.PROT_READ if kind == "read-only" else mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE if kind == "private" else mmap.MAP_SHARED
    with weights.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=flags, prot=protection) as mapped:
        file.close()
        if kind == "shared":
            mapped[:1] = b"W"
            settle(weights)
            with pytest.raises(Refused, match=r"weights\.bin is mapped for writing in this process"):
                opened(model, weights)
        else:
            opened(model, weights)
    assert dependencies.changed(opened(model, weights)) is None


def test_what_was_not_read_may_change(model: Path) -> None:
    found = opened(model, model / "config.json")
    (model / "untouched" / "file").write_text("changed")
    (model / "unet" / "config.json").write_text("changed")
    assert dependencies.changed(found) is None


def test_a_file_that_comes_and_goes_leaves_the_folder_the_same(model: Path) -> None:
    found = opened(model, model / "config.json")
    (model / "x").write_text("")
    (model / "x").unlink()
    assert dependencies.changed(found) is None


def test_a_link_that_is_pointed_elsewhere_is_seen(model: Path) -> None:
    link = model.parent / "link"
    link.symlink_to(model / "config.json")
    settle(model)
    found = opened(model.parent / "nothing", link)
    assert dependencies.changed(found) is None
    link.unlink()
    link.symlink_to(model / "unet" / "config.json")
    assert dependencies.changed(found) is not None


def test_a_folder_behind_a_link_counts_whole(model: Path) -> None:
    link = model.parent / "link"
    link.symlink_to("m")
    found = Opened(time.time_ns(), [str(link)], [], False).collect([("open", str(link / "unet" / "config.json"), "r")])
    rewrite_in_place(model / "unet" / "weights.bin")
    assert dependencies.changed(found) is not None


def test_a_file_that_changes_during_the_load_or_just_before_is_refused(model: Path) -> None:
    start = time.time_ns()
    (model / "config.json").write_text("changed")
    with pytest.raises(Refused, match=r"config\.json changed while"):
        Opened(start, [str(model)], [], False).collect([])
    with pytest.raises(Refused, match=r"config\.json changed while"):  # in the same tick of the clock
        Opened(os.stat(model / "config.json").st_ctime_ns + modules.TICK_NS // 2, [str(model)], [], False).collect([])
    settle(model / "config.json")
    Opened(time.time_ns(), [str(model)], [], False).collect([])


def test_a_load_that_writes_is_refused_unless_nothing_is_left_of_it(model: Path) -> None:
    with pytest.raises(Refused, match="wrote"):
        opened(model, model / "config.json", mode="w")
    with pytest.raises(Refused, match="wrote"):
        opened(model, model / "config.json", mode="rb+")
    opened(model, model.parent / "temporary", mode="wb")
    opened(model, model.parent / "x" / "config.lock", Path(os.devnull), mode="w")


def test_devices_and_pipes_are_refused_where_they_are_read(model: Path) -> None:
    pipe = model.parent / "pipe"
    os.mkfifo(pipe)
    settle(pipe)
    with pytest.raises(Refused, match="not a plain file"):
        opened(model, pipe)
    os.mkfifo(model / "pipe")
    settle(model)
    assert dependencies.changed(opened(model)) is None  # beside the files, read by nobody


def test_installed_code_is_known_by_its_version_and_its_data_by_stat(model: Path) -> None:
    import torch

    package = Path(torch.__file__).parent
    events = [("open", str(package / name), "r") for name in ("__init__.py", "version.py", "py.typed")]
    events += [("os.listdir", str(package.parent), ""), ("open", "/proc/self/maps", "r")]
    found = Opened(time.time_ns(), [str(model)], [], False).collect(events)
    beside = {dependency[0] for dependency in found if not str(dependency[0]).startswith(str(model))}
    assert beside == {str(package / "py.typed")}


def test_too_many_files_are_refused(model: Path) -> None:
    for index in range(dependencies.MAX_DEPENDENCIES + 1):
        (model / "untouched" / str(index)).touch()
    settle(model / "untouched" / str(index))
    with pytest.raises(Refused, match=r"too many|more than"):
        opened(model / "untouched")


def test_dependencies_are_json(model: Path) -> None:
    import json

    found = opened(model, model / "config.json", model.parent / "beside")
    assert dependencies.changed(json.loads(json.dumps(found))) is None


# The user's own code. A child process, because the rule is about when this process began.
CODE = """
import os, sys, time
sys.path.insert(0, {folder!r})
from overmind import dependencies
from overmind.encoding import Uncacheable
def wait():
    while time.time_ns() - os.stat({file!r}).st_ctime_ns < 100_000_000: time.sleep(0.01)
"""


def run(tmp_path: Path, body: str) -> str:
    source = CODE.format(folder=str(tmp_path), file=str(tmp_path / "mymod.py")) + body
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def mymod(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("SIZE = 1\n")
    (tmp_path / "mymod.py").write_text("import helper, numpy\nclass Net: size = helper.SIZE\n")
    (tmp_path / "other.py").write_text("")
    settle(tmp_path / "other.py")
    return tmp_path


def test_j06_code_that_is_older_than_the_process_is_watched_with_what_it_uses(mymod: Path) -> None:
    printed = run(mymod, "import mymod, other; print(sorted(d[0] for d in dependencies.of_classes(['mymod'])))")
    assert f"'{mymod}/helper.py'" in printed
    assert f"'{mymod}/mymod.py'" in printed
    assert "other.py" not in printed
    assert "numpy/__init__.py" in printed


def test_j06_code_that_was_edited_after_the_start_is_not_cached(mymod: Path) -> None:
    for name in ("mymod", "helper"):
        body = f"""
import mymod
with open({str(mymod / name)!r} + ".py", "a") as file: file.write("\\n")
try: dependencies.of_classes(["mymod"])
except Uncacheable as error: print(error)
"""
        assert f"source of {name} changed since this kernel started" in run(mymod, body)


RECORDED = "import json, mymod; print(json.dumps(dependencies.of_classes(['mymod'])))"


def test_j06_a_hit_is_right_only_where_the_recorded_source_is_what_runs(mymod: Path) -> None:
    recorded = run(mymod, RECORDED)
    assert run(mymod, f"print(dependencies.changed({recorded}))") == "None"
    assert run(mymod, f"import mymod; print(dependencies.changed({recorded}))") == "None"
    elsewhere = mymod / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mymod.py").write_text("class Net: size = 2\n")
    moved = f"sys.path.insert(0, {str(elsewhere)!r})\n"
    assert "mymod" in run(mymod, f"{moved}print(dependencies.changed({recorded}))")
    assert "mymod" in run(mymod, f"{moved}import mymod; print(dependencies.changed({recorded}))")
    (mymod / "helper.py").write_text("SIZE = 2\n")
    assert "helper.py changed" in run(mymod, f"print(dependencies.changed({recorded}))")


def test_a_kernel_that_began_before_an_edit_does_not_hit_what_was_made_after_it(mymod: Path) -> None:
    body = f"""
import mymod, subprocess, json
time.sleep(0)
with open(mymod.__file__, "a") as file: file.write("\\n")
wait()
made = subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, {str(mymod)!r})\\n"
    "from overmind import dependencies\\n" + {RECORDED!r}], capture_output=True, text=True, check=True).stdout
print(dependencies.changed(json.loads(made)))
"""
    assert "changed since this kernel started" in run(mymod, body)


def test_the_notebook_s_own_names_are_refused() -> None:
    with pytest.raises(Uncacheable, match="notebook"):
        dependencies.of_classes(["__main__"])


def test_installed_packages_are_known_by_their_init() -> None:
    found = dependencies.of_classes(["torch.nn.modules.linear", "torch._utils", "collections", "builtins"])
    assert [os.path.basename(os.path.dirname(str(dependency[0]))) for dependency in found] == ["torch"]


def test_a_process_start_is_before_now_and_after_boot() -> None:
    assert 0 < time.time_ns() - modules.PROCESS_START_NS < time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 10**9
    began = time.time_ns()
    source = "import time, importlib; from overmind import modules; print(modules.PROCESS_START_NS)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True)
    assert began - 3 * modules.TICK_NS < int(done.stdout) < time.time_ns()


def test_looking_at_dependencies_imports_nothing(model: Path) -> None:
    found = opened(model)
    importlib.invalidate_caches()
    before = set(sys.modules)
    dependencies.changed(found)
    assert set(sys.modules) == before

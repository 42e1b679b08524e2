# SPDX-License-Identifier: MIT
"""The tree itself: what is registered is what is there, layers point downwards, stubs tell the truth."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from fresh import Fresh

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ipython_magic" / "overmind"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".cc", ".h"))


def includes(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text())


@pytest.mark.parametrize("folder", ["tests/core", "tests/fuzz"])
def test_every_test_file_is_registered(folder: str) -> None:
    registered = set(re.findall(r"\b(\w+\.cc)\b", (ROOT / folder / "CMakeLists.txt").read_text()))
    registered |= {
        f"{name}.cc" for name in re.findall(r"\b(fuzz_\w+)\b", (ROOT / folder / "CMakeLists.txt").read_text())
    }
    there = {path.name for path in (ROOT / folder).glob("*.cc")}
    assert there and there == registered & there | (registered if folder == "tests/core" else there)


@pytest.mark.parametrize("folder", ["core", "kernel_ext"])
def test_every_source_is_built_once(folder: str) -> None:
    words = re.findall(r"\b([\w/]+\.cc)\b", (ROOT / folder / "CMakeLists.txt").read_text())
    there = sorted(path.name for path in (ROOT / folder).glob("*.cc"))
    assert sorted(words) == there


def test_every_core_source_has_its_test() -> None:
    """One GoogleTest file a source, but for the program's main and what needs a process (tests/system)."""
    exempt = {"main", "spawn", "store", "keeper", "event_bus", "log"}
    tested = {path.name.removesuffix("_test.cc") for path in (ROOT / "tests" / "core").glob("*_test.cc")}
    assert {path.stem for path in (ROOT / "core").glob("*.cc")} - exempt <= tested
    assert tested <= {path.stem for path in sources("core")}


def test_core_knows_neither_python_nor_torch() -> None:
    for path in sources("core"):
        for name in includes(path):
            assert not re.match(r"(Python\.h|pybind11|torch|ATen|c10|kernel_ext|ipython_magic|tests)", name), (
                f"{path}: {name}"
            )


def test_nothing_includes_upward() -> None:
    for path in sources("kernel_ext"):
        for name in includes(path):
            assert not name.startswith(("ipython_magic", "tests")), f"{path}: {name}"
    torch_only = {
        path.name
        for path in sources("kernel_ext")
        if any(re.match(r"(torch|ATen|c10)/", name) for name in includes(path))
    }
    linked = re.search(r"pybind11_add_module\(_torch([^)]*)\)", (ROOT / "kernel_ext" / "CMakeLists.txt").read_text())
    assert linked is not None
    of_core = re.search(r"pybind11_add_module\(_core([^)]*)\)", (ROOT / "kernel_ext" / "CMakeLists.txt").read_text())
    assert of_core is not None and not torch_only & set(of_core.group(1).split()), "_core must import without torch"


def test_headers_are_included_by_their_full_name() -> None:
    for path in [*sources("core"), *sources("kernel_ext"), *sources("tests")]:
        own = re.findall(r'#\s*include\s*"([^"]+)"', path.read_text())
        for name in own:
            assert (ROOT / name).is_file(), f"{path} includes {name}"


def test_every_file_says_its_licence() -> None:
    python = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    for path in [*sources("core"), *sources("kernel_ext"), *sources("tests"), *python]:
        text = path.read_text()
        assert not text or text.startswith(("// SPDX-License-Identifier: MIT\n", "# SPDX-License-Identifier: MIT\n")), (
            path
        )


STUBS = pytest.mark.parametrize("stub", sorted(PACKAGE.glob("*.pyi")), ids=lambda path: path.stem)


def stubbed(stub: Path) -> list[str]:
    """Every name that the stub has, members with their class. TypedDicts exist for type checkers only."""
    names = []
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef):
            if any(isinstance(base, ast.Name) and base.id == "TypedDict" for base in node.bases):
                continue
            names += [f"{node.name}.{name}" for name in map(_name, node.body) if name and name != "__init__"]
        names += [name for name in [_name(node)] if name]
    return names


@STUBS
def test_stubs_and_modules_have_the_same_names(stub: Path, fresh: Fresh) -> None:
    """In a process of its own: _torch needs torch's libraries."""
    names = stubbed(stub)
    run = fresh.run(
        f"""
        import importlib, operator, torch
        module = importlib.import_module("overmind.{stub.stem}")
        def has(name):
            try:
                operator.attrgetter(name)(module)
            except AttributeError:
                return False
            return True
        value = [[name for name in {names!r} if not has(name)], [name for name in vars(module) if name[0] != "_"]]
        """,
        on=False,
    )
    missing, public = run.value
    assert missing == [], "the stub promises what the module has not"
    assert set(public) <= set(names), "the module has what the stub hides"


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def test_one_file_reads_the_environment() -> None:
    """core/config.cc reads OVERMIND_*; nothing else of core but what a path or a program needs."""
    for path in [*sources("core"), *sources("kernel_ext")]:
        text = path.read_text()
        for name in re.findall(r'getenv\(\s*"?(\w+)', text):
            assert path.name == "config.cc" or not name.startswith("OVERMIND"), f"{path}: {name}"
        assert path.name == "config.cc" or not re.search(r'"OVERMIND_\w+"', text), f"{path} names a variable of ours"
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                text = ast.get_source_segment(path.read_text(), node) or ""
                near = path.read_text().splitlines()[node.lineno - 1]
                assert "OVERMIND" not in near, f"{path}:{node.lineno}: {text}"
            if isinstance(node, ast.Constant) and node.value in _VARIABLES:
                raise AssertionError(f"{path}:{node.lineno} names {node.value}")


_VARIABLES = ("OVERMIND_DISABLE", "OVERMIND_RUNTIME_DIR", "OVERMIND_BUDGET", "OVERMIND_LOG")


def test_no_test_sleeps_for_a_fixed_time() -> None:
    """`time.sleep` in a test is only the step of a loop with a deadline, a hundredth of a second."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
                (step,) = node.args
                long = isinstance(step, ast.Constant) and float(step.value) > 0.1  # type: ignore[arg-type]
                assert not long, f"{path}:{node.lineno} sleeps"

"""Imports point one way: what a package may import, and who may read the environment. Read from the source, so nothing has to run."""
from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tokamak"

# package -> the packages it may import besides itself; the single files below any of them are COMMON
ALLOWED = {
    "ir": set(),
    "capture": {"ir"},
    "fuse": {"ir"},
    "schedule": {"ir", "fuse"},
    "codegen": {"ir", "fuse", "schedule", "capture", "runtime"},
    "runtime": set(),
    "tools": {"ir", "capture", "fuse", "schedule", "codegen", "runtime", "backend", "target", "trace", "check"},
    "backend": {"ir", "capture", "fuse", "schedule", "codegen", "runtime", "target", "trace", "check", "garbage", "nesting"},
    "check": {"ir", "capture", "fuse", "nesting"},
    "trace": {"tools"},
    "target": set(),
    "garbage": set(),
    "nesting": set(),
    "options": set(),
    "errors": set(),
    "log": set(),
}
COMMON = {"errors", "options", "log"}
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def part(path: Path) -> str:
    """The package, or top-level file, that `path` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> set[str]:
    """Dotted names of everything that `path` imports, absolute."""
    package = ("tokamak", *path.relative_to(PACKAGE).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            found.update({f"{module}.{a.name}" for a in node.names})
    return found


@cache
def parts_imported(path: Path) -> set[str]:
    """The parts of tokamak that `path` imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("tokamak.")} & {part(f) for f in FILES} - {part(path)}


@pytest.mark.parametrize("path", [f for f in FILES if part(f) in ALLOWED], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    assert parts_imported(path) <= ALLOWED[part(path)] | COMMON


def test_every_part_has_a_rule():
    assert {part(f) for f in FILES} - {"__init__", "__main__"} <= set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_defines_a_name_once(path):
    """Functions of a kernel find each other when they are compiled: one that comes later would take the place of its namesake."""
    names = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    assert len(names) == len(set(names))


def test_lines_are_at_most_150_columns_wide():
    files = [f for folder in ("tokamak", "tests", "benchmarks", "examples", "docs") for f in sorted((PACKAGE.parent / folder).rglob("*.py"))]
    assert not [f"{f.relative_to(PACKAGE.parent)}:{n}" for f in files for n, line in enumerate(f.read_text().splitlines(), 1) if len(line) > 150]


def test_only_the_hook_between_stages_knows_the_tools():
    """No stage depends on what looks at it: the package's front and the hook, which hands over what stages made, are all that import tools."""
    assert {part(f) for f in FILES if "tools" in parts_imported(f)} - {"__init__", "__main__"} == {"trace"}
    assert {part(f) for f in FILES if "trace" in parts_imported(f)} - {"tools"} == {"backend"}


@pytest.mark.parametrize("path", [f for f in FILES if part(f) in ("ir", "fuse", "schedule")], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_language_and_its_plans_know_nothing_of_torch(path):
    assert not any(name.split(".")[0] == "torch" for name in imported(path))


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "options.py"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_options_reads_the_environment(path):
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
             and node.value.id == "os"} | {n.split(".")[-1] for n in imported(path) if n.startswith("os.")}
    assert not names & {"environ", "getenv", "environb", "putenv"}

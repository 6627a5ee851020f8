"""Check what has changed, in 20 s of CPU.

Run `python -m tests.support.check` or `make check`.

Ruff, the import contracts, mypy and the complexity of functions are checked as `make lint` does;
their caches make that a matter of seconds. Then the tests nearest to the changed files run, until
they have used their share of CPU. Changed test files come first, then those with a module's name,
then those that import it. Tests that start services or take minutes do not run.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import grimp

from tests.support.processes import ROOT

PACKAGE = "onnx_ops"
TESTS = Path("tests")
TEST_CPU_S = 8.0
"""CPU seconds after which no further test starts.

The last test, and the rest of a check, take up to 12 s.
"""
MAX_TEST_FILES = 30
"""Most test files of a check.

Collecting more takes a considerable part of `TEST_CPU_S`.
"""
_BIN = Path(sys.executable).parent
STEPS: Mapping[str, Sequence[str]] = {
    "format": (str(_BIN / "ruff"), "format", "--check", "--quiet", "."),
    "ruff": (str(_BIN / "ruff"), "check", "--quiet", "."),
    "imports": (str(_BIN / "lint-imports"),),
    # mypy's daemon reports errors that `mypy` does not: it follows imports that are configured to
    # be skipped.
    "mypy": (str(_BIN / "mypy"),),
    "complexity": (sys.executable, "-m", "tests.support.complexity"),
}


def list_changes(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from a commit, including new files.

    Deleted files are included too, because the modules that use them must change.
    """
    commands = (
        ["git", "diff", "--name-only", "-z", base, "--"],
        ["git", "ls-files", "-z", "-o", "--exclude-standard"],
    )
    outputs = (
        subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        for command in commands
    )
    return sorted({name for output in outputs for name in output.stdout.split("\0") if name})


class NearTests:
    """The test files that are nearest to changed files.

    Args:
        importers: modules of the package that import a module directly.
    """

    def __init__(self, root: Path, importers: Mapping[str, Collection[str]]) -> None:
        self._root, self._importers = root, importers
        self._imports: dict[Path, set[str]] = {}

    @cached_property
    def _texts(self) -> dict[Path, str]:
        paths = sorted((self._root / TESTS).rglob("*.py"))
        return {path.relative_to(self._root): path.read_text(encoding="utf-8") for path in paths}

    def choose(self, changes: Iterable[str]) -> list[str]:
        """Return test files, the nearest first."""
        ranks: dict[Path, tuple[int, bool, int]] = {}
        for change in changes:
            room = _find_test_folder(Path(change))
            for rank, path in self._rank(Path(change)):
                # At the same distance, tests of the same folder come first. Then come tests that
                # import less, because they are more specific.
                key = rank, room not in path.parents, len(self._read_imports(path))
                ranks[path] = min(key, ranks.get(path, key))
        return [str(path) for path in sorted(ranks, key=lambda path: (ranks[path], path))]

    def _rank(self, change: Path) -> Iterator[tuple[int, Path]]:
        """Yield the test files of a changed file with their distance.

        Test files that are named for the module have distance 1.
        """
        if _is_test(change):
            if change in self._texts:
                yield 0, change
        elif change.suffix == ".py":
            yield from ((1, path) for path in self._find_named(change))
            yield from self._find_importing(_name_module(change))
            # The other tests of the module's subpackage come last. They can still reach the module,
            # for example through a command or a plug-in that they name.
            if change.parts[0] == PACKAGE:
                yield from (
                    (9, path)
                    for path in self._list_tests()
                    if path.parent == _find_test_folder(change)
                )
        else:
            pattern = re.compile(rf"\b{re.escape(change.name)}")
            yield from (
                (1, path) for path in self._list_tests() if pattern.search(self._texts[path])
            )

    def _list_tests(self) -> list[Path]:
        return [path for path in self._texts if _is_test(path)]

    def _find_named(self, change: Path) -> Iterator[Path]:
        """Yield `tests/ROOM/**/test_*_NAME*.py` for `onnx_ops/ROOM/**/NAME.py`."""
        if change.parts[0] == PACKAGE:
            folder, name = (
                _find_test_folder(change),
                change.parent.name if change.stem == "__init__" else change.stem,
            )
            pattern = re.compile(rf"_{re.escape(name)}(_|$)")
            for path in self._list_tests():
                is_near = path.parent == folder if folder == TESTS else folder in path.parents
                if is_near and pattern.search(path.stem):
                    yield path

    def _find_importing(self, module: str) -> Iterator[tuple[int, Path]]:
        """Yield the tests that depend on a module with their distance.

        Tests that import the module have distance 2. Tests that import a module that imports it
        have distance 3. If there are none, the search continues with the next level of importers,
        and so on.
        """
        modules, seen, distance, has_tests = {module}, {module}, 2, False
        while modules and (distance <= 3 or not has_tests):
            paths = [
                path
                for path in self._texts
                if not modules.isdisjoint(self._read_candidates(path, modules))
            ]
            tests = [path for path in paths if _is_test(path)]
            yield from ((distance, path) for path in tests)
            has_tests = has_tests or bool(tests)
            helpers = {_name_module(path) for path in paths}
            modules = (
                helpers | {name for one in modules for name in self._importers.get(one, ())}
            ) - seen
            seen |= modules
            distance += 1

    def _read_candidates(self, path: Path, modules: Collection[str]) -> set[str]:
        """Return the imports of a test file whose text may name one of the modules.

        For other files the result is empty, because parsing all files takes seconds.
        """
        text = self._texts[path]
        is_candidate = any(name.rpartition(".")[2] in text for name in modules)
        return self._read_imports(path) if is_candidate else set()

    def _read_imports(self, path: Path) -> set[str]:
        if path not in self._imports:
            self._imports[path] = set(_list_imports(self._texts[path]))
        return self._imports[path]


def _find_test_folder(change: Path) -> Path:
    """Return the test folder of the room of a changed file."""
    return TESTS / change.parts[1] if len(change.parts) > 2 else TESTS


def _is_test(path: Path) -> bool:
    return TESTS in path.parents and path.name.startswith("test_") and path.suffix == ".py"


def _name_module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _list_imports(text: str) -> Iterator[str]:
    """Yield the modules that a text imports anywhere.

    An imported name is yielded too, because it may be a module.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_importers() -> dict[str, set[str]]:
    """Return the modules of the package that import each of its modules directly."""
    graph = grimp.build_graph(PACKAGE, cache_dir=str(ROOT / ".import_linter_cache"))
    return {
        module: set(graph.find_modules_that_directly_import(module)) for module in graph.modules
    }


def count_child_cpu_s() -> float:
    """Return the CPU seconds of the processes that this one has waited for.

    They include user and system time.
    """
    times = os.times()
    return times.children_user + times.children_system


def run_step(name: str, command: Sequence[str]) -> bool:
    """Run a command, print its output if it fails, and return whether it succeeded."""
    before = count_child_cpu_s()
    result = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        sys.stdout.write(result.stdout)
    _report(
        f"{name}: {'failed' if result.returncode else 'ok'}, {count_child_cpu_s() - before:.1f} "
        "s of CPU"
    )
    return not result.returncode


def run_tests(files: Sequence[str], cpu_s: float) -> bool:
    """Run test files until they have used some seconds of CPU.

    Return whether none failed.
    """
    if not files:
        _report("tests: none is near to the changed files")
        return True
    if len(files) > MAX_TEST_FILES:
        _report(f"tests: the nearest {MAX_TEST_FILES} of {len(files)} files")
    before = count_child_cpu_s()
    options = ["-q", "-m", "not nightly and not services", "-p", "no:randomly"]
    budget = ["-p", "tests.support.cpu_limit", "--cpu-limit", str(cpu_s)]
    command = [sys.executable, "-m", "pytest", *options, *budget, *files[:MAX_TEST_FILES]]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    # Exit code 5: all tests of these files are excluded, as they start services or take minutes.
    has_passed = code in (0, 5)
    _report(
        f"tests: {'ok' if has_passed else 'failed'}, {count_child_cpu_s() - before:.1f} s of CPU"
    )
    return has_passed


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Check the files that have changed; return 1 if something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", default="HEAD", help="commit that the files are compared with (default: HEAD)"
    )
    parser.add_argument(
        "--cpu", type=float, default=TEST_CPU_S, metavar="S", help="CPU seconds of the tests"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the test files, nearest first, and run nothing"
    )
    options = parser.parse_args()
    files = NearTests(ROOT, read_importers()).choose(list_changes(options.base))
    if options.list:
        _report("\n".join(files))
        return 0
    results = [run_step(name, command) for name, command in STEPS.items()]
    results.append(run_tests(files, options.cpu))
    own = os.times()
    _report(
        f"{'ok' if all(results) else 'FAILED'}, "
        f"{count_child_cpu_s() + own.user + own.system:.1f} s of CPU"
    )
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Plant faults in a copy of the package, and report which tests detect each.

    python -m tests.support.mutants --list
    python -m tests.support.mutants --record MAP [-- PYTEST-OPTIONS]
    python -m tests.support.mutants [--map MAP] [--out RESULTS] [--only ID ...] [--rooms ROOM ...]
    [-- PYTEST-OPTIONS]

The faults are in `mutants.toml`, and are planted one at a time. For each one, the tests that
executed its lines run first (`--map`), the cheapest first; then those of its room, until one fails.
A test counts only if it passes without the fault. A run that takes too long, or whose process
crashes, detects the fault too, and is reported as such.

Exit code: 0 if every fault is detected, 1 if one is not, 2 if the table or an argument is wrong.
With `--record`, it is that of pytest.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.mutants_plugin import CONTEXTS, FAILURES, PACKAGE, SELECTION

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")
QUICK_S = 15.0
"""Recorded seconds of the tests that run first.

Most faults are detected by them.
"""
LIMIT_S = 600.0
"""Time limit of a run of pytest.

The limit is higher if the recorded tests take long.
"""
MOST_TESTS = 250
"""Most tests that are chosen by the lines of a fault.

If more tests execute a line, most of them are not about it.
"""

ELSEWHERE_S = 2.0
"""Seconds that are added for a test of another room.

The servers that its folder shares may have to start for it.
"""

_PLUGIN = "tests.support.mutants_plugin"
_RUN = "PYTHON_MUTANTS_RUN"
"""Variable that marks the processes of a run.

A server under test inherits only variables with such a name.
"""
_WHOLE_FILES = ("tests/e2e/", "tests/docs/")
"""Folders in which the tests of a file depend on each other.

Such a file runs as a whole, in a separate run.
"""
_OPTIONS = ("-q", "--maxfail=3", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider")
_FAILED, _NOTHING = 1, (0, 5)
"""Exit codes of pytest.

The first means failed tests. The others mean that all passed, or that none was selected.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One small change that breaks the package.

    `file` is relative to the package. `old` occurs there once.
    """

    id: str
    file: str
    kind: str
    what: str
    old: str
    new: str
    room: str

    @property
    def path(self) -> str:
        return f"{PACKAGE}/{self.file}"

    def apply(self, text: str) -> str:
        return text.replace(self.old, self.new)

    def scopes(self, text: str) -> Iterator[range]:
        """Yield ranges of lines around the fault, the smallest first.

        They are the changed lines, the smallest statement around them, and the whole file.
        """
        first = text.count("\n", 0, text.index(self.old)) + 1
        lines = range(first, first + len(self.old.splitlines()))
        yield lines
        ends = (
            (node.end_lineno - node.lineno, node.lineno, node.end_lineno)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.stmt)
            and node.end_lineno
            and node.lineno <= lines[0]
            and node.end_lineno >= lines[-1]
        )
        _, start, end = min(ends, default=(0, lines[0], lines[-1]))
        yield range(start, end + 1)
        yield range(1, text.count("\n") + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """Whether a fault was detected.

    `how` is tests, timeout, crash or empty. `tests` are the first ids that failed. `fallback` is
    true if the tests of the room ran too after those of the lines had passed.
    """

    id: str
    detected: bool
    how: str = ""
    tests: tuple[str, ...] = ()
    seconds: float = 0.0
    fallback: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMap:
    """Recorded seconds and lines of tests.

    `seconds` maps a test id to its seconds. `lines` maps a file and a line to the numbers of the
    tests that executed it.
    """

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[str, Sequence[int]]]

    def select(self, fault: Fault, text: str, room: Sequence[str], budget_s: float) -> list[str]:
        """Return the cheapest tests that executed the changed lines, file by file.

        They take at most `budget_s` seconds. `room` are the files and folders of the fault's room.
        If no test executed the lines, the lines around them are used. An example is a line that
        runs while a module is imported.
        """
        ids, by_line = list(self.seconds), self.lines.get(fault.path, {})
        numbers = set[int]()
        for scope in fault.scopes(text):
            numbers = numbers or {number for line in scope for number in by_line.get(str(line), ())}
        costs = {
            ids[number]: self.expected_s(_runnable(_file_of(ids[number]), [ids[number]]))
            for number in numbers
        }
        for test in costs:
            costs[test] += 0.0 if test.startswith(tuple(room)) else ELSEWHERE_S
        cheapest = sorted(costs, key=lambda test: costs[test])[:MOST_TESTS]
        sums = dict(
            zip(cheapest, itertools.accumulate(costs[test] for test in cheapest), strict=True)
        )
        selected = [test for test in ids if test in sums and sums[test] <= budget_s]
        files = sorted(
            {_file_of(test) for test in selected}, key=lambda file: self.expected_s([file])
        )
        return [
            test
            for file in files
            for test in _runnable(file, [one for one in selected if _file_of(one) == file])
        ]

    def expected_s(self, paths: Sequence[str]) -> float:
        """Return the seconds that tests took when the map was recorded.

        `paths` can be files, folders or single tests.
        """
        wanted = tuple(paths)
        return sum(seconds for test, seconds in self.seconds.items() if test.startswith(wanted))


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _runnable(file: str, tests: list[str]) -> list[str]:
    return [file] if file.startswith(_WHOLE_FILES) else tests


class Tree:
    """A copy of the checkout in which faults are planted.

    It uses the environment of this interpreter.

    Args:
        folder: where the copy is made; an existing copy is updated.
        options: further options of pytest.
        limit_s: longest run of pytest.
        line_map: recorded map; it lengthens the limit of runs that take long without a fault.

    Raises:
        RuntimeError: programs that are started here would not import the package from the copy.
    """

    def __init__(
        self, folder: Path, options: Sequence[str], limit_s: float, line_map: LineMap | None
    ) -> None:
        self.folder = folder
        self._options = options
        self._limit_s = limit_s
        self._line_map = line_map
        self._passes: dict[str, bool] = {}
        """Whether tests pass without a fault, as far as that was tested."""
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = (
            subprocess.run(listed, cwd=ROOT, capture_output=True, check=True)
            .stdout.decode()
            .split("\0")
        )
        for name in names:
            if name and (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).unlink(missing_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        if (ROOT / ".git").is_dir() and not (folder / ".git").exists():
            shutil.copytree(ROOT / ".git", folder / ".git")
        if (ROOT / ".venv").exists() and not (folder / ".venv").exists():
            (folder / ".venv").symlink_to(ROOT / ".venv")
        self._check_imports()

    def _check_imports(self) -> None:
        """Check that programs import the package from the copy.

        An installation in development mode leads to the checkout instead. Programs that start in
        another folder reveal it.
        """
        script = Path(sys.executable).with_name("onnx-ops")
        for command in ([sys.executable, "-P", "-c", f"import {PACKAGE}"], [str(script), "--help"]):
            done = subprocess.run(
                command,
                cwd=tempfile.gettempdir(),
                env={**self._environment(), "PYTHONVERBOSE": "1"},
                capture_output=True,
                text=True,
                check=True,
            )
            if (
                f"{self.folder / PACKAGE}/__init__.py" not in done.stderr
                or f"{ROOT / PACKAGE}/" in done.stderr
            ):
                raise RuntimeError(f"{command[0]} does not import {PACKAGE} from {self.folder}")

    def detect(
        self, fault: Fault, groups: Iterable[Sequence[str]], *, fallback: bool
    ) -> FaultResult:
        """Run groups of tests until one detects the fault.

        A test detects it if it fails with the fault and passes without it.
        """
        begun = time.monotonic()
        for tests in filter(None, groups):
            with self._planted(fault):
                code, failed = self._run(tests)
            if code == _FAILED:
                failed = self._passing(failed)
                is_detected = bool(failed)
            else:
                is_detected = code is None or (code not in _NOTHING and self._is_collected(tests))
            if not is_detected:
                continue
            how = {_FAILED: "tests", None: "timeout"}.get(code, f"crash: exit code {code}")
            seconds = time.monotonic() - begun
            return FaultResult(
                id=fault.id,
                detected=True,
                how=how,
                tests=failed,
                seconds=seconds,
                fallback=fallback,
            )
        return FaultResult(
            id=fault.id, detected=False, seconds=time.monotonic() - begun, fallback=fallback
        )

    def record(self, path: Path) -> int:
        """Run tests under coverage, and write the map of lines to tests.

        Any number of workers can run them.

        Returns:
            pytest's exit code.
        """
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            _PLUGIN,
            "-q",
            "-p",
            "no:randomly",
            *self._options,
        ]
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            environment = {**self._environment(), CONTEXTS: f"{scratch}/map"}
            code = subprocess.run(command, cwd=self.folder, env=environment, check=False).returncode
            parts = [
                json.loads(part.read_text(encoding="utf-8"))
                for part in Path(scratch).iterdir()
                if not part.suffix
            ]
        path.write_text(json.dumps(merge(parts)), encoding="utf-8")
        return code

    @contextlib.contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        path = self.folder / fault.path
        text = path.read_text(encoding="utf-8")
        try:
            _write_source(path, fault.apply(text))
            yield
        finally:
            _write_source(path, text)

    def _passing(self, tests: Sequence[str]) -> tuple[str, ...]:
        """Return those of the tests that pass without a fault."""
        if unknown := [test for test in tests if test not in self._passes]:
            runnable = (one for test in unknown for one in _runnable(_file_of(test), [test]))
            code, failed = self._run(list(dict.fromkeys(runnable)), "--maxfail=0")
            self._passes |= {
                test: code == 0 or (code == _FAILED and test not in failed) for test in unknown
            }
        return tuple(test for test in tests if self._passes[test])

    def _is_collected(self, tests: Sequence[str]) -> bool:
        """Return whether pytest finds these tests without a fault.

        A map may be older than the tests.
        """
        code, _ = self._run(tests, "--collect-only")
        return code in _NOTHING

    def _run(self, tests: Sequence[str], *options: str) -> tuple[int | None, tuple[str, ...]]:
        """Return pytest's exit code, and the ids of the tests that failed.

        The exit code is None after a time-out.
        """
        expected_s = 0.0 if self._line_map is None else self._line_map.expected_s(tests)
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            failures, selection, token = (
                Path(scratch, "failures"),
                Path(scratch, "tests"),
                Path(scratch).name,
            )
            selection.write_text(json.dumps(list(tests)), encoding="utf-8")
            files = dict.fromkeys(map(_file_of, tests))
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-p",
                    _PLUGIN,
                    *_OPTIONS,
                    *self._options,
                    *options,
                    *files,
                ],
                cwd=self.folder,
                env={
                    **self._environment(),
                    FAILURES: str(failures),
                    SELECTION: str(selection),
                    _RUN: token,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(max(self._limit_s, 60 + 3 * expected_s))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_processes(token)
                process.wait()
            failed = failures.read_text(encoding="utf-8").splitlines() if failures.exists() else []
        return code, tuple(dict.fromkeys(failed))

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder)}


def merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one map of lines to tests from the maps of several workers."""
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, list[int]]] = {}
    for part in parts:
        first = len(seconds)
        seconds |= part["seconds"]
        for file, by_line in part["lines"].items():
            into = lines.setdefault(file, {})
            for line, tests in by_line.items():
                into.setdefault(line, []).extend(first + test for test in tests)
    return {"seconds": seconds, "lines": lines}


def _write_source(path: Path, text: str) -> None:
    """Write a source file, and remove its compiled file.

    Python compares file times in whole seconds.
    """
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _end_processes(token: str) -> None:
    """Kill processes that a run has started and not ended.

    They have its token among their variables.
    """
    mark = f"{_RUN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def read_table(path: Path = TABLE) -> tuple[list[Fault], dict[str, list[str]]]:
    """Return the faults, and by room the paths of its tests.

    Raises:
        ValueError: an id repeats, a path is missing, an old text is missing or repeated, or a
            change has no effect or breaks the syntax.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    rooms: dict[str, list[str]] = document["rooms"]
    faults = [Fault(**entry, room=_room_of(entry["file"], rooms)) for entry in document["fault"]]
    problems = [f"{fault.id}: {problem}" for fault in faults if (problem := _problem(fault))]
    ids = [fault.id for fault in faults]
    problems += sorted({f"{one}: the id repeats" for one in ids if ids.count(one) > 1})
    problems += [
        f"{room}: there is no {path}"
        for room, paths in rooms.items()
        for path in paths
        if not _expand(path)
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return faults, rooms


def _room_of(file: str, rooms: Iterable[str]) -> str:
    place = f"{file.removesuffix('.py')}/"
    return max((room for room in rooms if place.startswith(f"{room}/")), key=len)


def _problem(fault: Fault) -> str:
    text = (ROOT / fault.path).read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        return f"the old text occurs {count} times in {fault.path}"
    try:
        if ast.dump(ast.parse(text)) == ast.dump(ast.parse(fault.apply(text))):
            return "the change does nothing"
    except SyntaxError as error:
        return f"the changed {fault.path} is not valid Python: {error}"
    return ""


def _expand(path: str) -> list[list[str]]:
    """Return the runs of one path of a room.

    The files of `tests/e2e` and `tests/docs` run one by one, other matches together.
    """
    matches = sorted(match.relative_to(ROOT).as_posix() for match in ROOT.glob(path))
    if f"{path}/" in _WHOLE_FILES:
        return [
            [file.relative_to(ROOT).as_posix()] for file in sorted((ROOT / path).glob("test_*.py"))
        ]
    return [matches] if matches else []


def detect_all(
    faults: Sequence[Fault],
    trees: Sequence[Tree],
    groups: Callable[[Fault], Iterable[Sequence[str]]],
    *,
    fallback: bool,
    report: Callable[[FaultResult], None],
) -> None:
    """Detect every fault by its groups of tests, one fault at a time in each tree."""
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        waiting.put(fault)
    lock = threading.Lock()

    def work(tree: Tree) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                fault = waiting.get_nowait()
                result = tree.detect(fault, groups(fault), fallback=fallback)
                with lock:
                    report(result)

    threads = [threading.Thread(target=work, args=(tree,), daemon=True) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_results(path: Path | None, *, fallback: bool) -> dict[str, FaultResult]:
    """Return earlier results by id.

    Faults that the tests of their room may yet detect are left out.
    """
    if path is None or not path.exists():
        return {}
    entries = [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.endswith("}")
    ]
    results = [FaultResult(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    return {
        result.id: result
        for result in results
        if result.detected or result.fallback or not fallback
    }


def _result_line(fault: Fault, result: FaultResult) -> str:
    verdict = "detected" if result.detected else "NOT DETECTED"
    why = f"{result.how} {' '.join(result.tests)}" if result.detected else fault.what
    return f"{verdict:<12} {fault.id} ({result.seconds:.0f} s) {why}\n"


def _summary(faults: Sequence[Fault], results: Mapping[str, FaultResult]) -> str:
    done = [fault for fault in faults if fault.id in results]
    missed = [fault for fault in done if not results[fault.id].detected]
    lines = ["", f"{len(done) - len(missed)} of {len(faults)} faults detected"]
    lines += [f"  not detected: {fault.id}: {fault.what} ({fault.path})" for fault in missed]
    for room in dict.fromkeys(fault.room for fault in done):
        here = [results[fault.id].detected for fault in done if fault.room == room]
        lines.append(f"  {room:<22} {sum(here):>3} of {len(here):>3}")
    return "\n".join([*lines, ""])


def _arguments(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the tool's own options, and the options of pytest after `--`."""
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="check the table and print it")
    add(
        "--record",
        type=Path,
        metavar="MAP",
        help="run the tests under coverage and write the map of lines to tests",
    )
    add("--map", type=Path, metavar="MAP", help="what --record wrote")
    add("--only", nargs="+", default=[], metavar="ID", help="only these faults")
    add("--rooms", nargs="+", default=[], metavar="ROOM", help="only faults of these rooms")
    add(
        "--out",
        type=Path,
        metavar="RESULTS",
        help="append results as JSON lines; skip the faults that stand there",
    )
    add(
        "--tree",
        type=Path,
        metavar="FOLDER",
        help="where copies are made and kept; a temporary folder by default",
    )
    add("--jobs", type=int, default=1, help="copies that are worked in side by side")
    add("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="longest run of pytest")
    add(
        "--budget",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="most recorded seconds of the tests that are chosen by the map",
    )
    add("--no-fallback", action="store_true", help="run only tests that executed the changed lines")
    return parser.parse_args(given[:at]), list(given[at + 1 :])


def main(arguments: Sequence[str] | None = None) -> int:
    given, options = _arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        faults, rooms = read_table()
        if unknown := ({*given.only} - {fault.id for fault in faults}) | (
            {*given.rooms} - {*rooms}
        ):
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    faults = [
        f for f in faults if f.id in (given.only or [f.id]) and f.room in (given.rooms or [f.room])
    ]
    if given.list:
        sys.stdout.writelines(f"{fault.room:<22} {fault.id:<55} {fault.kind}\n" for fault in faults)
        sys.stdout.write(f"{len(faults)} faults\n")
        return 0
    with contextlib.ExitStack() as stack:
        place = given.tree or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="onnx-ops-mutants-"))
        )
        if given.record is not None:
            return Tree(place.resolve() / "tree-0", options, given.limit, None).record(given.record)
        line_map = (
            None
            if given.map is None
            else LineMap(**json.loads(given.map.read_text(encoding="utf-8")))
        )
        trees = [
            Tree(place.resolve() / f"tree-{n}", options, given.limit, line_map)
            for n in range(given.jobs)
        ]
        fallback = not given.no_fallback
        results = read_results(given.out, fallback=fallback)
        by_id = {fault.id: fault for fault in faults}
        texts = {
            fault.path: (trees[0].folder / fault.path).read_text(encoding="utf-8")
            for fault in faults
        }

        def groups(fault: Fault) -> Iterator[Sequence[str]]:
            runs = [run for path in rooms[fault.room] for run in _expand(path)]
            if line_map is not None:
                room = [path for run in runs for path in run]
                begun = set[str]()
                for budget_s in (QUICK_S, given.budget):
                    selected = line_map.select(fault, texts[fault.path], room, budget_s)
                    yield [test for test in selected if test not in begun]
                    begun.update(selected)
            yield from runs if fallback else ()

        def report(result: FaultResult) -> None:
            results[result.id] = result
            sys.stdout.write(_result_line(by_id[result.id], result))
            sys.stdout.flush()
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(asdict(result)) + "\n")

        waiting = [fault for fault in faults if fault.id not in results]
        detect_all(waiting, trees, groups, fallback=fallback, report=report)
    sys.stdout.write(_summary(faults, results))
    return 0 if all(fault.id in results and results[fault.id].detected for fault in faults) else 1


if __name__ == "__main__":
    sys.exit(main())

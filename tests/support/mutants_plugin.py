"""A pytest plugin for `tests.support.mutants`.

It reports failed tests, or records which lines each test executes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PACKAGE = "onnx_ops"
FAILURES = "PYTHON_MUTANTS_FAILURES"
"""Variable with the path of the file to which ids of failed tests are written."""
SELECTION = "PYTHON_MUTANTS_SELECTION"
"""Variable with the path of the file that lists the tests to run.

It may also list files or folders. The tests need not be arguments of pytest.
"""
CONTEXTS = "PYTHON_MUTANTS_CONTEXTS"
"""Variable with the path of the file to which the map is written.

The map contains seconds by test id, and by file and line the numbers of the tests.
"""


def pytest_configure(config: Any) -> None:
    """Register the reporters that the environment requests.

    Processes under test do not inherit the variables.
    """
    if path := os.environ.pop(FAILURES, ""):
        config.pluginmanager.register(_FailureReporter(Path(path)))
    if path := os.environ.pop(SELECTION, ""):
        config.pluginmanager.register(
            _Selection(frozenset(json.loads(Path(path).read_text(encoding="utf-8"))))
        )
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if CONTEXTS in os.environ and (worker or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(_LineRecorder(Path(os.environ.pop(CONTEXTS) + worker)))


class _FailureReporter:
    """Reporter that appends the id of each test that fails.

    Failures in set-up and tear-down count too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"{report.nodeid}\n")


class _Selection:
    """Plugin that deselects all tests except the listed ones.

    Tests of listed files and folders are kept too.
    """

    def __init__(self, chosen: frozenset[str]) -> None:
        self._chosen = chosen

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        left = [item for item in items if not self._is_chosen(item.nodeid)]
        items[:] = [item for item in items if self._is_chosen(item.nodeid)]
        config.hook.pytest_deselected(items=left)

    def _is_chosen(self, test: str) -> bool:
        file = test.partition("::")[0]
        places = {file, *map(str, Path(file).parents)}
        return test in self._chosen or not places.isdisjoint(self._chosen)


class _LineRecorder:
    """Recorder of the package's lines that each test executes in this process.

    It uses the contexts of coverage.
    """

    def __init__(self, path: Path) -> None:
        import coverage

        self._path = path
        self._seconds: dict[str, float] = {}
        self._coverage = coverage.Coverage(
            data_file=str(path.with_suffix(".coverage")),
            source_pkgs=[PACKAGE],
            config_file=False,
            messages=False,
        )
        self._coverage.erase()
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self) -> None:
        self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        data = self._coverage.get_data()
        numbers = {test: number for number, test in enumerate(self._seconds)}
        lines: dict[str, dict[str, list[int]]] = {}
        for file in sorted(data.measured_files()):
            by_line = data.contexts_by_lineno(file)
            tests = {
                str(line): sorted(numbers[n] for n in by_line[line] if n in numbers)
                for line in sorted(by_line)
            }
            lines[Path(file).relative_to(Path.cwd()).as_posix()] = {
                line: n for line, n in tests.items() if n
            }
        self._path.write_text(
            json.dumps({"seconds": self._seconds, "lines": lines}), encoding="utf-8"
        )

"""A pytest plugin that starts no further test after some seconds of CPU."""

from __future__ import annotations

import os

import pytest

_LEFT = pytest.StashKey[list[str]]()


def _count_cpu_s() -> float:
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        metavar="S",
        help="start no further test after so many seconds of CPU, "
        "those of collection and child processes included",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Skip a test after the limit."""
    limit: float | None = item.config.option.cpu_limit
    if limit is None or _count_cpu_s() < limit:
        return None
    item.config.stash[_LEFT].append(item.nodeid)
    return True


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report how many tests were skipped, because such a run is incomplete."""
    left = config.stash[_LEFT]
    if left:
        files = len({name.partition("::")[0] for name in left})
        limit = f"after {config.option.cpu_limit:g} s of CPU"
        terminalreporter.write_line(
            f"{len(left)} tests of {files} files did not run {limit}; `make test` runs them"
        )

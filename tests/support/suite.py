"""Division of the test suite over workers and commits.

Workers share it by the servers that tests share. Each commit runs a fifth of every sweep. This is a
pytest plugin, loaded by `tests/conftest.py`.
"""

from __future__ import annotations

import gc
import signal
import subprocess
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

from tests.support.processes import ROOT

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

T = TypeVar("T")
PARTS = 5
"""Parts of a sweep: a commit runs one of them, and the nightly tier runs all."""

SHARED: dict[str, str] = {
    # The files of a group share a server, or an import that takes as long as most of their tests.
    "tests/adapters/test_endpoint_azureml_diagnosis.py": "azure",
    "tests/adapters/test_endpoint_azureml.py": "azure",
    "tests/adapters/test_endpoint_azureml_faults.py": "azure",
    "tests/adapters/test_endpoint_azureml_registry.py": "azure",
    "tests/adapters/test_metrics_azuremonitor.py": "azure",
    "tests/adapters/test_endpoint_sagemaker.py": "sagemaker",
    "tests/adapters/test_endpoint_sagemaker_faults.py": "sagemaker",
    "tests/adapters/test_endpoint_sagemaker_options.py": "sagemaker",
    "tests/adapters/test_endpoint_sagemaker_update.py": "sagemaker",
    "tests/adapters/test_metrics_cloudwatch.py": "sagemaker",
    "tests/adapters/test_exporter_edges.py": "torch",
    "tests/adapters/test_exporter_examples.py": "torch",
    "tests/adapters/test_exporter_torch.py": "torch",
    "tests/e2e/test_prefect_automations.py": "prefect",
    "tests/e2e/test_prefect_postgres.py": "prefect",
    "tests/e2e/test_prefect_server.py": "prefect",
    "tests/e2e/test_pools.py": "prefect",
    "tests/e2e/test_bad_releases.py": "releases",
    "tests/e2e/test_champions.py": "releases",
    "tests/e2e/test_killed.py": "releases",
    "tests/e2e/test_rollback.py": "releases",
    "tests/e2e/test_rollout.py": "releases",
    "tests/integrations/": "integrations",
    "tests/orchestration/": "prefect",
}
"""Group by test file, or by folder with a trailing slash.

The tests of a group share a server, and run on one worker.
"""

FIRST = (
    "prefect",
    "azure",
    "integrations",
    "releases",
    "tests/cli/test_cli_watch.py",
    "tests/adapters/test_endpoint_local.py",
    "sagemaker",
    "tests/e2e/test_main_job.py",
    "tests/adapters/test_registry_mlflow.py",
    "tests/serving/test_serving_server.py",
    "tests/release/test_release_faults.py",
    "torch",
)
"""Groups and files that take longest, longest first.

They begin first, so that all workers end at about the same time.
"""


class Sweep:
    """The points of a sweep over kill points or faults that this run takes.

    Args:
        part: 1 to `PARTS`, or 0 for all points.
    """

    def __init__(self, part: int) -> None:
        self.part = part

    def __call__(self, points: Iterable[T]) -> list[T]:
        """Return every fifth point from the one of this run's part, or all for part 0.

        A part that would be empty has the first point."""
        chosen = list(points)
        return chosen if self.part == 0 else chosen[self.part - 1 :: PARTS] or chosen[:1]


def part_of(option: str) -> int:
    """Return the part that `--sweep` names.

    For `commit`, the digest of the commit determines the part. Outside a repository, it is 0.

    Raises:
        pytest.UsageError: the option is none of those that its help lists.
    """
    known = {"all": 0, **{f"{part}/{PARTS}": part for part in range(1, PARTS + 1)}}
    if option in known:
        return known[option]
    if option != "commit":
        raise pytest.UsageError(f"--sweep {option}: expected 'commit' or one of {', '.join(known)}")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(head.stdout, 16) % PARTS + 1 if head.returncode == 0 else 0


def group_of(test_id: str) -> str:
    """Return the group of a test, whose tests must run on one worker.

    The group is a shared server, or else the file of the test.
    """
    file = test_id.partition("::")[0]
    folders = (file[: index + 1] for index, letter in enumerate(file) if letter == "/")
    return next((SHARED[place] for place in (file, *folders) if place in SHARED), file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sweep",
        default="commit",
        help="part of the sweeps over kill points and faults: "
        f"1/{PARTS} to {PARTS}/{PARTS}, 'all', or 'commit' (default): "
        "the part that follows from the digest of HEAD",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell without job control started the run in the background, so that it ignores SIGINT.
        # The processes of the tests would ignore the signal as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "sweep: cases of a sweep, of which one run takes a part (--sweep)"
    )
    config.addinivalue_line(
        "markers", "in_order: tests of one story, which run in the order of their file"
    )
    part = part_of(config.option.sweep)
    # The workers of pytest-xdist take the same part.
    config.option.sweep = f"{part}/{PARTS}" if part else "all"
    # Nightly runs draw new examples. The first example of a test may import the test's
    # dependencies, so there is no deadline.
    settings.register_profile("suite", derandomize=part != 0, print_blob=True, deadline=None)
    settings.load_profile("suite")


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"sweeps: {config.option.sweep} (repeat with --sweep {config.option.sweep}; "
        "all with --sweep all)"
    )


@pytest.fixture(scope="session")
def sweep(pytestconfig: pytest.Config) -> Sweep:
    """Choose this run's part of the points at which something is killed or fails."""
    return Sweep(part_of(pytestconfig.option.sweep))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect tests without the garbage collector.

    Garbage collection takes a third of the time, and finds no garbage among syntax trees.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        # The freeze exempts the new objects from later garbage collections. Otherwise, each full
        # one would examine all of them, including the two at pytest's end. Frozen garbage is never
        # collected, so it is freed before. With --collect-only the run ends here, so the garbage
        # can stay.
        if not session.config.option.collectonly:
            gc.collect()
        gc.freeze()
        gc.enable()


def freeze_live_objects() -> None:
    """Free the garbage, and exempt all other objects from later collections."""
    # Garbage that is frozen is never collected.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def spare_what_is_there() -> None:
    """Exempt objects that exist before a file's tests from garbage collection.

    Otherwise a full collection could delay a timed run.
    """
    freeze_live_objects()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _take_part(config, items)
    _restore_order(items)


def _take_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of sweeps that other commits run."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps.setdefault(_sweep_of(item), []).append(item)
    sweep = Sweep(part_of(config.option.sweep))
    left: set[pytest.Item] = set()
    for cases in sweeps.values():
        cases.sort(key=lambda item: item.nodeid)
        left |= set(cases) - set(sweep(cases))
    if left and len(items) > 1:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))


def _sweep_of(item: pytest.Item) -> str:
    """Return the common id of the cases of a sweep.

    It is that of the marked test, or of the marked class.
    """
    marks: Iterable[pytest.Mark] = vars(getattr(item, "cls", None) or object).get("pytestmark", ())
    is_class = any(mark.name == "sweep" for mark in marks)
    return item.nodeid.rpartition("::")[0] if is_class else item.nodeid.partition("[")[0]


def _restore_order(items: list[pytest.Item]) -> None:
    """Put the tests of each story in the order of their file.

    pytest-randomly may have changed their order.
    """
    stories: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        if item.get_closest_marker("in_order"):
            stories.setdefault(item.nodeid.partition("::")[0], []).append(place)
    for places in stories.values():
        ordered = sorted(
            (items[place] for place in places), key=lambda item: item.reportinfo()[1] or 0
        )
        for place, item in zip(places, ordered, strict=True):
            items[place] = item


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
        """Scheduler that gives a worker a whole group at a time, the longest groups first."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: WorkerController) -> None:
            for group in reversed(FIRST):
                if group in self.workqueue:
                    self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

    return ByGroup(config, log)

"""How the suite is divided: over workers, by the servers that tests share; and sweeps over commits, by thirds.

A plugin of pytest, loaded by `tests/conftest.py`.
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
PARTS = 3
"""One commit runs one part of every sweep; the nightly tier runs all."""

SHARED: dict[str, str] = {
    # They share the import of the SDK, which takes as long as most of their tests.
    "tests/adapters/test_endpoint_azureml_diagnosis.py": "azure",
    "tests/adapters/test_endpoint_azureml.py": "azure",
    "tests/adapters/test_endpoint_azureml_faults.py": "azure",
    "tests/adapters/test_endpoint_azureml_registry.py": "azure",
    "tests/adapters/test_metrics_azuremonitor.py": "azure",
    "tests/adapters/test_endpoint_sagemaker.py": "sagemaker",
    "tests/adapters/test_endpoint_sagemaker_faults.py": "sagemaker",
    "tests/adapters/test_endpoint_sagemaker_settings.py": "sagemaker",
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
"""Test files, or folders with a trailing slash, whose tests share a server: they run on one worker.
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
"""Groups and files that take longest, longest first: begun first, so that no worker ends long
before the other.
"""


class Sweep:
    """The points of a sweep over kill points or faults that this run takes.

    Args:
        part: 1 to `PARTS`, or 0 for all points.
    """

    def __init__(self, part: int) -> None:
        self.part = part

    def __call__(self, points: Iterable[T]) -> list[T]:
        """Return every third point, beginning with the run's own."""
        chosen = list(points)
        return chosen if self.part == 0 else chosen[self.part - 1 :: PARTS] or chosen[:1]


def part_of(option: str) -> int:
    """Return the part that `--sweep` names; of a commit, by its digest.

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
    """Return what the tests that must run on one worker have in common: a server, or else their file."""
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
        # Begun in the background by a shell without job control; the processes of the tests would
        # ignore it as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "sweep: cases of a sweep, of which one run takes a part (--sweep)"
    )
    config.addinivalue_line(
        "markers", "in_order: tests of one story, which run in the order of their file"
    )
    part = part_of(config.option.sweep)
    config.option.sweep = (
        f"{part}/{PARTS}" if part else "all"
    )  # the workers of pytest-xdist take the same
    # Nightly runs draw new examples. The first one of a test may import what the test needs, hence
    # no deadline.
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
    """Collect without the collector of garbage: it takes a third of the time, and there is none among syntax trees."""
    gc.disable()
    try:
        return (yield)
    finally:
        # All are young, and the next search would be for all of them; pytest ends with two more.
        # Without tests to run, even the first would be a waste.
        if not session.config.option.collectonly:
            gc.collect()  # frozen garbage would never be collected
        gc.freeze()
        gc.enable()


def freeze_live_objects() -> None:
    """Free the garbage that there is, and leave all other objects out of later searches for it."""
    gc.collect()  # frozen garbage would never be collected
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def spare_what_is_there() -> None:
    """Leave what there is before a file's tests out of the search for garbage: a timed run waits for a whole one."""
    freeze_live_objects()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _take_part(config, items)
    _restore_order(items)


def _take_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of sweeps that are another commit's turn."""
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
    """Return what the cases of one sweep have in common: the marked test, or the marked class."""
    marks: Iterable[pytest.Mark] = vars(getattr(item, "cls", None) or object).get("pytestmark", ())
    is_class = any(mark.name == "sweep" for mark in marks)
    return item.nodeid.rpartition("::")[0] if is_class else item.nodeid.partition("[")[0]


def _restore_order(items: list[pytest.Item]) -> None:
    """Put the tests of one story in the order of their file, wherever pytest-randomly has put them."""
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
        """Gives a worker a whole group at a time, the longest groups first."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: WorkerController) -> None:
            for group in reversed(FIRST):
                if group in self.workqueue:
                    self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

    return ByGroup(config, log)

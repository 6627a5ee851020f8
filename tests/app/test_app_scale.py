"""Costs of many pipelines, as counts.

The numbers of parses, hashed files and writes grow no faster than the pipelines. The long
version, with seconds and megabytes, is `benchmarks/scale.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters import store as store_module
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.results import summarize
from onnx_ops.config import yaml_reader
from onnx_ops.domain.plan import StageKind

PLUGINS = Path(__file__).resolve().parents[2] / "benchmarks" / "synthetic"
VARIANTS, TARGETS = 2, 2
PAIRS = VARIANTS * TARGETS


@pytest.fixture(scope="module")
def synthetic() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGINS))
        yield importlib.import_module("synthetic_project")
        for name in ("synthetic_project", "synthetic_plugins", "synthetic_job"):
            sys.modules.pop(name, None)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count costly operations.

    They are parses of YAML texts and of the metadata of distributions, written objects, and hashed
    files.
    """
    found: Counter[str] = Counter()

    def counted(place: object, name: str, what: str) -> None:
        real: Callable[..., Any] = getattr(place, name)

        def count(*arguments: Any, **options: Any) -> Any:
            found[what] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(place, name, count)

    counted(yaml_reader, "read_text", "parsed")
    counted(importlib.metadata.PathDistribution, "read_text", "metadata")
    counted(LocalObjects, "write", "written")
    counted(LocalObjects, "upload", "written")
    counted(store_module, "digest_file", "hashed")
    return found


def led(synthetic: Any, project: Project, file: Path) -> tuple[str, ...]:
    prepared = synthetic.in_this_process(prepare(project, file))
    result = execute(project, prepared)
    summary = summarize(prepared.pipeline, result, project.context)
    assert (summary.exit_code, result.errors) == (0, {})
    return summary.executed


def test_run_of_later_pipeline_does_same_work_as_third_pipeline(
    synthetic: Any, counts: Counter[str], tmp_path: Path
) -> None:
    files = synthetic.write_project(
        tmp_path / "many", pipelines=6, variants=VARIANTS, targets=TARGETS
    )
    project, each = open_project(tmp_path / "many"), []
    for file in files:
        counts.clear()
        executed = led(synthetic, project, file)
        each.append((len(executed), dict(counts)))
    assert {one for one, _ in each[1:]} == {3 + (VARIANTS - 1) + 2 * PAIRS}, (
        "the data sets are shared"
    )
    # The second pipeline still checks shared data, so the third one is the reference.
    third = each[2][1]
    assert all(found == third for _, found in each[3:]), each
    later = each[-1][1]
    assert later.get("metadata", 0) == 0, "versions of distributions are read once"
    assert later["parsed"] == 1 + 2 * TARGETS, (
        "its own file, and each target's for the check and for the plan"
    )
    assert later["written"] <= 8 * each[-1][0]


def test_run_without_changes_writes_nothing_and_hashes_no_more_files_than_are_stored(
    synthetic: Any, counts: Counter[str], tmp_path: Path
) -> None:
    (file,) = synthetic.write_project(
        tmp_path / "one", pipelines=1, variants=VARIANTS, targets=TARGETS
    )
    led(synthetic, open_project(tmp_path / "one"), file)
    counts.clear()
    assert led(synthetic, open_project(tmp_path / "one"), file) == ()
    stored = sum(
        1
        for path in (tmp_path / "one" / ".onnx-ops" / "store" / "blobs").rglob("*")
        if path.is_file()
    )
    assert counts["written"] == 0
    assert 0 < counts["hashed"] <= stored


def test_prepare_reads_endpoints_of_other_files_once_until_changed(
    synthetic: Any, counts: Counter[str], tmp_path: Path
) -> None:
    files = synthetic.write_project(tmp_path / "few", pipelines=5, variants=1, targets=1)
    target = tmp_path / "few" / "configs" / "targets" / "machine-0.yaml"
    # A local endpoint serves only models of the runtime `onnxruntime`.
    target.write_text(target.read_text().replace("synthetic", "onnxruntime"))
    for number, file in enumerate(files):
        sections = (
            f"register: {{model: m{number}}}\ndeploy: {{endpoint: e{number}, target: machine-0}}\n"
        )
        file.write_text(file.read_text() + sections)
    project = open_project(tmp_path / "few")
    prepare(project, files[0], until=StageKind.GATE)
    for file in files[1:]:
        counts.clear()
        prepare(project, file, until=StageKind.GATE)
    assert counts["parsed"] == 1 + 2
    files[0].write_text(files[0].read_text().replace("endpoint: e0", "endpoint: e4"))
    with pytest.raises(Exception, match="endpoint 'e4' is already declared in"):
        prepare(project, files[4])


def test_content_store_with_many_digests_remembers_limited_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MAX_VERIFIED", 10)
    store = ContentStore(LocalObjects(tmp_path), tmp_path)
    digests = [store.put_bytes(str(number).encode()) for number in range(50)]
    for digest in digests:
        store.path(digest)
    assert len(store._verified) == 10
    assert [store.read(digest) for digest in digests] == [
        str(number).encode() for number in range(50)
    ]

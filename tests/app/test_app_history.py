"""Records of a commit, and their lookup from a branch of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.app.results import (
    Summary,
    export_commit,
    find_base,
    find_run_base,
    import_commits,
    read_base_branch,
    read_provenance,
    record_commit,
)
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.plan import StageOutcome, StageStatus
from onnx_ops.domain.release import Choice
from onnx_ops.errors import ServiceUnavailableError
from tests.release import effect_operations
from tests.release.disk_scenes import on_disk
from tests.reporting.test_reporting_html import evidence_of
from tests.support.git import commit_all, git

PIPELINE = "digits"


def commit(root: Path, text: str) -> str:
    (root / "file.txt").write_text(text)
    return commit_all(root, text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    commit(root, "first")
    return root


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(LocalObjects(tmp_path / "store"), tmp_path / "cache")


def summary(store: ContentStore) -> Summary:
    digest = store.put_bytes(codec.dumps(evidence_of()))
    measured = StageOutcome(
        stage="benchmark/fp32@cpu-1t",
        status=StageStatus.DONE,
        manifest=Manifest(files={"evidence.json": digest}),
    )
    choice = Choice(target="cpu-1t", variant="fp32", verdict=Verdict.PASS, reason="it passes")
    return Summary(
        pipeline=PIPELINE,
        executed=(),
        outcomes=(measured,),
        decisions=(),
        choices=(choice,),
        registration=None,
        awaiting=(),
        left=(),
        exit_code=0,
    )


def test_find_base_on_branch_returns_last_measured_common_commit(
    root: Path, store: ContentStore
) -> None:
    measured = git(root, "rev-parse", "HEAD")
    record_commit(root, store, summary(store))
    commit(root, "a commit that touches no model")
    git(root, "checkout", "-q", "-b", "branch")
    commit(root, "a change")
    git(root, "checkout", "-q", "main")
    commit(root, "later on main")
    record_commit(root, store, summary(store))
    git(root, "checkout", "-q", "branch")
    found = find_base(root, store, PIPELINE, "main")
    assert (found.branch, found.commit, found.why) == ("main", measured, "")
    assert (found.choices, found.evidence) == (summary(store).choices, (evidence_of(),))


def test_find_run_base_without_given_base_uses_target_branch_of_pull_request(
    root: Path, store: ContentStore
) -> None:
    def find(environ: dict[str, str], base: str = "") -> str | None:
        found = find_run_base(root, store, PIPELINE, environ, base)
        return None if found is None else found.branch

    pull_request = {"GITHUB_BASE_REF": "main"}
    assert find({}) is None
    assert find(pull_request) == "main"
    assert find(pull_request, "develop") == "develop"


def test_find_base_on_recorded_commit_excludes_it_unless_files_are_changed(
    root: Path, store: ContentStore
) -> None:
    record_commit(root, store, summary(store))
    assert "No measurement is recorded for main" in find_base(root, store, PIPELINE, "main").why
    (root / "file.txt").write_text("not committed")
    assert find_base(root, store, PIPELINE, "main").why == ""


def test_record_commit_with_uncommitted_changes_records_nothing(
    root: Path, store: ContentStore
) -> None:
    (root / "file.txt").write_text("not committed")
    record_commit(root, store, summary(store))
    assert "No measurement is recorded" in find_base(root, store, PIPELINE, "main").why


@pytest.mark.parametrize("error", [OSError("no space"), ServiceUnavailableError("no answer")])
def test_run_with_failing_commit_record_succeeds(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, refused = ContentStore.record, []

    def record_stages(store: ContentStore, key: Digest, manifest: Manifest) -> None:
        if "choices.json" in manifest.files:
            refused.append(key)
            raise error
        record(store, key, manifest)

    monkeypatch.setattr(ContentStore, "record", record_stages)
    with on_disk(tmp_path / "project"), effect_operations.synthetic():
        scene = effect_operations.pipeline()
        (scene.context.root / ".gitignore").write_text(".onnx-ops/\n__pycache__/\n")
        commit_all(scene.context.root)
        assert "register" in effect_operations.run(scene)
    assert len(refused) == 1


def test_find_base_with_unknown_commit_or_without_repository_returns_explanation(
    root: Path, store: ContentStore, tmp_path: Path
) -> None:
    assert "git found no commit 'nope'" in find_base(root, store, PIPELINE, "nope").why
    assert "git found no commit" in find_base(tmp_path, store, PIPELINE, "main").why


def test_import_commits_from_exported_folder_restores_base(
    root: Path, store: ContentStore, tmp_path: Path
) -> None:
    record_commit(root, store, summary(store))
    export_commit(root, store, PIPELINE, tmp_path / "metrics")
    other = ContentStore(LocalObjects(tmp_path / "other"), tmp_path / "other-cache")
    import_commits(root, other, tmp_path / "nothing")
    import_commits(root, other, tmp_path / "metrics")
    commit(root, "a change")
    assert find_base(root, other, PIPELINE, "main").evidence == (evidence_of(),)


def test_export_commit_into_full_folder_keeps_newest_commits(
    root: Path, store: ContentStore, tmp_path: Path
) -> None:
    folder = tmp_path / "metrics"
    for age in range(30):
        (folder / str(age)).mkdir(parents=True)
        os.utime(folder / str(age), (1000 - age, 1000 - age))
    record_commit(root, store, summary(store))
    export_commit(root, store, PIPELINE, folder)
    assert {path.name for path in folder.iterdir()} == {
        git(root, "rev-parse", "HEAD"),
        *map(str, range(19)),
    }


def test_read_provenance_returns_author_of_commit_or_service(root: Path, tmp_path: Path) -> None:
    made = read_provenance(root, 0.0, {})
    head = git(root, "rev-parse", "HEAD")
    assert (made.at, made.author, made.commit) == ("1970-01-01 00:00 UTC", "Ada Example", head)
    assert (made.branch, made.changed) == ("main", False)
    provenance = read_provenance(
        tmp_path, 0.0, {"GITHUB_ACTOR": "ada", "GITHUB_SHA": "abc", "GITHUB_REF_NAME": "main"}
    )
    assert (provenance.author, provenance.commit, provenance.branch) == ("ada", "abc", "main")


GITHUB = {"GITHUB_BASE_REF": "main", "GITHUB_HEAD_REF": "branch"}
GITLAB = {"CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main", "CI_COMMIT_REF_NAME": "branch"}
AZURE = {
    "BUILD_SOURCEBRANCH": "refs/pull/7/merge",
    "BUILD_SOURCEBRANCHNAME": "merge",
    "SYSTEM_PULLREQUEST_SOURCEBRANCH": "refs/heads/branch",
    "SYSTEM_PULLREQUEST_TARGETBRANCH": "refs/heads/main",
}


@pytest.mark.parametrize(
    ("environ", "is_merge"),
    [
        ({**GITHUB, "GITHUB_REF": "refs/pull/7/merge"}, True),
        ({**GITHUB, "GITHUB_REF": "refs/heads/main"}, False),  # the event pull_request_target
        (AZURE, True),
        (GITLAB, False),
        ({**GITLAB, "CI_MERGE_REQUEST_SOURCE_BRANCH_SHA": "abc"}, True),
    ],
)
def test_read_provenance_of_merge_commit_returns_second_parent_only_if_service_made_it(
    root: Path, environ: dict[str, str], is_merge: bool
) -> None:
    git(root, "checkout", "-q", "-b", "branch")
    head = commit(root, "a change")
    git(root, "checkout", "-q", "main")
    git(root, "merge", "-q", "--no-ff", "-m", "merge", "branch")
    made = read_provenance(root, 0.0, environ)
    assert made.branch == "branch"
    assert made.commit == (head if is_merge else git(root, "rev-parse", "HEAD"))


@pytest.mark.parametrize(
    ("environ", "branch"),
    [
        ({}, ""),
        ({"GITHUB_BASE_REF": "main"}, "main"),
        ({"CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "develop"}, "develop"),
        ({"SYSTEM_PULLREQUEST_TARGETBRANCH": "refs/heads/main"}, "main"),
    ],
)
def test_read_base_branch_of_ci_service_returns_target_branch_and_elsewhere_empty_text(
    environ: dict[str, str], branch: str
) -> None:
    assert read_base_branch(environ) == branch

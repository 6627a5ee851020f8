"""Data in DVC: found in git by path and revision, read, and verified.

Changed data are refused with the name of the file.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops.adapters.data.dvc import DvcSource
from onnx_ops.domain.pipeline import FileData
from onnx_ops.errors import (
    DigestMismatchError,
    InfrastructureError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.testing.data import DataSourceSuite
from tests.adapters.dvc_parts import Repository, archive, expected, first, md5, pointer, section
from tests.support.fixtures import fixed


class TestDvc(DataSourceSuite):
    @pytest.fixture
    def source(self, reads: DvcSource) -> DvcSource:
        return reads

    section = fixed(section(rev="v1"))

    @pytest.fixture
    def root(self, repository: Repository) -> Path:
        return repository.root


@pytest.mark.parametrize(("rev", "seed"), [("v1", 0), ("v2", 1), ("", 1), ("main~1", 0)])
def test_dvc_source_at_revision_returns_its_data_and_origin(
    repository: Repository, reads: DvcSource, rev: str, seed: int
) -> None:
    assert first(reads.load(section(rev=rev), repository.root)) == expected(seed)
    origin = reads.origin(section(rev=rev), repository.root)
    assert origin["md5"] == md5(archive(seed))
    assert origin["commit"] == repository.git("rev-parse", rev or "HEAD")
    assert (origin["kind"], origin["repo"], origin["path"], origin["rev"]) == (
        "dvc",
        ".",
        "data/train.npz",
        rev or "HEAD",
    )


def add_two_files(repository: Repository) -> None:
    """Commit a folder of two files that DVC tracks by one pointer."""
    repository.add_folder("data/many", {"a.npz": archive(3), "deep/b.npz": archive(4)})
    repository.commit("v3")


def test_dvc_file_in_tracked_folder_has_own_data_and_fingerprint(
    repository: Repository, reads: DvcSource
) -> None:
    add_two_files(repository)
    assert first(reads.load(section("data/many/deep/b.npz"), repository.root)) == expected(4)
    files = (section(f"data/many/{name}") for name in ("a.npz", "deep/b.npz"))
    assert len({reads.fingerprint(file, repository.root) for file in files}) == 2


def test_load_dvc_folder_or_missing_file_in_folder_raises_not_found_error(
    repository: Repository, reads: DvcSource
) -> None:
    add_two_files(repository)
    with pytest.raises(
        NotFoundError,
        match=r"data/many is a folder.*to one file, such as data/many/a\.npz",
    ):
        reads.load(section("data/many"), repository.root)
    with pytest.raises(NotFoundError, match=r"no file c\.npz.*contains a\.npz, deep/b\.npz"):
        reads.load(section("data/many/c.npz"), repository.root)


def test_load_dvc_folder_of_project_in_subfolder_suggests_path_relative_to_subfolder(
    repository: Repository, reads: DvcSource
) -> None:
    add_two_files(repository)
    with pytest.raises(NotFoundError, match=r"to one file, such as many/a\.npz\.") as caught:
        reads.load(section("many"), repository.root / "data")
    assert caught.value.where == "data/many.dvc"
    assert first(reads.load(section("many/a.npz"), repository.root / "data")) == expected(3)


def test_load_csv_through_dvc_pointer_returns_its_columns(
    repository: Repository, reads: DvcSource
) -> None:
    repository.add("data/rows.csv", b"age,city\n40.5,Oslo\n,Rome\n")
    repository.commit("v3")
    arrays = reads.load(section("data/rows.csv"), repository.root)
    assert {name: array.dtype.kind for name, array in arrays.items()} == {"age": "f", "city": "U"}


def test_load_dvc_stage_output_verifies_committed_entry_of_dvc_lock(
    repository: Repository, reads: DvcSource
) -> None:
    oid = repository.put(archive(3))
    repository.write(
        "dvc.yaml",
        "stages:\n  make:\n    foreach: [a]\n    do: {wdir: made, cmd: x, outs: ['${item}.npz']}\n",
    )
    outs = "outs: [{path: a.npz, md5: '%s', size: %d, hash: md5}]"
    lock = f"schema: '2.0'\nstages:\n  make@a:\n    cmd: x\n    {outs}\n"
    repository.write("dvc.lock", lock % (oid, len(archive(3))))
    repository.commit()
    assert first(reads.load(section("made/a.npz"), repository.root)) == expected(3)
    repository.write("dvc.lock", lock % (repository.put(archive(4)), len(archive(4))))
    with pytest.raises(DigestMismatchError, match=r"pointer of made/a\.npz was changed") as caught:
        reads.load(section("made/a.npz"), repository.root)
    assert caught.value.where == "dvc.lock"


def test_load_dvc_stage_output_without_entry_in_dvc_lock_raises_refused_error(
    repository: Repository, reads: DvcSource
) -> None:
    repository.write("dvc.yaml", "stages:\n  make:\n    cmd: x\n    outs: [made.npz]\n")
    repository.commit()
    with pytest.raises(RefusedError, match=r"has no MD5 for made\.npz") as caught:
        reads.load(section("made.npz"), repository.root)
    assert "dvc.lock" in caught.value.why
    assert "dvc repro" in caught.value.remedy


def test_load_with_pointer_of_older_dvc_release_reads_its_cache(
    repository: Repository, reads: DvcSource
) -> None:
    oid = md5(archive(3))
    repository.write(f".dvc/cache/{oid[:2]}/{oid[2:]}", archive(3))
    repository.write("data/old.npz.dvc", f"outs:\n- md5: {oid}\n  path: old.npz\n")
    repository.commit()
    assert first(reads.load(section("data/old.npz"), repository.root)) == expected(3)


def test_dvc_fingerprint_at_other_commit_with_same_data_is_equal(
    repository: Repository, reads: DvcSource
) -> None:
    before = reads.fingerprint(section(), repository.root)
    repository.write("README", "more")
    commit = repository.commit()
    assert reads.fingerprint(section(), repository.root) == before
    assert reads.origin(section(), repository.root)["commit"] == commit
    assert reads.fingerprint(section(rev="v1"), repository.root) != before


def test_load_dvc_file_from_subfolder_or_sibling_repository_returns_data(
    repository: Repository, reads: DvcSource
) -> None:
    below = repository.root / "data"
    assert first(reads.load(section("train.npz"), below)) == expected(1)
    other = repository.root.parent / "elsewhere"
    other.mkdir()
    assert first(reads.load(section(repo="../project", rev="v1"), other)) == expected(0)


def clone_bare(repository: Repository) -> Path:
    bare = repository.root.parent / "bare.git"
    repository.git("clone", "--quiet", "--bare", str(repository.root), str(bare))
    return bare


def test_dvc_fingerprint_in_bare_repository_equals_fingerprint_in_checkout(
    repository: Repository, reads: DvcSource
) -> None:
    bare = clone_bare(repository)
    before = reads.fingerprint(section(repo=bare.as_uri()), repository.root)
    assert before == reads.fingerprint(section(), repository.root)
    assert before == reads.fingerprint(section(repo=str(bare)), repository.root)


def test_dvc_origin_after_push_to_bare_repository_has_md5_of_new_data(
    repository: Repository, reads: DvcSource
) -> None:
    bare = clone_bare(repository)
    assert reads.fingerprint(section(repo=bare.as_uri()), repository.root)
    repository.add("data/train.npz", archive(5))
    repository.commit("v3")
    repository.git("push", "--quiet", "--tags", str(bare), "main")
    assert reads.origin(section(repo=bare.as_uri(), rev="v3"), repository.root)["md5"] == md5(
        archive(5)
    )
    assert reads.origin(section(repo=bare.as_uri()), repository.root)["md5"] == md5(archive(5))


def test_dvc_fingerprint_of_branch_at_origin_only_equals_fingerprint_of_branch(
    repository: Repository, reads: DvcSource
) -> None:
    repository.git("branch", "topic", "v1")
    clone = repository.root.parent / "clone"
    repository.git("clone", "--quiet", str(repository.root), str(clone))
    before = reads.fingerprint(section(rev="topic"), repository.root)
    assert reads.fingerprint(section(rev="topic"), clone) == before
    assert reads.fingerprint(section(), clone) != before


@pytest.mark.parametrize("rev", ["v9", ""])
def test_dvc_fingerprint_of_missing_revision_of_url_suggests_listing_of_branches_and_tags(
    repository: Repository, reads: DvcSource, rev: str
) -> None:
    repository.git("symbolic-ref", "HEAD", "refs/heads/gone")
    url = repository.root.as_uri()
    with pytest.raises(NotFoundError) as caught:
        reads.fingerprint(section(repo=url, rev=rev), repository.root)
    assert caught.value.where == url
    assert f"`git ls-remote --heads --tags {url}`" in caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        ("branch", "--move", "trunk"),
        ("checkout", "--quiet", "-b", "trunk"),
        ("checkout", "--quiet", "--detach"),
    ],
)
def test_dvc_origin_after_change_of_head_of_url_returns_commit_of_new_head(
    repository: Repository, reads: DvcSource, change: tuple[str, ...]
) -> None:
    url = repository.root.as_uri()
    assert reads.origin(section(repo=url), repository.root)["rev"] == "HEAD"
    repository.git(*change)
    # A branch whose name ends in HEAD also matches the pattern HEAD of `git ls-remote`.
    repository.git("branch", "a/HEAD", "v1")
    commit = repository.commit()
    assert reads.origin(section(repo=url), repository.root)["commit"] == commit


def test_dvc_fingerprint_after_killed_fetch_suggests_deletion_of_local_copy(
    repository: Repository, reads: DvcSource
) -> None:
    url = repository.root.as_uri()
    assert reads.fingerprint(section(repo=url), repository.root)
    (mirror,) = (head.parent for head in reads.repositories.glob("*/HEAD"))
    (mirror / "packed-refs.lock").touch()
    (mirror / "refs/heads").mkdir(exist_ok=True)
    (mirror / "refs/heads/main.lock").touch()
    repository.commit("v3")
    with pytest.raises(ServiceUnavailableError) as caught:
        reads.fingerprint(section(repo=url), repository.root)
    assert f"`git ls-remote {url}`" in caught.value.remedy
    assert f"delete {mirror}:" in caught.value.remedy
    shutil.rmtree(mirror)
    commit = reads.origin(section(repo=url), repository.root)["commit"]
    assert commit == repository.git("rev-parse", "v3")


def test_dvc_fingerprint_after_removal_of_repository_requires_cached_commit(
    repository: Repository, reads: DvcSource
) -> None:
    url, commit = repository.root.as_uri(), repository.git("rev-parse", "v1")
    before = reads.fingerprint(section(repo=url, rev=commit), repository.root)
    repository.root.rename(repository.root.with_name("gone"))
    assert reads.fingerprint(section(repo=url, rev=commit), repository.root.parent) == before
    with pytest.raises(OnnxOpsError, match="could not clone or update"):
        reads.fingerprint(section(repo=url, rev="v1"), repository.root.parent)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"path": "../secret.npz"}, RefusedError, "the path is empty, `.` or absolute"),
        ({"path": "/etc/passwd"}, RefusedError, "the path is empty, `.` or absolute"),
        ({"paht": "x"}, UserError, "did you mean 'path'"),
        ({"rev": 2}, UserError, "rev: expected a string"),
        ({"md5": "abc"}, UserError, "is not an MD5"),
        ({"requirements": "dvc"}, UserError, "requirements: expected a list"),
        ({"repo": "https://me:secret@example.org/r.git"}, RefusedError, "password"),
        ({"repo": "nowhere"}, NotFoundError, "no such folder"),
        ({"rev": "v9"}, NotFoundError, "no revision 'v9'"),
        ({"rev": "--all"}, NotFoundError, "no revision"),
        ({"path": "data/nothing.npz"}, NotFoundError, "DVC does not track data/nothing.npz"),
    ],
)
def test_dvc_fingerprint_with_wrong_options_raises_error(
    repository: Repository,
    reads: DvcSource,
    given: dict[str, object],
    kind: type[OnnxOpsError],
    said: str,
) -> None:
    with pytest.raises(kind, match=said) as caught:
        reads.fingerprint(section(**{"path": "data/train.npz", **given}), repository.root)  # type: ignore[arg-type]
    assert "secret@" not in str(caught.value)


def test_dvc_fingerprint_outside_git_repository_or_of_other_source_raises_error(
    tmp_path: Path, reads: DvcSource, repository: Repository
) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(NotFoundError, match="git cannot open the repository"):
        reads.fingerprint(section(), tmp_path / "plain")
    with pytest.raises(UserError):
        reads.fingerprint(FileData(file="x", inputs={"x": "x"}), repository.root)


def test_dvc_fingerprint_in_repository_of_other_owner_suggests_safe_directory(
    repository: Repository, reads: DvcSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    with pytest.raises(NotFoundError, match="has another owner") as caught:
        reads.fingerprint(section("train.npz"), repository.root / "data")
    command = f"git config --global --add safe.directory {repository.root}"
    assert caught.value.remedy == f"Run `{command}`."


def test_dvc_fingerprint_with_dvc_folder_below_top_of_repository_raises_not_found_error(
    repository: Repository, reads: DvcSource
) -> None:
    repository.git("mv", ".dvc", "data/.dvc")
    repository.commit()
    with pytest.raises(NotFoundError, match="does not use DVC") as caught:
        reads.fingerprint(section(repo="data", path="train.npz"), repository.root)
    assert "git's top folder" in caught.value.remedy


def test_list_dependencies_of_checked_out_data_returns_dvc_pointers(reads: DvcSource) -> None:
    assert list(reads.list_dependencies(section(rev="v1"))) == []
    assert list(reads.list_dependencies(section(repo="https://example.org/r.git"))) == []
    assert list(reads.list_dependencies(section())) == [
        "data/train.npz.dvc",
        "data/dvc.lock",
        "data.dvc",
        "dvc.lock",
    ]


@pytest.mark.parametrize("repo", ["/", "/srv/shared", "..", "../../shared"])
def test_list_dependencies_of_repository_outside_project_omits_folders_without_name(
    reads: DvcSource, repo: str
) -> None:
    names = list(reads.list_dependencies(section(repo=repo)))
    assert names[0] == os.path.join(repo, "data/train.npz.dvc")
    assert [Path(name).name for name in names].count(".dvc") == 0
    assert "...dvc" not in names


def test_load_dvc_file_by_concurrent_threads_returns_data_of_each_revision(
    repository: Repository, reads: DvcSource
) -> None:
    def work(seed: int) -> float:
        wanted = section(rev=f"v{seed + 1}", repo=repository.root.as_uri() if seed else ".")
        assert reads.fingerprint(wanted, repository.root)
        return first(reads.load(section(rev=f"v{seed + 1}"), repository.root))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, [0, 1] * 2)) == [expected(0), expected(1)] * 2


def test_dvc_sample_exists_only_for_file_in_checkout(
    repository: Repository, reads: DvcSource
) -> None:
    repository.write("data/train.npz", archive(1))
    sample = reads.sample(section(), repository.root)
    assert sample is not None
    assert first(sample.arrays) == expected(1)
    assert reads.sample(section(rev="v1"), repository.root) is None
    assert reads.sample(section(repo="https://example.com/models.git"), repository.root) is None
    (repository.root / "data/train.npz").unlink()
    assert reads.sample(section(), repository.root) is None
    with pytest.raises(NotFoundError, match=r"DVC does not track data/tarin\.npz"):
        reads.sample(section("data/tarin.npz"), repository.root)

    # A stage of another folder can write the file.
    repository.write("stages/dvc.lock", b"schema: '2.0'")
    repository.git("add", "stages/dvc.lock")
    assert reads.sample(section("data/tarin.npz"), repository.root) is None


def test_dvc_sample_reads_file_without_environment_of_dvc(
    repository: Repository, tmp_path: Path
) -> None:
    environments = tmp_path / "environments"
    reads = DvcSource(environments=environments, repositories=tmp_path / "repositories")
    repository.write("data/train.npz", archive(3))
    sample = reads.sample(section(), repository.root)
    assert sample is not None
    assert first(sample.arrays) == expected(3)
    assert not environments.exists()


def test_load_of_tampered_dvc_cache_file_raises_digest_mismatch_error(
    repository: Repository, reads: DvcSource
) -> None:
    oid = md5(archive(0))
    repository.cached(oid).write_bytes(archive(7))
    with pytest.raises(DigestMismatchError) as caught:
        reads.load(section(rev="v1"), repository.root)
    error = caught.value
    assert "DVC cache file" in error.what
    assert error.where == str(repository.cached(oid))
    assert md5(archive(7)) in error.why
    assert f"data/train.npz.dvc requires {oid}" in error.why
    assert "Delete the cache file" in error.remedy
    assert error.exit_code == 5


@settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(position=st.integers(0, len(archive(1)) - 1), flip=st.integers(1, 255))
def test_load_of_dvc_cache_file_with_changed_byte_raises_digest_mismatch_error(
    repository: Repository, reads: DvcSource, position: int, flip: int
) -> None:
    content = bytearray(archive(1))
    content[position] ^= flip
    repository.cached(md5(archive(1))).write_bytes(bytes(content))
    with pytest.raises(DigestMismatchError, match="DVC cache file"):
        reads.load(section(), repository.root)


def test_load_of_unreadable_dvc_cache_file_raises_infrastructure_error(
    repository: Repository, reads: DvcSource
) -> None:
    place = repository.cached(md5(archive(1)))
    place.unlink()
    place.mkdir()
    with pytest.raises(InfrastructureError, match="cache file cannot be copied") as caught:
        reads.load(section(), repository.root)
    assert caught.value.where == str(place)


def test_load_of_tampered_dvc_folder_list_raises_digest_mismatch_error(
    repository: Repository, reads: DvcSource
) -> None:
    oid = repository.add_folder("data/many", {"a.npz": archive(3)})
    repository.commit("v3")
    other = repository.put(archive(9))
    listed = repository.cached(oid)
    listed.write_bytes(listed.read_bytes().replace(md5(archive(3)).encode(), other.encode()))
    with pytest.raises(DigestMismatchError, match=r"DVC cache file") as caught:
        reads.load(section("data/many/a.npz"), repository.root)
    assert caught.value.where == str(listed)


def test_load_with_uncommitted_change_of_dvc_pointer_raises_digest_mismatch_error(
    repository: Repository, reads: DvcSource
) -> None:
    repository.add("data/train.npz", archive(5))
    for rev in ("", "v2"):
        with pytest.raises(DigestMismatchError) as caught:
            reads.load(section(rev=rev), repository.root)
        assert "pointer of data/train.npz was changed" in caught.value.what
        assert caught.value.where == "data/train.npz.dvc"
        assert md5(archive(5)) in caught.value.why
        assert md5(archive(1)) in caught.value.why
        assert "checkout HEAD -- data/train.npz.dvc`" in caught.value.remedy
    assert first(reads.load(section(rev="v1"), repository.root)) == expected(0), (
        "only a commit that is checked out is compared with the working tree"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("outs: [", "YAML file structure is corrupted"),
        ("- 1", "validation failed"),
        (pointer("../../../etc/passwd", 8, "train.npz"), "not an MD5"),
        (pointer("g" * 32, 8, "train.npz"), "not an MD5"),
        (pointer(md5(archive(1)), 8, "train.npz"), r"states 8 bytes; .* has \d+"),
        (pointer(md5(archive(1)), -5, "train.npz"), "its size is -5"),
    ],
)
def test_load_with_invalid_committed_dvc_pointer_raises_error_with_its_path(
    repository: Repository, reads: DvcSource, text: str, why: str
) -> None:
    repository.write("data/train.npz.dvc", text)
    repository.commit()
    with pytest.raises(OnnxOpsError, match=why) as caught:
        reads.load(section(), repository.root)
    assert "data/train.npz.dvc" in str(caught.value)
    assert caught.value.remedy


def test_swapped_md5_in_dvc_pointer_is_detected_by_size_or_pinned_md5(
    repository: Repository, reads: DvcSource
) -> None:
    known = repository.put(archive(6, rows=40))
    size = len(archive(1))
    repository.write("data/train.npz.dvc", pointer(known, size, "train.npz"))
    repository.commit()
    with pytest.raises(DigestMismatchError, match=f"pointer is not valid.*states {size} bytes"):
        reads.load(section(), repository.root)
    repository.write("data/train.npz.dvc", pointer(known, len(archive(6, rows=40)), "train.npz"))
    repository.commit()
    reads.load(section(), repository.root)
    with pytest.raises(DigestMismatchError, match="differs from the MD5 in the pipeline file"):
        reads.fingerprint(section(md5=md5(archive(1))), repository.root)


def test_dvc_fingerprint_with_two_pointers_for_path_raises_refused_error(
    repository: Repository, reads: DvcSource
) -> None:
    repository.write("data/other.dvc", pointer(md5(archive(0)), len(archive(0)), "train.npz"))
    repository.commit()
    with pytest.raises(RefusedError, match=r"pointers name the output data/train\.npz") as caught:
        reads.fingerprint(section(), repository.root)
    assert caught.value.where == "data/other.dvc and data/train.npz.dvc"


def test_load_with_cloud_versions_in_dvc_pointer_raises_refused_error(
    repository: Repository, reads: DvcSource
) -> None:
    repository.write(
        "data/train.npz.dvc",
        "outs:\n- path: train.npz\n  size: 4\n  cloud: {store: {version_id: a}}\n",
    )
    repository.commit()
    with pytest.raises(RefusedError, match=r"has no MD5 for data/train\.npz"):
        reads.load(section(), repository.root)

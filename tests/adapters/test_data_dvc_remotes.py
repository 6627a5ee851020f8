"""Data that DVC has written and pushed, fetched from its remotes.

Data that were changed in the remote are refused with the name of the file.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onnx_ops.adapters.data.dvc import DvcSource
from onnx_ops.errors import (
    DigestMismatchError,
    MissingPackageError,
    NotFoundError,
    ServiceUnavailableError,
    UserError,
)
from tests.adapters.dvc_parts import Repository, archive, dvc, expected, first, md5, section, source
from tests.adapters.registry_services import BUCKET, s3
from tests.adapters.runtime_places import require
from tests.support.azurite import azurite

PATH = "data/train.npz"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dvc-state")


@pytest.fixture(scope="module")
def reads(state: Path) -> DvcSource:
    return source(state)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, reads: DvcSource) -> Repository:
    """Return a repository whose data DVC added, committed and pushed to a folder.

    Its cache is empty.
    """
    folder = tmp_path_factory.mktemp("dvc-template")
    return push(folder, reads, ("remote", "add", "-d", "store", str(folder / "project-remote")))


@pytest.fixture
def pushed(tmp_path: Path, template: Repository) -> Repository:
    """Return a copy of the repository and its remote."""
    repository = Repository(tmp_path / "project")
    for old, new in ((template.root, repository.root), (template.remote, repository.remote)):
        shutil.copytree(old, new)
    config = (repository.root / ".dvc/config").read_text()
    repository.write(".dvc/config", config.replace(str(template.remote), str(repository.remote)))
    repository.commit("here")
    return repository


def push(
    folder: Path, reads: DvcSource, *setup: tuple[str, ...], packages: tuple[str, ...] = ()
) -> Repository:
    repository = Repository(folder / "project")
    repository.root.mkdir()
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.write(PATH, archive(1))
    repository.write("data/many/a.npz", archive(2))
    repository.write("data/many/deep/b.npz", archive(3))
    repository.write(
        "dvc.yaml",
        f"stages:\n  copy:\n    wdir: data\n    cmd: cp {Path(PATH).name} made.npz\n    outs: "
        "[made.npz]\n",
    )
    commands = (
        ("init", "-q"),
        *setup,
        ("add", "-q", PATH, "data/many"),
        ("repro", "-q"),
        ("push", "-q"),
    )
    dvc(repository, reads.environments, *commands, packages=packages)
    repository.commit("v1")
    empty_cache(repository)
    return repository


def empty_cache(repository: Repository) -> None:
    for path in sorted((repository.root / ".dvc/cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("path", "seed"),
    [
        (PATH, 1),
        pytest.param("data/many/a.npz", 2, marks=pytest.mark.nightly),
        ("data/many/deep/b.npz", 3),
        pytest.param("data/made.npz", 1, marks=pytest.mark.nightly),
    ],
)
def test_load_of_pushed_dvc_data_returns_it_without_writing_to_repository(
    pushed: Repository, reads: DvcSource, path: str, seed: int
) -> None:
    for place in (".", pushed.root.as_uri()):
        assert first(reads.load(section(path, rev="v1", repo=place), pushed.root)) == expected(seed)
    assert not [path for path in (pushed.root / ".dvc/cache").rglob("*") if path.is_file()]
    assert pushed.git("status", "--porcelain") == ""


def test_load_without_dvc_remote_reads_and_verifies_cache(
    pushed: Repository, reads: DvcSource
) -> None:
    dvc(pushed, reads.environments, ("fetch", "-q"))
    pushed.remote.rename(pushed.remote.with_name("away"))
    for path, seed in ((PATH, 1), ("data/many/deep/b.npz", 3)):
        assert first(reads.load(section(path), pushed.root)) == expected(seed)
    oid = md5(archive(1))
    pushed.cached(oid).chmod(0o644)
    pushed.cached(oid).write_bytes(archive(7))
    with pytest.raises(DigestMismatchError, match="DVC cache file") as caught:
        reads.load(section(PATH), pushed.root)
    assert caught.value.where == str(pushed.cached(oid))


def test_load_of_tampered_dvc_remote_object_raises_digest_mismatch_error(
    pushed: Repository, reads: DvcSource
) -> None:
    oid = md5(archive(1))
    pushed.stored(oid).chmod(0o644)
    pushed.stored(oid).write_bytes(archive(7))
    with pytest.raises(DigestMismatchError) as caught:
        reads.load(section(PATH), pushed.root)
    error = caught.value
    assert "DVC remote" in error.what
    assert error.where.endswith(str(pushed.stored(oid)))
    assert md5(archive(7)) in error.why
    assert f"data/train.npz.dvc requires {oid}" in error.why
    assert "Delete that object. Run `dvc push` with commit" in error.remedy


def test_load_of_missing_or_tampered_file_of_dvc_folder_suggests_push_without_list(
    pushed: Repository, reads: DvcSource
) -> None:
    """DVC pushes the missing files of a folder only if the remote lacks the list of the folder."""
    (listing,) = pushed.remote.rglob("*.dir")
    commit = pushed.git("rev-parse", "HEAD")[:12]
    advice = (
        f"Delete the object {listing.parent.name}/{listing.name} in the remote: without this list "
        "of the folder, DVC checks each file. Run `dvc push --remote store` with commit "
        f"{commit} checked out"
    )
    file = pushed.stored(md5(archive(2)))
    file.chmod(0o644)
    file.write_bytes(archive(7))
    with pytest.raises(DigestMismatchError) as mismatch:
        reads.load(section("data/many/a.npz", remote="store"), pushed.root)
    assert f"Delete that object. {advice}" in mismatch.value.remedy
    file.unlink()
    with pytest.raises(NotFoundError) as missing:
        reads.load(section("data/many/a.npz", remote="store"), pushed.root)
    assert missing.value.remedy.startswith(advice)
    listing.unlink()
    commands = (("commit", "-q", "-f", "data/many.dvc"), ("push", "-q", "--remote", "store"))
    dvc(pushed, reads.environments, *commands)
    empty_cache(pushed)
    assert first(reads.load(section("data/many/a.npz"), pushed.root)) == expected(2)


def test_load_with_dvc_pointer_to_missing_object_raises_not_found_error(
    pushed: Repository, reads: DvcSource
) -> None:
    text = (pushed.root / "data/train.npz.dvc").read_text()
    pushed.write("data/train.npz.dvc", text.replace(md5(archive(1)), md5(archive(8))))
    with pytest.raises(DigestMismatchError, match="changed and not committed"):
        reads.load(section(PATH), pushed.root)
    pushed.commit()
    with pytest.raises(NotFoundError, match=r"DVC has no copy of data/train\.npz") as caught:
        reads.load(section(PATH), pushed.root)
    assert caught.value.where == "data/train.npz.dvc"
    assert md5(archive(8)) in caught.value.why


def test_load_of_unreadable_dvc_remote_object_suggests_credentials_that_dvc_reads(
    pushed: Repository, reads: DvcSource
) -> None:
    """A repository with a URL is read from a bare copy, which has no `.dvc/config.local`."""
    stored = pushed.stored(md5(archive(1)))
    stored.unlink()
    stored.symlink_to(stored)
    for repo, advice in ((".", ".dvc/config.local"), (pushed.root.as_uri(), "--global")):
        with pytest.raises(ServiceUnavailableError, match="remote cannot be read") as caught:
            reads.load(section(PATH, repo=repo), pushed.root)
        assert advice in caught.value.remedy


def test_load_with_unusable_dvc_remote_raises_error_with_its_cause(
    pushed: Repository, reads: DvcSource
) -> None:
    with pytest.raises(UserError, match="remote cannot be used") as caught:
        reads.load(section(PATH, remote="stroe"), pushed.root)
    assert caught.value.where == "DVC remote stroe"
    assert "`dvc remote add -d NAME URL`" in caught.value.remedy
    with (pushed.root / ".dvc/config").open("a") as stream:
        stream.write("['remote \"far\"']\n    url = s3://bucket/x\n")
        stream.write("['remote \"kept\"']\n    url = /nowhere\n    version_aware = true\n")
    with pytest.raises(UserError, match="does not store objects by MD5"):
        reads.load(section(PATH, remote="kept"), pushed.root)
    with pytest.raises(MissingPackageError, match="lacks a package"):
        reads.load(section(PATH, remote="far", requirements=list(reads.requirements)), pushed.root)


@pytest.mark.nightly
def test_load_during_dvc_fetch_returns_data(pushed: Repository, reads: DvcSource) -> None:
    """DVC's fetch holds a lock, and a second DVC process fails while it is held."""
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(reads.load, section(PATH), pushed.root) for _ in range(3)]
        dvc(pushed, reads.environments, ("fetch", "-q"))
    assert [first(load.result()) for load in loads] == [expected(1)] * 3


@pytest.mark.nightly
def test_load_from_dvc_remote_on_s3_returns_verified_data_or_raises_error(
    reads: DvcSource, tmp_path: Path
) -> None:
    import boto3

    with s3() as endpoint:
        setup = (
            ("remote", "add", "-d", "cloud", f"s3://{BUCKET}/dvc"),
            ("remote", "modify", "cloud", "endpointurl", endpoint),
        )
        repository = push(tmp_path, reads, *setup, packages=("dvc-s3==3.3.0",))
        assert first(reads.load(section(PATH), repository.root)) == expected(1)
        assert first(reads.load(section("data/many/a.npz"), repository.root)) == expected(2)
        oid = md5(archive(1))
        key = f"dvc/files/md5/{oid[:2]}/{oid[2:]}"
        client = boto3.client("s3", endpoint_url=endpoint)
        client.put_object(Bucket=BUCKET, Key=key, Body=archive(7))
        with pytest.raises(DigestMismatchError, match="object in the DVC remote") as caught:
            reads.load(section(PATH), repository.root)
        assert caught.value.where == f"s3://{BUCKET}/{key}"
        assert md5(archive(7)) in caught.value.why
        client.delete_object(Bucket=BUCKET, Key=key)
        with pytest.raises(NotFoundError, match="DVC has no copy of"):
            reads.load(section(PATH), repository.root)
        repository.write(
            ".dvc/config.local", "['remote \"cloud\"']\n    endpointurl = http://127.0.0.1:9\n"
        )
        with pytest.raises(ServiceUnavailableError, match="remote cannot be read"):
            reads.load(section(PATH), repository.root)


@pytest.mark.nightly
def test_load_from_dvc_remote_on_azure_returns_verified_data(
    reads: DvcSource, tmp_path: Path
) -> None:
    from azure.storage.blob import BlobServiceClient

    require("node", "npm")
    oid = md5(archive(1))
    key = f"dvc/files/md5/{oid[:2]}/{oid[2:]}"
    with azurite(reads.environments, "data") as opened:
        setup = (
            ("remote", "add", "-d", "cloud", "azure://data/dvc"),
            ("remote", "modify", "--local", "cloud", "connection_string", opened),
        )
        repository = push(tmp_path, reads, *setup, packages=("dvc-azure==3.1.1",))
        assert first(reads.load(section(PATH), repository.root)) == expected(1)
        with BlobServiceClient.from_connection_string(opened) as client:
            client.get_blob_client("data", key).upload_blob(archive(7), overwrite=True)
        with pytest.raises(DigestMismatchError, match="object in the DVC remote") as caught:
            reads.load(section(PATH), repository.root)
    assert caught.value.where.endswith(f"data/{key}")
    assert "AccountKey" not in str(caught.value)

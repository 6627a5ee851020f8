"""Data in DVC that was tampered with: refused by name. No DVC is needed here."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops.adapters.data.dvc import DvcSource
from onnx_ops.errors import DigestMismatchError, InfrastructureError, OnnxOpsError, RefusedError
from tests.adapters.dvc_parts import Repository, archive, expected, first, md5, pointer, section


def test_a_tampered_cache_file_is_refused_by_name(repository: Repository, reads: DvcSource) -> None:
    oid = md5(archive(0))
    repository.cached(oid).write_bytes(archive(7))
    with pytest.raises(DigestMismatchError) as caught:
        reads.load(section(rev="v1"), repository.root)
    error = caught.value
    assert "DVC cache file" in error.what
    assert error.where == str(repository.cached(oid))
    assert md5(archive(7)) in error.why
    assert f"data/train.npz.dvc leads to {oid}" in error.why
    assert "Delete that file" in error.remedy
    assert error.exit_code == 5


@settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(archive(1)) - 1), flip=st.integers(1, 255))
def test_no_changed_byte_gets_through(repository: Repository, reads: DvcSource, position: int, flip: int) -> None:
    content = bytearray(archive(1))
    content[position] ^= flip
    repository.cached(md5(archive(1))).write_bytes(bytes(content))
    with pytest.raises(DigestMismatchError, match="DVC cache file"):
        reads.load(section(), repository.root)


def test_a_cache_that_cannot_be_read_is_told(repository: Repository, reads: DvcSource) -> None:
    place = repository.cached(md5(archive(1)))
    place.unlink()
    place.mkdir()
    with pytest.raises(InfrastructureError, match="cache file cannot be read") as caught:
        reads.load(section(), repository.root)
    assert caught.value.where == str(place)


def test_a_tampered_list_of_files_is_refused_by_name(repository: Repository, reads: DvcSource) -> None:
    oid = repository.add_folder("data/many", {"a.npz": archive(3)})
    repository.commit("v3")
    other = repository.put(archive(9))
    listed = repository.cached(oid)
    listed.write_bytes(listed.read_bytes().replace(md5(archive(3)).encode(), other.encode()))
    with pytest.raises(DigestMismatchError, match=r"DVC cache file") as caught:
        reads.load(section("data/many/a.npz"), repository.root)
    assert caught.value.where == str(listed)


def test_a_pointer_that_was_changed_and_not_committed_is_refused_by_name(
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
        assert "git checkout" in caught.value.remedy
    assert first(reads.load(section(rev="v1"), repository.root)) == expected(0), "another commit is not what one sees"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("outs: [", "YAML file structure is corrupted"),
        ("- 1", "validation failed"),
        (pointer("../../../etc/passwd", 8, "train.npz"), "not an MD5"),
        (pointer("g" * 32, 8, "train.npz"), "not an MD5"),
        (pointer(md5(archive(1)), 8, "train.npz"), r"says 8 bytes; .* has \d+"),
        (pointer(md5(archive(1)), -5, "train.npz"), "its size is -5"),
    ],
)
def test_a_committed_pointer_that_cannot_be_true_is_refused_by_name(
    repository: Repository, reads: DvcSource, text: str, why: str
) -> None:
    repository.write("data/train.npz.dvc", text)
    repository.commit()
    with pytest.raises(OnnxOpsError, match=why) as caught:
        reads.load(section(), repository.root)
    assert "data/train.npz.dvc" in str(caught.value)
    assert caught.value.remedy


def test_a_swapped_md5_of_a_known_object_is_caught_by_its_size_or_the_pin(
    repository: Repository, reads: DvcSource
) -> None:
    known = repository.put(archive(6, rows=40))
    size = len(archive(1))
    repository.write("data/train.npz.dvc", pointer(known, size, "train.npz"))
    repository.commit()
    with pytest.raises(DigestMismatchError, match=f"pointer is not what DVC writes.*says {size} bytes"):
        reads.load(section(), repository.root)
    repository.write("data/train.npz.dvc", pointer(known, len(archive(6, rows=40)), "train.npz"))
    repository.commit()
    reads.load(section(), repository.root)
    with pytest.raises(DigestMismatchError, match="not the one that the pipeline pins"):
        reads.fingerprint(section(md5=md5(archive(1))), repository.root)


def test_two_pointers_for_one_path_are_refused(repository: Repository, reads: DvcSource) -> None:
    repository.write("data/other.dvc", pointer(md5(archive(0)), len(archive(0)), "train.npz"))
    repository.commit()
    with pytest.raises(RefusedError, match=r"several DVC pointers claim data/train\.npz") as caught:
        reads.fingerprint(section(), repository.root)
    assert caught.value.where == "data/other.dvc and data/train.npz.dvc"


def test_a_list_of_cloud_versions_has_nothing_to_check(repository: Repository, reads: DvcSource) -> None:
    repository.write("data/train.npz.dvc", "outs:\n- path: train.npz\n  size: 4\n  cloud: {store: {version_id: a}}\n")
    repository.commit()
    with pytest.raises(RefusedError, match=r"has no MD5 for data/train\.npz"):
        reads.load(section(), repository.root)

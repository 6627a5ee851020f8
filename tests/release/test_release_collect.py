"""Deletion from the content store.

Objects that are young, or that a result, the ledger or evidence needs, are kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops import codec
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import Digest, Manifest, canonical_json, digest_bytes, hex_digits
from onnx_ops.domain.ledger import ThresholdsFixed
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.ports import Context
from onnx_ops.release.journal import Journal
from onnx_ops.release.prune import (
    find_digests,
    find_reachable,
    find_unreferenced,
    plan_pruning,
    prune,
)
from tests.release.release_parts import MODEL, TARGET, Scene, decision_record
from tests.release.release_scenes import serving

MONTH = 30 * DAY


def collectable(context: Context) -> list[Digest | None]:
    return [one.digest for one in find_unreferenced(context, older_than_s=MONTH)]


@pytest.fixture(params=["folder", "objects"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Scene, Context]:
    """Return an endpoint that serves, and a context with the machine's clock.

    The clock determines the age of stored objects.
    """
    scene = serving("a")
    (tmp_path / "now").touch()
    scene.world.clock.advance((tmp_path / "now").stat().st_mtime - scene.world.clock.now())
    local = ContentStore(LocalObjects(tmp_path / "store"), tmp_path)
    context = scene.world.context(root=tmp_path)
    return scene, replace(
        context, open_store=lambda: local
    ) if request.param == "folder" else context


def test_find_unreferenced_lists_unused_content_without_deleting_it(
    world: tuple[Scene, Context],
) -> None:
    scene, context = world
    used, unused = context.store.put_bytes(b"used"), context.store.put_bytes(b"unused")
    key = digest_bytes(b"key")
    context.store.record(key, Manifest(files={"file": used}))
    scene.world.clock.advance(MONTH + 60)
    found = find_unreferenced(context, older_than_s=MONTH)
    assert [one.digest for one in found] == [unused]
    assert context.store.read(unused) == b"unused"
    assert all(map(context.store.forget, found))
    assert collectable(context) == []
    assert context.store.lookup(key) == Manifest(files={"file": used})


def test_find_unreferenced_with_zero_age_skips_young_objects(world: tuple[Scene, Context]) -> None:
    """A run stores its files before it records them."""
    scene, context = world
    context.store.put_bytes(b"of a run")
    scene.world.clock.advance(DAY - 3600)
    assert find_unreferenced(context, older_than_s=0) == ()
    scene.world.clock.advance(2 * 3600)
    assert len(find_unreferenced(context, older_than_s=0)) == 1
    assert collectable(context) == []


def test_find_unreferenced_keeps_transitively_referenced_content(
    world: tuple[Scene, Context],
) -> None:
    scene, context = world
    put = context.store.put_bytes
    samples, weights = put(b"samples"), put(b"weights")
    evidence = put(canonical_json({"raw": samples}))
    request = put(
        canonical_json({"inputs": {"export": {"model.onnx": weights}, "seen": [evidence]}})
    )
    context.store.record(digest_bytes(b"key"), Manifest(files={"request.json": request}))
    gone = put(canonical_json({"raw": samples}) + b" ")
    scene.world.clock.advance(MONTH + 60)
    assert collectable(context) == [gone]


def test_find_unreferenced_keeps_content_named_by_ledger_or_decision(
    world: tuple[Scene, Context],
) -> None:
    scene, context = world
    put = context.store.put_bytes
    by_ledger, by_decision, by_nobody = put(b"in the ledger"), put(b"evidence"), put(b"nobody's")
    Journal.open(context, "digits").append(ThresholdsFixed(candidate=by_ledger, thresholds=None))
    record = scene.record("1")
    decided = replace(
        decision_record(record.release, record.variant, record.manifest), evidence=by_decision
    )
    scene.forge("1", decisions={TARGET: sign_record(decided, scene.world.signer)})
    scene.world.clock.advance(MONTH + 60)
    assert collectable(context) == [by_nobody]


def test_find_unreferenced_without_registry_raises_service_unavailable_error(
    world: tuple[Scene, Context],
) -> None:
    scene, context = world
    context.store.put_bytes(b"unused")
    scene.world.clock.advance(MONTH)
    scene.world.registry.down = True
    with pytest.raises(ServiceUnavailableError):
        find_unreferenced(context, older_than_s=DAY)


def test_prune_deletes_unreferenced_content_unless_stored_again(
    world: tuple[Scene, Context],
) -> None:
    scene, context = world
    unused = context.store.put_bytes(b"unused")
    scene.world.clock.advance(MONTH + 60)
    plan = plan_pruning(context, [MODEL], keep=5, older_than_s=MONTH)
    assert [one.digest for one in plan.contents] == [unused]
    assert context.store.read(unused) == b"unused"
    before = replace(plan, contents=tuple(replace(one, at=one.at - 5) for one in plan.contents))
    # The object was stored again after the plan was made, so it is kept.
    assert prune(context, before).contents == ()
    assert context.store.read(unused) == b"unused"
    assert prune(context, plan).contents == plan.contents
    assert context.store.contents() == ()


def test_find_unreferenced_with_damaged_content_succeeds(
    world: tuple[Scene, Context], tmp_path: Path
) -> None:
    scene, context = world
    lost = context.store.put_bytes(b"lost")
    context.store.record(
        digest_bytes(b"key"),
        Manifest(files={"file.json": lost, "never there": digest_bytes(b"no")}),
    )
    files = list(tmp_path.rglob(hex_digits(lost)))
    for path in files:
        path.chmod(0o600)
        path.write_bytes(b"spoilt")
    memory = fsspec.filesystem("memory")
    names = [name for name in memory.find(scene.world.place) if hex_digits(lost) in name]
    for name in names:
        memory.pipe(name, b"spoilt")
    assert len(files) + len(names) == 1
    scene.world.clock.advance(MONTH + 60)
    assert collectable(context) == []


nodes = st.integers(0, 12).map(lambda n: digest_bytes(b"%d" % n))


@given(st.dictionaries(nodes, st.sets(nodes)), st.sets(nodes))
def test_find_reachable_returns_roots_and_all_linked_digests(
    graph: dict[Digest, set[Digest]], roots: set[Digest]
) -> None:
    found = find_reachable(roots, lambda digest: graph.get(digest, ()))
    assert roots <= found
    assert all(graph.get(digest, set()) <= found for digest in found)
    named = roots.union(*graph.values())
    assert found <= named


@given(st.lists(nodes), st.binary(max_size=40).filter(lambda data: b"sha256" not in data))
def test_find_digests_in_document_with_noise_returns_all(
    digests: list[Digest], noise: bytes
) -> None:
    assert find_digests(noise.join([codec.dumps(digests), noise])) == set(digests)

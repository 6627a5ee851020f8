"""Conformance suite for registries.

Subclass `RegistrySuite` with a `registry` fixture and a `tamper` method.

class TestMyRegistry(RegistrySuite):
    @pytest.fixture
    def registry(self) -> Registry: ...

    def tamper(self, registry, record, name): ...
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.decision import Decision, DecisionRecord, GateResult, Verdict
from onnx_ops.domain.release import Lineage, Publication, VariantRecord, VersionRecord
from onnx_ops.errors import DigestMismatchError, NotFoundError, RefusedError
from onnx_ops.ports.release import Registry
from onnx_ops.testing.fakes import FakeSigner


def linear_model(path: Path, *, slope: float = 2.0) -> None:
    """Write a tiny ONNX file: y = slope * x, with a symbolic batch, opset 18."""
    from onnx import TensorProto, helper, save_model

    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "slope"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor("slope", TensorProto.FLOAT, [1], [slope])],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    save_model(model, path)


def decision(variant: str, target: str, verdict: Verdict = Verdict.PASS) -> Decision:
    """Return a decision of one size gate."""
    result = GateResult(
        gate="size",
        metric="file",
        limit="2 MB",
        verdict=verdict,
        reason="as measured",
        estimate=1.5e6,
        unit="B",
        n=1,
    )
    return Decision(variant=variant, target=target, results=(result,))


def publication(
    folder: Path,
    *,
    model: str,
    seed: str,
    variants: Iterable[str] = ("fp32",),
    target: str = "cpu-1t",
    verdict: Verdict = Verdict.PASS,
) -> Publication:
    """Write a release of tiny models to `folder`, and return its publication.

    `seed` determines the digest and the content of the release.
    """
    release = digest_bytes(seed.encode())
    lineage = Lineage(
        pipeline="linear",
        release=release,
        git_sha="0123456789abcdef",
        data={"test": digest_bytes(b"test data")},
        parameters={"epochs": "12"},
        run="run-1",
    )
    records = tuple(
        _record(folder / seed, lineage, model, name, target, verdict) for name in variants
    )
    return Publication(model=model, lineage=lineage, variants=records)


def _record(
    folder: Path, lineage: Lineage, model: str, variant: str, target: str, verdict: Verdict
) -> VariantRecord:
    folder = folder / variant
    folder.mkdir(parents=True, exist_ok=True)
    onnx_file, evidence = folder / "content.bin", folder / f"{verdict.value}.bin"
    linear_model(onnx_file, slope=1.0 + int(lineage.release[-4:], 16) + len(variant))
    evidence.write_text(f'{{"verdict":"{verdict.value}"}}')
    manifest = Manifest(files={"model.onnx": digest_file(onnx_file)})
    judged = decision(variant, target, verdict)
    record = DecisionRecord(
        model=model,
        release=lineage.release,
        variant=variant,
        target=target,
        manifest=manifest.digest(),
        target_digest=digest_bytes(target.encode()),
        gates_digest=digest_bytes(b"gates"),
        evidence=digest_file(evidence),
        verdict=judged.verdict,
        verdicts={"size": judged.verdict},
        decided_at="2026-01-01T00:00:00Z",
        sequence=1 + judged.verdict.rank,
    )
    signed = sign_record(record, FakeSigner())
    return VariantRecord(
        variant=variant,
        files={"model.onnx": onnx_file},
        manifest=manifest,
        evidence={f"evidence/{target}.json": evidence},
        metrics={f"{target}/p50": 0.00125},
        decisions={target: judged},
        signed={target: signed},
        description=f"{verdict.value.upper()} on {target}",
        measured_on="test",
        example=b'{"inputs": {"x": [[1.0, 2.0]]}}',
    )


class RegistrySuite:
    """Conformance of a Registry.

    Each test has its own model, so that tests can run in parallel.
    """

    def tamper(self, registry: Registry, record: VersionRecord, name: str) -> None:
        """Change the stored content of a version's file, bypassing the registry."""
        raise NotImplementedError

    def test_publish_registers_version_of_each_variant(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        release = publication(tmp_path, model=_unique(), seed="a", variants=("fp32", "int8-static"))
        versions = registry.publish(release)
        assert list(versions) == ["fp32", "int8-static"]
        for record in release.variants:
            read = registry.version(release.model, versions[record.variant])
            assert read.release == release.lineage.release
            assert read.variant == record.variant
            assert read.manifest == record.manifest.digest()
            assert read.decisions == record.signed

    def test_publish_repeated_registers_nothing(self, registry: Registry, tmp_path: Path) -> None:
        release = publication(tmp_path, model=_unique(), seed="a", variants=("fp32", "int8-static"))
        versions = registry.publish(release)
        before = {v: registry.version(release.model, v) for v in versions.values()}
        assert registry.publish(release) == versions
        assert {v: registry.version(release.model, v) for v in versions.values()} == before
        for number in range(1, len(versions) + 1):
            assert registry.version(release.model, str(number)).model == release.model
        _assert_raises(NotFoundError, registry.version, release.model, str(len(versions) + 1))

    def test_publish_of_other_release_registers_other_version(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        first = registry.publish(publication(tmp_path, model=model, seed="a"))
        second = registry.publish(publication(tmp_path, model=model, seed="b"))
        assert first["fp32"] != second["fp32"]

    def test_publish_of_release_judged_again_keeps_version(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        versions = registry.publish(publication(tmp_path, model=model, seed="a"))
        again = publication(tmp_path, model=model, seed="a", verdict=Verdict.FAIL)
        assert registry.publish(again) == versions
        read = registry.version(model, versions["fp32"])
        assert read.decisions == again.variants[0].signed
        assert read.decisions["cpu-1t"].record.verdict is Verdict.FAIL

    def test_publish_of_later_variant_keeps_version_of_earlier_variant(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        first = registry.publish(publication(tmp_path, model=model, seed="a"))
        both = registry.publish(
            publication(tmp_path, model=model, seed="a", variants=("fp32", "int8-dynamic"))
        )
        assert both["fp32"] == first["fp32"]
        assert set(both) == {"fp32", "int8-dynamic"}

    def test_publish_of_rebuilt_variant_registers_other_version(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        first = registry.publish(publication(tmp_path, model=model, seed="a"))
        again = publication(tmp_path, model=model, seed="a")
        path = again.variants[0].files["model.onnx"]
        linear_model(path, slope=-1.0)
        record = replace(
            again.variants[0], manifest=Manifest(files={"model.onnx": digest_file(path)})
        )
        second = registry.publish(replace(again, variants=(record,)))
        assert second["fp32"] != first["fp32"]
        assert (
            registry.version(model, first["fp32"]).manifest
            != registry.version(model, second["fp32"]).manifest
        )

    def test_publish_of_file_unlike_manifest_raises_digest_mismatch_error(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        registry.publish(publication(tmp_path, model=model, seed="a"))
        changed = publication(tmp_path, model=model, seed="a")
        path = changed.variants[0].files["model.onnx"]
        linear_model(path, slope=-1.0)
        _assert_raises(DigestMismatchError, registry.publish, changed)

    def test_set_and_delete_alias_change_aliases(self, registry: Registry, tmp_path: Path) -> None:
        model = _unique()
        first = registry.publish(publication(tmp_path, model=model, seed="a"))["fp32"]
        second = registry.publish(publication(tmp_path, model=model, seed="b"))["fp32"]
        assert registry.aliases(model) == {}
        registry.set_alias(model, "champion-cpu-1t", first)
        registry.set_alias(model, "challenger-cpu-1t", second)
        assert registry.aliases(model) == {"champion-cpu-1t": first, "challenger-cpu-1t": second}
        registry.set_alias(model, "champion-cpu-1t", second)
        registry.delete_alias(model, "challenger-cpu-1t")
        registry.delete_alias(model, "challenger-cpu-1t")
        assert registry.aliases(model) == {"champion-cpu-1t": second}

    def test_annotate_adds_tags_to_version(self, registry: Registry, tmp_path: Path) -> None:
        model = _unique()
        version = registry.publish(publication(tmp_path, model=model, seed="a"))["fp32"]
        tags = {"onnxops.rejected": "slower than the champion: 7.5 % > 5 %, «now»"}
        registry.annotate(model, version, tags)
        assert registry.version(model, version).tags.items() >= tags.items()

    def test_fetch_returns_published_files(self, registry: Registry, tmp_path: Path) -> None:
        release = publication(tmp_path, model=_unique(), seed="a")
        record = registry.version(release.model, registry.publish(release)["fp32"])
        manifest = registry.fetch(record, _empty(tmp_path))
        assert manifest.digest() == record.manifest
        fetched = tmp_path / "fetched"
        content = {
            str(p.relative_to(fetched)): p.read_bytes() for p in fetched.rglob("*") if p.is_file()
        }
        assert content == {"model.onnx": release.variants[0].files["model.onnx"].read_bytes()}

    def test_fetch_of_tampered_file_returns_manifest_with_other_digest(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        release = publication(tmp_path, model=_unique(), seed="a")
        record = registry.version(release.model, registry.publish(release)["fp32"])
        self.tamper(registry, record, "model.onnx")
        assert registry.fetch(record, _empty(tmp_path)).digest() != record.manifest

    def test_document_after_repeated_judgement_returns_last_evidence(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model, name = _unique(), "evidence/cpu-1t.json"
        for verdict in (Verdict.PASS, Verdict.FAIL):
            release = publication(tmp_path, model=model, seed="a", verdict=verdict)
            record = registry.version(model, registry.publish(release)["fp32"])
            assert (
                registry.document(record, name) == release.variants[0].evidence[name].read_bytes()
            )
            assert [entry.evidence for entry in registry.versions(model)] == [
                release.variants[0].evidence_digest()
            ]
            for unknown in (
                "evidence/cuda.json",
                "nowhere/cpu-1t.json",
                "evidence",
                "../evidence/cpu-1t.json",
                "",
            ):
                _assert_raises(NotFoundError, registry.document, record, unknown)

    def test_versions_are_listed_oldest_first_until_deleted(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        assert registry.versions(model) == ()
        releases = [
            publication(tmp_path, model=model, seed=seed, variants=("fp32", "int8-static"))
            for seed in "ab"
        ]
        numbers = [registry.publish(release) for release in releases]
        versions = registry.versions(model)
        assert [(entry.version, entry.variant, entry.release) for entry in versions] == [
            (published[variant], variant, release.lineage.release)
            for release, published in zip(releases, numbers, strict=True)
            for variant in published
        ]
        assert all(
            entry.manifest == registry.version(model, entry.version).manifest for entry in versions
        )
        variants = [record for release in releases for record in release.variants]
        assert [entry.evidence for entry in versions] == [
            record.evidence_digest() for record in variants
        ]
        assert versions[0].created_at <= versions[-1].created_at
        registry.set_alias(model, "champion-cpu-1t", versions[0].version)
        _assert_raises(RefusedError, registry.delete_version, model, versions[0].version)
        registry.delete_version(model, versions[1].version)
        registry.delete_version(model, versions[1].version)
        assert [entry.version for entry in registry.versions(model)] == [
            versions[0].version,
            *(e.version for e in versions[2:]),
        ]
        assert registry.version(model, versions[0].version).manifest == versions[0].manifest

    def test_publish_of_deleted_version_registers_it_again(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        release = publication(tmp_path, model=model, seed="a")
        registry.delete_version(model, registry.publish(release)["fp32"])
        record = registry.version(model, registry.publish(release)["fp32"])
        assert registry.fetch(record, _empty(tmp_path)).digest() == record.manifest

    def test_all_aliases_equal_aliases_of_each_model(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        one, two = _unique(), _unique()
        for model in (one, two):
            registry.publish(
                publication(tmp_path, model=model, seed="a", variants=("fp32", "int8"))
            )
        assert not registry.all_aliases()[one]
        registry.set_alias(one, "champion-cpu-1t", "1")
        registry.set_alias(one, "challenger-cpu-1t", "2")
        registry.set_alias(two, "champion-cpu-1t", "2")
        registry.delete_alias(two, "champion-cpu-1t")
        aliases = registry.all_aliases()
        assert (
            aliases[one]
            == {"champion-cpu-1t": "1", "challenger-cpu-1t": "2"}
            == registry.aliases(one)
        )
        assert not aliases[two]

    def test_registry_with_unknown_names_has_no_aliases_and_raises_not_found_error(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        model = _unique()
        assert registry.aliases(model) == {}
        registry.delete_alias(model, "champion-cpu-1t")
        _assert_raises(NotFoundError, registry.version, model, "1")
        _assert_raises(NotFoundError, registry.set_alias, model, "champion-cpu-1t", "1")
        registry.publish(publication(tmp_path, model=model, seed="a"))
        _assert_raises(NotFoundError, registry.version, model, "2")
        _assert_raises(NotFoundError, registry.set_alias, model, "champion-cpu-1t", "2")
        _assert_raises(NotFoundError, registry.annotate, model, "2", {"a": "b"})

    def test_where_of_model_is_not_empty(self, registry: Registry) -> None:
        assert registry.where(_unique())

    def test_page_is_url_or_empty(self, registry: Registry, tmp_path: Path) -> None:
        model = _unique()
        registry.publish(publication(tmp_path, model=model, seed="a"))
        page = registry.page(model, "1", "report.html")
        assert page == "" or (
            page.startswith(("http://", "https://")) and page.endswith("report.html")
        )
        _assert_raises(NotFoundError, registry.page, model, "2", "report.html")


def _unique() -> str:
    return f"linear-{uuid.uuid4().hex[:12]}"


def _empty(folder: Path) -> Path:
    path = folder / "fetched"
    path.mkdir()
    return path


def _assert_raises(kind: type[Exception], call: Callable[..., object], *arguments: object) -> None:
    try:
        call(*arguments)
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")

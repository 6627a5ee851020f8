"""Results that the handler reuses although they are outside the store.

They are registrations and deployments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.app.context import Project
from onnx_ops.app.handler import StageHandler, binding, was_compared
from onnx_ops.app.project import PreparedPipeline, execute
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes, short_digest
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import ChampionFacts
from onnx_ops.domain.pipeline import Benchmark, Deploy, Export, Pipeline
from onnx_ops.domain.plan import Plan, Stage, StageKind
from onnx_ops.domain.release import Choice, Lineage, Publication, Registration, VariantRecord
from onnx_ops.domain.rollout import Action, ActionKind, Roles, build_split_state, format_alias
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import RefusedError, ServiceUnavailableError
from onnx_ops.ports import Context
from onnx_ops.release.effects import perform_action
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.testing.fakes import FakeWorld
from tests.support.endpoints import fileless_deployment
from tests.support.evidence import make_evidence

KEY = digest_bytes(b"key")
REGISTER = Stage(id="register", kind=StageKind.REGISTER, settings={})


def registered(context: Context, run: Digest) -> Manifest:
    """Register a release of one variant, whose evidence names the run."""
    document = context.root / f"{short_digest(run)}.json"
    document.write_text(run)
    (context.root / "model.onnx").write_text("model")
    record = VariantRecord(
        variant="fp32",
        files={"model.onnx": context.root / "model.onnx"},
        manifest=Manifest(files={"model.onnx": digest_bytes(b"model")}),
        evidence={"gates.json": document},
    )
    lineage = Lineage(pipeline="p", release=digest_bytes(b"release"), run=run)
    registration = Registration(
        run=run,
        model="m",
        release=lineage.release,
        versions=context.registry().publish(
            Publication(model="m", lineage=lineage, variants=(record,))
        ),
        choices=(Choice(target="cpu", variant="fp32", verdict=Verdict.PASS, reason="it passes"),),
        where="memory",
        evidence={"fp32": record.evidence_digest()},
    )
    return Manifest(files={"registration.json": context.store.put_bytes(codec.dumps(registration))})


def handler_of(context: Context) -> StageHandler:
    """Return a handler whose registration is the only computed stage.

    The registration names the key of its stage as its run.
    """

    def perform(_: Stage, key: Digest, __: Mapping[str, Manifest]) -> Manifest:
        return registered(context, key)

    return StageHandler(context=context, perform=perform)


def deploy(*, auto: bool = False, **section: object) -> Stage:
    entry = Deploy(endpoint="e", provider="fake", target="cpu", **section)  # type: ignore[arg-type]
    settings = {
        "model": "m",
        "target_digest": KEY,
        "pipeline": "p",
        "auto": auto,
        "section": codec.to_json(entry),
    }
    tolerates = ("promote@cpu",) if auto else ()
    return Stage(
        id="deploy/e", kind=StageKind.DEPLOY, settings=settings, target="cpu", tolerates=tolerates
    )


def test_deploy_stage_without_promotion_updates_policy_of_bound_endpoint_only(
    tmp_path: Path,
) -> None:
    context = FakeWorld().context(root=tmp_path)
    handler, inputs = handler_of(context), {"register": registered(context, KEY)}
    assert handler.refusal(deploy(auto=True), inputs) == "needs promote@cpu, which did not complete"
    assert handler.refusal(deploy(auto=True), {**inputs, "promote@cpu": Manifest(files={})}) == ""
    handler.execute(deploy(), KEY, inputs)
    patient = RolloutPolicy(scale_down_delay=7200.0)
    assert handler.refusal(deploy(auto=True, rollout=patient), inputs) == ""
    handler.execute(deploy(auto=True, rollout=patient), KEY, inputs)
    assert context.ledger.state("e").policy == patient


def test_execute_of_run_that_drops_endpoint_requires_abandon_reason(tmp_path: Path) -> None:
    (tmp_path / "onnx-ops.toml").write_text('signing = "off"\n')
    world = FakeWorld()
    context = world.context(root=tmp_path)
    config, section = binding(deploy())
    bind_endpoint(context, config, section.rollout)
    served = fileless_deployment("v1")
    state, roles = build_split_state(None, served, 100), Roles(stable=served)
    journal = Journal.open(context, "e")
    perform_action(
        journal, Action(kind=ActionKind.FIRST, state=state, roles=roles, why="new"), lambda _: None
    )
    register = Stage(id="register", kind=StageKind.REGISTER, settings={}, needs=("train",))
    pipeline = Pipeline(
        pipeline="p", export=Export(framework="onnx"), benchmark=Benchmark(targets=("cpu",))
    )
    prepared = PreparedPipeline(
        pipeline=pipeline, targets={}, plan=Plan(pipeline="p", stages=(register,))
    )
    project = Project(settings=load_settings(tmp_path), context=context)
    with pytest.raises(RefusedError, match="e would run unmanaged") as caught:
        execute(project, prepared)
    assert caught.value.exit_code == 5
    assert context.ledger.state("e").config == config
    execute(project, replace(prepared, plan=Plan(pipeline="p", stages=())))
    execute(project, prepared, abandon="renamed")
    assert context.ledger.state("e").config is None


def test_cached_registration_after_other_registration_of_release_is_none(tmp_path: Path) -> None:
    """The gates are changed, and changed back."""
    handler = handler_of(FakeWorld().context(root=tmp_path))
    stage = REGISTER
    strict, loose = digest_bytes(b"strict gates"), digest_bytes(b"loose gates")
    for key, other in ((strict, loose), (loose, strict), (strict, loose)):
        assert handler.cached(stage, key, {}) is None
        manifest = handler.execute(stage, key, {})
        assert handler.cached(stage, key, {}) == manifest
        assert handler.cached(stage, other, {}) is None


@pytest.mark.parametrize(
    ("champion", "release", "compared", "expected"),
    [
        (False, b"other", b"", True),
        (True, b"other", b"", False),
        (True, b"other", b"older", False),
        (True, b"other", b"model", True),
        (True, b"release", b"", True),
    ],
    ids=[
        "no champion",
        "no comparison",
        "another champion",
        "this champion",
        "itself the champion",
    ],
)
def test_was_compared_without_endpoint_uses_champion_in_registry(
    tmp_path: Path, champion: bool, release: bytes, compared: bytes, expected: bool
) -> None:
    context = FakeWorld().context(root=tmp_path)
    # This call registers a version of the release b"release".
    registered(context, KEY)
    if champion:
        context.registry().set_alias("m", format_alias("champion", "cpu"), "1")
    champion_manifest = Manifest(files={"model.onnx": digest_bytes(compared)}).digest()
    facts = (
        ChampionFacts(version="1", manifest=champion_manifest, size_bytes=1) if compared else None
    )
    evidence = make_evidence(target="cpu", release=digest_bytes(release), champion=facts)
    assert was_compared(context, "m", evidence) is expected


def test_cached_registration_of_other_registry_is_none(tmp_path: Path) -> None:
    """Two registries over one store are used in turn."""
    context, stage = FakeWorld().context(root=tmp_path), REGISTER
    first, second = (
        handler_of(context),
        handler_of(replace(context, registry=FakeWorld().context(root=tmp_path).registry)),
    )
    strict, loose = digest_bytes(b"strict gates"), digest_bytes(b"loose gates")
    first.execute(stage, strict, {})
    assert second.cached(stage, strict, {}) is None
    second.execute(stage, loose, {})
    assert first.cached(stage, strict, {}) is not None
    assert first.cached(stage, loose, {}) is None, "the first registry still shows the strict gates"


def test_cached_registration_of_deleted_version_is_none(tmp_path: Path) -> None:
    world = FakeWorld()
    handler = handler_of(world.context(root=tmp_path))
    handler.execute(REGISTER, KEY, {})
    world.registry.delete_version("m", "1")
    assert handler.cached(REGISTER, KEY, {}) is None
    assert replace(handler, confirms=False).cached(REGISTER, KEY, {}) is not None, (
        "a plan does not ask the registry"
    )


def test_cached_registration_with_unreachable_registry_is_none(tmp_path: Path) -> None:
    world = FakeWorld()
    handler = handler_of(world.context(root=tmp_path))
    handler.execute(REGISTER, KEY, {})
    world.registry.down = True
    assert handler.cached(REGISTER, KEY, {}) is None
    with pytest.raises(ServiceUnavailableError):
        handler.execute(REGISTER, KEY, {})


def test_cached_deployment_after_changed_options_or_policy_is_none(tmp_path: Path) -> None:
    context = FakeWorld().context(root=tmp_path)
    handler, inputs = handler_of(context), {"register": registered(context, KEY)}

    steps = RolloutPolicy(steps=(0.1, 1.0))
    for changed in (
        deploy(),
        deploy(rollout=steps),
        deploy(rollout=steps, options={"port": 8000}),
    ):
        assert handler.cached(changed, KEY, inputs) is None
        handler.execute(changed, KEY, inputs)
        assert handler.cached(changed, KEY, inputs) is not None

"""Results of a run: decisions, choices, versions and one exit code.

Choices and evidence are recorded under the commit of the run.
"""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onnx_ops import codec
from onnx_ops.app.context import Project, ask_git, resolve_commit
from onnx_ops.domain.artifact import Digest, Manifest, digest_json
from onnx_ops.domain.decision import Decision, GateResult, TargetObjective, Verdict
from onnx_ops.domain.evidence import EXPORT, Evidence
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.plan import Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.domain.release import BaseRelease, Choice, Provenance, Registration
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.pipeline import RunResult
from onnx_ops.ports import Context, Store
from onnx_ops.release.promote import PromotionResult
from onnx_ops.statistics.variants.choice import choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Results of a run.

    `awaiting` are the targets whose chosen variant a user must promote. `left` are the promotions
    that the run skipped, since another version has replaced the version to promote.
    """

    pipeline: str
    executed: tuple[str, ...]
    outcomes: tuple[StageOutcome, ...]
    decisions: tuple[Decision, ...]
    choices: tuple[Choice, ...]
    registration: Registration | None
    awaiting: tuple[str, ...]
    left: tuple[PromotionResult, ...]
    exit_code: int


def locate_report(registration: Registration) -> str:
    """Return the URL of the release's report, or a command that writes the report.

    The command is returned if the registry has no web pages.
    """
    version = next(iter(registration.versions.values()))
    return registration.report or f"onnx-ops report {registration.model}/{version}"


def evidence_of(summary: Summary, store: Store) -> Mapping[Digest, Evidence]:
    """Return the evidence of a run by the digest under which it is stored."""
    stored = [
        outcome.manifest["evidence.json"]
        for outcome in summary.outcomes
        if outcome.manifest is not None and "evidence.json" in outcome.manifest
    ]
    return {digest: codec.loads(store.read(digest), Evidence) for digest in stored}


def render_report(
    summary: Summary, project: Project, environ: Mapping[str, str], base: BaseRelease | None = None
) -> str:
    """Return the HTML report of a run, even if the run has no release."""
    from onnx_ops.measure.paired_rows import compare_rows
    from onnx_ops.pipeline.stages.register import read_example
    from onnx_ops.reporting.html import release_report

    root, context = project.settings.root, project.context
    evidence = evidence_of(summary, context.store)
    manifests = {one.stage: one.manifest for one in summary.outcomes if one.manifest is not None}
    return release_report(
        summary.decisions,
        tuple(evidence.values()),
        summary.choices,
        None,
        {} if summary.registration is None else summary.registration.versions,
        digests={(one.variant, one.target): digest for digest, one in evidence.items()},
        provenance=read_provenance(root, context.clock.now(), environ),
        base=base,
        pairs=partial(compare_rows, context.store),
        example=read_example(manifests, context.store),
    )


def summarize(pipeline: Pipeline, result: RunResult, context: Context) -> Summary:
    """Return the decisions, choices and versions of a finished run."""
    gates = [
        stage
        for stage in result.plan.stages
        if stage.kind is StageKind.GATE
        and _root(stage.id, result.outcomes).status is not StageStatus.SKIPPED
    ]
    decisions = tuple(_read_decision(stage, result.outcomes, context.store) for stage in gates)
    choices = tuple(_choose_variants(pipeline.benchmark.targets, gates, decisions))
    registration = _read_registration(result.outcomes, context.store)
    is_manual = pipeline.register is not None and pipeline.register.promote == "manual"
    chosen = tuple(choice.target for choice in choices if choice.variant is not None)
    return Summary(
        pipeline=pipeline.pipeline,
        executed=result.executed(),
        outcomes=tuple(result.outcomes[stage.id] for stage in result.plan.stages),
        decisions=decisions,
        choices=choices,
        registration=registration,
        awaiting=chosen if is_manual and registration is not None else (),
        left=tuple(_list_left(result, context)),
        exit_code=_exit_code(result, choices),
    )


def _read_decision(gate: Stage, outcomes: Mapping[str, StageOutcome], store: Store) -> Decision:
    """Return the decision of a gate stage.

    If the gate stage has no result, the decision has the verdict ERROR.
    """
    manifest = outcomes[gate.id].manifest
    if manifest is not None:
        return codec.loads(store.read(manifest["decision.json"]), Decision)
    cause = _root(gate.id, outcomes)
    reason = f"{cause.stage}: {cause.reason}"
    unmeasured = GateResult(
        gate="measurement", metric="", limit="", verdict=Verdict.ERROR, reason=reason
    )
    return Decision(variant=gate.variant or "", target=gate.target or "", results=(unmeasured,))


def _choose_variants(
    targets: Iterable[str], gates: Sequence[Stage], decisions: Sequence[Decision]
) -> Iterator[Choice]:
    """Yield the choice of each target that has decisions."""
    for target in targets:
        candidates = tuple(decision for decision in decisions if decision.target == target)
        if candidates:
            hints = next(gate.hints for gate in gates if gate.target == target)
            yield choose(candidates, codec.from_json(hints.get("policy", {}), TargetObjective))


def _read_registration(outcomes: Mapping[str, StageOutcome], store: Store) -> Registration | None:
    """Return the registration of a run; None if it registered nothing."""
    outcome = outcomes.get("register")
    if outcome is None or outcome.manifest is None:
        return None
    return codec.loads(store.read(outcome.manifest["registration.json"]), Registration)


def _list_left(result: RunResult, context: Context) -> Iterator[PromotionResult]:
    """Yield the promotions that a run skipped; see `Summary.left`."""
    for stage in result.plan.stages:
        manifest = result.outcomes[stage.id].manifest
        if (
            stage.kind is StageKind.PROMOTE
            and manifest is not None
            and "promotion.json" in manifest
        ):
            done = codec.loads(context.store.read(manifest["promotion.json"]), PromotionResult)
            if done.left:
                yield done


def _root(stage_id: str, outcomes: Mapping[str, StageOutcome]) -> StageOutcome:
    """Return the outcome of the stage that caused a stage to be skipped.

    If the stage was not skipped, the result is its own outcome.
    """
    outcome = outcomes[stage_id]
    while outcome.status is StageStatus.SKIPPED:
        needed = outcome.reason.removeprefix("needs ").partition(",")[0]
        if needed not in outcomes:
            break
        outcome = outcomes[needed]
    return outcome


def _exit_code(result: RunResult, choices: tuple[Choice, ...]) -> int:
    """Return the exit code of a run.

    If targets were judged and each has a chosen variant, only errors of release stages determine
    the code. Otherwise wrong input takes precedence over verdicts.
    """
    missing = [c.verdict for c in choices if c.variant is None]
    if choices and not missing:
        kinds = (StageKind.REGISTER, StageKind.PROMOTE, StageKind.DEPLOY)
        release = {stage.id for stage in result.plan.stages if stage.kind in kinds}
        return max(
            (error.exit_code for stage, error in result.errors.items() if stage in release),
            default=0,
        )
    codes = [error.exit_code for error in result.errors.values()]
    if UserError.exit_code in codes:
        return UserError.exit_code
    for verdict in (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE):
        if verdict in missing:
            return verdict.exit_code
    return max(codes, default=0)


_CHOICES, _EVIDENCE = "choices.json", "evidence/"
_COMMITS = 100
"""Maximum number of commits of the base branch to search for a record.

Most commits change no model, and are usually left unmeasured.
"""

_SHARED = 20
"""Number of commits, those exported last, whose records `export_commit` keeps."""

_COMMIT_VARIABLES = ("GITHUB_SHA", "CI_COMMIT_SHA", "BUILD_SOURCEVERSION")
_AUTHOR_VARIABLES = ("GITHUB_ACTOR", "GITLAB_USER_NAME", "BUILD_REQUESTEDFOR")
_BRANCH_VARIABLES = (
    "GITHUB_HEAD_REF",
    "GITHUB_REF_NAME",
    "CI_COMMIT_REF_NAME",
    "SYSTEM_PULLREQUEST_SOURCEBRANCH",
    "BUILD_SOURCEBRANCHNAME",
)
_BASE_VARIABLES = (
    "GITHUB_BASE_REF",
    "CI_MERGE_REQUEST_TARGET_BRANCH_NAME",
    "SYSTEM_PULLREQUEST_TARGETBRANCH",
)
"""CI variables that name the target branch: of GitHub, GitLab and Azure."""

_REF_VARIABLES = ("GITHUB_REF", "BUILD_SOURCEBRANCH")
_MERGED_REF = r"refs/pull/\d+/merge"
"""Pattern of the checked-out reference of a pull request: of GitHub and Azure."""


def read_provenance(root: Path, now: float, environ: Mapping[str, str]) -> Provenance:
    """Return the author, time and commit of this state of the project.

    Author and commit come from git or, without a repository, from the variables of a CI service.
    The branch comes from these variables or, outside a CI service, from git. The time is `now`.
    """
    head = "HEAD"
    if _is_merge_checked_out(environ) and ask_git(
        root, "rev-parse", "--verify", "--quiet", "HEAD^2", may_fail=True
    ):
        # The second parent of the merge commit is the last commit of the pull request.
        head = "HEAD^2"
    commit, _, author = (
        ask_git(root, "log", "-1", "--format=%H%x00%an", head, may_fail=True)
        .strip()
        .partition("\0")
    )
    branch = ask_git(root, "rev-parse", "--abbrev-ref", "HEAD", may_fail=True).strip()
    service_branch = _first(environ, _BRANCH_VARIABLES).removeprefix("refs/heads/")
    return Provenance(
        at=datetime.datetime.fromtimestamp(now, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        author=author or _first(environ, _AUTHOR_VARIABLES),
        commit=commit or _first(environ, _COMMIT_VARIABLES),
        branch=service_branch or (branch if branch != "HEAD" else ""),
        changed=_is_changed(root),
    )


def _is_merge_checked_out(environ: Mapping[str, str]) -> bool:
    """Return whether the CI service checks out a merge commit of a pull request.

    GitLab does so only in merged results pipelines, and sets this variable only there. Otherwise,
    it checks out the source branch.
    """
    return bool(
        re.fullmatch(_MERGED_REF, _first(environ, _REF_VARIABLES))
        or environ.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA")
    )


def read_base_branch(environ: Mapping[str, str]) -> str:
    """Return the target branch of a pull request from the CI service's variables.

    The result is empty outside a pull request.
    """
    return _first(environ, _BASE_VARIABLES).removeprefix("refs/heads/")


def record_commit(root: Path, store: Store, summary: Summary) -> None:
    """Record choices and evidence of a run under the checked-out commit.

    Later comparisons use the record. Nothing is recorded if choices are missing, outside a
    repository, or if tracked files differ from the commit.
    """
    commit = resolve_commit(root, "HEAD")
    if not summary.choices or not commit or _is_changed(root):
        return
    wanted = {(choice.variant or EXPORT, choice.target) for choice in summary.choices}
    files = {_CHOICES: store.put_bytes(codec.dumps(summary.choices))}
    for digest, evidence in evidence_of(summary, store).items():
        if (evidence.variant, evidence.target) in wanted:
            files[f"{_EVIDENCE}{evidence.variant}@{evidence.target}.json"] = digest
            if evidence.raw is not None:
                files[f"raw/{evidence.variant}@{evidence.target}.npz"] = evidence.raw
    store.record(_key(root, summary.pipeline, commit), Manifest(files=files))


def export_commit(root: Path, store: Store, pipeline: str, folder: Path) -> None:
    """Copy the record of the checked-out commit to a folder.

    Runs with another store read the record from this folder. Only the records of the commits that
    were exported last remain in the folder.
    """
    commit = resolve_commit(root, "HEAD")
    recorded = store.lookup(_key(root, pipeline, commit)) if commit else None
    if recorded is None:
        return
    for name, digest in recorded.files.items():
        place = folder / commit / pipeline / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(store.read(digest))
    (folder / commit).touch()
    for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_SHARED]:
        shutil.rmtree(old)


def import_commits(root: Path, store: Store, folder: Path) -> None:
    """Record the commits that `export_commit` wrote to a folder, if it exists."""
    for place in sorted(folder.glob("*/*/")):
        files = {
            path.relative_to(place).as_posix(): store.put_file(path)
            for path in place.rglob("*")
            if path.is_file() and not path.is_symlink()
        }
        if _CHOICES in files:
            # The key is computed instead of read from the files, so that the files cannot replace
            # other results.
            store.record(_key(root, place.name, place.parent.name), Manifest(files=files))


def find_base(root: Path, store: Store, pipeline: str, base: str, name: str = "") -> BaseRelease:
    """Return the record of the commit at which this branch diverged from its base.

    If that commit has no record, the last recorded commit before it is used; at most `_COMMITS`
    commits are searched. The checked-out commit is skipped unless tracked files differ from it.
    Without a record, the result has the reason in `why`. The base is a tag, a commit or a branch,
    which can exist only at `origin`. `name` is the base's display name.
    """
    name = name or base
    try:
        tip = resolve_commit(root, base) or resolve_commit(root, f"origin/{base}")
        if not tip:
            return BaseRelease(
                branch=name,
                why=f"git found no commit {base!r} in {root}. Fetch {base} with its history.",
            )
        fork = (
            ask_git(root, "merge-base", "--end-of-options", tip, "HEAD", may_fail=True).strip()
            or tip
        )
        listed = ask_git(
            root, "rev-list", "--first-parent", f"--max-count={_COMMITS}", fork, "--"
        ).split()
        own = "" if _is_changed(root) else resolve_commit(root, "HEAD")
        for commit in listed:
            recorded = None if commit == own else store.lookup(_key(root, pipeline, commit))
            if recorded is not None:
                evidence = [
                    digest for file, digest in recorded.files.items() if file.startswith(_EVIDENCE)
                ]
                return BaseRelease(
                    branch=name,
                    commit=commit,
                    choices=codec.loads(store.read(recorded[_CHOICES]), tuple[Choice, ...]),
                    evidence=tuple(
                        codec.loads(store.read(digest), Evidence) for digest in evidence
                    ),
                )
    except OnnxOpsError as error:
        return BaseRelease(branch=name, why=str(error))
    why = (
        f"No measurement is recorded for {name} in the last {_COMMITS} commits before this branch. "
        "To record one, run this pipeline on one of these commits with this store."
    )
    return BaseRelease(branch=name, why=why)


def find_run_base(
    root: Path, store: Store, pipeline: str, environ: Mapping[str, str], base: str = ""
) -> BaseRelease | None:
    """Return the release with which a run is compared; None for a run without a base.

    `base` is a tag, a commit or a branch. If it is empty, the target branch of the pull request is
    used, which the variables of the CI service name.
    """
    base = base or read_base_branch(environ)
    return find_base(root, store, pipeline, base) if base else None


def _key(root: Path, pipeline: str, commit: str) -> Digest:
    """Return the key of the record of a commit and pipeline.

    The key contains the project's folder, since one repository can have several projects.
    """
    folder = ask_git(root, "rev-parse", "--show-prefix", may_fail=True).strip()
    return digest_json(["commit", folder, pipeline, commit])


def _is_changed(root: Path) -> bool:
    return bool(
        ask_git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", may_fail=True)
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")

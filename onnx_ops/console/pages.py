"""Render the pages of the console from shared reads."""

from __future__ import annotations

import asyncio
import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from onnx_ops.app.context import Project
from onnx_ops.config.targets import profile_names
from onnx_ops.console.shared_reads import SharedReads
from onnx_ops.console.snapshot import EndpointReading, Snapshot, SnapshotReader
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.ledger import LedgerEntry
from onnx_ops.domain.pool import PoolStatus
from onnx_ops.domain.release import ListedVersion, VersionRecord
from onnx_ops.domain.rollout import ActionKind, OperatorCommand
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFoundError, OnnxOpsError
from onnx_ops.printable import show
from onnx_ops.release.audit import ReevaluatedDecision, reevaluate
from onnx_ops.release.entry_log import EntryLog, read_entry_log
from onnx_ops.release.status import HistoryLine, RolloutTimeline, build_lines, build_timeline
from onnx_ops.reporting.html import list_gates, load_environment
from onnx_ops.reporting.plots import Figure, evidence_figure
from onnx_ops.reporting.rollout_plots import draw_traffic, odds_figure, share_figure

if TYPE_CHECKING:
    from jinja2 import Environment

_REGISTRY_TTL_S = 30.0
"""Time in seconds for which a read of the registry is reused for all viewers."""
_POOLS_TTL_S = 15.0
_HISTORY_ROWS = 100
_MAX_SKIP = 10**7
_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered page and its HTTP status."""

    html: str
    status: int = 200


@dataclass(frozen=True, slots=True)
class _EndpointDetail:
    """The log of an endpoint, with its last rollout and the plot of its evidence.

    The log `is_whole` if it has every entry of the ledger. Otherwise, missing entries can contain a
    rollout.
    """

    log: EntryLog
    timeline: RolloutTimeline | None
    evidence: Figure | None
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _ReleaseDetail:
    """One registered version. `problem` is why its decisions were not judged again."""

    record: VersionRecord
    aliases: tuple[str, ...]
    decisions: tuple[ReevaluatedDecision, ...]
    problem: OnnxOpsError | None


class Pages:
    """The pages of one project.

    Endpoints are read at most once in `interval_s` seconds. All values on a page except plots are
    escaped, and control characters are visible.
    """

    def __init__(self, project: Project, reads: SharedReads, *, interval_s: float) -> None:
        self._project = project
        self._context = project.context
        self._reads = reads
        self._interval_s = interval_s
        self._snapshots = SnapshotReader(project.context)
        self._logs: dict[str, EntryLog] = {}

    async def read_snapshot(self) -> Snapshot:
        """Return the snapshot that all viewers share."""
        try:
            return await self._reads.get("snapshot", self._snapshots.read, ttl_s=self._interval_s)
        except OnnxOpsError as error:
            return Snapshot(at=self._context.clock.now(), error=error)

    async def show_endpoints(self) -> Page:
        """Return the page of all endpoints."""
        return await self._render("endpoints.html", await self.read_snapshot(), place="endpoints")

    async def show_endpoint(self, name: str) -> Page:
        """Return the page of one endpoint."""
        snapshot = await self.read_snapshot()
        reading = snapshot.endpoints.get(name)
        if reading is None:
            return await self.show_missing()
        detail, problem = None, None
        head = -1 if reading.state is None else reading.state.head
        try:
            key = ("endpoint", name, head, str(reading.error or ""))
            ttl_s = self._interval_s if reading.error is not None else math.inf
            detail = await self._reads.get(key, lambda: self._read_endpoint(name), ttl_s=ttl_s)
        except OnnxOpsError as error:
            problem = error
        return await self._render(
            "endpoint.html",
            snapshot,
            place="endpoints",
            reading=reading,
            detail=detail,
            problem=problem,
            figures=_plot_rollout(reading, detail, snapshot.at),
            commands=list_commands(reading),
        )

    async def show_history(self, endpoint: str, skip: str) -> Page:
        """Return the page with the history of one or all ledgers, newest entries first.

        Args:
            endpoint: name of the ledger; empty for all ledgers.
            skip: number of newest entries to leave out, in decimal digits, at most `_MAX_SKIP`.
                Other text counts as 0.
        """
        snapshot = await self.read_snapshot()
        start = _parse_skip(skip)
        lines: Sequence[tuple[HistoryLine, str | None]] = ()
        names: Sequence[str] = ()
        problems: Mapping[str, OnnxOpsError] = {}
        total = 0
        try:
            names = await self._reads.get(
                "ledgers", self._context.ledger.endpoints, ttl_s=self._interval_s
            )
            if endpoint and endpoint not in names:
                return await self.show_missing()
            entries, problems = await self._reads.get(
                ("history", endpoint),
                lambda: self._read_history((endpoint,) if endpoint else names),
                ttl_s=self._interval_s,
            )
            total, shown = len(entries), entries[start : start + _HISTORY_ROWS]
            texts = build_lines([entry for entry, _ in shown])
            lines = [(line, grant) for line, (_, grant) in zip(texts, shown, strict=True)]
        except OnnxOpsError as error:
            problems = {endpoint or "ledger": error}
        return await self._render(
            "history.html",
            snapshot,
            place="history",
            endpoint=endpoint,
            names=names,
            lines=lines,
            problems=problems,
            total=total,
            start=start,
            rows=_HISTORY_ROWS,
        )

    async def show_releases(self) -> Page:
        """Return the page with all registered versions of the snapshot's models."""
        snapshot = await self.read_snapshot()
        results = await asyncio.gather(
            *(self._read_versions(model) for model in snapshot.models), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, OnnxOpsError):
                raise result
        models = dict(zip(snapshot.models, results, strict=True))
        problems = {name: r for name, r in models.items() if isinstance(r, OnnxOpsError)}
        versions = {name: r for name, r in models.items() if not isinstance(r, BaseException)}
        return await self._render(
            "releases.html", snapshot, place="releases", versions=versions, problems=problems
        )

    async def show_release(self, model: str, version: str) -> Page:
        """Return the page of one registered version with its gates and report."""
        snapshot = await self.read_snapshot()
        detail, has_report = None, False
        problem: OnnxOpsError | None = None
        try:
            detail = await self._find_release(model, version)
        except NotFoundError:
            return await self.show_missing()
        except OnnxOpsError as error:
            problem = error
        if detail is not None:
            try:
                has_report = bool(await self.read_report(model, version))
            except NotFoundError:
                has_report = False
            except OnnxOpsError as error:
                problem = error
        return await self._render(
            "version.html",
            snapshot,
            place="releases",
            model=model,
            version=version,
            detail=detail,
            problem=problem,
            has_report=has_report,
            gates=[] if detail is None else _list_gates(detail),
            commands=[] if detail is None else list_promotions(detail, model, version),
        )

    async def read_report(self, model: str, version: str) -> bytes:
        """Return the stored report of a version.

        Raises:
            NotFoundError: the version or its report does not exist.
            OnnxOpsError: the snapshot or the registry cannot be read.
        """
        detail = await self._find_release(model, version)
        return await self._reads.get(
            ("report", model, version),
            lambda: self._context.registry().document(detail.record, "report.html"),
            ttl_s=_REGISTRY_TTL_S,
        )

    async def show_targets(self) -> Page:
        """Return the page of targets and pools."""
        snapshot = await self.read_snapshot()
        targets: Mapping[str, tuple[str, Target | OnnxOpsError]] = {}
        pools: Sequence[PoolStatus] = ()
        problem, pools_problem = None, None
        try:
            targets = await self._reads.get("targets", self._read_targets, ttl_s=self._interval_s)
        except OnnxOpsError as error:
            problem = error
        try:
            pools = await self._reads.get("pools", self._read_pools, ttl_s=_POOLS_TTL_S)
        except OnnxOpsError as error:
            pools_problem = error
        return await self._render(
            "targets.html",
            snapshot,
            place="targets",
            targets=targets,
            problem=problem,
            pools=pools,
            pools_problem=pools_problem,
        )

    async def show_missing(self) -> Page:
        """Return the page that reports an unknown address."""
        page = await self._render("missing.html", await self.read_snapshot(), place="")
        return Page(page.html, 404)

    async def _render(self, template: str, snapshot: Snapshot, **values: Any) -> Page:
        """Render a page on a thread, so that rendering delays no other viewer."""
        values = {"snapshot": snapshot, "interval_s": self._interval_s, **values}
        text = await asyncio.to_thread(_load_templates().get_template(template).render, values)
        return Page(show(text))

    async def _read_versions(
        self, model: str
    ) -> tuple[Sequence[ListedVersion], Mapping[str, Sequence[str]]]:
        """Return the versions of a model, newest first, and the aliases by version."""

        def read() -> tuple[Sequence[ListedVersion], Mapping[str, Sequence[str]]]:
            registry = self._context.registry()
            aliases: dict[str, list[str]] = {}
            for alias, version in sorted(registry.aliases(model).items()):
                aliases.setdefault(version, []).append(alias)
            return registry.versions(model)[::-1], aliases

        return await self._reads.get(("versions", model), read, ttl_s=_REGISTRY_TTL_S)

    async def _find_release(self, model: str, version: str) -> _ReleaseDetail:
        """Return a version of one of the snapshot's models.

        Names of other models cause no request to the registry.

        Raises:
            NotFoundError: none of these models has the version.
            OnnxOpsError: the snapshot or the registry cannot be read.
        """
        missing = NotFoundError("there is no such version", where=f"{model}/{version}")
        snapshot = await self.read_snapshot()
        if snapshot.error is not None:
            raise snapshot.error
        if model not in snapshot.models:
            raise missing
        versions, aliases = await self._read_versions(model)
        if version not in {listed.version for listed in versions}:
            raise missing
        return await self._reads.get(
            ("release", model, version),
            lambda: self._read_release(model, version, tuple(aliases.get(version, ()))),
            ttl_s=_REGISTRY_TTL_S,
        )

    def _read_release(self, model: str, version: str, aliases: tuple[str, ...]) -> _ReleaseDetail:
        record = self._context.registry().version(model, version)
        try:
            decisions = reevaluate(self._context, model, version)
        except OnnxOpsError as error:
            return _ReleaseDetail(record, aliases, (), error)
        return _ReleaseDetail(record, aliases, decisions, None)

    def _read_log(self, endpoint: str) -> EntryLog:
        log = read_entry_log(self._context, endpoint, self._logs.get(endpoint))
        self._logs[endpoint] = log
        return log

    def _read_endpoint(self, endpoint: str) -> _EndpointDetail:
        from onnx_ops.statistics.rollout.judge import trace_guardrails

        log = self._read_log(endpoint)
        try:
            timeline = build_timeline(endpoint, log.entries)
        except ValueError:
            # An adoption can skip damaged entries, which a timeline needs.
            timeline = None
        evidence = None
        if timeline is not None:
            evidence = evidence_figure(trace_guardrails(timeline.history, timeline.policy))
        last = log.entries[-1].sequence if log.entries else 0
        is_whole = log.error is None and len(log.entries) == last
        return _EndpointDetail(log, timeline, evidence, is_whole)

    def _read_history(
        self, names: Sequence[str]
    ) -> tuple[Sequence[tuple[LedgerEntry, str | None]], Mapping[str, OnnxOpsError]]:
        """Return the entries of ledgers with their grants, newest first, and errors."""
        entries: list[tuple[LedgerEntry, str | None]] = []
        problems: dict[str, OnnxOpsError] = {}
        for name in names:
            try:
                log = self._read_log(name)
            except OnnxOpsError as error:
                problems[name] = error
                continue
            if log.error is not None:
                problems[name] = log.error
            entries += zip(log.entries, log.grants, strict=True)
        entries.sort(key=lambda each: (each[0].at, each[0].endpoint, each[0].sequence))
        return entries[::-1], problems

    def _read_targets(self) -> Mapping[str, tuple[str, Target | OnnxOpsError]]:
        """Return the source of each target, and the target or the error of its file.

        Unlike `onnx-ops targets`, this method builds no session, since a session would disturb
        measurements on this machine.
        """
        files = self._project.targets
        targets: dict[str, tuple[str, Target | OnnxOpsError]] = {}
        for name in dict.fromkeys((*files.names(), *profile_names())):
            try:
                targets[name] = files.source(name), files.load(name)
            except OnnxOpsError as error:
                targets[name] = files.source(name), error
        return targets

    def _read_pools(self) -> Sequence[PoolStatus]:
        return self._project.running().pools.read_status()


def list_commands(reading: EndpointReading) -> list[tuple[str, str]]:
    """Return pairs: what an operator can do with an endpoint, and the command for it."""
    state, name = reading.state, shlex.quote(reading.name)
    if state is None or state.config is None:
        return []
    why = '--reason "WHY"'
    commands: list[tuple[str, str]] = []
    if state.pending_rollback is not None or state.deleting:
        commands.append(("Try the pending request again", f"onnx-ops reconcile {name}"))
        commands.append(
            ("Withdraw the pending request", f"onnx-ops rollback {name} --withdraw {why}")
        )
    if state.roles.candidate is not None:
        paused = state.command is OperatorCommand.PAUSE
        commands += [
            ("Abort the rollout", f"onnx-ops rollout abort {name} {why}"),
            ("Continue after the pause", f"onnx-ops rollout resume {name} {why}")
            if paused
            else ("Pause at this step", f"onnx-ops rollout pause {name} {why}"),
            ("Advance without waiting for checks", f"onnx-ops rollout advance {name} {why}"),
        ]
    elif state.roles.previous is not None:
        commands.append(("Roll back to the previous version", f"onnx-ops rollback {name} {why}"))
    if not commands or state.pending_aliases:
        commands.append(("Move the endpoint to the desired state", f"onnx-ops reconcile {name}"))
    return commands


def list_promotions(detail: _ReleaseDetail, model: str, version: str) -> list[tuple[str, str]]:
    """Return the commands that promote a version on each target that it has passed."""
    name = shlex.quote(f"{model}/{version}")
    return [
        (
            f"Promote this version on {target}",
            f'onnx-ops promote {name} --target {shlex.quote(target)} --reason "WHY"',
        )
        for target, signed in sorted(detail.record.decisions.items())
        if signed.record.verdict is Verdict.PASS
    ]


def _list_gates(detail: _ReleaseDetail) -> list[Any]:
    """Return the gates of a version in the form that the report's table uses."""
    known = {(one.evidence.variant, one.target): one.evidence for one in detail.decisions}
    digests = {
        (one.evidence.variant, one.target): one.signed.record.evidence for one in detail.decisions
    }
    return list_gates([one.decision for one in detail.decisions], known, digests)


def _plot_rollout(
    reading: EndpointReading, detail: _EndpointDetail | None, now: float
) -> list[Figure]:
    """Return the plots of the last rollout: shares, evidence and intervals."""
    timeline = None if detail is None else detail.timeline
    if detail is None or timeline is None:
        return []
    points = [(s.at, s.percent, s.what) for s in timeline.steps if s.percent is not None]
    until = now
    if timeline.end is not None:
        # The action that ended the rollout has no candidate, so the chart ends at that step.
        until = next(s.at for s in reversed(timeline.steps) if s.what == timeline.end.value)
        share = 100 if timeline.end is ActionKind.FINISH else 0
        points.append((until, share, timeline.end.value))
    judged = None if reading.rollout is None else reading.rollout.judged
    figures = (
        share_figure(points, until=until),
        detail.evidence,
        None if judged is None else odds_figure(judged.guardrails),
    )
    return [figure for figure in figures if figure is not None]


def _parse_skip(text: str) -> int:
    """Return the number in a text of decimal digits, at most `_MAX_SKIP`; else 0."""
    if not (text.isascii() and text.isdecimal()):
        return 0
    digits = text.lstrip("0") or "0"
    # `int` raises ValueError for more than 4300 digits.
    return _MAX_SKIP if len(digits) > len(str(_MAX_SKIP)) else min(int(digits), _MAX_SKIP)


@cache
def _load_templates() -> Environment:
    environment = load_environment(Path(__file__).parent / "templates")
    environment.filters |= {
        "time": _format_time,
        "age": _format_age,
        "segment": _quote_segment,
        "traffic": _draw_weights,
    }
    return environment


def _format_time(at: float) -> str:
    moment = datetime.datetime.fromtimestamp(at, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _format_age(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def _quote_segment(name: str) -> str:
    """Return a name as one segment of a URL's path."""
    return quote(name.encode("utf-8", "surrogatepass"), safe="")


def _draw_weights(weights: Mapping[str, int]) -> str:
    """Return a bar with the shares of traffic.

    The colour of a deployment depends on its place in the sorted names.
    """
    return draw_traffic(weights, {name: n for n, name in enumerate(sorted(weights))})

"""Self-judging rollouts as a state machine: the promises are kept for any counts.

Every entry goes through the codec: after a kill, the next driver reads what the previous one wrote.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.ledger import (
    ActionOutcome,
    EndpointBound,
    EntryBody,
    Intent,
    LedgerEntry,
    MetricsRecorded,
    OperatorCommandSent,
    ReleaseState,
    ThresholdsFixed,
    apply_entry,
    fold,
)
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand, Wait, choose_next_action
from onnx_ops.domain.rollout_observations import (
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ShadowCounts,
)
from onnx_ops.domain.rollout_policy import (
    Guardrail,
    RolloutPolicy,
    ServiceLevel,
    ShadowTrial,
    SplitTest,
)
from onnx_ops.statistics.rollout.judge import analyze, judge
from tests.support.endpoints import endpoint_config, fileless_deployment

RAILS = (Guardrail(name="errors"), Guardrail(name="latency_p99", odds_ratio=1.5))
POLICIES = (
    RolloutPolicy(
        steps=(0.1, 0.5, 1.0), guardrails=RAILS, min_requests=(50, 100), step_timeout=600.0
    ),
    RolloutPolicy(
        steps=(0.2, 1.0),
        guardrails=RAILS[:1],
        min_requests=(40,),
        slo=ServiceLevel(error_rate=0.1),
        shadow=ShadowTrial(fraction=0.5, min_requests=30, max_differing=0.1),
        approval_steps=(0.2,),
        min_step_duration=60.0,
    ),
    RolloutPolicy(ab_test=SplitTest(duration=900.0, on_inconclusive="finish"), min_requests=(30,)),
)
VERSIONS = tuple(fileless_deployment(f"v{number}") for number in range(4))


@st.composite
def tallies(draw: st.DrawFn) -> RequestCounts:
    """Return any counts; some are inconsistent."""
    requests = draw(st.sampled_from([0, 0, 20, 60, 200]))
    share = draw(st.sampled_from([0, 0, 0, 1, 5, 20, 21]))
    return RequestCounts(
        requests=requests,
        errors=requests * share // 20,
        over_p50=draw(st.sampled_from([None, requests // 2])),
        over_p99=draw(st.sampled_from([None, 0, requests // 100, requests // 10])),
        feedback=requests,
        successes=requests * draw(st.sampled_from([1, 2, 3])) // 10,
    )


copied = st.sampled_from(
    [ShadowCounts(), ShadowCounts(compared=40), ShadowCounts(compared=40, differing=20, failed=3)]
)


def plus(one: RequestCounts, other: RequestCounts) -> RequestCounts:
    return RequestCounts(
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        over_p50=None if other.over_p50 is None else (one.over_p50 or 0) + other.over_p50,
        over_p99=None if other.over_p99 is None else (one.over_p99 or 0) + other.over_p99,
        feedback=one.feedback + other.feedback,
        successes=one.successes + other.successes,
    )


class JudgedRollouts(RuleBasedStateMachine):
    """A source that counts anything, an operator, and drivers.

    A driver ends, and another one replaces it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[LedgerEntry] = []
        self.state = ReleaseState(endpoint="digits")
        self.actual: EndpointState | None = None
        self.wanted: Deployment | None = VERSIONS[0]
        self.approved: set[Digest] = {VERSIONS[0].manifest}
        self.now = 1000.0
        self.origin = 0
        self.totals: dict[str, RequestCounts] = {}
        self.shadow = ShadowCounts()
        self.append(EndpointBound(config=endpoint_config("digits"), policy=POLICIES[0]))
        self.step()

    def append(self, body: EntryBody) -> None:
        entry = LedgerEntry(
            endpoint="digits", sequence=self.state.head + 1, at=self.now, actor="a", body=body
        )
        self.entries.append(codec.loads(codec.dumps(entry), LedgerEntry))
        assert self.entries[-1] == entry
        self.state = apply_entry(self.state, self.entries[-1])

    def due(self) -> Action | Wait:
        state = self.state
        return choose_next_action(
            desired=self.wanted,
            observed=self.actual,
            roles=state.roles,
            policy=state.policy,
            target="cpu",
            command=state.command,
            now=self.now,
            analysis=analyze(state.observations, state.roles, state.policy),
        )

    @precondition(lambda self: self.state.roles.candidate is None)
    @rule(policy=st.sampled_from(POLICIES))
    def configure(self, policy: RolloutPolicy) -> None:
        self.append(EndpointBound(config=endpoint_config("digits"), policy=policy))

    @rule(desired=st.sampled_from(VERSIONS))
    def want(self, desired: Deployment) -> None:
        if self.state.find_rejection(desired) is None:
            self.wanted = desired
            self.approved.add(desired.manifest)
            limits = LatencyThresholds(p50_s=0.001, p99_s=0.01, requests=500)
            self.append(ThresholdsFixed(candidate=desired.manifest, thresholds=limits))

    @rule(seconds=st.sampled_from([1.0, 60.0, 900.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        restarted=st.integers(0, 9).map(lambda n: n == 0),
        mine=tallies(),
        theirs=tallies(),
        more=copied,
    )
    def read(
        self, restarted: bool, mine: RequestCounts, theirs: RequestCounts, more: ShadowCounts
    ) -> None:
        """Read counts as a source does: totals grow or restart at zero."""
        roles = self.state.roles
        if roles.candidate is None or roles.stable is None:
            return
        if restarted:
            self.origin, self.totals, self.shadow = self.origin + 1, {}, ShadowCounts()
        for name, counts in ((roles.candidate.name, mine), (roles.stable.name, theirs)):
            self.totals[name] = plus(self.totals.get(name, RequestCounts()), counts)
        self.shadow = ShadowCounts(
            compared=self.shadow.compared + more.compared,
            differing=self.shadow.differing + more.differing,
            failed=self.shadow.failed + more.failed,
        )
        before = self.state.observations
        reading = MetricsReading(
            origin=str(self.origin), at=self.now, tallies=dict(self.totals), shadow=self.shadow
        )
        self.append(MetricsRecorded(reading=reading))
        assert before is not None
        assert self.state.observations is not None
        if restarted or before.reading is None or not (mine.is_consistent and theirs.is_consistent):
            assert self.state.observations.intervals == before.intervals

    @precondition(lambda self: self.state.roles.candidate is not None)
    @rule(command=st.sampled_from(OperatorCommand))
    def speak(self, command: OperatorCommand) -> None:
        self.append(OperatorCommandSent(command=command))

    @rule()
    def interfere(self) -> None:
        self.actual = None

    @rule(reaches=st.booleans())
    def fail(self, reaches: bool) -> None:
        self.perform(reaches=reaches, ok=False)

    @rule()
    def step(self) -> None:
        self.perform(reaches=True, ok=True)

    @rule()
    def another_driver_takes_over(self) -> None:
        """Check that a new driver gets the same state from what was written."""
        assert fold("digits", self.entries) == self.state
        assert codec.loads(codec.dumps(self.state), ReleaseState) == self.state

    def perform(self, *, reaches: bool, ok: bool) -> None:
        action, before = self.due(), self.state
        if isinstance(action, Wait):
            return
        if (
            action.kind in (ActionKind.ADVANCE, ActionKind.FINISH)
            and before.roles.candidate is not None
        ):
            self.check_that_it_was_shown(before)
        self.append(Intent(action=action, holder="h", expires_at=self.now + 120))
        if reaches:
            self.actual = replace(action.state, generation=self.state.generation)
        self.append(ActionOutcome(of=self.state.generation, ok=ok))
        if self.wanted is not None and self.state.find_rejection(self.wanted) is not None:
            self.wanted = None

    def check_that_it_was_shown(self, before: ReleaseState) -> None:
        """Assert that an automatic move has its requests and no evidence against it.

        After an operator's command, only the evidence is checked.
        """
        assert before.observations is not None
        judged = judge(before.observations, before.policy)
        assert not judged.abort_reason
        if before.command is OperatorCommand.ADVANCE:
            return
        step = before.policy.planned()[before.roles.step]
        assert judged.requests >= step.minimum > 0
        assert not judged.unmet_target
        assert not judged.split_mismatch
        assert not step.approval

    @invariant()
    def traffic_sums_to_100_and_reaches_approved_versions_only(self) -> None:
        if self.actual is None:
            return
        split: TrafficSplit = self.actual.split
        assert sum(split.weights.values()) == 100
        reached = {
            name for name, weight in (*split.weights.items(), *split.shadow.items()) if weight
        }
        assert {d.manifest for d in self.actual.deployments if d.name in reached} <= self.approved

    @invariant()
    def counts_belong_to_the_candidate_and_its_step(self) -> None:
        trial, roles = self.state.observations, self.state.roles
        assert (trial is None) == (roles.candidate is None)
        if trial is not None and roles.candidate is not None:
            assert (trial.candidate, trial.step) == (roles.candidate.manifest, roles.step)
            assert all(
                one.canary.is_consistent and one.stable.is_consistent and one.step <= trial.step
                for one in trial.intervals
            )
            assert trial.thresholds is not None


TestJudgedRollouts = JudgedRollouts.TestCase
TestJudgedRollouts.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

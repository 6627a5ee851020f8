"""Trials of releases on the fake clouds, with random operations and faults.

A trial draws everything from its seed: the options of the machines, and two to five operations of
an operator. The faults of the control plane and the object store, and the kills of the process, are
drawn too. Time is virtual. Clients send requests throughout. In the end, the faults stop, and the
reconciler runs until it has nothing to do. The end is then compared with what the operator wanted.

Real: the release layer with its ledger, the providers, boto3 and the Azure SDK, followers, tables,
routing and ONNX Runtime. Modelled: the clouds (`tests.support.clouds`), and the processes of
servers (`tests.support.clouds.simulated`). The registry is in memory.
"""

from __future__ import annotations

import json
import random
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from onnx_ops.adapters.endpoints.fleets import TrafficModes
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import RollbackRequested
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import NotFoundError, OnnxOpsError, RefusedError, StillPendingError, UserError
from onnx_ops.ports import Context, Ledger
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.prune import delete_orphans, find_orphans, list_needed_deployments
from onnx_ops.release.reconcile import MAX_STEPS, StepReport, reconcile_until_stable
from onnx_ops.testing.endpoints import Killed
from onnx_ops.testing.fakes import FakeWorld
from onnx_ops.testing.registries import linear_model
from tests.chaos.cloud_trial_faults import FaultPlan
from tests.chaos.cloud_trial_places import ENDPOINT, Machines, Place
from tests.release.release_parts import CANARY, Scene, config_of, publish_file
from tests.support.clouds.virtual_time import VirtualTime

POLICIES = (RolloutPolicy(), CANARY, RolloutPolicy(steps=(0.5, 1.0)))
OPERATIONS = (
    *("release", "release", "release", "advance", "finish", "finish", "pause", "abort"),
    *("roll back", "roll back", "return", "scale", "retype", "new image", "clean up"),
)
_METHODS = {"return": "return_"}
_PASSES, _QUIET_PASSES = 40, 2
"""Most passes of the reconciler after the last fault, and passes without a change at the end."""
_PASS_S = 30.0
_USERS = 61
_NOT_CHANGES = ("PUT clock/", "PUT head")
"""Writes to the object store that change nothing that is served."""


@dataclass
class Wanted:
    """The versions that the operator's commands require.

    `newest` must serve at least in part: it was released last, or a later rollback returned to it.
    `stable` is the version that must serve alone; it is empty if the commands do not determine it.
    `rejected` are versions that were rolled back.
    """

    newest: str = ""
    stable: str = ""
    rejected: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class TrialResult:
    """The end of a trial: what is wrong, and how much happened."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    answered: int = 0
    operations: list[str] = field(default_factory=list)
    faults: str = ""
    failures: int = 0
    virtual_s: float = 0.0

    @property
    def is_right(self) -> bool:
        return not (self.wrong or self.lost)


class _Mortal:
    """The ledger of one process: once the process is killed, each use raises `Killed`."""

    def __init__(self, ledger: Ledger, plan: FaultPlan) -> None:
        self._ledger, self._plan = ledger, plan

    def __getattr__(self, name: str) -> Any:
        if self._plan.is_dead:
            raise Killed(name)
        return getattr(self._ledger, name)


class TrialScene(Scene):
    """The release layer over the endpoint of a place."""

    def __init__(self, place: Place, folder: Path, clock: VirtualTime) -> None:
        super().__init__(world=FakeWorld(clock=clock))
        self.place, self.folder = place, folder
        self.trusted = folder / "trusted"
        self.trusted.mkdir()
        (self.trusted / "release.pub.pem").write_bytes(self.world.signer.public_pem())
        self.machine = 1
        self.provider: TrafficModes
        self.start_process()

    def start_process(self) -> None:
        """Let another process continue, on the machine number `machine`."""
        self.restart()
        folder = self.folder / f"machine-{self.machine}"
        self.provider = self.place.make_provider(folder, self.trusted)
        self.provider.sign_with(lambda: self.world.signer)

    @property
    def context(self) -> Context:
        return replace(
            super().context,
            provider=lambda _: self.provider,
            open_ledger=lambda: cast("Ledger", _Mortal(self.world.ledger, self.place.plan)),
            metrics=lambda config: self.provider.metrics(config.options),
            files=ModelFolders(self.folder / f"models-{self.machine}"),
        )

    def release_factor(self, factor: float) -> str:
        """Publish a version that multiplies by a factor."""
        path = self.folder / f"made-{factor}" / "model.onnx"
        path.parent.mkdir()
        linear_model(path, slope=factor)
        return publish_file(self.world, path, digest_bytes(str(factor).encode()))


class Trial:
    """One trial on a place; `run` returns its result."""

    def __init__(self, place: Place, seed: int, folder: Path, clock: VirtualTime) -> None:
        self.draw = random.Random(seed)  # noqa: S311 (a trial, no secret)
        self.place, self.clock = place, clock
        self.plan = FaultPlan(random=random.Random(seed + 1), clock=clock)  # noqa: S311
        self.result = TrialResult(seed=seed)
        self.wanted = Wanted()
        self.allowed: set[str] = set()
        self.machines = Machines(count=self.draw.randint(1, 3), kind=place.kinds[0], image="")
        self.policy = self._draw_policy()
        self.folder = folder
        self.last_error = ""
        self._has_served = False
        self._user = 0
        self.cloud: TrialScene

    @property
    def config(self) -> EndpointConfig:
        options = self.place.list_options(self.machines)
        name = "sagemaker" if "role" in options else "azureml"
        return replace(config_of(ENDPOINT), provider=name, options=options)

    def run(self) -> TrialResult:
        """Carry out the operations, end the faults, and check the final state."""
        began = self.clock.now()
        with self.place.begin(self.clock, self.plan, self.folder):
            self.cloud = TrialScene(self.place, self.folder, self.clock)
            self.clock.listeners.append(self.send_request)
            self._operate("bind", self.bind)
            self._operate("release", self.release)
            for _ in range(self.draw.randint(2, 5)):
                name = self.draw.choice(OPERATIONS)
                self._operate(name, getattr(self, _METHODS.get(name, name.replace(" ", "_"))))
            self._settle()
            if not self.result.wrong:
                self._check_end()
        self.result.faults = str(self.plan)
        self.result.virtual_s = self.clock.now() - began
        return self.result

    def send_request(self) -> None:
        """Send a request of one user, and check which version answers."""
        self._user = (self._user + 1) % _USERS
        status, body = self.place.invoke(f"user-{self._user}")
        if status != 200:
            if self._has_served:
                self.result.lost.append(f"{status} {body.decode(errors='replace')[:120]}")
            return
        self._has_served = True
        self.result.answered += 1
        version = f"{json.loads(body)['factor'] - 1:g}"
        if version not in self.allowed:
            self.result.wrong.append(
                f"version {version} answered at {self.clock.now():.0f}, not one of "
                f"{sorted(self.allowed)}"
            )

    # The following methods are operations of the operator. Each of them can fail, and the
    # reconciler continues in any case.

    def bind(self) -> None:
        bind_endpoint(self.cloud.context, self.config, self.policy)

    def release(self) -> None:
        self.policy = self._draw_policy()
        self.bind()
        version = self.cloud.release_factor(len(self.cloud.world.registry.versions("digits")) + 2)
        self.allowed.add(version)
        self.cloud.promote(version)
        self.wanted.newest, self.wanted.stable = version, ""

    def advance(self) -> None:
        if self.cloud.state().roles.candidate is not None:
            self.cloud.say(OperatorCommand.ADVANCE)

    def finish(self) -> None:
        self._reconcile()
        self.wanted.stable = self.wanted.newest
        for _ in range(6):
            if self.cloud.state().roles.candidate is None:
                return
            self.advance()
            self._reconcile()

    def pause(self) -> None:
        if self.cloud.state().roles.candidate is None:
            return
        self.cloud.say(OperatorCommand.PAUSE)
        self._reconcile()
        self.clock.sleep(self.draw.uniform(0, 120))
        self.cloud.say(OperatorCommand.RESUME)

    def abort(self) -> None:
        if self.cloud.state().roles.candidate is not None:
            self._roll_back(self.cloud.abort)

    def roll_back(self) -> None:
        state = self.cloud.state()
        if state.roles.stable is not None and (state.roles.candidate or state.roles.previous):
            self._roll_back(self.cloud.roll_back)

    def return_(self) -> None:
        """Roll back to a version that served before."""
        state = self.cloud.state()
        known = sorted(set(state.known) - self.wanted.rejected)
        if state.roles.stable is not None and known:
            goal = self.draw.choice(known)
            self._roll_back(lambda: self.cloud.roll_back(to=goal), goal)

    def scale(self) -> None:
        self.machines = replace(self.machines, count=self.draw.randint(1, 3))
        self.bind()

    def retype(self) -> None:
        """Request another machine for the same target, which is refused once it serves."""
        kept = self.machines
        self.machines = replace(kept, kind=self.draw.choice(self.place.kinds))
        try:
            self.bind()
        except UserError:
            self.machines = kept

    def new_image(self) -> None:
        self.machines = replace(self.machines, image=f"-{self.draw.randrange(100)}")
        self.bind()

    def clean_up(self) -> None:
        context = self.cloud.context
        delete_orphans(context, find_orphans(context, [ENDPOINT]).orphans)

    def _roll_back(self, request: Callable[[], object], to: str = "") -> None:
        """Request a rollback, and derive what is wanted from the command and its goal."""
        state = self.cloud.state()
        before = [state.roles]
        if state.open_intent is not None:
            # The open action possibly began to serve a version.
            before.append(state.open_intent.action.roles)
        serving = {d.version for each in before for d in (each.stable, each.candidate) if d}
        goals = {d.version for each in before for d in (each.stable, each.previous) if d}
        self.allowed |= {*goals, to} - {""}
        requests = self._count_rollbacks()
        try:
            request()
        except (NotFoundError, UserError, RefusedError):
            # No rollout is in progress, or the version to return to is missing or was rolled back.
            return
        except (StillPendingError, Killed):
            if self._count_rollbacks() > requests:
                self._want_rollback(serving)
            raise
        if self._count_rollbacks() > requests:
            self._want_rollback(serving)
        # From now on, no rejected version may answer.
        self.allowed -= self.wanted.rejected

    def _count_rollbacks(self) -> int:
        entries = self.cloud.world.ledger.read(ENDPOINT)
        return sum(isinstance(entry.body, RollbackRequested) for entry in entries)

    def _want_rollback(self, serving: set[str]) -> None:
        state, wanted = self.cloud.state(), self.wanted
        pending = state.pending_rollback
        roles = state.roles if pending is None else pending.action.roles
        if roles.stable is None:
            return
        wanted.rejected |= serving
        wanted.rejected.discard(roles.stable.version)
        self.allowed.add(roles.stable.version)
        # A version stays requested after a rollback if its rollout has not begun.
        if wanted.newest in serving or wanted.newest == roles.stable.version:
            wanted.newest = wanted.stable = roles.stable.version
        else:
            wanted.stable = ""

    def _operate(self, name: str, act: Callable[[], object]) -> None:
        self.result.operations.append(name)
        self._attempt(act)
        for _ in range(self.draw.randint(1, 3)):
            self._reconcile()
            self.clock.sleep(self.draw.uniform(0, 60))

    def _reconcile(self) -> list[StepReport]:
        """Reconcile as one pass of the watch does; return the reports if it succeeded."""
        reports: list[StepReport] = []

        def reconcile() -> None:
            reports.extend(reconcile_until_stable(self.cloud.context, ENDPOINT))

        is_done = self._attempt(reconcile)
        if is_done and reports[-1].stable:
            self._narrow()
        if len(reports) >= MAX_STEPS:
            self._note(f"{len(reports)} steps in one pass, the last: {reports[-1]}")
        return reports if is_done else []

    def _narrow(self) -> None:
        """Allow only the versions that the ledger gives traffic, if no action is open."""
        state = self.cloud.state()
        if state.open_intent is not None or state.pending_rollback is not None:
            return
        roles = state.roles
        serving = {d.version for d in (roles.stable, roles.candidate) if d is not None}
        if self.wanted.newest not in serving:
            # A step that failed possibly gave traffic to the requested version.
            return
        if self.place.traffic == "table":
            # Instances adopt the table of a step within a minute. Only a rollback waits for them.
            splits = self.place.list_splits() if serving else []
            serving |= {f"{factor - 1:g}" for split in splits for factor in split} & self.allowed
        if not serving & self.wanted.rejected:
            self.allowed = serving or self.allowed

    def _attempt(self, act: Callable[[], object]) -> bool:
        """Call a function as one process; return whether it ended without an error."""
        try:
            act()
        except Killed:
            pass
        except OnnxOpsError as error:
            self.result.failures += 1
            self.last_error = str(error)
        except Exception as error:
            # If a thread of an SDK was killed, the SDK can raise any exception, because the
            # thread's result is missing.
            if not self.plan.is_dead:
                self.result.wrong.append(f"a traceback: {error!r} {_place(error)}")
        else:
            return not self.plan.is_dead or self._restart()
        if self.plan.is_dead:
            self._restart()
        return False

    def _restart(self) -> bool:
        """Let another process continue, at times on another machine; return False."""
        if self.draw.random() < 0.3:
            self.cloud.machine += 1
        self.plan.restart()
        self.cloud.start_process()
        return False

    def _settle(self) -> None:
        """End the faults, and reconcile until there is nothing to do."""
        self.plan.stop()
        self.last_error, passes = "", 0
        for _ in range(_PASSES):
            is_at_rest = not self.place.is_busy()
            wanted = self.wanted.stable
            candidate = self.cloud.state().roles.candidate
            if candidate is not None and candidate.version == wanted:
                self._attempt(self.advance)
            reports = self._reconcile()
            state = self.cloud.state()
            is_quiet = len(reports) == 1 and not reports[0].did and reports[0].stable
            is_finished = candidate is None or candidate.version != wanted
            is_quiet = is_quiet and is_at_rest and is_finished and state.open_intent is None
            passes = passes + 1 if is_quiet else 0
            if passes == _QUIET_PASSES:
                return
            self.clock.sleep(_PASS_S)
            if self.result.wrong:
                return
        self.result.wrong.append(f"never quiet: {self.last_error}")

    def _check_end(self) -> None:
        for check in (
            self._check_ledger,
            self._check_silence,
            self._check_leftovers,
            self._check_service,
            self._check_provider,
        ):
            try:
                check()
            except Exception as error:
                self._note(f"a check failed: {error!r} {_place(error)}")
            if self.result.wrong:
                return
        for _ in range(_USERS):
            self.send_request()

    def _note(self, problem: str) -> None:
        self.result.wrong.append(problem)

    def _check_ledger(self) -> None:
        state, wanted = self.cloud.state(), self.wanted
        roles = state.roles
        serving = [d.version for d in (roles.stable, roles.candidate) if d is not None]
        if wanted.newest not in serving:
            self._note(f"version {wanted.newest} is wanted, and the ledger has {serving}")
        if wanted.stable and serving != [wanted.stable]:
            self._note(f"version {wanted.stable} alone is wanted; the ledger has {serving}")
        if wanted.rejected & set(serving):
            self._note(f"rejected: {sorted(wanted.rejected)}; the ledger has {serving}")
        if state.pending_rollback is not None or state.pending_aliases:
            self._note("a rollback or an alias is still pending")

    def _check_service(self) -> None:
        """Compare what really serves with the roles of the ledger and the policy."""
        roles = self.cloud.state().roles
        assert roles.stable is not None
        expected = {float(roles.stable.version) + 1: 100}
        if roles.candidate is not None:
            steps = self.policy.planned()
            percent = steps[min(roles.step, len(steps) - 2)].percent
            expected = {
                float(roles.stable.version) + 1: 100 - percent,
                float(roles.candidate.version) + 1: percent,
            }
        splits = self.place.list_splits()
        if not splits or any(dict(split) != expected for split in splits):
            self._note(f"the service splits {splits}, not {expected}")
        if roles.candidate is None and self.place.list_machines() != {self.machines}:
            self._note(f"{self.place.list_machines()} run, not {self.machines}")
        counts = [len(pool.instances) for _, pool in self.place.list_pools()]
        is_settled = roles.candidate is None
        if self.place.traffic == "table" and is_settled and counts != [self.machines.count]:
            self._note(f"{counts} instances follow, not {self.machines.count}")

    def _check_provider(self) -> None:
        state = self.cloud.state()
        observed = self.cloud.provider.observe(self.config)
        assert state.roles.stable is not None
        if observed is None:
            self._note("the provider observes nothing")
            return
        weights = {name: weight for name, weight in observed.split.weights.items() if weight}
        if state.roles.candidate is None and weights != {state.roles.stable.name: 100}:
            self._note(f"the provider observes {weights}")
        if observed.generation > state.head:
            self._note(f"generation {observed.generation} is later than the ledger's {state.head}")
        # Other options are applied when no rollout is in progress.
        drift = observed.drift if state.roles.candidate is None else ()
        if drift or observed.stragglers:
            self._note(f"the provider observes {[*drift, *observed.stragglers]}")

    def _check_silence(self) -> None:
        """Check that a further reconciliation changes nothing."""
        before = len(self.plan.writes)
        reports = self._reconcile()
        if reports and reports[0].did == "retire-previous":
            # The previous version became due for removal after the last pass.
            before = len(self.plan.writes)
            self._reconcile()
        sent = [name for name in self.plan.writes[before:] if not name.startswith(_NOT_CHANGES)]
        if sent:
            self._note(f"a further reconciliation sent {sent}")

    def _check_leftovers(self) -> None:
        """Check that only needed objects exist after a removal of orphans."""
        context = self.cloud.context
        # A model becomes unused only after its deployment was deleted, so the clean-up runs twice.
        for _ in range(2):
            self.clean_up()
        survey = find_orphans(context, [ENDPOINT])
        if survey.orphans or survey.silent:
            self._note(f"orphans remain: {survey}")
        needed = {d.manifest for d in list_needed_deployments(context, self.cloud.state())}
        for problem in self.place.find_leftovers(needed):
            self._note(problem)

    def _draw_policy(self) -> RolloutPolicy:
        return replace(
            self.draw.choice(POLICIES), scale_down_delay=self.draw.choice((60.0, 600.0, 86_400.0))
        )


def run_trial(place: Place, seed: int) -> TrialResult:
    """Run the trial of a seed on a place."""
    # The SDKs draw their pauses from the global generator.
    random.seed(seed)
    with tempfile.TemporaryDirectory(prefix="onnx-ops-trial-") as folder:
        return Trial(place, seed, Path(folder), VirtualTime()).run()


def _place(error: BaseException) -> str:
    """Return the innermost frames of an error."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames))

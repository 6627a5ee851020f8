"""Is a version served again after its rollback was requested, whatever fails? On the local provider, with real servers.

    python -m benchmarks.rollback_debt [--quick] [--only FAULT]

Every trial requests a rollback while something is broken: the request ends with an error, is killed, or runs out of
time. Then the command, the reconciler or the watch is tried while it is still broken, and again once it is repaired. A
client calls the endpoint all the time. Ends 1 if the rolled-back version answered again, if a rollback was forgotten,
or if a command took longer than 10 s.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.rollback import BODY, ENDPOINT, MODEL, setting_up, two_versions
from benchmarks.truth.claims import Claim, at_most, summary, table
from onnx_ops import codec
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.domain.endpoint import Deployment, gives_all_to
from onnx_ops.errors import OnnxOpsError, ServiceUnavailable, StillOwed
from onnx_ops.operations.bell import Bell
from onnx_ops.operations.journal import Journal
from onnx_ops.operations.reconcile import settle_each
from onnx_ops.operations.rollback import roll_back_each
from onnx_ops.operations.watch import Watcher
from onnx_ops.ports import Ports, Registry
from onnx_ops.protocol import processes
from onnx_ops.protocol.admin import SERVER_FILE, TOKEN_FILE, ServerRecord
from onnx_ops.protocol.headers import DEPLOYMENT
from onnx_ops.testing.fakes import FakeRegistry

ANSWER_S = 10.0
"""An operator gets an answer within this time."""
REPAIRED_S = 60.0
"""What follows a repair has this long until traffic is where it belongs."""
ENDINGS = ("error", "kill -9", "time-out")
FOLLOWERS = ("command", "reconcile", "watch")
_COUNTED = ("owed", "again", "forgotten")


@dataclass
class Site:
    """A project whose endpoint serves v2 and served v1 before. `registry_up` says whether the registry answers."""

    root: Path
    registry: FakeRegistry = field(default_factory=FakeRegistry)
    registry_up: bool = True

    def __post_init__(self) -> None:
        two_versions(self.root, self.registry)
        self.ports: Ports = replace(setting_up(self.root, self.registry), registry=self._registry)
        provider = self.ports.provider("local")
        assert isinstance(provider, LocalEndpoints)
        self.local = provider
        self.config = Journal.open(self.ports, ENDPOINT).config
        self.folder = self.root / ".onnx-ops" / "endpoints" / ENDPOINT

    def _registry(self) -> Registry:
        if not self.registry_up:
            raise ServiceUnavailable("the registry does not answer")
        return self.registry

    def version(self, number: str) -> Deployment:
        return Journal.open(self.ports, ENDPOINT).state.known[number]

    def files(self) -> Path:
        """Return the folder of the previous version's files, which can be written."""
        folder = Path(self.version("1").location)
        folder.chmod(0o755)
        return folder

    def pids(self) -> list[int]:
        record = codec.loads((self.folder / SERVER_FILE).read_bytes(), ServerRecord)
        return [record.pid, *processes.workers(self.folder)]

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        while self.local.observe(self.config) is not None:
            time.sleep(0.01)


Repair = Callable[[], object]


def port_taken(site: Site) -> Repair:
    address = site.local.address(site.config)
    assert address is not None
    site.kill()
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + REPAIRED_S
    while True:
        try:
            taken.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            break
        except OSError:  # a killed process lets go of its ports a little later
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    taken.listen()
    return taken.close


def server_hung(site: Site) -> Repair:
    site.signal(signal.SIGSTOP)
    return lambda: None


def token_readable(site: Site) -> Repair:
    """The server is dead, and does not start with a token that others may have read."""
    site.kill()
    token = site.folder / TOKEN_FILE
    token.chmod(0o644)
    return lambda: token.chmod(0o600)


def files_gone(site: Site) -> Repair:
    shutil.rmtree(site.files())
    return registry_down(site)


def files_damaged(site: Site) -> Repair:
    path = site.files() / "model.onnx"
    path.chmod(0o644)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return registry_down(site)


def registry_down(site: Site) -> Repair:
    """The server is dead and the registry does not answer, so that lost files cannot be fetched again yet."""
    site.kill()
    site.registry_up = False
    return lambda: setattr(site, "registry_up", True)


# After each of them no server answers, so every answer of v2 comes from a server that was started again.
FAULTS: dict[str, Callable[[Site], Repair]] = {
    "port taken": port_taken,
    "server hung": server_hung,
    "token readable by others": token_readable,
    "previous files gone": files_gone,
    "previous files damaged": files_damaged,
}


class Client:
    """Calls the endpoint until it is stopped; remembers who answered."""

    def __init__(self, address: str) -> None:
        self.answers: list[str] = []
        self._port = int(address.rpartition(":")[2])
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=0.5)
            try:
                connection.request("POST", f"/v2/models/{MODEL}/infer", BODY, {"content-type": "application/json"})
                answer = connection.getresponse()
                if answer.status == 200:
                    self.answers.append(answer.headers[DEPLOYMENT])
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`owed`: the request could not be carried out at once. `again`: answers of the rolled-back version after its
    request. `seconds`: of the slowest command."""

    owed: bool
    again: int
    seconds: float
    forgotten: bool


def trial(fault: str, ending: str, follower: str, draw: random.Random) -> Trial:
    with tempfile.TemporaryDirectory(prefix="onnx-ops-debt-") as folder:
        site = Site(Path(folder))
        try:
            address = site.local.address(site.config)
            assert address is not None
            repair = FAULTS[fault](site)
            client = Client(address)
            seconds = [request(site, ending, draw)]
            accepted, owed = _accepted(site), not _arrived(site)
            seconds += list(follow(site, follower, for_s=1.0))
            if not accepted:  # killed before it was recorded: the operator repeats it
                seconds.append(request(site, "error", draw))
            repair()
            seconds += list(follow(site, follower, for_s=REPAIRED_S))
            time.sleep(0.2)
            client.stop()
            forgotten = not _arrived(site)
            if not forgotten and "v1" not in client.answers:
                raise RuntimeError("the client got no answer of v1, so it would not have seen one of v2")
            return Trial(
                owed=owed,
                again=client.answers.count("v2"),
                seconds=max(seconds),
                forgotten=forgotten,
            )
        finally:
            site.local.stop(site.config)


def request(site: Site, ending: str, draw: random.Random) -> float:
    """Request a rollback in another process. Return the seconds until it answered, 0 if it was killed."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        with contextlib.suppress(BaseException):
            patience_s = 0.05 if ending == "time-out" else 8.0
            _, errors = roll_back_each(site.ports, (ENDPOINT,), reason="a trial", patience_s=patience_s)
            code = 0 if all(isinstance(error, StillOwed) for error in errors.values()) else 71
        os._exit(code)
    if ending == "kill -9":
        time.sleep(draw.uniform(0.0, 0.5))
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ending != "kill -9" and code != 0:
        raise RuntimeError(f"the rollback ended with {code}")
    return 0.0 if ending == "kill -9" else time.monotonic() - begun


def follow(site: Site, follower: str, *, for_s: float) -> Iterator[float]:
    """Retry as `follower` until the rollback took effect, for `for_s` seconds at most. Yield each command's seconds."""
    deadline = time.monotonic() + for_s
    watcher = Watcher(site.ports, Bell(), every=0.5, told=lambda _: None)
    while time.monotonic() < deadline and not _arrived(site):
        begun = time.monotonic()
        if follower == "command":
            roll_back_each(site.ports, (ENDPOINT,), reason="a trial")
            yield time.monotonic() - begun
        elif follower == "reconcile":
            settle_each(site.ports, (ENDPOINT,))
        else:
            watcher.look_at_all()
        time.sleep(0.1)


def _accepted(site: Site) -> bool:
    return Journal.open(site.ports, ENDPOINT).state.why_rejected(site.version("2")) is not None


def _arrived(site: Site) -> bool:
    state = Journal.open(site.ports, ENDPOINT).state
    if state.pending_rollback is not None or state.why_rejected(site.version("2")) is None:
        return False
    try:
        actual = site.local.observe(site.config)
    except OnnxOpsError:
        return False
    return actual is not None and gives_all_to(actual, site.version("1"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one ending and one follower a fault, in turn")
    parser.add_argument("--only", choices=list(FAULTS), help="one fault")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills (0)")
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 (moments, no secrets)
    faults = [options.only] if options.only else list(FAULTS)
    ways = list(itertools.product(ENDINGS, FOLLOWERS))
    done: list[Trial] = []
    rows: list[tuple[str, ...]] = []
    for number, fault in enumerate(faults):
        some = [ways[(4 * number) % len(ways)]] if options.quick else ways
        of_fault = [trial(fault, ending, follower, draw) for ending, follower in some]
        done += of_fault
        counts = (len(of_fault), *(sum(bool(getattr(t, name)) for t in of_fault) for name in _COUNTED))
        rows.append((fault, *map(str, counts), f"{max(t.seconds for t in of_fault):.1f} s"))
        print(f"{fault}: {len(of_fault)} trials done", file=sys.stderr, flush=True)
    table("local", ("fault", "trials", "owed at first", "served again", "forgotten", "slowest command"), rows)
    slowest = max(t.seconds for t in done)
    claims = [
        at_most("rollback", "served again", sum(t.again > 0 for t in done), len(done), 0.0, quick=options.quick),
        at_most("rollback", "forgotten", sum(t.forgotten for t in done), len(done), 0.0, quick=options.quick),
        Claim(
            gate="rollback",
            what="slowest answer",
            bound=f"≤ {ANSWER_S:g} s",
            figure=f"{slowest:.1f} s",
            held=slowest <= ANSWER_S,
        ),
    ]
    summary(claims)
    return 0 if all(claim.held for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Replicas that follow tables in a store that can fail.

The store is a folder, S3 or Azure Blob Storage. Each replica has its own connection to the store,
which can break. What breaks for all replicas breaks for the operator too.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.debt.project import Place, config_of
from benchmarks.debt.sites import Fault, Repair, Route, Site, mount_command
from onnx_ops.adapters.files import open_objects
from onnx_ops.app.context import open_project
from onnx_ops.domain.quantities import Json
from onnx_ops.protocol.messages import DEPLOYMENT_HEADER
from onnx_ops.protocol.replica_tables import DEADLINE_S, FOLDER, LEASE_S, TableNumber
from tests.adapters.replica_site import ReplicaProcesses
from tests.support.ports import free_port
from tests.support.processes import until
from tests.support.proxy import Proxy, ProxyRule, Treatment, forward

OPERATOR = "operator"
LAPSED_S = LEASE_S + DEADLINE_S + 5.0
"""Time without the store after which no replica gives a candidate traffic."""
_WRITES = ("PUT", "POST", "DELETE")
_REFUSALS = {
    "s3": ("", "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
    "blob": (
        "x-ms-error-code: AuthorizationPermissionMismatch\r\n",
        (
            "<Error><Code>AuthorizationPermissionMismatch</Code><Message>not "
            "authorized</Message></Error>"
        ),
    ),
}
"""The answer of a store to a write that is not permitted: a header, and the body."""


class Replicas(Site):
    """Followers and servers on this machine.

    `port` is the port of the store; it is 0 for a folder. The faults concern a finished release.
    Those with `, canary` in their names concern a candidate with half of the traffic.
    """

    def __init__(
        self, root: Path, kind: str, url: str, port: int, route: Callable[[int], dict[str, str]]
    ) -> None:
        super().__init__(root)
        self.name = f"replicas-{kind}"
        self._url = url or str(root / "place")
        self._mounts = root / "mounts"
        self._port = port
        self._route = route
        self._broken = ExitStack()
        self._proxies = {OPERATOR: Proxy(port)} if port else {}
        self.environment = route(self._proxies[OPERATOR].port) if port else {}
        mount = () if port else mount_command(root / "probe")
        self._mount = mount
        self._refusal = _build_refusal(*_REFUSALS[kind]) if port else b""
        faults = {
            "store down": Fault(apply=self._store_down),
            "replica cut off": Fault(apply=self._cut_off, replicas=4),
            "newcomer": Fault(apply=self._newcomer, newcomers=1),
            "two reconcilers": Fault(apply=self._store_down, followers=2),
            **({"read-only": Fault(apply=self._read_only)} if port or mount else {}),
            **(
                {"slow": Fault(apply=self._slow), "response lost": Fault(apply=self._response_lost)}
                if port
                else {}
            ),
            **(
                {}
                if port
                else {"operator's share not mounted": Fault(apply=self._unmount_operator)}
            ),
        }
        lapsing = {
            "store down past the lease, canary": replace(
                faults["store down"], candidate=True, broken_s=LAPSED_S
            ),
            "replica cut off past the lease, canary": replace(
                faults["replica cut off"], replicas=2, candidate=True, broken_s=LAPSED_S
            ),
        }
        self.faults = (
            faults
            | {f"{name}, canary": replace(fault, candidate=True) for name, fault in faults.items()}
            | lapsing
        )

    def place(self, endpoint: str, fault: str = "") -> Place:
        count = self.faults[fault].replicas if fault else 1
        url = f"{self._url}/{endpoint}" if self._port else str(self._mounts / endpoint / OPERATOR)
        options: dict[str, Json] = {
            "control": f"{url}/control",
            "reports": f"{url}/reports",
            "replicas": count,
        }
        config = config_of(endpoint, "replicas", options)
        return Place(root=self.root, shared=self.root, config=config, environment=self.environment)

    @contextmanager
    def endpoint(self, place: Place, fault: str) -> Iterator[None]:
        endpoint = place.config.endpoint
        url = f"{self._url}/{endpoint}"
        self._replicas = ReplicaProcesses(
            folder=self.root / "replicas" / endpoint,
            control_url=f"{url}/control",
            reports_url=f"{url}/reports",
            endpoint=endpoint,
            keys=open_project(self.root).settings.trusted_keys,
        )
        kind = self.faults[fault]
        try:
            if not self._port:
                Path(url).mkdir(parents=True)
                self._mount_share(OPERATOR)
            for number in range(kind.replicas):
                self._start(f"r{number + 1}")
            for number in range(kind.newcomers):
                self._replicas.ports[f"new{number + 1}"] = free_port()
            yield
        finally:
            self._broken.close()
            self._replicas.stop_all()
            for name in [name for name in self._proxies if name != OPERATOR]:
                self._proxies.pop(name).close()

    def route(self, place: Place) -> Route:
        return self.routes(place)[0]

    def routes(self, place: Place) -> list[Route]:
        """Return the addresses of the replicas, newcomers included.

        First waits until all running replicas serve the newest table.
        """
        replicas = self._replicas
        numbers = filter(
            None, map(TableNumber.parse, open_objects(replicas.control_url).list_names(FOLDER))
        )
        newest = max(numbers)
        until(
            lambda: all(replicas.adopted(name) == newest for name in replicas.processes),
            pause_s=0.1,
        )
        return [
            Route(
                url=f"{replicas.address(name)}/invocations", headers={}, named_by=DEPLOYMENT_HEADER
            )
            for name in replicas.ports
        ]

    def _start(self, name: str) -> None:
        replicas = self._replicas
        urls = replicas.control_url, replicas.reports_url
        if self._port:
            self._proxies[name] = Proxy(self._port)
            replicas.environ = self._route(self._proxies[name].port)
        else:
            share = self._mount_share(name)
            replicas.control_url, replicas.reports_url = (
                str(share / "control"),
                str(share / "reports"),
            )
        replicas.start(name)
        replicas.control_url, replicas.reports_url = urls

    def _find_share(self, name: str) -> Path:
        return self._mounts / self._replicas.endpoint / name

    def _mount_share(self, name: str) -> Path:
        """Mount the folder for a machine with this name, and return its path there.

        The share is a symbolic link, since mounting needs a permission.
        """
        share = self._find_share(name)
        share.parent.mkdir(parents=True, exist_ok=True)
        share.symlink_to(Path(self._url) / self._replicas.endpoint)
        return share

    def _unmount_share(self, name: str) -> None:
        """Put an empty folder where a machine has mounted its share."""
        share = self._find_share(name)
        aside = share.rename(share.with_name("aside"))
        share.mkdir()
        self._broken.callback(_move_back, aside, share)

    def _unmount_operator(self, place: Place, variant: bool) -> Repair:
        del place, variant
        self._unmount_share(OPERATOR)
        return self._broken.close

    def _cut(self, names: Iterable[str]) -> None:
        for name in names:
            self._proxies[name].cut()
            self._broken.callback(self._proxies[name].mend)

    def _treat(self, rule: ProxyRule) -> Repair:
        """Apply a rule to the requests of all replicas and of the operator."""
        for proxy in self._proxies.values():
            proxy.rule = rule
            self._broken.callback(setattr, proxy, "rule", forward)
        return self._broken.close

    def _store_down(self, place: Place, variant: bool) -> Repair:
        """Make the store unavailable to all.

        All connections are cut. If the store is a folder, either a file replaces it, with which
        every access fails, or an empty folder.
        """
        if self._port:
            self._cut(list(self._proxies))
            return self._broken.close
        folder = self._folder(place)
        aside = folder.rename(folder.with_name("aside"))
        if variant:
            folder.mkdir()
        else:
            folder.touch()
        self._broken.callback(_move_back, aside, folder)
        return self._broken.close

    def _cut_off(self, place: Place, variant: bool) -> Repair:
        """Cut one replica off from the store.

        If the store is a folder, the replica's follower is suspended, or its share is unmounted.
        """
        del place
        if self._port:
            self._cut(["r1"])
        elif variant:
            self._unmount_share("r1")
        else:
            process = self._replicas.processes["r1"]
            process.send_signal(signal.SIGSTOP)
            self._broken.callback(process.send_signal, signal.SIGCONT)
        return self._broken.close

    def _newcomer(self, place: Place, variant: bool) -> Repair:
        """Start a replica with an empty folder.

        In half of the trials with a store behind a port, the store is down for this replica at
        first.
        """
        del place
        self._start("new1")
        if variant and self._port:
            self._cut(["new1"])
        return self._broken.close

    def _read_only(self, place: Place, variant: bool) -> Repair:
        """Refuse writes to the store.

        In half of the trials, only writes to the tables are refused, and reports can be written.
        """
        where = "/control/" if variant else "/"
        if self._port:
            refused = Treatment(refusal=self._refusal)
            return self._treat(
                lambda method, target: (
                    refused if method in _WRITES and where in target else Treatment()
                )
            )
        folder = self._folder(place) / where.strip("/")
        for options in (
            ["--bind", str(folder), str(folder)],
            ["-o", "remount,ro,bind", str(folder)],
        ):
            subprocess.run([*self._mount, *options], check=True, capture_output=True)
        self._broken.callback(
            subprocess.run, [*self._mount[:-1], "umount", "--lazy", str(folder)], check=True
        )
        return self._broken.close

    def _slow(self, place: Place, variant: bool) -> Repair:
        del place, variant
        draw = random.Random(0)  # noqa: S311 (delays, no secrets)
        return self._treat(lambda method, target: Treatment(delay_s=draw.uniform(1.0, 3.0)))

    def _response_lost(self, place: Place, variant: bool) -> Repair:
        """Lose the answers to writes.

        This concerns tables only or, in half of the trials, everything that is written.
        """
        del place
        where = "/" if variant else f"/{FOLDER}/"
        lost = Treatment(loses_answer=True)
        return self._treat(
            lambda method, target: lost if method in _WRITES and where in target else Treatment()
        )

    def _folder(self, place: Place) -> Path:
        return Path(self._url) / place.config.endpoint


def _move_back(aside: Path, folder: Path) -> None:
    """Move a folder back to its place, where others may have written meanwhile."""

    def move() -> bool:
        if folder.is_file():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            aside.rename(folder)
            return True
        return False

    until(move)


def _build_refusal(header: str, body: str) -> bytes:
    head = (
        f"HTTP/1.1 403 Forbidden\r\n{header}Content-Type: application/xml\r\nContent-Length: "
        f"{len(body)}\r\n"
    )
    return f"{head}Connection: close\r\n\r\n{body}".encode()

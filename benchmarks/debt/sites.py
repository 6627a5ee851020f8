"""What can be broken while a rollback is requested.

The providers are servers on this machine, and the fakes of two clouds behind their SDKs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.debt.project import Place, config_of
from onnx_ops import codec
from onnx_ops.adapters.endpoints.azureml_plan import build_azure_name
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.local_server import LocalServer
from onnx_ops.adapters.endpoints.sagemaker_layout import build_archive_key
from onnx_ops.adapters.endpoints.sagemaker_options import read_sagemaker_options
from onnx_ops.app.context import open_project
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import MeasurementError
from onnx_ops.protocol import server_process
from onnx_ops.protocol.messages import DEPLOYMENT_HEADER
from onnx_ops.protocol.server_process import SERVER_FILE, TOKEN_FILE, ServerRecord
from tests.support.clouds.azureml import AzureCloud, FaultRule
from tests.support.clouds.azureml_web import Call
from tests.support.clouds.azureml_web import Fault as AzureFault
from tests.support.clouds.sagemaker import BUCKET, SETTINGS, FakeSageMaker, client

TIMEOUT_S = 30.0
_ALWAYS = 1_000_000
_DISK_BYTES = 1 << 20

Repair = Callable[[], object]
Break = Callable[[Place, bool], Repair]
"""A function that breaks something, and returns the repair.

Its second argument selects one of two ways, where there are two.
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the trial that it needs.

    Attributes:
        unloaded: whether version 1 is unloaded before, as the fault concerns only what is loaded
            anew; None: in half of the trials.
        down: whether no version answers under the fault.
        candidate: whether version 2 is a candidate with half of the traffic, not a finished
            release.
        broken_s: seconds in which the followers try before anything is repaired.
        followers: number of processes that try repeatedly at the same time.
        replicas: number of replicas.
        newcomers: number of replicas that start under the fault.
    """

    apply: Break
    unloaded: bool | None = None
    down: bool = False
    candidate: bool = False
    broken_s: float = 1.5
    followers: int = 1
    replicas: int = 2
    newcomers: int = 0


@dataclass(frozen=True, kw_only=True)
class Route:
    """The address for clients, and the header that names an answer's deployment."""

    url: str
    headers: Mapping[str, str]
    named_by: str
    tls: ssl.SSLContext | None = None

    def deployment(self, text: str) -> str:
        """Return the deployment's name in the ledger."""
        return text.partition("-")[0]


class Site(ABC):
    """A provider with endpoints that can be broken."""

    name: str
    faults: Mapping[str, Fault]
    environment: Mapping[str, str]
    options: Mapping[str, Json]

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, endpoint: str, fault: str = "") -> Place:
        """Return an endpoint that will meet this fault."""
        del fault
        config = config_of(endpoint, self.name, self.options)
        return Place(root=self.root, shared=self.root, config=config, environment=self.environment)

    @abstractmethod
    def route(self, place: Place) -> Route: ...

    def routes(self, place: Place) -> list[Route]:
        """Return where each server of the endpoint answers."""
        return [self.route(place)]

    @contextmanager
    def endpoint(self, place: Place, fault: str) -> Iterator[None]:
        """Prepare for an endpoint that will meet this fault, and end it afterwards."""
        del place, fault
        yield


def files_gone(place: Place) -> None:
    folder = Path(place.version("1").location)
    folder.chmod(0o755)
    shutil.rmtree(folder)


def files_damaged(place: Place) -> None:
    path = Path(place.version("1").location) / "model.onnx"
    path.parent.chmod(0o755)
    path.chmod(0o644)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def without_files(damage: Callable[[Place], None], *also: Callable[[Place], object]) -> Break:
    """Return a fault that damages version 1's files.

    The files cannot be fetched until the registry answers again.
    """

    def apply(place: Place, variant: bool) -> Repair:
        del variant
        damage(place)
        for one in also:
            one(place)
        place.registry.answers(False)
        return lambda: place.registry.answers(True)

    return apply


def mount_command(probe: Path) -> tuple[str, ...]:
    """Return the command that can mount a disk on this machine.

    The command is empty if no disk can be mounted. Then the faults that need a mount are not tried.
    """
    probe.mkdir()
    why = ""
    for command in (("mount",), ("sudo", "-n", "mount")):
        try:
            with small_disk(probe, command):
                return command
        except (OSError, subprocess.CalledProcessError) as error:
            why = str(getattr(error, "stderr", "") or error).strip()
    print(
        f"NOT TRIED: faults that need a mount, as none is possible here: {why}",
        file=sys.stderr,
        flush=True,
    )
    return ()


@contextmanager
def small_disk(folder: Path, mount: Sequence[str]) -> Iterator[None]:
    """Mount a disk of one mebibyte over the folder."""
    options = f"size={_DISK_BYTES},mode=0700,uid={os.getuid()},gid={os.getgid()}"
    call = [*mount, "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    subprocess.run(call, check=True, capture_output=True, text=True)
    try:
        yield
    finally:
        subprocess.run([*mount[:-1], "umount", "--lazy", str(folder)], check=True)


class Local(Site):
    """Servers on this machine.

    Except under "disk full", no server answers under a fault. An answer of version 2 can then only
    come from a server that was started again.
    """

    name = "local"
    environment: Mapping[str, str] = {}
    options: Mapping[str, Json] = {}

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._mount = mount_command(root / "probe")
        self.faults = {
            "port taken": Fault(apply=self._port_taken, down=True),
            "server hung": Fault(apply=self._server_hung, down=True),
            "token unreadable": Fault(apply=self._token_unreadable, down=True),
            **({"disk full": Fault(apply=self._disk_full)} if self._mount else {}),
            "previous files gone": Fault(apply=without_files(files_gone, self._kill), down=True),
            "previous files damaged": Fault(
                apply=without_files(files_damaged, self._kill), down=True
            ),
        }

    def route(self, place: Place) -> Route:
        return Route(
            url=f"{self._address(place)}/invocations", headers={}, named_by=DEPLOYMENT_HEADER
        )

    @contextmanager
    def endpoint(self, place: Place, fault: str) -> Iterator[None]:
        folder = self._folder(place)
        folder.mkdir(mode=0o700, parents=True)
        with small_disk(folder, self._mount) if fault == "disk full" else nullcontext():
            try:
                yield
            finally:
                self._kill(place)

    def _folder(self, place: Place) -> Path:
        return open_project(self.root).settings.endpoints / place.config.endpoint

    def _address(self, place: Place) -> str:
        provider = place.context().provider("local")
        assert isinstance(provider, LocalEndpoints)
        address = provider.address(place.config)
        assert address is not None
        return address

    def _kill(self, place: Place) -> None:
        folder = self._folder(place)
        server = LocalServer(folder, sys.executable)
        server.kill(None)
        if not server.wait_until_stopped(TIMEOUT_S) or server_process.list_workers(folder):
            raise MeasurementError("the server does not die", where=place.config.endpoint)

    def _port_taken(self, place: Place, variant: bool) -> Repair:
        del variant
        port = urlsplit(self._address(place)).port
        self._kill(place)
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                taken.bind(("127.0.0.1", port))
                break
            except OSError:  # The kernel frees the ports of a killed process with a delay.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        taken.listen()
        return taken.close

    def _server_hung(self, place: Place, variant: bool) -> Repair:
        del variant
        folder = self._folder(place)
        record = codec.loads((folder / SERVER_FILE).read_bytes(), ServerRecord)
        for pid in (record.pid, *server_process.list_workers(folder)):
            os.kill(pid, signal.SIGSTOP)
        return lambda: None

    def _token_unreadable(self, place: Place, variant: bool) -> Repair:
        """Prevent the start of the server by means of its token.

        Other users can read the token, or a folder is in its place.
        """
        self._kill(place)
        token = self._folder(place) / TOKEN_FILE
        if variant:
            token.chmod(0o644)
            return lambda: token.chmod(0o600)
        aside = token.rename(token.with_name("aside"))
        token.mkdir()

        def repair() -> None:
            token.rmdir()
            aside.rename(token)

        return repair

    def _disk_full(self, place: Place, variant: bool) -> Repair:
        """Fill the server's disk; in half of the trials, also kill the server."""
        if variant:
            self._kill(place)
        filler = self._folder(place) / "filler"
        with filler.open("wb", buffering=0) as stream, suppress(OSError):
            while stream.write(b"\0" * 512):
                pass
        return filler.unlink


class SageMaker(Site):
    name = "sagemaker"

    def __init__(self, root: Path, fake: FakeSageMaker) -> None:
        super().__init__(root)
        self._fake = fake
        self.environment = fake.environment
        self.options = {**SETTINGS, "timeout": "20 s"}
        quota = "The account-level service limit 'ml.c6i.large for endpoint usage' is 4 Instances."
        capacity = (
            "Unable to provision requested ML compute capacity due to "
            "InsufficientInstanceCapacity error."
        )
        ping = "The primary container for production variant v1 did not pass the ping health check."
        self.faults = {
            "credentials expired": Fault(apply=self._answers("expired")),
            "409": Fault(apply=self._answers("conflict", only="SageMaker.Update")),
            "429": Fault(apply=self._answers("throttle")),
            "500": Fault(apply=self._answers("error")),
            "connection reset": Fault(apply=self._answers("drop")),
            "response lost": Fault(
                apply=self._answers("drop", only="SageMaker.Update", after=True)
            ),
            "capacity missing": Fault(
                apply=self._behaves({"quota": quota}, {"taken_back": capacity}), unloaded=True
            ),
            "image cannot start": Fault(apply=self._behaves({"taken_back": ping}), unloaded=True),
            "previous files gone": Fault(
                apply=without_files(files_gone, self._drop_archive), unloaded=True
            ),
            "previous files damaged": Fault(
                apply=without_files(files_damaged, self._drop_archive), unloaded=True
            ),
        }

    def route(self, place: Place) -> Route:
        url = f"{self._fake.url}/endpoints/{place.config.endpoint}/invocations"
        return Route(url=url, headers={}, named_by="x-Amzn-Invoked-Production-Variant")

    @contextmanager
    def endpoint(self, place: Place, fault: str) -> Iterator[None]:
        try:
            yield
        finally:
            self._fake.fault()
            self._fake.behave(quota="", taken_back="")

    def _answers(self, kind: str, *, only: str = "", after: bool = False) -> Break:
        def apply(place: Place, variant: bool) -> Repair:
            del place, variant
            self._fake.fault(at=int(after), kind=kind, times=_ALWAYS, only=only)
            return self._fake.fault

        return apply

    def _behaves(self, *ways: Mapping[str, str]) -> Break:
        def apply(place: Place, variant: bool) -> Repair:
            del place
            way = ways[variant % len(ways)]
            self._fake.behave(**way)
            return lambda: self._fake.behave(**dict.fromkeys(way, ""))

        return apply

    def _drop_archive(self, place: Place) -> None:
        prefix = read_sagemaker_options(self.options).prefix
        key = build_archive_key(prefix, place.config.endpoint, place.version("1"))
        client(self._fake, "s3").delete_object(Bucket=BUCKET, Key=key)


class AzureMl(Site):
    name = "azureml"

    def __init__(self, root: Path, cloud: AzureCloud) -> None:
        super().__init__(root)
        self._cloud = cloud
        self.environment = cloud.environment
        self.options = cloud.options
        self.faults = {
            "credentials expired": Fault(apply=self._answers("expired")),
            "409": Fault(apply=self._answers("conflict", writes=True)),
            "429": Fault(apply=self._answers("throttle")),
            "500": Fault(apply=self._answers("error")),
            "connection reset": Fault(apply=self._answers("drop")),
            "response lost": Fault(apply=self._answers("drop", writes=True, after=True)),
            "capacity missing": Fault(apply=self._no_quota, unloaded=True),
            "image cannot start": Fault(apply=self._no_start, unloaded=True),
            "previous files gone": Fault(
                apply=without_files(files_gone, self._drop_blobs), unloaded=True
            ),
            "previous files damaged": Fault(
                apply=without_files(files_damaged, self._drop_blobs), unloaded=True
            ),
        }

    def route(self, place: Place) -> Route:
        name = place.config.endpoint
        url = f"{str(self.options['blob_url']).removesuffix('/blobs')}/score/{name}/invocations"
        headers = {"authorization": f"Bearer {self._cloud.control.keys[name]}"}
        tls = ssl.create_default_context(cafile=self.environment["SSL_CERT_FILE"])
        return Route(url=url, headers=headers, named_by="azureml-model-deployment", tls=tls)

    @contextmanager
    def endpoint(self, place: Place, fault: str) -> Iterator[None]:
        with self._cloud.kept():
            yield

    def _answers(self, fault: AzureFault, *, writes: bool = False, after: bool = False) -> Break:
        def decide(number: int, call: Call) -> FaultRule | None:
            del number
            return (
                FaultRule(fault=fault, after=after)
                if not writes or call.method in ("PUT", "DELETE")
                else None
            )

        def apply(place: Place, variant: bool) -> Repair:
            del place, variant
            self._cloud.fault_rule = decide
            return self._well

        return apply

    def _well(self) -> None:
        self._cloud.fault_rule = lambda *_: None

    def _no_quota(self, place: Place, variant: bool) -> Repair:
        del place, variant
        conditions = self._cloud.conditions
        before, conditions.quota = conditions.quota, 0

        def repair() -> None:
            conditions.quota = before

        return repair

    def _no_start(self, place: Place, variant: bool) -> Repair:
        del variant
        broken = self._cloud.conditions.broken
        broken.add(build_azure_name(place.version("1")))
        return broken.clear

    def _drop_blobs(self, place: Place) -> None:
        folder = f"{place.config.endpoint}/{build_azure_name(place.version('1'))}/"
        for name in [name for name in self._cloud.blobs.data if folder in name]:
            del self._cloud.blobs.data[name]

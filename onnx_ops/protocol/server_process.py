"""Options, files and processes of endpoint servers, and the holders of leases.

Other programs use the files and processes to find a server.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, Unit, doc

from onnx_ops.domain.execution import CPU
from onnx_ops.domain.target import Target

# The following files are in the folder of a server.
SERVER_FILE = "server.json"
"""File with the `ServerRecord` of the running server.

The file is written when the server can answer requests.
"""
LOCK_FILE = "server.lock"
"""File that the server locks (flock) while it runs.

The file contains the server's process id.
"""
TOKEN_FILE = "token"  # noqa: S105 (the name of the file)
"""File with the bearer token of the admin listener. Only its owner can read it."""
WORKERS_FOLDER = "workers"
"""Folder with one file per running worker, named after its process id.

The file contains the start time of that process.
"""
HANDOVER_SOCKET = "handover.sock"
"""Unix socket over which workers without a supervisor pass on their sockets.

The next supervisor receives the listening sockets from them.
"""
AUDIT_FILE = "audit.jsonl"
"""Audit trail: one line per attempted change and one per result."""

FINAL_COUNTS_FILE = "counts.json"
"""File with the `Counts` of a stopped server, including its last requests."""

# The following constants describe containers: those of cloud endpoints, and replicas.
DEPLOYMENT_FILE = "deployment.json"
"""File in a container that describes the deployment, without its location."""
MODEL_FOLDER = "model"
"""Folder beside `DEPLOYMENT_FILE`; it contains exactly the files of the version."""
CONTAINER_PROVIDERS = (CPU,)
"""Execution providers that the image supports."""
OPTION_PREFIX = "ONNX_OPS_SERVE_"
"""Prefix of the environment variables that set server options."""
TRUSTED_KEYS_VARIABLE = "ONNX_OPS_SERVE_TRUSTED_KEYS"
FOLLOW_VARIABLE = "ONNX_OPS_FOLLOW"
"""Variable with the URL of the tables that a container follows as a replica."""
REPORTS_VARIABLE = "ONNX_OPS_REPORTS"
"""Variable with the URL to which a replica writes its reports."""
IMAGE_VARIABLE = "ONNX_OPS_IMAGE"
"""Variable with the image that a replica reports as its own."""

_START_FIELD = 21
_STATE_FIELD = 2
_DEAD_STATES = ("Z", "X")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """Options of every endpoint server. Sizes are in bytes, times in seconds."""

    workers: Annotated[int, Ge(1), Le(256), doc("Worker processes; each loads every model.")] = 1
    threads: Annotated[
        int,
        Ge(0),
        Le(256),
        doc("Threads of a worker for models that are not fast; 0: an equal share of the cores."),
    ] = 0
    queue: Annotated[
        int, Ge(1), Le(1 << 20), doc("Queued requests of a worker; further requests get a 429.")
    ] = 128
    deadline: Annotated[
        float,
        Unit("s"),
        Ge(0.001),
        Le(3600),
        doc(
            "Longest time in the queue, after which a request gets a 504; "
            "x-request-timeout-ms can shorten it."
        ),
    ] = 30.0
    run_timeout: Annotated[
        float,
        Unit("s"),
        Ge(0.001),
        Le(3600),
        doc("Longest run of a model; a longer run is ended, and its request gets a 504."),
    ] = 30.0
    max_body: Annotated[
        int,
        Unit("B"),
        Ge(1),
        Le(2 << 30),
        doc("Size of the largest request body; a larger one gets a 413."),
    ] = 32 << 20
    max_image: Annotated[
        int,
        Unit("B"),
        Ge(1),
        Le(1 << 30),
        doc("Size of the largest encoded image; a larger one gets a 400."),
    ] = 10 << 20
    max_pixels: Annotated[
        int,
        Ge(1),
        Le(1 << 30),
        doc("Width times height of the largest encoded image; a larger one gets a 400."),
    ] = 1 << 24
    max_images: Annotated[
        int, Ge(1), Le(65_536), doc("Encoded images of one request; more get a 400.")
    ] = 32
    max_connections: Annotated[
        int,
        Ge(1),
        Le(1 << 20),
        doc("Open connections of all workers together; idle ones are closed first."),
    ] = 16_384
    read_timeout: Annotated[
        float,
        Unit("s"),
        Ge(0.1),
        Le(3600),
        doc("Time to receive a whole request; a slower one gets a 408."),
    ] = 30.0
    keep_alive: Annotated[
        float, Unit("s"), Ge(0.1), Le(3600), doc("An idle connection is closed after this time.")
    ] = 75.0
    drain: Annotated[
        float,
        Unit("s"),
        Ge(0),
        Le(3600),
        doc("Time for requests in flight after SIGTERM; clouds send SIGKILL after 30 s."),
    ] = 25.0
    prepack: Annotated[
        int,
        Unit("B"),
        Ge(0),
        doc(
            "Smallest size of a model that is cached in optimized form, packed for this "
            "processor; 0 B: no model."
        ),
    ] = 4 << 20
    allowed_hosts: Annotated[
        str,
        doc(
            "Accepted Host headers besides those of loopback, separated by commas; `*`: any, as by "
            "default on other addresses than loopback."
        ),
    ] = ""
    allowed_origins: Annotated[
        str,
        doc(
            "Accepted Origin headers of web pages, separated by commas; `*`: any, as by default on "
            "other addresses than loopback."
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(ContainerOptions):
    """Options of an endpoint server.

    The options of cloud endpoints contain only `ContainerOptions`.
    """

    grpc_port: Annotated[
        int, Ge(0), Le(65_535), doc("Port of the gRPC API, which needs the extra `grpc`; 0: none.")
    ] = 0
    access_log: Annotated[
        str, doc("File for one JSON line per inference; `-` is standard output.")
    ] = ""
    admin_socket: Annotated[
        str,
        doc(
            "Unix socket of a second admin listener, which needs no token; "
            "only the owner can connect."
        ),
    ] = ""
    trusted_keys: Annotated[
        str,
        doc(
            "Folder of public keys, or keys in base64: only models signed by them are loaded; "
            "empty: any model."
        ),
    ] = ""
    endpoint: Annotated[
        str, doc("Name of the endpoint in metrics; default: the name of its folder.")
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """Ports and options of a running server. `started` is in seconds since the epoch."""

    pid: int
    port: int
    admin_port: int
    started: float
    options: ServerOptions = field(default_factory=ServerOptions)


def explain_unservable(target: Target, available: Collection[str]) -> str:
    """Return why a server with these providers cannot run the target's models.

    The result is empty if the server can run them.
    """
    if target.runtime != "onnxruntime":
        return f"the target uses runtime '{target.runtime}', but the server runs 'onnxruntime'"
    if target.env is not None and target.env.isolated:
        return "the target's runtime has an isolated environment, but the server's does not"
    if target.ort_format is not None:
        return "the target runs .ort files, but the server runs .onnx files"
    for provider in target.providers:
        if provider.package:
            return f"the server does not load execution provider plug-ins ({provider.package})"
        if provider.name not in available:
            return (
                f"the server's build of ONNX Runtime has no {provider.name}; "
                f"it has {', '.join(sorted(available))}"
            )
    return ""


def read_start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None if it ended.

    The process id and the start time together identify a process, because the system reuses process
    ids. If the first thread of a process has ended, the process still runs until its last thread
    ends. It occupies its port until then.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The name of the process is in parentheses and can contain any character.
        columns = text[text.rindex(")") + 2 :].split()
        if columns[_STATE_FIELD - 2] in _DEAD_STATES and len(os.listdir(f"/proc/{pid}/task")) <= 1:
            return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return columns[_START_FIELD - 2]


class LocalHost:
    """This process as the holder of leases: host, process id and start time."""

    def holder(self) -> str:
        """Return this process's name in leases."""
        return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"

    def alive(self, holder: str) -> bool:
        """Return whether a holder can still be running.

        The result is True for other hosts, and for names without a process id or start time. Their
        leases then last until they expire.
        """
        host, _, rest = holder.partition(":")
        process, _, started = rest.partition(":")
        if host != socket.gethostname() or not process.isdecimal() or not started:
            return True
        return _started(int(process)) == started

    def actor(self) -> str:
        """Return the user for the audit trail: ONNX_OPS_ACTOR or user@host."""
        if named := os.environ.get("ONNX_OPS_ACTOR"):
            return named
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # The user of a container can have no entry in /etc/passwd.
            user = f"uid-{os.getuid()}"
        return f"{user}@{socket.gethostname()}"


def _started(process: int) -> str:
    """Return the start time of a process in clock ticks since boot.

    The result is empty if the process has ended, and `unknown` if the time cannot be read.
    """
    # Some systems refuse access to the processes of other users.
    with contextlib.suppress(PermissionError):
        if Path("/proc/self").exists():
            return read_start_time(process) or ""
    with contextlib.suppress(PermissionError):
        # The kernel refuses the signal with EPERM only if the process exists and belongs to another
        # user.
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return ""
    return "unknown"


def register_worker(folder: Path) -> Path:
    """Record this process as a worker of the folder's server; return the file."""
    path = folder / WORKERS_FOLDER / str(os.getpid())
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(read_start_time(os.getpid()) or "", encoding="utf-8")
    temporary.replace(path)
    return path


def list_workers(folder: Path) -> tuple[int, ...]:
    """Return the ids of a folder's running workers; remove the files of ended workers."""
    running = []
    for path in sorted((folder / WORKERS_FOLDER).glob("[0-9]*")):
        try:
            recorded = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        if recorded == read_start_time(int(path.name)):
            running.append(int(path.name))
        else:
            path.unlink(missing_ok=True)
    return tuple(running)


def signal_worker(pid: int, folder: Path, number: signal.Signals) -> None:
    """Send a signal to a worker of the folder, unless it has ended."""
    with (
        contextlib.suppress(ProcessLookupError),
        open(os.pidfd_open(pid), "rb", buffering=0) as handle,
    ):
        # The handle always refers to the same process, even if the process id is reused. The check
        # shows that this process is the worker.
        if pid in list_workers(folder):
            signal.pidfd_send_signal(handle.fileno(), number)

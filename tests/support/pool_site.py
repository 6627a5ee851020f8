"""Two or more machines, each in a separate folder.

One of them requests stages. The others are workers of pools, which tests can kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onnx_ops.domain.artifact import Digest, Manifest
from tests.e2e.prefect_site import PrefectSite, ended
from tests.support.command import PROGRAM
from tests.support.processes import ROOT, children_of, until

NAME = "lab"
_USERS, _GROUP = 12_000, 12_000
"""First user id and shared group of machines with separate users.

The members of the group share the store.
"""

PIPELINE = f"configs/pipelines/{NAME}.yaml"

_TEXT = """\
pipeline: lab
data:
  train: {sklearn: iris, split: train}
  test: {sklearn: iris, split: test}
train:
  run: lab:train
  with: {mark: first, seconds: 0, log: LOG}
export: {framework: sklearn}
quantize:
VARIANTS
validate: {samples: {data: test}}
benchmark: {targets: [TARGETS]}
gates: [{kind: size, max: 1 MB}]
"""

_CODE = '''\
"""A training function that records its begin and end, and a metric that waits once in each process."""

import functools
import os
import time

from sklearn.neural_network import MLPClassifier


def train(data, mark, seconds, log):
    note(log, mark, "begins")
    time.sleep(seconds)
    rows = data["train"]
    model = MLPClassifier((8,), max_iter=300, random_state=0).fit(rows.inputs["x"], rows.label)
    note(log, mark, "ends")
    return model


@functools.cache
def wait():
    time.sleep(3)


def slow(predictions, labels):
    wait()
    return float((predictions == labels).mean())


def note(log, mark, what):
    with open(log, "a") as stream:
        stream.write(f"{mark} {what} {time.time()} {os.getpid()}\\n")
'''  # noqa: E501


@dataclass
class Worker:
    """A machine that executes the stages of a pool."""

    pool: str
    folder: Path
    arguments: Sequence[str]
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        """Return the worker's output."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def forks(self) -> list[int]:
        """Return the processes of the flow runs under way."""
        return flow_runs_of(self.process.pid)

    def stages(self) -> list[int]:
        """Return the processes of the stages under way."""
        return stages_of(self.process.pid)


@dataclass
class PoolSite:
    """The machine that requests runs, in `folder/asker`, and its workers.

    All of them reach one Prefect server and one store.

    Args:
        folder: an empty folder.
        prefect: the server; its project is not used.
        variants: number of variants besides fp32.
        targets: target names, each of the pool with that name.
        apart: each machine has a separate user and network namespace; the machines share a group.
            Needs root, and a server that listens on every address.
    """

    folder: Path
    prefect: PrefectSite
    variants: int = 0
    targets: Sequence[str] = ("board",)
    apart: bool = False
    workers: list[Worker] = field(default_factory=list)
    networks: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.apart:
            self.folder.chmod(0o755)
            for name in ("store", "marks"):
                self._share(self.folder / name, is_folder=name == "store")
        self.began = datetime.now(UTC)  # noqa: TID251 (compared with times of Prefect's server)
        self.asker = self._machine("asker")
        self.marks = self.folder / "marks"
        entries = [f"  - {{name: v{number}, method: dynamic}}" for number in range(self.variants)]
        text = _TEXT.replace("LOG", str(self.marks)).replace("TARGETS", ", ".join(self.targets))
        text = text.replace(
            "quantize:\nVARIANTS\n", "quantize:\n" + "\n".join(entries) + "\n" if entries else ""
        )
        for name, content in {
            PIPELINE: text,
            "lab.py": _CODE,
            **{
                f"configs/targets/{name}.yaml": f"name: {name}\npool: {name}\n"
                for name in self.targets
            },
        }.items():
            path = self.asker / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        git = [
            "git",
            "-C",
            str(self.asker),
            "-c",
            "user.name=lab",
            "-c",
            "user.email=lab@example.org",
        ]
        for arguments in (["init", "-q"], ["add", "configs", "lab.py"], ["commit", "-qm", "lab"]):
            subprocess.run([*self._before(self.asker), *git, *arguments], check=True)

    def _machine(self, name: str, settings: str = "") -> Path:
        root = self.folder / name
        root.mkdir(parents=True)
        settings = settings or f'store = "{self.folder / "store"}"\n'
        (root / "onnx-ops.toml").write_text(settings, encoding="utf-8")
        if self.apart:
            number = self.networks[root] = len(self.networks) + 1
            os.chown(root, _USERS + number, _GROUP)
            space, address = f"onnx-ops-{number}", f"10.77.{number}"
            for command in (
                f"netns add {space}",
                f"link add oo{number} type veth peer name eth0 netns {space}",
                f"addr add {address}.1/24 dev oo{number}",
                f"link set oo{number} up",
                f"-n {space} addr add {address}.2/24 dev eth0",
                f"-n {space} link set eth0 up",
                f"-n {space} link set lo up",
            ):
                subprocess.run(["ip", *command.split()], check=True)
        return root

    def _share(self, path: Path, *, is_folder: bool) -> None:
        """Make a file or folder writable for every machine."""
        path.mkdir() if is_folder else path.touch()
        os.chown(path, 0, _GROUP)
        path.chmod(0o2770 if is_folder else 0o660)

    def _before(self, root: Path) -> list[str]:
        """Return the start of a command that runs on the machine with this folder."""
        if not self.apart:
            return []
        number = self.networks[root]
        user = [
            f"--reuid={_USERS + number}",
            f"--regid={_GROUP}",
            "--clear-groups",
            "--inh-caps=-all",
        ]
        return ["ip", "netns", "exec", f"onnx-ops-{number}", "setpriv", *user]

    def environment(self, root: Path, **more: str) -> dict[str, str]:
        """Return the variables of a process on the machine with this folder."""
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("ONNX_OPS_")
        }
        client = {
            **self.prefect.client,
            "PREFECT_HOME": str(root / "prefect"),
            "PREFECT_CLI_COLORS": "false",
        }
        # The machine has its own temporary folder, and thus its own lock for measurements.
        (root / "tmp").mkdir(exist_ok=True)
        client["TMPDIR"] = str(root / "tmp")
        if self.apart:
            number = self.networks[root]
            url = self.prefect.client["PREFECT_API_URL"].replace("127.0.0.1", f"10.77.{number}.1")
            client |= {"PREFECT_API_URL": url, "HOME": str(root)}
            os.chown(root / "tmp", _USERS + number, _GROUP)
        return {**environ, **client, "NO_COLOR": "1", "COLUMNS": "200", **more}

    def work(
        self, pool: str, *arguments: str, before: Sequence[str] = (), settings: str = ""
    ) -> Worker:
        """Start a worker, and wait until it is ready."""
        folder = self._machine(f"worker-{len(self.workers)}", settings)
        command = [*before, str(PROGRAM), "work", "--pool", pool, *arguments]
        worker = Worker(pool, folder, command, self._start(command, folder))
        self.workers.append(worker)
        until(lambda: "takes stages:" in worker.log, what="a worker that takes stages", seconds=120)
        return worker

    def restart(self, worker: Worker) -> None:
        """Start a worker that was killed, on the same machine."""
        worker.process = self._start(worker.arguments, worker.folder)

    def _start(self, command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*self._before(folder), *command],
                cwd=folder,
                env=self.environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(
        self,
        *sets: str,
        pipeline: str = PIPELINE,
        until: str = "gate",
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a run of a pipeline with these values."""
        overrides = [part for one in sets for part in ("--set", one)]
        return subprocess.Popen(
            [
                *self._before(self.asker),
                PROGRAM,
                "run",
                pipeline,
                "--until",
                until,
                "--json",
                *overrides,
                *options,
            ],
            cwd=self.asker,
            env=self.environment(self.asker, **(environ or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def flow(
        self,
        *sets: str,
        until: str = "gate",
        no_cache: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start the same run as a flow run of the flow `pipeline`.

        Prefect's runner starts it in the same way.
        """
        given = (
            f"{PIPELINE!r}, overrides={sets!r}, until={until!r}, "
            f"no_cache={tuple(no_cache)!r}, jobs=2"
        )
        return subprocess.Popen(
            [
                *self._before(self.asker),
                PROGRAM.with_name("python"),
                "-c",
                f"from pipeline import pipeline\npipeline({given})",
            ],
            cwd=self.asker,
            env=self.environment(self.asker, PYTHONPATH=str(ROOT / "flows"), **(environ or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def result(self, asked: subprocess.Popen[str], code: int = 0, seconds: float = 300) -> Any:
        """Return the JSON of a run, which must end with this exit code."""
        out, errors = asked.communicate(timeout=seconds)
        logs = "\n".join(worker.log[-3000:] for worker in self.workers)
        assert asked.returncode == code, (
            f"exit code {asked.returncode}\n{out[-3000:]}\n{errors[-3000:]}\n{logs}"
        )
        return json.loads(out)

    def manifests(self, result: Any) -> dict[str, Digest]:
        """Return the digests of the outputs of a run's stages."""
        return {
            o["stage"]: Manifest(files=o["manifest"]["files"]).digest()
            for o in result["outcomes"]
            if o["manifest"]
        }

    def runs(self, *names: str) -> list[dict[str, Any]]:
        """Return the flow runs of the named stages, in order; of all stages by default."""
        own: dict[str, Any] = {"expected_start_time": {"after_": self.began.isoformat()}}
        if names:
            own["name"] = {"any_": [f"{NAME}/{name}" for name in names]}
        wanted = {
            "flows": {"name": {"any_": ["work"]}},
            "flow_runs": own,
            "sort": "EXPECTED_START_TIME_ASC",
        }
        found: list[dict[str, Any]] = self.prefect.ask("/flow_runs/filter", **wanted)
        return found

    def marked(self, mark: str) -> dict[str, list[float]]:
        """Return when trainings with this mark began and ended.

        The times are in seconds since the epoch.
        """
        lines = self.marks.read_text().splitlines() if self.marks.exists() else []
        found: dict[str, list[float]] = {"begins": [], "ends": []}
        for line in lines:
            name, what, at, _ = line.split()
            if name == mark:
                found[what].append(float(at))
        return found

    def close(self) -> None:
        """End every worker and its remaining processes."""
        for worker in self.workers:
            forks = worker.forks()
            with contextlib.suppress(ProcessLookupError):
                ended([worker.process])
            for pid in forks:
                kill_tree(pid)
        for number in self.networks.values():
            for what in (f"link del oo{number}", f"netns del onnx-ops-{number}"):
                subprocess.run(["ip", *what.split()], check=True)


def flow_runs_of(worker: int) -> list[int]:
    """Return the processes of the flow runs that a worker executes.

    The worker's fork server is not included.
    """
    return [pid for pid in children_of(worker) if not _is_fork_server(pid)]


def stages_of(user: int) -> list[int]:
    """Return the processes of stages of a user.

    Monitors start them, and the user's fork server has forked the monitors.
    """
    monitors = [
        pid for child in children_of(user) if _is_fork_server(child) for pid in children_of(child)
    ]
    return [pid for monitor in monitors for pid in children_of(monitor)]


def _is_fork_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"onnx_ops.app.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, including those in other sessions."""
    descendants = children_of(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in descendants:
        kill_tree(child)


@contextlib.contextmanager
def pool_site(prefect: PrefectSite, **options: Any) -> Iterator[PoolSite]:
    """Provide a site in a temporary folder, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="onnx-ops-pools-") as folder:
        site = PoolSite(Path(folder), prefect, **options)
        try:
            yield site
        finally:
            site.close()

"""The contestants: how each is started, and what is sent to it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.serving.models import Model
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import state_of
from tests.support.ports import free_port
from tests.support.processes import session_of
from tests.support.server import ServerFamily

_PEERS = Path(__file__).with_name("peers")
_READY_S = 180.0
FLOOR = "C, no model"
_TRITON_FILES = ("bin/tritonserver", "backends/onnxruntime/libtriton_onnxruntime.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kind of request to a contestant, with bodies that are sent in turn.

    `keys` is the number of users who send it; 0 sends no key.
    """

    path: str
    bodies: Sequence[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)
    keys: int = 0


class Contestant(ABC):
    """A server of one model.

    `start` returns the seconds until its first answer with status 200.
    """

    def __init__(self, name: str, model: Model, folder: Path) -> None:
        self.name = name
        self.model = model
        self.folder = folder / f"{name.replace(' ', '-')}-{model.name}"
        self.file = model.path(folder)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str | Path]: ...

    @abstractmethod
    def call(self) -> Call: ...

    def environ(self) -> Mapping[str, str]:
        return {}

    def prepare(self) -> None:
        """Prepare the first start; this is done once and not measured."""
        self.folder.mkdir(parents=True)

    def start(self) -> float:
        log = (self.folder / "log").open("ab")
        call = self.call()
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            self.command(),
            env={**os.environ, **self.environ()},
            cwd=self.folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        while not self.answers(call):
            if self._process.poll() is not None or time.perf_counter() - begun > _READY_S:
                self.stop()
                raise SystemExit(
                    f"{self.name} did not start:\n{(self.folder / 'log').read_text()[-3000:]}"
                )
            time.sleep(0.005)
        return time.perf_counter() - begun

    def answers(self, call: Call) -> bool:
        """Return whether the request is answered with status 200."""
        headers = {"content-type": "application/json", **call.headers}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{call.path}", call.bodies[0], headers
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def processes(self) -> list[int]:
        assert self._process is not None
        return session_of(self._process.pid)

    def stop(self) -> None:
        if self._process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                for pid in self.processes():
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                try:
                    self._process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    continue
            self._process = None


class OpenInference(Contestant):
    """A server of the Open Inference Protocol.

    All such servers get the same bytes.
    """

    def call(self) -> Call:
        """Return rows in JSON.

        Every other body has no spaces, as some clients write it.
        """
        shape = json.dumps([1, *self.model.shape])
        head = f'{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": {shape}, "data": '
        texts = [f"{head}{row}}}]}}" for row in self.model.flat()]
        bodies = [
            (text.replace(" ", "") if place % 2 else text).encode()
            for place, text in enumerate(texts)
        ]
        return Call(path=f"/v2/models/{self.model.name}/infer", bodies=bodies)

    def binary(self) -> Call:
        """Return the same rows as raw bytes behind a JSON header.

        The answers are raw as well.
        """
        rows = self.model.rows()
        tensor = {
            "name": "x",
            "datatype": "FP32",
            "shape": list(rows[0].shape),
            "parameters": {"binary_data_size": rows[0].nbytes},
        }
        header = json.dumps(
            {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        ).encode()
        headers = {
            "content-type": "application/octet-stream",
            "inference-header-content-length": str(len(header)),
        }
        return replace(
            self.call(), bodies=[header + row.tobytes() for row in rows], headers=headers
        )


class Ours(OpenInference):
    """`onnx_ops.serving` with two deployments that share the traffic.

    It has metrics and one worker. A batchable model has one deployment, since a batch holds
    requests of one deployment, and Triton runs one version.
    """

    def prepare(self) -> None:
        super().prepare()
        location = self.file.parent
        manifest = Manifest(files={self.file.name: digest_file(self.file)}).digest()
        split = {"blue": 100} if self.model.batchable else {"blue": 80, "green": 20}
        deployments = [
            Deployment(
                name=name,
                model=self.model.name,
                version=str(version),
                variant="fp32",
                release=digest_bytes(str(version).encode()),
                manifest=manifest,
                location=str(location),
                batchable=self.model.batchable,
                threads=self.model.threads,
            )
            for version, name in enumerate(split, 1)
        ]
        server = ServerFamily(folder=self.folder / "state", port=self.port)
        server.start()
        answer = server.publish(state_of(*deployments, **split), 1)
        server.stop()
        if answer.status != 200:
            raise SystemExit(f"{self.name}: the deployments were not published: {answer}")

    def command(self) -> list[str | Path]:
        module = [sys.executable, "-m", "onnx_ops.serving.main"]
        return [*module, "--state-dir", self.folder / "state", "--port", str(self.port)]

    def keyed(self) -> Call:
        return replace(self.call(), keys=1000)


class Plain(OpenInference):
    """A parser loop without split, metrics, limits or checks.

    It shows the least that a server in Python takes.
    """

    def command(self) -> list[str | Path]:
        return [sys.executable, _PEERS / "plain.py", str(self.port)]

    def environ(self) -> Mapping[str, str]:
        return {"MODEL": str(self.file)}


class Triton(OpenInference):
    """NVIDIA Triton with its ONNX Runtime backend on the CPU.

    It has one thread for each session, and neither gRPC nor metrics. `home` has `bin/tritonserver`
    and `backends/onnxruntime`, as `/opt/tritonserver` has in NVIDIA's image.
    """

    def __init__(self, name: str, model: Model, folder: Path, home: Path) -> None:
        super().__init__(name, model, folder)
        self._home = home

    @staticmethod
    def is_in(home: Path) -> bool:
        return all((home / file).is_file() for file in _TRITON_FILES)

    def prepare(self) -> None:
        super().prepare()
        place = self.folder / "repository" / self.model.name
        (place / "1").mkdir(parents=True)
        shutil.copy(self.file, place / "1")
        (place / "config.pbtxt").write_text(self.config())

    def config(self) -> str:
        """Return the model's configuration.

        It is the one with the most requests/s among one and two instances, with and without
        batches.
        """
        instances, batching = (2, "dynamic_batching { }") if self.model.batchable else (1, "")
        return f"""
            backend: "onnxruntime"
            max_batch_size: 16
            input {{ name: "x" data_type: TYPE_FP32 dims: {list(self.model.shape)} }}
            output {{ name: "y" data_type: TYPE_FP32 dims: [{self.model.outputs}] }}
            instance_group {{ kind: KIND_CPU count: {instances} }}
            {batching}
            parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
            parameters {{ key: "inter_op_thread_count" value: {{ string_value: "1" }} }}
        """

    def command(self) -> list[str | Path]:
        options = {
            "model-repository": self.folder / "repository",
            "backend-directory": self._home / "backends",
            "http-address": "127.0.0.1",
            "http-port": self.port,
            "allow-grpc": "false",
            "allow-metrics": "false",
        }
        return [
            self._home / "bin" / "tritonserver",
            *(f"--{name}={value}" for name, value in options.items()),
        ]


class Uvicorn(Contestant):
    """A module of `peers` under uvicorn.

    It is started as tutorials start it: `uvicorn module:app`. uvloop and httptools are installed
    here, and uvicorn uses them automatically.
    """

    options: tuple[str, ...] = ()

    def __init__(self, name: str, module: str, path: str, model: Model, folder: Path) -> None:
        super().__init__(name, model, folder)
        self._module = module
        self._path = path

    def command(self) -> list[str | Path]:
        app: list[str | Path] = [
            sys.executable,
            "-m",
            "uvicorn",
            "--app-dir",
            _PEERS,
            f"{self._module}:app",
        ]
        return [*app, "--port", str(self.port), *self.options]

    def environ(self) -> Mapping[str, str]:
        return {"MODEL": str(self.file)}

    def call(self) -> Call:
        return Call(
            path=self._path, bodies=[f'{{"x": {row}}}'.encode() for row in self.model.nested()]
        )


class TunedUvicorn(Uvicorn):
    """The same without an access log; the options name uvloop and httptools."""

    options = (
        "--loop",
        "uvloop",
        "--http",
        "httptools",
        "--no-access-log",
        "--log-level",
        "warning",
    )


class MlflowServe(Contestant):
    """`mlflow models serve` in this environment."""

    def prepare(self) -> None:
        super().prepare()
        script = (
            "import mlflow.onnx, onnx, sys; mlflow.onnx.save_model(onnx.load(sys.argv[1]), "
            "sys.argv[2])"
        )
        command: list[str | Path] = [sys.executable, "-c", script, self.file, self.folder / "saved"]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder)

    def command(self) -> list[str | Path]:
        serve = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local"]
        return [*serve, "-m", self.folder / "saved", "-p", str(self.port)]

    def environ(self) -> Mapping[str, str]:
        """Return the PATH with this environment, on which MLflow looks for `uvicorn`."""
        return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def call(self) -> Call:
        bodies = [f'{{"inputs": {{"x": {row}}}}}'.encode() for row in self.model.nested()]
        return Call(path="/invocations", bodies=bodies)


class MlServer(OpenInference):
    """MLServer with a small custom runtime, in a separate environment below `cache`."""

    def __init__(self, model: Model, folder: Path, cache: Path) -> None:
        super().__init__("MLServer", model, folder)
        self._bin = cache / "mlserver" / "bin"
        self._ports = (free_port(), free_port())

    def prepare(self) -> None:
        super().prepare()
        make_environment(self._bin.parent, _PEERS / "requirements-mlserver.txt")
        http, grpc = self._ports
        settings: dict[str, str | int] = {
            "http_port": self.port,
            "metrics_port": http,
            "grpc_port": grpc,
            "debug": False,
        }
        settings |= {"host": "127.0.0.1", "parallel_workers": 0}
        (self.folder / "settings.json").write_text(json.dumps(settings))
        model = {"name": self.model.name, "implementation": "mlserver_runtime.OnnxModel"}
        model["parameters"] = {"uri": str(self.file)}  # type: ignore[assignment]
        (self.folder / "model-settings.json").write_text(json.dumps(model))

    def command(self) -> list[str | Path]:
        return [self._bin / "mlserver", "start", self.folder]

    def environ(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_PEERS)}


class Floor(Contestant):
    """A server in C that runs no model.

    It shows what a request costs the operating system, without inference.
    """

    def __init__(self, model: Model, folder: Path, call: Call) -> None:
        super().__init__(FLOOR, model, folder)
        self._call = call

    @staticmethod
    def can_be_built() -> bool:
        return shutil.which("cc") is not None

    def prepare(self) -> None:
        super().prepare()
        subprocess.run(["cc", "-O2", "-o", self.folder / "floor", _PEERS / "floor.c"], check=True)

    def command(self) -> list[str | Path]:
        return [self.folder / "floor", str(self.port)]

    def call(self) -> Call:
        return self._call


def make_environment(place: Path, requirements: Path) -> None:
    """Create a virtual environment with these requirements, unless it exists."""
    done = place / requirements.name
    if done.is_file() and done.read_bytes() == requirements.read_bytes():
        return
    print(f"installing {requirements.name} into {place} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    pip: list[str | Path] = [
        place / "bin" / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    subprocess.run([*pip, "-r", requirements], check=True)
    done.write_bytes(requirements.read_bytes())

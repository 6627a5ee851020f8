"""A load in a separate process.

It therefore shares no interpreter with the measured server or with the test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from onnx_ops.errors import MeasurementError
from tests.support.load.plan import LoadPlan
from tests.support.load.records import Records
from tests.support.processes import ROOT

_GRACE_S = 30.0


class LoadProcess:
    """A process that runs a plan between `start` and `stop` or `wait`.

    It is also a context manager. `start` returns once the process sends requests.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start the process.

        Raises:
            MeasurementError: the load does not begin, for example because the server refuses
                connections, or a payload of the plan has headers.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="load-")
        command = self._command(Path(self._folder.name))
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if not line.startswith(b"running"):
            why = (line + self._process.stderr.read()).decode("utf-8", "replace").strip()
            self._discard()
            raise MeasurementError("the load did not begin", where=self._plan.url, why=why)

    def stop(self) -> Records:
        """End the load now; requests under way are waited for."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._collect(self._plan.timeout_s + _GRACE_S)

    def wait(self) -> Records:
        """Wait for the plan's end."""
        return self._collect(self._plan.seconds + self._plan.timeout_s + _GRACE_S)

    def __enter__(self) -> LoadProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def _collect(self, timeout_s: float) -> Records:
        assert self._process is not None
        assert self._folder is not None
        try:
            _, stderr = self._process.communicate(timeout=timeout_s)
            records = Records.read(Path(self._folder.name) / "records.npz")
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            raise MeasurementError("the load did not end as it should", why=str(error)) from error
        finally:
            self._discard()
        if stderr:
            raise MeasurementError(
                "the load complained", why=stderr.decode("utf-8", "replace")[-500:]
            )
        return records

    def _discard(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stderr is not None
            self._process.stderr.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _command(self, folder: Path) -> list[str]:
        plan = self._plan
        command = [sys.executable, "-m", "tests.support.load", plan.url, "--json"]
        options: dict[str, int | float | Path] = {
            "--connections": plan.connections,
            "--seconds": plan.seconds,
            "--requests": plan.requests,
            "--rate": plan.rate,
            "--keys": plan.keys,
            "--timeout": plan.timeout_s,
            "--seed": plan.seed,
            "--records": folder / "records.npz",
        }
        for flag, value in options.items():
            command += [flag, str(value)]
        for name, text in plan.headers.items():
            command += ["--header", f"{name}: {text}"]
        for number, payload in enumerate(plan.payloads):
            if payload.headers:
                raise MeasurementError(
                    "a load in a separate process sends the plan's headers, not those of a payload"
                )
            path = folder / f"body-{number}"
            path.write_bytes(payload.body)
            command += ["--body", str(path)]
        return command

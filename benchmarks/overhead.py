"""Measure the overhead of onnx-ops over a bare script.

    python -m benchmarks.overhead [--rounds 3] [--prefect]

A whole run is compared with the same calls in a bare script. Runs and commands with nothing to do
are compared with an empty Python process. Whole processes take turns on this machine. Every ratio
is that of their medians over the rounds, and is followed by the seconds. `--prefect` adds the same
run as a Prefect flow on a real server.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ONNX_OPS = Path(sys.executable).with_name("onnx-ops")
PIPELINE = "configs/pipelines/digits-mlp.yaml"
FLOW = f"from flows.pipeline import pipeline; pipeline('{PIPELINE}')"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each contestant (3); commands: at least 5"
    )
    parser.add_argument(
        "--prefect", action="store_true", help="also as a flow on a real Prefect server"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnx-ops-bench-") as name:
        folder = Path(name)
        try:
            whole_runs(folder, options.rounds, prefect=options.prefect)
            small_commands(folder, options.rounds)
        finally:
            stop_servers(folder)


def whole_runs(folder: Path, rounds: int, *, prefect: bool) -> None:
    contestants: dict[str, Callable[[Path], list[str | Path]]] = {
        "bare script": lambda place: [sys.executable, ROOT / "benchmarks" / "bare.py", place],
        "onnx-ops run": lambda place: [ONNX_OPS, "run", PIPELINE, "--quiet"],
    }
    with prefect_server(folder) if prefect else no_server() as environ:
        if prefect:
            contestants["Prefect flow"] = lambda place: [sys.executable, "-c", FLOW]
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(rounds):
            for name, command in contestants.items():
                place = project(folder / f"{name.replace(' ', '-')}-{turn}")
                times[name].append(timed(command(place), place, environ))
    report("whole run, everything new", times, "bare script")


def small_commands(folder: Path, rounds: int) -> None:
    place = folder / "onnx-ops-run-0"
    contestants: dict[str, list[str | Path]] = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "onnx-ops --help": [ONNX_OPS, "--help"],
        "onnx-ops check": [ONNX_OPS, "check", PIPELINE],
        "onnx-ops status": [ONNX_OPS, "status"],
        "onnx-ops run, nothing changed": [ONNX_OPS, "run", PIPELINE],
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(max(rounds, 5)):
        for name, command in contestants.items():
            times[name].append(timed(command, place, {}))
    report("commands with nothing to do", times, "python -c pass")


def report(title: str, times: dict[str, list[float]], unit: str) -> None:
    base = statistics.median(times[unit])
    print(f"\n{title} ({len(times[unit])} rounds, median; 1.00 is {unit})")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"  {name:<32} {median / base:7.2f}x  {median:7.2f} s  [{min(seconds):.2f}, "
            f"{max(seconds):.2f}]"
        )


def timed(command: list[str | Path], place: Path, environ: dict[str, str]) -> float:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ONNX_OPS_")}
    begun = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=place,
        env={**inherited, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    spent = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{command} failed\n{done.stdout}\n{done.stderr}")
    return spent


def project(place: Path) -> Path:
    place.mkdir()
    for name in ("configs", "examples", "flows"):
        shutil.copytree(ROOT / name, place / name)
    (place / "onnx-ops.toml").touch()
    return place


@contextmanager
def no_server() -> Iterator[dict[str, str]]:
    yield {}


@contextmanager
def prefect_server(folder: Path) -> Iterator[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command: list[str | Path] = [
        Path(sys.executable).with_name("prefect"),
        "server",
        "start",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not answers(f"{environ['PREFECT_API_URL']}/health"):
            time.sleep(0.5)
        yield environ
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


def stop_servers(folder: Path) -> None:
    from onnx_ops.adapters.endpoints.local_server import LocalServer

    for endpoint in [*folder.glob("*/.onnx-ops/endpoints/*"), *folder.glob("*/endpoints/*")]:
        LocalServer(endpoint, sys.executable).stop()


if __name__ == "__main__":
    main()

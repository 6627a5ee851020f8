"""A program that runs the `run:` steps of a workflow as a runner of GitHub does.

Its environment contains nothing of this project.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

FOREIGN = {"actions/setup-python", "actions/cache/restore", "actions/cache/save"}
"""Actions that need no work here.

`python` is already on the path, and the first job of a repository finds an empty cache.
"""
CHECKOUT, UPLOAD, DOWNLOAD = (
    "actions/checkout",
    "actions/upload-artifact",
    "actions/download-artifact",
)
_TOKEN = re.compile(r"'[^']*'|[a-z]+(?:\.[\w-]+)+|&&|\|\||[=!]=|\s+")
_PYTHON = {"&&": "and", "||": "or", "==": "==", "!=": "!="}


def load(file: Path) -> dict[Any, Any]:
    """Return a workflow or an action; YAML 1.1 reads the key `on` as True."""
    document: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that has run."""

    name: str
    code: int
    output: str


@dataclass
class Runner:
    """The machine of a job: `contexts` for expressions, `environ` for steps.

    `origin` is the repository. `checkout` is the workspace, with the commit of the event unless a
    job checks out another. `artifacts` contains what the jobs of a run leave.
    """

    origin: Path
    checkout: Path
    artifacts: Path
    temp: Path
    contexts: dict[str, Any]
    environ: dict[str, str]
    done: list[Done] = field(default_factory=list)

    @property
    def summary(self) -> str:
        file = self.temp / "summary"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def run_job(self, workflow: str, job: str) -> int:
        """Run a job until a step fails; return that step's code, else 0."""
        document = load(self.origin / ".github" / "workflows" / workflow)["jobs"][job]
        condition = str(document.get("if", "")).removeprefix("${{").removesuffix("}}").strip()
        wanted = condition in ("", "!cancelled()") or self.value(condition)
        assert wanted, f"{job} does not run for this event"
        self.temp.mkdir(parents=True, exist_ok=True)
        (self.temp / "summary").unlink(missing_ok=True)
        environ = {**self._texts(document.get("env", {})), "RUNNER_TRACKING_ID": str(self.temp)}
        try:
            return self._run_steps(document["steps"], environ, self.contexts)
        finally:
            # A runner also ends the processes that remain after a job.
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("RUNNER_TRACKING_ID") == str(self.temp):
                        process.kill()

    def value(self, expression: str, contexts: Mapping[str, Any] | None = None) -> Any:
        """Evaluate an expression: names, strings, `==`, `!=`, `&&`, `||`."""
        words = []
        rest = expression.strip()
        while rest:
            match = _TOKEN.match(rest)
            assert match, f"{rest!r} of {expression!r} is beyond this runner"
            word, rest = match[0], rest[match.end() :]
            if word.strip():
                words.append(_PYTHON.get(word, word if word.startswith("'") else f"look({word!r})"))
        look = {"look": lambda name: self._look(name, contexts or self.contexts)}
        return eval(" ".join(words), look)  # noqa: S307

    def _look(self, name: str, contexts: Mapping[str, Any]) -> Any:
        found: Any = contexts
        for part in name.split("."):
            found = found.get(part, "") if isinstance(found, Mapping) else ""
        return found

    def _texts(
        self, values: Mapping[str, Any], contexts: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        return {name: self.text(str(value), contexts) for name, value in values.items()}

    def text(self, text: str, contexts: Mapping[str, Any] | None = None) -> str:
        """Return a text with its expressions replaced."""

        def replaced(match: re.Match[str]) -> str:
            value = self.value(match[1], contexts)
            return str(value).lower() if isinstance(value, bool) else str(value)

        return re.sub(r"\$\{\{(.+?)\}\}", replaced, text)

    def _run_steps(
        self, steps: list[Any], environ: Mapping[str, str], contexts: Mapping[str, Any]
    ) -> int:
        contexts = {**contexts, "steps": {}}
        for step in steps:
            if "if" in step and not self.value(str(step["if"]), contexts):
                continue
            own = {**environ, **self._texts(step.get("env", {}), contexts)}
            name = str(step.get("uses", "")).partition("@")[0]
            if name.startswith("./"):
                code = self._run_action(name, own, self._texts(step.get("with", {}), contexts))
            elif name in (CHECKOUT, UPLOAD, DOWNLOAD):
                self._move_files(
                    name, self._texts(step["with"], contexts), optional="continue-on-error" in step
                )
                continue
            elif name:
                assert name in FOREIGN, f"{name} is beyond this runner"
                continue
            else:
                code, outputs = self.run_script(step, own)
                contexts["steps"][step.get("id", "")] = {"outputs": outputs}
            if code:
                return code
        return 0

    def _move_files(self, action: str, given: Mapping[str, str], *, optional: bool) -> None:
        """Do the work of the actions for checkouts and artifacts.

        The commit of the event is already there before a job begins.
        """
        if action == CHECKOUT and "path" in given:
            assert given["persist-credentials"] == "False"
            folder = str(self.checkout / given["path"])
            subprocess.run(["git", "clone", "--quiet", str(self.origin), folder], check=True)
            subprocess.run(["git", "-C", folder, "checkout", "--quiet", given["ref"]], check=True)
        elif action == UPLOAD:
            assert any(Path(given["path"]).iterdir())
            shutil.copytree(
                given["path"], self.artifacts / given["name"], symlinks=True, ignore=_list_pipes
            )
        elif action == DOWNLOAD:
            found = self.artifacts / given["name"]
            assert optional or found.exists()
            if found.exists():
                shutil.copytree(found, given["path"], symlinks=True)

    def _run_action(self, name: str, environ: Mapping[str, str], given: Mapping[str, str]) -> int:
        action = load(self.checkout / name / "action.yml")
        defaults = {
            key: self.text(str(about.get("default", ""))) for key, about in action["inputs"].items()
        }
        contexts = {**self.contexts, "inputs": {**defaults, **given}}
        return self._run_steps(action["runs"]["steps"], environ, contexts)

    def run_script(
        self, step: Mapping[str, Any], environ: Mapping[str, str]
    ) -> tuple[int, dict[str, str]]:
        """Run the shell of a step; return its code and its outputs."""
        assert "${{" not in step["run"]
        files = {
            name: self.temp / name.lower()
            for name in ("GITHUB_PATH", "GITHUB_ENV", "GITHUB_OUTPUT")
        }
        for file in files.values():
            file.write_text("", encoding="utf-8")
        options = (
            ["--noprofile", "--norc", "-eo", "pipefail"] if step.get("shell") == "bash" else ["-e"]
        )
        done = subprocess.run(
            ["bash", *options, "-c", step["run"]],
            cwd=self.checkout / self.text(step.get("working-directory", "")),
            env={
                **self.environ,
                **environ,
                **{name: str(file) for name, file in files.items()},
                "GITHUB_STEP_SUMMARY": str(self.temp / "summary"),
                "RUNNER_TEMP": str(self.temp),
                # pip would compile thousands of modules that no step imports.
                "PIP_NO_COMPILE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
            check=False,
        )
        self.done.append(Done(name=step.get("name", ""), code=done.returncode, output=done.stdout))
        for line in files["GITHUB_PATH"].read_text(encoding="utf-8").split():
            self.environ["PATH"] = f"{line}:{self.environ['PATH']}"
        self.environ |= dict(_pairs(files["GITHUB_ENV"]))
        return done.returncode, dict(_pairs(files["GITHUB_OUTPUT"]))


def _list_pipes(folder: str, names: list[str]) -> list[str]:
    """Return the pipes among the files of a folder, which an archive cannot contain."""
    return [name for name in names if (Path(folder) / name).is_fifo()]


def _pairs(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        yield name, value


def bare_path(folder: Path) -> str:
    """Return a PATH with a plain Python and the system's programs.

    `setup-python` leaves such a PATH.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    for name in ("python", "python3"):
        (folder / name).unlink(missing_ok=True)
        # With a link, a virtual environment would record the link's folder as its home.
        (folder / name).write_text(f'#!/bin/sh\nexec {plain} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    return os.pathsep.join((str(folder), "/usr/local/bin", "/usr/bin", "/bin"))

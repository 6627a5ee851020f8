"""New projects, made from files of this repository.

A preset determines the model and the files of a project. Flows, workflows, infrastructure and
examples are those that onnx-ops runs and tests: `templates/` links to them, and a wheel contains
copies. A project also gets the wheel of this release, so that a CI runner can install onnx-ops from
it.
"""

from __future__ import annotations

import base64
import hashlib
import keyword
import re
import shutil
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Literal

from onnx_ops.domain.quantities import NAME_PATTERN
from onnx_ops.errors import UserError

PACKAGE = Path(__file__).parents[1]
TEMPLATES = PACKAGE / "templates"

PresetName = Literal["ci-only", "sklearn", "table", "torch", "onnx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Starting point of a project: a model of the examples and its pipeline.

    Attributes:
        pipeline: Name of the example's pipeline file.
        model: Path of the model or its training function in the examples.
        place: Path of the model or its training function in the project.
        extras: Extras of onnx-ops that the project installs.
        description: Description of the file at `place` for the user.
        change: Option of `onnx-ops run` that changes the model, for the tutorial.
        releases: Whether the project registers and deploys. Otherwise it only runs gates, and has
            neither flows nor infrastructure.
        renamed: Texts of the pipeline file and their replacements.
        data: Data files of the example, and their paths in the project.
    """

    pipeline: str
    model: str
    place: str
    extras: str
    description: str
    change: str = ""
    releases: bool = True
    renamed: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)


_DEPLOYED = """promote: auto

deploy:
  - endpoint: {name}
    provider: local
    target: cpu-1t # serves champion-cpu-1t
    rollout: {steps: [100%], scale_down_delay: 24h}"""

PRESETS: Mapping[PresetName, Preset] = {
    "ci-only": Preset(
        pipeline="iris-gates.yaml",
        model="models/iris.onnx",
        place="models/model.onnx",
        extras="",
        description="the ONNX file; replace it by your file, and its rows in `data/`",
        releases=False,
        renamed={
            "iris-gates": "{name}",
            "examples/models/iris.onnx": "models/model.onnx",
            "examples/data/iris-": "data/",
        },
        data={"data/iris-test.npz": "data/test.npz"},
    ),
    "sklearn": Preset(
        pipeline="digits-mlp.yaml",
        model="digits_mlp.py",
        place="models/train.py",
        extras="demo",
        description="the training function",
        change=" --set train.with.seed=8",
        renamed={
            "digits-mlp": "{name}",
            "examples.digits_mlp": "models.train",
            "endpoint: digits\n": "endpoint: {name}\n",
            # Tutorials begin with a rollout that moves all traffic immediately, not with a canary.
            "    # The first release gets all traffic immediately, because there is no other "
            "version. Users are assigned again every\n    # 5 s instead of every minute, so that a "
            "rollout of this example takes seconds.\n": "",
            "steps: [10%, 50%, 100%], guardrails: [errors, latency_p50, latency_p99], "
            "min_requests: [300, 1000], epoch: 5 s": "steps: [100%], scale_down_delay: 24h",
        },
    ),
    "table": Preset(
        pipeline="churn-table.yaml",
        model="churn_table.py",
        place="models/train.py",
        extras="demo,tables",
        description="the training function; its data is in `data/`",
        change=" --set train.with.strength=0.5",
        renamed={
            "churn-table": "{name}",
            "examples.churn_table": "models.train",
            "examples/data/churn-": "data/",
            "endpoint: churn\n": "endpoint: {name}\n",
        },
        data={"data/churn-train.csv": "data/train.csv", "data/churn-test.csv": "data/test.csv"},
    ),
    "torch": Preset(
        pipeline="digits-cnn.yaml",
        model="digits_cnn.py",
        place="models/train.py",
        extras="demo,torch",
        description="the network and the training function",
        change=" --set train.with.seed=8",
        renamed={"digits-cnn": "{name}", "examples.digits_cnn": "models.train"},
    ),
    "onnx": Preset(
        pipeline="iris-onnx.yaml",
        model="models/iris.onnx",
        place="models/model.onnx",
        extras="demo",
        description="the ONNX file; replace it by your file, and set its data in the pipeline",
        change=" --set export.opset=19",
        renamed={
            "iris-onnx": "{name}",
            "examples/models/iris.onnx": "models/model.onnx",
            "promote: manual": _DEPLOYED,
        },
    ),
}

_COPIED: tuple[tuple[str, str, str], ...] = (
    ("", "constraints.txt", ""),
    ("schema", "*.json", "configs/schema"),
    ("actions", "*/action.yml", ".github/actions"),
)
"""Files that are copied unchanged.

Each entry has a folder of the templates, a pattern of files in it, and a folder of the project.
"""

_COPIED_FOR_RELEASES: tuple[tuple[str, str, str], ...] = (
    ("flows", "*.py", "flows"),
    *(
        ("workflows", name, ".github/workflows")
        for name in ("model-commit.yml", "promote.yml", "rollback.yml")
    ),
    # The Dockerfile uses these scripts. It is not copied but generated from a template, since in a
    # project it installs the release that `vendor/onnx-ops.txt` names.
    *(
        ("infra/docker", name, "infra/docker")
        for name in ("bill.py", "healthcheck.py", "install.sh")
    ),
    *(("infra", f"{name}/*", "infra") for name in ("aws", "azure", "compose", "pools", "prefect")),
    *(
        ("infra/kubernetes", pattern, "infra/kubernetes")
        for pattern in ("*.yaml", "endpoint/*", "examples/*/*")
    ),
)
"""Files that are copied unchanged into projects that register and deploy."""


def scaffold(folder: Path, name: str, preset: PresetName) -> tuple[str, ...]:
    """Write a project into an empty or new folder; return its sorted file names."""
    _require_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "this is not an empty folder",
            where=str(folder),
            remedy="Name a folder that is new or empty.",
        )
    chosen = PRESETS[preset]
    installed = distribution("onnx-ops")
    words = {
        "name": name,
        "extras": f"[{chosen.extras}]" if chosen.extras else "",
        "version": installed.version,
        "models": chosen.description,
        "change": chosen.change,
    }
    for source, place in _sources(chosen):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / place)
    for source, place in _written(name, chosen):
        _write(folder / place, source.read_text(encoding="utf-8"), words)
    if not chosen.releases:
        file = folder / ".github" / "workflows" / "model-commit.yml"
        _write(file, keep_gate_jobs(read_workflow("model-commit")), {})
    pipeline = (TEMPLATES / "pipelines" / chosen.pipeline).read_text(encoding="utf-8")
    for old, new in chosen.renamed.items():
        pipeline = pipeline.replace(old, new)
    _write(folder / "configs" / "pipelines" / f"{name}.yaml", pipeline, words)
    (folder / "models" / "__init__.py").touch()
    write_wheel(installed, folder / "vendor")
    return tuple(
        sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    )


def _require_name(name: str) -> None:
    """Raise UserError if a name cannot name a pipeline, or the package of a project."""
    remedy = "Use lower-case letters, digits and hyphens, beginning with a letter or digit."
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(f"{name!r} cannot be the name of a pipeline", where="--name", remedy=remedy)
    lines = (TEMPLATES / "constraints.txt").read_text(encoding="utf-8").splitlines()
    taken = {
        "models",
        "onnx-ops",
        *(line.partition("==")[0].lower().replace("_", "-") for line in lines),
    }
    if keyword.iskeyword(name) or name in taken:
        package = "a package of the project or of constraints.txt has this name"
        why = "the name is a keyword of Python" if keyword.iskeyword(name) else package
        remedy = "Choose another name with `--name NAME`."
        raise UserError(
            f"{name!r} cannot be the name of a project", where="--name", why=why, remedy=remedy
        )


def read_workflow(name: str) -> str:
    """Return the text of a workflow of GitHub Actions."""
    return (TEMPLATES / "workflows" / f"{name}.yml").read_text(encoding="utf-8")


def keep_gate_jobs(workflow: str) -> str:
    """Return the workflow of commits without the release of merged changes.

    Its jobs need no environment, secret or cloud role. The job of merged changes records the
    metrics with which pull requests are compared. That job is derived from the job of pull
    requests.
    """
    head, jobs = workflow.split("\njobs:\n")
    head = head[head.index("name: model-commit") :]
    parts = [part.rstrip() for part in re.split(r"\n(?=  \w+:\n)", jobs.rstrip())]
    (judge,) = (part for part in parts if part.startswith("  judge:\n"))
    (publish,) = (part for part in parts if part.startswith("  publish:\n"))
    publish = publish.replace("needs: [judge, evaluate, release]", "needs: [judge, evaluate]")
    text = "\n\n".join([judge, _make_recording_job(judge), publish])
    return f"{_GATES}{head}\njobs:\n{text}\n"


_GATES = """\
# Run the gates of the pipelines that a commit affects. `judge` runs code of a pull request, and
# `evaluate` runs merged code. Pull requests are compared with the metrics of `evaluate`. Neither
# job has a key or a token that can write. `publish` writes the verdict as a check, and as a comment
# on a pull request.
"""

_RECORDING = (
    ("  judge:\n", "  evaluate:\n"),
    ("github.event_name == 'pull_request'", "github.event_name != 'pull_request'"),
    (
        "# Never the runner of releases: a process of this code could wait for the next release.",
        "# Its results are stored in the cache of this branch, which pull requests can read.",
    ),
    ("vars.ONNX_OPS_RUNNER_UNREVIEWED", "vars.ONNX_OPS_RUNNER_EVALUATION"),
    ("# A newer commit of the same pull request supersedes this one.\n    ", ""),
    ("group: onnx-ops-${{", "group: onnx-ops-evaluation-${{"),
    ("cancel-in-progress: true", "cancel-in-progress: false\n      queue: max"),
)
"""Texts of the job of pull requests, and their replacements for merged changes."""


def _make_recording_job(judge: str) -> str:
    """Return the job that records metrics of merged changes, derived from `judge`."""
    for old, new in _RECORDING:
        judge = judge.replace(old, new)
    return f"{judge}\n        with:\n          step: record"


def write_wheel(installed: Distribution, folder: Path) -> Path:
    """Write a wheel of this release from its installed files; return the path."""
    stem = f"onnx_ops-{installed.version}"
    metadata = f"{stem}.dist-info"
    files = {
        path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes()
        for path in _list_package_files()
    }
    files[f"{metadata}/METADATA"] = (
        installed.read_text("METADATA") or installed.read_text("PKG-INFO") or ""
    ).encode()
    files[f"{metadata}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    files[f"{metadata}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: onnx-ops\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if text := installed.read_text("licenses/LICENSE"):
        files[f"{metadata}/licenses/LICENSE"] = text.encode()
    files[f"{metadata}/RECORD"] = _build_record(files, f"{metadata}/RECORD")
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            # All entries have the same fixed time, so the same release gives the same bytes.
            archive.writestr(
                zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED
            )
    return wheel


def _list_package_files() -> list[Path]:
    """Return the files of the installed package that a build would put into a wheel."""
    file = PACKAGE.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    # A checkout also contains files that are not packaged in the wheel.
    if project.get("project", {}).get("name") == "onnx-ops":
        globs = project["tool"]["setuptools"]["package-data"]["onnx_ops"]
        paths = {
            *PACKAGE.rglob("*.py"),
            *(path for pattern in globs for path in PACKAGE.glob(pattern)),
        }
    else:  # Without its own pyproject.toml, the package is installed in site-packages.
        paths = {path for path in PACKAGE.rglob("*") if path.parent.name != "__pycache__"}
    return sorted(path for path in paths if path.is_file())


def _build_record(files: Mapping[str, bytes], name: str) -> bytes:
    """Return the content of a wheel's file RECORD.

    RECORD has a line with digest and size for each file, and a line for RECORD itself.
    """
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{name},,", ""]).encode()


def _sources(chosen: Preset) -> Iterator[tuple[Path, str]]:
    """Yield files that are copied unchanged, and their paths in the project."""
    for source, place in {chosen.model: chosen.place, **chosen.data}.items():
        yield TEMPLATES / "examples" / source, place
    for folder, pattern, place in (*_COPIED, *(_COPIED_FOR_RELEASES if chosen.releases else ())):
        for path in sorted((TEMPLATES / folder).glob(pattern)):
            yield path, (Path(place) / path.relative_to(TEMPLATES / folder)).as_posix()


def _written(name: str, chosen: Preset) -> Iterator[tuple[Path, str]]:
    """Yield templates that are filled with the project's name, and their paths."""
    places = {
        "Makefile": "Makefile",
        "README.md": "README.md",
        "gitignore": ".gitignore",
        "onnx-ops.toml": "onnx-ops.toml",
        "onnx-ops.txt": "vendor/onnx-ops.txt",
        "pyproject.toml": "pyproject.toml",
        "requirements.txt": "requirements.txt",
        "test_project.txt": f"tests/test_{name.replace('-', '_')}.py",
    }
    if chosen.releases:
        places |= {
            "Dockerfile": "infra/docker/Dockerfile",
            "Dockerfile.dockerignore": "infra/docker/Dockerfile.dockerignore",
            "prefect.yaml": "prefect.yaml",
        }
    for file, place in places.items():
        own = TEMPLATES / "project" / "ci-only" / file
        yield own if own.is_file() and not chosen.releases else TEMPLATES / "project" / file, place


def _write(path: Path, text: str, words: Mapping[str, str]) -> None:
    for key, value in words.items():
        text = text.replace(f"{{{key}}}", value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

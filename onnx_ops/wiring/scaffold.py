"""A new project: the files of this one that a project needs, with its own name, around a model of its own.

Flows, workflows, infrastructure and examples are those that this project itself runs and tests; `templates/` links to
them, and a wheel holds copies.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from onnx_ops.domain.pipeline import NAME_PATTERN
from onnx_ops.errors import UserError

TEMPLATES = Path(__file__).parents[1] / "templates"

TemplateName = Literal["sklearn", "torch", "onnx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What a project starts from. `renamed` are words of the pipeline file and what they become."""

    pipeline: str
    model: str
    place: str
    extras: str
    told: str
    change: str
    renamed: Mapping[str, str] = field(default_factory=dict)


_DEPLOYED = """promote: auto

deploy:
  - endpoint: {name}
    provider: local
    target: cpu-1t # serves champion-cpu-1t
    rollout: {steps: [100%], keep_previous: 24h}"""

PROJECTS: Mapping[TemplateName, Template] = {
    "sklearn": Template(
        pipeline="digits-mlp.yaml",
        model="digits_mlp.py",
        place="models/train.py",
        extras="demo",
        told="the training function",
        change=" --set train.with.seed=8",
        renamed={
            "digits-mlp": "{name}",
            "examples.digits_mlp": "models.train",
            "endpoint: digits\n": "endpoint: {name}\n",
        },
    ),
    "torch": Template(
        pipeline="digits-cnn.yaml",
        model="digits_cnn.py",
        place="models/train.py",
        extras="demo,torch",
        told="the network and the training function",
        change=" --set train.with.seed=8",
        renamed={"digits-cnn": "{name}", "examples.digits_cnn": "models.train"},
    ),
    "onnx": Template(
        pipeline="iris-onnx.yaml",
        model="models/iris.onnx",
        place="models/model.onnx",
        extras="demo",
        told="the ONNX file; put yours in its place, and its data into the pipeline",
        change="",
        renamed={"iris-onnx": "{name}", "examples/models/iris.onnx": "models/model.onnx", "promote: manual": _DEPLOYED},
    ),
}

_INFRA = ("aws", "azure", "compose", "kubernetes", "pools", "prefect")
"""The image is built from the sources of onnx-ops, which a project does not hold."""

_WORKFLOWS = ("model-commit.yml", "promote.yml", "rollback.yml")


def scaffold(folder: Path, name: str, template: TemplateName) -> tuple[str, ...]:
    """Write a project into a folder that is empty or not there yet.

    Args:
        folder: its root.
        name: of the pipeline, the registered model and the endpoint.
        template: what it starts from.

    Returns:
        Its files, relative to the root, sorted.

    Raises:
        UserError: the name is none, or the folder holds something.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(
            f"{name!r} cannot name a pipeline",
            where="--name",
            remedy="Use lower-case letters, digits and dashes, beginning with a letter or digit.",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("there is something already", where=str(folder), remedy="Name a folder that is new or empty.")
    chosen = PROJECTS[template]
    words = {
        "name": name,
        "extras": chosen.extras,
        "version": version("onnx-ops"),
        "models": chosen.told,
        "change": chosen.change,
    }
    for source, place in _sources(chosen):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / place)
    for source, place in _written(name):
        _write(folder / place, source.read_text(encoding="utf-8"), words)
    pipeline = (TEMPLATES / "pipelines" / chosen.pipeline).read_text(encoding="utf-8")
    for old, new in chosen.renamed.items():
        pipeline = pipeline.replace(old, new)
    _write(folder / "configs" / "pipelines" / f"{name}.yaml", pipeline, words)
    (folder / "models" / "__init__.py").touch()
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))


def _sources(chosen: Template) -> Iterator[tuple[Path, str]]:
    """Files that are copied as they are, and their places."""
    yield TEMPLATES / "examples" / chosen.model, chosen.place
    for path in sorted((TEMPLATES / "flows").glob("*.py")):
        yield path, f"flows/{path.name}"
    for path in sorted((TEMPLATES / "schema").glob("*.json")):
        yield path, f"configs/schema/{path.name}"
    for name in _WORKFLOWS:
        yield TEMPLATES / "workflows" / name, f".github/workflows/{name}"
    for path in sorted((TEMPLATES / "actions").glob("*/action.yml")):
        yield path, f".github/actions/{path.parent.name}/{path.name}"
    for name in _INFRA:
        for path in sorted((TEMPLATES / "infra" / name).iterdir()):
            yield path, f"infra/{name}/{path.name}"


def _written(name: str) -> Iterator[tuple[Path, str]]:
    """Files that hold the project's name, and their places."""
    places = {
        "Makefile": "Makefile",
        "README.md": "README.md",
        "gitignore": ".gitignore",
        "onnx-ops.toml": "onnx-ops.toml",
        "prefect.yaml": "prefect.yaml",
        "pyproject.toml": "pyproject.toml",
        "test_project.txt": f"tests/test_{name.replace('-', '_')}.py",
    }
    yield from ((TEMPLATES / "project" / file, place) for file, place in places.items())


def _write(path: Path, text: str, words: Mapping[str, str]) -> None:
    for key, value in words.items():
        text = text.replace(f"{{{key}}}", value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

"""Add onnx-ops to an existing repository.

The module writes a pipeline for the repository's model, and the files that commands and workflows
need. Existing files are not changed. Python's build tools, test runners and linters ignore the new
files. All files are below `onnx-ops/`, except `onnx-ops.toml`, and workflows and actions below
`.github/`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from onnx_ops.adapters.data.tables import find_table_suffix
from onnx_ops.app.scaffold import TEMPLATES, keep_gate_jobs, read_workflow, write_wheel
from onnx_ops.config.folders import PIPELINES, WITHIN, list_source_folders
from onnx_ops.config.functions import (
    check_arguments,
    explain_missing_function,
    find_module_file,
    parse_python,
)
from onnx_ops.config.settings import FILE
from onnx_ops.domain.quantities import NAME_PATTERN
from onnx_ops.errors import NotFoundError, UserError

_FRAMEWORKS = (
    ("xgboost", "xgboost", "sklearn,xgboost"),
    ("lightgbm", "lightgbm", "sklearn,lightgbm"),
    ("keras", "keras", "keras"),
    ("torch", "torch", "torch"),
    ("sklearn", "sklearn", "sklearn"),
)
"""Packages of training modules, with their exporters and the exporters' extras.

The first of these packages that the module imports determines the exporter.
"""

_LABELS = ("label", "target", "y", "labels")
"""Names of columns that are assumed to be the label."""

_GENERATED_ROWS = 64

_OPSET = 18
"""Opset in the pipeline for a model that imports no opset of the default domain."""

_REPLACED = (
    ("--requirement requirements.txt", "--requirement onnx-ops/requirements.txt"),
    ("configs/pipelines", "onnx-ops/pipelines"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySource:
    """The model that the pipeline releases, and its data.

    Attributes:
        source: Path of an ONNX file, or `package.module:function`.
        data: Paths of files with rows, by the name of the data set.
        label: Column of the labels; None to find it by its name.
        framework: Exporter; empty to choose it by the imports of the training module.
        parameters: Values of the training function's parameters.
        releases: Whether the pipeline registers versions, instead of running gates only.
    """

    source: str
    data: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None
    framework: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    releases: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySetup:
    """Files that were written, and files that already existed.

    All paths are relative to the repository.
    """

    pipeline: str
    written: tuple[str, ...]
    kept: tuple[str, ...]


def add_to_repository(root: Path, name: str, given: RepositorySource) -> RepositorySetup:
    """Write the missing files into a repository.

    Raises:
        NotFoundError: the folder, the model, its function or its data does not exist.
        UserError: the name, the model or its data cannot be used in a pipeline.
    """
    if not root.is_dir():
        raise NotFoundError(
            "the folder does not exist",
            where=str(root),
            remedy="For a new project, run onnx-ops init DIR.",
        )
    if not re.fullmatch(NAME_PATTERN, name):
        remedy = (
            "Set another name with `--name NAME`: lower-case letters, digits and hyphens, "
            "beginning with a letter or digit."
        )
        raise UserError(f"{name!r} cannot be the name of a pipeline", where="--name", remedy=remedy)
    files = dict(_list_files(root, name, given))
    written = [place for place, content in files.items() if _write_missing(root / place, content)]
    if not any((root / WITHIN / "vendor").glob("*.whl")):
        written.append(
            write_wheel(distribution("onnx-ops"), root / WITHIN / "vendor")
            .relative_to(root)
            .as_posix()
        )
    kept = [place for place in files if place not in written]
    return RepositorySetup(
        pipeline=(WITHIN / PIPELINES / f"{name}.yaml").as_posix(),
        written=tuple(sorted(written)),
        kept=tuple(kept),
    )


def choose_name(root: Path) -> str:
    """Return a name for a pipeline, from the repository's package or folder."""
    named = ""
    # An invalid pyproject.toml is ignored: build tools report it.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        named = str(
            tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        )
    return re.sub(r"[^a-z0-9]+", "-", (named or root.resolve().name).lower()).strip("-") or "model"


def _write_missing(path: Path, content: str | bytes | Path) -> bool:
    """Write a text, bytes or a copy of a file; return False if the file exists."""
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return True


def _list_files(
    root: Path, name: str, given: RepositorySource
) -> Iterator[tuple[str, str | bytes | Path]]:
    """Yield the path in the repository and the content of each file."""
    folder = WITHIN.as_posix()
    is_function = ":" in given.source
    lines, extras, rows = (
        _describe_function(root, given) if is_function else _describe_file(root, name, given)
    )
    if rows is not None:
        yield rows
    needs_tables = given.releases or is_function or any(map(find_table_suffix, given.data.values()))
    parts = ("platform" if given.releases else "", "tables" if needs_tables else "", extras)
    extras = ",".join(filter(None, parts))
    words = {
        "name": name,
        "version": distribution("onnx-ops").version,
        "extras": f"[{extras}]" if extras else "",
    }
    yield f"{folder}/{PIPELINES}/{name}.yaml", _compose_pipeline(name, lines, given)
    yield FILE, TEMPLATES / "project" / ("" if given.releases else "ci-only") / FILE
    for path in sorted((TEMPLATES / "schema").glob("*.json")):
        yield f"{folder}/schema/{path.name}", path
    yield (
        f"{folder}/vendor/onnx-ops.txt",
        _fill("onnx-ops.txt", words).replace("./vendor/", f"./{folder}/vendor/"),
    )
    yield f"{folder}/requirements.txt", _compose_requirements(root, words)
    if given.releases:
        yield f"{folder}/prefect.yaml", _compose_deployments(words)
    if (root / ".github").is_dir():
        yield from _list_github_files(releases=given.releases)


def _compose_deployments(words: Mapping[str, str]) -> str:
    # The flows are imported from the package, since the repository's linters would check copies.
    flows = re.sub(
        r"flows/(\w+)\.py:(\w+)", r"onnx_ops.templates.flows.\1.\2", _fill("prefect.yaml", words)
    )
    return _replace(flows).replace("prefect --no-prompt deploy", _DEPLOY)


_DEPLOY = "prefect --no-prompt deploy --prefect-file onnx-ops/prefect.yaml"


_WORKFLOWS = {
    "model-commit": "onnx-ops",
    "promote": "onnx-ops-promote",
    "rollback": "onnx-ops-rollback",
}
"""Workflows of a new project, and their names in an existing repository."""


def _list_github_files(*, releases: bool) -> Iterator[tuple[str, str | Path]]:
    for action in ("judge", "onnx-ops"):
        yield f".github/actions/{action}/action.yml", TEMPLATES / "actions" / action / "action.yml"
    if not releases:
        gates = keep_gate_jobs(read_workflow("model-commit"))
        yield f".github/workflows/{_WORKFLOWS['model-commit']}.yml", _replace(gates)
        return
    for workflow, place in _WORKFLOWS.items():
        yield f".github/workflows/{place}.yml", _replace(read_workflow(workflow))


def _replace(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


def _fill(template: str, words: Mapping[str, str]) -> str:
    text = (TEMPLATES / "project" / template).read_text(encoding="utf-8")
    for key, value in words.items():
        text = text.replace(f"{{{key}}}", value)
    return text


def _compose_requirements(root: Path, words: Mapping[str, str]) -> str:
    lines = [
        "# What onnx-ops needs here: pip install --requirement onnx-ops/requirements.txt",
        "--requirement vendor/onnx-ops.txt",
        f"onnx-ops{words['extras']}",
    ]
    if (root / "requirements.txt").is_file():
        lines.append("--requirement ../requirements.txt")
    if (root / "setup.py").is_file() or _has_build(root / "pyproject.toml"):
        lines.append("--editable .")
    return "\n".join([*lines, ""])


def _has_build(file: Path) -> bool:
    return file.is_file() and "[project]" in file.read_text(encoding="utf-8", errors="replace")


def _compose_pipeline(name: str, lines: Sequence[str], given: RepositorySource) -> str:
    register = ["register:", f"  model: {name}", "  promote: manual # onnx-ops docs promote", ""]
    return "\n".join(
        [
            "# yaml-language-server: $schema=../schema/pipeline.schema.json",
            "schema: 1",
            f"pipeline: {name}",
            "",
            *lines,
            "",
            "validate:",
            "  samples: {data: test}",
            "",
            "benchmark:",
            "  targets: [cpu-1t]",
            "",
            "gates:",
            "  - {kind: parity}",
            "  # A metric against the labels of `test`: onnx-ops docs gates",
            "  # - {kind: metric, name: accuracy, min: 90%}",
            "",
            *(register if given.releases else ()),
        ]
    )


def _describe_function(root: Path, given: RepositorySource) -> tuple[list[str], str, None]:
    """Return the pipeline's lines for a training function, and the extras to install."""
    module = given.source.partition(":")[0]
    path = next(
        filter(None, (find_module_file(module, base) for base in list_source_folders(root))), None
    )
    if path is None:
        remedy = "Name a module in the repository or in its src/: --from package.module:function."
        raise NotFoundError(f"there is no module {module!r}", where=str(root), remedy=remedy)
    if problem := explain_missing_function(given.source, root):
        raise NotFoundError(problem, where="--from")
    for _, problem in check_arguments(given.source, given.parameters, root):
        remedy = "Set each parameter that it needs with --with NAME=VALUE, and leave out others."
        raise UserError(problem, where="--from", remedy=remedy)
    framework, extras = _find_framework(path, given.framework)
    files = given.data.values()
    found = {name: file for name, file in _find_data(root).items() if file not in files}
    data = _describe_data(root, {**found, **given.data}, given.label)
    parameters = ", ".join(f"{name}: {_as_yaml(value)}" for name, value in given.parameters.items())
    lines = [*data, "", "train:", f"  run: {given.source}"]
    lines += [f"  with: {{{parameters}}}"] if parameters else []
    return [*lines, "", "export:", f"  framework: {framework}"], extras, None


def _find_framework(path: Path, chosen: str) -> tuple[str, str]:
    """Return the chosen exporter or that for the imports of a module, and its extras.

    The exporter is `sklearn` if the module imports none of the packages in `_FRAMEWORKS`.
    """
    if chosen:
        return chosen, next((extras for _, name, extras in _FRAMEWORKS if name == chosen), "")
    imported = set()
    for node in ast.walk(parse_python(path.read_bytes())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    found = [(name, extras) for package, name, extras in _FRAMEWORKS if package in imported]
    return found[0] if found else ("sklearn", "sklearn")


def _find_data(root: Path) -> dict[str, str]:
    """Return a file with rows for each of the names `train` and `test`.

    The name of the file contains this name. A name without such a file is left out.
    """
    found = {}
    for name in ("train", "test"):
        paths = [
            path
            for folder in (root / "data", root)
            for path in (sorted(folder.glob(f"*{name}*")) if folder.is_dir() else ())
            if path.is_file() and (find_table_suffix(path.name) or path.suffix == ".npz")
        ]
        if paths:
            found[name] = paths[0].relative_to(root).as_posix()
    return found


def _describe_data(root: Path, data: Mapping[str, str], label: str | None) -> list[str]:
    """Return the lines of section `data`."""
    if "test" not in data:
        raise UserError(
            "the pipeline needs rows for the validation of the export",
            where="--data",
            remedy="Add --data test=data/test.csv. Add each other set that a training function "
            'reads by its name there, such as --data train=data/train.csv for data["train"].',
        )
    lines = ["data:"]
    for name, file in data.items():
        if not (root / file).is_file():
            raise NotFoundError(
                "no such file",
                where=str(root / file),
                remedy="Paths are relative to the repository.",
            )
        column = _find_label(root / file) if label is None else label
        labelled = f", label: {_as_yaml(column)}" if column else ""
        lines.append(f"  {name}: {{file: {_as_yaml(file)}{labelled}}}")
    return lines


def _find_label(path: Path) -> str:
    """Return the first usual name of a label that is a column; empty if there is none."""
    from onnx_ops.adapters.data.file import sample_arrays

    arrays = sample_arrays(path, where=str(path)).arrays
    return next((name for name in _LABELS if name in arrays), "")


def _describe_file(
    root: Path, name: str, given: RepositorySource
) -> tuple[list[str], str, tuple[str, bytes] | None]:
    """Return the pipeline's lines for an ONNX file, no extras, and generated rows.

    The rows are a path and the content of a file; None if the user supplied data.
    """
    from onnx_ops.measure.files import pack_arrays
    from onnx_ops.onnx_graph.input_bounds import read_input_bounds
    from onnx_ops.onnx_graph.model_info import read_model_info
    from onnx_ops.tools.generated_rows import generate_samples

    path = root / given.source
    if not path.is_file():
        remedy = (
            "Name a file in the repository, or a training function: --from package.module:function."
        )
        raise NotFoundError("no such ONNX file", where=str(path), remedy=remedy)
    model = read_model_info(path)
    rows = None
    if given.data:
        data = _describe_data(root, given.data, given.label)
    else:
        samples = generate_samples(
            model.inputs, count=_GENERATED_ROWS, dims={}, bounds=read_input_bounds(path)
        )
        file = f"{WITHIN}/{name}-rows.npz"
        rows = file, pack_arrays({**samples.rows, **samples.fixed})
        inputs = ", ".join(f"{_as_yaml(spec.name)}: {_as_yaml(spec.name)}" for spec in model.inputs)
        data = [
            "data:",
            "  # Generated from the graph. Put real rows in their place: onnx-ops docs rows",
            f"  test: {{file: {file}, inputs: {{{inputs}}}}}",
        ]
    export = ["export:", "  framework: onnx", f"  opset: {model.opsets.get('', _OPSET)}"]
    return [*data, "", f"model: {_as_yaml(given.source)}", "", *export], "", rows


def _as_yaml(value: object) -> str:
    text = str(value)
    return (
        text
        if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", text)
        else json.dumps(value)
    )

"""Changed paths, and the pipelines that depend on them.

The tests also cover which definition of a shared target is used.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.app.affected import affected, changed_since
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import prepare
from tests.support.external import write_external
from tests.support.git import commit_all, git

PIPELINE = """\
pipeline: p
data: {all: {sklearn: iris}}
train: {run: "code_of_it:train", depends: [words.txt]}
export: {framework: sklearn}
validate: {samples: {data: all, limit: 150}}
benchmark: {targets: [board]}
gates: [{kind: parity}]
"""
FILE = "configs/pipelines/p.yaml"
SHARED, OWN = "fleet/board.yaml", "configs/targets/board.yaml"


def write(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Return a project whose target `board` is shared by several projects."""
    monkeypatch.chdir(tmp_path)
    files = {
        FILE: PIPELINE,
        SHARED: "name: board\n",
        "onnx-ops.toml": 'targets = "fleet"\n',
        "code_of_it.py": "def train(data):\n    return None\n",
        "words.txt": "",
    }
    write(tmp_path, **files)
    return open_project()


def touched(project: Project, *changed: str) -> tuple[str, ...]:
    return tuple(
        name for one in affected(project, changed) for name in one.because if not one.problem
    )


def test_affected_of_training_includes_its_code_and_dependencies(project: Project) -> None:
    assert touched(project, "code_of_it.py", "words.txt", "other.txt") == (
        "code_of_it.py",
        "words.txt",
    )


def test_affected_of_user_model_includes_code_of_its_classes(
    project: Project, tmp_path: Path
) -> None:
    brought = PIPELINE.replace('train: {run: "code_of_it:train", depends: [words.txt]}', "model: m")
    files = {FILE: brought, "nets.py": "import layers\n\nclass Net: ...\n", "layers.py": ""}
    write(tmp_path, **files, **{"other.py": "class Net: ...\n"})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.joblib").write_bytes(b"\x80\x02cnets\nNet\n)\x81.")
    assert touched(project, "nets.py", "layers.py", "other.py") == ("layers.py", "nets.py")


def test_affected_of_user_onnx_file_includes_its_external_data(
    project: Project, tmp_path: Path
) -> None:
    brought = PIPELINE.replace(
        'train: {run: "code_of_it:train", depends: [words.txt]}', "model: models/m.onnx"
    ).replace("framework: sklearn", "framework: onnx")
    write(tmp_path, **{FILE: brought})
    (tmp_path / "models").mkdir()
    write_external(tmp_path / "models" / "m.onnx", "m.onnx.data")
    changed = ("models/m.onnx.data", "m.onnx.data", "models/other.data")
    assert touched(project, *changed) == ("models/m.onnx.data",)
    assert touched(project, "models/m.onnx.data.dvc") == ("models/m.onnx.data.dvc",)
    (tmp_path / "models" / "m.onnx").write_bytes(b"a pointer")
    assert touched(project, "models/m.onnx") == ("models/m.onnx",)


@pytest.mark.parametrize(
    "folder", ["data", "./data", "data/../data", "{root}/data", "../{root.name}/data"]
)
def test_affected_of_data_with_indirect_or_absolute_path_includes_its_file(
    project: Project, folder: str
) -> None:
    root = project.settings.root
    section = f"{{all: {{file: {folder.format(root=root)}/x.npz, inputs: {{x: x}}, label: y}}}}"
    write(root, **{FILE: PIPELINE.replace("{all: {sklearn: iris}}", section), "data/x.npz": ""})
    assert touched(project, "data/x.npz", "data/x.npz.dvc", "x.npz") == (
        "data/x.npz",
        "data/x.npz.dvc",
    )


def test_affected_of_data_behind_link_includes_link_and_its_file(project: Project) -> None:
    root = project.settings.root
    section = "{all: {file: latest.npz, inputs: {x: x}, label: y}}"
    write(root, **{FILE: PIPELINE.replace("{all: {sklearn: iris}}", section), "data/x.npz": ""})
    (root / "latest.npz").symlink_to("data/x.npz")
    assert touched(project, "latest.npz", "data/x.npz") == ("data/x.npz", "latest.npz")


@pytest.mark.parametrize(
    ("repo", "expected"),
    [
        ("{root}", ("data/x.npz.dvc", "dvc.lock")),
        ("../{root.name}", ("data/x.npz.dvc", "dvc.lock")),
        ("{root.parent}/shared", ()),
        ("../shared", ()),
    ],
)
def test_affected_of_dvc_data_includes_pointer_and_lock_file_unless_repository_is_outside(
    project: Project, repo: str, expected: tuple[str, ...]
) -> None:
    root = project.settings.root
    options = f"{{path: data/x.npz, repo: {repo.format(root=root)}}}"
    section = f"{{all: {{source: dvc, options: {options}, inputs: {{x: x}}, label: y}}}}"
    write(
        root,
        **{
            FILE: PIPELINE.replace("{all: {sklearn: iris}}", section),
            "onnx-ops.toml": 'targets = "fleet"\nallowed_paths = "../shared"\n',
        },
    )
    assert touched(open_project(), "data/x.npz.dvc", "dvc.lock", "other.dvc") == expected


def test_changed_since_commit_lists_changed_new_and_deleted_files(tmp_path: Path) -> None:
    write(tmp_path, same="", changed="", gone="", **{".gitignore": "ignored\n"})
    commit_all(tmp_path)
    write(tmp_path, changed="more", new="", staged="", ignored="")
    git(tmp_path, "add", "staged")
    (tmp_path / "gone").unlink()
    assert changed_since(tmp_path, "HEAD") == {"changed", "gone", "new", "staged"}


def test_affected_of_target_includes_shared_and_own_definition(project: Project) -> None:
    assert touched(project, SHARED) == (SHARED,)
    # The project's own file does not exist, but would override the shared file.
    assert touched(project, OWN) == (OWN,)
    assert touched(project, "fleet/other.yaml") == ()


def test_affected_of_target_with_missing_package_includes_library_of_project(
    project: Project, tmp_path: Path
) -> None:
    libraries = (
        "custom_ops:\n"
        "  - {package: acme_missing, domains: [acme]}\n"
        f"  - {{path: own.so, digest: 'sha256:{'0' * 64}', domains: [own]}}\n"
    )
    write(tmp_path, **{SHARED: f"name: board\n{libraries}", "own.so": ""})
    assert touched(project, "own.so") == ("own.so",)


def test_prepare_with_own_target_file_overrides_shared_file(project: Project) -> None:
    before = prepare(project, Path(FILE)).targets["board"]
    own = project.settings.root / OWN
    own.parent.mkdir()
    own.write_text("name: board\nsession: {intra_op_threads: 2}\n", encoding="utf-8")
    after = prepare(project, Path(FILE)).targets["board"]
    assert (before.session.intra_op_threads, after.session.intra_op_threads) == (1, 2)
    assert touched(project, OWN, SHARED) == (OWN,)

"""Which paths have changed, and which of them a pipeline's training rests on."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.app.affected import affected, changed_since
from onnx_ops.app.project import open_project
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


def write(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")


def test_training_rests_on_its_code_and_on_what_it_depends_on(tmp_path: Path) -> None:
    for folder in ("configs/pipelines", "configs/targets"):
        (tmp_path / folder).mkdir(parents=True)
    files = {
        "onnx-ops.toml": "",
        "configs/pipelines/p.yaml": PIPELINE,
        "configs/targets/board.yaml": "name: board\n",
        "code_of_it.py": "def train(data):\n    return None\n",
        "words.txt": "",
        "other.txt": "",
    }
    write(tmp_path, **files)
    (found,) = affected(open_project(tmp_path), ("code_of_it.py", "words.txt", "other.txt"))
    assert (found.because, found.problem) == (("code_of_it.py", "words.txt"), "")


def test_a_model_that_is_brought_rests_on_the_code_of_its_classes(tmp_path: Path) -> None:
    for folder in ("configs/pipelines", "configs/targets"):
        (tmp_path / folder).mkdir(parents=True)
    files = {
        "onnx-ops.toml": "",
        "configs/pipelines/p.yaml": PIPELINE.replace(
            'train: {run: "code_of_it:train", depends: [words.txt]}', "model: m"
        ),
        "configs/targets/board.yaml": "name: board\n",
        "nets.py": "import layers\n\nclass Net: ...\n",
        "layers.py": "",
        "other.py": "class Net: ...\n",
    }
    write(tmp_path, **files)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.joblib").write_bytes(b"\x80\x02cnets\nNet\n)\x81.")
    (found,) = affected(open_project(tmp_path), ("nets.py", "layers.py", "other.py"))
    assert (found.because, found.problem) == (("layers.py", "nets.py"), "")


def test_files_that_are_changed_new_or_gone_have_changed_and_ignored_ones_have_not(tmp_path: Path) -> None:
    write(tmp_path, same="", changed="", gone="", **{".gitignore": "ignored\n"})
    commit_all(tmp_path)
    write(tmp_path, changed="more", new="", staged="", ignored="")
    git(tmp_path, "add", "staged")
    (tmp_path / "gone").unlink()
    assert changed_since(tmp_path, "HEAD") == {"changed", "gone", "new", "staged"}

"""Private copies of models: the verified bytes are the loaded bytes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_ops.domain.artifact import digest_folder, hex_digits
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import DigestMismatchError, NotFoundError
from onnx_ops.serving.inference import models
from onnx_ops.serving.inference.integrity import ModelCopies
from onnx_ops.serving.inference.models import load_model
from tests.serving.serving_process import deploy
from tests.support.operators import DOMAIN, build_library

SOURCE = Path(__file__).resolve().parents[3] / "examples" / "custom_ops" / "softsign.c"
FLOAT = TensorProto.FLOAT
SEED = 49
APPROVED = 1.0
"""Output of the approved files for an input of 1."""


def write_files(folder: Path, *, scale: float, weight: float, library: Path | None) -> None:
    """Write a model of y = scale * softsign(x) + weight with external data.

    If a library is given, write it too; its operator computes the softsign.
    """
    folder.mkdir()
    weights = TensorProto(name="w", data_type=FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="weights.bin")
    scales = helper.make_tensor("scale", FLOAT, [1], [scale])
    domain = "" if library is None else DOMAIN
    sign = helper.make_node(
        "Softsign" if library is None else "ScaledSoftsign", ["x"], ["sign"], domain=domain
    )
    nodes = [
        sign,
        helper.make_node("Mul", ["sign", "scale"], ["s"]),
        helper.make_node("Add", ["s", "w"], ["y"]),
    ]
    inputs, outputs = (helper.make_tensor_value_info(name, FLOAT, ["batch"]) for name in "xy")
    graph = helper.make_graph(nodes, "m", [inputs], [outputs], [scales, weights])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    (folder / "model.onnx").write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    )
    (folder / "weights.bin").write_bytes(np.full(1, weight, np.float32).tobytes())
    if library is not None:
        (folder / "ops.so").write_bytes(library.read_bytes())


class ReplacedFolder:
    """A folder whose files are exchanged with those of another version, one at a time."""

    def __init__(self, root: Path, *, has_library: bool) -> None:
        self.folder = root / "shared"
        self._versions = [root / "approved", root / "other"]
        for number, version in enumerate(self._versions):
            library = root / f"{number}.so" if has_library else None
            if library is not None:
                source = root / f"{number}.c"
                source.write_text(
                    SOURCE.read_text().replace("(1.0f + fabsf", f"({1 + number * 6}.0f + fabsf")
                )
                build_library(source, library)
            write_files(version, scale=2.0 + number * 8, weight=number * 100.0, library=library)
        self.folder.mkdir()
        self._random = random.Random(SEED)  # noqa: S311 (no secret)
        for name in self._list_names():
            self._put(self._versions[0], name)

    def deploy(self) -> Deployment:
        """Return the deployment of the approved files."""
        approved = deploy(self._versions[0])
        libraries = tuple(name for name in self._list_names() if name.endswith(".so"))
        return replace(approved, location=str(self.folder), custom_ops=libraries)

    def put(self, version: int) -> None:
        """Put the files of a version, in random order."""
        names = self._list_names()
        for name in self._random.sample(names, len(names)):
            self._put(self._versions[version], name)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace files in a thread until the block ends."""
        stop = threading.Event()

        def replace_files() -> None:
            while not stop.is_set():
                self.put(1)
                self.put(0)
                stop.wait(self._random.choice((0.0, 0.001, 0.003)))

        thread = threading.Thread(target=replace_files)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _list_names(self) -> list[str]:
        return sorted(path.name for path in self._versions[0].iterdir())

    def _put(self, version: Path, name: str) -> None:
        new = self.folder.with_name("new")
        new.write_bytes((version / name).read_bytes())
        new.replace(self.folder / name)


def run(deployment: Deployment, copies: Path) -> float:
    """Load a model, and return its output for an input of 1."""
    (y,) = load_model(deployment, ModelCopies(copies)).run(("y",), {"x": np.ones(1, np.float32)})
    return float(y[0])


@pytest.mark.parametrize("has_library", [False, True], ids=["data", "library"])
@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.nightly)])
def test_load_while_files_are_replaced_never_loads_other_bytes(
    tmp_path: Path, count: int, has_library: bool
) -> None:
    shared = ReplacedFolder(tmp_path, has_library=has_library)
    deployment = shared.deploy()
    outputs: list[float] = []
    with shared.replacing():
        for number in range(count):
            try:
                outputs.append(run(deployment, tmp_path / "copies" / str(number)))
            except DigestMismatchError:
                continue
    assert set(outputs) == {APPROVED}


@pytest.mark.parametrize("has_library", [False, True], ids=["data", "library"])
def test_load_after_replacement_between_check_and_session_loads_verified_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    shared = ReplacedFolder(tmp_path, has_library=has_library)
    deployment = shared.deploy()
    original = models.open_session

    def replace_and_open(path: Path, *arguments: Any, **options: Any) -> Any:
        shared.put(1)
        return original(path, *arguments, **options)

    monkeypatch.setattr(models, "open_session", replace_and_open)
    assert run(deployment, tmp_path / "copies") == APPROVED
    # This load uses the private copy.
    assert run(deployment, tmp_path / "copies") == APPROVED
    with pytest.raises(DigestMismatchError):
        run(deployment, tmp_path / "no-copies")


@pytest.mark.parametrize("is_source_intact", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights.bin").write_bytes(b"1234"),
        lambda folder: (folder / "weights.bin").unlink(),
        lambda folder: (folder / "more").write_bytes(b""),
    ],
    ids=["changed", "missing", "added"],
)
def test_fetch_of_damaged_copy_copies_files_again_or_raises_not_found_error(
    tmp_path: Path, damage: Callable[[Path], object], is_source_intact: bool
) -> None:
    shared = ReplacedFolder(tmp_path, has_library=False)
    deployment, copies = shared.deploy(), ModelCopies(tmp_path / "copies")
    copy = copies.fetch(deployment)
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    damage(copy)
    if not is_source_intact:
        shared.folder.rename(tmp_path / "moved")
        with pytest.raises(NotFoundError):
            copies.fetch(deployment)
        return
    assert digest_folder(copies.fetch(deployment)).digest() == deployment.manifest


def test_fetch_of_pipe_without_writer_raises_digest_mismatch_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ReplacedFolder(tmp_path, has_library=False)
    deployment = shared.deploy()
    (shared.folder / "weights.bin").unlink()
    os.mkfifo(shared.folder / "weights.bin")
    # Simulate that the file becomes a pipe after this check.
    monkeypatch.setattr(Path, "is_file", lambda path: path.exists())
    with pytest.raises(DigestMismatchError):
        ModelCopies(tmp_path / "copies").fetch(deployment)
    assert [path.name for path in (tmp_path / "copies").iterdir() if path.is_dir()] == []


def test_retain_keeps_needed_copies_and_two_most_recently_used(tmp_path: Path) -> None:
    copies, deployments = ModelCopies(tmp_path / "copies"), []
    # The call must also succeed before any copy exists.
    copies.retain([])
    for number in range(5):
        write_files(tmp_path / str(number), scale=1.0 + number, weight=0.0, library=None)
        deployments.append(deploy(tmp_path / str(number)))
        os.utime(copies.fetch(deployments[-1]), (number, number))
    copies.fetch(deployments[1])
    copies.retain(deployments[:1])
    names = {path.name for path in (tmp_path / "copies").iterdir()}
    kept = {hex_digits(deployments[number].manifest) for number in (0, 1, 4)}
    assert names == kept | {f"{name}.lock" for name in kept}

"""The modules, files and packages that user code or a model file depends on."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import joblib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.pipeline import collect_user_code, find_referenced_modules
from onnx_ops.pipeline.user_code import _find_development_folder

SOURCES = {
    "model.py": "import helper\nfrom tools import shapes\nimport numpy\n\ndef train(): ...\n",
    "helper.py": "X = 1\n",
    "tools/__init__.py": "",
    "tools/shapes.py": "from . import colours\nfrom .deep.inner import thing\n",
    "tools/colours.py": "RED = 1\n",
    "tools/deep/__init__.py": "",
    "tools/deep/inner.py": "from ... import model\nfrom ..colours import RED as thing\n",
    "tools/unused.py": "",
    "unrelated.py": "Y = 1\n",
    "space/code.py": "def train():\n    import helper\n",
    "data.txt": "1",
}


def write_sources(root: Path) -> Path:
    for name, source in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_sources(tmp_path)


def edited(
    project: Path, name: str, reference: str = "model:train", depends: tuple[str, ...] = ()
) -> bool:
    """Return whether editing a file changes the digest."""
    before = collect_user_code((reference,), project, depends).digest()
    (project / name).write_text(SOURCES[name] + "\n# edited\n")
    return collect_user_code((reference,), project, depends).digest() != before


@pytest.mark.parametrize(
    ("reference", "imported"),
    [
        (
            "model",
            {
                "model",
                "helper",
                "tools/__init__",
                "tools/shapes",
                "tools/colours",
                "tools/deep/inner",
            },
        ),
        (
            "tools.deep.inner",
            {"tools/__init__", "tools/deep/__init__"},
        ),  # The `__init__` files run when the module is imported.
        # `space` has no `__init__` file, and a function contains the import.
        ("space.code", {"space/code", "helper"}),
    ],
)
def test_collect_user_code_includes_imported_modules(
    project: Path, reference: str, imported: set[str]
) -> None:
    for name in imported:
        assert edited(project, f"{name}.py", f"{reference}:train"), name


@pytest.mark.parametrize("name", ["unrelated.py", "tools/unused.py", "data.txt", "space/code.py"])
def test_collect_user_code_ignores_unimported_files(project: Path, name: str) -> None:
    assert not edited(project, name)


def test_collect_user_code_with_depends_includes_declared_files(project: Path) -> None:
    assert edited(project, "data.txt", depends=("data.txt",))


def test_collect_user_code_with_missing_declared_file_raises_not_found_error(project: Path) -> None:
    with pytest.raises(NotFoundError, match=r"missing\.txt"):
        collect_user_code(("model:train",), project, ("missing.txt",))


@pytest.mark.parametrize(
    "file", ["onnx_ops/__init__.py", "tools.py"], ids=["of this product", "beside a package"]
)
def test_collect_user_code_ignores_shadowed_module(project: Path, file: str) -> None:
    (project / "onnx_ops").mkdir()
    (project / "model.py").write_text("import onnx_ops, tools\n\ndef train(): ...\n")
    before = collect_user_code(("model:train",), project)
    (project / file).write_text("# edited")
    assert collect_user_code(("model:train",), project) == before


def test_collect_user_code_ignores_function_name_and_folder(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write_sources(tmp_path_factory.mktemp("other"))
    assert collect_user_code(("model:train",), project) == collect_user_code(
        ("model:other",), other
    )


@pytest.mark.parametrize(
    "reference", ["nowhere:train", "tools.nowhere:train", ":train", "", "../model:train", "a b:c"]
)
def test_collect_user_code_of_missing_or_invalid_module_raises_not_found_error(
    project: Path, reference: str
) -> None:
    with pytest.raises(NotFoundError):
        collect_user_code((reference,), project)


@pytest.mark.parametrize(
    "source",
    [
        b"def (:\n",
        b"x = '\x00'\n",
        b"\xff\xfe\n",
        b"# coding: nonsense\n",
        pytest.param(b"x = y" + b".z" * 100_000 + b"\n", id="nested"),
    ],
)
def test_collect_user_code_with_invalid_source_raises_user_error(
    project: Path, source: bytes
) -> None:
    (project / "helper.py").write_bytes(source)
    with pytest.raises(UserError, match="not Python") as caught:
        collect_user_code(("model:train",), project)
    assert "helper.py" in caught.value.where


def test_collect_user_code_with_circular_import_succeeds(project: Path) -> None:
    (project / "helper.py").write_text("import model\n")
    assert set(collect_user_code(("model:train",), project).files) >= {"model.py", "helper.py"}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a project whose module is on the path, as it is where a stage runs."""
    (tmp_path / "shop_nets").mkdir()
    (tmp_path / "shop_nets" / "__init__.py").write_text("")
    (tmp_path / "shop_nets" / "scaled.py").write_text("class Scaled:\n    factor = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("shop_nets", "shop_nets.scaled"):
        sys.modules.pop(name, None)


def instance() -> object:
    return {
        "model": importlib.import_module("shop_nets.scaled").Scaled(),
        "rows": np.arange(1000.0),
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_find_referenced_modules_of_pickle_returns_class_modules(shop: Path, protocol: int) -> None:
    (shop / "model.pkl").write_bytes(pickle.dumps(instance(), protocol))
    assert find_referenced_modules(shop / "model.pkl", shop) == {"shop_nets.scaled", "numpy"}


@pytest.mark.parametrize(
    "compress", [0, 3, ("gzip", 3), ("bz2", 3), ("lzma", 3), ("xz", 3)], ids=str
)
def test_find_referenced_modules_of_compressed_pickle_returns_class_modules(
    shop: Path, compress: int | tuple[str, int]
) -> None:
    joblib.dump(instance(), shop / "model.joblib", compress=compress)
    assert find_referenced_modules(shop / "model.joblib", shop) == {"shop_nets.scaled", "numpy"}


def test_find_referenced_modules_of_archive_and_json_returns_class_modules(shop: Path) -> None:
    document = json.dumps(
        {"module": "shop_nets.scaled", "class_name": "Scaled", "other": "numpy.linalg"}
    )
    (shop / "config.json").write_text(document)
    with zipfile.ZipFile(shop / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(instance(), 2))
    with zipfile.ZipFile(shop / "model.keras", "w") as archive:
        archive.writestr("config.json", document)
    for name in ("config.json", "model.pt", "model.keras"):
        assert find_referenced_modules(shop / name, shop) == {"shop_nets.scaled", "numpy"}


def test_find_referenced_modules_of_archive_with_unknown_compression_reads_it_as_plain_file(
    shop: Path,
) -> None:
    path = shop / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(instance(), 2))
    packed = path.read_bytes()
    central = packed.index(b"PK\1\2")
    path.write_bytes(packed[: central + 10] + b"\x63\x00" + packed[central + 12 :])
    assert find_referenced_modules(path, shop) == {"shop_nets.scaled", "numpy"}


@given(before=st.binary(max_size=40), after=st.binary(max_size=40))
def test_find_referenced_modules_with_name_in_any_bytes_returns_it(
    before: bytes, after: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("project")
    (root / "nets.py").touch()
    (root / "file").touch()
    assert find_referenced_modules(root / "file", root) == frozenset()
    (root / "file").write_bytes(before + b"\x8c\x04nets" + after)
    assert "nets" in find_referenced_modules(root / "file", root)


@pytest.fixture
def library(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Write source outside the project, and put it on the path.

    An editable installation does the same.
    """
    folder = tmp_path_factory.mktemp("library")
    (folder / "shop_library").mkdir()
    (folder / "shop_library" / "__init__.py").write_text("from .layers import Layer\n")
    (folder / "shop_library" / "layers.py").write_text("class Layer: ...\n")
    (folder / "shop_alone.py").write_text("class Alone: ...\n")
    monkeypatch.syspath_prepend(str(folder))
    _find_development_folder.cache_clear()
    yield folder
    for name in ("shop_library", "shop_library.layers", "shop_alone"):
        sys.modules.pop(name, None)
    _find_development_folder.cache_clear()


def test_collect_user_code_follows_package_under_development(project: Path, library: Path) -> None:
    (project / "helper.py").write_text("from shop_library import Layer\n")
    files = set(collect_user_code(("model:train",), project).files)
    assert {"shop_library/__init__.py", "shop_library/layers.py"} <= files
    assert set(collect_user_code(("shop_alone:train",), project).files) == {"shop_alone.py"}


def test_find_referenced_modules_includes_package_under_development(
    project: Path, library: Path
) -> None:
    objects = [
        importlib.import_module("shop_library.layers").Layer(),
        importlib.import_module("shop_alone").Alone(),
    ]
    (project / "model.pkl").write_bytes(pickle.dumps(objects))
    assert find_referenced_modules(project / "model.pkl", project) == {
        "shop_library.layers",
        "shop_alone",
    }


@pytest.mark.parametrize(
    ("file", "source", "imported"),
    [
        ("helper.py", "import importlib\nimportlib.import_module('unrelated')\n", "unrelated.py"),
        (
            "helper.py",
            "from importlib import import_module\nimport_module('unrelated')\n",
            "unrelated.py",
        ),
        ("helper.py", "__import__('unrelated')\n", "unrelated.py"),
        (
            "tools/shapes.py",
            "import importlib\nimportlib.import_module('.unused', __package__)\n",
            "tools/unused.py",
        ),
    ],
)
def test_collect_user_code_follows_import_by_literal_name(
    project: Path, file: str, source: str, imported: str
) -> None:
    (project / file).write_text(source)
    assert edited(project, imported)


def test_collect_user_code_records_version_of_installed_package(project: Path) -> None:
    (project / "helper.py").write_text("import json, yaml, sklearn.linear_model, onnx_ops\n")
    packages = collect_user_code(("model:train",), project).packages
    assert set(packages) == {"numpy", "PyYAML", "scikit-learn"}
    assert packages["numpy"] == np.__version__
    assert collect_user_code(("numpy.linalg:norm",), project).packages == {"numpy": np.__version__}


def test_collect_user_code_of_project_module_named_like_package_records_no_package(
    project: Path,
) -> None:
    (project / "yaml").mkdir()
    (project / "yaml" / "reader.py").write_text("def read(): ...\n")
    (project / "helper.py").write_text("from yaml.reader import read\n")
    assert set(collect_user_code(("model:train",), project).packages) == {"numpy"}

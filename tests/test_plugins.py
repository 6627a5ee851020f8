"""Plugins by name, against the entry points of real installed distributions."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnx_ops import plugins, ports
from onnx_ops.errors import MissingPackageError, NotFoundError, UserError
from tests.support.extras import hide

MODULES = {
    "good": """
from onnx_ops.ports import Exporter

class Plugin(Exporter):
    save = load = export = reference = None

    def __init__(self, *arguments):
        self.arguments = arguments
""",
    "underived": "class Plugin:\n    pass\n",
    "needy": "import a_package_that_nobody_has.part\n",
}


HEAVY = (
    "numpy",
    "onnx",
    "onnxruntime",
    "sklearn",
    "torch",
    "boto3",
    "azure",
    "mlflow",
    "prefect",
    "httpx",
)


@pytest.fixture
def versions_unread() -> Iterator[None]:
    plugins.version.cache_clear()
    yield
    plugins.version.cache_clear()


@pytest.mark.usefixtures("versions_unread")
def test_version_of_package_names_its_distribution_or_reports_it_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "_packages", lambda: {"acme_runtime": ["numpy"]})
    assert plugins.version("acme-runtime") == f"numpy {plugins.version('numpy')}"
    assert plugins.version("acme-runtime-of-nobody") == plugins.MISSING


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution `acme-plugins` with three exporters, like an installer."""
    for name, source in MODULES.items():
        (tmp_path / f"acme_{name}.py").write_text(source)
    metadata = tmp_path / "acme_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plugins\nVersion: 1.0\n")
    lines = [f"{name} = acme_{name}:Plugin" for name in MODULES]
    (metadata / "entry_points.txt").write_text("[onnx_ops.exporters]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    for name in MODULES:
        sys.modules.pop(f"acme_{name}", None)


@pytest.mark.usefixtures("installed")
def test_load_plugin_of_other_distribution_creates_it() -> None:
    names = plugins.names("exporters")
    assert {"good", "needy", "sklearn", "torch"} <= set(names)
    assert list(names) == sorted(names)
    assert plugins.load("exporters", "good", 1, "two").arguments == (1, "two")


@pytest.mark.usefixtures("installed")
def test_load_plugin_without_base_class_raises_user_error() -> None:
    with pytest.raises(
        UserError, match="acme_underived:Plugin does not create an instance of Exporter"
    ) as caught:
        plugins.load("exporters", "underived")
    assert caught.value.remedy == "Derive its class from onnx_ops.ports.Exporter."


@pytest.mark.usefixtures("installed")
def test_load_plugin_without_its_package_raises_missing_package_error_with_command() -> None:
    with pytest.raises(
        MissingPackageError, match="a_package_that_nobody_has is not installed"
    ) as caught:
        plugins.load("exporters", "needy")
    assert caught.value.where == "exporters plugin needy"
    assert caught.value.remedy == "Install it with: pip install a_package_that_nobody_has"


def test_install_hint_of_package_in_extra_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    point = plugins.find("exporters", "sklearn")
    monkeypatch.setitem(sys.modules, point.module, None)
    with pytest.raises(MissingPackageError):
        plugins.load("exporters", "sklearn")
    assert plugins.install_hint("skl2onnx") == "Install it with: pip install 'onnx-ops[sklearn]'"


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (("mlflow",), "it with: pip install 'onnx-ops[mlflow]'"),
        (("onnxmltools", "lightgbm"), "them with: pip install 'onnx-ops[lightgbm]'"),
        (("onnxmltools",), "it with: pip install 'onnx-ops[lightgbm]'"),
        (
            ("sklearn", "uvloop", "mlflow", "acme"),
            "them with: pip install 'onnx-ops[mlflow,serve,sklearn]' acme",
        ),
    ],
)
def test_install_hint_of_packages_names_each_extra_once(
    packages: tuple[str, ...], words: str
) -> None:
    assert plugins.install_hint(*packages) == f"Install {words}"


def test_require_with_several_missing_packages_lists_all(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "mlflow", "boto3")
    with pytest.raises(MissingPackageError) as caught:
        plugins.require("numpy", "mlflow", "boto3", "mlflow", where="pipeline p")
    assert (caught.value.what, caught.value.where) == (
        "packages mlflow, boto3 are not installed",
        "pipeline p",
    )
    assert caught.value.remedy == "Install them with: pip install 'onnx-ops[aws,mlflow]'"


@pytest.mark.parametrize(
    ("error", "cause", "package"),
    [
        (ModuleNotFoundError(name="azure.ai.ml"), None, "azure"),
        (ImportError("Install s3fs"), None, ""),
        (ModuleNotFoundError(), None, ""),
        (ImportError("Install s3fs to access S3"), ModuleNotFoundError(name="s3fs"), "s3fs"),
    ],
)
def test_imported_of_import_error_returns_top_level_package_or_empty_text(
    error: ImportError, cause: Exception | None, package: str
) -> None:
    error.__cause__ = cause
    assert plugins.imported(error) == package


def test_plugin_modules_import_no_heavy_packages() -> None:
    """A run without changes asks plugins for the versions of their tools.

    It must not wait for the import of those tools.
    """
    program = (
        "import importlib, sys\n"
        "from importlib.metadata import entry_points\n"
        f"for kind in {plugins.KINDS!r}:\n"
        "    for point in entry_points(group=f'onnx_ops.{kind}'):\n"
        "        importlib.import_module(point.module)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_plugin_kind_has_plugins(kind: str) -> None:
    assert plugins.names(kind)


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [("exporters", "sklaern", "Did you mean 'sklearn'?"), ("endpoints", "qqqqq", "local")],
)
def test_load_plugin_of_unknown_name_raises_not_found_error_with_suggestion(
    kind: str, name: str, remedy: str
) -> None:
    with pytest.raises(NotFoundError, match=f"no {kind} plugin is called '{name}'") as caught:
        plugins.load(kind, name)
    assert remedy in caught.value.remedy


def test_load_cuda_preloads_libraries_silently_for_nvidia_providers_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str] = []

    def preload() -> None:
        calls.append("preload")
        sys.stdout.write("Failed to load libcudnn.so.9")

    def set_severity(level: int) -> None:
        calls.append(f"quiet {level}")

    ort = SimpleNamespace(preload_dlls=preload, set_default_logger_severity=set_severity)
    plugins.load_cuda(ort, ["CPUExecutionProvider"])
    assert calls == []
    plugins.load_cuda(
        ort, ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    assert calls == ["quiet 4", "preload"]
    assert capsys.readouterr().out == ""


class SilentPlugin(ports.Plugin):
    """A plug-in that overrides no attribute."""


def test_plugin_without_attributes_has_defaults() -> None:
    assert plugins.tools(SilentPlugin()) == ()
    assert plugins.select_environment(SilentPlugin(), None) is None


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_plugin_base_class_of_each_kind_derives_from_plugin(kind: str) -> None:
    assert issubclass(getattr(ports, plugins.KINDS[kind]), ports.Plugin)


def test_package_reads_no_plugin_attributes_by_getattr_or_hasattr() -> None:
    names = {
        name
        for base in (ports.Plugin, ports.Exporter, ports.Optimizer)
        for name in base.__annotations__
    }
    pattern = re.compile(rf"\b(?:getattr|hasattr)\([^()]*\"(?:{'|'.join(sorted(names))})\"")
    folder = Path(plugins.__file__).parent
    assert [
        str(path)
        for path in folder.rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    ] == []

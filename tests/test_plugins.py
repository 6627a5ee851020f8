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


HEAVY = ("numpy", "onnx", "onnxruntime", "sklearn", "torch", "boto3", "azure", "mlflow", "prefect", "httpx")


@pytest.fixture
def versions_unread() -> Iterator[None]:
    plugins.version.cache_clear()
    yield
    plugins.version.cache_clear()


@pytest.mark.usefixtures("versions_unread")
def test_version_is_that_of_the_distribution_that_brings_the_package_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_packages", lambda: {"acme_runtime": ["numpy"]})
    assert plugins.version("acme-runtime") == f"numpy {plugins.version('numpy')}"
    assert plugins.version("acme-runtime-of-nobody") == plugins.MISSING


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution `acme-plugins` with two exporters, as an installer would have left it."""
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
def test_a_plugin_of_another_distribution_is_found_and_made() -> None:
    names = plugins.names("exporters")
    assert {"good", "needy", "sklearn", "torch"} <= set(names)
    assert list(names) == sorted(names)
    assert plugins.load("exporters", "good", 1, "two").arguments == (1, "two")


@pytest.mark.usefixtures("installed")
def test_a_plugin_that_does_not_derive_from_its_base_class_is_refused() -> None:
    with pytest.raises(UserError, match="acme_underived:Plugin is not an instance of Exporter") as caught:
        plugins.load("exporters", "underived")
    assert caught.value.remedy == "Derive its class from onnx_ops.ports.Exporter."


@pytest.mark.usefixtures("installed")
def test_a_plugin_whose_package_is_missing_says_what_to_install() -> None:
    with pytest.raises(MissingPackageError, match="a_package_that_nobody_has is not installed") as caught:
        plugins.load("exporters", "needy")
    assert caught.value.where == "exporters plugin needy"
    assert caught.value.remedy == "Install it with: pip install a_package_that_nobody_has"


def test_a_missing_extra_of_our_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (("sklearn", "uvloop", "mlflow", "acme"), "them with: pip install 'onnx-ops[mlflow,serve,sklearn]' acme"),
    ],
)
def test_the_hint_names_each_extra_once_and_no_more_than_are_needed(packages: tuple[str, ...], words: str) -> None:
    assert plugins.install_hint(*packages) == f"Install {words}"


def test_all_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "mlflow", "boto3")
    with pytest.raises(MissingPackageError) as caught:
        plugins.require("numpy", "mlflow", "boto3", "mlflow", where="pipeline p")
    assert (caught.value.what, caught.value.where) == ("packages mlflow, boto3 are not installed", "pipeline p")
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
def test_the_package_of_a_failed_import_is_its_first_part_or_that_of_the_cause(
    error: ImportError, cause: Exception | None, package: str
) -> None:
    error.__cause__ = cause
    assert plugins.imported(error) == package


def test_plugins_are_made_without_what_they_do_their_work_with() -> None:
    """A run in which nothing changed asks plugins for the versions of their tools, and must not wait for those."""
    program = (
        "import importlib, sys\n"
        "from importlib.metadata import entry_points\n"
        f"for kind in {plugins.KINDS!r}:\n"
        "    for point in entry_points(group=f'onnx_ops.{kind}'):\n"
        "        importlib.import_module(point.module)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_every_kind_has_plugins(kind: str) -> None:
    assert plugins.names(kind)


@pytest.mark.parametrize(
    ("kind", "name", "remedy"), [("exporters", "sklaern", "Did you mean 'sklearn'?"), ("endpoints", "qqqqq", "local")]
)
def test_an_unknown_name_asks_what_was_meant_or_lists_what_is_there(kind: str, name: str, remedy: str) -> None:
    with pytest.raises(NotFoundError, match=f"no {kind} plugin is called '{name}'") as caught:
        plugins.load(kind, name)
    assert remedy in caught.value.remedy


def test_libraries_of_cuda_are_loaded_for_providers_of_nvidia_alone(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def preload() -> None:
        calls.append("preload")
        sys.stdout.write("Failed to load libcudnn.so.9")

    def set_severity(level: int) -> None:
        calls.append(f"quiet {level}")

    ort = SimpleNamespace(preload_dlls=preload, set_default_logger_severity=set_severity)
    plugins.load_cuda(ort, ["CPUExecutionProvider"])
    assert calls == []
    plugins.load_cuda(ort, ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"])
    assert calls == ["quiet 4", "preload"]
    assert capsys.readouterr().out == ""


class SilentPlugin(ports.Plugin):
    """A plug-in that overrides no attribute."""


def test_attributes_of_a_plugin_have_defaults() -> None:
    assert plugins.tools(SilentPlugin()) == ()
    assert plugins.select_environment(SilentPlugin(), None) is None


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_base_class_of_each_kind_has_the_attributes_of_plugins(kind: str) -> None:
    assert issubclass(getattr(ports, plugins.KINDS[kind]), ports.Plugin)


def test_no_module_asks_whether_a_plugin_has_an_attribute() -> None:
    names = {name for base in (ports.Plugin, ports.Exporter, ports.Optimizer) for name in base.__annotations__}
    pattern = re.compile(rf"\b(?:getattr|hasattr)\([^()]*\"(?:{'|'.join(sorted(names))})\"")
    folder = Path(plugins.__file__).parent
    assert [str(path) for path in folder.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))] == []

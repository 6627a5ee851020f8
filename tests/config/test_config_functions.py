from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onnx_ops.config.functions import (
    check_arguments,
    explain_missing_function,
    find_missing_imports,
    parse_python,
)

SOURCE = """\
import json
from os.path import join as glue
if True:
    def first(): ...
else:
    from x import second
try:
    import fast
except ImportError:
    slow = None
class Third: ...
async def fourth(): ...
fifth: int = 3
with open("x") as opened:
    sixth = lambda: None
try: ...
finally:
    def seventh(): ...
eighth, (*ninth, tenth) = make()
for looped in make():
    def eleventh(): ...
while (walrus := make()):
    def twelfth(): ...
match make():
    case 1:
        def thirteenth(): ...
try: ...
except* OSError:
    def fourteenth(): ...
listed = [inside for inside in make() if (lambda argument: argument)(inside)]
raise SystemExit
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "code"
    package.mkdir()
    (package / "many.py").write_text(SOURCE)
    (package / "__init__.py").write_text("from code.many import *\n")
    (package / "broken.py").write_text("def f(:\n")
    (package / "binary.py").write_bytes(b"\xff\x00")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("first", "second", "fast", "slow", "Third", "fourth", "fifth", "sixth", "glue", "json"),
        *("opened", "seventh", "eighth", "ninth", "tenth", "looped", "eleventh", "walrus"),
        *("twelfth", "thirteenth", "fourteenth", "listed"),
    ],
)
def test_explain_missing_function_of_existing_name_returns_none_without_running_module(
    root: Path, name: str
) -> None:
    assert explain_missing_function(f"code.many:{name}", root) is None
    assert "code.many" not in sys.modules


def test_explain_missing_function_with_star_import_accepts_any_name(root: Path) -> None:
    assert explain_missing_function("code:whatever", root) is None


def test_explain_missing_function_of_module_on_path_checks_its_names(root: Path) -> None:
    assert explain_missing_function("json:loads", root) is None
    assert explain_missing_function("json:laods", root) is not None


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("code.many:frist", "no function 'frist' in code/many.py; did you mean 'first'?"),
        ("code.many:nothing", "no function 'nothing' in code/many.py"),
        ("code.many:inside", "no function 'inside' in code/many.py"),
        (
            "code.mani:first",
            (
                "no source of module 'code.mani' in the project or on sys.path; "
                "did you mean 'code.many'?"
            ),
        ),
        ("nowhere.to.go:f", "no source of module 'nowhere.to.go' in the project or on sys.path"),
        ("code.broken:f", "code/broken.py, line 1, is not valid Python: invalid syntax"),
        ("code.many.first", "'code.many.first' is not of the form package.module:function"),
        ("../code/many:first", "'../code/many:first' is not of the form package.module:function"),
        ("code.many:first()", "'code.many:first()' is not of the form package.module:function"),
    ],
)
def test_explain_missing_function_of_wrong_reference_returns_problem(
    root: Path, reference: str, problem: str
) -> None:
    assert explain_missing_function(reference, root) == problem


def test_explain_missing_function_in_binary_file_names_file(root: Path) -> None:
    problem = explain_missing_function("code.binary:f", root)
    assert problem is not None
    assert problem.startswith("code/binary.py")


def test_parse_python_in_concurrent_threads_returns_whole_trees() -> None:
    """Python 3.11 mixes up the trees of concurrent threads.

    It happens when the garbage collector lets another thread run during the parsing.
    """

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0.0005)

    def parse(_: int) -> int:
        for _ in range(3):
            Garbage()
        return len(parse_python(b"[" + b"f(a, (b, [c, {d: e}])), " * 10 + b"]").body)

    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(parse, range(40))) == [1] * 40
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.parametrize(
    ("table", "message"), [("models.toy:tran", "no function 'tran'"), ("3", "is not of the form")]
)
def test_load_pipeline_with_wrong_translation_table_reports_problem(
    problems: Callable[..., list[str]], pipeline_text: str, table: str, message: str
) -> None:
    export = f"framework: torch\n  options: {{translations: {table}}}"
    (problem,) = problems(pipeline_text.replace("framework: sklearn", export))
    assert "export.options.translations" in problem
    assert message in problem


CALLS = """\
from code.calls import borrowed as lent
import functools
def train(data, epochs, rate=0.1, *, seed, name=None): ...
def loose(data, **others): ...
def nothing(): ...
def packed(*data): ...
@functools.cache
def wrapped(): ...
class Callable: ...
"""


@pytest.mark.parametrize(
    ("function", "given", "problems"),
    [
        ("train", {"epochs", "seed"}, []),
        ("train", {"epochs", "seed", "rate", "name"}, []),
        ("train", {"epoch", "seed"}, [("epoch", "did you mean 'epochs'?"), ("", "needs 'epochs'")]),
        ("train", {"epochs", "seed", "data"}, [("data", "takes no parameter 'data'")]),
        ("train", {"epochs"}, [("", "needs 'seed'")]),
        ("loose", {"anything"}, []),
        ("nothing", set(), []),
        ("nothing", {"a"}, [("a", "takes no parameter 'a'; it takes none")]),
        ("packed", {"a"}, [("a", "takes no parameter 'a'; it takes none")]),
        ("wrapped", {"a"}, []),
        ("Callable", {"a"}, []),
        ("lent", {"a"}, [("a", "takes no parameter 'a'; it takes 'b'")]),
        ("absent", {"a"}, []),
    ],
)
def test_check_arguments_compares_names_with_signature(
    root: Path, function: str, given: set[str], problems: list[tuple[str, str]]
) -> None:
    (root / "code/more.py").write_text(CALLS)
    (root / "code/calls.py").write_text("def borrowed(data, b=1): ...\n")
    found = check_arguments(f"code.more:{function}", sorted(given), root)
    assert [name for name, _ in found] == [name for name, _ in problems]
    assert all(part in text for (_, text), (_, part) in zip(found, problems, strict=True)), found


def test_find_missing_imports_follows_project_modules_and_skips_optional_imports(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "code/top.py").write_text(
        "import json, nowhere.at.all\nfrom code.below import x\nfrom . "
        "import many\nfrom .absent import y\n"
        "try:\n    import optional\nexcept ImportError:\n    optional = None\n"
    )
    (root / "code/below.py").write_text(
        "import numpy\nimport heavy\nimport elsewhere\nimport code.top\n"
    )
    site = root / "venv/lib/site-packages/heavy"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("import what_it_may_do_without\n")
    monkeypatch.syspath_prepend(str(site.parent))
    found = dict(find_missing_imports("code.top:f", root))
    assert found.keys() == {"nowhere.at.all", "code.absent", "elsewhere"}
    assert "code/top.py, line 1," in found["nowhere.at.all"]
    assert "code/below.py, line 3," in found["elsewhere"]


def test_find_missing_imports_of_package_in_src_folder_is_empty(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = root / "src/shop"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "net.py").touch()
    (package / "training.py").write_text(
        "from . import net\nfrom .net import Net\nfrom shop.net import Other\n"
    )
    monkeypatch.syspath_prepend(str(root / "src"))
    assert find_missing_imports("shop.training:train", root) == []

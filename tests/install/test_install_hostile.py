"""A pull request that attacks later jobs.

What its code leaves behind gets no token and no key, and decides nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.bare_environments import install_base
from tests.install.workflow_world import TOKEN, World, log, open_world
from tests.support.git import git

# The test installs a project into new environments, so it runs only nightly.
pytestmark = pytest.mark.nightly

SECRETS = {
    "ONNX_OPS_SIGNING_PEM": "PEM-of-the-release-key",
    "MLFLOW_TRACKING_TOKEN": "token-of-the-registry",
}
"""Secrets of the repository.

No job that runs code of a pull request gets any of them.
"""

CODE = Path(__file__).with_name("hostile_code.py")
MODULES = (
    "typing_extensions",
    "attrs",
    "sitecustomize",
    "usercustomize",
    "conftest",
    "rich/__init__",
    "cattrs/__init__",
)
"""Modules in the root that replace installed ones, or that an interpreter imports."""

STAND_IN = """
import importlib, sys
from pathlib import Path
top = Path(__file__).resolve().parents[{depth}]
sys.path.insert(0, str(top / "models"))
import attack
del sys.path[0]
attack.loot({trick!r})
path = list(sys.path)
sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != top]
own = sys.modules.pop(__name__, None)
try:
    importlib.import_module(__name__)
except ImportError:
    sys.modules[__name__] = own
sys.path[:] = path
"""


@pytest.fixture
def world(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    command = install_base(tmp_path_factory.mktemp("installed")).with_name("onnx-ops")
    with open_world(command, tmp_path, "sklearn") as made:
        yield made


def attack(root: Path, place: Path) -> list[str]:
    """Write the files of the pull request; return the names of the attacks in them."""
    models = root / "models"
    shutil.copy(CODE, models / "attack.py")
    (models / "attack.json").write_text(json.dumps({"place": str(place)}), encoding="utf-8")
    for module in MODULES:
        file = root / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = STAND_IN.format(depth=module.count("/"), trick=f"module {module}")
        file.write_text(text, encoding="utf-8")
    train = models / "train.py"
    code = train.read_text(encoding="utf-8").replace(
        "from __future__ import annotations\n",
        "from __future__ import annotations\nfrom models.attack import attack\n",
    )
    train.write_text(f"{code}\n\nattack()\n", encoding="utf-8")
    # The job that publishes would install this package if it took its requirements from the commit.
    evil = root / "vendor" / "evil"
    evil.mkdir()
    setup = (
        f"open({str(place / 'setup.1')!r}, 'w').close()\nfrom setuptools import "
        "setup\nsetup(name='evil')\n"
    )
    (evil / "setup.py").write_text(setup, encoding="utf-8")
    vendored = root / "vendor" / "onnx-ops.txt"
    vendored.write_text(f"./vendor/evil\n{vendored.read_text(encoding='utf-8')}", encoding="utf-8")
    (root / ".gitattributes").write_text("* filter=x diff=x merge=x\n", encoding="utf-8")
    (root / "configs" / "pipelines" / "link.yaml").symlink_to("/etc/passwd")
    return [
        *(f"module {module}" for module in MODULES),
        "setup",
        "vendored release",
        "attributes",
        "linked pipeline",
    ]


def test_hostile_pull_request_gets_no_token_key_or_verdict(world: World, tmp_path: Path) -> None:
    place = tmp_path / "loot"
    place.mkdir()
    base = git(world.origin, "rev-parse", "HEAD")
    names = attack(world.origin, place)
    head = world.commit(was="max: 2 MB", becomes="max: 3 MB")
    pull = {
        "pull_request": {
            "number": 7,
            "title": "$(id) `id` \u202e",
            "head": {"sha": head},
            "base": {"sha": base},
        }
    }
    judge = world.run("judge", "pull_request", pull, secrets=SECRETS)
    judged = {path.name: path.read_text(encoding="utf-8") for path in place.iterdir()}
    tried = [*names, *json.loads(judged["tried.json"])]
    assert len(set(tried)) >= 40, tried
    ran = {name.rpartition(".")[0] for name in judged}
    assert {"training code", "module typing_extensions", "setup"} <= ran, "nothing attacks"
    assert "results changed" in judged
    for path in place.iterdir():
        path.unlink()
    # The last commit is that of the base again. Hostile code that runs from here on was left by
    # the job `judge`.
    git(world.origin, "reset", "--quiet", "--hard", base)
    publish = world.run("publish", "pull_request", pull, secrets=SECRETS, code=1)
    assert list(place.iterdir()) == [], "code of the pull request ran in the job that publishes"
    for secret in (TOKEN, *SECRETS.values()):
        assert secret not in "".join(judged.values()) + log(judge)
    posts = [letter for letter in world.github.requests if letter.method != "GET"]
    checks = [letter.document for letter in posts if letter.path.endswith("/check-runs")]
    assert [(check["head_sha"], check["name"]) for check in checks] == [(head, "onnx-ops")]
    assert all(
        "/issues/7/" in letter.path for letter in posts if not letter.path.endswith("/check-runs")
    )
    assert checks[0]["conclusion"] == "action_required", "the forged pass was believed"
    shown = json.dumps([letter.document for letter in posts]) + publish.summary
    assert not re.search(r"<(?:script|img)|@everyone|root:x:0|(?<!\\)\]\(https://evil", shown)
    assert not any(
        line.lstrip().startswith(("::add", "::set", "##[add")) for line in log(publish).splitlines()
    )
    state = judge.checkout / ".onnx-ops"
    assert not [state / name for name in ("ledger", "keys") if (state / name).exists()]

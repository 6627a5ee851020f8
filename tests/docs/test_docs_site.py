"""The site of the documentation.

It builds strictly, contains every option, key and page, and loads nothing from other hosts.
"""

from __future__ import annotations

import ast
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_page import commands, flags
from keys import keys, sections

from onnx_ops.config.schema import pipeline_schema, target_schema
from onnx_ops.config.settings import load_settings, to_environ
from onnx_ops.config.yaml_reader import read_text
from tests.docs.docs_blocks import ROOT

BY_GENERATORS = {"reference/cli.md", "reference/pipeline-file.md", "reference/target-file.md"}
CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_decision_pages_have_status_and_date_and_are_listed() -> None:
    folder = ROOT / "docs" / "adr"
    listed = dict(
        re.findall(
            r"^- \[\d{4}\]\((\S+)\) .*: (.+)$",
            (folder / "README.md").read_text("utf-8"),
            re.MULTILINE,
        )
    )
    statuses = {}
    for page in folder.glob("[0-9]*.md"):
        head = re.match(
            r"# .+\n\n- Status: (.+)\n- Date: \d{4}-\d\d-\d\d\n\n", page.read_text("utf-8")
        )
        assert head, page.name
        statuses[page.name] = re.sub(r"\[(\d{4})\]\(\S+\)", r"\1", head[1])
    assert listed == statuses


def test_cli_reference_documents_each_option_of_each_command(site: Path) -> None:
    text = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    sections = dict(
        re.findall(r'<h2 id="onnx-ops-([a-z-]+)">(.*?)(?=<h2 |</article>)', text, re.DOTALL)
    )
    for name, command in commands():
        section = html.unescape(sections[name.replace(" ", "-")])
        assert all(f"<code>{flag}</code>" in section for flag in flags(command)), name
        assert f"onnx-ops {name}" in re.sub(
            r"<[^>]+>", "", section.partition('class="highlight"')[2]
        ), name
        assert "|" not in re.sub(r"<code>[^<]*</code>", "", section).replace("<td>|</td>", ""), name


@pytest.mark.parametrize("name", ["pipeline", "target"])
def test_file_reference_documents_each_key_with_meaning_and_example(name: str, site: Path) -> None:
    from jsonschema import Draft202012Validator

    schema = {"pipeline": pipeline_schema, "target": target_schema}[name]()
    text = (site / "reference" / f"{name}-file.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr>\s*<td><code>([^<]+)</code></td>(.*?)</tr>", text, re.DOTALL)
    assert [key for key, _ in rows] == [key for _, key in keys(schema)]
    described = dict(sections(schema))
    for (key, row), (section, _) in zip(rows, keys(schema), strict=True):
        cells = re.findall(r"<td>(.*?)</td>", row, re.DOTALL)
        takes, _, example, meaning = (html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in cells)
        assert takes, key
        assert meaning, key
        value = read_text(example, source=key).value[key]
        Draft202012Validator(
            {"$defs": schema["$defs"], **described[section]["properties"][key]}
        ).validate(value)


def test_site_navigation_includes_each_page() -> None:
    navigation = yaml.safe_load(CONFIGURATION)["nav"]
    placed = set(re.findall(r"'([^']+\.md)'", str(navigation)))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert placed == pages | BY_GENERATORS


def test_site_pages_and_styles_load_nothing_from_other_hosts(site: Path) -> None:
    sources, sheets = (
        r"<(?:script|img|iframe)[^>]+src",
        r'<link[^>]+rel="?(?:stylesheet|preconnect)"?[^>]+href',
    )
    loads = re.compile(rf'(?:{sources}|{sheets})="?(http[^" >]+)')
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8"), sheet


def test_settings_page_lists_each_environment_variable() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(ONNX_OPS_[A-Z_]+)`", page))
    read: set[str] = set()
    for path in (ROOT / "onnx_ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= set(re.findall(r"^ONNX_OPS_[A-Z_]*[A-Z]$", node.value))
    assert named >= read
    options = {"ONNX_OPS_SERVE_", "ONNX_OPS_SERVE_WORKERS"}
    assert named - read <= {*options, *to_environ(load_settings(ROOT, {}))}

"""MkDocs hook: generate reference pages from the code when the site is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cli_page import cli_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from yaml_pages import pipeline_page, target_page

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": cli_page,
    "reference/pipeline-file.md": pipeline_page,
    "reference/target-file.md": target_page,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    for uri, page in PAGES.items():
        files.append(File.generated(config, uri, content=page()))
    return files

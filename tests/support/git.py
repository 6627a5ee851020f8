"""Git repositories for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

_AUTHOR = (
    "-c",
    "user.name=Ada Example",
    "-c",
    "user.email=ada@example.org",
    "-c",
    "commit.gpgsign=false",
)


def git(root: Path, *arguments: str) -> str:
    """Run git as an author without configuration, and return its output."""
    command = ["git", *_AUTHOR, *arguments]
    return subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit_all(root: Path, message: str = "change") -> str:
    """Commit every file of a folder, and return the commit.

    The folder becomes a repository if it is not one.
    """
    if not (root / ".git").exists():
        git(root, "init", "--quiet", "-b", "main")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(root, "rev-parse", "HEAD")

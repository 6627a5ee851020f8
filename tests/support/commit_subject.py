"""Refuse a commit whose subject is too long.

git runs `python -m tests.support.commit_subject FILE` as hook commit-msg.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAX_CHARACTERS = 72
"""git and forges cut off longer subjects where they show one line for a commit."""
_AUTOSQUASH = ("amend! ", "fixup! ", "squash! ")
"""Prefixes of the subjects of commits that a rebase removes."""


def read_subject(message: str) -> str:
    """Return the subject of a message as git will store it.

    The subject is the first paragraph, in one line, without comments.
    """
    lines = [line.strip() for line in message.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).strip()
    return " ".join(text.partition("\n\n")[0].split("\n"))


def find_problem(message: str) -> str:
    """Return why a message is refused; empty if it is not."""
    subject = read_subject(message)
    if len(subject) <= MAX_CHARACTERS or subject.startswith(_AUTOSQUASH):
        return ""
    remedy = "Put the reason into the body, after an empty line."
    return (
        f"the subject has {len(subject)} characters, at most {MAX_CHARACTERS} are allowed: "
        f"{subject}\n{remedy}"
    )


def main(path: str) -> int:
    """Check the message in a file; return 1 if it is refused."""
    problem = find_problem(Path(path).read_text(encoding="utf-8", errors="replace"))
    if problem:
        sys.stderr.write(f"{problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

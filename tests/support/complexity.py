"""Limit the cyclomatic complexity of functions, as `radon cc` counts it.

Run `python -m tests.support.complexity`. Ruff's C901 counts statements only. radon also counts
`and`, `or`, ternaries and comprehensions, which make an expression as hard to read as nested
branches. `complexity.toml` lists the functions above the limit, and its values may only fall.
These are problems: a function that rises above its value, a new function above the limit, and a
value that is no longer reached. `--lower` writes lower values into the table; it never raises a
value.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from radon.visitors import Class, ComplexityVisitor, Function

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")
FOLDERS = ("onnx_ops", "benchmarks", "flows")
LIMIT = 15
MAX_EXEMPTIONS = 15
"""Most functions above the limit that stay unsplit, each with a reason."""


def measure_text(text: str) -> dict[str, int]:
    """Return the complexity of every function of a module by its dotted name."""
    visitor = ComplexityVisitor.from_code(text)
    measured: dict[str, int] = {}
    for name, complexity in _walk([*visitor.functions, *visitor.classes], ""):
        # Overloads and setters share a name; the worst one counts.
        measured[name] = max(complexity, measured.get(name, 0))
    return measured


def _walk(blocks: Iterable[Function | Class], prefix: str) -> Iterator[tuple[str, int]]:
    for block in blocks:
        name = prefix + block.name
        if isinstance(block, Class):
            yield from _walk([*block.methods, *block.inner_classes], f"{name}.")
        else:
            yield name, block.complexity
            # radon does not add a closure's complexity to the function around it.
            yield from _walk(block.closures, f"{name}.")


def measure_folders(root: Path = ROOT) -> dict[str, int]:
    """Return the complexity of every function of the project by `path: name`."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return {
        f"{path.relative_to(root)}: {name}": complexity
        for path in paths
        # Templates contain links to folders of the repository. Only `flows` is measured, at its
        # original path.
        if "templates" not in path.parts
        for name, complexity in measure_text(path.read_text(encoding="utf-8")).items()
    }


def find_problems(
    measured: Mapping[str, int], to_split: Mapping[str, int], exempt: Mapping[str, int]
) -> list[str]:
    """Compare the measured complexity of functions with the two parts of the table."""
    allowed = {**to_split, **exempt}
    problems = [
        f"{name}: is both in to_split and in exempt" for name in sorted(set(to_split) & set(exempt))
    ]
    if len(exempt) > MAX_EXEMPTIONS:
        problems.append(f"exempt: {len(exempt)} functions, at most {MAX_EXEMPTIONS} are allowed")
    for name in sorted(
        {*allowed, *(name for name, complexity in measured.items() if complexity > LIMIT)}
    ):
        complexity = measured.get(name, 0)
        if name not in allowed:
            problems.append(
                f"{name}: complexity {complexity} is above {LIMIT}; "
                "split the function into named steps"
            )
        elif complexity > allowed[name]:
            problems.append(
                f"{name}: complexity rose from {allowed[name]} to {complexity}; "
                "split it into named steps"
            )
        elif complexity <= LIMIT:
            problems.append(
                f"{name}: stale entry, the function is gone or at most {LIMIT}; run with --lower"
            )
        elif complexity < allowed[name]:
            problems.append(
                f"{name}: stale entry, complexity fell from {allowed[name]} to {complexity}; "
                "run with --lower"
            )
    return problems


def lower_entries(text: str, measured: Mapping[str, int]) -> str:
    """Return the table with the present complexity of its functions.

    Functions that are no longer above the limit are removed.
    """
    lines = []
    for line in text.splitlines(keepends=True):
        entry = re.match(
            r'"(?P<name>[^"]+)" = (?P<before>\D*)(?P<value>\d+)(?P<after>.*)', line, re.DOTALL
        )
        if entry is None:
            lines.append(line)
            continue
        complexity = measured.get(entry["name"], 0)
        if complexity > LIMIT:
            value = min(complexity, int(entry["value"]))
            lines.append(f'"{entry["name"]}" = {entry["before"]}{value}{entry["after"]}')
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lower", action="store_true", help="lower or remove the stale entries of complexity.toml"
    )
    arguments = parser.parse_args()
    measured = measure_folders()
    if arguments.lower:
        TABLE.write_text(
            lower_entries(TABLE.read_text(encoding="utf-8"), measured), encoding="utf-8"
        )
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    exempt = {name: entry["complexity"] for name, entry in table["exempt"].items()}
    problems = find_problems(measured, table["to_split"], exempt)
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    above_ten = sum(complexity > 10 for complexity in measured.values()) / len(measured)
    above_limit = sum(complexity > LIMIT for complexity in measured.values())
    sys.stdout.write(
        f"Complexity: {len(measured)} functions, {above_ten:.1%} above 10, "
        f"{above_limit} above {LIMIT},"
        f" {len(problems)} problems.\n"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

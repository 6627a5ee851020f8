"""Complete a bill of materials in CycloneDX's format.

Usage: bill.py BILL STATUS BASE REPORT... > COMPLETE

It adds the hashes of the Python packages, and the packages of the system.

- BILL: the output of `cyclonedx-py environment`.
- STATUS: Debian's list of installed packages (/var/lib/dpkg/status).
- BASE: the base image.
- REPORT: the output of `pip install --report`.

The script fails if the hash of a Python package is not known. Debian keeps no hash of an installed
package. Components of the system therefore have name, version and architecture only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import quote


def main(bill: str, status: str, base: str, *reports: str) -> None:
    """Print the bill of materials with hashes, system packages and base image."""
    document = json.loads(Path(bill).read_text(encoding="utf-8"))
    hashes = {name: digest for report in reports for name, digest in installed(Path(report))}
    for component in document["components"]:
        digest = hashes[normalized(component["name"])]
        component["hashes"] = [{"alg": "SHA-256", "content": digest}]
    document["components"] += packages(Path(status))
    document["metadata"].setdefault("properties", []).append(
        {"name": "onnx-ops:base-image", "value": base}
    )
    json.dump(document, sys.stdout, indent=2, sort_keys=True)


def installed(report: Path) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of every archive that pip installed."""
    for one in json.loads(report.read_text(encoding="utf-8"))["install"]:
        yield (
            normalized(one["metadata"]["name"]),
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )


def normalized(name: str) -> str:
    """Return the canonical form of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(status: Path) -> list[dict[str, Any]]:
    """Return the packages of the system as components."""
    found = []
    for text in status.read_text(encoding="utf-8").split("\n\n"):
        about = Parser().parsestr(text)
        if about.get("Status", "").split()[-1:] != ["installed"]:
            continue
        name, version, architecture = about["Package"], about["Version"], about["Architecture"]
        purl = f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={architecture}"
        found.append(
            {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
        )
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

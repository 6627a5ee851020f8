"""Collects the content store: what was put there and nobody needs any more.

Needed is what a recorded result names, what the ledger or a decision behind an alias names, and what any of these
documents names in turn. A result is recorded only after its files were put; so what is young stays, as a run may be
about to record it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Stored
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import CorruptStateError, NotFoundError
from onnx_ops.ports import Ports

YOUNGEST_S = DAY
"""Content younger than this stays whatever is asked for: no stage takes longer from its first file to its record."""
_LARGEST_DOCUMENT = 1 << 22
"""Bytes. Documents that name others are far smaller; weights and samples are not read for digests."""
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")


def unneeded(ports: Ports, *, older_than_s: float) -> tuple[Stored, ...]:
    """What is in the store, older than that (and than a day), and needed by nothing. Nothing is changed.

    Raises:
        ServiceUnavailableError: store, ledger or registry do not answer.
        CorruptStateError: a ledger is damaged: what it needs is not known.
    """
    before = ports.clock.now() - max(older_than_s, YOUNGEST_S)
    # Before the results are read: what is recorded meanwhile cannot rest on old content that nobody has put again.
    held = ports.store.contents()
    sizes = {one.digest: one.size_bytes for one in held if one.digest is not None}

    def names(digest: Digest) -> Iterable[Digest]:
        if sizes.get(digest, _LARGEST_DOCUMENT) >= _LARGEST_DOCUMENT:
            return ()
        try:
            return digests_in(ports.store.read(digest))
        except CorruptStateError:
            return ()

    needed = reachable(_roots(ports), names)
    return tuple(one for one in held if one.at < before and (one.digest is None or one.digest not in needed))


def collect(ports: Ports, contents: Sequence[Stored]) -> tuple[Stored, ...]:
    """Remove what `unneeded` found; returns what went. What somebody put again meanwhile stays.

    Each removal stands for itself: killed in between, the next one goes on.
    """
    return tuple(one for one in contents if ports.store.forget(one))


def reachable(roots: Iterable[Digest], names: Callable[[Digest], Iterable[Digest]]) -> frozenset[Digest]:
    """The roots, what they name, and so on."""
    found: set[Digest] = set()
    left = list(roots)
    while left:
        digest = left.pop()
        if digest not in found:
            found.add(digest)
            left += names(digest)
    return frozenset(found)


def digests_in(data: bytes) -> frozenset[Digest]:
    """Every digest that stands anywhere in the bytes: rather one too many than one too few."""
    return frozenset(Digest(text.decode("ascii")) for text in _DIGEST.findall(data))


def _roots(ports: Ports) -> set[Digest]:
    roots = {digest for manifest in ports.store.results() for digest in manifest.files.values()}
    for endpoint in ports.ledger.endpoints():
        for entry in ports.ledger.read(endpoint):
            roots |= digests_in(codec.dumps(entry))
    registry = ports.registry()
    for model, aliases in registry.all_aliases().items():
        for version in set(aliases.values()):
            try:
                decisions = registry.version(model, version).decisions
            except NotFoundError:  # something else than onnx-ops registered it
                continue
            for signed in decisions.values():
                roots |= digests_in(codec.dumps(signed))
    return roots

"""What every exporter checks of its section."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Tensors


def check_section(section: Export, samples: Tensors, options: Collection[str] = ()) -> None:
    """Check that free axes are those of inputs that exist, and that the exporter has the options.

    Raises:
        UserError: an entry would take no effect.
    """
    for _, problem in section_problems(section, samples, options):
        raise problem


def section_problems(
    section: Export, samples: Tensors, options: Collection[str]
) -> Iterator[tuple[tuple[str | int, ...], UserError]]:
    """Yield entries that would take no effect, each with its location in the section."""
    for name, axes in section.dynamic.items():
        if name not in samples:
            close = difflib.get_close_matches(name, list(samples), n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(samples)}."
            yield ("dynamic", name), UserError(f"no input is called {name!r}", where="export.dynamic", remedy=hint)
            continue
        rank = samples[name].ndim
        for axis, symbol in axes.items():
            if not 0 <= axis < rank:
                text = f"input {name} has axes 0 to {rank - 1}, not {axis}"
                yield ("dynamic", name, axis), UserError(text, where="export.dynamic")
            if not symbol.isidentifier():
                yield (
                    ("dynamic", name, axis),
                    UserError(
                        f"{symbol!r} is no name of a dimension", where="export.dynamic", remedy="Write it like `batch`."
                    ),
                )
    for name in section.options:
        if name not in options:
            close = difflib.get_close_matches(name, options, n=1)
            yield (
                ("options", name),
                UserError(
                    f"exporter {section.framework} has no option {name!r}",
                    where="export.options",
                    remedy=f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(options) or 'none'}.",
                ),
            )

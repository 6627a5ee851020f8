"""The report of a release: one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, digest_bytes, short_digest
from onnx_ops.domain.decision import Decision, Verdict, combine_verdicts
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.quantization import SearchRecord
from onnx_ops.domain.release import BaseRelease, Choice, Lineage, Provenance, flatten_origins
from onnx_ops.reporting.comparison import CHAMPION, ModelComparison, Pairs, base_comparisons, champion_comparisons
from onnx_ops.reporting.description import made_by
from onnx_ops.reporting.formatting import format_figure
from onnx_ops.reporting.gate_table import chip, gate_table, table
from onnx_ops.reporting.metrics import Measured, champion_values, headline, median_latency, sampled_rows, task_values
from onnx_ops.reporting.plots import (
    SERIES,
    Figure,
    latency_figure,
    measured_ratio,
    pareto_figure,
    parity_figure,
    ratio_figure,
    weights_figure,
)
from onnx_ops.reporting.searches import search_section
from onnx_ops.reporting.structure import structure_entries
from onnx_ops.reporting.style import STYLE
from onnx_ops.statistics.choice import estimate_prospects

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MEANING = {
    Verdict.PASS: "surely within the limit",
    Verdict.INCONCLUSIVE: "the measurements do not decide it; nothing is promoted on it",
    Verdict.ERROR: "it could not be measured; that is not the model's fault",
    Verdict.FAIL: "surely beyond the limit",
}


def release_report(
    decisions: Sequence[Decision],
    evidence: Sequence[Evidence],
    choices: Sequence[Choice],
    lineage: Lineage | None,
    versions: Mapping[str, str],
    *,
    digests: Mapping[tuple[str, str], Digest] | None = None,
    searches: Sequence[SearchRecord] = (),
    provenance: Provenance | None = None,
    base: BaseRelease | None = None,
    pairs: Pairs = lambda *_: (),
) -> str:
    """Return the report: choices, comparisons, gate results, plots and measurement conditions.

    The same arguments always give the same text. Nothing in it refers to a network.

    Args:
        decisions: of every variant on every target, in the order of the pipeline file.
        evidence: what they rest on; decisions without evidence are shown without plots.
        choices: one for each target.
        lineage: where the release comes from, if known.
        versions: registered version by variant; empty before registration.
        digests: of the stored evidence by variant and target; by default of its canonical text.
        searches: those that found some of the variants.
        provenance: who made the report, when, from which commit.
        base: what is recorded of the branch that the release is compared with; None where there is no such branch.
        pairs: what the answers of two runs to the same rows say of each other.
    """
    known = {(e.variant, e.target): e for e in evidence}
    stored = dict(digests or {})
    stored |= {place: digest_bytes(codec.dumps(e)) for place, e in known.items() if place not in stored}
    name = lineage.pipeline if lineage is not None else next((e.pipeline for e in evidence), "release")
    release = lineage.release if lineage is not None else next((e.release for e in evidence), None)
    title = f"{name}, release {short_digest(release)}" if release is not None else name
    body = [
        f"<header><h1>{escape(title)}</h1>{_made(provenance)}{_summary(choices)}</header>",
        "<main>",
        *(_card(choice, decisions, versions) for choice in choices),
        "<h2>Variants</h2>",
        _overview(decisions, known, choices, versions),
        *([f"<p>{escape(rows[0].upper() + rows[1:])}.</p>"] if (rows := sampled_rows(evidence)) else []),
        *_comparisons(champion_comparisons(choices, evidence)),
        *_comparisons(() if base is None else base_comparisons(choices, evidence, base, pairs)),
        "<h2>Gates</h2>",
        gate_table(decisions, known, stored),
        _meaning(),
        *_prospects(decisions),
        *_plots(decisions, evidence, choices),
        *(part for record in searches for part in search_section(record, figure_markup)),
        "<h2>How it was measured</h2>",
        *(_conditions(e, stored[e.variant, e.target]) for e in evidence),
        *_origin(lineage),
        "</main>",
    ]
    return page(title, body)


def page(title: str, body: Sequence[str]) -> str:
    """Return a document without external references; `body` is markup."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
    )
    return head + "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"


def _prospects(decisions: Sequence[Decision]) -> Iterator[str]:
    """Describe the power of a gate: verdicts of a variant without loss and of one with twice the limit.

    The spread of their figures is taken to be that of the variant that was measured.
    """
    rows = []
    for decision in decisions:
        tried = sum(d.target == decision.target and d.variant != EXPORT for d in decisions)
        for result in decision.results:
            found = estimate_prospects(result, tried if decision.variant != EXPORT else 1)
            if found is not None:
                names = (decision.variant, decision.target, result.metric, result.limit)
                counted = f"{result.n} in {result.groups} groups" if result.groups else str(result.n)
                figures = (counted, *map(_about, found))
                cells = "".join(f'<td class="words">{escape(name)}</td>' for name in names)
                rows.append(f"<tr>{cells}{''.join(f'<td>{escape(figure)}</td>' for figure in figures)}</tr>")
    if rows:
        heads = (
            "variant",
            "target",
            "metric",
            "limit",
            "rows",
            "loses nothing: passes",
            "loses 2 × limit: passes",
            "fails",
        )
        yield "<h3>What these rows can tell</h3>"
        yield (
            '<p class="soft">How often a variant that loses nothing, or twice what the limit allows, would have met '
            "these verdicts on so many rows, as one of those that were tried here.</p>"
        )
        yield table(heads, "".join(rows))


def _about(share: float) -> str:
    return "< 1%" if share < 0.01 else "> 99%" if share > 0.99 else f"{share:.0%}"


def _made(provenance: Provenance | None) -> str:
    """Date, author and commit; each is said to be unknown where it is."""
    return "" if provenance is None else f'<p class="soft">{escape(made_by(provenance))}</p>'


def _summary(choices: Sequence[Choice]) -> str:
    served = [c.target for c in choices if c.variant is not None]
    missing = [c.target for c in choices if c.variant is None]
    told = [f"a variant to serve for {', '.join(served)}"] if served else []
    told += [f"none for {', '.join(missing)}"] if missing else []
    sentence = ", ".join(told) or "no target was judged"
    verdict = chip(combine_verdicts(c.verdict for c in choices))
    return f'<p class="soft">{verdict} {escape(sentence[0].upper() + sentence[1:])}.</p>'


def _comparisons(comparisons: Sequence[ModelComparison]) -> Iterator[str]:
    """Return a table of comparisons by target, or a sentence without any."""
    if not comparisons:
        return
    yield f"<h2>Against {escape(comparisons[0].against)}</h2>"
    if rows := "".join(_compared(one) for one in comparisons if one.rows):
        yield table(("metric", "this release", "compared with", "change"), rows)
    for note in dict.fromkeys(one.note for one in comparisons if one.note):
        yield f'<p class="soft"><small>{escape(note)}</small></p>'


def _compared(one: ModelComparison) -> str:
    heading = f"<span>{escape(one.target)}: {escape(one.ours)} <small>against {escape(one.theirs)}</small></span>"
    rows = [f'<tr class="group"><th scope="rowgroup" colspan="4">{heading}</th></tr>']
    for row in one.rows:
        texts = (_breakable(text) for text in (row.ours, row.theirs, row.change))
        cells = "".join(f'<td class="figure fold">{escape(text)}</td>' for text in texts)
        rows.append(f'<tr><td class="words">{escape(row.metric)}</td>{cells}</tr>')
    return "".join(rows)


def _breakable(text: str) -> str:
    """Return a figure that only breaks before its interval."""
    return text.replace(" ", "\u00a0").replace("\u00a0[", " [")


def _card(choice: Choice, decisions: Sequence[Decision], versions: Mapping[str, str]) -> str:
    """Which variant a target gets and why; below it why the others are not chosen."""
    if choice.variant is None:
        said = f"no variant is chosen, because {choice.reason}."
    else:
        version = f" (version {versions[choice.variant]})" if choice.variant in versions else ""
        said = f"{choice.variant}{version} is chosen, because {choice.reason}."
    lines = [
        f"<li>{chip(d.verdict)} {escape(d.variant)}: {escape(_not_chosen(d))}</li>"
        for d in decisions
        if d.target == choice.target and d.variant != choice.variant
    ]
    others = f"<ul>{''.join(lines)}</ul>" if lines else ""
    first = f"<p>{chip(choice.verdict)} <strong>{escape(choice.target)}</strong>: {escape(said)}</p>"
    return f'<section class="card {choice.verdict.value}">{first}{others}</section>'


def _not_chosen(decision: Decision) -> str:
    """Why a variant is not the choice: its worst result, or that another one is faster."""
    if decision.verdict is not Verdict.PASS or decision.latency_ratio is None:
        return decision.reason
    slower = f", not faster than {EXPORT} with confidence" if decision.faster_than_export is False else ""
    return f"{decision.reason}; {decision.latency_ratio:.3g}x the latency of {EXPORT}{slower}"


def _overview(
    decisions: Sequence[Decision],
    known: Mapping[tuple[str, str], Evidence],
    choices: Sequence[Choice],
    versions: Mapping[str, str],
) -> str:
    chosen = {(c.variant, c.target) for c in choices}
    rows = []
    for d in decisions:
        e = known.get((d.variant, d.target))
        mark = " · chosen" if (d.variant, d.target) in chosen else ""
        version = f"<br><small>version {escape(versions[d.variant])}</small>" if d.variant in versions else ""
        cells = _plain_figures(e) if e is not None else ["–"] * 4
        rows.append(
            f'<tr><th scope="row">{escape(d.variant)}{version}</th><td>{escape(d.target)}</td>'
            f'<td class="figure {d.verdict.value}">{chip(d.verdict)}{mark}</td>'
            + "".join(f'<td class="figure">{cell}</td>' for cell in cells)
            + "</tr>"
        )
    rows += _champion_lines(known.values())
    heads = ("variant", "target", "verdict", "task metrics", "size", "median latency", "latency ratio")
    return table(heads, "".join(rows))


def _champion_lines(evidence: Iterable[Evidence]) -> Iterator[str]:
    """Return the metrics of each target's champion on the same rows."""
    told = {e.target: e for e in reversed(list(evidence)) if e.baseline == CHAMPION}
    for target, e in sorted(told.items()):
        version = f"<br><small>version {escape(e.champion.version)}</small>" if e.champion is not None else ""
        size = format_figure(float(e.champion.size_bytes), "B") if e.champion is not None else "–"
        cells = (escape(target), "serves now", _metrics(champion_values(e)), escape(size), "–", "–")
        figures = "".join(f'<td class="figure">{cell}</td>' for cell in cells[1:])
        yield f'<tr><th scope="row">champion{version}</th><td>{cells[0]}</td>{figures}</tr>'


def _metrics(values: Mapping[str, Measured]) -> str:
    """Every task metric with its interval and n."""
    return "<br>".join(f"{escape(name)} {_cell(value.text())}" for name, value in values.items()) or "not measured"


def _plain_figures(e: Evidence) -> list[str]:
    """Task metrics, size, latency and ratio, each with its interval and n."""
    ratios = [(c.against, measured_ratio(c)) for c in e.comparisons]
    told = [f"{_cell(r.text())}<br><small>against {escape(against)}</small>" for against, r in ratios if r]
    middle = median_latency(e.latency)
    return [
        _metrics(task_values(e)),
        escape(format_figure(float(e.size_bytes), "B") if e.size_bytes > 0 else "not measured"),
        _cell(middle.text()) if middle else "not measured",
        "<br>".join(told) or "–",
    ]


def _cell(text: str) -> str:
    """Put the count on its own line."""
    figure, _, n = text.partition(" (")
    return escape(figure) + (f"<br><small>{escape(n.removesuffix(')'))}</small>" if n else "")


def _meaning() -> str:
    told = "; ".join(f"{chip(verdict)} {escape(text)}" for verdict, text in _MEANING.items())
    return (
        f"<p><small>{told}. Advisory results are shown and enter no verdict. Intervals: each bound errs in at most "
        "one case of twenty.</small></p>"
    )


def _plots(decisions: Sequence[Decision], evidence: Sequence[Evidence], choices: Sequence[Choice]) -> Iterator[str]:
    judged = {(d.variant, d.target): d for d in decisions}
    chosen = {c.target: c.variant for c in choices}
    for target in dict.fromkeys(e.target for e in evidence):
        here = [e for e in evidence if e.target == target]
        verdicts = {d.variant: d.verdict for d in decisions if d.target == target}
        figures = [
            pareto_figure(target, here, verdicts, chosen.get(target), headline(decisions, here)),
            latency_figure(target, here),
            *(ratio_figure(e, c, judged.get((e.variant, target))) for e in here for c in e.comparisons),
            *(ratio_figure(e, r, judged.get((e.variant, target))) for e in here for r in e.ratios),
            *_parity(here, judged),
            *_weights(here, judged),
        ]
        shown = [figure_markup(f) for f in figures if f is not None]
        if shown:
            yield f'<h2>Plots of {escape(target)}</h2><div class="figures">{"".join(shown)}</div>'


def _parity(here: Sequence[Evidence], judged: Mapping[tuple[str, str], Decision]) -> Iterator[Figure | None]:
    """Each float variant by itself; the export behind all quantized ones once, since it is the same."""
    for e in here:
        if e.parity:
            what = f"{e.variant} on {e.target}"
            yield parity_figure(what, e.parity, judged.get((e.variant, e.target)), "outputs")
    seen = [e.parity for e in here]
    for e in here:
        if e.quantized and e.export_parity and e.export_parity not in seen:
            seen.append(e.export_parity)
            yield parity_figure(
                "the export behind the quantized variants",
                e.export_parity,
                judged.get((e.variant, e.target)),
                "export",
            )


def _weights(here: Sequence[Evidence], judged: Mapping[tuple[str, str], Decision]) -> Iterator[Figure | None]:
    for e in here:
        yield weights_figure(e.variant, e, judged.get((e.variant, e.target)))


def variants_picture(
    target: str, evidence: Sequence[Evidence], decisions: Sequence[Decision], chosen: str | None
) -> Figure | None:
    """Size and latency of a target's variants, as an SVG file of its own; None if nothing was measured there."""
    here = [e for e in evidence if e.target == target]
    verdicts = {d.variant: d.verdict for d in decisions if d.target == target}
    figure = pareto_figure(target, here, verdicts, chosen, headline(decisions, here))
    if figure is None:
        return None
    svg = figure.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return replace(figure, svg=svg.replace(">", f"><style>{STYLE}</style>", 1))


def figure_markup(figure: Figure) -> str:
    """Return markup of a plot with its title, legend and caption."""
    keys = "".join(f'<li class="s{key.series % SERIES}">{escape(key.text)}</li>' for key in figure.keys)
    legend = f'<ul class="keys">{keys}</ul>' if keys else ""
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    return f"<figure><h3>{escape(figure.title)}</h3>{figure.svg}{legend}{caption}</figure>"


def _conditions(e: Evidence, digest: Digest) -> str:
    hardware, facts = e.hardware, e.runtime
    cpu = f"{hardware.cpu_model}, {hardware.machine}, {hardware.cores} cores"
    entries = {
        "machine": f"{cpu}, {format_figure(float(hardware.memory_bytes), 'B')} memory"
        + (", dedicated" if e.dedicated else ", shared: absolute latency limits are advisory"),
        "CPU features": ", ".join(hardware.cpu_flags) or "none recorded",
        "runtime": f"{hardware.runtime} {hardware.runtime_version}" + (f"; {facts.build}" if facts else ""),
        "providers asked for": ", ".join(facts.asked) if facts else "not recorded",
        "providers used": ", ".join(f"{name} ({n} nodes)" for name, n in sorted(facts.nodes.items()))
        or ", ".join(facts.used)
        if facts
        else "not recorded",
        "conditions": ", ".join(f"{name} {value}" for name, value in sorted(e.conditions.items())) or "not recorded",
        **structure_entries(e),
        "compared with": e.baseline or "nothing: the first export is its own baseline",
        "model manifest": e.manifest,
        "evidence": f"{digest} (schema {e.schema})",
        "raw samples": e.raw or "none",
    } | ({"failure": e.failure} if e.failure else {})
    return f"<details><summary>{escape(e.variant)} on {escape(e.target)}</summary>{_list(entries)}</details>"


def _origin(lineage: Lineage | None) -> Iterator[str]:
    if lineage is None:
        return
    entries = {"pipeline": lineage.pipeline, "release": lineage.release, "commit": lineage.git_sha or "not recorded"}
    entries |= {f"{name} data": digest for name, digest in sorted(lineage.data.items())}
    entries |= flatten_origins(lineage)
    entries |= dict(sorted(lineage.parameters.items()))
    yield f"<h2>Where it comes from</h2>{_list(entries)}"


def _list(entries: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in entries.items())}</dl>"

"""What a run of a pipeline would meet, looked at beforehand: its data, its model, its code, and this machine.

Nothing is trained, no code of the project is run, nothing is unpickled, and no network is used. Each rule is that of
the stage which would meet the problem.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops import plugins
from onnx_ops.config.document import Issue, Loc
from onnx_ops.config.functions import find_missing_imports, list_siblings
from onnx_ops.config.messages import did_you_mean
from onnx_ops.config.project_rules import check_plugin_settings
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.pipeline import FileData, PluginData
from onnx_ops.domain.quantization import find_type_conflict
from onnx_ops.errors import MissingPackageError, OnnxOpsError
from onnx_ops.pipeline.stages.data import build_dataset, find_data_problems, get_source_name
from onnx_ops.ports import Dataset, Ports, Sample

if TYPE_CHECKING:
    from onnx_ops.config.rules import Draft
    from onnx_ops.domain.artifact import ModelInfo
    from onnx_ops.domain.pipeline import DataSection
    from onnx_ops.domain.target import Target


@dataclass(frozen=True, slots=True)
class _Set:
    """The first rows of one data set, under the names that the model uses."""

    section: DataSection
    dataset: Dataset
    whole: bool


@dataclass(slots=True)
class Preflight:
    """The look at one pipeline.

    `notes` hold what may be meant, and is worth knowing; `absent` the distributions of extras that training imports.
    """

    ports: Ports
    draft: Draft
    targets: Mapping[str, Target]
    notes: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    _told: set[str] = field(default_factory=set)

    def findings(self) -> list[Issue]:
        """Everything that is wrong with what the sections name."""
        sets: dict[str, _Set] = {}
        findings = [finding for name in self.draft.data for finding in self._open(name, sets)]
        findings += [*self._trained_files(), *self._imports()]
        place = ready_file(self.ports.root, self.draft)
        model = None
        if place is not None:
            problems, model = self._model(place)
            findings += [Issue(("model",), message) for message in problems]
        if model is not None:
            findings += self._inputs(sets, model)
        findings += [*self._labels(sets, model), *self._export_options(sets), *self._quantize_options()]
        self._note_labels(sets)
        return findings

    def _open(self, name: str, sets: dict[str, _Set]) -> Iterator[Issue]:
        section = self.draft.data[name]
        loc: Loc = ("data", name)
        if get_source_name(section) not in plugins.names("data"):
            return  # a finding about the plugin
        try:
            sample = self.ports.source(get_source_name(section)).sample(section, self.ports.root)
        except MissingPackageError:
            return  # a finding about the machine
        except OnnxOpsError as error:
            yield Issue(_source_loc(loc, section), _source_message(error, section, self.ports.root))
            return
        if sample is None:
            return
        problems = list(find_data_problems(sample.arrays, section, ""))
        for below, problem in problems:
            yield Issue(loc + below, str(problem))
        if not problems:
            dataset = build_dataset(sample.arrays, section, "")
            sets[name] = _Set(section, dataset, sample.whole)
            self._note_gaps(name, sample, dataset)

    def _note_gaps(self, name: str, sample: Sample, dataset: Dataset) -> None:
        import numpy as np

        for key, array in dataset.inputs.items():
            if array.dtype.kind == "f" and (rows := int((~np.isfinite(array)).reshape(len(array), -1).any(1).sum())):
                among = "" if sample.whole else "the first "
                self.notes.append(
                    f"data.{name}: input {key} is NaN or infinite in {rows} of {among}{len(array)} rows; "
                    "the model must take that"
                )

    def _trained_files(self) -> Iterator[Issue]:
        root, draft = self.ports.root, self.draft
        for index, name in enumerate(draft.train.depends if draft.train else ()):
            if not (root / name).is_file():
                yield Issue(("train", "depends", index), f"no file {name!r} below the project's root")
        if draft.model and is_path(draft.model) and not (root / draft.model).exists():
            folder = (root / draft.model).parent
            beside = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            hint = did_you_mean(Path(draft.model).name, beside) or "; the path is relative to the project's root"
            yield Issue(("model",), f"no such model: '{draft.model}'{hint}")

    def _imports(self) -> Iterator[Issue]:
        for loc, reference in self._functions():
            yield from self._imports_of(loc, reference)

    def _functions(self) -> Iterator[tuple[Loc, str]]:
        """Functions of the project that are called in this installation."""
        train, export = self.draft.train, self.draft.export
        if train and export and not self._isolated(export.framework, train.env or export.env):
            yield ("train", "run"), train.run
        for loc, gate in self.draft.gates:
            if isinstance(gate, MetricGate) and gate.use:
                yield (*loc, "use"), gate.use

    def _imports_of(self, loc: Loc, reference: str) -> Iterator[Issue]:
        for module, text in find_missing_imports(reference, self.ports.root):
            if module in self._told:
                continue
            self._told.add(module)
            first = module.partition(".")[0]
            if plugins.has_extra(first):
                self.absent.append(plugins.distribution_of(first))
                message = f"{text}, which is not installed. {plugins.install_hint(first)}"
                yield Issue(loc, message, environment=True)
            else:
                own = (self.ports.root / first).is_dir()
                hint = did_you_mean(module, list_siblings(module, self.ports.root))
                hint = hint if own else hint or did_you_mean(first, plugins.packages())
                message = f"{text}, which is neither in the project nor installed{hint}"
                yield Issue(loc, message)

    def _isolated(self, framework: str, env: Any) -> bool:
        from onnx_ops.app.context import select_environment

        try:
            return select_environment(plugins.load("exporters", framework), env) is not None
        except OnnxOpsError:  # a problem of its own
            return True

    def _model(self, place: Path) -> tuple[list[str], ModelInfo | None]:
        """Return why the ready ONNX file is refused, and its own description."""
        from onnx_ops.onnx_graph.compatibility import list_user_model_notes, list_user_model_problems
        from onnx_ops.onnx_graph.files import find_model_file
        from onnx_ops.onnx_graph.model_info import read_model_info

        if self.draft.export is None:
            return [], None
        try:
            problems = list_user_model_problems(place, self.draft.export, self.targets.values())
            self.notes += [f"{self.draft.model}: {note}" for note in list_user_model_notes(place)]
            return problems, read_model_info(find_model_file(place))
        except OnnxOpsError as error:
            return [error.without_place()], None

    def _inputs(self, sets: Mapping[str, _Set], model: ModelInfo) -> Iterator[Issue]:
        """Yield problems of rows that the model does not accept."""
        from onnx_ops.measure.files import convert_inputs
        from onnx_ops.tools.probing import find_input_problems

        for name in self._run_on():
            if name not in sets:
                continue
            loc, found = ("data", name), sets[name]
            try:
                inputs = convert_inputs(found.dataset.inputs, model)
            except OnnxOpsError as error:
                yield Issue(loc, error.without_place())
                continue
            for key, message in find_input_problems(model.inputs, inputs):
                below = ("inputs", key) if key in found.section.inputs else ("inputs",) if found.section.inputs else ()
                yield Issue((*loc, *below), message)

    def _run_on(self) -> list[str]:
        """Names of the sets that are scored, calibrated or tuned with."""
        draft = self.draft
        names = [draft.validate.samples.data] if draft.validate else []
        names += [entry.calibrate.data for _, entry in draft.quantize if entry.calibrate]
        names += [entry.tune.data for _, entry in draft.quantize if entry.tune]
        return list(dict.fromkeys(names))

    def _export_options(self, sets: Mapping[str, _Set]) -> Iterator[Issue]:
        """Free axes of inputs that do not exist, and options that the exporter does not have."""
        from onnx_ops.adapters.exporters.signature import find_section_problems

        export = self.draft.export
        plugin = self._plugin("exporters", export.framework) if export else None
        scored = sets.get(self.draft.validate.samples.data) if self.draft.validate else None
        if export is None or plugin is None or not hasattr(plugin, "options"):
            return
        if scored is None:
            export = replace(export, dynamic={})
        for loc, problem in find_section_problems(export, scored.dataset.inputs if scored else {}, plugin.options):
            yield Issue(("export", *loc), problem.without_place(), on_key=True)

    def _quantize_options(self) -> Iterator[Issue]:
        """Options that an optimizer does not take."""
        from onnx_ops.adapters.optimizers.library import read_options

        for loc, entry in self.draft.quantize:
            plugin = self._plugin("optimizers", entry.method)
            if hasattr(plugin, "options") and not find_type_conflict(entry.options):
                yield from check_plugin_settings(
                    (*loc, "options"), functools.partial(read_options, entry, plugin.options)
                )

    def _plugin(self, kind: str, name: str) -> Any:
        """Return a plugin; None if it is not installed, which is an issue of its own."""
        try:
            return plugins.load(kind, name)
        except OnnxOpsError:
            return None

    def _labels(self, sets: Mapping[str, _Set], model: ModelInfo | None) -> Iterator[Issue]:
        """Gates whose metric cannot be computed with the labels, or with a ready model's outputs."""
        from onnx_ops.measure.scoring import find_label_problem

        scored = sets.get(self.draft.validate.samples.data) if self.draft.validate else None
        if scored is None or scored.section.label is None:
            return
        label = scored.dataset.label
        outputs = _outputs(model, len(scored.dataset)) if model is not None and scored.whole else None
        messages: set[str] = set()
        for _, gate in self.draft.gates:
            if not isinstance(gate, MetricGate):
                continue
            message = find_label_problem(gate.definition(), label, outputs)
            if message and message not in messages:
                messages.add(message)
                name = self.draft.validate.samples.data if self.draft.validate else ""
                yield Issue(("data", name, "label"), message)

    def _note_labels(self, sets: Mapping[str, _Set]) -> None:
        """Classes that are scored and were never trained."""
        import numpy as np

        name = self.draft.validate.samples.data if self.draft.validate else ""
        label = sets[name].dataset.label if name in sets and self.draft.train else None
        others = [one for other, one in sets.items() if other != name]
        trained = [one.dataset.label for one in others if one.dataset.label is not None]
        if not all(one.whole for one in others):
            return
        if (
            label is None
            or not trained
            or any(one.dtype.kind not in "iubUS" or one.ndim != 1 for one in [label, *trained])
        ):
            return
        if new := sorted(set(np.unique(label).tolist()).difference(*(np.unique(one).tolist() for one in trained))):
            shown = ", ".join(map(str, new[:5])) + (", …" if len(new) > 5 else "")
            self.notes.append(f"data.{name}: label {shown} occurs in no set that the model is trained on")


def is_path(model: str) -> bool:
    """Whether `model:` is a path of the project."""
    return "://" not in model and not model.startswith("models:/")


def ready_file(root: Path, draft: Draft) -> Path | None:
    """Return the path of the project's ready ONNX file; None for a model from elsewhere, or of a framework."""
    if not draft.model or draft.export is None or draft.export.framework != "onnx" or not is_path(draft.model):
        return None
    place = root / draft.model
    return place if place.exists() else None


def _outputs(model: ModelInfo, rows: int) -> Mapping[str, Any] | None:
    """Zeros of the shapes and types that a model answers with; None if these are not known."""
    import numpy as np

    arrays: dict[str, Any] = {}
    for spec in model.outputs:
        if any(isinstance(size, str) for size in spec.shape[1:]) or not spec.shape:
            return None
        try:
            dtype = np.dtype(np.str_ if spec.dtype == "string" else spec.dtype)
        except TypeError:
            return None
        arrays[spec.name] = np.zeros((rows, *spec.shape[1:]), dtype)
    return arrays


def _source_loc(loc: Loc, section: DataSection) -> Loc:
    match section:
        case FileData():
            return (*loc, "file")
        case PluginData():
            return (*loc, "with")
        case _:
            return loc


def _source_message(error: OnnxOpsError, section: DataSection, root: Path) -> str:
    """Return the error's text without the project's path, which its place in the file shows."""
    if not isinstance(section, FileData):
        return str(error)
    path = str((root / section.file).resolve())
    where = error.where.removeprefix(path).removeprefix(": ")
    what = f"{where}: {error.what}" if where not in ("", section.file) else error.what
    return f"'{section.file}': {type(error)(what, why=error.why, remedy=error.remedy)}"

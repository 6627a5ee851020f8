"""Checks before a run: the data, model and code of a pipeline, and this machine.

The checks neither train models, run code of the project, unpickle files nor use the network. Each
check applies the same rule as the stage that would fail.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops import plugins
from onnx_ops.config.document import Issue, Loc, path_text
from onnx_ops.config.functions import find_missing_imports, has_parameter, list_siblings
from onnx_ops.config.messages import did_you_mean
from onnx_ops.config.project_rules import check_plugin_options
from onnx_ops.domain.gate import MetricGate, SlicesGate
from onnx_ops.domain.pipeline import FileData, PluginData
from onnx_ops.domain.quantization import find_type_conflict
from onnx_ops.domain.table_cells import find_values_in_header
from onnx_ops.errors import MissingPackageError, OnnxOpsError
from onnx_ops.pipeline.probe import is_remote
from onnx_ops.pipeline.stages.data import (
    build_dataset,
    describe_text_cell,
    find_data_problems,
    get_source_name,
)
from onnx_ops.ports import Context, Dataset

if TYPE_CHECKING:
    from onnx_ops.config.rules import Draft
    from onnx_ops.domain.artifact import ModelInfo
    from onnx_ops.domain.pipeline import DataSection
    from onnx_ops.domain.target import Target
    from onnx_ops.ports.data import Array


@dataclass(frozen=True, slots=True)
class _Rows:
    """First rows of one data set, with the names of the model's inputs.

    `whole` states whether these are all rows of the data set. `arrays` are those of the source.
    """

    section: DataSection
    dataset: Dataset
    whole: bool
    arrays: Mapping[str, Any]


@dataclass(slots=True)
class Preflight:
    """Preflight checks of one pipeline.

    `notes` are observations that may be intended. `absent` are missing distributions that an extra
    of onnx-ops installs, and that functions of the project or metrics need.
    """

    context: Context
    draft: Draft
    targets: Mapping[str, Target]
    notes: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    _sets: dict[str, _Rows] = field(default_factory=dict)

    def findings(self) -> list[Issue]:
        """Return all problems with the data, files and options of the pipeline file.

        The call also adds observations to `notes`, and missing distributions to `absent`.
        """
        findings = [finding for name in self.draft.data for finding in self._open(name)]
        findings += [*self._files(), *self._imports(), *self._metric_packages()]
        findings += self._system()
        model, problems = self._read_model()
        findings += [Issue(("model",), message) for message in problems]
        findings += [
            *(self._inputs(model) if model else ()),
            *self._labels(model),
            *self._slices(),
            *self._export_options(),
            *self._quantize_options(),
        ]
        self._note_new_labels()
        self._note_few_rows()
        self._note_small_slices()
        return findings

    @property
    def _scored(self) -> _Rows | None:
        """Return the rows for the validation; None if they were not read or have problems."""
        return self._sets.get(self.draft.scored)

    def _open(self, name: str) -> Iterator[Issue]:
        import numpy as np

        section = self.draft.data[name]
        loc: Loc = ("data", name)
        if get_source_name(section) not in plugins.names("data"):
            return  # Another check reports the missing plugin.
        try:
            sample = self.context.source(get_source_name(section)).sample(
                section, self.context.root
            )
        except MissingPackageError:
            return  # The check of this machine's packages reports the missing package.
        except OnnxOpsError as error:
            yield _describe_source_error(loc, section, error, self.context.root)
            return
        if sample is None:
            return
        problems = list(find_data_problems(sample.arrays, section, ""))
        for below, problem in problems:
            yield Issue(loc + below, str(problem))
        if problems:
            return
        dataset = build_dataset(sample.arrays, section, "")
        self._sets[name] = _Rows(section, dataset, sample.whole, sample.arrays)
        self.notes += [
            f"data.{name}: {note}" for note in _list_table_notes(section, sample.arrays, dataset)
        ]
        for key, array in dataset.inputs.items():
            if array.dtype.kind == "f" and (
                rows := int((~np.isfinite(array)).reshape(len(array), -1).any(1).sum())
            ):
                among = "" if sample.whole else "the first "
                self.notes.append(
                    f"data.{name}: input {key} is NaN or infinite in {rows} of "
                    f"{among}{len(array)} rows; the model must handle these values"
                )

    def _files(self) -> Iterator[Issue]:
        root, draft = self.context.root, self.draft
        for index, name in enumerate(draft.train.depends if draft.train else ()):
            if not (root / name).is_file():
                yield Issue(
                    ("train", "depends", index),
                    f"there is no file {name!r} below the project's root",
                )
        if draft.model and not is_remote(draft.model) and not (root / draft.model).exists():
            folder = (root / draft.model).parent
            beside = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            hint = (
                did_you_mean(Path(draft.model).name, beside)
                or "; the path is relative to the project's root"
            )
            yield Issue(("model",), f"no such model: '{draft.model}'{hint}")

    def _system(self) -> Iterator[Issue]:
        """Yield an issue for each problem of the section `system`.

        Problems are files that are missing or cannot be read, and a source that needs a model from
        an isolated environment.
        """
        from onnx_ops.measure.system_inputs import list_raw_inputs
        from onnx_ops.onnx_graph.model_info import read_model_info
        from onnx_ops.pipeline.stages.system import build_isolation_error

        section, root, export = self.draft.system, self.context.root, self.draft.export
        if section is None:
            return
        if (
            export is not None
            and self._is_exporter_isolated()
            and has_parameter(section.source, "model", root)
        ):
            error = build_isolation_error(export.framework)
            yield Issue(("system", "source"), error.without_place())
        if section.files:
            try:
                list_raw_inputs(root / section.files, section.rows)
            except OnnxOpsError as error:
                yield Issue(("system", "files"), error.without_place())
        for loc, graph in section.list_graphs():
            try:
                read_model_info(root / graph)
            except OnnxOpsError as error:
                yield Issue(("system", *loc), error.without_place())
        for index, name in enumerate(section.depends):
            if not (root / name).is_file():
                message = f"there is no file {name!r} below the project's root"
                yield Issue(("system", "depends", index), message)

    def _imports(self) -> Iterator[Issue]:
        """Yield an issue for each missing import of the project's functions.

        Functions that are called in an isolated environment are not checked.
        """
        seen: set[str] = set()
        for loc, reference in self._list_functions():
            for module, text in find_missing_imports(reference, self.context.root):
                if module not in seen:
                    seen.add(module)
                    yield self._describe_import(loc, module, text)

    def _metric_packages(self) -> Iterator[Issue]:
        """Yield an issue for each metric gate whose extra is not installed.

        A missing package is reported only once.
        """
        for loc, gate in self.draft.metric_gates:
            definition = gate.definition()
            missing = plugins.absent(plugins.EXTRAS.get(definition.extra, ()))
            if new := [name for name in missing if name not in self.absent]:
                self.absent += new
                are = "is" if len(new) == 1 else "are"
                message = (
                    f"{definition.name} needs {', '.join(new)}, which {are} not installed. "
                    f"{plugins.install_hint(*new)}"
                )
                yield Issue((*loc, "name"), message, environment=True)

    def _list_functions(self) -> list[tuple[Loc, str]]:
        """Return the project's functions that the file names, with their locations.

        The training function is left out if its packages are in an isolated environment, or if this
        is unknown.
        """
        train = self.draft.train
        functions: list[tuple[Loc, str]] = []
        if train and self._is_exporter_isolated() is False:
            functions.append((("train", "run"), train.run))
        if self.draft.slices and self.draft.slices.use:
            functions.append((("slices", "use"), self.draft.slices.use))
        return [*functions, *self.draft.metric_functions, *self.draft.system_functions]

    def _is_exporter_isolated(self) -> bool | None:
        """Return whether models are trained and loaded in an isolated environment.

        The result is None without an exporter or a valid environment. Another check reports these
        problems.
        """
        train, export = self.draft.train, self.draft.export
        plugin = self._plugin("exporters", export.framework) if export else None
        if export is None or plugin is None:
            return None
        environment = (train.env if train else None) or export.env
        try:
            return plugins.select_environment(plugin, environment) is not None
        except OnnxOpsError:
            return None

    def _describe_import(self, loc: Loc, module: str, text: str) -> Issue:
        """Return the issue of a missing import.

        If an extra installs the missing distribution, it is also added to `absent`.
        """
        first = module.partition(".")[0]
        if plugins.has_extra(first):
            self.absent.append(plugins.distribution_of(first))
            message = f"{text}, which is not installed. {plugins.install_hint(first)}"
            return Issue(loc, message, environment=True)
        hint = did_you_mean(module, list_siblings(module, self.context.root))
        if not hint and not (self.context.root / first).is_dir():
            hint = did_you_mean(first, plugins.packages())
        return Issue(loc, f"{text}, which is neither in the project nor installed{hint}")

    def _read_model(self) -> tuple[ModelInfo | None, list[str]]:
        """Return the description of the project's existing ONNX file, and its problems.

        The description is None if the local ONNX file is missing or cannot be read. The problems
        are the reasons why onnx-ops refuses the file.
        """
        from onnx_ops.onnx_graph.compatibility import (
            list_user_model_notes,
            list_user_model_problems,
        )
        from onnx_ops.onnx_graph.files import find_model_file
        from onnx_ops.onnx_graph.model_info import read_model_info

        export, place = self.draft.export, self.context.root / (self.draft.model or "")
        is_file = self.draft.model and not is_remote(self.draft.model) and place.exists()
        if not is_file or export is None or export.framework != "onnx":
            return None, []
        try:
            problems = list_user_model_problems(place, export, self.targets.values())
            self.notes += [f"{self.draft.model}: {note}" for note in list_user_model_notes(place)]
            return read_model_info(find_model_file(place)), problems
        except OnnxOpsError as error:
            return None, [error.without_place()]

    def _inputs(self, model: ModelInfo) -> Iterator[Issue]:
        """Yield issues of rows that the model does not accept.

        The checked rows are those for scoring, calibration and tuning.
        """
        from onnx_ops.domain.row_axes import find_row_axes
        from onnx_ops.measure.files import convert_inputs
        from onnx_ops.tools.supplied_rows import find_input_problems

        for name in dict.fromkeys(name for _, name in self.draft.used_sets):
            if name not in self._sets:
                continue
            loc, rows = ("data", name), self._sets[name]
            try:
                axes = find_row_axes({spec.name: spec.shape for spec in model.inputs})
                inputs = convert_inputs(rows.dataset.inputs, model)
                rows.dataset.put_rows_first(
                    {name: axis for name, axis in axes.items() if name in inputs}
                )
            except OnnxOpsError as error:
                yield Issue(loc, error.without_place())
                continue
            values = rows.dataset.values
            for key, message in find_input_problems(model.inputs, inputs, values):
                below = (
                    ("inputs", key)
                    if key in rows.section.inputs
                    else ("inputs",)
                    if rows.section.inputs
                    else ()
                )
                below = ("values", key) if key in values else below
                yield Issue((*loc, *below), message)

    def _export_options(self) -> Iterator[Issue]:
        """Yield issues of the section `export`.

        The method checks that the exporter has the options. If there are rows for scoring, it also
        checks the inputs, axes and names in `dynamic`.
        """
        from onnx_ops.adapters.exporters.signature import find_section_problems
        from onnx_ops.domain.row_axes import find_declared_axes
        from onnx_ops.pipeline.stages.export import AXES_REMEDY

        export, scored = self.draft.export, self._scored
        plugin = self._plugin("exporters", export.framework) if export else None
        if export is None or plugin is None or plugin.options is None:
            return
        inputs = {**scored.dataset.inputs, **scored.dataset.values} if scored else {}
        if scored is None:
            export = replace(export, dynamic={})
        elif export.framework != "onnx":
            shapes = {name: array.shape for name, array in scored.dataset.inputs.items()}
            try:
                scored.dataset.put_rows_first(
                    find_declared_axes(export.dynamic, shapes), AXES_REMEDY
                )
            except OnnxOpsError as error:
                yield Issue(("export", "dynamic"), error.without_place())
        for loc, problem in find_section_problems(export, inputs, plugin.options):
            yield Issue(("export", *loc), problem.without_place(), on_key=True)

    def _quantize_options(self) -> Iterator[Issue]:
        """Yield issues of options that an optimizer does not have or accept."""
        from onnx_ops.adapters.optimizers.library import read_options

        for loc, entry in self.draft.quantize:
            plugin = self._plugin("optimizers", entry.method)
            if (
                plugin is not None
                and plugin.options is not None
                and not find_type_conflict(entry.options)
            ):
                yield from check_plugin_options(
                    (*loc, "options"), functools.partial(read_options, entry, plugin.options)
                )

    def _plugin(self, kind: str, name: str) -> Any:
        """Return a plugin; None if it cannot be loaded, which another check reports."""
        try:
            return plugins.load(kind, name)
        except OnnxOpsError:
            return None

    def _labels(self, model: ModelInfo | None) -> Iterator[Issue]:
        """Yield issues of labels with which a gate's metric cannot be computed.

        If the model is an existing ONNX file, and all rows were read, its outputs are checked too.
        """
        from onnx_ops.measure.scoring import find_label_problem

        scored = self._scored
        if scored is None or scored.section.label is None:
            return
        outputs = (
            _build_zeros(model, len(scored.dataset)) if model is not None and scored.whole else None
        )
        definitions = [gate.definition() for _, gate in self.draft.metric_gates]
        for message in dict.fromkeys(
            find_label_problem(definition, scored.dataset, outputs) for definition in definitions
        ):
            if message:
                yield Issue(("data", self.draft.scored, "label"), message)

    def _slices(self) -> Iterator[Issue]:
        """Yield issues of columns that cannot be slices of the scored rows.

        A file of tags that cannot be read is an issue too. Columns that a function computes are
        unknown, since no code of the project is run.
        """
        from onnx_ops.measure.slices import find_slice_problem, split_columns

        slices, scored = self.draft.slices, self._scored
        tags = None
        if slices is not None and slices.tags:
            try:
                tags = self.context.source("file").sample(
                    FileData(file=slices.tags), self.context.root
                )
            except MissingPackageError:
                return  # The check of this machine's packages reports the missing package.
            except OnnxOpsError as error:
                yield _describe_tags_error(slices.tags, error, self.context.root)
                return
        if slices is None or scored is None:
            return
        arrays = {**scored.arrays, **(tags.arrays if tags else {})}
        whole = scored.whole and (tags is None or tags.whole)
        for index, entry in enumerate(slices.by):
            if slices.use and not arrays.keys() >= set(split_columns([entry])[entry]):
                continue
            if problem := find_slice_problem(entry, arrays, len(scored.dataset) if whole else None):
                yield Issue(("slices", "by", index), problem.without_place())

    def _note_small_slices(self) -> None:
        """Add a note for each gate on slices whose smallest judged slices cannot pass."""
        slices = self.draft.slices
        for loc, gate in self.draft.gates:
            if slices is None or not isinstance(gate, SlicesGate):
                continue
            rows, needed = gate.min_rows or slices.min_rows, gate.count_needed_rows()
            if rows is not None and rows < needed:
                self.notes.append(
                    f"{path_text(loc)}: a slice of fewer than {needed} rows cannot pass, even if "
                    f"all its answers are right, and min_rows is {rows}; such a slice leaves the "
                    "gate inconclusive, or fails it"
                )

    def _note_new_labels(self) -> None:
        """Add a note on classes that occur in scored data but not in training data.

        The note requires that all rows of the other data sets were read.
        """
        import numpy as np

        scored = self._scored
        if scored is None or not self.draft.train:
            return
        others = [rows for rows in self._sets.values() if rows is not scored]
        if not all(rows.whole for rows in others):
            # A class that seems to be new can occur in the rows that were not read.
            return
        label = scored.dataset.label
        trained = [rows.dataset.label for rows in others if rows.dataset.label is not None]
        if label is None or not trained or not all(map(self._has_classes, (label, *trained))):
            return
        known = (np.unique(labels).tolist() for labels in trained)
        if new := sorted(set(np.unique(label).tolist()).difference(*known)):
            shown = ", ".join(map(str, new[:5])) + (", …" if len(new) > 5 else "")
            self.notes.append(
                f"data.{self.draft.scored}: these labels do not occur in the training data: {shown}"
            )

    def _note_few_rows(self) -> None:
        """Add a note on each limit of a metric that the scored rows are too few to pass."""
        from onnx_ops.statistics.sample_size import advise_rows

        if self.draft.validate is None:
            return
        rows, groups = self.draft.validate.samples.limit, 0
        scored = self._scored
        if scored is not None and scored.whole:
            dataset = scored.dataset.head(rows)
            rows = len(dataset)
            groups = 0 if dataset.group is None else len(set(dataset.group.tolist()))
        for loc, gate in self.draft.metric_gates:
            # Gates on slices count the rows of each slice when they are judged.
            if isinstance(gate, MetricGate):
                notes = advise_rows(gate, rows, groups)
                self.notes += [f"{path_text(loc)}: {text}" for text in notes]

    def _has_classes(self, labels: Array) -> bool:
        """Return whether labels are classes, and not the texts that a metric reads."""
        reads = {gate.definition().reads for _, gate in self.draft.metric_gates}
        kinds = "iub" if "texts" in reads else "iubUS"
        return labels.dtype.kind in kinds and labels.ndim == 1


def _describe_tags_error(path: str, error: OnnxOpsError, root: Path) -> Issue:
    issue = _describe_source_error((), FileData(file=path), error, root)
    return Issue(("slices", "tags"), issue.message)


def _list_table_notes(
    section: DataSection, arrays: Mapping[str, Any], dataset: Dataset
) -> Iterator[str]:
    """Yield notes on cells of a table that are probably mistakes.

    The function finds values in the first line, and texts in columns of numbers.
    """
    if not isinstance(section, FileData) or any(
        array.shape[1:] != (1,) for array in arrays.values()
    ):
        return
    if values := find_values_in_header(list(arrays)):
        found = ", ".join(values[:3])
        yield f"the first line of the file must name the columns; it contains {found}"
    for name, array in dataset.inputs.items():
        if cell := describe_text_cell(array):
            yield f"input {name} is text: {cell}"


def _build_zeros(model: ModelInfo, rows: int) -> Mapping[str, Any] | None:
    """Return zeros with the shapes and types of the model's outputs.

    The result is None if a shape or type is unknown.
    """
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


def _describe_source_error(
    loc: Loc, section: DataSection, error: OnnxOpsError, root: Path
) -> Issue:
    """Return the issue of data that cannot be read.

    The message leaves out the file's full path, since the issue has the relative path of the file.
    """
    if not isinstance(section, FileData):
        return Issue((*loc, "options") if isinstance(section, PluginData) else loc, str(error))
    annotations = str((root / section.annotations).resolve())
    is_of_annotations = section.annotations and error.where in (annotations, section.annotations)
    key, file = (
        ("annotations", section.annotations) if is_of_annotations else ("file", section.file)
    )
    path = str((root / file).resolve())
    where = error.where.removeprefix(path).removeprefix(": ")
    what = f"{where}: {error.what}" if where not in ("", file) else error.what
    text = type(error)(what, why=error.why, remedy=error.remedy)
    return Issue((*loc, key), f"'{file}': {text}")

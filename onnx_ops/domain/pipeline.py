"""The pipeline file and its sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, Lt, MinLen, doc

from onnx_ops.domain.decision import Objective
from onnx_ops.domain.endpoint import MetricsConfig
from onnx_ops.domain.evidence import EXPORT
from onnx_ops.domain.execution import SOURCE_TIME_S, Environment
from onnx_ops.domain.gate import FEWEST_SLICE_ROWS, Gate, ParityGate
from onnx_ops.domain.input_values import InputValues
from onnx_ops.domain.quantities import (
    COMPUTED,
    OMIT_DEFAULT,
    Bytes,
    Fraction,
    Json,
    Name,
    Notation,
    Seconds,
    ShortName,
)
from onnx_ops.domain.quantization import AUTO, METHODS, ROLES, Budget, Role, TuningData
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.domain.system_comparison import DeployedStep, Tolerances

GROUP = (
    "Name of the array that identifies groups of rows (patient, customer, session); "
    "gates then count groups."
)
INPUTS = (
    "ONNX input name -> array or column, in this order; `*` is all columns of numbers as one "
    "float32 matrix. Default: every array or column that no other key names is one input."
)
VALUES = (
    "ONNX input name -> value of an input that is the same for all rows: a number, a boolean, "
    "a list of them, or the name of an array of the data."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Settings of the attempts of a stage: retries and limits."""

    retries: Annotated[
        int, Ge(0), Le(10), doc("Number of retries after a failure of the machine or a service.")
    ] = 0
    timeout: Annotated[
        Seconds | None, doc("Time limit of one attempt; the stage's process is then killed.")
    ] = None
    memory: Annotated[
        Bytes | None,
        doc("Memory limit of the stage's process; default: the memory of the machine."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedAttempts(Attempts):
    """Settings of a stage that can run on another machine."""

    pool: Annotated[
        str,
        doc(
            "Prefect work pool whose workers run the stage; default: "
            "`pools` of onnx-ops.toml, or this machine."
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileData:
    """Arrays from a file or a folder, or columns of a table.

    The file is `.npz` or `.npy`. The folder contains images, or test data of an ONNX model. A table
    is CSV (also tab-separated or gzip), Parquet or JSON Lines.
    """

    file: Annotated[
        str,
        doc(
            "Path of a .npz, .npy, .csv, .parquet or .jsonl file, or of a folder, relative to "
            "the project's root; or hf://datasets/OWNER/NAME@COMMIT/PATH, or "
            "https://…#sha256=DIGEST."
        ),
    ]
    annotations: Annotated[
        str,
        doc(
            "Path of an annotation file in the format of COCO. Its objects are the array "
            "`objects`, and with keypoints `poses`: one row for each image, in the order of the "
            "array `image_id` of the data, else of the images of the file."
        ),
    ] = field(default="", metadata=OMIT_DEFAULT)
    inputs: Annotated[Mapping[str, str], doc(INPUTS)] = field(default_factory=dict)
    label: Annotated[str | None, doc("Name of the array or column with the labels.")] = None
    group: Annotated[str | None, doc(GROUP)] = field(default=None, metadata=OMIT_DEFAULT)
    columns: Annotated[
        tuple[str, ...] | None,
        doc("Columns that become inputs, in this order; default: all that no other key names."),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    values: Annotated[Mapping[str, Json], doc(VALUES)] = field(
        default_factory=dict, metadata=OMIT_DEFAULT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SklearnData:
    """A data set of scikit-learn."""

    sklearn: Annotated[
        Literal["digits", "iris", "wine", "breast_cancer", "diabetes"], doc("Name of the data set.")
    ]
    split: Annotated[
        Literal["train", "test", "all"],
        doc("Part of the split into training and test rows; stratified for classes."),
    ] = "all"
    test_size: Annotated[
        float, Gt(0), Lt(1), doc("Share of rows in the test part."), Fraction.__metadata__[0]
    ] = 0.5
    seed: Annotated[int, Ge(0), doc("Seed of the split.")] = 0
    inputs: Annotated[
        Mapping[str, str], doc("ONNX input name -> array name (data, or images).")
    ] = field(default_factory=lambda: {"x": "data"})
    label: Annotated[str | None, doc("Name of the label array.")] = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginData:
    """Arrays from an installed data source (entry point `onnx_ops.data`)."""

    source: Annotated[str, doc("Data source plugin, such as dvc.")]
    options: Annotated[Mapping[str, Json], doc("Options of this data source.")] = field(
        default_factory=dict
    )
    inputs: Annotated[Mapping[str, str], doc(INPUTS)] = field(default_factory=dict)
    label: Annotated[str | None, doc("Name of the label array.")] = None
    group: Annotated[str | None, doc(GROUP)] = field(default=None, metadata=OMIT_DEFAULT)
    columns: Annotated[
        tuple[str, ...] | None,
        doc("Columns that become inputs, in this order; default: all that no other key names."),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    values: Annotated[Mapping[str, Json], doc(VALUES)] = field(
        default_factory=dict, metadata=OMIT_DEFAULT
    )


DataSection: TypeAlias = FileData | SklearnData | PluginData


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(PlacedAttempts):
    """Section `train`: how the model is trained."""

    run: Annotated[str, doc("Training function, `package.module:function`.")]
    with_: Annotated[
        Mapping[str, Json], doc("Parameters of the function, recorded with the version.")
    ] = field(default_factory=dict)
    depends: Annotated[
        tuple[str, ...],
        doc("Further files that training, the model's classes and custom metrics read."),
    ] = ()
    env: Annotated[
        Environment | None, doc("Isolated environment for training; default: that of `export`.")
    ] = None


TRANSLATIONS = "translations"
"""Option of the torch exporter: `package.module:TABLE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(PlacedAttempts):
    """Section `export`: how the model is converted to an ONNX file."""

    framework: Annotated[
        str,
        doc("Exporter plugin: sklearn, torch, xgboost, tensorflow …, or onnx for an ONNX file."),
    ]
    opset: Annotated[int, Ge(7), Le(28), doc("Opset of the default domain.")] = 18
    ir_version: Annotated[int, Ge(3), Le(14), doc("IR version of the file.")] = 10
    dynamic: Annotated[
        Mapping[str, Mapping[int, str]],
        doc("Free axes: input -> {axis: name}; default for each input: {0: batch}."),
    ] = field(default_factory=dict)
    options: Annotated[Mapping[str, Json], doc("Options of this exporter.")] = field(
        default_factory=dict
    )
    env: Annotated[
        Environment | None, doc("Isolated environment; default: that of the exporter.")
    ] = None

    @property
    def translations(self) -> str:
        """The reference to the project's table of ONNX functions for torch operators.

        Empty if none is given.
        """
        return str(self.options.get(TRANSLATIONS, "")) if self.framework == "torch" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Rows of a data set on which models are compared."""

    data: Annotated[str, doc("Data set of `data`.")] = "test"
    limit: Annotated[int, Ge(1), doc("Maximum number of rows.")] = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate(PlacedAttempts):
    """Section `validate`: how the export is compared with its source."""

    samples: Samples = field(default_factory=Samples)
    source_time: Annotated[
        Seconds, doc("Time limit for running the source model; a slow model runs on fewer rows.")
    ] = SOURCE_TIME_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemComparison(Attempts):
    """Section `system`: comparison of export and steps with the project's own code."""

    source: Annotated[str, doc("Function that answers one raw input, `package.module:function`.")]
    files: Annotated[
        str,
        doc("Folder of raw inputs, or a .jsonl, .csv or .txt file with one input per row."),
    ]
    rows: Annotated[
        int, Ge(1), doc("Maximum number of inputs, spread evenly over all of them.")
    ] = 64
    before: Annotated[
        tuple[DeployedStep, ...],
        doc("Steps before the model; default: the model gets the input that the source records."),
    ] = ()
    after: Annotated[tuple[DeployedStep, ...], doc("Steps after the model.")] = ()
    tolerances: Annotated[
        Tolerances, doc("Limits within which two values of a step count as equal.")
    ] = field(default_factory=Tolerances)
    depends: Annotated[
        tuple[str, ...], doc("Further files that the source and the steps read.")
    ] = ()

    def list_steps(self) -> list[tuple[tuple[str | int, ...], DeployedStep]]:
        """Return the steps in order, with their locations in the section."""
        return [
            ((key, index), step)
            for key, steps in (("before", self.before), ("after", self.after))
            for index, step in enumerate(steps)
        ]

    def list_functions(self) -> list[tuple[tuple[str | int, ...], str]]:
        """Return the references of the source and of the steps, with their locations."""
        uses = [((*loc, "use"), step.use) for loc, step in self.list_steps()]
        return [
            (loc, reference) for loc, reference in [(("source",), self.source), *uses] if reference
        ]

    def list_graphs(self) -> list[tuple[tuple[str | int, ...], str]]:
        """Return the files of the steps that are graphs, with their locations."""
        return [((*loc, "graph"), step.graph) for loc, step in self.list_steps() if step.graph]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Calibration data of quantization."""

    data: Annotated[str, doc("Data set of `data`; must not be the data set that is scored.")] = (
        "train"
    )
    samples: Annotated[int, Ge(1), doc("Rows used to find the ranges of activations.")] = 256
    method: Annotated[
        Literal["minmax", "entropy", "percentile"],
        doc("How activation ranges are computed from the rows."),
    ] = "minmax"
    shards: Annotated[
        int,
        Ge(1),
        Le(256),
        doc("Number of parts of the calibration rows, each a separate stage; for static."),
    ] = field(default=1, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(PlacedAttempts):
    """An entry of `quantize`: one variant, or a search for several."""

    name: Annotated[Name, doc("Name of the variant.")]
    method: Annotated[str, doc(f"{AUTO}, or a plugin: {', '.join(METHODS)}.")]
    calibrate: Annotated[
        Calibrate | None, doc("Calibration data; required for static quantization.")
    ] = None
    per_channel: Annotated[
        bool, doc("Whether each output channel of a weight has its own scale.")
    ] = True
    exclude: Annotated[tuple[str, ...], doc("Names of nodes that stay in float.")] = ()
    options: Annotated[Mapping[str, Json], doc("Options of this optimizer.")] = field(
        default_factory=dict
    )
    env: Annotated[
        Environment | None, doc("Isolated environment; default: that of the optimizer.")
    ] = None
    tuning_data: Annotated[
        TuningData | None, doc("auto: rows on which the search compares models.")
    ] = None
    budget: Annotated[Budget | None, doc("auto: limits of a variant and of the search for it.")] = (
        None
    )
    variants: Annotated[
        tuple[Role, ...],
        MinLen(1),
        doc("auto: points of the Pareto front that become variants NAME-fast …"),
    ] = ROLES

    def variant_names(self) -> tuple[str, ...]:
        """Return the names of the variants that this entry makes.

        A search (method `auto`) makes one variant for each of `variants`.
        """
        if self.method != AUTO:
            return (self.name,)
        return tuple(f"{self.name}-{role}" for role in dict.fromkeys(self.variants))


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Attempts):
    """Section `benchmark`: the targets to measure on."""

    targets: Annotated[
        tuple[ShortName, ...], MinLen(1), doc("Names of targets, of the project or shipped.")
    ]
    batch: Annotated[int, Ge(1), Le(4096), doc("Rows in one timed request.")] = 1
    shards: Annotated[
        int,
        Ge(1),
        Le(256),
        doc(
            "Number of parts in which rows are scored for metrics, each a separate stage; "
            "for many rows."
        ),
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices(Attempts):
    """Section `slices`: parts of the scored rows that `slices` gates judge."""

    by: Annotated[
        tuple[str, ...],
        MinLen(1),
        doc(
            "Names of columns whose values are slices: arrays of the scored data set, columns "
            "of `tags`, or keys of the result of `use`; `country*device` crosses two columns."
        ),
    ]
    min_rows: Annotated[
        int | None,
        Ge(FEWEST_SLICE_ROWS),
        doc("Fewest rows of a judged slice; default: 50, or more where a limit needs more."),
    ] = None
    tags: Annotated[
        str,
        doc("Path of a table or .npz file with one row for each row of the scored data set."),
    ] = ""
    use: Annotated[
        str,
        doc(
            "Function `package.module:function`; takes the arrays of the scored data set by name "
            "and returns a mapping from names to one value per row."
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register(Attempts):
    """Section `register`: the registered model that gets the versions."""

    model: Annotated[str, doc("Registered model in MLflow; gets one version for each variant.")]
    promote: Annotated[
        Literal["manual", "auto", "always"],
        doc(
            "manual: an operator promotes a release; auto: a passing release becomes "
            "challenger, unless another release has replaced it after an earlier promotion; "
            "always: every passing release becomes challenger, even if another release has "
            "replaced it."
        ),
    ] = "manual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy(Attempts):
    """An entry of `deploy`: one endpoint."""

    endpoint: Annotated[Name, doc("Name that clients call; unique in a project.")]
    provider: Annotated[str, doc("Endpoint plugin: local, replicas, sagemaker or azureml.")] = (
        "local"
    )
    target: Annotated[
        ShortName, doc("Target whose champion is served; must be in `benchmark.targets`.")
    ]
    rollout: RolloutPolicy = field(default_factory=RolloutPolicy)
    options: Annotated[
        Mapping[str, Json], doc("Options of this provider, such as `port` of local.")
    ] = field(default_factory=dict)
    metrics: Annotated[
        MetricsConfig | None,
        doc("Metrics source of the rollout; default: the provider's counts."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One YAML file."""

    schema: Annotated[int, Ge(1), doc("Version of this file format.")] = 1
    pipeline: Annotated[Name, doc("Name of the pipeline: lower-case letters, digits, hyphens.")]
    description: str = ""
    data: Annotated[Mapping[str, DataSection], doc("Named data sets.")] = field(
        default_factory=dict
    )
    inputs: Annotated[
        Mapping[str, InputValues],
        doc("Values that callers send, by ONNX input; default: derived from the data."),
    ] = field(default_factory=dict)
    train: Annotated[Train | None, doc("Training of the model; alternatively, set `model`.")] = None
    model: Annotated[
        str | None,
        doc(
            "A trained model: a path, models:/NAME/VERSION, hf://OWNER/NAME@COMMIT/PATH, "
            "https://…#sha256=DIGEST, or a URL of another file system."
        ),
    ] = None
    export: Export
    validate: Validate = field(default_factory=Validate)
    system: Annotated[
        SystemComparison | None,
        doc("Comparison of the export and the steps around it with the project's own code."),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    quantize: tuple[Quantize, ...] = ()
    benchmark: Benchmark
    slices: Annotated[
        Slices | None, doc("Parts of the scored rows that are judged separately.")
    ] = None
    gates: Annotated[tuple[Gate, ...], MinLen(1)] = (ParityGate(),)
    objective: Annotated[
        Objective, doc("Objective by which one of the passing variants is chosen for a target.")
    ] = field(default_factory=Objective)
    register: Annotated[
        Register | None,
        doc("Registered model of the versions; without it the pipeline ends at the gates."),
    ] = None
    deploy: Annotated[tuple[Deploy, ...], Notation.SINGLE_ENTRY] = ()
    parameters: Mapping[str, Json] = field(default_factory=dict, metadata=COMPUTED)
    """Values taken from `params.yaml`, by their path there."""

    def variants(self) -> tuple[str, ...]:
        """Return the names of all variants, the export first."""
        return (EXPORT, *(name for entry in self.quantize for name in entry.variant_names()))

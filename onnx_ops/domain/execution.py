"""How a runtime executes a model: what a target declares, a decision is about, and a server does.

Environments of their own for packages that this installation does not hold.

Options of execution providers by name.

A provider refuses a wrong name only where it is installed, and some (QNN) take it without a word; so a target file is
checked against the names that a release reads. They are those of ONNX Runtime's sources
(`onnxruntime/core/providers/*/`, `include/onnxruntime/core/providers/`), held against the strings in the libraries of
these wheels:

- CPU, CUDA, TensorRT: onnxruntime-gpu 1.31.1; CoreML, XNNPACK: onnxruntime 1.31.1 (macOS);
- OpenVINO: onnxruntime-openvino 1.24.1; DirectML: onnxruntime-directml 1.24.4;
- MIGraphX: onnxruntime-migraphx 1.27.1; QNN: onnxruntime-qnn 2.7.0, a plug-in.

`cpu` and `wasm` are the JavaScript builds' own names for theirs, which read none. NNAPI takes flags through its C
interface and no options by name. Addresses of memory (streams, allocators) are left out: a file cannot hold one.
Providers that are not here are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, doc

from onnx_ops.domain.quantities import Bytes, Json, Notation, Seconds

CPU = "CPUExecutionProvider"

GraphLevel = Literal["disabled", "basic", "extended", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Options of an ONNX Runtime session."""

    intra_op_threads: Annotated[int, Ge(0), Le(1024), doc("Threads within one operator; 0: one per core.")] = 1
    inter_op_threads: Annotated[int, Ge(0), Le(1024), doc("Operators that run in parallel; 0: one per core.")] = 1
    spinning: Annotated[
        bool, doc("Whether waiting threads spin: faster on idle cores, much slower on shared ones.")
    ] = False
    graph_level: Annotated[GraphLevel, doc("Graph optimization level of ONNX Runtime.")] = "all"
    config: Annotated[Mapping[str, str], doc("Further session config entries, by their names in ONNX Runtime.")] = (
        field(default_factory=dict)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider and its options."""

    name: Annotated[str, Notation.SHORT_FORM]
    options: Annotated[
        Mapping[str, str],
        doc("Options by the provider's names; `{cache}` is a cache folder for this model and machine."),
    ] = field(default_factory=dict)
    package: Annotated[str, doc("Python package of a plug-in provider, such as onnxruntime_qnn.")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution providers in order of preference, and the settings of sessions."""

    providers: tuple[Provider, ...] = (Provider(name=CPU),)
    session: SessionSettings = field(default_factory=SessionSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An isolated environment for a framework or runtime whose packages are not part of this installation."""

    requirements: Annotated[
        tuple[str, ...], doc("Packages in pip's syntax (npm's for JavaScript); default: those of the plugin.")
    ] = ()
    python: Annotated[str | None, doc("Python version, such as '3.12'; default: that of this installation.")] = None
    memory: Annotated[Bytes | None, doc("Memory limit of its process; default: the memory of the machine.")] = None
    timeout: Annotated[Seconds | None, doc("Time limit for one answer of its process.")] = None
    isolated: Annotated[bool, doc("false: use this installation, even if the plugin has its own requirements.")] = True

    def content(self) -> dict[str, Json]:
        """Return what affects results: memory and time limits do not."""
        return {"requirements": list(self.requirements), "python": self.python, "isolated": self.isolated}


PROVIDER_OPTIONS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(),
    "wasm": frozenset(),
    "webgpu": frozenset(),
    "CPUExecutionProvider": frozenset(),
    "CUDAExecutionProvider": frozenset(
        (
            "arena_extend_strategy",
            "cudnn_conv1d_pad_to_nc1d",
            "cudnn_conv_algo_search",
            "cudnn_conv_use_max_workspace",
            "device_id",
            "do_copy_in_default_stream",
            "enable_cuda_graph",
            "enable_cudnn",
            "enable_skip_layer_norm_strict_mode",
            "fuse_conv_bias",
            "gpu_mem_limit",
            "prefer_nhwc",
            "sdpa_kernel",
            "tunable_op_enable",
            "tunable_op_max_tuning_duration_ms",
            "tunable_op_tuning_enable",
            "use_ep_level_unified_stream",
            "use_tf32",
        )
    ),
    "TensorrtExecutionProvider": frozenset(
        (
            "device_id",
            "trt_auxiliary_streams",
            "trt_bf16_enable",
            "trt_build_heuristics_enable",
            "trt_builder_optimization_level",
            "trt_context_memory_sharing_enable",
            "trt_cuda_graph_enable",
            "trt_detailed_build_log",
            "trt_dla_core",
            "trt_dla_enable",
            "trt_dump_ep_context_model",
            "trt_dump_subgraphs",
            "trt_engine_cache_enable",
            "trt_engine_cache_path",
            "trt_engine_cache_prefix",
            "trt_engine_decryption_enable",
            "trt_engine_decryption_lib_path",
            "trt_engine_hw_compatible",
            "trt_ep_context_embed_mode",
            "trt_ep_context_file_path",
            "trt_extra_plugin_lib_paths",
            "trt_force_sequential_engine_build",
            "trt_force_timing_cache",
            "trt_fp16_enable",
            "trt_int8_calibration_table_name",
            "trt_int8_enable",
            "trt_int8_use_native_calibration_table",
            "trt_layer_norm_fp32_fallback",
            "trt_load_user_initializer",
            "trt_max_partition_iterations",
            "trt_max_workspace_size",
            "trt_min_subgraph_size",
            "trt_onnx_model_folder_path",
            "trt_op_types_to_exclude",
            "trt_preview_features",
            "trt_profile_max_shapes",
            "trt_profile_min_shapes",
            "trt_profile_opt_shapes",
            "trt_sparsity_enable",
            "trt_tactic_sources",
            "trt_timing_cache_enable",
            "trt_timing_cache_path",
            "trt_weight_stripped_engine_enable",
        )
    ),
    "OpenVINOExecutionProvider": frozenset(
        (
            "cache_dir",
            "device_id",
            "device_luid",
            "device_type",
            "disable_dynamic_shapes",
            "enable_causallm",
            "enable_opencl_throttling",
            "enable_qdq_optimizer",
            "layout",
            "load_config",
            "model_priority",
            "num_of_threads",
            "num_streams",
            "precision",
            "reshape_input",
        )
    ),
    "CoreMLExecutionProvider": frozenset(
        (
            "AllowLowPrecisionAccumulationOnGPU",
            "EnableOnSubgraphs",
            "MLComputeUnits",
            "ModelCacheDirectory",
            "ModelFormat",
            "ProfileComputePlan",
            "RequireStaticInputShapes",
            "SpecializationStrategy",
        )
    ),
    "DmlExecutionProvider": frozenset(("device_filter", "device_id", "disable_metacommands", "performance_preference")),
    "MIGraphXExecutionProvider": frozenset(
        (
            "device_id",
            "migraphx_arena_extend_strategy",
            "migraphx_bf16_enable",
            "migraphx_exhaustive_tune",
            "migraphx_fp16_enable",
            "migraphx_fp8_enable",
            "migraphx_int8_calibration_table_name",
            "migraphx_int8_enable",
            "migraphx_int8_use_native_calibration_table",
            "migraphx_mem_limit",
            "migraphx_model_cache_dir",
        )
    ),
    "NnapiExecutionProvider": frozenset(),
    "XnnpackExecutionProvider": frozenset(("intra_op_num_threads",)),
    "QNNExecutionProvider": frozenset(
        (
            "backend_path",
            "backend_type",
            "device_id",
            "disable_file_mapped_weights",
            "dump_json_qnn_graph",
            "dump_qnn_ep_input_graph",
            "dump_qnn_ep_input_graph_dir",
            "dump_qnn_ir_dlc",
            "dump_qnn_ir_dlc_dir",
            "enable_block_quant_weight_optimization",
            "enable_framework_op_trace",
            "enable_htp_fp16_clamp_overflow",
            "enable_htp_fp16_precision",
            "enable_htp_graph_splitting",
            "enable_htp_monolithic_lstm",
            "enable_htp_prepare_and_load",
            "enable_htp_prepare_only",
            "enable_htp_shared_memory_allocator",
            "enable_htp_spill_fill_buffer",
            "enable_vtcm_backup_buffer_sharing",
            "extended_udma",
            "htp_arch",
            "htp_bf16_enable",
            "htp_graph_finalization_optimization_mode",
            "htp_graph_splitting_num_prepare_threads",
            "htp_performance_mode",
            "htp_reused_io_limit_mb",
            "htp_share_resource_optimization",
            "json_qnn_graph_dir",
            "offload_graph_io_quantization",
            "op_packages",
            "profiling_file_path",
            "profiling_level",
            "qnn_context_priority",
            "qnn_ir_backend_path",
            "qnn_saver_path",
            "rpc_control_latency",
            "skip_backend_op_validation",
            "skip_qnn_version_check",
            "soc_model",
            "vtcm_mb",
        )
    ),
}
"""Names that each provider reads."""

PROVIDER_PACKAGES: Mapping[str, str] = {
    "CUDAExecutionProvider": "pip install onnxruntime-gpu, in place of onnxruntime; it needs an NVIDIA GPU.",
    "TensorrtExecutionProvider": (
        "pip install onnxruntime-gpu, in place of onnxruntime, and TensorRT; it needs an NVIDIA GPU."
    ),
    "OpenVINOExecutionProvider": "pip install onnxruntime-openvino, in place of onnxruntime.",
    "CoreMLExecutionProvider": "pip install onnxruntime, on macOS.",
    "DmlExecutionProvider": "pip install onnxruntime-directml, on Windows.",
    "MIGraphXExecutionProvider": "pip install onnxruntime-migraphx, in place of onnxruntime; it needs ROCm.",
    "NnapiExecutionProvider": "Only builds of ONNX Runtime for Android have it.",
    "XnnpackExecutionProvider": "Only builds of ONNX Runtime for mobiles have it, and your own with --use_xnnpack.",
    "QNNExecutionProvider": "pip install onnxruntime-qnn, and name it: package: onnxruntime_qnn.",
}
"""What brings a provider, in a person's words."""

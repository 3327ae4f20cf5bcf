"""The settings of how the machine trains and what it records: layout, speed, checkpoints, logs."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, WithJsonSchema

from lacuna.config.fields import Names, Path, Section, WholeSeconds, other_spellings

Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


class ParallelismConfig(Section):
    """How the work is spread over the devices."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the model, each fed its own batches."""

    data_parallel_shard_degree: int = Field(default=-1, ge=-1)
    """Ranks that each copy of the model is sharded over; -1 means all that remain."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free the gathered parameters between forward and backward pass: less memory, more traffic."""

    zero_stage: int | None = Field(default=None, ge=1, le=3)
    """ZeRO's name for the same: 3 frees the gathered parameters (in pipelines only always does), 2
    keeps them, 1 keeps gradients whole as well."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks that each matrix is split over, and each sequence in between."""

    disable_loss_parallel: bool = False
    """Compute the loss of whole sequences on every tensor-parallel rank, instead of a share of it
    on each."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's traffic with its matrix products; on GPUs, with
    compile.enable."""

    context_parallel_degree: PositiveInt = 1
    """Ranks that each sequence is split over."""

    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "alltoall"
    """How a rank gets the keys and values of the others: alltoall sends them round a ring, which
    overlaps with computation and takes less memory; allgather gets all at once, as layers with
    sliding windows, soft caps or dropout always do."""

    pipeline_parallel_degree: PositiveInt = 1
    """Ranks that the layers are spread over."""

    pipeline_parallel_split_points: Names = ()
    """Layers that begin a new stage, such as layers.4. Unset: a balanced split."""

    # The help shows a text: the schedules are too many to list beside the flag.
    pipeline_parallel_schedule: Annotated[
        Schedule,
        other_spellings(afab="GPipe", **{name.lower(): name for name in SCHEDULES}),
        WithJsonSchema({"type": "string"}),
    ] = "1F1B"
    """Order in which the stages work: GPipe, 1F1B, Interleaved1F1B, LoopedBFS,
    InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""

    pipeline_parallel_schedule_csv: Path | None = None
    """File with a schedule of your own, in torch's format: a line per rank, cells such as 0F0 and
    1B0."""

    pipeline_parallel_microbatches: PositiveInt | None = None
    """Pieces that the sequences of a rank's step are cut into. Unset: one per stage, or the
    accumulated micro-batches if they are more."""

    enable_compiled_autograd: bool = False
    """Not available: torch's compiled autograd gives wrong gradients under FSDP2's hooks."""

    expert_parallel_degree: PositiveInt = 1
    """Ranks that the experts of a layer are spread over, of those that share a model, its matrices
    or its sequences; tokens are sent to their experts, and none is dropped."""


class CriticParallelismConfig(ParallelismConfig):
    """How PPO's critic is spread: as the model, or by these where one is changed."""


class ActivationCheckpointConfig(Section):
    """What is computed again in the backward pass to save memory."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """What is recomputed: all, some by selective_ac_option, or as much as memory_budget asks."""

    selective_ac_option: Annotated[
        str, BeforeValidator(str), Field(pattern="^(op(/[1-9][0-9]*)?|products|[1-9][0-9]*)$")
    ] = "2"
    """With mode selective: k recomputes every k-th layer; op keeps attention, communication, half
    the wide matrix products; products keeps all products, of experts' every second; op/4 does what
    op does in every 4th layer, and what products does in the others."""

    memory_budget: float = Field(default=0.5, ge=0, le=1)
    """With mode memory_budget: share of the activations that torch.compile may keep."""

    offload: bool = False
    """Keep the layers' activations in CPU memory; with mode full these are their inputs."""

    offload_share: float = Field(default=1.0, gt=0, le=1)
    """With offload: share of each layer's activations that is kept there, by bytes, at most."""

    mlp_chunks: PositiveInt = 1
    """Compute feed-forward blocks in so many pieces of the sequence, one after the other, and again
    in the backward pass: for rows whose widest activations do not fit."""


class CompileConfig(Section):
    """Whether torch.compile and CUDA graphs make the model faster."""

    enable: bool | None = None
    """Compile each layer. Unset: on GPUs, unless a zero-bubble pipeline cannot."""

    cuda_graphs: bool | None = None
    """Record the passes and the update of a step once, as CUDA graphs, and replay them, which
    spares the host's time. Unset: where one GPU trains a compiled model so small that it would wait
    for the host, by pretrain or sft."""


class Float8Config(Section):
    """Matrix products of layers and experts in 8-bit floats; needs torchao and a recent GPU."""

    enable_float8_linear: bool = False
    """Compute the linear layers, and the experts of mixtures, that gain by it in float8; the head
    stays as it is."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """What shares a scale: a whole tensor (tensorwise, the fastest and the default), or each row
    and column (rowwise, more exact, and of experts always); rowwise_with_gw_hp also leaves
    gradients of weights to bfloat16."""

    filter_fqns: Names = ()
    """Layers that are left out: parts of their names, or patterns, such as attn or layers.0;
    experts leaves out those of mixtures."""

    filter_small: bool = True
    """Leave out layers that are too small to gain by float8, and experts that are narrow or get few
    tokens."""

    enable_fsdp_float8_all_gather: bool = False
    """Send sharded weights in float8, which halves that traffic; only with recipe tensorwise."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights that are sent in float8 at once after each step."""

    emulate: bool = False
    """Compute float8's values with products of full precision: slow, for tests and CPUs."""

    scaling_type_input: Literal["dynamic", "delayed"] = "dynamic"
    """Scaling of the inputs; dynamic is the only one left."""

    scaling_type_weight: Literal["dynamic", "delayed"] = "dynamic"
    """Scaling of the weights; dynamic is the only one left."""

    scaling_type_grad_output: Literal["dynamic", "delayed"] = "dynamic"
    """Scaling of the gradients; dynamic is the only one left."""


class CheckpointConfig(Section):
    """What is saved for resuming, and when; the final model is exported to hf/ in any case."""

    enable_checkpoint: bool = True
    """Save checkpoints, and resume from the newest."""

    folder: str = "checkpoint"
    """Folder of the checkpoints inside job.dump_folder."""

    interval_type: Annotated[Literal["steps", "seconds"], other_spellings(step="steps")] = "steps"
    """Unit of checkpoint.interval."""

    interval: PositiveInt = 500
    """Steps or seconds between two checkpoints."""

    model_weights_only: bool = False
    """Save only the weights in the last checkpoint; it cannot be resumed from."""

    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the exported model and of a last checkpoint of weights only."""

    create_seed_checkpoint: bool = False
    """Save the initial weights as step-0 and stop."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints while training goes on; pinned memory is faster and takes more CPU
    memory."""

    keep_latest_k: NonNegativeInt = 0
    """Checkpoints to keep, at least 2; 0 keeps all."""

    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss."""

    load_step: int = Field(default=-1, ge=-1)
    """Step of the checkpoint to resume from; -1 means the newest."""

    initial_load_path: Path | None = None
    """Folder of a checkpoint whose weights a new run starts from."""

    hf_upload_enabled: bool = False
    """Send models to the Hugging Face Hub, with the token that HF_TOKEN holds or hf auth login
    keeps. An upload that fails is reported, and the run goes on."""

    hf_repo_base_name: Annotated[str, Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)?$")] | None = None
    """Repository that models are sent to, as organisation/name. If it does not exist, a public one
    is made; make it yourself if it is to be private."""

    hf_upload_when: Literal["checkpoint", "end"] = "checkpoint"
    """Upload after each checkpoint and at the end, or only at the end."""

    hf_upload_format: Literal["hf", "dcp"] = "hf"
    """What is sent after a checkpoint: the model, exported as the final one is, or the checkpoint
    itself."""

    hf_upload_background: bool = True
    """Train on while a checkpoint is sent; one that is due in the meantime is not sent."""


class MetricsConfig(Section):
    """What is reported while training."""

    log_freq: PositiveInt = 10
    """Steps between two reports."""

    enable_tensorboard: bool = True
    """Write the metrics for TensorBoard."""

    disable_color_printing: bool = False
    """Print without colours."""

    save_tb_folder: str = "tb"
    """Folder of the TensorBoard files inside job.dump_folder."""

    rank_0_only: bool = True
    """Only rank 0 reports; false lets every rank write its own metrics."""

    router: bool = False
    """Report the load of each expert of a mixture, how far the largest is above the mean, and the
    entropy of routers, by layer. Layers with experts are not compiled as a whole then."""

    attention: NonNegativeInt = 0
    """Steps between two looks at attention sinks, the sparsity of attention and the size of hidden
    states on held-out rows, by layer, as lacuna inspect tells them. 0: never."""

    enable_wandb: bool = False
    """Send the metrics to Weights & Biases; needs the wandb package."""


class ProfilingConfig(Section):
    """Where time and memory go."""

    enable_profiling: bool = False
    """Record traces with torch's profiler."""

    save_traces_folder: str = "profile_trace"
    """Folder of the traces inside job.dump_folder."""

    profile_freq: PositiveInt = 10
    """Steps between two traces."""

    enable_memory_snapshot: bool = False
    """Record snapshots of the GPU's memory."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots inside job.dump_folder."""


class CommConfig(Section):
    """How long ranks wait for each other."""

    init_timeout_seconds: WholeSeconds = 300
    """Longest wait until the first step is done, in seconds."""

    train_timeout_seconds: WholeSeconds = 100
    """Longest wait after the first step, in seconds."""

    save_timeout_seconds: WholeSeconds = 7200
    """Longest wait for checkpoints written or read, and for news between steps, in seconds."""

    trace_buf_size: NonNegativeInt = 20000
    """Collective operations that torch's flight recorder remembers; 0 turns it off."""


class MemoryEstimationConfig(Section):
    """Whether the run fits, without running it."""

    enabled: bool = False
    """Print the memory estimate and stop."""

    disable_fake_mode: bool = False
    """Not available: the estimate is computed from shapes, nothing runs that could be faked."""

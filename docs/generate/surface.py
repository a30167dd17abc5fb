"""The documented interface of stages 0 to 3, accelerator, builders, comm and the launcher on one host, line by line.

The areas are the pages of DeepSpeed's API documentation. Engine methods, modules of features and configuration keys
have tables of their own, in `deepspeed/compatibility`.
"""

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """`State` says whether a documented name works, works differently, or is not here yet."""

    WORKS = "works"
    DIFFERS = "differs"
    NOT_YET = "not yet"


@dataclass(frozen=True)
class Row:
    """One line of the page: a documented name, its state, and one sentence."""

    area: str
    name: str
    state: State
    sentence: str

    @property
    def is_address(self) -> bool:
        """Whether the name is what Python can look up, such as `deepspeed.zero.Init`."""
        return self.name.startswith("deepspeed.") and all(part.isidentifier() for part in self.name.split("."))


W, D, N = State.WORKS, State.DIFFERS, State.NOT_YET

_AREAS: dict[str, list[tuple[str, State, str]]] = {
    "Setup and launcher": [
        ("deepspeed.initialize", D, "Models that divide themselves need `mpu`."),
        (
            "deepspeed.init_distributed",
            W,
            "gloo, the accelerator's library, those of extensions; MPI discovery with the extra `mpi`.",
        ),
        ("deepspeed.add_config_arguments", W, "`--deepspeed`, `--deepspeed_config`."),
        ("deepspeed.add_tuning_arguments", W, "The arguments of the learning rate schedules."),
        (
            "deepspeed.DeepSpeedConfig",
            D,
            "An unknown key is a warning, or an error with `DS_CONFIG_STRICT=1`; a known one that is mistyped (at "
            "the top level by one letter) or stands in another section is an error. A section's key at the top level "
            "is a warning that names the section.",
        ),
        (
            "numbers and truth values in quotes",
            D,
            'Taken where DeepSpeed takes them (`"stage": "2"`): in `zero_optimization`, `fp16`, `bf16`, `compile`, '
            "`tensor_parallel`, `hybrid_engine`, `comms_logger`, `timers`, monitors' sections and `init_inference`. "
            'Elsewhere an error, where DeepSpeed fails later (`"train_batch_size": "8"`, `"lr": "1e-4"`), or takes '
            '"false" for true. true is no number anywhere; DeepSpeed takes it for 1 in those sections.',
        ),
        (
            "steps_per_print",
            D,
            "0 and less are errors; DeepSpeed fails in the first step with 0, and prints each step with -1. Write null "
            "to print none.",
        ),
        (
            "watch",
            W,
            "A section of this project's own: ranks compare weights and times, and count faults of devices.",
        ),
        (
            "elasticity of version 0.2",
            D,
            "A number of ranks that does not fit gets a batch of its own, as in DeepSpeed, with a warning; where even "
            "that exceeds the limit it is an `ElasticityIncompatibleWorldSize`, and DeepSpeed gives a batch of 0. "
            "Valid numbers are of data-parallel ranks: with `model_parallel_size` above 1 DeepSpeed compares all ranks "
            "with them, and refuses numbers that fit.",
        ),
        ("zero_optimization.overlap_comm", D, "True by default at every stage; DeepSpeed has false at 0 to 2."),
        (
            "zero_optimization: allgather_bucket_size, reduce_scatter, contiguous_gradients, round_robin_gradients",
            D,
            "Accepted without effect: the communication backend chooses.",
        ),
        (
            "optimizer.params of Muon",
            D,
            "`torch_adam` and `adam_w_mode` are refused. At every stage matrices are orthogonalized once per step, by "
            "one rank each. `per_head_muon` reads the `config` nearest to a layer; fused projections stay one matrix "
            "unless `weight.muon_num_heads` is set. Tensor-parallel models are refused.",
        ),
        ("deepspeed.DeepSpeedConfigError", W, "It is `deepspeed.errors.ConfigError`, also a `ValueError`."),
        ("deepspeed.ADAM_OPTIMIZER", W, "Its name in the configuration; `LAMB_OPTIMIZER` likewise."),
        ("deepspeed.runtime.constants", D, "Keys and defaults of the configuration; not the `SPARSE_*` details."),
        ("deepspeed.OnDevice", D, "Sets torch's default device and dtype; an explicit `dtype=` is kept."),
        ("deepspeed.__version__", D, "DeepSpeed's version with a local part, `+core...`."),
        ("deepspeed.git_version_info", W, "Each name is computed when it is read."),
        ("deepspeed (launcher), one host", W, "The flags are in the page on the launcher."),
        (
            "deepspeed (launcher), several hosts",
            W,
            "By pdsh, ssh, Open MPI, MPICH, or a plugin's; Intel MPI, MVAPICH and Slurm have not run yet.",
        ),
        (
            "--elastic_training, --min_elastic_nodes, --max_elastic_nodes",
            D,
            "By ssh, or by --no_ssh on each host; `--max_restarts` is ours. DeepSpeed starts each host by pdsh.",
        ),
        ("--no_ssh_check", D, "Without it every host is reached before the start, not the first one only."),
        ("--dry_run", D, "Prints the command for each host; DeepSpeed has no such flag."),
        ("deepspeed.pt, deepspeed --version", W, "The launcher's other name, and its version."),
        ("--save_pid", W, "`/tmp/<pid>.ds`, removed at the end."),
        (
            "errors of a job under the launcher",
            D,
            "The cause once and last, a ConfigError in one line; DeepSpeed prints every rank's traceback.",
        ),
        ("SIGUSR1, SIGUSR2, SIGQUIT to the launcher", D, "Passed on to the ranks."),
        ("ds_report, dsr, python -m deepspeed.env_report", W, "Accelerators, ops, versions and paths."),
        ("deepspeed.env_report.main", W, "`cli_main` too; `op_report` and `debug_report` are not there."),
        (
            "ds_ssh",
            D,
            "Runs a command on every host of a hostfile, by pdsh if there is one, else by ssh; the exit code is the "
            "largest of the hosts'.",
        ),
        (
            "ds_io, ds_nvme_tune",
            D,
            "With `--folder` or `--nvme_dir`, `--io_size`, `--loops`, `--read`, `--write`, `--no_read`, `--no_write` "
            "and the names of the `aio` section; not `--gpu`, `--use_gds`, `--multi_process`, `--sweep_config` and "
            "`--log_dir`.",
        ),
        ("ds_elastic", W, "`-c` and `-w`; the batch, the valid numbers of ranks and the micro-batch."),
        (
            "ds_bench",
            D,
            "The options of DeepSpeedExamples' communication benchmarks, with `--num_gpus`, `--size`, `--json`, "
            "`--plot`, `--reduce-scatter`; one size is `2**maxsize` bytes unless `--mem-factor` is given. The command "
            "of 0.19.6 lacks the module that it imports.",
        ),
    ],
    "Training": [
        ("deepspeed.DeepSpeedEngine", W, "Its methods are listed below."),
        ("deepspeed.DeepSpeedEngine.forward", W, "Attributes that the engine lacks are the module's."),
        (
            "deepspeed.DeepSpeedEngine.backward",
            W,
            "`scale_wrt_gas` and `retain_graph` included; also for tensors with their gradients (`gradient=`).",
        ),
        (
            "several backward calls before one step",
            D,
            "Their gradients add up at every stage, as in plain torch; DeepSpeed keeps those of the last one at stages "
            "1 and 2. Stage 0 refuses a second one that does not pass through the engine's outputs, such as one inside "
            "the module's own forward: add the losses up there, or use stage 1.",
        ),
        (
            "engine.train, engine.eval",
            D,
            "They return the engine, as those of a torch module do; DeepSpeed's return None.",
        ),
        (
            "engine.loss_scale, engine.dynamic_loss_scale",
            D,
            "Without fp16 1.0 and False, as losses are not scaled; DeepSpeed answers 0.0 and True.",
        ),
        (
            "engine.get_type",
            D,
            "What groups have as `type`, so `[]` where they have none; DeepSpeed gives 0.0 for each of them.",
        ),
        (
            "param.grad between backward and step",
            D,
            "Stage 0 shows it and takes changes, after the last backward of an accumulation; before that, and in "
            "stages 1 to 3, it is None: use `safe_get_full_grad` and `safe_set_full_grad`. So `module.zero_grad()` and "
            "`param.grad = None` drop nothing there: use `engine.zero_grad()`.",
        ),
        (
            "parameters without a gradient in a step",
            D,
            "They stay as they are, as with a torch optimizer; DeepSpeed updates them with a zero gradient, so that "
            "weight decay and momentum act.",
        ),
        (
            "register_post_accumulate_grad_hook of a parameter",
            W,
            "Registered before `initialize` or after it, at every stage: `param.grad` is that of this backward of this "
            "rank, and what the hook makes of it is reduced.",
        ),
        ("two engines on one module", D, "A second one that trains is refused until the first is destroyed."),
        ("deepspeed.DeepSpeedEngine.step", W, "One optimizer step at an accumulation boundary."),
        ("deepspeed.DeepSpeedEngine.is_gradient_accumulation_boundary", W, "As documented."),
        (
            "deepspeed.DeepSpeedEngine.coalesce_grad_reduction",
            W,
            "At stage 0 too. Several blocks in one step add up; DeepSpeed keeps the last one's gradients.",
        ),
        ("deepspeed.DeepSpeedEngine.no_sync", W, "Stages 0 and 1; stages 2 and 3 refuse it, as documented."),
        ("deepspeed.DeepSpeedEngine.compile", W, "`torch.compile` of the module; DeepCompile's schedule is refused."),
        ("deepspeed.runtime.compiler.is_compile_supported", W, "`disable`, `enable`, `is_compiling` too."),
        (
            "deepspeed.runtime.dataloader.RepeatingLoader",
            D,
            "Also in `deepspeed.utils`. Each epoch of a loader that shuffles has another order, as torch asks for by "
            "`set_epoch`; DeepSpeed repeats that of the first one.",
        ),
        ("deepspeed.utils.logger", W, "With `log_dist`; `DS_LOG_LEVEL` sets the level."),
    ],
    "Helpers": [
        (
            "deepspeed.runtime.utils",
            D,
            "The names in old-addresses.md. `partition_uniform` and `partition_balanced` refuse more parts than items.",
        ),
        (
            "deepspeed.utils",
            D,
            "The names in old-addresses.md; not the functions that link parameters with their master weights, such as "
            "`link_hp_params`.",
        ),
        (
            "deepspeed.utils.debug, .types, .bwc",
            N,
            "Internal helpers of DeepSpeed. The modules are there, and what is in them raises when it is called.",
        ),
        (
            "deepspeed.utils.numa",
            W,
            "`get_numactl_cmd` binds cores; memory follows by the kernel's first-touch policy.",
        ),
        (
            "deepspeed.runtime.torch_autocast",
            D,
            "`autocast_if_enabled` and `get_default_autocast_lower_precision_modules`. Gradients of all modules are "
            "reduced in one type, so that no parameter has one of its own.",
        ),
        (
            "deepspeed.launcher.constants, .multinode_runner, deepspeed.launcher.runner.parse_args",
            N,
            "Internals of DeepSpeed's launcher; the flags are the interface, as "
            "`python -m deepspeed.launcher.launch` says.",
        ),
        ("deepspeed.ops.op_builder.cpu_adam and the like", N, "Import the builder from `deepspeed.ops.op_builder`."),
        (
            "deepspeed.ops.aio",
            D,
            "`aio_handle` with all its methods and return values; `AsyncIOBuilder().load().aio_handle` too. An error "
            "is an exception (OSError, ValueError), never a negative number. Tensors in host memory only; not "
            "`aio_read`, `aio_write`, `deepspeed_memcpy` and `gds_handle`.",
        ),
        (
            "deepspeed.utils.logging",
            W,
            "With `LoggerFactory`, `set_log_level_from_string`, `print_json_dist` and the others. Loggers write to "
            "stderr, and the rank is the environment's.",
        ),
    ],
    "Optimizers and schedules": [
        ("deepspeed.ops.adam.FusedAdam", W, "Kernels come from the extension, else torch."),
        ("deepspeed.ops.adam.DeepSpeedCPUAdam", W, "Kernels come from ds-ext-cpu, else torch."),
        ("deepspeed.ops.adagrad.DeepSpeedCPUAdagrad", W, "Kernels come from ds-ext-cpu, else torch."),
        ("deepspeed.ops.lion.FusedLion", W, "`DeepSpeedCPULion` too."),
        ("deepspeed.ops.lamb.FusedLamb", W, "Kernels come from the extension, else torch."),
        (
            "deepspeed.runtime.fp16.onebit.OnebitAdam",
            D,
            "And `OnebitLamb`, `ZeroOneAdam`, at stage 0. Any library of collectives serves, whatever "
            "`comm_backend_name` says; every parameter has a scale of its own; `bias_correction` acts where it is "
            "given; elements without a second moment stay; a checkpoint has the rounding errors, for as many ranks.",
        ),
        ("deepspeed.runtime.lr_schedules.LRRangeTest", W, "As documented."),
        ("deepspeed.runtime.lr_schedules.OneCycle", W, "As documented."),
        ("deepspeed.runtime.lr_schedules.WarmupLR", W, "As documented."),
        ("deepspeed.runtime.lr_schedules.WarmupDecayLR", W, "As documented."),
        ("deepspeed.runtime.lr_schedules.WarmupCosineLR", W, "As documented."),
        (
            "deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler",
            W,
            "And the section `curriculum_learning`: a forward that trains gets `curriculum_seqlen`. Kept here: later "
            "versions of DeepSpeed removed the section.",
        ),
        (
            "deepspeed.runtime.data_pipeline.data_sampling.data_sampler.DeepSpeedDataSampler",
            D,
            "And `data_efficiency.data_sampling.curriculum_learning`. Lists of samples are in memory, not in "
            "`data_cluster_path`; the generator that draws is in checkpoints; a small group is gone through again.",
        ),
        (
            "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer",
            D,
            "And `DistributedDataAnalyzer`. The index files are DeepSpeed's; the workers' own files between map and "
            "reduce are not.",
        ),
        (
            "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDataset",
            W,
            "And `MMapIndexedDatasetBuilder`, `make_dataset`, `make_builder`. `lazy` and `cached` are not read.",
        ),
        (
            "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr."
            "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
            D,
            "And the section `data_efficiency.data_sampling.dynamic_batching`. The last sample is in a pack, which "
            "DeepSpeed leaves out; `get_last_lr` answers the scaled rates.",
        ),
        (
            "deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd",
            W,
            "And the section `data_efficiency.data_routing.random_ltd`. Not with tensor or sequence parallelism, nor "
            "with a `PipelineModule`.",
        ),
        (
            "deepspeed.runtime.progressive_layer_drop.ProgressiveLayerDrop",
            W,
            "And the section `progressive_layer_drop`: a forward that trains gets `progressive_layer_drop` and "
            "`pld_theta`. Kept here too. Not with a `PipelineModule`.",
        ),
    ],
    "ZeRO": [
        ("stages 0, 1 and 2", W, "The same losses as plain torch."),
        (
            "stage 3",
            D,
            "The same losses as plain torch. MiCS and hpZ act; a parameter is reduced in the bucket of its module.",
        ),
        (
            "zero_quantized_weights, _gradients, _nontrainable_weights",
            D,
            "Weights at stage 3, gradients at stages 1 to 3; else they raise. Blocks of 256 elements; gradients by one "
            "all-to-all, not one within nodes and one between them.",
        ),
        (
            "zeropp_loco_param",
            D,
            "Errors in int8, on every rank. After a load, a skipped step and a change of the loss scale they begin at "
            "zero. Without zero_quantized_gradients it raises.",
        ),
        ("leaf modules, `leaf_module`", W, "By class, name or suffix, and by `set_z3_leaf_modules`."),
        (
            "offload of optimizer states to host memory",
            W,
            "Stages 1, 2 and 3. At stage 0 the section has no effect, and a warning says so. `ratio` is met in whole "
            "buckets.",
        ),
        ("sparse_gradients", D, "Right, with `SparseAdam` too; gradients are reduced as dense tensors."),
        (
            "offload of optimizer states to NVMe",
            D,
            "Stages 1, 2 and 3, master weights and reduced gradients too; swap files go with the run. Needs the op "
            "`async_io`. Not with MiCS. `fast_init` has nothing to act on.",
        ),
        (
            "offload of parameters to host memory",
            D,
            "With the optimizer offloaded or not. `ratio` is refused, and so are int8 shards of frozen parameters. "
            "Below stage 3 the section has no effect, and a warning says so.",
        ),
        (
            "offload of parameters to NVMe",
            D,
            "On any accelerator. Needs the op `async_io`. Buffers take what the largest shard needs, up to "
            "`buffer_size`; the first shards, up to `max_in_cpu` elements, stay in memory.",
        ),
        (
            "engine.offload_states, engine.reload_states",
            D,
            "Stages 1, 2 and 3. What needs the states meanwhile raises. In fp32 without offload `hp_params` are the "
            "model's weights.",
        ),
        (
            "deepspeed.zero.Init",
            D,
            "Below stage 3 it raises, since nothing would be sharded. What a parent's `__init__` does in place stays. "
            "`remote_device` acts.",
        ),
        ("deepspeed.zero.GatheredParameters", W, "Parameters stay whole around a forward inside it."),
        (
            "deepspeed.zero.register_external_parameter",
            W,
            "Other modules' reads are seen without it too.",
        ),
        (
            "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
            W,
            "Documented keys are its attributes; with `ZeroStageEnum`.",
        ),
        ("deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig", W, "As documented."),
        ("deepspeed.zero.TiledLinear", W, "`TiledLinearReturnBias` too."),
        (
            "deepspeed.zero.MiCS_Init",
            D,
            "Parameters are sharded over all ranks until `initialize`, then over the shard groups.",
        ),
        (
            "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload",
            D,
            "The hooks on the module; made by `initialize` only.",
        ),
        (
            "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
            D,
            "The class of all stages.",
        ),
        ("deepspeed.runtime.zero.partition_parameters.is_zero_param", W, "As documented."),
        ("deepspeed.utils.set_z3_leaf_modules", W, "Stage 3 gathers a marked module in one piece."),
        (
            "safe_get_full_optimizer_state, safe_get_local_optimizer_state",
            D,
            "None for a state that the optimizer does not have, at every stage; DeepSpeed raises ValueError at stages "
            "1 and 2, and KeyError at stage 3. Setting one is a `StateError`.",
        ),
        ("deepspeed.utils.safe_get_full_fp32_param", W, "`..._grad` and `..._optimizer_state`, get and set, too."),
        (
            "deepspeed.utils.safe_get_local_fp32_param",
            W,
            "`..._grad`, `..._optimizer_state`, get and set; all stages.",
        ),
    ],
    "Checkpoints": [
        ("deepspeed.DeepSpeedEngine.save_checkpoint", W, "DeepSpeed's file layout."),
        (
            "deepspeed.DeepSpeedEngine.load_checkpoint",
            D,
            "Takes DeepSpeed 0.19's files of stages 0 to 3, and those of torch.distributed.checkpoint; never unpickles "
            "arbitrary objects. The client state has the caller's own keys only.",
        ),
        (
            "checkpoints for DeepSpeed 0.19",
            D,
            'With `checkpoint: {"format": "deepspeed"}`, stages 1 to 3; fp16 not at stage 3.',
        ),
        (
            'checkpoint: {"format": "dcp"}',
            N,
            "Files of torch.distributed.checkpoint have no place for `client_state` and no checksums: "
            "`ds_ckpt convert --to dcp` makes them of a saved tag, and `load_checkpoint` takes them as they are.",
        ),
        (
            "asynchronous saves to a URL",
            N,
            "The writer process commits a folder by a rename, which object stores do not have: a save to a URL waits "
            "until all is written. Save to a folder and copy it.",
        ),
        (
            "tags of checkpoints",
            D,
            "No slash, control character, leading dot or white space at an end; at most 200 bytes.",
        ),
        ("ds_config in checkpoint files", D, "Secrets are replaced by `<redacted>`."),
        ("deepspeed.DeepSpeedEngine.save_16bit_model", W, "`save_fp16_model` too."),
        (
            "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
            W,
            "With `lazy_mode` weights stay in the files until `contiguous()` is called.",
        ),
        ("deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint", W, "As documented."),
        ("deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict", W, "As documented."),
        (
            "universal checkpoints, ds_to_universal",
            W,
            "Both are loaded, and made, which only DeepSpeed needs: any number of ranks and any stage loads a "
            "checkpoint here as it is. Tensor-parallel parts, pipeline stages and experts are joined as the checkpoint "
            "says itself that they were divided, or `universal_checkpoint_info` of its client state does; one with "
            "neither is refused.",
        ),
        ("deepspeed.checkpoint.utils.clone_tensors_for_torch_save", W, "As documented."),
    ],
    "Activation checkpointing": [
        ("deepspeed.checkpointing.configure", W, "Every argument acts, on the CPU too."),
        ("deepspeed.checkpointing.is_configured", W, "As documented."),
        ("deepspeed.checkpointing.checkpoint", D, "By torch.utils.checkpoint, not re-entrant."),
        ("deepspeed.checkpointing.CheckpointFunction", W, "The re-entrant form."),
        ("deepspeed.checkpointing.reset", W, "Drops the contiguous buffers."),
        (
            "random state tracker of model parallelism",
            W,
            "In `deepspeed.checkpointing`, under its documented names; on the CPU as well.",
        ),
    ],
    "Monitoring and profiling": [
        ("deepspeed.monitor.monitor.MonitorMaster", W, "TensorBoard, W&B, Comet and CSV; plugins add others."),
        ("deepspeed.utils.timer.ThroughputTimer", W, "With `SynchronizedWallClockTimer`."),
        ("deepspeed.runtime.utils.see_memory_usage", W, "As documented."),
        (
            "deepspeed.profiling.flops_profiler.get_model_profile",
            D,
            "And `FlopsProfiler`. Counts by torch's formulas: products of matrices, convolutions, attention, recurrent "
            "layers; elementwise operations, which DeepSpeed adds, count as none. The tables look different.",
        ),
        (
            "deepspeed.autotuning.Autotuner",
            D,
            "Behind `deepspeed --autotuning tune` and `run`, with the same section. A number in the configuration "
            "stays as it is, that of the micro-batch too; "
            "`auto` and lists are searched, also of offload and mesh. "
            "Trials run one after the other; `model_based` has a model of its own in place of xgboost.",
        ),
        (
            "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live",
            D,
            "`..._all_cold` too; the figures are those measured here.",
        ),
        (
            "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live",
            D,
            "`..._all_cold` too; the figures are those measured here.",
        ),
    ],
    "Communication": [
        ("deepspeed.comm.all_reduce", W, "As documented, like the other collectives of torch.distributed."),
        ("deepspeed.comm.all_gather_into_tensor", W, "`reduce_scatter_tensor`, `all_to_all_single` too."),
        ("deepspeed.comm.barrier", W, "As documented."),
        (
            "deepspeed.comm.log_summary",
            D,
            "It also returns the table that it prints, or with `return_dict` its numbers.",
        ),
        ("deepspeed.utils.comms_logging", N, "The logger is `deepspeed.comm.comm.CommsLogger`."),
        ("deepspeed.comm.comm.CommsLogger().comms_dict", W, "It has DeepSpeed's shape."),
        ("deepspeed.comm.initialize_mesh_device", W, "A mesh of data and sequence parallel ranks."),
        ("compressed collectives", D, "`deepspeed.comm.compressed.average`; not the classes of `runtime.comm`."),
    ],
    "Accelerator and builders": [
        ("deepspeed.accelerator.get_accelerator", W, "Devices come from extensions; `DS_ACCELERATOR` names one."),
        (
            "deepspeed.accelerator.set_accelerator",
            D,
            "An object of another class is wrapped, where DeepSpeed raises; None raises.",
        ),
        ("deepspeed.accelerator.real_accelerator.ds_accelerator", D, "For reading only; None before the choice."),
        ("deepspeed.accelerator.is_current_accelerator_supported", D, "Asks whether the device is available."),
        (
            "deepspeed.accelerator.DeepSpeedAccelerator",
            W,
            "All documented methods; none is abstract, torch answers what a class omits.",
        ),
        ("get_op_builder of an unknown name, on the CPU", D, "None; DeepSpeed returns `NotImplementedBuilder`."),
        ("Stream, Event and current_stream of the CPU", D, "Objects that do nothing; DeepSpeed returns None."),
        ("deepspeed.accelerator.<device>_accelerator", D, "The classes are in `ds_ext_<device>.accelerator`."),
        (
            "deepspeed.ops.op_builder.OpBuilder",
            W,
            "The base's lists of flags are empty; `-O3 -std=c++20` is added where a builder names neither. Compiled "
            "libraries are private to the user.",
        ),
        ("OpBuilder.cpu_arch, OpBuilder.simd_width", D, "Portable flags, no `-march=native`."),
        ("deepspeed.ops.op_builder.TorchCPUOpBuilder", D, "OpenMP and portable flags."),
        ("deepspeed.ops.__compatible_ops__", D, "Computed when it is read."),
        ("deepspeed.ops.transformer.DeepSpeedTransformerLayer", N, "`DeepSpeedTransformerConfig` neither."),
        ("deepspeed.ops.sparse_attention", N, "Use torch.nn.attention.flex_attention."),
    ],
    "Compression": [
        (
            "deepspeed.compression.compress.init_compression",
            D,
            "Layers become compressing ones in place. In fp32 weights are rounded in the forward, whatever "
            "`quantize_weight_in_forward` says, and bits fall by `quantization_period` there too. Scores begin as "
            "magnitudes. `snip_momentum` needs no package, and has a cubic schedule. Divided layers (`mpu`) are "
            "refused; a pattern that finds nothing is an error.",
        ),
        (
            "deepspeed.compression.compress.redundancy_clean",
            D,
            "Layers are ordinary ones again, except those with quantized inputs.",
        ),
        ("deepspeed.compression.compress.student_initialization", W, "Shapes are compared first."),
        (
            "deepspeed.compression.scheduler.compression_scheduler",
            D,
            "The engine's moves before each forward to the steps that it counts, which a checkpoint has.",
        ),
        ("deepspeed.compression.basic_layer.LinearLayer_Compress", W, "And three more."),
        (
            "deepspeed.runtime.quantize.Quantizer",
            D,
            "Mixture of Quantization in a loop of one's own; the engine's is the section `quantize_training`. 0 stands "
            "for symmetric and nearest.",
        ),
        (
            "deepspeed.runtime.eigenvalue.Eigenvalue",
            D,
            "A value that is not finite counts as the largest. The random vectors are those of a generator of its own.",
        ),
    ],
    "Parallelism and inference": [
        (
            "deepspeed.PipelineModule",
            W,
            "Parameters are named by the number of their layer. All parameters of a module that stages share are tied, "
            "not only `tied_weight_attr`. Also `interleave`, and `profile` with `sample_inputs`. Of cuts whose "
            "heaviest stage is as light as can be, the most even one; rarely another one than DeepSpeed's.",
        ),
        (
            "deepspeed.PipelineEngine",
            W,
            "ZeRO 0 to 3. All ranks agree on a batch before its first micro-batch runs. What `initialize` returns for "
            "`training_data` is the loader, which the engine repeats; give it to `RepeatingLoader` to call `next`.",
        ),
        ("deepspeed.runtime.pipe.schedule", W, "Also interleaved and zero-bubble schedules: `pipeline.schedule`."),
        ("deepspeed.runtime.pipe.topology", W, "Axes of a pipeline's topology are pipe, data and model."),
        (
            "deepspeed.sequence.layer.DistributedAttention",
            W,
            "Uneven and grouped heads too; `sp_stream` is accepted without effect.",
        ),
        (
            "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF",
            D,
            "`register_with_transformers` and `unregister_from_transformers`, on the CPU too; sdpa, eager and flash "
            "attention, sliding windows and padding. Packed documents and linear attention are refused.",
        ),
        (
            "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter",
            W,
            "A batch without `position_ids` gets them, as its documentation after 0.19.6 says; 0.19.6 raises.",
        ),
        (
            "deepspeed.moe.layer.MoE",
            W,
            "Dispatch by sorting, without capacity masks; `expert` may be a function that makes one. Random choices "
            "(`use_rts`, `top2_2nd_expert_sampling`) are made in training only; `use_tutel` warns. "
            "`enable_expert_tensor_parallelism` divides the experts itself.",
        ),
        (
            "expert_parallel (AutoEP)",
            W,
            "Experts are found by their parameters; keys that name routers and experts are refused with `enabled`.",
        ),
        (
            "deepspeed.moe.sharded_moe.TopKGate",
            D,
            "Returns a `Routing`, not masks, which `top1gating`, `top2gating` and `topkgating` (k from 3) return.",
        ),
        ("deepspeed.moe.mappings.drop_tokens", W, "`gather_tokens` too, over the tensor-parallel ranks."),
        ("deepspeed.moe.utils", W, "`has_moe_layers` gives the number of experts of the first layer."),
        ("deepspeed.tp_model_init", W, "Also uneven heads, and stage 3."),
        (
            "tensor_parallel: autotp_size, tp, preset_model, partition_config, tp_grain_size, vocab_parallel_lm_head",
            D,
            "`preset_model` is a model type of transformers; `tp_overlap_comm` is accepted without effect.",
        ),
        (
            "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP",
            W,
            "`TiledFusedLogitsLoss` and `sequence_tiled_compute` too; `compute_params` may be None, as gradients reach "
            "every parameter. Tiles are computed again in the backward.",
        ),
        (
            "deepspeed.sequence.fpdt_layer.FPDT_Attention",
            N,
            "`deepspeed.sequence.blockwise.ChunkedAttention` keeps chunks in host memory.",
        ),
        ("deepspeed.sequence.loss.vocab_sequence_parallel_cross_entropy", W, "As documented."),
        (
            "deepspeed.init_inference",
            W,
            "Divided over ranks, fused blocks, weights in 8, 6 and 4 bits, checkpoints by JSON.",
        ),
        (
            "deepspeed.linear.OptimizedLinear",
            D,
            "`Init`, `init_lora` and the classes of layers too. Stored weights are floating, in 8 or 6 bits; stage 3 "
            "shards and offloads them, so `base_weight_sharding` above 1 and `offload` are refused.",
        ),
        (
            "deepspeed.ops.fp_quantizer.FP_Quantize",
            W,
            "`matmul_fp8` too; by torch's operators, on every device.",
        ),
        (
            "deepspeed.inference.quantization (weight_quantization)",
            W,
            "Linear layers, embeddings, transformers' Conv1D and experts. Layers made for `quantized_initialization` "
            "have no values until a checkpoint is loaded; without stage 3 `from_pretrained` runs inside "
            "`QuantizationContext`.",
        ),
        (
            "deepspeed.inference.v2.InferenceEngineV2",
            D,
            "Made from a model of transformers or the engine of `init_inference`, for families that have fused blocks. "
            "`flush` of what is not tracked is an error; `serialize` writes plain transformers.",
        ),
        (
            "deepspeed.DeepSpeedHybridEngine",
            W,
            "`hybrid_engine.enabled` makes one. Tokens are generated over the tensor-parallel ranks of training.",
        ),
        (
            "deepspeed.utils.groups",
            W,
            "A view of the mesh of the engine built last, or of the one made here before: data, sequence, model and "
            "expert groups.",
        ),
        ("deepspeed.utils.groups.initialize(ep_size)", W, "Also `set_mesh`, `set_mpu`, which later engines use."),
        ("deepspeed.initialize(mpu)", W, "Gradients are averaged over its data- and sequence-parallel ranks."),
        ("deepspeed.initialize(mesh_param)", W, "Also a mapping of axes: dp, sp, tp, pp."),
    ],
}

ROWS = [Row(area, name, state, sentence) for area, rows in _AREAS.items() for name, state, sentence in rows]

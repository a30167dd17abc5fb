"""Save training to disk and load it again, in DeepSpeed's directory layout.

    <save_dir>/latest                                               the tag of the newest whole checkpoint
    <save_dir>/zero_to_fp32.py                                      writes plain fp32 weights, without this package
    <save_dir>/<tag>/index.json                                     sizes and checksums of the files beside it
    <save_dir>/<tag>/mp_rank_00_model_states.pt                     module, scheduler, counters, the user's client state
    <save_dir>/<tag>/layer_03-model_states.pt                       a layer of a pipeline; see `saved_states.py`
    <save_dir>/<tag>/layer_0_expert_2_mp_rank_00_model_states.pt    an expert
    <save_dir>/<tag>/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt   one rank's shard of the optimizer

This package takes and returns plain dicts: it knows neither the engine nor the config. It may import `zero`, `moe`,
`pipe`, `plugins` and below, and torch. The names below are loaded when they are first used: the writer process needs no
torch. Read next: `checkpointer.py`, `save.py` and `reader.py` (the order of a save and of a load), then `layout.py`
(names), `store.py` (where bytes go, and how a folder replaces its former version), `stores.py` (the built-in stores),
`durable.py` (how a file is written), `background.py` (asynchronous saving), `index.py` (sizes and checksums, and their
comparison; `tags.py` lists tags with them), `consolidate.py`. Reading the saves of other ranks, stages and programs:
`saved_states.py`, `tensors.py`, `reader.py` (`dcp_file.py`), `deepspeed_files.py`; writing for other programs:
`convert.py`, `saved_run.py`, `other_formats.py`.
"""

from deepspeed._forward import forward

__all__ = [
    "MODEL_STATE_KEYS",
    "Checkpointer",
    "IndexedStore",
    "LoadedCheckpoint",
    "SavedParts",
    "StatesByName",
    "Store",
    "TorchStore",
    "check_new_tag",
    "clone_tensors_for_torch_save",
    "create_store",
    "save_state_dict_file",
    "validate_tag",
]

_MODULES = {
    "deepspeed_files": (
        "ZERO_FILE_PREFIX FP16_ZERO_FILE_PREFIX BF16_ZERO_FILE_PREFIX OPTIM_FILE_SUFFIX MODEL_FILE_PREFIX "
        "MODEL_FILE_SUFFIX LAYER_FILE_PREFIX OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS "
        "BASE_OPTIMIZER_STATE SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARTITION_COUNT "
        "ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM PARAM_SHAPES PARAM_SLICE_MAPPINGS FROZEN_PARAM_SHAPES "
        "FROZEN_PARAM_FRAGMENTS BUFFER_NAMES DS_VERSION UNIVERSAL_CHECKPOINT_INFO "
        "UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE FP32_WEIGHT_KEY CAT_DIM "
        "VOCAB_TENSOR ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM_N_SUB_PARAMS SUB_PARAM_SHAPE "
        "VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
        "TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS "
        "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
        "PARAMETER_WITH_SUB_PARAMS EXPERT_PARAMETER_PATTERNS"
    ),
    "layout": "MODEL_STATE_KEYS",
    "checkpointer": "Checkpointer",
    "store": "IndexedStore Store",
    "load": "LoadedCheckpoint SavedParts StatesByName",
    "tags": "check_new_tag validate_tag",
    "stores": "TorchStore clone_tensors_for_torch_save create_store",
    "save": "save_state_dict_file",
    "deepspeed_checkpoint": "DeepSpeedCheckpoint",  # refuses when it is used
}
__getattr__, __dir__ = forward(
    __name__,
    {name: f"{__name__}.{module}:{name}" for module, names in _MODULES.items() for name in names.split()},
)

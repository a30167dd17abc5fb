"""Names of files and keys in DeepSpeed's checkpoints, which scripts such as Megatron-DeepSpeed import.

The keys of `universal_checkpoint_info` describe a model's parameters to DeepSpeed's converter; a client state may have
them. Our checkpoints record how their tensors are divided; for other checkpoints `deepspeed_files.py` reads these keys.
"""

from deepspeed._absent import complete

# ----- files ---------------------------------------------------------------------------------------------------------

ZERO_FILE_PREFIX = "zero_pp_rank_"
FP16_ZERO_FILE_PREFIX = "fp16_zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = "bf16_zero_pp_rank_"
OPTIM_FILE_SUFFIX = "_optim_states.pt"
MODEL_FILE_PREFIX = "mp_rank_"
MODEL_FILE_SUFFIX = "_model_states.pt"
LAYER_FILE_PREFIX = "layer_"

# ----- keys of optimizer files and model files -----------------------------------------------------------------------

OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_GROUPS = "fp32_groups"
FP32_FLAT_GROUPS = "fp32_flat_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
PARAM_GROUPS = "param_groups"
GROUP_PADDINGS = "group_paddings"
PARTITION_COUNT = "partition_count"
ZERO_STAGE = "zero_stage"
CLIP_GRAD = "clip_grad"
LOSS_SCALER = "loss_scaler"
PARAM = "param"
PARAM_SHAPES = "param_shapes"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
BUFFER_NAMES = "buffer_names"
DS_VERSION = "ds_version"

# ----- universal checkpoints -----------------------------------------------------------------------------------------

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
FP32_WEIGHT_KEY = "fp32"
CAT_DIM = "cat_dim"
VOCAB_TENSOR = "vocab_tensor"
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
PADDED_VOCAB_SIZE = "padded_vocab_size"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
SUB_PARAM_SHAPE = "sub_param_shape"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
EXPERT_PARAMETER_PATTERNS = "expert_parameter_patterns"

complete(__name__)

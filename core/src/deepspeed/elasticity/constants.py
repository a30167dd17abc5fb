"""Names of the keys of `elasticity`, with their defaults, under the constants that DeepSpeed gives them."""

ELASTICITY = "elasticity"
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
"""Variable in which a scheduler leaves the section as it knows it; see `ensure_immutable_elastic_config`."""

ENABLED, ENABLED_DEFAULT = "enabled", False
MAX_ACCEPTABLE_BATCH_SIZE, MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT = "max_train_batch_size", 2000
MICRO_BATCHES, MICRO_BATCHES_DEFAULT = "micro_batch_sizes", [2, 4, 6]
MIN_GPUS, MIN_GPUS_DEFAULT = "min_gpus", 1
MAX_GPUS, MAX_GPUS_DEFAULT = "max_gpus", 10000
NUM_GPUS_PER_NODE, NUM_GPUS_PER_NODE_DEFAULT = "num_gpus_per_node", 1
MODEL_PARALLEL_SIZE, MODEL_PARALLEL_SIZE_DEFAULT = "model_parallel_size", 1
MIN_TIME, MIN_TIME_DEFAULT = "min_time", 0
PREFER_LARGER_BATCH, PREFER_LARGER_BATCH_DEFAULT = "prefer_larger_batch", True
IGNORE_NON_ELASTIC_BATCH_INFO, IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT = "ignore_non_elastic_batch_info", False
VERSION, VERSION_DEFAULT = "version", LATEST_ELASTICITY_VERSION

FORMAT = """
"elasticity": {
  "enabled": true,
  "max_train_batch_size": 2000,
  "micro_batch_sizes": [2, 4, 6]
}
"""

"""Elastic training: one global batch size that works for many numbers of ranks, so that a job can change its ranks.

    compute_elastic_config(ds_config, deepspeed.__version__, world_size=6)      (9792, [32, 33, ...], 17)

Read `elasticity.py` (the choice of the batch), then `config.py` (the keys and the errors). `config/root.py` requests
the batch at `initialize`. Except for names that are loaded late, the package imports only `errors` and `log`.
"""

from deepspeed._absent import complete
from deepspeed.elasticity.config import ELASTICITY, ENABLED, ENABLED_DEFAULT
from deepspeed.elasticity.elasticity import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
    get_compatible_gpus,
    is_torch_elastic_compatible,
)

__all__ = [
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
    "get_compatible_gpus",
    "is_torch_elastic_compatible",
]

complete(__name__, elsewhere={"DSElasticAgent": "deepspeed.elasticity.elastic_agent:DSElasticAgent"})

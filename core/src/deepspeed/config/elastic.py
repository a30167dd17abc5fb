"""Whether a configuration asks for elastic batch sizes. This is what `deepspeed.elasticity` can answer already."""

from typing import Any


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Whether the configuration, as a dict, enables `elasticity`."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def is_torch_elastic_compatible() -> bool:
    """Whether training can go on with another number of ranks: not in this version."""
    return False

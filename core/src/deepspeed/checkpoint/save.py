"""What goes into a save: the model file with the user's state in it, the facts for the index, plain weight files."""

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from deepspeed._version import CORE_VERSION
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, make_folder, sync_folder, write_file
from deepspeed.checkpoint.loadable import make_loadable
from deepspeed.checkpoint.location import is_remote, location
from deepspeed.checkpoint.tensors import compact
from deepspeed.errors import ConfigError


def merge_client_state(model_state: Mapping[str, Any], client_state: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a model file: the checkpoint's own keys and, beside them, the user's. Called before a save.

    `ConfigError` when a user's key is one of the checkpoint's own, or holds what could not be loaded again.
    """
    foreign = set(model_state) - layout.MODEL_STATE_KEYS
    assert not foreign, f"keys that a load would take for client state: {sorted(foreign)}"
    if not isinstance(client_state, Mapping):
        raise ConfigError(
            f"client_state: found a {type(client_state).__name__}; give a dict, which load_checkpoint returns"
        )
    taken = sorted(set(client_state) & layout.MODEL_STATE_KEYS)
    if taken:
        raise ConfigError(
            f"client_state: the keys {', '.join(map(repr, taken))} belong to the checkpoint itself. Use other names, "
            "for example with your project's name in front."
        )
    return {
        **make_loadable(dict(model_state), "the model state"),
        **make_loadable(dict(client_state), "client_state"),
    }


def describe_save(
    tag: str, model_state: Mapping[str, Any] | None, shard_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the index says of a save, as far as the rank knows it that has these states; see `Index.saved`."""
    shard = (shard_state or {}).get("optimizer_state_dict", {})
    return {
        "tag": tag,
        "at": datetime.now(timezone.utc).isoformat(),
        "ds_core": CORE_VERSION,
        "global_steps": (model_state or {}).get("global_steps"),
        "zero_stage": shard.get("zero_stage", 0),
    }


def save_state_dict_file(state: Mapping[str, Any], path: str | Path) -> None:
    """Write one plain file such as `pytorch_model.bin` with `torch.save`, atomically. For `save_16bit_model`.

    The folder is made when it is missing. `CheckpointError` when the disk refuses; a former file is then untouched.
    """
    target = location(path)
    content = compact(make_loadable(state, "the state dict"))
    try:
        if not is_remote(target):
            make_folder(target.parent)
        write_file(target, lambda file: torch.save(content, file))
        sync_folder(target.parent)
    except OSError as error:
        raise disk_error("write", target, error) from error

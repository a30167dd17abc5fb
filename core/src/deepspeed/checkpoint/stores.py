"""The store of an engine by its name: a plugin's, or the one that is built in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.location import is_remote
from deepspeed.checkpoint.object_store import ObjectStore
from deepspeed.checkpoint.store import Store
from deepspeed.checkpoint.torch_store import TorchStore
from deepspeed.errors import ConfigError
from deepspeed.plugins import plugin_manager

BUILT_IN = "torch"

_METHODS = ("create", "save", "wait", "commit", "discard", "load")


def built_in_store(path: Path) -> TorchStore | ObjectStore:
    """What keeps checkpoints at `path`, as `location.location` gave it."""
    return ObjectStore() if is_remote(path) else TorchStore()


def create_store(name: str, arguments: Mapping[str, Any]) -> Store:
    """The store called `name`, for one engine. Plugins are asked first, so one may replace the built-in store.

    Args:
        name: `checkpoint.store.type` of the configuration.
        arguments: `checkpoint.store.params`.

    Raises:
        ConfigError: no plugin knows the name, what it gives is no store, or the built-in store was given arguments.
    """
    where = "checkpoint.store"
    store = plugin_manager().hook.ds_checkpoint_store(name=name, arguments=dict(arguments))
    if store is None:
        if name != BUILT_IN:
            asked = ", ".join(plugin_manager().providers("ds_checkpoint_store")) or "none has stores"
            raise ConfigError(
                f"{where}.type: found {name!r}, which no plugin knows (asked: {asked}); use {BUILT_IN!r}, or install "
                "the plugin that has it"
            )
        if arguments:
            raise ConfigError(
                f"{where}.params: found {', '.join(arguments)}, and the store {BUILT_IN!r} takes none; take them out"
            )
        return TorchStore()
    missing = [method for method in _METHODS if not callable(getattr(store, method, None))]
    if isinstance(store, type) or missing:
        lacks = f"it lacks {', '.join(missing)}" if missing else "an object is expected, not the class"
        raise ConfigError(
            f"{where}.type: a plugin gave {store!r} as the store {name!r}; {lacks} (see deepspeed.checkpoint.store)"
        )
    return store  # type: ignore[no-any-return]

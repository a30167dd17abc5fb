"""What plugins hear from the engine. They observe; they cannot change the step."""

from typing import Any

from deepspeed.log import warn_once
from deepspeed.plugins.manager import plugin_manager


def notify(event: str, **values: Any) -> None:
    """Call one event hook of all plugins. One that fails is named in the log once, and training goes on."""
    for plugin, error in plugin_manager().notify(event, **values).items():
        warn_once(f"plugin {plugin!r} failed in {event}: {type(error).__name__}: {error}", (-1,))

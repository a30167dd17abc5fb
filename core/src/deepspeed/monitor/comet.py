"""`CometMonitor`: an experiment of Comet."""

from collections.abc import Sequence
from typing import Any

from deepspeed._absent import complete
from deepspeed.config.monitor import CometConfig
from deepspeed.monitor.base import Event, Monitor, as_number, is_writer

# What `comet_ml.start` is told, where the section says it; the rest is left to Comet's own defaults and environment.
_START_KEYS = ("api_key", "workspace", "project", "experiment_key", "mode", "online")


class CometMonitor(Monitor):
    """Logs metrics to one experiment, each name at most once in `samples_log_interval` samples.

    Args:
        comet_config: the section `comet`.

    Raises:
        ImportError: the package comet_ml is not installed.
        Exception: what `comet_ml.start` raises, for example without an API key.
    """

    section = "comet"

    def __init__(self, comet_config: CometConfig) -> None:
        super().__init__(comet_config)
        self.enabled = comet_config.enabled and is_writer()
        self.samples_log_interval = comet_config.samples_log_interval
        self._logged_at: dict[str, int] = {}
        self._experiment: Any = None
        if self.enabled:
            import comet_ml

            said = {name: getattr(comet_config, name) for name in _START_KEYS}
            self._experiment = comet_ml.start(**{name: value for name, value in said.items() if value is not None})
            if comet_config.experiment_name is not None:
                self._experiment.set_name(comet_config.experiment_name)

    @property
    def experiment(self) -> Any:
        """Comet's experiment, None on ranks that do not write."""
        return self._experiment

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log the events whose turn it is; steps are samples."""
        if self._experiment is None:
            return
        for name, value, step in event_list:
            last = self._logged_at.get(name)
            if last is None or step - last >= self.samples_log_interval:
                self._logged_at[name] = step
                self._experiment.log_metric(name=name, value=as_number(value), step=step)

    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None


complete(__name__)

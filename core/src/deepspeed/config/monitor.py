"""Sections for the measurements of a run (flops, collectives, times), and for the monitors that receive them:
tensorboard, wandb, comet, csv files, plugins.

None of these keys changes a result. `monitor/` implements the monitors, `comm/record.py` `comms_logger`,
`profiling/flops.py` `flops_profiler`, `profiling/timer.py` `timers`, and `zero/replicas.py` and
`engine/observers.py` `watch`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from deepspeed._absent import absent_members
from deepspeed.config.base import Flag, Float, Free, Int, LaxSection, Says, Section, Text, Texts, key, number, quiet


def _peak(value: Any) -> Any:
    if value != "measured" and (not isinstance(number(value), float | int) or value <= 0):
        raise ValueError("not a peak")
    return value


Peak = Annotated[
    float | str,
    BeforeValidator(_peak),
    Says('a number > 0 or "measured"'),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "measured"}]}),
]


class TensorBoardConfig(LaxSection):
    """`tensorboard`: event files below `output_path/job_name`. Needs the package tensorboard."""

    enabled: Flag = key(False, "Write to TensorBoard.")
    output_path: Text | None = key(None, "Folder; null: the working directory.")
    job_name: Text = key("DeepSpeedJobName", "Folder inside output_path.")


class CSVConfig(LaxSection):
    """`csv_monitor`: one file per event name below `output_path/job_name`."""

    enabled: Flag = key(False, "Write CSV files.")
    output_path: Text | None = key(None, "Folder; null: the working directory.")
    job_name: Text = key("DeepSpeedJobName", "Folder inside output_path.")


class WandbConfig(LaxSection):
    """`wandb`. Needs the package wandb; WANDB_MODE=offline works."""

    enabled: Flag = key(False, "Log to Weights & Biases.")
    group: Text | None = key(None, "Group of the run.")
    team: Text | None = key(None, "Team.")
    project: Text = key("deepspeed", "Project.")


class CometConfig(LaxSection):
    """`comet`. Needs the package comet_ml."""

    enabled: Flag = key(False, "Log to Comet.")
    samples_log_interval: Int = key(100, "Samples between two uploads of one event.", unit="samples", ge=1)
    workspace: Text | None = key(None, "Workspace; null: the account's default.")
    project: Text | None = key(None, "Project; null: COMET_PROJECT_NAME, else Comet's general one.")
    experiment_name: Text | None = key(None, "Name of the experiment.")
    experiment_key: Text | None = key(None, "Key of the experiment, 32 to 50 characters.")
    api_key: Text | None = key(None, "API key; better kept in the environment, as COMET_API_KEY.")
    online: Flag | None = key(None, "Send to the server; false: write a file to upload later.")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, "Go on with an experiment or begin one.")


@absent_members("monitor.config:DeepSpeedMonitorConfig")
@dataclass(frozen=True)
class MonitorConfig:
    """The sections of all monitors, for `MonitorMaster`; `DeepSpeedConfig.monitor_config` has this type."""

    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    comet: CometConfig = field(default_factory=CometConfig)
    csv_monitor: CSVConfig = field(default_factory=CSVConfig)
    plugins: Mapping[str, Free] = field(default_factory=dict, repr=False)  # `monitor_plugins`; may hold secrets

    def asked_for(self) -> dict[str, Section | Free]:
        """Return name -> section of every enabled monitor. A plugin's monitor is on unless `enabled` is false."""
        own: dict[str, Any] = {
            "tensorboard": self.tensorboard,
            "wandb": self.wandb,
            "comet": self.comet,
            "csv_monitor": self.csv_monitor,
        }
        asked: dict[str, Any] = {name: section for name, section in own.items() if section.enabled}
        asked.update({name: section for name, section in self.plugins.items() if section.get("enabled", True)})
        return asked

    @property
    def enabled(self) -> bool:
        """Whether any monitor is switched on."""
        return bool(self.asked_for())


class CommsLoggerConfig(LaxSection):
    """`comms_logger`: count, bytes and time of collectives; `deepspeed.comm.log_summary()` prints the table."""

    enabled: Flag = key(False, "Record every collective and point-to-point call.")
    verbose: Flag = key(False, "Print each one, on every rank.")
    prof_all: Flag = key(True, "Record all of them.")
    debug: Flag = key(False, "Add the calling function to the name.")
    prof_ops: Texts = key(list, "With prof_all false: only these.")


class FlopsProfilerConfig(Section):
    """`flops_profiler`: rank 0 counts the operations of one step, and prints them by module."""

    enabled: Flag = key(False, "Profile one step.")
    recompute_fwd_factor: Float = key(
        0.0,
        "Forward passes repeated in backward.",
        ge=0,
        support=quiet("what a backward computes again is counted when it does so"),
    )
    profile_step: Int = key(1, "Which step, by the number of steps before it.", unit="step", ge=0)
    module_depth: Int = key(-1, "Deepest level whose heaviest classes are listed; -1: all.", ge=-1)
    top_modules: Int = key(1, "How many classes of a level are listed.", ge=0)
    detailed: Flag = key(True, "Print a line per module.")
    output_file: Text | None = key(None, "File; null: standard output.")
    peak_tflops: Peak | None = key(
        None,
        'What one device does at its peak; "measured": in a matrix product. Then the profile, and each throughput line '
        "after it, have the model FLOPs utilization (MFU). DeepSpeed has no such key.",
        unit="10^12 FLOPS",
    )


class ThroughputTimerConfig(LaxSection):
    """`timers.throughput`."""

    enabled: Flag = key(True, "Measure samples per second.")
    synchronized: Flag = key(True, "Count the device's time too; false: what the host waits for.")


class TimersConfig(Section):
    """`timers`."""

    throughput: ThroughputTimerConfig = key(ThroughputTimerConfig, "The throughput timer.")


class WatchConfig(Section):
    """`watch`: checks of ranks against each other, and of their devices, during training. DeepSpeed has no such section
    and ignores it."""

    compare_weights_every: Int = key(
        0,
        "Before every so many updates, compare digests of weights that several ranks hold copies of; where the bits "
        "of a weight differ, all ranks raise, and name it and the ranks. 0: never.",
        unit="updates",
        ge=0,
    )
    slow_rank_window: Int = key(
        0,
        "After every so many steps, compare the ranks' own time per step, without waits for others; rank 0 warns of "
        "those that are slower than the median. 0: never.",
        unit="steps",
        ge=0,
    )
    slow_rank_factor: Float = key(1.25, "How many times the median the time of a slow rank exceeds.", gt=1)
    device_faults_every: Int = key(
        0,
        "After every so many steps, read the counts of faults that a rank's device has (errors of memory, slowdowns by "
        "heat); the rank warns of each that has risen. 0: never.",
        unit="steps",
        ge=0,
    )

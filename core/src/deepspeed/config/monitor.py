"""Where figures of a run go: tensorboard, wandb, comet, csv files; and what is measured: flops, exchanges, times.

None of these changes a result, so what is not there yet is reported once and training goes on.
"""

from typing import Literal

from deepspeed.config.base import Flag, Float, Int, Section, Text, Texts, key, quiet, warned

_OFF = quiet("see enabled")


def _enabled(meaning: str, who: str) -> bool:
    flag: bool = key(False, meaning, support=warned(f"{who} is not in this version; nothing is written"))
    return flag


class TensorBoardConfig(Section):
    """`tensorboard`."""

    enabled: Flag = _enabled("Write to TensorBoard.", "the TensorBoard monitor")
    output_path: Text | None = key(None, "Folder; null: the working directory.", support=_OFF)
    job_name: Text = key("DeepSpeedJobName", "Folder inside output_path.", support=_OFF)


class CSVConfig(Section):
    """`csv_monitor`."""

    enabled: Flag = _enabled("Write CSV files.", "the CSV monitor")
    output_path: Text | None = key(None, "Folder; null: the working directory.", support=_OFF)
    job_name: Text = key("DeepSpeedJobName", "Folder inside output_path.", support=_OFF)


class WandbConfig(Section):
    """`wandb`."""

    enabled: Flag = _enabled("Log to Weights & Biases.", "the wandb monitor")
    group: Text | None = key(None, "Group of the run.", support=_OFF)
    team: Text | None = key(None, "Team.", support=_OFF)
    project: Text = key("deepspeed", "Project.", support=_OFF)


class CometConfig(Section):
    """`comet`."""

    enabled: Flag = _enabled("Log to Comet.", "the Comet monitor")
    samples_log_interval: Int = key(100, "Samples between two uploads.", unit="samples", ge=1, support=_OFF)
    workspace: Text | None = key(None, "Workspace.", support=_OFF)
    project: Text | None = key(None, "Project.", support=_OFF)
    experiment_name: Text | None = key(None, "Name of the experiment.", support=_OFF)
    experiment_key: Text | None = key(None, "Key of the experiment, 32 to 50 characters.", support=_OFF)
    api_key: Text | None = key(None, "API key; better kept in the environment.", support=_OFF)
    online: Flag | None = key(None, "Send to the server.", support=_OFF)
    mode: Literal["get", "create", "get_or_create"] | None = key(None, "Go on with a run or begin one.", support=_OFF)


class CommsLoggerConfig(Section):
    """`comms_logger`."""

    enabled: Flag = _enabled("Record every collective.", "the communication logger")
    verbose: Flag = key(False, "Print each one.", support=_OFF)
    prof_all: Flag = key(True, "Record all of them.", support=_OFF)
    debug: Flag = key(False, "Add the caller to the name.", support=_OFF)
    prof_ops: Texts = key(list, "Only these.", support=_OFF)


class FlopsProfilerConfig(Section):
    """`flops_profiler`."""

    enabled: Flag = _enabled("Count operations of one step.", "the flops profiler")
    recompute_fwd_factor: Float = key(0.0, "Forward passes repeated in backward.", ge=0, support=_OFF)
    profile_step: Int = key(1, "Which step.", unit="step", support=_OFF)
    module_depth: Int = key(-1, "Depth of the printed tree; -1: all.", support=_OFF)
    top_modules: Int = key(1, "How many modules are printed.", support=_OFF)
    detailed: Flag = key(True, "Print the tree.", support=_OFF)
    output_file: Text | None = key(None, "File; null: standard output.", support=_OFF)


class ThroughputTimerConfig(Section):
    """`timers.throughput`."""

    enabled: Flag = key(True, "Measure samples per second.", support=warned("it is measured all the same"))
    synchronized: Flag = key(True, "Wait for the device before reading the clock.", support=warned("it always waits"))


class TimersConfig(Section):
    """`timers`."""

    throughput: ThroughputTimerConfig = key(ThroughputTimerConfig, "The throughput timer.")

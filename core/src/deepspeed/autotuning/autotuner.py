"""`Autotuner` searches for the fastest settings of a training command: `deepspeed --autotuning tune|run`.

The launcher calls `tune_command`. First a job collects information about the model (`trial.py`), and the planner drops
settings that cannot fit (`space.py`). A tuner chooses each next trial (`tuners.py`). Each trial is a job
(`scheduler.py`), and a row of the table (`report.py`). An interrupted search resumes where it stopped.
"""

import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from deepspeed._absent import absent_members, complete
from deepspeed._version import __version__
from deepspeed.accelerator import get_accelerator
from deepspeed.autotuning.report import LiveTable, best_of, draw, score_of, summary, value_of
from deepspeed.autotuning.scheduler import Command, ResourceManager, TrialResult, said_by
from deepspeed.autotuning.space import STAGE, ModelInfo, Space, mapped_values, read_section
from deepspeed.autotuning.trial import check_steps, write_json
from deepspeed.autotuning.tuners import MICRO_BATCH, TUNERS, Budget, Point, search
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.training import AutotuningConfig
from deepspeed.errors import ConfigError, counted, whole_number
from deepspeed.log import logger
from deepspeed.ops.op_builder.cache import locked

_PROFILE = "profile_model_info"
#: flags of transformers' Trainer, which must have the same values as the configuration
_OF_TRAINER = {
    MICRO_BATCH: "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
}


@absent_members("autotuning.autotuner:Autotuner")
class Autotuner:
    """Searches for the best configuration, and writes it.

    Args:
        args: arguments of the launcher: `user_script` and `user_args`, which contain a configuration; `num_gpus`,
            `num_nodes`, and `launcher_flags`, the launcher's flags for each trial.
        active_resources: host -> slots, from a hostfile; empty: this machine.

    Raises:
        ConfigError: there is no configuration, or its section `autotuning` is not enabled or invalid.
    """

    def __init__(self, args: Any, active_resources: Mapping[str, Sequence[int]] | None = None) -> None:
        self.args = args
        self.active_resources = active_resources or {}
        command = Command.of(args)
        self.user_config = command.read_config()
        self.autotuning_config = config = read_section(self.user_config)
        if not config.enabled:
            raise ConfigError(
                'autotuning.enabled: found false beside --autotuning; write "autotuning": {"enabled": true} into the '
                "configuration"
            )
        check_steps(config)
        self._limits = _limits(config, args)
        self.command = replace(command, flags=(*command.flags, *itertools.chain(*self._limits.items())))
        self.mappings = _mappings(config, self.command)
        self.results: list[TrialResult] = []
        self.best: TrialResult | None = None
        self.optimal_ds_config: dict[str, Any] = {}
        self.optimal_cmd = ""
        self.optimal_arguments: list[str] = []
        self._space: Space | None = None
        self._results_dir = Path(config.results_dir).absolute()
        self._num_params = _num_params(config)
        former = _read_state(self._results_dir / "tuning.json")
        goes_on = former is not None and not former["finished"] and "overwrite" not in config.model_fields_set
        session = former["session"] if former is not None and goes_on else uuid.uuid4().hex[:12]
        self.rm = ResourceManager(
            self.command,
            results=self._results_dir,
            experiments=config.exps_dir,
            limit_s=config.trial_limit,
            session=session,
            reuses=lambda result: not config.overwrite or result.session == session,
            machines=self._describe_machines(),
        )

    def tune(self) -> None:
        """Search, and write `ds_config_optimal.json`, `cmd_optimal.txt`, `summary.txt` and the plot.

        Raises:
            ConfigError: no trial gave a result, or a folder is in use or cannot be written.
        """
        _make_folder(self.rm.exps_dir, "exps_dir")
        if self.autotuning_config.model_info_path is not None:  # before the job that takes long
            self._check_model_info_path(Path(self.autotuning_config.model_info_path))
        with _alone_in(self._results_dir):
            self._tune()

    def _check_model_info_path(self, path: Path) -> None:
        _make_folder(path.parent, "model_info_path")
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            reason = "it is a directory" if path.is_dir() else "its folder is read-only"
            raise ConfigError(f"autotuning.model_info_path: cannot write {path}: {reason}; give a file elsewhere")

    def _tune(self) -> None:
        began_s = time.monotonic()
        config = self.autotuning_config
        self._write_state(finished=False)
        with LiveTable(config.metric) as table:
            self._space = space = self._find_space(table)
            points = space.coarse()
            self._check(space, points)
            table.say(self._describe(space, points))
            budget = Budget(config.tuner_num_trials, config.tuner_early_stopping)
            reason, measured = self._search(space, points, budget, table)
            fine = space.fine(measured) if budget.spent < budget.num_trials else []
            if fine:
                self._check(space, fine)
                table.say(f"{reason}; now {counted(len(fine), 'trial')} of the other settings at {_places(fine)}")
                budget.begin_space()
                reason = search(TUNERS[config.tuner_type](fine), self._measure(space, table), budget)
        if self.best is None:
            self._write_state(finished=True)
            last = f"the last: {self.results[-1].reason}" if self.results else "there was none"
            raise ConfigError(f"autotuning: no trial gave a figure ({last}); see stderr.log in {self._results_dir}")
        self._finish(reason, time.monotonic() - began_s)

    def _search(
        self, space: Space, points: Sequence[Point], budget: Budget, table: LiveTable
    ) -> tuple[str, list[tuple[Point, float]]]:
        """Search all points at once with a model, or else stage by stage until a stage brings no improvement."""
        config, measure = self.autotuning_config, self._measure(space, table)
        if config.tuner_type == "model_based":
            tuner = TUNERS[config.tuner_type](points)
            reason = search(tuner, measure, budget)
            return reason, tuner.scores
        measured: list[tuple[Point, float]] = []
        reason = ""
        for stage, some in itertools.groupby(points, key=lambda point: point[STAGE]):
            before = budget.best
            budget.begin_space()
            tuner = TUNERS[config.tuner_type](list(some))
            reason = search(tuner, measure, budget)
            measured += tuner.scores
            if budget.spent >= budget.num_trials:
                break
            if budget.early_stopping and before is not None and budget.best is before:
                return f"stage {stage} is no better than those before it", measured
        return reason, measured

    def _measure(self, space: Space, table: LiveTable) -> Any:
        config = self.autotuning_config
        section = {
            "enabled": True,
            "metric": config.metric,
            "start_profile_step": config.start_profile_step,
            "end_profile_step": config.end_profile_step,
        }

        def measure(point: Point) -> float | None:
            name, settled = space.name(point), space.settle(point)
            table.begin(name)
            mapped = mapped_values(settled, self.mappings)
            result = self.rm.run_experiment(name, point, settled, section, mapped, "metric_path")
            self.results.append(result)
            best = best_of(self.results, config.metric)
            table.add(result, is_best=best is result)
            self.best = best
            self._write_state(finished=False)
            score = score_of(result, config.metric)
            return math.nan if score is None and not (result.lasts and result.reason) else score

        return measure

    def _find_space(self, table: LiveTable) -> Space:
        """Return the space, with model information from a job, or from the configuration."""
        config = self.autotuning_config
        said = said_by(self.command, self.mappings)
        info = ModelInfo(num_params=self._num_params, ranks=self._count_ranks())
        if info.num_params:
            return Space(self.user_config, config, info, said)
        space = Space(self.user_config, config, info, said)
        least = min(space.coarse(), key=lambda point: (point[MICRO_BATCH], -point[STAGE]))
        settled = space.settle(least)
        table.begin(_PROFILE)
        section = {"enabled": True, "model_info": {"profile": True}}
        mapped = mapped_values(settled, self.mappings)
        result = self.rm.run_experiment(_PROFILE, least, settled, section, mapped, "model_info_path")
        if not result.metrics:
            table.say(f"the job that finds out about the model failed ({result.reason}); nothing is left out by memory")
            return space
        if config.model_info_path is not None:
            write_json(config.model_info_path, result.metrics)
        return Space(self.user_config, config, _info_of(result.metrics), said, least)

    def _count_ranks(self) -> int:
        """Return the number of ranks of a trial, as known before the first one runs."""
        num_gpus, num_nodes = (
            int(self._limits[flag]) if flag in self._limits else getattr(self.args, flag.removeprefix("--"), None)
            for flag in ("--num_gpus", "--num_nodes")
        )
        if self.active_resources:
            per_host = [len(slots[:num_gpus]) for slots in self.active_resources.values()]
            return sum(per_host[:num_nodes])
        return (num_nodes or 1) * max(num_gpus or get_accelerator().device_count(), 1)

    def _describe_machines(self) -> list[Any]:
        """Return what results depend on besides configuration and command, without creating a device context."""
        accelerator = get_accelerator()
        hosts = {host: list(slots) for host, slots in self.active_resources.items()}
        devices = [accelerator.device_name(), accelerator.device_count()]
        return [hosts, self._count_ranks(), *devices, __version__, torch.__version__]

    def _check(self, space: Space, points: Sequence[Point]) -> None:
        """Check the configurations of all points before the first job.

        Raises:
            ConfigError: a configuration is invalid or not supported; the message names the key.
        """
        for point in points:
            DeepSpeedConfig(space.settle(point), batch_required=False).check_supported()

    def _describe(self, space: Space, points: Sequence[Point]) -> str:
        found = {key: sorted({point[key] for point in points}, key=str) for key in points[0]}
        opened = [f"{key} {_range(values)}" for key, values in found.items() if len(values) > 1]
        fixed = [f"{key} {values[0]}" for key, values in found.items() if len(values) == 1]
        lines = [f"searched: {'; '.join(opened) or 'nothing'}"]
        if fixed:
            lines.append(f'fixed: {"; ".join(fixed)} (write "auto" or a list to have it searched)')
        info = space.info
        size = f", {info.num_params / 1e6:.1f} M parameters" if info.num_params else ""
        left_out = f", {len(space.pruned)} left out by memory" if space.pruned else ""
        lines.append(f"{counted(len(points), 'trial')} on {counted(info.ranks, 'rank')}{size}{left_out}")
        return "\n".join(lines)

    def _finish(self, reason: str, seconds: float) -> None:
        assert self.best is not None
        metric, folder = self.autotuning_config.metric, self._results_dir
        self.write_optimal_config()
        text = summary(self.results, metric, seconds)
        (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
        self._write_state(finished=True)
        value = value_of(self.best, metric)
        print(f"\n{text}\nended: {reason}")  # noqa: T201 - the command's answer
        print(f"best: {self.best.name}, {metric} {value:.6g}")  # noqa: T201
        print(f"configuration: {self.optimal_path}")  # noqa: T201
        print(draw(self.results, metric, folder / "tuning.png"), flush=True)  # noqa: T201

    @property
    def optimal_path(self) -> Path:
        """The file of the best configuration."""
        return self._results_dir / "ds_config_optimal.json"

    def write_optimal_config(self) -> None:
        """Write the best configuration, without `autotuning`, and the command that uses it. Call this after `tune`."""
        assert self.best is not None
        assert self._space is not None
        self.optimal_ds_config = settled = self._space.settle(self.best.settings)
        write_json(self.optimal_path, settled)
        self.optimal_arguments = self.command.with_config(str(self.optimal_path), mapped_values(settled, self.mappings))
        self.optimal_cmd = self.command.line(self.optimal_arguments)
        (self._results_dir / "cmd_optimal.txt").write_text(self.optimal_cmd + "\n", encoding="utf-8")

    def run_after_tuning(self) -> None:
        """Train with the best configuration in a separate job, and wait for its end.

        Raises:
            subprocess.CalledProcessError: the job failed.
        """
        subprocess.run(self.rm.job(self.optimal_arguments), check=True)

    def print_tuning_results(self) -> None:
        """Print the summary of the trials so far."""
        spent = sum(result.seconds for result in self.results)
        print(summary(self.results, self.autotuning_config.metric, spent))  # noqa: T201 - asked for

    def _write_state(self, *, finished: bool) -> None:
        write_json(
            self._results_dir / "tuning.json",
            {
                "session": self.rm.session,
                "finished": finished,
                "metric": self.autotuning_config.metric,
                "command": shlex.join(sys.argv),
                "best": self.best.name if self.best is not None else None,
                "trials": [asdict(result) for result in self.results],
            },
        )


def tune_command(args: Any, active_resources: Mapping[str, Sequence[int]]) -> list[str] | None:
    """Run the search. For `run`, return the words of `cmd_optimal.txt` without `deepspeed`; for `tune`, return None.

    A signal that ends the search also ends the running trial. Finished measurements are kept.
    """
    with _signals():
        try:
            autotuner = Autotuner(args, active_resources)
            autotuner.tune()
        except KeyboardInterrupt:
            print("autotuning was interrupted; the same command goes on from here", file=sys.stderr)  # noqa: T201
            sys.exit(128 + signal.SIGINT)
    if args.autotuning == "tune":
        return None
    return autotuner.command.words(autotuner.optimal_arguments)


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the search like Ctrl-C. Ignored signals (nohup) stay ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _limits(config: AutotuningConfig, args: Any) -> dict[str, str]:
    """Return flag -> value for the section's `num_gpus` and `num_nodes`, unless the command has them or a filter."""
    if getattr(args, "include", "") or getattr(args, "exclude", ""):  # the launcher does not combine them with filters
        return {}
    asked = {"num_gpus": config.num_gpus, "num_nodes": config.num_nodes}
    return {
        f"--{name}": str(value)
        for name, value in asked.items()
        if value is not None and getattr(args, name, None) is None
    }


def _mappings(config: AutotuningConfig, command: Command) -> dict[str, str]:
    """Return key -> flag of the script, from the section, or else the flags of transformers' Trainer in the command."""
    if config.arg_mappings is None:
        return {key: flag for key, flag in _OF_TRAINER.items() if command.value_of(flag) is not None}
    wrong = [flag for flag in config.arg_mappings.values() if not (isinstance(flag, str) and flag.startswith("-"))]
    if wrong:
        raise ConfigError(
            f'autotuning.arg_mappings: found {wrong[0]!r}; write the flag with its dashes, as in {{"{MICRO_BATCH}": '
            '"--batch_size"}'
        )
    return {key.strip(): flag for key, flag in config.arg_mappings.items()}


def _info_of(found: Mapping[str, Any]) -> ModelInfo:
    return ModelInfo(
        parameters=tuple((name, numel, trains) for name, numel, trains in found.get("parameters", ())),
        num_params=found["num_params"],
        activation_bytes=found["activation_mem_per_gpu"] // max(found["micro_batch"], 1),
        memory_bytes=found["memory_per_gpu"],
        ranks=found["world_size"],
        is_host=found["is_host"],
    )


def _places(points: Sequence[Point]) -> str:
    sizes = sorted({point[MICRO_BATCH] for point in points})
    return f"stage {points[0][STAGE]}, micro-batch {', '.join(map(str, sizes))}"


def _range(values: Sequence[Any]) -> str:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        values = sorted(values)
    return ", ".join(map(str, values))


def _num_params(config: AutotuningConfig) -> int:
    """Return the number of parameters in `model_info`; 0 if it is not given."""
    given = (config.model_info or {}).get("num_params", 0)
    if isinstance(given, float) and given.is_integer():  # 1.3e9
        given = int(given)
    return whole_number("autotuning.model_info.num_params", given, least=0)


def _read_state(path: Path) -> dict[str, Any] | None:
    """Return the state of an earlier search; None if there is none, or the file holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path.parent, "results_dir", error) from None
    except ValueError:  # no JSON, or no UTF-8
        found = None
    wanted = {"session": str, "finished": bool}
    if isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in wanted.items()):
        return found
    logger.warning("%s: is not the state of a search; it begins from nothing", path)
    return None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Create the folder of results, and lock it against other searches inside the block.

    Raises:
        ConfigError: another search uses the folder, or the folder cannot be written.
    """

    def refuse(holder: str, waited_s: float) -> None:
        raise ConfigError(
            f"autotuning.results_dir: {holder} is searching in {folder}; wait for it or end it, or give this search "
            "another folder"
        ) from None

    _make_folder(folder, "results_dir")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock", refuse))
        except OSError as error:
            raise _unusable(folder, "results_dir", error) from None
        yield


def _make_folder(folder: Path, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, key, error) from None


def _unusable(folder: Path, key: str, error: OSError) -> ConfigError:
    return ConfigError(f"autotuning.{key}: cannot use {folder}: {error.strerror}; give a folder that can be written")


complete(__name__)

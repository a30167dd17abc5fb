"""Run trials as jobs: `ResourceManager` starts the user's command with a trial's configuration, and keeps the result.

    results_dir/
    ├── .lock                  locked while a search runs
    ├── tuning.json            the search: session, whether it is finished, every trial so far
    └── z1_tmbspg8_gas1/       a trial
        ├── ds_config.json     the configuration for its ranks
        ├── cmd.txt            the command
        ├── stdout.log, stderr.log
        ├── metrics.json       the output of its engine
        └── exp.json           the result; written atomically

If the search allows it, the result of an equal trial (same configuration, command and machines) is reused instead of a
new trial.
"""

import ctypes
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed._absent import absent_members, complete
from deepspeed.autotuning.trial import write_json
from deepspeed.config.read import read_config
from deepspeed.errors import ConfigError

# `python -m` would search the working directory first, so that a user's `random.py` would shadow Python's own.
_COMMAND = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from deepspeed.launcher.runner import main; main()"
)
CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed", "--deepscale_config")
_NEGATIVE = re.compile(r"-\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE_S = 45.0  # longer than the 30 s that the launcher gives its ranks
_TAIL_CHARS = 20_000
_NO_MEMORY, _NO_RESULT = "out of memory", "no result"
#: the launcher's lines about failed ranks, see `launcher/failure.py`; other lines that mention memory are irrelevant
_VERDICT = re.compile(r"\bdeepspeed: rank .*(shown above: |failed as well: )")
#: the last line of a Python or C++ error, after a rank's number if a launcher writes one
_ERROR = re.compile(r"(\[?\w+\]?: ?)?([\w.]*(Error|Exception)\b|what\(\): )")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc",
    re.IGNORECASE,
)


@dataclass(kw_only=True)
class TrialResult:
    """`TrialResult` is the result of a trial, and the content of `exp.json`. seconds: duration.

    settings: settings of the point. metrics: output of the engine; empty if the trial failed, with `reason`.
    fingerprint: hash of configuration, command and machines. session: id of the search that ran the trial.
    """

    name: str
    settings: dict[str, Any]
    fingerprint: str
    session: str
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    is_reused: bool = False

    @property
    def lasts(self) -> bool:
        """Whether an equal trial would give the same result; False after an error, which may be fixed by now."""
        return bool(self.metrics) or self.reason.startswith((_NO_MEMORY, _NO_RESULT))


@dataclass(frozen=True, kw_only=True)
class Command:
    """`Command` is the user's command, with the position of the configuration.

    flags: flags of `deepspeed`. script: the script. arguments: arguments of the script.
    config_at: index of the argument that holds the configuration; config_flag: its prefix inside this argument.
    """

    flags: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    config_at: int
    config_flag: str = ""

    @classmethod
    def of(cls, args: Any) -> "Command":
        """Return the command for the launcher's `args`: `user_script`, `user_args`, and optional `launcher_flags`.

        Raises:
            ConfigError: no argument of the script is a configuration.
        """
        arguments = tuple(args.user_args)
        flags = tuple(getattr(args, "launcher_flags", ()))
        refused = ""
        for wanted, (at, word) in itertools.product(CONFIG_FLAGS, enumerate(arguments)):
            flag, equals, value = word.partition("=")
            if flag != wanted:
                continue
            if equals and _is_config(value, flag):
                return cls(
                    flags=flags, script=args.user_script, arguments=arguments, config_at=at, config_flag=f"{flag}="
                )
            if not equals and at + 1 < len(arguments) and _is_config(arguments[at + 1], flag):
                return cls(flags=flags, script=args.user_script, arguments=arguments, config_at=at + 1)
            given = value if equals or at + 1 == len(arguments) else arguments[at + 1]
            refused = refused or _why_not_config(given, flag)
        raise ConfigError(
            f"--autotuning: found no configuration among the arguments of {args.user_script}{refused}; each trial gets "
            "its own there, so write `--deepspeed_config ds_config.json` or `--deepspeed ds_config.json` after it"
        )

    def read_config(self) -> dict[str, Any]:
        """Return the user's configuration."""
        return read_config(self.arguments[self.config_at].removeprefix(self.config_flag))

    def value_of(self, flag: str) -> str | None:
        """Return the value of a script's flag, the last one if it is repeated; None without the flag."""
        found = None
        for at, word in enumerate(self.arguments):
            if word.startswith(f"{flag}="):
                found = word.partition("=")[2]
            elif word == flag and _has_value(self.arguments, at):
                found = self.arguments[at + 1]
        return found

    def with_config(self, path: str, mapped: Mapping[str, Any]) -> list[str]:
        """Return the script's arguments with another configuration and other values of flags; new flags come last.

        Args:
            path: path of the configuration.
            mapped: flag -> value.
        """
        words = list(self.arguments)
        words[self.config_at] = f"{self.config_flag}{path}"
        for flag, value in mapped.items():
            words = _told(words, flag, value)
        return words

    def words(self, arguments: Sequence[str]) -> list[str]:
        """Return the words after `deepspeed` in the command.

        Args:
            arguments: arguments of the script.
        """
        return [*self.flags, self.script, *arguments]

    def line(self, arguments: Sequence[str]) -> str:
        """Return the command for a shell."""
        return shlex.join(["deepspeed", *self.words(arguments)])


def _told(words: Sequence[str], flag: str, value: Any) -> list[str]:
    """Return the words with a new value of a flag, in its place or at the end. A boolean switch is added or removed."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    found: list[str] = []
    is_there = is_value = False
    for at, word in enumerate(words):
        if is_value:  # skip the old value
            is_value = False
        elif word.startswith(f"{flag}="):
            found.append(f"{flag}={text}")
            is_there = True
        elif word == flag:
            is_value, is_there = _has_value(words, at), True
            if is_value or not isinstance(value, bool):
                found += [flag, text]
            elif value:
                found.append(flag)
        else:
            found.append(word)
    return found if is_there else [*found, flag, text]


def _has_value(words: Sequence[str], at: int) -> bool:
    """Return whether the next word is the flag's value. A negative number is a value, another flag is not."""
    if at + 1 >= len(words):
        return False
    return not words[at + 1].startswith("-") or _NEGATIVE.fullmatch(words[at + 1]) is not None


def _is_config(text: str, flag: str) -> bool:
    """Return whether an argument is a configuration: a file, JSON, or base64. `--deepspeed` may be only a switch.

    Any file after `--deepspeed_config` counts; an error in the file is reported when it is read.
    """
    if flag == CONFIG_FLAGS[0] and os.path.isfile(text):
        return True
    if text.startswith("-") or not text:
        return False
    try:
        read_config(text)
    except ConfigError:
        return False
    return True


def _why_not_config(text: str, flag: str) -> str:
    """Return what is wrong with the value of a flag that should be a configuration, for a message; "" for a switch."""
    if not text or text.startswith("-"):
        return ""
    try:
        read_config(text)
    except ConfigError as error:
        return f" ({flag} {text}: {error})"
    return ""


@absent_members("autotuning.scheduler:ResourceManager")
class ResourceManager:
    """Runs trials one after the other, each with all ranks of the command.

    Args:
        command: the user's command.
        results, experiments: folders; created if missing.
        limit_s, session: maximum seconds of a trial; id of the search.
        reuses: called with an existing result; returns whether it may replace an equal trial.
        machines: JSON values that differ between machines whose results must not be mixed.
    """

    def __init__(
        self,
        command: Command,
        *,
        results: str | Path,
        experiments: str | Path,
        limit_s: float,
        session: str,
        reuses: Callable[[TrialResult], bool],
        machines: Sequence[Any] = (),
    ) -> None:
        self.command = command
        self.results_dir, self.exps_dir = Path(results).absolute(), Path(experiments).absolute()
        self.limit_s = limit_s
        self.session = session
        self.machines = list(machines)
        self._reuses = reuses

    def run_experiment(
        self,
        name: str,
        settings: Mapping[str, Any],
        config: Mapping[str, Any],
        section: Mapping[str, Any],
        mapped: Mapping[str, Any],
        output: str,
    ) -> TrialResult:
        """Run a trial, or reuse its result.

        Args:
            name: name of the trial's folder.
            settings: settings to store in the result.
            config: configuration for the ranks, without `autotuning`.
            section: the section `autotuning`, without the path of the output.
            mapped: flag of the script -> value.
            output: key of `section` for the path of the file that the engine writes.
        """
        folder = self.results_dir / name
        arguments = self.command.with_config(str(folder / "ds_config.json"), mapped)
        words = self.command.words(arguments)
        fingerprint = _fingerprint([config, section, words, self.machines], self.command.script)
        found = read_result(folder / "exp.json")
        if found is not None and found.fingerprint == fingerprint and found.lasts and self._reuses(found):
            found.is_reused = True
            return found
        result = TrialResult(name=name, settings=dict(settings), fingerprint=fingerprint, session=self.session)
        metrics = folder / "metrics.json"
        for former in (folder / "exp.json", metrics):
            former.unlink(missing_ok=True)
        write_json(folder / "ds_config.json", {**config, "autotuning": {**section, output: str(metrics)}})
        write_json(self.exps_dir / f"{name}.json", {"name": name, "settings": dict(settings), "ds_config": config})
        (folder / "cmd.txt").write_text(self.command.line(arguments) + "\n", encoding="utf-8")
        began_s = time.monotonic()
        code = self._run(arguments, folder)
        result.seconds = round(time.monotonic() - began_s, 2)
        try:
            result.metrics = json.loads(metrics.read_text(encoding="utf-8"))
        except FileNotFoundError:
            result.reason = self._reason(code, folder)
        write_json(folder / "exp.json", asdict(result))
        return result

    def job(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line of a process that runs the job.

        Args:
            arguments: arguments of the script.
        """
        return [sys.executable, "-c", _COMMAND, *self.command.words(arguments)]

    def _run(self, arguments: Sequence[str], folder: Path) -> int | None:
        """Run a job; return the exit code, or None at the time limit. All its processes have ended then."""
        with (folder / "stdout.log").open("wb") as output, (folder / "stderr.log").open("wb") as errors:
            process = subprocess.Popen(
                self.job(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                preexec_fn=end_with_this_process(),  # noqa: PLW1509 - no thread runs here
            )
            try:
                return process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                end_job(process)

    def _reason(self, code: int | None, folder: Path) -> str:
        """Return one line that says why there is no result."""
        if code is None:
            return f"{_NO_RESULT} after {self.limit_s:g} s (autotuning.trial_limit)"
        text = (folder / "stderr.log").read_bytes()[-_TAIL_CHARS:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if code == 0:
            return "the script ended before its steps were measured; let it make end_profile_step steps or more"
        verdicts = [line for line in lines if _VERDICT.search(line)]
        errors = [line for line in lines if _ERROR.match(line)]
        said = verdicts or errors[-1:] or lines[-1:] or ["it wrote nothing to stderr"]
        words = said[0].partition("shown above: ")[2] or said[0]
        if any(_OUT_OF_MEMORY.search(line) for line in said):
            return f"{_NO_MEMORY}: {words}"
        if code in (128 + signal.SIGKILL, -signal.SIGKILL):
            return f"{_NO_MEMORY}: a process was killed by SIGKILL, as the kernel does when the host has no more"
        return f"exit code {code}: {words}"


def read_result(path: Path) -> TrialResult | None:
    """Read a result; None if there is none, or its format is of another version."""
    try:
        return TrialResult(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def _fingerprint(facts: Sequence[Any], script: str) -> str:
    text = json.dumps([*facts, os.getcwd(), _content(script)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(script: str) -> str:
    """Return the hash of a script's content; "" for a module or a folder."""
    return hashlib.sha256(Path(script).read_bytes()).hexdigest() if os.path.isfile(script) else ""


def end_with_this_process() -> Callable[[], None]:
    """Return a `preexec_fn` that requests SIGTERM for the job's first process when this process dies (Linux)."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    parent = os.getpid()

    def set_up() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
            if os.getppid() != parent:  # the parent died before the call above
                os._exit(1)

    return set_up


def end_job(process: "subprocess.Popen[bytes]") -> None:
    """End a running job: its launcher gets time to end the ranks."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the kernel ends the ranks with their launcher
        process.wait()


def said_by(command: Command, mappings: Mapping[str, str]) -> dict[str, Any]:
    """Return key -> integer for the keys of `arg_mappings` whose flags are in the user's command."""
    found = {}
    for key, flag in mappings.items():
        text = command.value_of(flag)
        if text is not None and text.isdecimal():
            found[key.strip()] = int(text)
    return found


complete(__name__)

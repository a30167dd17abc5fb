"""Attribute the idle time of pipeline stages to causes, from measured passes. Called by `pipeline.py`.

The measured effects are added to the timeline one by one. Each kind is the resulting growth of the idle share:

    schedule     the schedule itself: a backward takes as long as two forwards, and all stages are equal
    unequal      each stage's passes take their median times
    jitter       each pass takes its measured time
    python       host work between two passes of a stage, when the message has already arrived
    messages     from the end of the pass that sends a message to the start of the pass that waits for it

The kinds add up to the measured idle share.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from deepspeed.pipe.schedule import BufferOpInstruction, PipeSchedule
from deepspeed.pipe.timeline import COMPUTES, Pass, idle_share, timeline

KINDS = ("schedule", "unequal", "jitter", "python", "messages")

_Key = tuple[int, str, int, int]  # stage, name, micro-batch, chunk


def measured(schedules: Sequence[PipeSchedule], times: Sequence[Sequence[tuple[float, float]]]) -> list[Pass]:
    """Return the passes of a step.

    Args:
        times: for each stage, the (start, stop) of its passes in order, in seconds of one clock.
    """
    passes = []
    for stage, (schedule, own) in enumerate(zip(schedules, times, strict=True)):
        done = [each for step in schedule for each in step if isinstance(each, COMPUTES)]
        passes += [Pass(stage, each.name, each.micro, each.chunk, *time) for each, time in zip(done, own, strict=True)]
    return passes


def idle_by_kind(schedules: Sequence[PipeSchedule], passes: Sequence[Pass]) -> dict[str, float]:
    """Return the shares of all stages' time by kind. They add up to `idle_share(passes)`."""
    seconds = {_key(each): each.stop - each.start for each in passes}
    alike: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for (stage, name, _, chunk), taken in seconds.items():
        alike[stage, name, chunk].append(taken)
    typical = {key: median(alike[key[0], key[1], key[3]]) for key in seconds}
    python, messages = _delays(passes)
    shares = [
        idle_share(timeline(schedules)),
        _idle(schedules, typical, {}),
        _idle(schedules, seconds, {}),
        _idle(schedules, seconds, python),
        _idle(schedules, seconds, python | messages),
    ]
    growth = (after - before for before, after in pairwise([0.0, *shares]))
    return dict(zip(KINDS, growth, strict=True))


def _key(each: Pass) -> _Key:
    return each.stage, each.name, each.micro, each.chunk


def _idle(schedules: Sequence[PipeSchedule], seconds: dict[_Key, float], delays: dict[_Key, float]) -> float:
    """Return the idle share if passes take `seconds` and start late by `delays`."""

    def cost(stage: int, instruction: BufferOpInstruction) -> float:
        key = (stage, instruction.name, instruction.micro, instruction.chunk)
        return seconds[key] + delays.get(key, 0)

    passes = timeline(schedules, cost)
    first = min(each.start + delays.get(_key(each), 0) for each in passes)
    span = max(each.stop for each in passes) - first
    return 1 - sum(seconds.values()) / (span * len(schedules))


def _delays(passes: Sequence[Pass]) -> tuple[dict[_Key, float], dict[_Key, float]]:
    """Return the delays of the starts of passes: passes that wait for no message, and passes that wait for one."""
    num_stages = 1 + max(each.stage for each in passes)
    made = {
        (each.name == "ForwardPass", each.micro, each.chunk * num_stages + each.stage): each.stop
        for each in passes
        if each.name != "BackwardWeight"
    }
    before: dict[int, float] = {}
    python, messages = {}, {}
    for each in sorted(passes, key=lambda each: each.start):
        forward, part = each.name == "ForwardPass", each.chunk * num_stages + each.stage
        message = made.get((forward, each.micro, part + (-1 if forward else 1)))
        if each.name == "BackwardWeight":
            message = None
        free = before.get(each.stage)
        before[each.stage] = each.stop
        if message is not None and (free is None or message > free):
            messages[_key(each)] = each.start - message
        elif free is not None:
            python[_key(each)] = each.start - free
    return python, messages

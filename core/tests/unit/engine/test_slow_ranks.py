"""Which ranks are told to be slow, and which waits count."""

import threading
from unittest import mock

import pytest
from deepspeed.comm.record import Waits
from deepspeed.engine.observers import Time, told
from deepspeed.profiling.timer import HostStopwatch


class Watcher:
    """Somebody."""


@pytest.mark.parametrize(
    ("own_ms", "named"),
    [
        ([10, 10, 10, 10], ""),
        ([10, 12, 9, 11], ""),
        ([10, 10, 10, 20], "rank 3 took"),
        ([30, 10, 20, 10, 10], "ranks 0, 2 took"),
        ([10, 40], "rank 1 took"),  # half of the ranks are slow, as far as anybody can tell
        ([0, 0], ""),
        ([7], ""),
    ],
)
def test_who_is_slow(own_ms, named):
    found = told([Time(rank, each) for rank, each in enumerate(own_ms)], 1.5)
    assert len(found) == bool(named)
    assert all(text.startswith(named) for text in found)


def test_figures_and_stages():
    times = [Time(0, 10.0, 0), Time(1, 25.0, 0), Time(2, 100.0, 1), Time(3, 100.0, 1)]
    (text,) = told(times, 1.25)
    assert "the median of 2 ranks, which is 10.0 ms per step without waits for others: 25.0 ms, 2.50 times" in text


def test_waits_inside_of_others_count_once_and_other_threads_not_at_all():
    clock, waits = [0.0], Waits()
    with mock.patch.object(HostStopwatch, "_now_s", side_effect=lambda: clock[0]):
        assert not waits.begin()
        waits.watch(test_who_is_slow)
        assert waits.begin()
        clock[0] += 1.0
        assert waits.begin()
        clock[0] += 2.0
        waits.end()
        clock[0] += 4.0
        waits.end()
        clock[0] += 8.0
        others = []
        thread = threading.Thread(target=lambda: others.append(waits.begin()))
        thread.start()
        thread.join()
    assert others == [False]
    assert waits.total_ms(wait=False) == 7000.0
    waits.unwatch(test_who_is_slow)
    assert not waits.begin()


def test_who_watches_and_is_gone_watches_no_more():
    waits, watchers = Waits(), [Watcher(), Watcher()]
    for watcher in watchers:
        waits.watch(watcher)
    del watcher
    waits.unwatch(watchers.pop())
    assert waits.is_watched
    watchers.clear()  # an engine that was dropped without destroy()
    assert not waits.is_watched
    assert not waits.begin()

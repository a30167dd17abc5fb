"""Threads come to rest before the interpreter ends; see the note in deepspeed/comm/start.py."""

import hashlib
import threading

from deepspeed.comm.start import settle


def test_waits_for_a_thread_that_computes_without_pythons_lock():
    began, ended = threading.Event(), threading.Event()

    def compute():
        began.set()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 300_000)
        ended.set()

    thread = threading.Thread(target=compute)
    thread.start()
    began.wait()
    # more than the computation can take; it ends long before
    settle(limit_s=60)
    assert ended.is_set()
    thread.join()


def test_gives_up_on_threads_that_never_rest():
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 300_000)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert settle(limit_s=0.02) is False
    finally:
        stop.set()
        thread.join()


def test_threads_that_wait_are_at_rest():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        settle(limit_s=60)
    finally:
        stop.set()
        thread.join()

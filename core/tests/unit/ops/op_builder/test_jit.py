"""A library is built once per content and machine, whole or not at all, and a failure is told once."""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal

import psutil
import pytest
from deepspeed.errors import ConfigError, OpUnavailable
from deepspeed.ops.op_builder import compiling, jit
from deepspeed.ops.op_builder.cache import Cache


def value_of(library):
    return ctypes.CDLL(str(library)).x()


def test_cold_then_warm(workshop):
    library = jit.build(workshop.spec())
    assert value_of(library) == 1
    assert library.is_relative_to(workshop.cache)
    assert jit.build(workshop.spec()) == library
    assert (workshop.count("compile"), workshop.count("link")) == (1, 1)
    assert [path.name for path in workshop.cache.glob("*.tmp")] == []


def test_every_source_is_compiled_and_linked(workshop):
    other = workshop.sources / "other.cpp"
    other.write_text('extern "C" int x();\nextern "C" int twice() { return 2 * x(); }\n')
    library = jit.build(workshop.spec(sources=(workshop.source, other)))
    assert ctypes.CDLL(str(library)).twice() == 2
    assert (workshop.count("compile"), workshop.count("link")) == (2, 1)


def test_sixty_four_processes_compile_once(workshop):
    program = """
start, go = os.pipe()
children = []
for _ in range(64):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(start, 1)  # ends for all of them at once, when the parent closes
        os._exit(0 if ask().is_file() else 1)
    children.append(pid)
os.close(go)
print({os.waitpid(pid, 0)[1] for pid in children})
"""
    assert workshop.run(program).strip() == "{0}"
    assert (workshop.count("compile"), workshop.count("link")) == (1, 1)


@pytest.fixture
def blocked(workshop, monkeypatch):
    """The first compile tells its pid and blocks; the others do not. Returns a function that waits for that pid."""
    told, resume = workshop.folder / "told", workshop.folder / "resume"
    os.mkfifo(told)
    os.mkfifo(resume)
    before = f'if mkdir "{workshop.folder}/first" 2>/dev/null; then echo $$ > "{told}"; read x < "{resume}"; exit 1; fi'
    monkeypatch.setenv("CXX", str(workshop.compiler(before=before, name="blocking")))
    keep = os.open(resume, os.O_RDWR)  # so that opening it to read does not block, and to end it at last
    yield lambda: int(told.read_text())
    os.write(keep, b"\n\n\n")
    os.close(keep)


def test_the_builder_is_killed_and_another_finishes(workshop, blocked):
    first = workshop.start()
    compiler = blocked()
    second = workshop.start()
    first.kill()
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert value_of(out.strip()) == 1
    assert first.wait() == -signal.SIGKILL
    first.communicate()
    assert workshop.count("compile") == 2
    assert [path.name for path in workshop.cache.glob("*.tmp")] == []
    os.kill(compiler, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether the process ends soon: it was killed, and is gone when the system has collected it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)
    return True


def test_the_compiler_ends_with_an_interrupted_builder(workshop, blocked):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run under nohup
    process = workshop.start()
    compiler = blocked()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in err
    assert has_ended(compiler)
    assert [path.name for path in workshop.cache.glob("*.tmp")] == []


# Ctrl-C when the compiler was started, and the call that started it has not returned.
INTERRUPTED_AT_THE_START = """
import signal, subprocess

class Popen(subprocess.Popen):
    def __init__(self, argv, *args, **kwargs):
        super().__init__(argv, *args, **kwargs)
        if "-c" in argv:
            print(self.pid, flush=True)
            signal.raise_signal(signal.SIGINT)

subprocess.Popen = Popen
ask()
"""


def test_the_compiler_ends_if_its_start_is_interrupted(workshop, blocked):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = workshop.start(INTERRUPTED_AT_THE_START)
    out, err = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in err
    assert has_ended(int(out))
    assert [path.name for path in workshop.cache.glob("*.tmp")] == []


def test_one_line_says_who_is_waited_for(workshop, blocked, monkeypatch, lines):
    process = workshop.start()
    blocked()
    progress = jit._Progress("x", 0.0)

    class Enough(Exception):
        pass

    def report_and_stop(doing, waited_s):
        progress(doing, waited_s)
        progress(doing, waited_s)
        raise Enough

    monkeypatch.setattr(jit, "_Progress", lambda op, after_s: report_and_stop)
    with pytest.raises(Enough):
        jit.build(workshop.spec())
    process.kill()
    process.communicate()
    holder = f"process {process.pid} on {os.uname().nodename}"
    assert [text for _, text in lines] == [f"op 'x': waiting for {holder}, which compiles it"]


def test_every_rank_that_waits_long_says_so_again(workshop, monkeypatch, lines):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("DS_COMPILE_TIMEOUT", "900")
    progress = jit._Progress("x", 3.0)
    for waited_s in (2.0, 5.0, 61.0, 100.0, 121.0, 200.0):
        progress("waiting for process 7 on there, which compiles it", waited_s)
    again = (
        "op 'x': still waiting for process 7 on there, which compiles it; {} s so far, and a command is killed after "
    )
    limit = "900 s (DS_COMPILE_TIMEOUT)"
    assert [text for _, text in lines] == [again.format(61) + limit, again.format(121) + limit]


def test_a_compiler_that_hangs_is_killed_at_the_limit_and_frees_the_lock(workshop, monkeypatch):
    """With what it started, and the other ranks of the job hear of it without a compile of their own."""
    never = workshop.folder / "never"
    never.touch()
    monkeypatch.setenv("CXX", str(workshop.compiler(before=f"sh -c 'tail -f {never}; true'")))
    monkeypatch.setenv("DS_COMPILE_TIMEOUT", "2")
    with pytest.raises(jit.BuildError) as caught:
        jit.build(workshop.spec())
    message = str(caught.value)
    assert f"{workshop.folder}/cxx did not finish within 2 s and was killed" in message
    assert "DS_COMPILE_TIMEOUT=<seconds> waits longer" in message
    assert f"command: {workshop.folder}/cxx -fPIC" in message
    assert [
        process for process in psutil.process_iter(["cmdline"]) if str(never) in (process.info["cmdline"] or [])
    ] == []
    with pytest.raises(jit.BuildError, match="did not finish within 2 s.*seen by process"):
        jit.build(workshop.spec())
    assert workshop.count("compile") == 1
    assert [path.name for path in workshop.cache.glob("*.tmp")] == []


def test_a_server_that_a_compiler_leaves_running_is_not_waited_for(workshop, monkeypatch):
    """It holds the compiler's output open, as the server of a compiler cache does."""
    pid = workshop.folder / "pid"
    before = f'test -e "{pid}" || {{ tail -f /dev/null & echo $! > "{pid}"; }}'
    monkeypatch.setenv("CXX", str(workshop.compiler(before=before, name="caching")))
    try:
        assert value_of(jit.build(workshop.spec())) == 1
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("stated", ["0", "-1", "soon", "nan", "inf"])
def test_a_limit_that_is_no_number_of_seconds(workshop, monkeypatch, stated):
    monkeypatch.setenv("DS_COMPILE_TIMEOUT", stated)
    with pytest.raises(ConfigError, match=f"DS_COMPILE_TIMEOUT={stated}: it must be a number of seconds above 0"):
        jit.build(workshop.spec())


@pytest.mark.parametrize("damage", ["cut", "other bytes", "gone", "manifest cut", "manifest gone"])
def test_a_damaged_library_is_built_again(workshop, damage):
    library = jit.build(workshop.spec())
    content = library.read_bytes()
    manifest = library.parent / "manifest.json"
    if damage == "cut":
        library.write_bytes(content[:100])
    elif damage == "other bytes":
        library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:50])
    else:
        (library if damage == "gone" else manifest).unlink()
    assert jit.find(workshop.spec()) is None
    again = jit.build(workshop.spec())
    assert again.read_bytes() == content
    assert again != library  # no name is used twice: another process may be about to load the old one
    assert jit.build(workshop.spec()) == again
    assert workshop.count("compile") == 2


def test_a_header_that_only_a_flag_names(workshop):
    hidden = workshop.folder / "hidden.h"
    hidden.write_text("#define Y 5\n")
    workshop.source.write_text('extern "C" int x() { return Y; }\n')
    spec = workshop.spec(compile_flags=("-include", str(hidden)))
    assert value_of(jit.build(spec)) == 5
    jit.build(dataclasses.replace(spec))
    assert workshop.count("compile") == 1
    hidden.write_text("#define Y 66\n")
    jit.build(dataclasses.replace(spec))
    assert workshop.count("compile") == 2


def test_sources_that_change_meanwhile_are_not_installed(workshop, monkeypatch):
    compiler = workshop.compiler(before=f'echo "// more" >> "{workshop.sources}/x.h"', name="touching")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(jit.BuildError, match="changed while they were compiled"):
        jit.build(workshop.spec())
    assert list(workshop.cache.glob("*.json")) == list(workshop.cache.glob("*/manifest.json")) == []


def test_a_failed_build_shows_the_first_error_and_the_command(workshop):
    workshop.source.write_text("int x() {\n    return nothing;\n}\nint y() { return nor_this; }\n")
    with pytest.raises(jit.BuildError) as caught:
        jit.build(workshop.spec())
    message = str(caught.value)
    assert "x.cpp:2:12: error" in message
    assert "nor_this" not in message
    assert f"command: {workshop.folder}/cxx -fPIC" in message
    assert "\n" not in message
    (log,) = workshop.cache.glob("*.log")
    assert str(log) in message
    assert "nor_this" in log.read_text()


def test_a_failed_link(workshop):
    with pytest.raises(jit.BuildError, match="cannot find -lno_such_library"):
        jit.build(workshop.spec(link_flags=("-lno_such_library",)))


def test_ranks_of_one_job_compile_what_fails_once(workshop):
    workshop.source.write_text("#error not today\n")
    program = """
try:
    ask()
except OpUnavailable as error:
    print(error)
"""
    told = [workshop.run(program, LOCAL_RANK=str(rank), RANK=str(rank)) for rank in range(3)]
    assert workshop.count("compile") == 1
    assert all("not today" in text for text in told)
    assert ["command:" in text for text in told] == [True, False, False]
    assert all(f"{workshop.cache}" in text for text in told[1:])
    workshop.run(program)  # another job tries again
    assert workshop.count("compile") == 2


def test_sixteen_ranks_at_once_compile_what_fails_once(workshop):
    workshop.source.write_text("#error not today\n")
    program = """
start, go = os.pipe()
said, tell = os.pipe()
children = []
for _ in range(16):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(start, 1)
        try:
            ask()
        except OpUnavailable as error:
            os.write(tell, b"c" if "command:" in str(error) else b"-")
        os._exit(0)
    children.append(pid)
os.close(go)
print({os.waitpid(pid, 0)[1] for pid in children}, "".join(sorted(os.read(said, 99).decode())))
"""
    assert workshop.run(program, LOCAL_RANK="0").strip() == "{0} " + "-" * 15 + "c"
    assert workshop.count("compile") == 1


def test_a_failure_is_forgotten_when_the_build_succeeds(workshop, monkeypatch):
    marker = workshop.folder / "broken"
    marker.touch()
    compiler = workshop.compiler(before=f'test -e "{marker}" && echo "an error" && exit 1', name="sick")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(jit.BuildError):
        jit.build(workshop.spec())
    with pytest.raises(jit.BuildError, match="seen by process"):
        jit.build(workshop.spec())
    assert workshop.count("compile") == 1
    marker.unlink()
    workshop.run()
    assert list(workshop.cache.glob("*.log")) == []
    assert jit.build(workshop.spec()).is_file()


def test_without_a_compiler(workshop):
    library = jit.build(workshop.spec())
    assert jit.build(workshop.spec(toolchain=None)) == library  # of the same content, by whichever compiler
    with pytest.raises(OpUnavailable, match="there is no compiler"):
        jit.build(workshop.spec(toolchain=None, compile_flags=("-O1",)))


def test_nothing_is_said_of_a_quick_build(workshop, lines, monkeypatch):
    monkeypatch.setattr(compiling, "_TICK_S", 60.0)  # a busy machine may take more than one second
    jit.build(workshop.spec())
    assert lines == []


def test_a_long_build_says_one_line(workshop, lines, monkeypatch):
    monkeypatch.setattr(compiling, "_TICK_S", 0.0)
    jit.build(workshop.spec())
    assert [text for _, text in lines] == [
        f"op 'x': compiling, once for this machine ({workshop.folder}/cxx: counting compiler 1.0; {workshop.cache})"
    ]


def test_the_manifest_tells_a_reader_what_was_done(workshop):
    library = jit.build(workshop.spec())
    manifest = json.loads((library.parent / "manifest.json").read_text())
    assert manifest["torch"] == "2.0"
    assert manifest["library_bytes"] == library.stat().st_size
    assert manifest["compiler"].endswith("counting compiler 1.0")
    assert [line[-1] for line in manifest["commands"]][0].endswith(".o")
    assert library.parent.name.startswith(f"{workshop.spec().entry}.")
    assert Cache.open().find(workshop.spec()) == library

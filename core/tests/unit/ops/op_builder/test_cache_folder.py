"""Where built ops are kept, and whose folder is trusted."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import jit
from deepspeed.ops.op_builder.cache import Cache

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@pytest.fixture
def no_variables(monkeypatch, tmp_path):
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path


def mode(folder):
    return stat.S_IMODE(folder.stat().st_mode)


def test_the_order_of_places(no_variables, monkeypatch):
    home = no_variables / "home"
    home.mkdir()
    private = no_variables / "temporary" / f"ds-core-ops-{os.geteuid()}"
    assert Cache.open().folder == private
    monkeypatch.setenv("HOME", str(home))
    assert Cache.open().folder == home / ".cache/ds-core/ops"
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_variables / "xdg"))
    assert Cache.open().folder == no_variables / "xdg/ds-core/ops"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(no_variables / "chosen"))
    assert Cache.open().folder == no_variables / "chosen"
    for folder in (private, home / ".cache/ds-core/ops", no_variables / "xdg/ds-core/ops", no_variables / "chosen"):
        assert mode(folder) == 0o700


def test_every_folder_on_the_way_is_private(no_variables, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(no_variables / "one/two/three"))
    before = os.umask(0)
    try:
        folder = Cache.open().folder
    finally:
        os.umask(before)
    assert [mode(place) for place in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3


def test_a_home_that_cannot_be_written(no_variables, monkeypatch):
    home = no_variables / "home"
    home.mkdir()
    (home / ".cache").touch()  # a file: not even root makes a folder there
    monkeypatch.setenv("HOME", str(home))
    assert Cache.open().folder == no_variables / "temporary" / f"ds-core-ops-{os.geteuid()}"
    monkeypatch.setenv("HOME", "/nonexistent")
    assert Cache.open().folder == no_variables / "temporary" / f"ds-core-ops-{os.geteuid()}"


def test_no_home_and_read_only_sources(workshop, no_variables):
    for path in (*workshop.sources.iterdir(), workshop.sources):
        path.chmod(path.stat().st_mode & ~0o222)
    before = sorted(path.name for path in workshop.sources.iterdir())
    library = jit.build(workshop.spec())
    assert library.is_relative_to(no_variables / "temporary")
    assert sorted(path.name for path in workshop.sources.iterdir()) == before
    workshop.sources.chmod(0o700)


def test_a_chosen_folder_that_cannot_be_made(workshop, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(workshop.source / "below"))
    with pytest.raises(OpUnavailable, match=r"x\.cpp/below, cannot be made: Not a directory"):
        jit.build(workshop.spec())


@pytest.mark.parametrize("wrong", [0o777, 0o1777, 0o770, 0o722])
def test_a_folder_that_others_can_write_is_refused(workshop, wrong):
    workshop.cache.mkdir()
    workshop.cache.chmod(wrong)
    with pytest.raises(OpUnavailable, match=f"can be written by others .mode 0?{wrong:o}.*chmod go-w {workshop.cache}"):
        jit.build(workshop.spec())
    assert workshop.count() == 0
    workshop.cache.chmod(0o755)
    assert jit.build(workshop.spec()).is_file()


def test_a_folder_within_one_that_everybody_can_write_is_refused(workshop, monkeypatch):
    public = workshop.folder / "public"
    public.mkdir()
    public.chmod(0o777)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(public / "mine"))
    with pytest.raises(OpUnavailable, match=f"lies in {public}, where everybody may rename it"):
        Cache.open()
    public.chmod(0o1777)  # as /tmp: nobody renames what is another's
    assert Cache.open().folder == public / "mine"


@needs_root
def test_a_folder_of_another_user_is_refused(workshop):
    workshop.cache.mkdir(mode=0o700)
    os.chown(workshop.cache, 12345, 12345)
    with pytest.raises(OpUnavailable, match="belongs to user 12345, not to 0: what is loaded from there could be"):
        jit.build(workshop.spec())


@needs_root
def test_a_link_of_another_user_is_refused(workshop):
    (workshop.folder / "mine").mkdir(mode=0o700)
    workshop.cache.symlink_to(workshop.folder / "mine")
    assert Cache.open().folder == workshop.cache
    os.lchown(workshop.cache, 12345, 12345)
    with pytest.raises(OpUnavailable, match="belongs to user 12345"):
        Cache.open()


def test_a_folder_behind_a_link_is_judged_by_where_it_is(workshop, monkeypatch):
    public = workshop.folder / "public"
    (public / "mine").mkdir(parents=True, mode=0o700)
    public.chmod(0o777)
    (workshop.folder / "link").symlink_to(public / "mine")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(workshop.folder / "link" / "ops"))
    with pytest.raises(OpUnavailable, match=f"lies in {public}, where everybody may rename it"):
        Cache.open()


@needs_root
def test_a_link_of_another_user_on_the_way_is_refused(workshop, monkeypatch):
    (workshop.folder / "mine").mkdir(mode=0o700)
    (workshop.folder / "link").symlink_to(workshop.folder / "mine")
    os.lchown(workshop.folder / "link", 12345, 12345)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(workshop.folder / "link" / "ops"))
    with pytest.raises(
        OpUnavailable, match=f"has the link {workshop.folder}/link on its way, which belongs to user 12345"
    ):
        Cache.open()


@pytest.mark.parametrize("which", ["folder", "manifest", "library"])
@pytest.mark.parametrize("wrong", ["another user", 0o777, 0o775, "a link"], ids=str)
def test_a_library_that_someone_else_could_have_written_is_built_again(workshop, which, wrong, lines):
    library = jit.build(workshop.spec())
    path = {"folder": library.parent, "manifest": library.parent / "manifest.json", "library": library}[which]
    if wrong == "another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, 12345)
        said = f"{path} belongs to user 12345, not to 0"
    elif wrong == "a link":
        path.rename(workshop.folder / "elsewhere")
        path.symlink_to(workshop.folder / "elsewhere")
        said = f"{path} is a symbolic link"
    else:
        path.chmod(wrong)
        said = f"{path} can be written by others (mode {wrong:04o})"
    assert jit.find(workshop.spec()) is None
    again = jit.build(workshop.spec())
    assert again.parent != library.parent
    assert workshop.count("compile") == 2
    told = f"op 'x': {said}, so it could be someone else's code; it is built again"
    assert [text for level, text in lines if level == "WARNING"] == [told]


def test_what_is_built_is_ours_alone_whatever_the_umask(workshop):
    program = "os.umask(0)\nprint(ask(), ask())"
    first, second = workshop.run(program).split()
    assert first == second
    assert workshop.count("compile") == 1
    assert not any(path.stat().st_mode & 0o022 for path in workshop.cache.rglob("*"))


@needs_root
def test_a_cache_of_root_serves_a_user_who_cannot_write_it(public_workshop):
    """As in a container's image: built at its making, used by whoever runs it."""
    workshop = public_workshop
    library = workshop.run().strip()
    for path in (workshop.cache, *workshop.cache.iterdir(), *workshop.cache.glob("*/*")):
        path.chmod(0o755)
    program = """
os.setgid(12345)
os.setuid(12345)
print(ask())
os.environ["SOURCES"] = os.environ["OTHER"]
try:
    ask()
except OpUnavailable as error:
    print(error)
"""
    other = workshop.folder / "other"
    shutil.copytree(workshop.sources, other)
    (other / "x.h").write_text("#define X 2\n")
    found, refused = workshop.run(program, OTHER=str(other)).splitlines()
    assert found == library
    assert f"op 'x' cannot be built in {workshop.cache}" in refused
    assert "Permission denied" in refused


@pytest.fixture
def public_workshop(monkeypatch, make_workshop):
    """In a folder that every user can read, which pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        workshop = make_workshop(Path(name))
        monkeypatch.setenv("CXX", str(workshop.compiler()))
        yield workshop


def test_a_full_disk_names_the_folder(workshop, monkeypatch):
    """The compiler writes to a device that is full."""
    compiler = workshop.compiler(before="cat /proc/self/status > /dev/full || exit 1", name="full")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(jit.BuildError) as caught:
        jit.build(workshop.spec())
    assert f"No space left on device in {workshop.cache}; make room there, or set TORCH_EXTENSIONS_DIR" in str(
        caught.value
    )
    assert sorted(path.suffix for path in workshop.cache.iterdir()) == [".lock"]


@pytest.mark.parametrize("limit", [100, 4096])
def test_a_limit_on_files_names_the_folder(workshop, limit):
    """The system refuses writes beyond a size: to the compiler, and to us."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    ask()
except OpUnavailable as error:
    print(type(error).__name__, error)
"""
    told = workshop.run(program)
    assert told.startswith("BuildError op 'x' cannot be built: File ")
    assert f" in {workshop.cache}; make room there" in told


def test_a_write_of_ours_that_fails_names_the_folder(workshop):
    program = """
import errno
def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.fsync = full
try:
    ask()
except OpUnavailable as error:
    print(error)
"""
    assert f"cannot be built: No space left on device in {workshop.cache}; make room" in workshop.run(program)
    assert list(workshop.cache.glob("x_*/manifest.json")) == []

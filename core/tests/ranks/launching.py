"""A command that becomes the process of a node, with the torch that this process has; `launch` of conftest.py forks it.

`launching.py EXECUTABLE MODULE ...` runs the module as `python -m` does; its ranks are started by EXECUTABLE. Where the
module would become another Python by `os.execv`, it goes on in the same process, as it does after a real one: an import
of torch takes 2 s of a core.
`test_launcher.py` has launches that are real from the first process on.
"""

import os
import runpy
import sys


def become(path, words):
    """Run `words` of a Python command line, `-c CODE ...` or `-m MODULE ...`, as `os.execv` of Python would."""
    assert path == words[0] == sys.executable, words
    option, text, *rest = words[1:]
    sys.stdout.flush()
    sys.path[0] = ""  # as Python has it for both options
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        assert option == "-c", words
        exec(text, {"__name__": "__main__"})  # noqa: S102 - the launcher's own words
    sys.exit(0)


if __name__ == "__main__":
    os.execv = become
    sys.executable = sys.argv[1]
    become(sys.executable, [sys.executable, "-m", *sys.argv[2:]])

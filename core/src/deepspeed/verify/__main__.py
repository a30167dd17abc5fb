"""`ds_verify` starts this on each rank: `python -m deepspeed.verify ROLE FOLDER STEPS FORM SCRIPT [arguments]`.

It runs the user's script as `python SCRIPT` would, or `python -m SCRIPT` where FORM is "module", with an engine that
records or with plain torch. Each rank begins with fixed seeds of its own, so that a script that sets none draws the
same numbers in both runs.
"""

import os
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

from deepspeed.verify.plain import against_plain
from deepspeed.verify.recording import recorded

_ROLES = {"record": recorded, "compare": against_plain}


def main() -> None:
    """Run the script; its end, and its errors, are this process's."""
    words = sys.argv[1:]
    of_launcher = [words.pop(0)] if words[0].startswith("--local_rank") else []  # it is the script's
    role, folder, num_steps, form, script, *arguments = words
    sys.argv = [script, *of_launcher, *arguments]
    seed = int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    with _ROLES[role](folder, int(num_steps)):
        if form == "module":
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

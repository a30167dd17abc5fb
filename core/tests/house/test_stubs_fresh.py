"""The stubs of lazily loaded packages say what their tables say, and an editor completes from them."""

import subprocess
import sys
from pathlib import Path

import jedi

GENERATOR = Path(__file__).parents[3] / "docs" / "generate" / "stubs.py"


def completions(text):
    script = jedi.Script(text)
    return {found.name for found in script.complete(len(text.splitlines()), len(text.splitlines()[-1]))}


def test_stubs_equal_the_tables():
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_editor_completes_public_names():
    assert {"initialize", "init_inference"} <= completions("import deepspeed\ndeepspeed.init")
    assert "GatheredParameters" in completions("import deepspeed\ndeepspeed.zero.Gath")
    assert "PipelineModule" in completions("from deepspeed.pipe import Pipel")


def test_an_editor_completes_the_engines_methods():
    text = "import deepspeed\nengine, optimizer, _, _ = deepspeed.initialize()\nengine.save_"
    assert "save_checkpoint" in completions(text)


def test_an_editor_shows_the_parameters_of_initialize():
    text = "import deepspeed\ndeepspeed.initialize("
    (signature,) = jedi.Script(text).get_signatures(2, len("deepspeed.initialize("))
    assert {"model", "config", "model_parameters"} <= {param.name for param in signature.params}

"""Examples in docstrings of `deepspeed.ops` run, and print what they say."""

import doctest
import importlib

import pytest

WITH_EXAMPLES = [
    "adam.adam",
    "muon.muon",
    "op_builder.spec",
    "fp_quantizer.quantize",
    "quantizer.floats",
    "quantizer.groups",
    "quantizer.packed",
    "registry",
    "transformer.activations",
    "transformer.decode_attention",
    "transformer.linear",
    "transformer.norm",
    "transformer.rotary",
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(builders, name):
    done = doctest.testmod(importlib.import_module(f"deepspeed.ops.{name}"))
    assert done.attempted
    assert not done.failed

"""`InferenceEngine.export`: what transformers loads again is the plain model, from 1, 2 and 3 ranks."""

import copy
import importlib

import deepspeed
import pytest
import torch
from deepspeed.errors import CheckpointError, ConfigError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

from .test_inference import FAMILIES, create, logits_of


def export_job(name, tp, path):
    plain = create(name)
    engine = deepspeed.init_inference(copy.deepcopy(plain), mp_size=tp, dtype=torch.float)
    engine.export(path)
    loaded = type(plain).from_pretrained(path)
    expected = plain.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert torch.equal(logits_of(loaded.eval(), name), logits_of(plain, name))
    torch.testing.assert_close(logits_of(engine, name), logits_of(plain, name), atol=1e-4, rtol=1e-4)  # as before


IN_EVERY_RUN = {("gpt2", 2), ("llama", 3), ("bloom", 2), ("falcon", 3), ("t5", 2)}


@pytest.mark.parametrize(
    ("name", "tp"), swept([(name, tp) for name in FAMILIES for tp in (2, 3)], lambda *case: case in IN_EVERY_RUN)
)
def test_the_parts_of_a_divided_model_are_whole_again(name, tp, tmp_path):
    run_ranks(tp, export_job, name, tp, str(tmp_path / "exported"))


def test_one_rank_without_a_launcher(tmp_path):
    export_job("gpt2", 1, tmp_path / "exported")


def test_the_type_is_that_of_the_engine(tmp_path):
    deepspeed.init_inference(create("gpt2"), dtype=torch.bfloat16).export(tmp_path)
    loaded = importlib.import_module("transformers").GPT2LMHeadModel.from_pretrained(tmp_path)
    assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16}


def file_job(path):
    engine = deepspeed.init_inference(create("gpt2"), mp_size=2, dtype=torch.float)
    own = torch.distributed.get_rank() == 0
    with pytest.raises(ConfigError if own else CheckpointError, match="found the file .*; give a folder"):
        engine.export(path)


def test_a_file_in_the_way_is_refused_on_every_rank(tmp_path):
    (tmp_path / "model").write_text("")
    run_ranks(2, file_job, str(tmp_path / "model"))


def test_what_is_no_model_of_transformers_and_what_is_rounded():
    engine = deepspeed.init_inference(torch.nn.Linear(2, 2), dtype="fp32")
    with pytest.raises(ConfigError, match="Linear has no save_pretrained"):
        engine.export("unused")
    tied = deepspeed.init_inference(create("gpt2"), dtype="int8", quant={"weight": {"output_num_bits": 8}})
    with pytest.raises(ConfigError, match="output layer in few bits.*leave quant.weight.output_num_bits out"):
        tied.export("unused")


def few_bits_job(name, tp, keys, path):
    plain = create(name)
    engine = deepspeed.init_inference(copy.deepcopy(plain), mp_size=tp, **keys)
    expected = logits_of(engine, name)
    engine.export(path)
    loaded = type(plain).from_pretrained(path)
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    assert {param.dtype for param in loaded.parameters()} == {torch.float}
    torch.testing.assert_close(logits_of(loaded.eval(), name), expected, atol=1e-4, rtol=1e-4)
    assert not torch.equal(logits_of(plain, name), expected)
    torch.testing.assert_close(logits_of(engine, name), expected, atol=0, rtol=0)  # as before
    with pytest.raises(StateError, match=r"^state_dict: .* init_inference packed"):
        engine.module.state_dict()


FEW_BITS = [
    ("gpt2", 1, {"dtype": torch.int8}),
    ("llama", 1, {"dtype": "fp8", "quant": {"weight": {"output_num_bits": 6}}}),
    ("gpt2", 1, {"dtype": "fp6", "replace_with_kernel_inject": True}),
    ("gpt2", 2, {"dtype": torch.int8, "quant": {"weight": {"num_bits": 4}}}),
    ("llama", 2, {"dtype": "fp8", "quant": {"weight": {"output_num_bits": 8}}}),
    ("falcon", 2, {"dtype": torch.int8, "replace_with_kernel_inject": True}),
]


@pytest.mark.parametrize(("name", "tp", "keys"), FEW_BITS)
def test_weights_in_few_bits_are_written_as_the_numbers_they_stand_for(name, tp, keys, tmp_path):
    run_ranks(tp, few_bits_job, name, tp, keys, str(tmp_path / "exported"))

"""A rank that loads a checkpoint by range never holds a model: its peak is its shard, and one buffer.

Of a packed model it is what is packed, and a few times one weight, or one expert.
"""

import ctypes
import re
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.inference.load_weights import BUFFER_BYTES
from deepspeed.testing.distributed import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SIZES = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12},
    **{"vocab_size": 4000, "tie_word_embeddings": False, "max_position_embeddings": 64},
}
WITHIN = 1.15


def resident_bytes(key):
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def empty_model():
    with deepspeed.OnDevice(dtype=torch.float, device="meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def peak_of(create, keys):
    """(peak of resident bytes above those before the call, bytes of this rank's weights)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed memory of before takes the weights
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = resident_bytes("VmRSS")
    engine = deepspeed.init_inference(create(), dtype=torch.float, **keys)
    peak = resident_bytes("VmHWM") - before
    shard = sum(param.numel() * param.element_size() for param in engine.module.parameters())
    return peak, shard


MIXTRAL = {
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8},
    **{"num_local_experts": 16, "vocab_size": 1000, "max_position_embeddings": 64},
}
EXPERT_BYTES = 4 * 2 * 1024 * 512


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()


def held_bytes(model):
    packed = [each for one in model.modules() for each in getattr(one, "packed_weights", {}).values()]
    plain = {id(param): param for param in model.parameters() if param.is_floating_point()}
    return sum(each.num_bytes for each in packed) + sum(param.nbytes for param in plain.values())


def pack_job(checkpoint):
    """(of a load, of a model that is there) peak above what is packed, and bytes of a layer's experts."""

    def above(create, **keys):
        model = create()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        engine = deepspeed.init_inference(model, dtype=torch.int8, **keys)
        return resident_bytes("VmHWM") - before, held_bytes(engine.module)

    def empty():
        with deepspeed.OnDevice(dtype=torch.float, device="meta"):
            return MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()

    above(empty, checkpoint=checkpoint)  # imports the rest
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: larger pieces go back as soon as they are free
    loads = [above(empty, checkpoint=checkpoint) for _ in range(2)]
    return [min(loads), above(mixtral)]  # what else the process touched for the first time is not the load's


def test_the_peak_of_a_packed_load_is_what_is_packed_and_an_expert(tmp_path):
    mixtral().save_pretrained(tmp_path, max_shard_size="20MB")
    (loaded, held), (in_place, _) = run_ranks(1, pack_job, str(tmp_path / "model.safetensors.index.json"))[0]
    assert 0.9 * held < loaded < WITHIN * held + 8 * EXPERT_BYTES  # half of one weight
    assert in_place < 0.75 * held  # weights go as they are packed


def load_job(tp, checkpoint, folder):
    deepspeed.init_inference(empty_model(), mp_size=tp, dtype=torch.float, checkpoint=checkpoint)  # imports the rest
    keys = {"mp_size": tp, "checkpoint": checkpoint}
    results = {
        "whole files": min(peak_of(empty_model, keys) for _ in range(2))
    }  # what else the process touched for the first time is not the load's
    if tp == 2:
        results["pre-sharded"] = min(peak_of(empty_model, {"mp_size": tp, "checkpoint": folder}) for _ in range(2))
    if tp == 3:
        folder = Path(checkpoint).parent
        results["whole before"] = peak_of(lambda: LlamaForCausalLM.from_pretrained(folder), {"mp_size": tp})
    return results


def save_parts_job(tp, checkpoint, folder):
    deepspeed.init_inference(
        empty_model(), mp_size=tp, dtype=torch.float, checkpoint=checkpoint, save_mp_checkpoint_path=folder
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="60MB")
    return str(folder / "model.safetensors.index.json")


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_peak_is_the_shard_and_one_buffer(tp, checkpoint, tmp_path):
    if tp == 2:
        run_ranks(tp, save_parts_job, tp, checkpoint, str(tmp_path))
    for results in run_ranks(tp, load_job, tp, checkpoint, str(tmp_path)):
        for how, (peak, shard) in results.items():
            is_within = 0.9 * shard < peak < WITHIN * shard + BUFFER_BYTES
            assert is_within == (how != "whole before"), (how, peak, shard)  # the limit separates the two

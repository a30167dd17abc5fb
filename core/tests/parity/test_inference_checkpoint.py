"""`checkpoint` of `init_inference`: a model without values gives the tokens of the plain one, on 1, 2 and 3 ranks."""

import json
import os
from unittest import mock

import deepspeed
import pytest
import torch
import transformers
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Transpose, WeightConverter

from .test_inference import COMMON, ENCODERS, FAMILIES, LLAMA, create, logits_of, tokens_of

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"  # as the files of Mixtral have it


def create_empty(name, **more):
    config_class, model_class, keys = FAMILIES[name]
    with deepspeed.OnDevice(dtype=torch.float, device="meta"):
        return getattr(transformers, model_class)(getattr(transformers, config_class)(**COMMON, **keys, **more)).eval()


def load(name, tp, checkpoint, **keys):
    return deepspeed.init_inference(create_empty(name), mp_size=tp, dtype=torch.float, checkpoint=checkpoint, **keys)


def check_equal(engine, name):
    plain = create(name)
    torch.testing.assert_close(logits_of(engine, name), logits_of(plain, name), atol=1e-4, rtol=1e-4)
    if name not in ENCODERS:
        assert torch.equal(tokens_of(engine, do_sample=False), tokens_of(plain, do_sample=False))


def check_values(engine, name):
    """Each parameter is bit-equal to this rank's part of the plain one."""
    expected = dict(create(name).named_parameters(remove_duplicate=False))
    for key, param in engine.module.named_parameters(remove_duplicate=False):
        part = getattr(param, "ds_model_part", None)
        assert torch.equal(param, expected[key] if part is None else part.take(expected[key])), key


def save_index(name, folder):
    """As transformers does: several files of safetensors, and the index."""
    create(name).save_pretrained(folder, max_shard_size="40KB")
    return str(folder / "model.safetensors.index.json")


def save_bloom_form(name, folder):
    """Files of torch.save without the prefix of the model inside, as bigscience's are, and a JSON beside them."""
    state = {key.removeprefix("transformer."): value for key, value in create(name).state_dict().items()}
    items = list(state.items())
    files = []
    for number in range(3):
        files.append(f"part-{number}.bin")
        torch.save(dict(items[number::3]), folder / files[-1])
    (folder / "checkpoints.json").write_text(json.dumps({"type": "BLOOM", "checkpoints": files, "version": 1.0}))
    return str(folder / "checkpoints.json")


def family_job(name, tp, checkpoint):
    engine = load(name, tp, checkpoint)
    check_values(engine, name)
    check_equal(engine, name)


IN_EVERY_RUN = {("gpt2", 1), ("gpt_neo", 2), ("gptj", 2), ("bloom", 3), ("llama", 3), ("falcon", 2), ("bert", 3)} | {
    *(("gpt_neox", 2), ("t5", 2), ("llama", 1), ("mixtral", 2))
}


@pytest.mark.parametrize(
    ("name", "tp"), swept([(name, tp) for name in FAMILIES for tp in (1, 2, 3)], lambda *case: case in IN_EVERY_RUN)
)
def test_an_index_of_transformers(name, tp, tmp_path):
    checkpoint = save_index(name, tmp_path)
    run_ranks(tp, family_job, name, tp, checkpoint) if tp > 1 else family_job(name, tp, checkpoint)


@pytest.mark.parametrize("tp", [1, 3])
def test_files_of_torch_by_json(tp, tmp_path):
    run_ranks(tp, family_job, "bloom", tp, save_bloom_form("bloom", tmp_path))


def test_a_folder_by_the_json_of_deepspeeds_tutorial(tmp_path):
    save_bloom_form("bloom", tmp_path)
    description = {"type": "DeepSpeed", "version": 0.3, "checkpoint_path": str(tmp_path)}
    (tmp_path / "tutorial.json").write_text(json.dumps(description))
    family_job("bloom", 1, str(tmp_path / "tutorial.json"))


def pre_shard_job(name, tp, checkpoint, folder):
    first = load(name, tp, checkpoint, save_mp_checkpoint_path=folder)
    again = load(name, tp, f"{folder}/ds_inference_config.json")
    whole = deepspeed.init_inference(
        create(name), mp_size=tp, dtype=torch.float, save_mp_checkpoint_path=f"{folder}/of-whole"
    )
    from_folder = load(name, tp, folder + "/of-whole")
    for engine in (first, again, whole, from_folder):
        check_values(engine, name)
    assert torch.equal(logits_of(again, name), logits_of(first, name))
    assert torch.equal(tokens_of(again, do_sample=False), tokens_of(first, do_sample=False))
    check_equal(from_folder, name)


@pytest.mark.parametrize(
    ("name", "tp"),
    swept(
        [(name, tp) for name in FAMILIES if name not in ENCODERS for tp in (1, 2, 3)],
        lambda *case: case in {("gpt2", 2), ("llama", 3), ("bloom", 1), ("falcon", 2), ("bloom", 3)},
    ),
)
def test_pre_sharded_files_give_the_same_tokens(name, tp, tmp_path):
    (tmp_path / "whole").mkdir()
    run_ranks(tp, pre_shard_job, name, tp, save_index(name, tmp_path / "whole"), str(tmp_path / "parts"))
    described = json.loads((tmp_path / "parts" / "ds_inference_config.json").read_text())
    assert (described["parallelization"], described["tp_size"], described["dtype"]) == ("tp", tp, "float32")
    parts = [f"tp_{rank:02d}_00.pt" for rank in range(tp)] if tp > 1 else []
    assert described["checkpoints"] == {"non_tp": ["non-tp.pt"], "tp": parts}
    assert sorted(path.name for path in (tmp_path / "parts").iterdir() if path.is_file()) == sorted(
        ["ds_inference_config.json", "non-tp.pt", *parts]
    )


def types_job(checkpoint, folder):
    for dtype in (torch.bfloat16, torch.half):
        engine = deepspeed.init_inference(
            create_empty("llama"), mp_size=2, dtype=dtype, checkpoint=checkpoint, save_mp_checkpoint_path=folder
        )
        expected = deepspeed.init_inference(create("llama"), mp_size=2, dtype=dtype)
        assert {param.dtype for param in engine.module.parameters()} == {dtype}
        assert torch.equal(logits_of(engine, "llama"), logits_of(expected, "llama"))
        again = deepspeed.init_inference(create_empty("llama"), mp_size=2, dtype=dtype, checkpoint=folder)
        assert torch.equal(logits_of(again, "llama"), logits_of(expected, "llama"))
        injected = deepspeed.init_inference(
            create_empty("llama"), mp_size=2, dtype=dtype, checkpoint=folder, replace_with_kernel_inject=True
        )
        assert torch.equal(tokens_of(injected, do_sample=False), tokens_of(expected, do_sample=False))
    packed = deepspeed.init_inference(create_empty("llama"), mp_size=2, dtype=torch.int8, checkpoint=checkpoint)
    expected = deepspeed.init_inference(create("llama"), mp_size=2, dtype=torch.int8)
    assert torch.equal(logits_of(packed, "llama"), logits_of(expected, "llama"))


def test_other_types_fused_blocks_and_packed_weights(tmp_path):
    run_ranks(2, types_job, save_index("llama", tmp_path), str(tmp_path / "parts"))


def test_values_that_a_model_has_are_those_of_the_checkpoint(tmp_path):
    checkpoint = save_index("gpt2", tmp_path)
    model = create("gpt2")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    engine = deepspeed.init_inference(model, dtype=torch.float, checkpoint=checkpoint, set_empty_params=True)
    check_equal(engine, "gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight


def training_job(name, tp, folder):
    config = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": tp}, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(model=create(name), config=config)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_training_checkpoint_loads_over_any_number_of_ranks(tp, tmp_path):
    """Files of `save_checkpoint` say which part each rank had."""
    run_ranks(2, training_job, "llama", 2, str(tmp_path))
    files = [f"t/mp_rank_{rank:02d}_model_states.pt" for rank in range(2)]
    (tmp_path / "files.json").write_text(json.dumps({"type": "DeepSpeed", "checkpoints": files, "version": 0.3}))
    run_ranks(tp, family_job, "llama", tp, str(tmp_path / "files.json"))


def megatron_job(folder):
    """Files of the parts of two ranks that do not say so, as Megatron's."""
    rank = torch.distributed.get_rank()
    divided = deepspeed.init_inference(create("gpt2"), mp_size=2, dtype=torch.float)
    torch.save({"model": divided.module.state_dict(), "args": None}, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    checkpoint = {"type": "Megatron", "version": 0.0, "checkpoints": ["0.pt", "1.pt"], "base_dir": folder}
    family_job("gpt2", 2, checkpoint)


def test_a_file_of_each_rank(tmp_path):
    run_ranks(2, megatron_job, str(tmp_path))
    checkpoint = {"type": "Megatron", "version": 0.0, "checkpoints": ["0.pt", "1.pt"]}
    with pytest.raises(CheckpointError, match="is divided over 2 tensor-parallel ranks, and the model over 1; give tp"):
        load("gpt2", 1, checkpoint, base_dir=str(tmp_path))


def test_names_without_base_dir_begin_at_the_json_and_the_section_says_the_same(tmp_path, monkeypatch):
    checkpoint = save_bloom_form("bloom", tmp_path)
    monkeypatch.chdir("/")
    check_values(load("bloom", 1, None, ckpt_config={"checkpoint_dir": checkpoint}), "bloom")
    described = json.loads((tmp_path / "checkpoints.json").read_text())
    check_values(load("bloom", 1, described, base_dir=str(tmp_path)), "bloom")
    section = {"checkpoint_dir": "checkpoints.json", "base_dir": str(tmp_path)}
    check_values(load("bloom", 1, None, checkpoint_config=section), "bloom")


# --- wrong ones


def fails(match, checkpoint, name="gpt2", error=CheckpointError, **keys):
    with pytest.raises(error, match=match) as caught:
        load(name, 1, checkpoint, **keys)
    assert "\n" not in str(caught.value)


def test_wrong_files_are_named(tmp_path):
    state = create("gpt2").state_dict()
    key = "transformer.h.1.attn.c_attn.weight"

    def saved(changed):
        torch.save(changed, tmp_path / "w.bin")
        return {"type": "gpt2", "checkpoints": ["w.bin"], "version": 1.0, "base_dir": str(tmp_path)}

    fails(rf"found no {key} of GPT2LMHeadModel in the dict", saved({k: v for k, v in state.items() if k != key}))
    fails(
        rf"found {key} of shape \(48, 100\) in .*w.bin, and the model's has \(48, 144\); build the model",
        saved({**state, key: torch.zeros(48, 100)}),
    )
    fails(rf"found {key} of torch.int8 .* quantized", saved({**state, key: torch.zeros(48, 144, dtype=torch.int8)}))
    fails(
        "found no transformer.wpe.* of GPT2LMHeadModel in the dict .of type gpt2., which has model.* another family",
        saved(create("llama").state_dict()),
    )
    good = saved(state)
    path = tmp_path / "w.bin"
    path.write_bytes(path.read_bytes()[:-1000])
    fails("w.bin is cut short", good)
    path.unlink()
    fails("w.bin is missing; check base_dir", good)


def mixtral_files(folder, changes):
    """Published names and forms; `changes` of the weights in one file."""
    create("mixtral").save_pretrained(folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    changes(state)
    save_file(state, path)
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            lambda state: state.pop(EXPERT),
            r"1.mlp.experts.gate_up_proj is joined of .* 3 of .*w1.weight, 4 of .*w3.weight",
        ),
        (
            lambda state: state.update({EXPERT: torch.zeros(39, 48)}),
            r"joined of .*0.w1.* \(40, 48\) .*2.w1.* \(39, 48\)",
        ),
        (
            lambda state: state.update({EXPERT: state[EXPERT].half()}),
            r"joined of .* torch.float32 and .*2.w1.* torch.float16",
        ),
    ],
)
def test_experts_that_do_not_fit_together_are_named(tmp_path, changes, match):
    fails(match, mixtral_files(tmp_path, changes), name="mixtral")


def test_experts_of_other_families(tmp_path):
    keys = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**COMMON, **LLAMA, **keys)
    torch.manual_seed(0)
    plain = transformers.Qwen3MoeForCausalLM(config).eval()
    plain.save_pretrained(tmp_path, max_shard_size="40KB")
    with deepspeed.OnDevice(dtype=torch.float, device="meta"):
        empty = transformers.Qwen3MoeForCausalLM(config)
    engine = deepspeed.init_inference(empty, dtype=torch.float, checkpoint=str(tmp_path))
    for (name, found), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_form_that_is_not_read_is_named(tmp_path):
    config = transformers.Qwen3MoeConfig(**COMMON, **LLAMA)
    with deepspeed.OnDevice(dtype=torch.float, device="meta"):
        empty = transformers.Qwen3MoeForCausalLM(config)
    name = "model.layers.0.self_attn.q_proj.weight"
    table = [WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", [Transpose()])]
    torch.save({name: torch.zeros(48, 48)}, tmp_path / "w.bin")
    with (
        mock.patch("transformers.conversion_mapping.get_model_conversion_mapping", return_value=table),
        pytest.raises(
            CheckpointError, match=rf"w.bin has {name} of Qwen3Moe.* \(Transpose\) is not done here; load the"
        ),
    ):
        deepspeed.init_inference(empty, dtype=torch.float, checkpoint=str(tmp_path / "w.bin"))


def test_weights_without_a_place_are_warned_of(tmp_path, caplog):
    from deepspeed.log import logger

    state = create("gpt2").state_dict()
    torch.save({**state, "transformer.h.2.ln_1.weight": torch.ones(48)}, tmp_path / "w.bin")
    logger.addHandler(caplog.handler)
    load("gpt2", 1, str(tmp_path / "w.bin"))
    logger.removeHandler(caplog.handler)
    assert "GPT2LMHeadModel has no place for transformer.h.2.ln_1.weight of" in caplog.text


@pytest.mark.parametrize(
    ("checkpoint", "match"),
    [
        ({"type": "BLOOM"}, "checkpoint.checkpoints: found None; give a list of file names"),
        ({"checkpoints": []}, "checkpoint.checkpoints: found .*; give a list"),
        ({"checkpoints": ["a"], "paralelization": "pp"}, "checkpoint.paralelization: .*did you mean 'parallelization'"),
        ({"checkpoints": ["a"], "parallelization": "dp"}, "checkpoint.parallelization: found 'dp'; give \"pp\""),
        ({"checkpoints": {"tp": ["a", "b", "c"]}, "tp_size": 2}, "tp_size 2 and 3 files in checkpoints.tp"),
        ({"checkpoints": {"tp": ["a"]}}, "checkpoint.tp_size: found no tp_size"),
        ({"checkpoints": ["a"], "parallelization": "tp", "mp_size": 2}, "found 1 for 2 ranks"),
        ({"checkpoints": ["a"], "mp_size": "2", "type": "Megatron"}, "checkpoint.mp_size: found '2'"),
        ({"weight_map": {"a": 1, "b": "x"}}, r"checkpoint.weight_map: found \[1, 'x'\]; give a list of file names"),
        ({"checkpoints": {"tp": ["a"]}, "tp_size": 1, "division": 5}, "checkpoint.division: found 5; give the list"),
        (7, "checkpoint: found int 7; give the path"),
    ],
)
def test_wrong_descriptions_are_named(checkpoint, match):
    fails(match, checkpoint, error=ConfigError)


def test_paths_that_lead_nowhere(tmp_path):
    fails("nowhere.json is missing", str(tmp_path / "nowhere.json"))
    fails("found none of ds_inference_config.json, .* in the folder", str(tmp_path))
    (tmp_path / "bad.json").write_text("{")
    fails("bad.json cannot be read as JSON", str(tmp_path / "bad.json"))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel on the meta device and no checkpoint"):
        deepspeed.init_inference(create_empty("gpt2"), dtype=torch.float)
    with pytest.raises(ConfigError, match="set_empty_params: found GPT2LMHeadModel and no checkpoint"):
        deepspeed.init_inference(create("gpt2"), dtype=torch.float, set_empty_params=True)


def open_files():
    return (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))


def one_rank_fails_job(folder):
    """Each way to fail on one rank alone ends both, with the reason."""
    rank = torch.distributed.get_rank()
    named = f"{folder}/{'missing' if rank else 'model.safetensors'}"
    with pytest.raises(CheckpointError, match="missing is missing" if rank else "rank 1: .*missing is missing"):
        load("gpt2", 2, {"checkpoints": [named]})
    assert [link for link in map(os.path.realpath, open_files()) if link.startswith(folder)] == []
    name = "cut.bin" if rank else "whole.bin"
    with pytest.raises(CheckpointError, match="found no .*ln_f.bias" if rank else "rank 1: .*found no .*ln_f.bias"):
        load("gpt2", 2, {"checkpoints": [f"{folder}/{name}"]})


def test_none_waits_for_a_rank_that_failed(tmp_path):
    create("gpt2").save_pretrained(tmp_path)
    state = create("gpt2").state_dict()
    torch.save(state, tmp_path / "whole.bin")
    torch.save({key: value for key, value in state.items() if key != "transformer.ln_f.bias"}, tmp_path / "cut.bin")
    run_ranks(2, one_rank_fails_job, str(tmp_path))


def save_parts_job(folder):
    deepspeed.init_inference(create("llama"), mp_size=2, dtype=torch.float, save_mp_checkpoint_path=folder)


def other_tp_job(folder):
    with pytest.raises(CheckpointError, match=r"divided over 2 tensor-parallel ranks, and the model over 3; give tp_s"):
        load("llama", 3, folder)


def other_plan_job(folder):
    with pytest.raises(CheckpointError, match="parts of a model that was divided otherwise; give the injection_policy"):
        load("llama", None, folder, tensor_parallel={"tp_size": 2, "tp_grain_size": 10})


def test_pre_sharded_files_of_another_division(tmp_path):
    run_ranks(2, save_parts_job, str(tmp_path))
    run_ranks(3, other_tp_job, str(tmp_path))
    run_ranks(2, other_plan_job, str(tmp_path))
    fails("divided over 2 tensor-parallel ranks, and the model over 1", str(tmp_path), "llama")


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("running", torch.ones(2))


def test_models_that_are_not_of_transformers(tmp_path):
    model = Counted()
    with torch.no_grad():
        model.running += 3
    torch.save(model.state_dict(), tmp_path / "w.pt")
    with torch.device("meta"):
        empty = Counted()
    with pytest.raises(ConfigError, match="found the buffer 'table' on the meta device, which no checkpoint has"):
        deepspeed.init_inference(empty, dtype=torch.float, checkpoint=str(tmp_path / "w.pt"))
    empty.table = torch.ones(2)
    empty.linear.scale = torch.ones(2, device="meta")
    with pytest.raises(ConfigError, match="found the tensor 'linear.scale' on the meta device, which is no parameter"):
        deepspeed.init_inference(empty, dtype=torch.float, checkpoint=str(tmp_path / "w.pt"))
    del empty.linear.scale
    engine = deepspeed.init_inference(empty, dtype=torch.float, checkpoint=str(tmp_path / "w.pt"))
    for name, value in model.state_dict().items():
        assert torch.equal(engine.module.state_dict()[name], value), name

"""fp32 weights out of checkpoints of every stage, and the program that stands alone."""

import contextlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import consolidate, consolidate_files, durable, layout, tags
from deepspeed.errors import CheckpointError

get_weights = consolidate.get_fp32_state_dict_from_zero_checkpoint
convert = consolidate.convert_zero_checkpoint_to_fp32_state_dict


@pytest.fixture
def intact(make_ranks, make_training, tmp_path):
    training = make_training(world_size=3)
    make_ranks(3).save(training, tmp_path / "ckpt", "global_step1")
    return training


@pytest.fixture
def saved(intact, tmp_path):
    """Without an index, as DeepSpeed saves it: tests change its files."""
    (tmp_path / "ckpt" / "global_step1" / layout.INDEX_FILE).unlink()
    return intact


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype, name
        assert found[name].shape == weight.shape, name
        assert torch.equal(found[name], weight), name


def test_a_tag_may_be_a_number(saved, tmp_path):
    """As in `save_checkpoint`."""
    (tmp_path / "ckpt/latest").write_text("7")
    for folder in (tmp_path / "ckpt").iterdir():
        if folder.is_dir():
            folder.rename(tmp_path / "ckpt/7")
    assert_same(get_weights(tmp_path / "ckpt", tag=7), saved.weights)


def test_the_masters_come_back_bit_for_bit(saved, tmp_path):
    found = get_weights(tmp_path / "ckpt")
    assert_same(found, saved.weights)
    assert found["head.weight"] is found["embed.weight"], "tied weights stay tied"


def test_more_than_nine_ranks_are_joined_in_order(make_ranks, make_training, tmp_path):
    training = make_training(world_size=12)
    make_ranks(12).save(training, tmp_path, "t")
    assert_same(get_weights(tmp_path), training.weights)


def test_partitions_may_be_unequal(saved, tmp_path):
    folder = tmp_path / "ckpt" / "global_step1"
    paths = [folder / layout.shard_file(rank, 0) for rank in range(3)]
    shards = [torch.load(path, weights_only=True) for path in paths]
    states = [shard["optimizer_state_dict"] for shard in shards]
    for group in range(2):
        whole = torch.cat([state["single_partition_of_fp32_groups"][group] for state in states])
        for state, part in zip(states, whole.split([1, 0, whole.numel() - 1])):
            state["single_partition_of_fp32_groups"][group] = part.clone()
    for shard, path in zip(shards, paths):
        torch.save(shard, path)
    assert_same(get_weights(tmp_path / "ckpt"), saved.weights)


def test_a_group_that_every_rank_holds_whole(saved, tmp_path):
    folder = tmp_path / "ckpt" / "global_step1"
    for rank in range(3):
        shard = torch.load(folder / layout.shard_file(rank, 0), weights_only=True)
        state = shard["optimizer_state_dict"]
        state["partition_count"] = [3, 1]
        state["single_partition_of_fp32_groups"][1] = torch.cat([w.reshape(-1) for w in saved.groups[1].values()])
        torch.save(shard, folder / layout.shard_file(rank, 0))
    assert_same(get_weights(tmp_path / "ckpt"), saved.weights)


def test_lazy_mode_reads_when_asked(saved, tmp_path):
    found = get_weights(tmp_path / "ckpt", lazy_mode=True)
    weight = found["lin.weight"]
    assert (weight.shape, weight.dtype, weight.numel()) == ((5, 3), torch.float32, 15)
    assert torch.equal(weight.contiguous(), saved.weights["lin.weight"])


def test_results_do_not_hang_on_the_files(saved, tmp_path):
    found = get_weights(tmp_path / "ckpt")
    for path in (tmp_path / "ckpt" / "global_step1").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    assert_same(found, saved.weights)


def test_without_frozen_parameters(saved, tmp_path):
    found = get_weights(tmp_path / "ckpt", "global_step1", exclude_frozen_parameters=True)
    assert set(saved.weights) - set(found) == {"frozen.weight"}


def test_a_trainable_weight_that_no_optimizer_has_comes_from_the_module(saved, tmp_path):
    path = tmp_path / "ckpt" / "global_step1" / layout.model_file(0)
    model = torch.load(path, weights_only=True)
    model["module"]["forgotten"] = torch.ones(3, dtype=torch.bfloat16)
    torch.save(model, path)
    assert torch.equal(get_weights(tmp_path / "ckpt")["forgotten"], torch.ones(3))


def test_stage_0_gives_the_modules_weights_as_fp32(make_ranks, make_training, tmp_path):
    training = make_training(world_size=1, stage=0)
    state = training.model_state()
    make_ranks(1)(lambda c, _: c.save(tmp_path, "t", model_state=state, shard_state=None))
    expected = {n: w.float() if w.is_floating_point() else w for n, w in state["module"].items()}
    assert_same(get_weights(tmp_path), {**expected, **training.frozen})


def test_stage_0_with_masters_in_the_model_file(make_ranks, make_training, tmp_path):
    training = make_training(world_size=1, stage=0)
    state = {**training.model_state(), "optimizer": training.shard_state(0)["optimizer_state_dict"]}
    make_ranks(1)(lambda c, _: c.save(tmp_path, "t", model_state=state, shard_state=None))
    assert_same(get_weights(tmp_path), training.weights)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stage_3(make_ranks, make_training, tmp_path, world_size):
    """Made by hand from the definition: every parameter cut into equal parts, parts of one rank end to end."""
    training = make_training(world_size=world_size, stage=3)

    def part(tensor, rank):
        width = math.ceil(tensor.numel() / world_size)
        padded = torch.full((width * world_size,), 99.0)
        padded[: tensor.numel()] = tensor.reshape(-1)
        return padded[rank * width : (rank + 1) * width].clone()

    def save(checkpointer, rank):
        model = training.model_state()
        for name in set(model["module"]) - set(training.buffers):
            model["module"][name] = torch.empty(0, dtype=torch.bfloat16)
        model["frozen_param_fragments"] = {name: part(w, rank) for name, w in training.frozen.items()}
        flat = torch.cat([part(w, rank) for group in training.groups for w in group.values()])
        cut = flat.numel() // 3  # sub-groups end anywhere, also inside a parameter
        shard = {"zero_stage": 3, "partition_count": world_size, "fp32_flat_groups": [flat[:cut], flat[cut:]]}
        checkpointer.save(tmp_path, "t", model_state=model, shard_state={"optimizer_state_dict": shard})

    outcomes = make_ranks(world_size, partitioned_model=True)(save)
    assert outcomes == [None] * world_size
    assert_same(get_weights(tmp_path), training.weights)


def test_a_former_version_is_found_after_a_kill_between_the_renames(saved, tmp_path):
    folder = tmp_path / "ckpt" / "global_step1"
    folder.rename(layout.former_folder(folder))
    assert_same(get_weights(tmp_path / "ckpt"), saved.weights)


def test_names_that_lightning_looks_up(saved, tmp_path):
    folder = tmp_path / "ckpt" / "global_step1"
    assert consolidate.get_model_state_file(folder, 2) == str(folder / "mp_rank_00_model_states.pt")
    files = consolidate.get_optim_files(str(folder))
    assert [Path(f).name for f in files] == [layout.shard_file(rank, 0) for rank in range(3)]
    assert torch.load(files[0], weights_only=True)["optimizer_state_dict"]["zero_stage"] == 2


def test_load_into_a_model(saved, tmp_path):
    model = torch.nn.Module()
    model.lin = torch.nn.Linear(3, 5, dtype=torch.float64)
    assert consolidate.load_state_dict_from_zero_checkpoint(model, tmp_path / "ckpt") is model
    assert torch.equal(model.lin.weight, saved.weights["lin.weight"].double())
    with pytest.raises(CheckpointError, match="of another model"):
        consolidate.load_state_dict_from_zero_checkpoint(torch.nn.ReLU(), tmp_path / "ckpt")


def test_names_that_only_one_side_has_are_reported(saved, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(consolidate, "_LOADED_BYTES", 64)  # a weight or two at a time
    model = torch.nn.Module()
    model.lin = torch.nn.Linear(3, 5)
    model.mine = torch.nn.Linear(2, 2, bias=False)
    consolidate.load_state_dict_from_zero_checkpoint(model, tmp_path / "ckpt")
    assert torch.equal(model.lin.weight, saved.weights["lin.weight"])
    assert torch.equal(model.lin.bias, saved.weights["lin.bias"])
    (message,) = (record.getMessage() for record in caplog.records if "not in the checkpoint" in record.getMessage())
    assert "not in the checkpoint: ['mine.weight']" in message
    for name in saved.weights.keys() - {"lin.weight", "lin.bias"}:
        assert repr(name) in message


def test_a_load_holds_few_weights_beside_the_model(large, monkeypatch):
    monkeypatch.setattr(consolidate, "_LOADED_BYTES", 2 * large.weight_bytes)
    model = torch.nn.Module()
    for index in range(12):
        model.register_parameter(f"w{index}", torch.nn.Parameter(torch.zeros(large.weight_bytes // 4)))
    before = sum(param.nbytes for param in model.parameters())
    consolidate.load_state_dict_from_zero_checkpoint(model, large.directory)
    assert model.w7[0] == 1
    assert len(large.added) == 12
    assert max(large.added) < before + 3.5 * large.weight_bytes


def broken(folder, what):
    shard = folder / layout.shard_file(1, 0)
    if what == "missing shard":
        shard.unlink()
    elif what == "missing last shard":
        (folder / layout.shard_file(2, 0)).unlink()
    elif what == "model parallel":
        for rank in range(3):
            (folder / layout.shard_file(rank, 1)).write_bytes((folder / layout.shard_file(rank, 0)).read_bytes())
    elif what == "no model file":
        (folder / layout.model_file(0)).unlink()
    elif what == "FIFO":
        shard.unlink()
        os.mkfifo(shard)
    elif what == "truncated":
        shard.write_bytes(shard.read_bytes()[:500])
    elif what == "other shapes":
        model = torch.load(folder / layout.model_file(0), weights_only=True)
        del model["param_shapes"][0]["lin.weight"]
        torch.save(model, folder / layout.model_file(0))
    elif what == "too short":
        model = torch.load(folder / layout.model_file(0), weights_only=True)
        model["param_shapes"][0]["lin.weight"] = torch.Size([500])
        torch.save(model, folder / layout.model_file(0))
    elif what in ("stage", "no masters", "masters in text"):
        content = torch.load(shard, weights_only=True)
        state = content["optimizer_state_dict"]
        if what == "stage":
            state["zero_stage"] = "x"
        elif what == "no masters":
            del state["single_partition_of_fp32_groups"]
        else:
            state["single_partition_of_fp32_groups"] = "1.0"
        torch.save(content, shard)
    elif what == "code":
        torch.save({"optimizer_state_dict": Path("x")}, shard)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing shard", r"shards of ranks \[0, 2\]"),
        ("missing last shard", "one of 3 shards"),
        ("model parallel", "shards of the model parallel ranks 0, 1, and 1 saved it"),
        ("no model file", "mp_rank_00_model_states.pt is missing"),
        ("truncated", "rank_1.*cannot be read"),
        ("FIFO", "rank_1.*is no regular file"),
        ("other shapes", "not of one checkpoint"),
        ("too short", "too early"),
        ("code", "rank_1.*was refused"),
        ("stage", "rank_1.*found zero_stage 'x', which is none of 0 to 3"),
        ("no masters", "rank_1.*found nothing as single_partition_of_fp32_groups"),
        ("masters in text", "rank_1.*found a str of another kind as single_partition_of_fp32_groups"),
    ],
)
def test_what_does_not_fit_is_refused(saved, tmp_path, what, words):
    broken(tmp_path / "ckpt" / "global_step1", what)
    with pytest.raises(CheckpointError, match=words):
        get_weights(tmp_path / "ckpt")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def test_one_flipped_bit_in_any_file_is_named(intact, tmp_path):
    names = sorted(path.name for path in (tmp_path / "ckpt" / "global_step1").iterdir())
    assert len(names) == 5
    for name in names:
        path = tmp_path / "ckpt" / "global_step1" / name
        flip(path)
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            get_weights(tmp_path / "ckpt")
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            convert(tmp_path / "ckpt", tmp_path / "out")
        flip(path)
    assert not (tmp_path / "out").exists()
    assert_same(get_weights(tmp_path / "ckpt"), intact.weights)


def test_without_verifying_sizes_are_compared(intact, tmp_path):
    path = tmp_path / "ckpt" / "global_step1" / layout.shard_file(1, 0)
    flip(path)
    assert set(get_weights(tmp_path / "ckpt", verify=False)) == set(intact.weights)
    path.write_bytes(path.read_bytes() + b"1")
    with pytest.raises(CheckpointError, match=r"rank_1.*is damaged: it has \d+ bytes, and was saved with \d+"):
        get_weights(tmp_path / "ckpt", verify=False)
    path.unlink()
    with pytest.raises(CheckpointError, match="rank_1.*is missing, and was saved with"):
        get_weights(tmp_path / "ckpt", verify=False)


def test_blocks_of_a_file_have_checksums_of_their_own(intact, tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "BLOCK_BYTES", 1000)
    content = bytes(range(256)) * 10
    (tmp_path / "file").write_bytes(content)
    sums = durable.BlockSums()
    sums.add(content)
    parts = []
    assert list(consolidate_files._checksums(tmp_path / "file", 1000, parts.append)) == sums.as_text()
    assert sum(parts) == len(content)


def test_missing_latest_and_tag(saved, tmp_path):
    layout_copy = tmp_path / "ckpt" / "global_step10"
    layout_copy.mkdir()
    (layout_copy / layout.model_file(0)).touch()
    (tmp_path / "ckpt" / "logs").mkdir()
    holds = re.escape("It holds: global_step1, global_step10.")
    with pytest.raises(CheckpointError, match=f"no checkpoint with the tag 'nope'. {holds}"):
        get_weights(tmp_path / "ckpt", "nope")
    with pytest.raises(CheckpointError, match="latest is missing"):
        get_weights(tmp_path)


def test_files_are_split_and_indexed(saved, tmp_path):
    out = tmp_path / "out"
    convert(tmp_path / "ckpt", out, max_shard_size=100)
    index = json.loads((out / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"]["head.weight"] == index["weight_map"]["embed.weight"], "tied weights in one file"
    assert index["metadata"]["total_size"] == sum(w.nbytes for n, w in saved.weights.items() if n != "head.weight")
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        found.update(torch.load(out / name, weights_only=True))
    assert_same(found, saved.weights)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert len(list(out.iterdir())) == 1 + len(set(index["weight_map"].values()))


def test_safetensors(saved, tmp_path):
    from safetensors.torch import load_file

    convert(tmp_path / "ckpt", tmp_path / "out", safe_serialization=True)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), saved.weights)


def test_safetensors_of_every_dtype_and_shape(saved, tmp_path):
    from safetensors.torch import load_file

    path = tmp_path / "ckpt" / "global_step1" / layout.model_file(0)
    model = torch.load(path, weights_only=True)
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    buffers = {f"é.{dtype}": torch.arange(3).to(dtype) for dtype in dtypes}
    buffers |= {"scalar": torch.tensor(7), "empty": torch.zeros(0, 3)}
    model["module"].update(buffers)
    torch.save(model, path)
    convert(tmp_path / "ckpt", tmp_path / "out", safe_serialization=True, max_shard_size=50)
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found.update(load_file(file))
    assert_same(found, {**saved.weights, **buffers})


def test_safetensors_refuse_a_dtype_that_they_cannot_hold(saved, tmp_path):
    path = tmp_path / "ckpt" / "global_step1" / layout.model_file(0)
    model = torch.load(path, weights_only=True)
    model["module"]["phase"] = torch.zeros(2, dtype=torch.complex64)
    torch.save(model, path)
    with pytest.raises(CheckpointError, match="phase has dtype torch.complex64"):
        convert(tmp_path / "ckpt", tmp_path / "out", safe_serialization=True)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("safe", "most_weights"), [(True, 1), (False, 2)])
def test_memory_holds_one_output_file(large, tmp_path, safe, most_weights):
    """Two weights to a file; a safetensors file is written weight by weight."""
    convert(large.directory, tmp_path / "out", max_shard_size=2 * large.weight_bytes, safe_serialization=safe)
    assert len(large.added) == 12
    assert max(large.added) < (most_weights + 1) * large.weight_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("1.5MiB", 3 * 2**19), ("7", 7), (7, 7), (1e9, 10**9), (0, None), ("0GB", None), (None, None)],
)
def test_sizes(text, nbytes):
    assert consolidate._parse_size_bytes(text) == nbytes


@pytest.mark.parametrize("size", ["5 apples", -3, "0.5", 1e-6, True, float("nan")])
def test_a_wrong_size_is_named(saved, tmp_path, size):
    with pytest.raises(ValueError, match=f"max_shard_size: found {size!r}"):
        convert(tmp_path / "ckpt", tmp_path / "out", max_shard_size=size)


def run_alone(directory, *arguments):
    """The script in a checkpoint directory, in a Python that cannot import this package."""
    blocker = (
        "import sys, runpy; sys.modules.update(deepspeed=None, safetensors=None); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", blocker, str(directory / "zero_to_fp32.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.fixture
def run_script(monkeypatch):
    """`run_script(directory, *arguments)`: as `run_alone`, in this process, which has torch already."""

    def run(directory, *arguments):
        command = [str(directory / "zero_to_fp32.py"), *map(str, arguments)]
        with monkeypatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
            for name in ("deepspeed", "safetensors"):
                patch.setitem(sys.modules, name, None)
            patch.setattr(sys, "argv", command)
            code = 0
            try:
                runpy.run_path(command[0], run_name="__main__")
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(command, code, stderr=errors.getvalue())

    return run


def test_deepspeeds_module_is_a_program(saved, tmp_path):
    command = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(tmp_path / "ckpt"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), saved.weights)
    done = subprocess.run([*command, "--tag", "none"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "zero_to_fp32: " in done.stderr


def test_the_script_beside_the_checkpoint_stands_alone(saved, tmp_path):
    script = tmp_path / "ckpt" / "zero_to_fp32.py"
    assert script.read_bytes() == tags.script()
    assert os.access(script, os.X_OK)
    done = run_alone(tmp_path / "ckpt", tmp_path / "ckpt", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    started, summary = done.stderr.splitlines()
    assert re.fullmatch(r"verifying and reading \d files in .*/ckpt/global_step1, \d\.\d MiB", started)
    end = f"MiB, as pytorch_model.bin in {tmp_path / 'out'}"
    assert summary.startswith(f"wrote {len(saved.weights)} weights and buffers, ")
    assert summary.endswith(end)
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), saved.weights)


def test_the_script_counts_shards_and_files(make_ranks, make_training, tmp_path):
    make_ranks(1).save(make_training(world_size=1), tmp_path / "ckpt", "global_step1")
    done = run_alone(tmp_path / "ckpt", tmp_path / "ckpt", tmp_path / "out", "--debug")
    assert done.returncode == 0, done.stderr
    assert "ZeRO stage 2, 1 shard\n" in done.stderr
    assert "(1 of 1 file)" in done.stderr


def test_the_script_verifies_by_itself(run_script, intact, tmp_path):
    path = tmp_path / "ckpt" / "global_step1" / layout.shard_file(2, 0)
    flip(path)
    done = run_script(tmp_path / "ckpt", tmp_path / "ckpt", tmp_path / "out")
    assert done.returncode == 1
    assert f"zero_to_fp32: {path} is damaged" in done.stderr
    done = run_script(tmp_path / "ckpt", tmp_path / "ckpt", tmp_path / "out", "--no_verify")
    assert done.returncode == 0, done.stderr


def test_the_script_writes_safetensors_by_itself(run_script, saved, tmp_path):
    from safetensors.torch import load_file

    done = run_script(tmp_path / "ckpt", tmp_path / "ckpt", tmp_path / "out", "--safe_serialization", "--lazy")
    assert done.returncode == 0, done.stderr
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), saved.weights)


@pytest.mark.parametrize("place", ["weights.bin", "weights.bin/below"])
def test_an_output_that_is_a_file(saved, tmp_path, place):
    (tmp_path / "weights.bin").write_text("mine")
    with pytest.raises(CheckpointError, match=r"output_dir: .*weights\.bin.* is a file.*; give a directory"):
        convert(tmp_path / "ckpt", tmp_path / place)
    assert (tmp_path / "weights.bin").read_text() == "mine"


def test_the_script_reports_errors_in_one_line(run_script, tmp_path, saved):
    done = run_script(tmp_path / "ckpt", tmp_path / "ckpt", tmp_path / "out", "-t", "nope")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("zero_to_fp32: ")
    assert "Traceback" not in done.stderr


def test_a_foreign_file_with_the_suffix_of_shards_is_named(saved, tmp_path):
    (tmp_path / "ckpt" / "global_step1" / "x_optim_states.pt").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="holds x_optim_states.pt, which is no optimizer shard"):
        get_weights(tmp_path / "ckpt")

"""Every combination of offload against no offload, over 20 steps, with a kill of all ranks and a resume in the middle.

Each run of a combination is killed after it has trained beyond its checkpoint, some of them inside an update; it goes
on in new processes. Beside it is the same training, unbroken and without offload. The cpu accelerator's memory is the
host's, so `HostPlacement.is_needed` is made to say yes: what is offloaded to "cpu" then has buffers of its own, and
every copy to and from them is made.

Differences are relative to the largest element of a tensor, max |a - b| / max |b|, over losses, norms, loss scales,
weights, master weights and moments: 1e-6. Where low precision meets accumulation, offload adds the sums of the
micro-batches in another order or another place, so that gradients are rounded otherwise; there it is 1e-2.
"""

import contextlib
import os
import signal
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from deepspeed.testing import offload
from deepspeed.testing.distributed import RankError, run_ranks
from deepspeed.testing.offload import loss_of, state_of, train, weights_of
from deepspeed.testing.tiers import covering
from deepspeed.zero.offload.host import HostPlacement
from deepspeed.zero.offload.nvme import NvmePlacement

NUM_STEPS, SAVED_STEP, KILL_STEP = 20, 10, 12
WORLDS = (1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # begins above what fp16 can hold: some steps are skipped, and the scale falls
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 6, "hysteresis": 1}},
}


class Case(NamedTuple):
    """One run. `optimizer` and `params`: the device of `offload_optimizer` and of `offload_param`."""

    world_size: int
    stage: int
    precision: str
    accumulates: bool
    clips: bool
    freezes: bool
    optimizer: str
    ratio: float
    params: str
    pipelines: bool = False  # pipeline_read and pipeline_write
    more: str = ""  # one of MORE

    @property
    def mix(self):
        """What it has in common with the run without offload."""
        return self._replace(optimizer="none", ratio=1.0, params="none", pipelines=False)


#: beyond the product: other optimizers, and dtypes of what is reduced
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "Lamb": {"zero_allow_untested_optimizer": True},
    "reduced in bf16": {"communication_data_type": "bf16"},
    "accumulated in fp32": {"data_types": {"grad_accum_dtype": "fp32"}},
}


def is_combination(case):
    offloads = (case.optimizer, case.params) != ("none", "none")
    return offloads and (case.stage == 3 or case.params == "none") and (case.optimizer != "none" or case.ratio == 1.0)


DEVICES = ("none", "cpu", "nvme")
TWO = (False, True)
CASES = [
    case._replace(pipelines=case.optimizer == "nvme" and (case.ratio == 1.0) is not case.accumulates)
    for values in product(WORLDS, (1, 2, 3), PRECISIONS, TWO, TWO, TWO, DEVICES, (1.0, 0.5), DEVICES)
    if is_combination(case := Case(*values))
]
NAMED = [
    Case(2, 2, "fp32", False, False, False, "cpu", 1.0, "none", more="Lamb"),
    Case(2, 2, "fp32", False, False, False, "nvme", 1.0, "none", more="Lamb"),
    Case(2, 1, "fp32", False, True, False, "cpu", 1.0, "none", more="reduced in bf16"),
    Case(2, 2, "fp32", False, False, False, "cpu", 1.0, "none", more="reduced in bf16"),
    Case(2, 1, "bf16", True, False, False, "nvme", 1.0, "none", more="accumulated in fp32"),
    Case(2, 2, "bf16", True, False, False, "cpu", 0.5, "none", more="accumulated in fp32"),
    Case(2, 3, "bf16", True, True, False, "nvme", 1.0, "nvme", more="accumulated in fp32"),
]


def bound_of(case):
    low = case.precision != "fp32"
    return 1e-2 if (low and case.accumulates) or case.more == "reduced in bf16" else 1e-6


# ---- on the ranks --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def separate_host_memory():
    """Inside, an engine takes the host's memory for another one than its device's."""
    kept, HostPlacement.is_needed = HostPlacement.is_needed, staticmethod(lambda device: True)
    try:
        yield
    finally:
        HostPlacement.is_needed = kept


def create_engine(case, path):
    section: dict[str, Any] = {"reduce_bucket_size": 100, "sub_group_size": 60}
    if case.optimizer != "none":
        pipelines = {"pipeline_read": case.pipelines, "pipeline_write": case.pipelines}
        section["offload_optimizer"] = {"device": case.optimizer, "nvme_path": path, "ratio": case.ratio, **pipelines}
    if case.params != "none":
        section["offload_param"] = {"device": case.params, "nvme_path": path, "buffer_count": 2, "max_in_cpu": 0}
    with separate_host_memory():
        return offload.create_engine(
            case.stage,
            section,
            freezes=case.freezes,
            kind="Lamb" if case.more == "Lamb" else "AdamW",
            gradient_accumulation_steps=1 + case.accumulates,
            gradient_clipping=0.05 * case.clips,
            **PRECISIONS[case.precision],
            **MORE[case.more],
        )


def end_of(engine):
    """The whole state, and the count of skipped steps."""
    return [*map(torch.Tensor.float, weights_of(engine)), *state_of(engine)], engine.skipped_steps


def check_places(engine, case):
    """Where master weights, gradients and shards of parameters are between steps is what the case asks for."""
    sharding, shards = engine.sharding, [shard for group in engine.sharding.units for shard in group.shards]
    moved = [shard for shard in shards if shard.placement.fetches or shard.placement.is_offloaded]
    if case.optimizer != "none":
        numel = sum(group.layout.numel for group in sharding.units)
        moved_numel = sum(group.layout.numel for group in sharding.units if group.placement.is_offloaded)
        assert moved_numel == pytest.approx(case.ratio * numel, rel=0.3)
        assert all(shard.placement.fetches is (case.optimizer == "nvme") for shard in moved)
    if case.optimizer == "nvme":
        for shard in moved:
            assert (shard.master.numel(), shard.grad) == (0, None)
            state = engine.basic_optimizer.state.get(shard.master, {})
            assert all(value.numel() == 0 or value.dim() == 0 for value in state.values())
    if case.optimizer == "cpu":
        weights = {group.flat_N.untyped_storage().data_ptr() for group in sharding.units if group.sharded is None}
        buckets = {gradients.untyped_storage().data_ptr() for gradients in sharding.gradients.memory.by_unit}
        for shard in moved:
            assert shard.master.untyped_storage().data_ptr() not in weights
            assert shard.grad.untyped_storage().data_ptr() not in buckets
    if case.stage == 2 and case.optimizer != "none" and case.ratio == 1.0:
        assert sum(gradients.numel() for gradients in sharding.gradients.memory.by_unit) == 0
    kind = {"none": "cpu", "cpu": "cpu", "nvme": "meta"}[case.params]
    units = engine.sharding.units.divided()
    assert {unit.shard_S.device.type for unit in units} == ({kind} if case.stage == 3 else set())
    assert all((unit.offloaded is not None) is (case.params != "none") for unit in units)


def tag_of(case):
    return "-".join(map(str, case)).replace(" ", "_")


def train_and_die_job(cases, folder):
    """Every run up to a checkpoint, a step beyond it and a backward; then all ranks are killed, if one has swap files
    inside an update."""
    expected, engines = {}, {}
    for case in dict.fromkeys(case.mix for case in cases):
        engine = create_engine(case, folder)
        expected[case] = train(engine, range(NUM_STEPS)), end_of(engine)
        engine.destroy()
    seen = {}
    for case in cases:
        engine = engines[case] = create_engine(case, folder)
        seen[case] = train(engine, range(SAVED_STEP))
        check_places(engine, case)
        engine.save_checkpoint(f"{folder}/checkpoints/{tag_of(case)}")
        train(engine, range(SAVED_STEP, KILL_STEP))
        engine.backward(loss_of(engine, 10 * KILL_STEP))
    results = {"expected": list(expected.values()), "seen": list(seen.values())}
    torch.save(results, f"{folder}/rank{dist.get_rank()}.pt")
    dist.barrier()
    if updated := [engines[case] for case in cases if case.optimizer == "nvme" and not case.accumulates]:
        store = NvmePlacement.store

        def store_and_die(placement, number):
            store(placement, number)
            if number > 0:
                os.kill(os.getpid(), signal.SIGKILL)

        NvmePlacement.store = store_and_die
        updated[-1].step()
    os.kill(os.getpid(), signal.SIGKILL)


def resume_job(cases, folder):
    """What each run has seen in the second half, and its state at the end."""
    found = []
    for case in cases:
        engine = create_engine(case, folder)
        train(engine, [0])  # states that the load replaces
        engine.load_checkpoint(f"{folder}/checkpoints/{tag_of(case)}")
        check_places(engine, case)
        found.append((train(engine, range(SAVED_STEP, NUM_STEPS)), end_of(engine)))
        engine.destroy()
        del engine
    dist.barrier()
    assert not list(Path(folder).glob("ds_swap_*")), "neither the killed runs nor these leave swap files"
    return found


# ---- comparison ----------------------------------------------------------------------------------------------------


def relative_difference(found, expected):
    """inf and nan, the norms of skipped steps, must stand in the same places."""
    assert torch.equal(found.isfinite(), expected.isfinite())
    found, expected = found[found.isfinite()], expected[expected.isfinite()]
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def assert_offload_changes_nothing(cases, folder):
    (world_size,) = {case.world_size for case in cases}
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(world_size, train_and_die_job, cases, str(folder), timeout_s=280)
    resumed = run_ranks(world_size, resume_job, cases, str(folder), timeout_s=280)
    states = []
    for rank in range(world_size):
        before = torch.load(folder / f"rank{rank}.pt", weights_only=True)
        expected = dict(zip(dict.fromkeys(case.mix for case in cases), before["expected"], strict=True))
        for case, first, (second, (tensors, skipped)) in zip(cases, before["seen"], resumed[rank], strict=True):
            seen, (its_tensors, its_skipped) = expected[case.mix]
            pairs = [(torch.cat([first, second]), seen), *zip(tensors, its_tensors, strict=True)]
            difference = max(relative_difference(*pair) for pair in pairs)
            assert difference <= bound_of(case), (case, difference)
            assert skipped == its_skipped
            assert (0 < skipped < NUM_STEPS) is (case.precision == "fp16")
        states.append([tensors for _, (tensors, _) in resumed[rank]])
    for other in states[1:]:
        assert all(all(map(torch.equal, *both)) for both in zip(states[0], other, strict=True)), "ranks differ"


COVERING = covering(CASES)


@pytest.mark.parametrize("world_size", WORLDS)
def test_offload_with_a_kill_in_the_middle_changes_nothing(tmp_path, world_size):
    assert_offload_changes_nothing([case for case in COVERING + NAMED if case.world_size == world_size], tmp_path)


def mix_of(case):
    return case.world_size, case.precision, case.accumulates, case.clips, case.freezes


@pytest.mark.sweep
@pytest.mark.parametrize(
    "cases",
    [list(cases) for _, cases in groupby(sorted(CASES, key=mix_of), mix_of)],
    ids=lambda cases: "-".join(map(str, mix_of(cases[0]))),
)
def test_every_combination_with_a_kill_in_the_middle_changes_nothing(tmp_path, cases):
    assert_offload_changes_nothing(cases, tmp_path)

"""What a search leaves open, what stays, and what a trial's ranks read."""

import pytest
from deepspeed.autotuning.space import STAGE, ModelInfo, Space, mapped_values
from deepspeed.autotuning.tuners import MICRO_BATCH
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError

OFFLOAD = "zero_optimization.offload_optimizer.device"


def make(user, info=None, said=None, ran=None, **section):
    config = DeepSpeedConfig({"autotuning": {"enabled": True, **section}}, batch_required=False).autotuning
    return Space(user, config, info or ModelInfo(ranks=4), said, ran)


def values(points, key):
    return sorted({point[key] for point in points})


def test_stage_and_micro_batch_are_open_where_nothing_is_said():
    points = make({"zero_optimization": {}}, max_train_micro_batch_size_per_gpu=8).coarse()
    assert [(point[STAGE], point[MICRO_BATCH]) for point in points[:5]] == [(0, 1), (0, 2), (0, 4), (0, 8), (1, 1)]
    assert values(points, STAGE) == [0, 1, 2, 3]


@pytest.mark.parametrize("zero", ["all", "auto", {"stage": "all"}, {"stage": "auto"}])
def test_the_stage_may_be_left_open_by_a_word(zero):
    assert values(make({"zero_optimization": zero, MICRO_BATCH: 1}).coarse(), STAGE) == [0, 1, 2, 3]


def test_what_is_written_stays():
    user = {
        MICRO_BATCH: 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    space = make(user)
    (point,) = space.coarse()
    assert space.settle(point) == user
    assert space.name(point) == "z2_tmbspg3_gas2"


def test_without_the_section_there_is_no_zero():
    space = make({"train_micro_batch_size_per_gpu": "auto"}, max_train_micro_batch_size_per_gpu=2)
    assert [space.settle(point) for point in space.coarse()] == [
        {MICRO_BATCH: size, "gradient_accumulation_steps": 1} for size in (1, 2)
    ]


def test_lists_are_what_is_tried():
    points = make({MICRO_BATCH: [3, 5], "zero_optimization": {"stage": [2, 1]}}).coarse()
    assert [(point[STAGE], point[MICRO_BATCH]) for point in points] == [(2, 3), (2, 5), (1, 3), (1, 5)]


def test_the_global_batch_bounds_the_micro_batch():
    section = {"max_train_batch_size": 48, "min_train_batch_size": 16}
    points = make({"gradient_accumulation_steps": 2}, **section).coarse()
    assert values(points, MICRO_BATCH) == [2, 4, 6]


def test_a_global_batch_that_is_written_stays():
    space = make({"train_batch_size": 48}, ModelInfo(ranks=4))
    points = space.coarse()
    assert values(points, MICRO_BATCH) == [1, 2, 3, 4, 6, 12]
    settled = space.settle(points[3])
    assert (settled["train_batch_size"], settled[MICRO_BATCH], settled["gradient_accumulation_steps"]) == (48, 4, 3)


def test_a_list_keeps_those_that_divide_the_global_batch():
    space = make({MICRO_BATCH: [3, 4, 6, 8], "train_batch_size": 48})
    assert values(space.coarse(), MICRO_BATCH) == [3, 4, 6]
    with pytest.raises(
        ConfigError, match=r"train_micro_batch_size_per_gpu: found \[5, 7\]; none divides train_batch_s"
    ):
        make({MICRO_BATCH: [5, 7], "train_batch_size": 48}).coarse()


def test_what_the_command_accumulates_stays():
    space = make({MICRO_BATCH: 1}, said={"gradient_accumulation_steps": 4})
    assert space.settle(space.coarse()[0])["gradient_accumulation_steps"] == 4


def test_no_micro_batch_that_fits_is_an_error():
    with pytest.raises(ConfigError, match="no micro-batch fits: from 1 to 1024 on 4 ranks, with train_batch_size 6"):
        make({"train_batch_size": 6}).coarse()


def test_bounds_that_nobody_gave_are_not_named():
    with pytest.raises(ConfigError, match="from 32 to 4 on 1 rank; allow others"):
        make(
            {}, ModelInfo(ranks=1), min_train_micro_batch_size_per_gpu=32, max_train_micro_batch_size_per_gpu=4
        ).coarse()


@pytest.mark.parametrize(
    ("config", "section", "found"),
    [
        ({MICRO_BATCH: 4}, {"mp_size": 2}, "autotuning.mp_size: found autotuning.mp_size 2 on 1 rank;"),
        ({MICRO_BATCH: "auto", "mesh": {"tp": 2}}, {}, "mesh.tp: found mesh.tp 2 on 1 rank;"),
        ({"mesh": {"tp": [2, 4], "pp": 3}}, {}, r"mesh.pp: found mesh.pp 3 and mesh.tp \[2, 4\] on 1 rank;"),
    ],
)
def test_a_mesh_that_the_ranks_cannot_form_is_what_the_error_names(config, section, found):
    with pytest.raises(ConfigError, match=found):
        make(config, ModelInfo(ranks=1), **section).coarse()


def test_the_command_says_the_smallest_micro_batch():
    points = make({MICRO_BATCH: "auto"}, said={MICRO_BATCH: 6}, max_train_micro_batch_size_per_gpu=30).coarse()
    assert values(points, MICRO_BATCH) == [6, 12, 24]


def test_the_mesh_is_open_where_it_says_auto():
    space = make({MICRO_BATCH: 2, "train_batch_size": 8, "mesh": {"tp": "auto"}}, ModelInfo(ranks=4))
    settled = {point["mesh.tp"]: space.settle(point) for point in space.coarse()}
    assert {tp: config["gradient_accumulation_steps"] for tp, config in settled.items()} == {1: 1, 2: 2, 4: 4}
    assert settled[2]["tensor_parallel"] == {"autotp_size": 2}
    assert space.name({STAGE: 0, "mesh.tp": 2, MICRO_BATCH: 2}) == "z0_tmbspg2_gas2_tp2"


def test_both_keys_of_an_axis_get_one_size():
    space = make({MICRO_BATCH: 1, "mesh": "auto", "tensor_parallel": {"autotp_size": "auto"}}, ModelInfo(ranks=2))
    assert [(point["mesh.tp"], point["tensor_parallel.autotp_size"]) for point in space.coarse()] == [(1, 1), (2, 2)]


def test_offload_is_open_where_it_says_auto():
    user = {MICRO_BATCH: 1, "zero_optimization": {"stage": [0, 2], "offload_optimizer": "auto"}}
    space = make(user)
    points = space.coarse()
    assert [(point[STAGE], point[OFFLOAD]) for point in points] == [(0, "none"), (2, "none"), (2, "cpu")]
    assert space.settle(points[2])["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(("is_host", "places"), [(False, ["cpu", "none"]), (True, None)])
def test_a_slow_search_tries_offload_where_it_moves_something(is_host, places):
    points = make({MICRO_BATCH: 1, "zero_optimization": {"stage": 1}}, ModelInfo(is_host=is_host), fast=False).coarse()
    assert [point.get(OFFLOAD) for point in points] == ([None] if places is None else ["none", "cpu"])


def test_other_settings_follow_at_the_best_micro_batches():
    user = {MICRO_BATCH: [1, 2, 4, 8], "zero_optimization": {"stage": [1, 2], "sub_group_size": [100, 200]}}
    space = make(user, num_tuning_micro_batch_sizes=2)
    points = space.coarse()
    assert all("zero_optimization.sub_group_size" not in point for point in points)
    assert space.settle(points[0])["zero_optimization"] == {"stage": 1, "sub_group_size": 100}
    fine = space.fine([(point, float(point[STAGE] * 10 + point[MICRO_BATCH])) for point in points])
    found = [(point[STAGE], point[MICRO_BATCH], point["zero_optimization.sub_group_size"]) for point in fine]
    assert found == [(2, 8, 100), (2, 8, 200), (2, 4, 100), (2, 4, 200)]
    assert space.settle(fine[1])["zero_optimization"]["sub_group_size"] == 200


def test_a_fast_search_is_over_then():
    space = make({MICRO_BATCH: 1, "zero_optimization": {"stage": 2}})
    assert space.fine([(space.coarse()[0], 1.0)]) == []


def test_a_slow_search_tries_buckets_of_the_models_size():
    space = make(
        {MICRO_BATCH: 1, "zero_optimization": {"stage": 3}}, ModelInfo(num_params=1600, is_host=True), fast=False
    )
    fine = space.fine([(space.coarse()[0], 1.0)])
    assert values(fine, "zero_optimization.reduce_bucket_size") == [100, 400, 1600]
    assert values(fine, "zero_optimization.stage3_prefetch_bucket_size") == [0, 100, 400]
    assert values(fine, "zero_optimization.overlap_comm") == [False, True]
    for point in fine:
        DeepSpeedConfig(space.settle(point), world_size=1)


def test_auto_that_others_fill_stays():
    user = {
        **{MICRO_BATCH: "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    space = make(user)
    settled = space.settle(space.coarse()[0])
    assert settled["optimizer"]["params"]["lr"] == settled["zero_optimization"]["reduce_bucket_size"] == "auto"
    assert settled["gradient_accumulation_steps"] == "auto"
    assert "train_batch_size" not in settled


# ---- memory -----------------------------------------------------------------------------------------------------


MODEL = tuple((f"layers.{at}.weight", 1_000_000, True) for at in range(16))


def needs(stage, micro=1, *, model=MODEL, **others):
    info = ModelInfo(parameters=model, num_params=16_000_000, activation_bytes=2**20, memory_bytes=2**40, ranks=4)
    space = make({"zero_optimization": {}, MICRO_BATCH: [micro], "optimizer": {"type": "AdamW"}, **others}, info)
    return space.bytes_needed({STAGE: stage, MICRO_BATCH: micro})


def test_memory_is_that_of_the_planner():
    plain = 4 * 16_000_000
    assert needs(0) >= 4 * plain  # weights, gradients and two states
    assert needs(0) - needs(1) == pytest.approx(2 * plain * 3 / 4, rel=0.05)
    assert needs(1) > needs(2) > needs(3)
    # in the update no activations are left
    assert needs(1, 65) - needs(1, 64) == 2**20


def test_frozen_weights_have_neither_gradients_nor_states():
    frozen = tuple((name, numel, False) for name, numel, _ in MODEL[:8]) + MODEL[8:]
    assert needs(0, model=frozen) == pytest.approx((1 + 3 / 2) * 4 * 16_000_000, rel=0.05)


def test_what_cannot_fit_is_left_out():
    info = ModelInfo(parameters=MODEL, activation_bytes=2**20, memory_bytes=200 * 2**20, num_params=16_000_000, ranks=4)
    space = make({"zero_optimization": {}, MICRO_BATCH: [1, 64, 1024]}, info)
    kept = {(point[STAGE], point[MICRO_BATCH]) for point in space.coarse()}
    assert (0, 1) not in kept
    assert (2, 1) in kept
    assert not any(micro == 1024 for _, micro in kept)
    assert len(space.pruned) == 12 - len(kept)


def test_an_estimate_alone_ends_no_search():
    info = ModelInfo(parameters=MODEL, activation_bytes=0, memory_bytes=1, num_params=16_000_000)
    assert len(make({"zero_optimization": {}}, info).coarse()) == 1


def test_what_needs_no_more_than_a_job_that_ran_is_not_left_out():
    info = ModelInfo(parameters=MODEL, activation_bytes=2**20, memory_bytes=2**20, num_params=16_000_000, ranks=4)
    user = {"zero_optimization": {"stage": [1, 2, 3]}, MICRO_BATCH: [1, 1024]}
    space = make(user, info, ran={STAGE: 2, MICRO_BATCH: 1})
    assert [(point[STAGE], point[MICRO_BATCH]) for point in space.coarse()] == [(2, 1), (3, 1)]


# ---- flags of a script ------------------------------------------------------------------------------------------


def test_flags_get_the_values_of_a_trial():
    config = {MICRO_BATCH: 4, "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 1}}
    mappings = {MICRO_BATCH: "-b", "gradient_accumulation_steps": "-g", "stage": "--zero", "zero_optimization.x": "-x"}
    assert mapped_values(config, mappings) == {"-b": 4, "--zero": 1}

"""The curriculum sampler: which samples come when, at every number of ranks, and on from any checkpoint."""

import json
from collections import Counter
from weakref import WeakSet

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.config.intake import parse_section
from deepspeed.config.training import DataEfficiencyConfig
from deepspeed.data.analyzer import DataAnalyzer
from deepspeed.data.sampler import Curriculum, CurriculumLoader, DeepSpeedDataSampler
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.log import warn_once

NUM_SAMPLES = 40
LENGTHS = [1 + number * 7 % 20 for number in range(NUM_SAMPLES)]  # each of 1 to 20 twice
RARITY = [number // 4 for number in range(NUM_SAMPLES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    DataAnalyzer(
        list(range(NUM_SAMPLES)),
        batch_size=8,
        metric_names=["length", "rarity"],
        metric_functions=[lambda batch: torch.tensor([LENGTHS[n] for n in batch]), lambda batch: batch // 4],
        metric_types=["single_value_per_sample"] * 2,
        metric_dtypes=[np.int64] * 2,
        save_path=str(folder),
    ).run_map_reduce()
    return folder


def metric(folder, name="length", **keys):
    merged = "_percentile_merged" if keys.get("difficulty_type") == "percentile" else ""
    return {
        "index_to_sample_path": str(folder / name / f"{name}_index_to_sample{merged}"),
        "index_to_metric_path": str(folder / name / f"{name}_index_to_metric"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 5,
        "max_difficulty": 20,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [5, 10, 20], "max_step": [2, 4]},
        **keys,
    }


def section(seed=7, num_epochs=3, **metrics):
    curriculum = {"enabled": True, "data_cluster_path": "unused", "curriculum_metrics": metrics}
    sampling = {"enabled": True, "num_epochs": num_epochs, "curriculum_learning": curriculum}
    return {"enabled": True, "seed": seed, "data_sampling": sampling}


def samplers(config, world_size=1, global_batch=12, num_steps=2):
    micro = global_batch // world_size // num_steps
    return [
        DeepSpeedDataSampler(config, NUM_SAMPLES, micro, rank, world_size, None, num_steps, rank)
        for rank in range(world_size)
    ]


def global_batches(ranks, count, num_steps=2):
    """The samples of `count` steps of all ranks, each as micro-batches, of which each has the ranks' in turn."""
    draws = [iter(rank) for rank in ranks]
    return [[sum((next(draw) for draw in draws), []) for _ in range(num_steps)] for _ in range(count)]


def flat(batches):
    return [sample for batch in batches for micro in batch for sample in micro]


def test_samples_are_within_the_difficulty_of_their_step(folder):
    (sampler,) = samplers(section(length=metric(folder)))
    for step, limit in enumerate([5, 5, 10, 10, 20, 20], start=1):
        batch = flat(global_batches([sampler], 1))
        assert max(LENGTHS[sample] for sample in batch) <= limit
        assert sampler.curriculum_step == step
        assert sampler.current_difficulties == {"length": limit}


# What DeepSpeed 0.19.6 draws with seed 7, in batches of 4, from the same metrics.
DRAWN = {
    "value": [
        0,
        29,
        12,
        20,
        23,
        3,
        6,
        9,
        4,
        26,
        32,
        15,
        3,
        21,
        1,
        9,
        33,
        0,
        35,
        24,
        36,
        28,
        10,
        11,
        13,
        32,
        18,
        12,
        31,
        37,
        27,
        8,
        39,
        34,
        29,
        22,
        26,
        14,
        30,
        16,
        7,
        38,
        23,
        6,
        5,
        19,
        20,
        18,
    ],
    "single": [
        28,
        20,
        4,
        0,
        32,
        10,
        30,
        12,
        9,
        14,
        19,
        22,
        38,
        24,
        27,
        3,
        26,
        13,
        17,
        39,
        37,
        18,
        36,
        35,
        1,
        8,
        7,
        33,
        16,
        15,
        6,
        29,
        23,
        2,
        5,
        25,
        31,
        21,
        34,
        11,
        1,
        21,
        28,
        38,
        14,
        23,
        29,
        5,
    ],
    "two": [
        3,
        0,
        12,
        6,
        9,
        12,
        9,
        0,
        27,
        3,
        6,
        1,
        20,
        6,
        4,
        18,
        21,
        16,
        26,
        12,
        29,
        5,
        17,
        11,
        14,
        25,
        7,
        23,
        24,
        8,
        15,
        39,
        35,
        31,
        33,
        10,
        34,
        37,
        22,
        20,
    ],
}


@pytest.mark.parametrize("kind", DRAWN)
def test_the_draws_are_deepspeeds(folder, kind):
    rising = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 3}}
    metrics = {
        "value": {"length": metric(folder)},
        "single": {"length": metric(folder, clustering_type="single_cluster")},
        "two": {
            "length": metric(folder),
            "rarity": metric(folder, "rarity", min_difficulty=3, max_difficulty=9, **rising),
        },
    }[kind]
    assert flat(global_batches(samplers(section(**metrics), global_batch=4), len(DRAWN[kind]) // 4)) == DRAWN[kind]


def test_every_sample_of_a_cluster_comes_before_one_comes_again(folder):
    one = metric(folder, clustering_type="single_cluster")
    (sampler,) = samplers(section(length=one), global_batch=8)
    drawn = flat(global_batches([sampler], 10))
    assert sorted(drawn[:40]) == sorted(drawn[40:]) == list(range(NUM_SAMPLES))
    assert drawn[:40] != drawn[40:] != list(range(NUM_SAMPLES))


def test_a_cluster_smaller_than_its_part_of_a_batch_is_gone_through_again(folder):
    """10 samples within 5, and batches of 24; DeepSpeed gives a short batch there (its issue 8520)."""
    (sampler,) = samplers(section(length=metric(folder)), global_batch=24)
    drawn = flat(global_batches([sampler], 1))
    assert len(drawn) == 24
    assert sorted(Counter(drawn).values()) == [2] * 6 + [3] * 4


def test_several_metrics_bound_a_sample_together(folder):
    config = section(
        length=metric(folder),
        rarity=metric(
            folder,
            "rarity",
            min_difficulty=3,
            max_difficulty=9,
            schedule_type="fixed_linear",
            schedule_config={"total_curriculum_step": 6, "difficulty_step": 3},
        ),
    )
    (sampler,) = samplers(config)
    for limit, rarity in [(5, 3), (5, 3), (10, 6), (10, 6), (20, 6), (20, 9)]:
        drawn = flat(global_batches([sampler], 1))
        assert sampler.current_difficulties == {"length": limit, "rarity": rarity}
        assert all(LENGTHS[sample] <= limit and RARITY[sample] <= rarity for sample in drawn)


def test_percentiles(folder):
    percent = metric(folder, difficulty_type="percentile", min_difficulty=10, max_difficulty=100)
    percent["schedule_config"] = {"difficulty": [10, 50, 100], "max_step": [2, 4]}
    (sampler,) = samplers(section(length=percent))
    easiest = np.argsort(LENGTHS, kind="stable")
    for share in (4, 4, 20, 20, 40):
        assert set(flat(global_batches([sampler], 1))) <= set(easiest[:share].tolist())


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_numbers_of_ranks_draw_the_same_global_batches(folder, world_size):
    config = section(length=metric(folder))
    assert global_batches(samplers(config, world_size), 8) == global_batches(samplers(config), 8)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("num_before", [0, 1, 3, 7])
def test_another_number_of_ranks_goes_on_where_the_former_stopped(folder, before, after, num_before):
    one = metric(folder, "rarity", clustering_type="single_cluster")
    config = section(num_epochs=10, length=metric(folder), rarity=one)
    unbroken = global_batches(samplers(config), 12)
    former = samplers(config, before)
    assert global_batches(former, num_before) == unbroken[:num_before]
    state = json.loads(json.dumps(former[-1].state_dict()))  # plain values alone
    later = samplers(config, after)
    for sampler in later:
        sampler.load_state_dict(state)
    assert global_batches(later, 12 - num_before) == unbroken[num_before:]


def test_a_step_that_was_left_in_the_middle_is_gone_on_with(folder):
    """Micro-batches of 6 before and of 4 after: what is left of a global batch comes first."""
    config = section(length=metric(folder))
    (former,) = samplers(config)
    first = next(iter(former))
    (later,) = samplers(config, num_steps=3)
    later.load_state_dict(former.state_dict())
    rest = flat(global_batches([later], 1, num_steps=3))
    (unbroken,) = samplers(config)
    assert first + rest == flat(global_batches([unbroken], 2))[:18]


def test_a_run_ends_after_its_epochs(folder):
    (sampler,) = samplers(section(num_epochs=1, length=metric(folder)), global_batch=10)
    assert sum(map(len, sampler)) == NUM_SAMPLES == len(sampler)


def test_the_state_of_a_small_cluster_stays_small(folder):
    """10 samples, gone through 120 times: their order is saved, and not each of the shuffles."""
    config = section(num_epochs=1000, length=metric(folder, schedule_config={"difficulty": [5, 20], "max_step": [500]}))
    (sampler,) = samplers(config)
    global_batches([sampler], 100)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert len(state["clusters"][0]["shuffles"]) == 1
    unbroken = global_batches([sampler], 10)
    (later,) = samplers(config)
    later.load_state_dict(state)
    assert global_batches([later], 10) == unbroken
    state["clusters"][0]["order"][0] = 1
    with pytest.raises(CheckpointError, match="found an order of other samples than those up to {'length': 5}"):
        later.load_state_dict(state)


@pytest.mark.parametrize("key", ["difficulties", "num_samples", "shuffles", "position"])
def test_a_damaged_state_is_refused_and_changes_nothing(folder, key):
    (sampler,) = samplers(section(length=metric(folder)))
    global_batches([sampler], 1)
    damaged, before = sampler.state_dict(), sampler.state_dict()
    damaged["clusters"] = [{name: value for name, value in damaged["clusters"][0].items() if name != key}]
    for call in (sampler.check_state_dict, sampler.load_state_dict):
        with pytest.raises(CheckpointError, match=f"found a damaged state \\(KeyError: '{key}'\\)"):
            call(damaged)
    assert sampler.state_dict() == before


def test_a_schedule_of_the_users(folder):
    (sampler,) = samplers(section(length=metric(folder, schedule_type="custom")))
    with pytest.raises(ConfigError, match=r"curriculum_metrics\.length\.schedule_type: found 'custom' and no function"):
        next(iter(sampler))
    (sampler,) = samplers(section(length=metric(folder, schedule_type="custom")))
    sampler.set_custom_curriculum_learning_schedule({"length": lambda step: 4 + step})
    for step in range(1, 5):
        assert max(LENGTHS[sample] for sample in flat(global_batches([sampler], 1))) <= 4 + step
    with pytest.raises(ConfigError, match="asked for metric 'depth'; the configuration has 'length'"):
        sampler.set_custom_curriculum_learning_schedule({"depth": int})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"difficulty_type": "size"}, r"length\.difficulty_type: found 'size'; choose 'value' or 'percentile'"),
        ({"clustering_type": None}, r"length\.clustering_type: found None; choose 'schedule_based' or"),
        ({"index_to_sample_path": None}, r"length\.index_to_sample_path: found None; give the path"),
        ({"index_to_metric_path": "nowhere"}, "found no file nowhere.idx"),
        ({"schedule_config": [1]}, r"length\.schedule_config: found \[1\]; give an object"),
        ({"max_difficulty": "20"}, r"length\.max_difficulty: found '20'; give a number"),
        (
            {"schedule_config": {"difficulty": 5, "max_step": []}},
            r"length\.schedule_config\.difficulty: found 5; give a list of numbers",
        ),
        (
            {"schedule_config": {"difficulty": [5, 20], "max_step": ["2"]}},
            r"length\.schedule_config\.max_step: found \['2'\]; give a list of numbers",
        ),
        ({"schedule_type": "quick"}, r"curriculum_metrics\.length\.schedule_type: found 'quick'"),
        ({"min_difficulty": 0}, "found no sample within {'length': 0}, of step 1; give a higher min_difficulty"),
    ],
)
def test_what_is_refused(folder, keys, message):
    if "min_difficulty" in keys:
        keys = {**keys, "schedule_config": {"difficulty": [0, 20], "max_step": [2]}}
    with pytest.raises(ConfigError, match=message):
        next(iter(samplers(section(length=metric(folder, **keys)))[0]))


def test_an_index_of_percentiles_is_no_index_of_values(folder):
    wrong = metric(folder, index_to_sample_path=metric(folder, difficulty_type="percentile")["index_to_sample_path"])
    with pytest.raises(ConfigError, match="found 40 groups of samples for 20 values; with difficulty_type 'value'"):
        samplers(section(length=wrong))


def test_a_state_of_another_run_is_refused(folder):
    (former,) = samplers(section(length=metric(folder)))
    global_batches([former], 3)
    (other,) = samplers(section(rarity=metric(folder, "rarity")))
    with pytest.raises(CheckpointError, match=r"a state of the metrics \['length'\], this run has \['rarity'\]"):
        other.load_state_dict(former.state_dict())
    renamed = section(length=metric(folder, "rarity"))
    with pytest.raises(CheckpointError, match="where the checkpoint had 10; give the index files of the former run"):
        samplers(renamed)[0].load_state_dict(former.state_dict())
    with pytest.raises(CheckpointError, match="found a state without consumed_samples, curriculum_step"):
        former.load_state_dict({})


def test_a_state_of_the_beginning_goes_back_to_the_least_difficulty(folder):
    (sampler,) = samplers(section(length=metric(folder)))
    first = sampler.state_dict()
    unbroken = global_batches([sampler], 6)
    assert sampler.current_difficulties == {"length": 20}
    sampler.load_state_dict(first)
    assert global_batches([sampler], 6) == unbroken


def test_an_index_of_a_larger_data_set_is_refused(folder):
    short = DeepSpeedDataSampler(section(length=metric(folder)), 20, 6, 0, 1, None, 2, 0)
    with pytest.raises(ConfigError, match=r"length\.index_to_sample_path: found sample \d\d of a data set of 20 s"):
        global_batches([short], 6)


def test_deepspeeds_state_goes_on_with_its_step(folder):
    (sampler,) = samplers(section(length=metric(folder)))
    generator = ("MT19937", np.zeros(3), 0, 0, 0.0)
    state = {"batch": [3], "consumed_samples": 48, "curriculum_step": 4, "current_difficulties": {"length": 10}}
    sampler.load_state_dict({**state, "data_cluster_paths": ["x"], "np_rng_state": generator})
    assert next(iter(sampler))[0] == 3
    assert (sampler.curriculum_step, sampler.current_difficulties) == (5, {"length": 20})


# ---- the loader ---------------------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, number):
        return number


def loader(folder, num_workers=0):
    (sampler,) = samplers(section(length=metric(folder)))
    return CurriculumLoader(Samples(), sampler, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_workers_have_loaded_in_advance_is_not_lost(folder, num_workers):
    whole = loader(folder)
    unbroken = [batch.tolist() for batch, _ in zip(whole, range(9), strict=False)]
    former = loader(folder, num_workers)
    batches = iter(former)
    given = [next(batches).tolist() for _ in range(3)]
    assert former.state_dict()["consumed_samples"] == 18
    later = loader(folder)
    later.load_state_dict(former.state_dict())
    given += [batch.tolist() for batch, _ in zip(later, range(6), strict=False)]
    assert given == unbroken
    del batches
    again = [batch.tolist() for batch, _ in zip(former, range(6), strict=False)]
    assert again == unbroken[3:]


@pytest.mark.parametrize("num_steps", [4, 8])
def test_a_global_batch_goes_on_in_its_middle_with_workers(folder, num_steps):
    """`next(iter(loader))` for each micro-batch, and a save after the third one of a global batch."""

    def make(num_workers=0):
        (sampler,) = samplers(section(length=metric(folder)), global_batch=2 * num_steps, num_steps=num_steps)
        return CurriculumLoader(Samples(), sampler, num_workers=num_workers)

    unbroken = [batch.tolist() for batch, _ in zip(make(), range(6), strict=False)]
    former, later = make(2), make(2)
    given = [next(iter(former)).tolist() for _ in range(3)]
    later.load_state_dict(former.state_dict())
    given += [next(iter(later)).tolist() for _ in range(3)]
    assert given == unbroken
    assert later.state_dict()["consumed_samples"] == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iteration_follows_a_checkpoint_loaded_within_it(folder, num_workers):
    """As the one of a pipeline, which keeps it."""
    each = loader(folder, num_workers)
    batches = iter(each)
    given = [next(batches).tolist() for _ in range(3)]
    state = each.state_dict()
    given += [next(batches).tolist() for _ in range(3)]
    each.load_state_dict(state)
    assert [next(batches).tolist() for _ in range(3)] == given[3:]
    assert each.state_dict()["consumed_samples"] == 36


def test_a_function_of_the_users_gets_the_difficulties(folder):
    cut = loader(folder)
    cut.post_process_func = lambda batch, state: (batch, state["current_difficulties"]["length"])
    assert [limit for (_, limit), _ in zip(cut, range(10), strict=False)] == [5] * 4 + [10] * 4 + [20] * 2


# ---- the engine ---------------------------------------------------------------------------------------------------


def create(folder, has_data=True, num_workers=0, **metrics):
    config = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
        "data_efficiency": section(**(metrics or {"length": metric(folder)})),
    }
    config["data_efficiency"]["data_sampling"]["num_workers"] = num_workers
    return deepspeed.initialize(
        model=torch.nn.Linear(1, 1),
        config=config,
        training_data=Samples() if has_data else None,
        collate_fn=torch.tensor,
    )[0]


def steps(engine, count):
    seen = []
    batches = iter(engine.training_dataloader)
    for _ in range(count):
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            seen.append(batch.tolist())
            engine.backward(engine(batch[:, None].float()).mean())
            engine.step()
    return seen


def test_the_engine_goes_on_from_its_checkpoint(single_rank, folder, tmp_path):
    engine = create(folder)
    assert engine.curriculum_learning_enabled()
    assert engine.data_sampling_enabled()
    unbroken = steps(engine, 2)
    engine.save_checkpoint(str(tmp_path))
    unbroken += steps(engine, 4)
    engine.destroy()
    engine = create(folder)
    engine.load_checkpoint(str(tmp_path))
    assert steps(engine, 4) == unbroken[4:]
    (sampler,) = samplers(section(length=metric(folder)))
    assert [micro for batch in global_batches([sampler], 6) for micro in batch] == unbroken


def test_a_checkpoint_of_other_metrics_changes_nothing(single_rank, folder, tmp_path):
    engine = create(folder)
    steps(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine = create(folder, rarity=metric(folder, "rarity"))
    before = engine.module.weight.clone()
    with pytest.raises(CheckpointError, match="a state of the metrics"):
        engine.load_checkpoint(str(tmp_path))
    assert torch.equal(engine.module.weight, before)
    assert engine.global_steps == 0


def test_a_checkpoint_without_draws_is_said(single_rank, folder, tmp_path, lines, make_engine):
    warn_once.cache_clear()
    make_engine(torch.nn.Linear(1, 1)).save_checkpoint(str(tmp_path))
    create(folder).load_checkpoint(str(tmp_path))
    assert [text for level, text in lines if level == "WARNING"] == [
        "load_checkpoint: found no data_sampler in the checkpoint, which this run's configuration asks for; it goes on "
        "as it is"
    ]


def test_the_engines_functions(single_rank, folder):
    engine = create(folder, length=metric(folder, schedule_type="custom"))
    engine.set_custom_curriculum_learning_schedule({"length": lambda step: 5 * step})
    engine.set_data_post_process_func(lambda batch, state: batch[: state["current_difficulties"]["length"]])
    assert [len(batch) for batch in steps(engine, 2)] == [5, 5, 6, 6]


def test_a_checkpoint_is_taken_by_a_loader_made_later(single_rank, folder, tmp_path):
    engine = create(folder)
    steps(engine, 2)
    engine.save_checkpoint(str(tmp_path))
    unbroken = steps(engine, 2)
    engine.destroy()
    engine = create(folder, has_data=False)
    engine.load_checkpoint(str(tmp_path))
    engine.save_checkpoint(str(tmp_path), tag="again")
    engine.training_dataloader = engine.deepspeed_io(Samples(), collate_fn=torch.tensor)
    assert steps(engine, 2) == unbroken
    engine.load_checkpoint(str(tmp_path), tag="again")
    assert steps(engine, 2) == unbroken


@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_follow_the_sizes_of_the_engine(single_rank, folder, num_workers):
    engine = create(folder)
    unbroken = sum(steps(engine, 3), [])
    engine = create(folder, num_workers=num_workers)
    seen = steps(engine, 1)
    engine.set_gradient_accumulation_steps(1)
    seen += steps(engine, 2)
    assert [len(batch) for batch in seen] == [6] * 4
    assert sum(seen, [])[:12] == unbroken[:12]
    assert engine.training_dataloader.state_dict()["curriculum_step"] == 3
    engine.set_train_micro_batch_size(4)
    assert [len(batch) for batch in steps(engine, 2)] == [4, 4]
    assert engine.training_dataloader.state_dict()["curriculum_step"] == 5
    assert engine.training_dataloader.batch_size == 4


@pytest.mark.parametrize(
    ("written", "asked"), [({}, True), ({"pin_memory": False}, False), ({"pin_memory": True}, True)]
)
def test_page_locked_memory_is_as_written(folder, written, asked):
    config = section(length=metric(folder))
    config["data_sampling"].update(written)
    part = Curriculum(
        parse_section(DataEfficiencyConfig, config, "data_efficiency"),
        micro_batch_size=6,
        num_steps=2,
        rank=0,
        num_replicas=1,
    )
    assert part.loader(Samples(), can_pin=True, pin_memory=True).dataloader.pin_memory is asked


def test_the_curriculum_draws_the_training_data_alone(single_rank, folder, lines):
    warn_once.cache_clear()
    engine = create(folder)
    unbroken = steps(create(folder), 2)
    assert steps(engine, 1) == unbroken[:2]
    assert sorted(torch.cat(list(engine.deepspeed_io([3, 4, 5])))) == [3, 4, 5]
    assert [text for level, text in lines if level == "WARNING"] == [
        "deepspeed_io: found another data set than the first one, whose samples the curriculum draws; this one is "
        'shuffled without it. Give route="eval" for its own order'
    ]
    engine.training_dataloader = engine.deepspeed_io(engine.training_dataloader.dataset)
    assert steps(engine, 1) == unbroken[2:]
    with pytest.raises(ConfigError, match="batch_size: asked for 4, and the curriculum draws micro-batches of 6"):
        engine.deepspeed_io(engine.training_dataloader.dataset, batch_size=4)


@pytest.mark.parametrize("loads", ["by a loader of its own", "by deepspeed_io", "by a sampler of its own"])
def test_a_curriculum_without_a_loader_is_said_once(single_rank, folder, lines, monkeypatch, loads):
    monkeypatch.setattr("deepspeed.data.sampler._SAMPLERS", WeakSet())
    warn_once.cache_clear()
    engine = create(folder, has_data=False)
    batches = torch.utils.data.DataLoader(torch.arange(96), batch_size=6)
    if loads == "by deepspeed_io":
        batches = engine.deepspeed_io(Samples())
    if loads == "by a sampler of its own":
        (own,) = samplers(section(length=metric(folder)))
        batches = torch.utils.data.DataLoader(torch.arange(96), batch_sampler=own)
    for _, batch in zip(range(8), batches, strict=False):
        engine.backward(engine(batch[:, None].float()).mean())
        engine.step()
    assert [text for level, text in lines if level == "WARNING" and "curriculum" in text] == (
        []
        if loads != "by a loader of its own"
        else [
            "data_efficiency.data_sampling.curriculum_learning: found a curriculum, and no loader that draws by it, so "
            "that it changes nothing; pass initialize(training_data=...), or train with the loader that "
            "engine.deepspeed_io(dataset) returns"
        ]
    )


def test_without_a_curriculum(make_engine, lines):
    warn_once.cache_clear()
    engine = make_engine(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="found no curriculum; switch on data_efficiency"):
        engine.set_custom_curriculum_learning_schedule({})
    engine.set_data_post_process_func(print)
    assert [text for level, text in lines if level == "WARNING"] == [
        "set_data_post_process_func: found no curriculum over training data, so that nothing calls it"
    ]


def test_a_stage_that_loads_nothing_saves_what_the_others_drew(folder):
    """Another run may have that stage load."""
    written = parse_section(DataEfficiencyConfig, section(length=metric(folder)), "data_efficiency")
    (sampler,) = samplers(section(length=metric(folder)))
    global_batches([sampler], 3)
    idle = Curriculum(
        written,
        micro_batch_size=6,
        num_steps=2,
        rank=0,
        num_replicas=1,
        gather=lambda own: [sampler.state_dict(), own],
    )
    idle.loader(Samples())
    idle.agree()
    assert idle.state_dict() == idle.state_dict() == sampler.state_dict()

"""The order of samples at 1, 2 and 3 ranks, and across a resume at another number: curriculum and plain loader."""

import deepspeed
import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from deepspeed.data.analyzer import DataAnalyzer, DistributedDataAnalyzer
from deepspeed.errors import ConfigError
from deepspeed.pipe import PipelineModule
from deepspeed.testing.distributed import run_ranks

NUM_SAMPLES, BATCH = 36, 12
STAGES = (0, 1, 3)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, number):
        return torch.tensor(float(number))


def remainder(batch):
    return batch.long() % 9


def curriculum(folder):
    metric = {
        "index_to_sample_path": f"{folder}/remainder/remainder_index_to_sample",
        "index_to_metric_path": f"{folder}/remainder/remainder_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 2,
        "max_difficulty": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
    }
    learning = {"enabled": True, "curriculum_metrics": {"remainder": metric}}
    return {"enabled": True, "seed": 3, "data_sampling": {"enabled": True, "curriculum_learning": learning}}


def create(stage, section):
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage},
        **({"data_efficiency": section} if section else {}),
    }
    return deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config, training_data=Samples())[0]


def train(engine, count):
    """The samples of so many steps, of all ranks."""
    seen, batches = [], iter(deepspeed.utils.RepeatingLoader(engine.training_dataloader))
    for _ in range(count):
        step = []
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            parts = [None] * dist.get_world_size()
            torch.distributed.all_gather_object(parts, batch.tolist())
            step += sum(parts, [])
            engine.backward(engine(batch[:, None]).mean())
            engine.step()
        seen.append(step)
    return seen


def save_job(folder, stage, section, num_before):
    engine = create(stage, section)
    seen = train(engine, num_before)
    place = f"{folder}/{dist.get_world_size()}-{stage}"
    engine.save_checkpoint(place, client_state={"loader": engine.training_dataloader.state_dict()})
    seen += train(engine, 2) if section else []  # of which the checkpoint knows nothing
    engine.destroy()
    return seen


def resume_job(place, stage, section, count):
    engine = create(stage, section)
    _, client = engine.load_checkpoint(place)
    if not section:
        engine.training_dataloader.load_state_dict(client["loader"])
    seen = train(engine, count)
    engine.destroy()
    return seen


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("metrics"))
    analyzer = DataAnalyzer(
        Samples(),
        batch_size=5,
        metric_names=["remainder"],
        metric_functions=[remainder],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[np.int64],
        save_path=folder,
    )
    analyzer.run_map_reduce()
    return folder


@pytest.mark.parametrize("has_curriculum", [True, False])
def test_a_run_goes_on_at_another_number_of_ranks(metrics, tmp_path, has_curriculum):
    """By step, the samples of all ranks: those of an unbroken run of one rank, as sets with the plain loader, whose
    ranks take turns."""
    section = curriculum(metrics) if has_curriculum else None
    ordered = (lambda steps: steps) if has_curriculum else (lambda steps: [sorted(step) for step in steps])
    ((unbroken),) = run_ranks(1, resume_or_whole, None, 0, section, 9)
    for world_size, stage, num_before in ((1, 0, 2), (2, 1, 4), (2, 3, 1)):
        folder = tmp_path / f"{world_size}-{stage}"
        before = run_ranks(world_size, save_job, str(folder), stage, section, num_before)[0]
        assert ordered(before[:num_before]) == ordered(unbroken[:num_before])
        for later in (1, 2, 3):
            place = str(folder / f"{world_size}-{stage}")
            for seen in run_ranks(later, resume_job, place, stage, section, 9 - num_before):
                assert ordered(seen) == ordered(unbroken[num_before:]), (world_size, later)


def resume_or_whole(place, stage, section, count):
    engine = create(stage, section)
    seen = train(engine, count)
    engine.destroy()
    return seen


def analyze_job(folder):
    DistributedDataAnalyzer(
        Samples(),
        batch_size=4,
        metric_names=["remainder"],
        metric_functions=[remainder],
        metric_types=["single_value_per_sample"],
        save_path=folder,
    ).run_map_reduce()


def test_ranks_analyze_together(metrics, tmp_path):
    run_ranks(2, analyze_job, str(tmp_path))
    for name in ("index_to_metric", "index_to_sample", "sample_to_metric", "index_to_sample_percentile_merged"):
        for end in (".bin", ".idx"):
            path = f"remainder/remainder_{name}{end}"
            with open(f"{metrics}/{path}", "rb") as alone, open(f"{tmp_path}/{path}", "rb") as together:
                assert alone.read() == together.read(), path


def fails_on_one(batch):
    if torch.distributed.get_rank() == 1:
        raise OSError("no space is left")
    return remainder(batch)


def analyze_in_vain(folder):
    try:
        DistributedDataAnalyzer(
            Samples(),
            metric_names=["remainder"],
            metric_functions=[fails_on_one],
            metric_types=["single_value_per_sample"],
            save_path=folder,
        ).run_map_reduce()
    except (OSError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_fails_to_analyze_lets_none_wait(tmp_path):
    told, own = run_ranks(2, analyze_in_vain, str(tmp_path))
    assert own == "OSError: no space is left"
    assert told == "ConfigError: DataAnalyzer: rank 1 failed with OSError: no space is left; see its own output"


def pipeline_job(section):
    layers = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
        "data_efficiency": section,
    }
    data = [(torch.tensor([float(number)]), torch.tensor([float(number)])) for number in range(NUM_SAMPLES)]
    engine = deepspeed.initialize(model=model, config=config, training_data=data)[0]
    seen = []
    engine.set_batch_fn(lambda batch: seen.append(batch[0].flatten().tolist()) or batch)
    for _ in range(3):
        engine.train_batch()
    state = engine.training_dataloader.state_dict()
    engine.destroy()
    return seen, state


def test_both_ends_of_a_pipeline_draw_the_same(metrics):
    (first, state), (last, other) = run_ranks(2, pipeline_job, curriculum(metrics))
    unbroken = run_ranks(1, resume_or_whole, None, 0, curriculum(metrics), 3)[0]
    assert first == last
    assert sum(first, []) == sum(unbroken, [])
    assert state == other


def stages_job(section, folder):
    layers = [torch.nn.Linear(1, 1) for _ in range(3)]
    model = PipelineModule(layers, num_stages=3, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
        "data_efficiency": section,
    }
    data = [(torch.tensor([float(number)]), torch.tensor([float(number)])) for number in range(NUM_SAMPLES)]
    engine = deepspeed.initialize(model=model, config=config, training_data=data)[0]
    engine.train_batch()
    engine.train_batch(iter([(torch.ones(BATCH // 2, 1), torch.ones(BATCH // 2, 1))] * 2))  # not drawn
    engine.train_batch()
    engine.save_checkpoint(folder, tag="draws")
    drawn = engine.training_dataloader.state_dict()
    engine.destroy()
    return drawn


def test_a_stage_that_loads_nothing_saves_what_the_first_drew(metrics, tmp_path):
    drawn = run_ranks(3, stages_job, curriculum(metrics), str(tmp_path))
    files = sorted((tmp_path / "draws").glob("mp_rank_*_model_states.pt"))
    states = [torch.load(file, weights_only=True)["data_sampler"] for file in files]
    assert drawn[0]["consumed_samples"] == 2 * BATCH
    assert states == [drawn[0]] * 3

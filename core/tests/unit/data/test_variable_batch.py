"""Batches of a number of tokens: which samples are in which, on which rank, and at which learning rate."""

import deepspeed
import pytest
import torch
from deepspeed.data.variable_batch import (
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
    scale_lr,
)
from deepspeed.errors import CheckpointError, ConfigError

LENGTHS = [3, 5, 7, 2, 9, 12, 4, 4, 6, 1, 8, 30, 5]

# What DeepSpeed 0.19.6 answers for packs of 15 tokens, and then what the last sample adds here, which it leaves out.
ANSWERS = [
    ({}, [(0, [0, 1, 2]), (1, [3, 4]), (2, [5]), (3, [6, 7, 8, 9]), (4, [10])], "12 into 4"),
    (
        {"sequence_picking_order": "seqlen"},
        [(0, [9, 3, 0, 6, 7]), (1, [1, 12]), (2, [8, 2]), (3, [10]), (4, [4])],
        "(5, [5])",
    ),
    (
        {"sequence_picking_order": "random", "seed": 3},
        [(0, [12, 1, 6]), (1, [0, 4]), (2, [10, 7]), (3, [5]), (4, [2, 8, 9])],
        "(5, [3])",
    ),
    ({"effective_batch_size": 2}, [(0, [0, 1, 2]), (0, [3, 4]), (1, [5]), (1, [6, 7, 8, 9])], ""),
    ({"min_batch_size": 2}, [(0, [0, 1, 2]), (1, [3, 4]), (2, [6, 7, 8, 9])], "(3, [10, 12])"),
    (
        {"max_batch_size": 2},
        [(0, [0, 1]), (1, [2, 3]), (2, [4]), (3, [5]), (4, [6, 7]), (5, [8, 9]), (6, [10])],
        "12 into 6",
    ),
    (
        {"effective_batch_size": 2, "required_microbatches_of_same_size": True},
        [(0, [0, 2]), (0, [1, 3]), (1, [4]), (1, [5]), (2, [6, 8]), (2, [7, 9])],
        "(3, [10]) (3, [12])",
    ),
]


@pytest.mark.parametrize(("keys", "packs", "last"), ANSWERS)
def test_packs(keys, packs, last):
    packs = [(number, list(pack)) for number, pack in packs]
    if " into " in last:
        sample, number = map(int, last.split(" into "))
        packs[number][1].append(sample)
    elif last:
        packs += eval(f"[{last.replace(') (', '), (')}]")
    found, sizes, longest = batch_by_seqlens(LENGTHS, 15, **keys)
    assert found == packs
    batches = range(packs[-1][0] + 1)
    members = [[each for number, pack in packs for each in pack if number == batch] for batch in batches]
    assert sizes == [len(each) for each in members]
    assert longest == [max(LENGTHS[sample] for sample in each) for each in members]


def test_some_samples_alone():
    assert batch_by_seqlens(torch.tensor(LENGTHS), 15, [12, 1, 5])[0] == [(0, [12, 1]), (1, [5])]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sequence_picking_order": "longest"}, "sequence_picking_order: found 'longest'; choose one of 'dataloader'"),
        ({"sequence_ids_per_mb": [3, 13]}, r"sample 13 is asked for, and there are lengths of 13 \(0 to 12\)"),
        ({"sequence_ids_per_mb": [-1]}, "sample -1 is asked for"),
        ({"seqlens": [3, 4, -2]}, "found the length -2 of sample 2; give the tokens of each sample"),
        ({"min_batch_size": 3, "max_batch_size": 2}, "max_batch_size: found 2, below min_batch_size 3"),
        ({"effective_batch_size": 9}, "found 5 packs of at most 15 tokens among 13 samples; a batch is 9 packs"),
    ],
)
def test_what_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        batch_by_seqlens(**{"seqlens": LENGTHS, "max_tokens": 15, **keys})


def test_learning_rates():
    assert [scale_lr(4, 8, 0.5, method) for method in ("linear", "sqrt", None)] == pytest.approx(
        [1.0, 0.5 * 2**0.5, 0.5]
    )
    with pytest.raises(ValueError, match="found 'cubic'; choose 'linear', 'sqrt' or None"):
        scale_lr(4, 8, 0.5, "cubic")


class Samples(torch.utils.data.Dataset):
    """As many numbers as the length says, each one above the sample's own."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, number):
        return torch.full((LENGTHS[number],), number + 1)


def pad(batch):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


def numbers(batch):
    return [int(row[0]) - 1 for row in batch]


def made(rank=0, **keys):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    keys = {"lr_scheduler_or_optimizer": optimizer, "effective_batch_size": 2, "dataloader_collate_fn": pad, **keys}
    loader, schedule, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size(
        Samples(), LENGTHS, 15, dataloader_rank=rank, **keys
    )
    return loader, schedule


def test_ranks_take_turns():
    loaders = [made(rank, dataloader_num_replicas=2)[0] for rank in range(2)]
    assert [list(map(numbers, loader)) for loader in loaders] == [[[0, 1, 2], [5]], [[3, 4], [6, 7, 8, 9]]]
    together = made(dataloader_batch_size=2)[0]
    assert list(map(numbers, together)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_samples_of_one_length():
    def fill(sample, length):
        return torch.nn.functional.pad(sample, (0, length - len(sample)))

    keys = {"required_microbatches_of_same_size": True, "required_microbatches_of_same_seqlen": True}
    loader, _ = made(**keys, sample_padding_fn=fill)
    assert [tuple(batch.shape) for batch in loader] == [
        (2, 7),
        (2, 7),
        (1, 12),
        (1, 12),
        (2, 6),
        (2, 6),
        (1, 8),
        (1, 8),
    ]
    with pytest.raises(ConfigError, match="and no sample_padding_fn; pass one"):
        made(**keys)


def test_the_rate_follows_the_size_of_the_batch():
    _, schedule = made()
    optimizer = schedule.optimizer
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.25])  # 5 samples, where 2 have a rate of 0.1
    _, schedule = made(effective_batch_size=1)
    sizes = [3, 2, 1, 4, 2]
    for size in [*sizes, *sizes]:
        assert schedule.get_last_lr() == pytest.approx([0.1 * size])
        schedule.step()
    schedule.step(0)
    assert schedule.get_lr() == pytest.approx([0.3])


def test_another_schedule_goes_on_below():
    """DeepSpeed's answers for StepLR(2, 0.5) and the square root."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    base = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    _, schedule = made(lr_scheduler_or_optimizer=base, lr_scaling_method="sqrt")
    rates = []
    for _ in range(7):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(
        [0.15811388, 0.15811388, 0.07905694, 0.07905694, 0.03952847, 0.03952847, 0.01976424], rel=1e-6
    )
    state = schedule.state_dict()
    _, again = made(lr_scheduler_or_optimizer=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert again.get_last_lr() == schedule.get_last_lr()


def test_a_run_goes_on_with_the_batch_after_the_last():
    loader, schedule = made(effective_batch_size=1)
    whole = list(map(numbers, loader))
    for _ in range(7):  # of batches of 5
        schedule.step()
    state = schedule.state_dict()
    loader, again = made(effective_batch_size=1)
    again.load_state_dict(state)
    assert list(map(numbers, loader)) == whole[2:]
    assert list(map(numbers, loader)) == whole
    assert again.get_last_lr() == pytest.approx([0.1])
    ranks = [made(rank, dataloader_num_replicas=2) for rank in range(2)]
    for _, each in ranks:
        each.load_state_dict({**state, "last_epoch": 3})
    assert [list(map(numbers, loader)) for loader, _ in ranks] == [[[5]], [[6, 7, 8, 9]]]


def test_batches_of_other_sizes_stay_those_of_this_run(lines):
    _, former = made(effective_batch_size=1, max_batch_size=2)
    former.step()
    loader, schedule = made(effective_batch_size=1)
    schedule.load_state_dict(former.state_dict())
    assert (schedule.batch_sizes, schedule.last_epoch) == ([3, 2, 1, 4, 2], 1)
    assert schedule.get_last_lr() == pytest.approx([0.2])
    assert "found a checkpoint of 7 batches" in str(lines)


def test_a_state_of_another_schedule_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    _, schedule = made(lr_scheduler_or_optimizer=optimizer)
    with pytest.raises(CheckpointError, match="found no base_lr_scheduler.* load_lr_scheduler_states=False"):
        schedule.check_state_dict(torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"found base_lrs \[0.1, 0.2\], for 1 param group"):
        schedule.check_state_dict({**schedule.state_dict(), "base_lrs": [0.1, 0.2]})
    with pytest.raises(CheckpointError, match="found last_epoch 'x'"):
        schedule.check_state_dict({**schedule.state_dict(), "last_epoch": "x"})
    schedule.check_state_dict(schedule.state_dict())


# ---- an engine ----------------------------------------------------------------------------------------------------


class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch):
        return (batch.float() * self.weight).mean()


def create(folder, further=None, **keys):
    section = {"enabled": True, "max_tokens": 15, "metrics_path": str(folder), **keys}
    config = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": section}},
        **(further or {}),
    }
    engine = deepspeed.initialize(model=Mean(), config=config)[0]
    loader, schedule, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        Samples(), engine, dataloader_collate_fn=pad, batch_seqlens_fn=lambda batch: (batch > 0).sum(dim=1)
    )
    engine.lr_scheduler = schedule
    return engine, loader


def test_an_engine_trains_on_packs(single_rank, tmp_path):
    engine, loader = create(tmp_path / "lengths")
    rates = []
    for batch in loader:
        if engine.schedule.is_boundary():
            rates += engine.get_lr()
        engine.backward(engine(batch))
        engine.step()
    assert rates == pytest.approx([0.25, 0.25])
    engine.save_checkpoint(str(tmp_path / "saved"))
    state = engine.lr_scheduler.state_dict()
    engine.destroy()
    again, _ = create(tmp_path / "lengths")  # which are there by now
    again.load_checkpoint(str(tmp_path / "saved"))
    assert again.lr_scheduler.state_dict() == state


def test_a_skipped_step_takes_its_batch_and_not_a_step_of_the_rates(single_rank, tmp_path):
    """bf16 skips steps of gradients that are not finite, as fp16 does."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}
    further = {"train_batch_size": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
    further["scheduler"] = schedule
    engine, loader = create(tmp_path, further)
    found, base = [], []
    for place, batch in enumerate(loader):
        found.append(engine.get_lr()[0])
        base += engine.lr_scheduler.base_lrs
        engine.backward(engine(batch) * (float("inf") if place == 1 else 1.0))
        engine.step()
    assert engine.skipped_steps == 1
    assert base[1] == base[2] < base[3] < base[4]
    assert found == pytest.approx([rate * size for rate, size in zip(base, [3, 2, 1, 4, 2], strict=True)])


def test_an_engine_says_who_makes_batches_of_tokens(single_rank, tmp_path, lines):
    section = {"enabled": True, "max_tokens": 15, "metrics_path": str(tmp_path)}
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": section}},
    }
    deepspeed.initialize(model=Mean(), config=config, training_data=Samples())[0].destroy()
    assert "dynamic_batching.enabled: found true with training_data, whose loader has batches of samples" in str(lines)


def test_a_section_that_lacks_something(single_rank, tmp_path):
    with pytest.raises(ConfigError, match="max_tokens: found nothing; give the most tokens of a pack"):
        create(tmp_path, max_tokens=None)
    with pytest.raises(ConfigError, match=r"dynamic_batching\.enabled: found false"):
        create(tmp_path, enabled=False)

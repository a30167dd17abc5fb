"""A small training's state as the engine gives it, and ranks that are threads."""

import ctypes
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, consolidate, layout, saved_run
from deepspeed.checkpoint.saved_run import SavedRun


def partitions(weights, world_size):
    """Weights of one group, end to end, padded to a multiple of 2 * world_size, cut into world_size parts."""
    flat = torch.cat([w.float().reshape(-1) for w in weights])
    padding = -flat.numel() % (2 * world_size)
    return list(torch.cat([flat, flat.new_zeros(padding)]).chunk(world_size)), padding


class Training:
    """Two parameter groups, a frozen weight, a buffer, a counter and a tied weight; bf16 with masters."""

    def __init__(self, world_size=2, stage=2, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator)

        self.world_size, self.stage, self.seed = world_size, stage, seed
        self.groups = [
            OrderedDict([("embed.weight", draw(7, 3)), ("lin.weight", draw(5, 3))]),
            OrderedDict([("lin.bias", draw(5)), ("scale", draw())]),
        ]
        self.frozen = {"frozen.weight": draw(4, 2)}
        self.buffers = {"running": draw(3).bfloat16().float(), "count": torch.tensor(11)}

    @property
    def weights(self):
        """What zero_to_fp32 must give back."""
        trained = {name: w for group in self.groups for name, w in group.items()}
        return {**trained, **self.frozen, **self.buffers, "head.weight": trained["embed.weight"]}

    def model_state(self):
        half = {name: w.bfloat16() if w.is_floating_point() else w for name, w in self.weights.items()}
        return {
            "module": OrderedDict(half),
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict((name, w.shape) for name, w in group.items()) for group in self.groups],
            "frozen_param_shapes": {name: w.shape for name, w in self.frozen.items()},
            "frozen_param_fragments": dict(self.frozen),
            "shared_params": {"head.weight": "embed.weight"},
            "lr_scheduler": {"last_batch_iteration": self.seed},
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": 0,
            "global_steps": self.seed,
            "global_samples": 8 * self.seed,
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
            "ds_config": {"train_batch_size": 8, "steps_per_print": float("inf")},
            "ds_version": "0.19.6",
        }

    def shard_state(self, rank):
        parts, paddings = zip(*(partitions(group.values(), self.world_size) for group in self.groups))
        last = rank == self.world_size - 1
        return {
            "optimizer_state_dict": {
                "zero_stage": self.stage,
                "partition_count": [self.world_size] * len(self.groups),
                "group_paddings": [padding if last else 0 for padding in paddings],
                "single_partition_of_fp32_groups": [part[rank] for part in parts],
                "base_optimizer_state": {
                    "state": {
                        i: {"step": torch.tensor(3.0), "exp_avg": part[rank] / 2} for i, part in enumerate(parts)
                    },
                    "param_groups": [{"lr": 0.1}, {"lr": 0.2}],
                },
            },
            "ds_config": {},
            "ds_version": "0.19.6",
        }


class Ranks:
    """Runs `call(checkpointer, rank)` on every rank at once; gives results or exceptions by rank."""

    def __init__(self, world_size, **options):
        self.world_size, self.options = world_size, options

    def __call__(self, call):
        barrier, values = threading.Barrier(self.world_size, timeout=30), [None] * self.world_size
        outcomes = [None] * self.world_size

        def run(rank):
            def gather(value):
                values[rank] = value
                barrier.wait()
                everyones = list(values)
                barrier.wait()
                return everyones

            checkpointer = Checkpointer(gather=gather, dp_rank=rank, dp_world_size=self.world_size, **self.options)
            try:
                outcomes[rank] = call(checkpointer, rank)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                outcomes[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return outcomes

    def save(self, training, save_dir, tag, **more):
        return self(
            lambda checkpointer, rank: checkpointer.save(
                save_dir,
                tag,
                model_state=training.model_state() if checkpointer.writes_model else None,
                shard_state=training.shard_state(rank),
                **more,
            )
        )

    def load(self, load_dir, tag=None, **more):
        return self(lambda checkpointer, rank: checkpointer.load(load_dir, tag, **more))


@pytest.fixture
def make_training():
    return Training


@pytest.fixture
def make_ranks():
    return Ranks


class Large:
    """A checkpoint of two shards with twelve weights of 8 MiB and one moment of each.

    Args:
        num_parts: model-parallel ranks, each with a part of every weight.

    `added` is the private memory that was added when each tensor had been read; files that are mapped do not count.
    """

    weight_bytes = 8 * 2**20

    def __init__(self, directory, num_parts=1):
        self.directory = directory
        numel = self.weight_bytes // 4 // num_parts
        shapes = {f"w{index}": torch.Size([numel]) for index in range(12)}
        folder = directory / "step"
        folder.mkdir(parents=True)
        (directory / "latest").write_text("step")
        for part in range(num_parts):
            self._save_part(folder, part, num_parts, shapes)
        self.added = []

    @staticmethod
    def _save_part(folder, part, num_parts, shapes):
        numel = shapes["w0"].numel()
        model = {"module": {name: torch.empty(0) for name in shapes}, "param_shapes": [shapes]}
        if num_parts > 1:
            held = {"shape": [num_parts * numel], "dim": 0, "ranges": [[part * numel, (part + 1) * numel]], "name": ""}
            division = {"axes": {"pp": 1, "tp": num_parts}, "parts": dict.fromkeys(shapes, held)}
            model |= {"mp_world_size": num_parts, "ds_model_parallel": division}
        torch.save(model, folder / layout.model_file(part))
        for rank in range(2):
            flat = torch.full((6 * numel,), float(rank))
            base = {"state": {0: {"exp_avg": flat, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
            state = {"zero_stage": 2, "single_partition_of_fp32_groups": [flat], "base_optimizer_state": base}
            torch.save({"optimizer_state_dict": state}, folder / layout.shard_file(rank, part))

    def watch(self, monkeypatch, owner, name):
        read, before = getattr(owner, name), private_bytes()

        def watched(*args):
            value = read(*args)
            self.added.append(private_bytes() - before)
            return value

        monkeypatch.setattr(owner, name, watched)


def private_bytes():
    """Of this process, without freed memory that glibc keeps, more or less of it after other tests."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.fixture(params=[1])
def large(tmp_path, monkeypatch, request):
    found = Large(tmp_path / "large", request.param)
    found.watch(monkeypatch, consolidate.LazyTensor, "contiguous")
    found.watch(monkeypatch, SavedRun, "optimizer_state")
    found.watch(monkeypatch, saved_run, "_mapped")
    return found

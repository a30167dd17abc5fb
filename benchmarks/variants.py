"""The ways to train a GPT that `train_step.py` compares: same model, data, optimizer and threads.

All ranks build a variant at the same time. A step is `forward_backward()`, which includes the gradients' collectives,
and `update()`, which runs the optimizer and clears gradients. To add a peer, add a function to `VARIANTS`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# AdamW options of all variants. Peers use torch's fused kernel, the fastest one on a CPU.
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a dtype. The vocabulary is the 256 byte values."""

    model: str
    width: int
    num_layers: int
    num_heads: int
    batch: int
    dtype: str = "fp32"
    sequence_length: int = 128
    device: str = "cpu"  # device type of torch; one device per rank
    nvme_path: str = ""  # a folder on a local disk, for variants with swap files
    sub_group_numel: int = 10**9  # elements per update, for variants with swap files
    accumulation: int = 1  # micro-batches per step, of `batch` samples each; only ours

    def gpt_config(self) -> Any:
        """Return the `GPTConfig` with these sizes."""
        from deepspeed.testing.models import GPTConfig

        return GPTConfig(
            vocab_size=256,
            sequence_length=self.sequence_length,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            width=self.width,
        )

    def build_model(self) -> nn.Module:
        from deepspeed.testing.models import GPT

        torch.manual_seed(0)
        return GPT(self.gpt_config())

    def build_batch(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, (batch, sequence) int64, different on each rank."""
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        tokens = torch.randint(256, (self.batch, self.sequence_length + 1), generator=generator)
        return tokens[:, :-1].contiguous().to(self.device), tokens[:, 1:].contiguous().to(self.device)


CASES = {
    "3m": Case("GPT 3.3 M", width=256, num_layers=4, num_heads=4, batch=4),
    "25m": Case("GPT 25 M", width=512, num_layers=8, num_heads=8, batch=2),
    # large enough to keep a GPU busy
    "350m": Case("GPT 303 M", width=1024, num_layers=24, num_heads=16, batch=4, sequence_length=1024),
}
# Runs every import and lazy initialization of a variant before its memory is measured.
REHEARSAL = Case("rehearsal", width=16, num_layers=1, num_heads=1, batch=1)
# `stage3_param_persistence_threshold`, its documented default: parameters with fewer elements stay whole in stage 3.
PERSISTENCE_NUMEL = 100_000


class Plain:
    """A module with a torch optimizer: the floor (no communication), DDP and FSDP2."""

    def __init__(self, module: nn.Module, case: Case) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]
        self.batch = case.build_batch()

    def forward_backward(self) -> None:
        self.module(*self.batch).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Do nothing: a step leaves nothing in flight."""

    def settle(self) -> None:
        """Do nothing: backward has waited for its collectives."""

    def hidden_bytes(self) -> int:
        """Return the bytes of states that only C++ holds: DDP's copies of the gradients."""
        if not isinstance(self.module, nn.parallel.DistributedDataParallel):
            return 0
        data = self.module._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
        return sum(int(size) for size in str(sizes).split(",") if size.strip())


class Engine:
    """`deepspeed.initialize` and the engine's own forward, backward and step.

    Args:
        offloads: use `offload_optimizer`, and `offload_param` in stage 3, like FSDP2's policy. If the ranks'
            accelerator is the host, this alone moves nothing, as with FSDP2's policy.
        apart: use a separate memory for offloading even on the host, so that every copy is made.
        swaps: use `offload_optimizer` with swap files, with asynchronous reads and writes.
        is_deterministic: use `deterministic`.
    """

    def __init__(
        self,
        module: nn.Module,
        case: Case,
        stage: int,
        *,
        offloads: bool = False,
        apart: bool = False,
        swaps: bool = False,
        is_deterministic: bool = False,
    ) -> None:
        import deepspeed

        zero: dict[str, Any] = {"stage": stage}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = PERSISTENCE_NUMEL
        if offloads:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
            if stage == 3:
                zero["offload_param"] = {"device": "cpu", "pin_memory": False}
        if swaps:
            pipelines = {"pipeline_read": True, "pipeline_write": True}
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": case.nvme_path, **pipelines}
            zero["sub_group_size"] = case.sub_group_numel
        config = {
            "train_micro_batch_size_per_gpu": case.batch,
            "gradient_accumulation_steps": case.accumulation,
            "deterministic": {"enabled": is_deterministic},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[arg-type]
            "zero_optimization": zero,
            "gradient_clipping": 0.0,  # like the peers
            "bf16": {"enabled": case.dtype == "bf16"},
            "steps_per_print": 10**9,
        }
        with _host_memory_apart() if apart else contextlib.nullcontext():
            self.engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        self.batch = case.build_batch()

    def forward_backward(self) -> None:
        while not self.engine.is_gradient_accumulation_boundary():
            self.engine.backward(self.engine(*self.batch))
            self.engine.step()
        self.engine.backward(self.engine(*self.batch))

    def update(self) -> None:
        self.engine.step()

    def finish(self) -> None:
        """Wait for the writes that the last step left in flight."""
        self.engine.sharding.placement.settle()

    def settle(self) -> None:
        """Finish the collectives that backward left in flight, so that their buffers do not count as states."""
        self.engine.sharding.gradients.reduce()

    def hidden_bytes(self) -> int:
        """Return minus the bytes of communication buffers: they are no states. `resident` and `peak` count them."""
        return -self.engine.sharding.held_bytes


@contextlib.contextmanager
def _host_memory_apart() -> Iterator[None]:
    from deepspeed.zero.offload.host import HostPlacement

    kept = HostPlacement.is_needed
    HostPlacement.is_needed = staticmethod(lambda device: True)  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostPlacement.is_needed = kept  # type: ignore[method-assign]


Variant = Plain | Engine


def build_floor(case: Case) -> Variant:
    """Build a model without communication: the cost of arithmetic and the optimizer alone."""
    return Plain(_cast(case.build_model(), case), case)


def build_ddp(case: Case) -> Variant:
    """Build torch DDP with its defaults; in bf16 it has no fp32 master weights."""
    return Plain(nn.parallel.DistributedDataParallel(_cast(case.build_model(), case)), case)


def build_fsdp2(case: Case, reshard_after_forward: bool, *, offloads: bool = False) -> Variant:
    """Build torch FSDP2 with one unit per block. `reshard_after_forward` corresponds to stage 3, else stage 2.

    `offloads`: keep parameters, gradients and optimizer states in host memory, FSDP2's only way to offload.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = case.build_model().to(case.device)
    policy = MixedPrecisionPolicy()
    if case.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh(case.device, (dist.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    blocks = next(child for child in model.children() if isinstance(child, nn.ModuleList))
    for unit in (*blocks, model):
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
        )
    return Plain(model, case)


def build_stage(case: Case, stage: int) -> Variant:
    """Build our variant of a stage; in bf16 with fp32 master weights."""
    return Engine(case.build_model(), case, stage)


def _cast(model: nn.Module, case: Case) -> nn.Module:
    return model.to(case.device, torch.bfloat16 if case.dtype == "bf16" else torch.float32)


VARIANTS: dict[str, Callable[[Case], Variant]] = {
    "floor": build_floor,
    "ddp": build_ddp,
    "fsdp2-z2": lambda case: build_fsdp2(case, reshard_after_forward=False),
    "fsdp2-z3": lambda case: build_fsdp2(case, reshard_after_forward=True),
    "stage0": lambda case: build_stage(case, 0),
    "stage1": lambda case: build_stage(case, 1),
    "stage2": lambda case: build_stage(case, 2),
    "stage3": lambda case: build_stage(case, 3),
    "stage0-deterministic": lambda case: Engine(case.build_model(), case, 0, is_deterministic=True),
    "stage1-deterministic": lambda case: Engine(case.build_model(), case, 1, is_deterministic=True),
    "stage2-deterministic": lambda case: Engine(case.build_model(), case, 2, is_deterministic=True),
    "stage3-deterministic": lambda case: Engine(case.build_model(), case, 3, is_deterministic=True),
    "fsdp2-z2-offload": lambda case: build_fsdp2(case, reshard_after_forward=False, offloads=True),
    "fsdp2-z3-offload": lambda case: build_fsdp2(case, reshard_after_forward=True, offloads=True),
    "stage1-offload": lambda case: Engine(case.build_model(), case, 1, offloads=True),
    "stage2-offload": lambda case: Engine(case.build_model(), case, 2, offloads=True),
    "stage3-offload": lambda case: Engine(case.build_model(), case, 3, offloads=True),
    "stage1-apart": lambda case: Engine(case.build_model(), case, 1, offloads=True, apart=True),
    "stage2-apart": lambda case: Engine(case.build_model(), case, 2, offloads=True, apart=True),
    "stage3-apart": lambda case: Engine(case.build_model(), case, 3, offloads=True, apart=True),
    "stage1-nvme": lambda case: Engine(case.build_model(), case, 1, swaps=True),
    "stage2-nvme": lambda case: Engine(case.build_model(), case, 2, swaps=True),
    "stage3-nvme": lambda case: Engine(case.build_model(), case, 3, swaps=True),
}


def build(name: str, case: Case) -> Variant:
    """Build a variant by name. Called on each rank."""
    return VARIANTS[name](case)


NVME, DETERMINISTIC = "-nvme", "-deterministic"
DETERMINISTIC_VARIANTS = [f"stage{stage}{kind}" for stage in range(4) for kind in ("", DETERMINISTIC)]
#: value of `--offload` -> variants to compare
OFFLOAD_VARIANTS = {
    "cpu": [name for name in VARIANTS if name.endswith(("-offload", "-apart"))],
    "nvme": [f"stage{stage}{place}" for stage in (1, 2, 3) for place in ("-offload", NVME)],
}


def formula_bytes(variant: str, case: Case, world_size: int) -> float:
    """Return the bytes of parameters, gradients and Adam's states per rank. Source: ZeRO, arXiv 1910.02054, section 5.

    p, g: bytes of a parameter and of a gradient. o: bytes of optimizer state, fp32 master weight included. Stage 1
    divides o by the number of ranks, stage 2 divides g + o, and stage 3 divides p + g + o, but only g + o of parameters
    that stay whole. "apart" counts both memories: fp32 weights also have master weights, and in stage 1 the gradients
    of the rank's own shard count twice. "nvme": swapped-out states do not count. "deterministic": gradients are fp32,
    and stage 1 has no whole gradients.
    """
    with torch.device("meta"):
        numels = [parameter.numel() for parameter in case.build_model().parameters()]
    numel, numel_whole = sum(numels), sum(each for each in numels if each < PERSISTENCE_NUMEL)
    p = g = 4 if case.dtype == "fp32" else 2
    o = 8 if case.dtype == "fp32" else 12
    master = 4 if case.dtype == "fp32" else 0
    whole, divided = {
        "floor": (p + g + 2 * p, 0),  # two moments in the parameter's dtype, no master weights
        "ddp": (p + g + 2 * p, 0),
        "fsdp2-z2": (0, 16),  # all four in fp32, sharded; gathered weights are freed after backward
        "fsdp2-z3": (0, 16),
        "stage0": (p + g + o, 0),
        "stage1": (p + g, o),
        "stage2": (p, g + o),
        "stage3": (p * numel_whole / numel, p * (1 - numel_whole / numel) + g + o),
        "stage0-deterministic": (p + 4 + o, 0),
        "stage1-deterministic": (p, 4 + o),
        "stage2-deterministic": (p, 4 + o),
        "stage3-deterministic": (p * numel_whole / numel, p * (1 - numel_whole / numel) + 4 + o),
        "fsdp2-z2-offload": (0, 16),
        "fsdp2-z3-offload": (0, 16),
        "stage3-offload": (p * numel_whole / numel, p * (1 - numel_whole / numel) + g + o),
        "stage1-offload": (p + g, o),
        "stage2-offload": (p, g + o),
        "stage1-nvme": (p + g, 0),
        "stage2-nvme": (p, 0),
        "stage3-nvme": (p * numel_whole / numel, p * (1 - numel_whole / numel)),
        "stage1-apart": (p + g, g + o + master),
        "stage2-apart": (p, g + o + master),
        "stage3-apart": (p * numel_whole / numel, p * (1 - numel_whole / numel) + g + o + master),
    }[variant]
    return whole * numel + divided * numel / world_size

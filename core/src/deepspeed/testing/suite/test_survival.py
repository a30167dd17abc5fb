"""Injected faults during training: the error names what failed, and earlier state survives.

SIGKILL ends a rank under the launcher, during a step or during a save: the job ends and names the rank, and the earlier
checkpoint loads. A step allocates more memory than exists, in its forward or in its backward: the error reports it, and
the next step continues as if the batch had not existed. If a kernel does not compile, its reference replaces it, and
the compiler's message is kept. The tests use two ranks if possible, else one.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.current import PLAIN, explain
from deepspeed.accelerator.current import VARIABLE as ACCELERATOR
from deepspeed.ops import registry
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.testing import requirements
from deepspeed.testing.models import make_engine
from deepspeed.testing.suite import fixtures

_LIMIT_S = 300
_STEPS = 4
_SAVED_AFTER = 2
_MORE_THAN_THERE_IS = 1 << 50


# ----- a model that can be disturbed ---------------------------------------------------------------------------------


class Disturbed(torch.autograd.Function):
    """The identity function, which calls given functions in its forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Callable[[], Any], backward: Callable[[], Any]) -> torch.Tensor:
        """Call `forward`, and keep `backward` for the backward."""
        forward()
        ctx.backward = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Call the kept function, and return the gradient unchanged."""
        ctx.backward()
        return gradients[0], None, None


def _nothing() -> None:
    pass


class DisturbedModel(torch.nn.Module):
    """A model that maps 16 numbers to a loss, and calls a test's functions between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(
        self, x: torch.Tensor, forward: Callable[[], Any] = _nothing, backward: Callable[[], Any] = _nothing
    ) -> torch.Tensor:
        """Return the mean square of the outputs for x [B, 16]."""
        hidden = torch.tanh(self.first(x))
        return self.second(Disturbed.apply(hidden, forward, backward)).square().mean()


def _engine() -> Any:
    get_accelerator().set_device(dist.get_local_rank())
    torch.manual_seed(0)
    return make_engine(DisturbedModel(), 2)


def _step(engine: Any, number: int, **planted: Callable[[], Any]) -> float:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
    loss = engine(torch.randn(4, 16, generator=generator).to(engine.device), **planted)
    engine.backward(loss)
    engine.step()
    return loss.item()


def undisturbed(folder: str = "") -> list[float]:
    """Return the losses of the steps after a checkpoint: resumed from `folder`, or without interruption."""
    engine = _engine()
    first = 0
    if folder:
        tag, _ = engine.load_checkpoint(folder)
        assert tag is not None, f"no checkpoint was found in {folder}"
        first = engine.global_steps
        assert first == _SAVED_AFTER
    losses = [_step(engine, number) for number in range(first, _STEPS)]
    engine.destroy()
    return losses[_SAVED_AFTER - first :]


# ----- a rank that is killed -----------------------------------------------------------------------------------------


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_when_a_file_is_finished(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.rename":
        _kill()


def train_until_killed(when: str, folder: str) -> None:
    """Train on a rank under the launcher. The last rank kills itself during a step or during a save."""
    import deepspeed

    deepspeed.init_distributed()
    engine = _engine()
    for number in range(_SAVED_AFTER):
        _step(engine, number)
    engine.save_checkpoint(folder, tag="whole")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if when == "save":
        _step(engine, _SAVED_AFTER)
        if is_last:
            sys.addaudithook(_kill_when_a_file_is_finished)
        engine.save_checkpoint(folder, tag="cut off")
    else:
        _step(engine, _SAVED_AFTER, **({"backward": _kill} if is_last else {}))
        _step(engine, _SAVED_AFTER + 1)


@pytest.mark.parametrize("when", ["step", "save"])
def test_a_killed_rank_is_named_and_the_checkpoint_of_before_loads(when: str, tmp_path: Path) -> None:
    requirements.ranks.check()
    world_size = fixtures.most_ranks()
    code, told = _launch(world_size, when, tmp_path)
    assert code == 128 + signal.SIGKILL, told
    last_words = told.rstrip().rpartition("\n")[2]
    assert f"rank {world_size - 1} (pid " in last_words, told
    assert "was killed by SIGKILL" in last_words, told
    begun = [path for path in tmp_path.iterdir() if "cut off" in path.name]
    assert bool(begun) == (when == "save"), f"the rank was killed at another time, and {begun} is there"
    wanted = fixtures.on_ranks(world_size, undisturbed)
    for losses, expected in zip(fixtures.on_ranks(world_size, undisturbed, str(tmp_path)), wanted, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)


_PROGRAM = """
import sys
from deepspeed.testing.suite.test_survival import train_until_killed

train_until_killed(*sys.argv[-2:])
"""


def _launch(world_size: int, when: str, folder: Path) -> tuple[int, str]:
    """Run a job that kills one of its ranks, and return exit code and stderr."""
    left_by_a_launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_by_a_launcher}
    script = folder / "train.py"
    script.write_text(_PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from deepspeed.launcher.runner import main; main()"),
            *("--num_accelerators", str(world_size), str(script), when, str(folder)),
        ],
        env={**environment, ACCELERATOR: explain().plugin or PLAIN, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return done.returncode, done.stderr


# ----- memory that runs out ------------------------------------------------------------------------------------------


def _ask_for_too_much() -> None:
    torch.empty(_MORE_THAN_THERE_IS, dtype=torch.uint8, device=get_accelerator().current_device_name())


def run_out_of_memory(where: str) -> tuple[str, list[float]]:
    """Return the error of a step that runs out of memory, and the losses of the steps after it."""
    engine = _engine()
    losses = [_step(engine, number) for number in range(_SAVED_AFTER)]
    told = ""
    try:
        _step(engine, 99, **{where: _ask_for_too_much})
    except (RuntimeError, MemoryError) as error:
        told = f"{type(error).__name__}: {error}"
        del error
    engine.zero_grad()  # drop the gradients of the interrupted backward
    losses += [_step(engine, number) for number in range(_SAVED_AFTER, _STEPS)]
    engine.destroy()
    return told, losses[_SAVED_AFTER:]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_a_step_ran_out_of_memory(where: str) -> None:
    world_size = fixtures.most_ranks()
    wanted = fixtures.on_ranks(world_size, undisturbed)
    for (told, losses), expected in zip(fixtures.on_ranks(world_size, run_out_of_memory, where), wanted, strict=True):
        assert "memory" in told.lower(), f"the step that ran out of memory said {told!r}"
        assert losses == pytest.approx(expected, rel=1e-5)


# ----- a kernel that does not compile --------------------------------------------------------------------------------


class _Uncompilable(OpBuilder):
    """A builder with a source that no compiler accepts."""

    NAME = "fused_adam"
    op_namespace = "ds_planted_fault"
    folder: Path

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def absolute_name(self) -> str:
        return "ds_planted_fault.fused_adam_op"

    def sources(self) -> list[str]:
        return [str(self.folder / "planted.cpp")]

    def load(self, verbose: bool = False) -> Any:
        """Compile beside the source, so that the user's cache keeps no record of it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(self.folder / "cache"))
            return super().load(verbose)


def test_a_kernel_that_does_not_compile_is_replaced_by_its_reference(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.cpp").write_text("#error a planted fault\n")
    monkeypatch.setattr(_Uncompilable, "folder", tmp_path, raising=False)
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    accelerator = get_accelerator()
    monkeypatch.setattr(
        accelerator,
        "get_op_builder",
        lambda name, own=accelerator.get_op_builder: _Uncompilable if name == "FusedAdamBuilder" else own(name),
    )
    registry.reset()
    try:
        found = _adam(device)
        resolution = registry.resolve("fused_adam")
        reasons = [reason for _, reason in resolution.rejected]
        assert resolution.source != "device"
        assert resolution.broken
        assert any("planted" in reason or "compiler" in reason for reason in reasons), reasons
        monkeypatch.setenv(registry.VARIABLE, "all")
        torch.testing.assert_close(found, _adam(torch.device("cpu")), rtol=1e-5, atol=1e-6)
    finally:
        monkeypatch.undo()
        registry.reset()


def _adam(device: torch.device) -> torch.Tensor:
    """Return a weight after two steps of AdamW."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, 1000).to(device))
    optimizer = FusedAdam([param], lr=1e-2, weight_decay=0.1)
    for factor in (1.0, -0.5):
        param.grad = (torch.linspace(0, 1, 1000) * factor).to(device)
        optimizer.step()
    return param.detach().cpu()

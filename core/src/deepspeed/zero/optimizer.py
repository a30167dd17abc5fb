"""`ZeroOptimizer` is the `engine.optimizer` of users if the engine, not the optimizer, makes the step.

It has the interface of a torch optimizer (schedulers and libraries read and write `param_groups`), but `step` and
`zero_grad` call the engine.
"""

from collections.abc import Callable, Collection
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from deepspeed._absent import absent_members
from deepspeed.config.constants import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.errors import StateError
from deepspeed.zero import state_dict as states
from deepspeed.zero.offload.moved_states import offload_states
from deepspeed.zero.redistribute import is_called_by_collective
from deepspeed.zero.sharding import Sharding


def not_copied(found: object, way: str) -> StateError:
    """Return the error for an object of this run that cannot be pickled or copied; `way`: what to do instead."""
    return StateError(
        f"pickle, torch.save and copy: found a {type(found).__name__}, which belongs to the ranks of this run; {way}"
    )


class DeepSpeedOptimizer(Optimizer):
    """`DeepSpeedOptimizer` is the base of optimizers from `deepspeed.initialize`; libraries test with isinstance."""


@absent_members(
    "runtime.base_optimizer:ZeROOptimizer",
    "runtime.zero.mics:MiCS_Optimizer",
    "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
    "runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
)
class ZeroOptimizer(DeepSpeedOptimizer):
    """`ZeroOptimizer` wraps the user's optimizer for a sharding stage.

    All other attributes are those of the inner torch optimizer.
    """

    #: torch's schedulers read it to check that a step came before theirs; the engine makes the steps
    _opt_called = True

    def __init__(self, sharding: Sharding, optimizer: Optimizer, step: Callable[[], Any], loss_scaler: Any) -> None:
        # Optimizer.__init__ is not called on purpose: groups and state belong to the inner optimizer
        self.__dict__.update(_sharding=sharding, optimizer=optimizer, _step=step, loss_scaler=loss_scaler)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        if not self.optimizer.state:  # torch's functions would make a step to create states
            self._refuse_torchs_functions()
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def parameter_offload(self) -> Any:
        """The `ModuleHooks` of stage 3, which libraries remove around `generate`."""
        gathering = self._sharding.gathering
        if gathering is None:
            raise AttributeError(f"parameter_offload: zero_optimization.stage is {self._sharding.stage}, not 3")
        return gathering.hooks

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was inf or nan."""
        return self.loss_scaler.overflow

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale

    @property
    def cur_scale(self) -> float:
        return self.loss_scaler.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.is_dynamic

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one step with clipping and loss scaling, as `engine.step()` does at a boundary.

        Raises:
            ValueError: if a closure is given; the engine has computed the loss.
        """
        if closure is not None:
            raise ValueError("optimizer.step: found a closure; under the engine a step takes none, call step()")
        self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sharding.gradients.zero_grad()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the scaled backward of a loss, as `engine.backward` does without gradient accumulation."""
        with self._sharding.gradients.window.opened():
            self.loss_scaler.scale(loss.float()).backward(retain_graph=retain_graph)
        self._sharding.gradients.window.close()

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, as `DeepSpeedEngine.offload_states` does."""
        offload_states(self._sharding, include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states back, as `DeepSpeedEngine.reload_states` does."""
        self._sharding.states.reload(non_blocking=non_blocking)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._sharding.add_param_group(param_group)

    def _refuse_torchs_functions(self) -> None:
        if is_called_by_collective():
            raise StateError(
                "torch.distributed.checkpoint.state_dict: found an optimizer that the engine steps, whose states are "
                f"those of its shards (zero_optimization.stage is {self._sharding.stage}). Save and load them with "
                "engine.save_checkpoint(folder) and engine.load_checkpoint(folder); ds_ckpt convert folder OUT --to "
                "dcp makes files of torch.distributed.checkpoint of them. get_model_state_dict(engine.module) and "
                "set_model_state_dict have the weights alone"
            )

    def state_dict(self) -> dict[str, Any]:
        self._refuse_torchs_functions()
        return {**states.collect(self._sharding), "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_torchs_functions()
        states.load(self._sharding, state_dict)
        if "loss_scaler" in state_dict:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied(self, "call engine.save_checkpoint(folder), or take its state_dict()")

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # an object under construction by copy or pickle
            raise AttributeError(name)
        own = self.__dict__["optimizer"]
        if hasattr(own, name):
            return getattr(own, name)
        raise AttributeError(
            f"neither the engine's optimizer nor the {type(own).__name__} in it has {name!r} "
            f"(zero_optimization.stage is {self._sharding.stage}). Weights, states and gradients are had by parameter: "
            "deepspeed.utils.safe_get_full_fp32_param, safe_get_full_optimizer_state and safe_get_full_grad"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("param_groups", "state", "defaults"):
            setattr(self.optimizer, name, value)
        else:
            self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stage={self._sharding.stage}, {self.optimizer!r})"

"""`zero.Init`: modules built inside the context are sharded as they are built (stage 3).

Each module is built whole, in host memory and in the dtype that its code requests, so that it draws the same random
numbers as without the context. When its `__init__` is over, its parameters get the values of rank 0 and are sharded: a
rank never holds the whole model. `initialize` then moves the shards into units, one unit at a time.

`deepspeed.runtime.zero.partition_parameters` is an alias of this module: libraries replace
`zero_wrapper_for_fp_tensor_constructor` here, so the context looks the function up when it is entered.

The module also holds `MiCS_Init` and `OnDevice`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.nn.utils.parametrize import ParametrizationList

from deepspeed import comm
from deepspeed._absent import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.give_up import begin_in
from deepspeed.comm.parted import in_call
from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.config.precision import torch_dtype
from deepspeed.config.training import AioConfig
from deepspeed.config.zero import OffloadParamConfig
from deepspeed.errors import ConfigError, StateError
from deepspeed.ops.quantizer.layers import WeightToStore, await_values, store_layers, weights_to_store
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import EXPERT_PREFIX, expert_group_of, mark_if_built_as_expert
from deepspeed.zero.gather import GatheredParameters, register_external_parameter, unregister_external_parameter
from deepspeed.zero.init_access import WholeOnAccess
from deepspeed.zero.managed import refuse_meta
from deepspeed.zero.offload.policy import choose_shard_home
from deepspeed.zero.param_marks import WITHOUT_ENGINE, ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, freed_memory_returned, unit_of
from deepspeed.zero.redistribute import watch
from deepspeed.zero.unit_groups import UnitRanks

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

# torch's own constructor; a replaced wrapper compares against it
_orig_torch_arange = torch.arange

_NAME = "zero.Init"  # for messages
_STORED_BY = "weight_quantization.quantized_initialization"

#: marks a module whose outermost `__init__` runs
_UNDER_CONSTRUCTION = "_ds_under_construction"


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor],
    target_fp_dtype: torch.dtype | None,
    target_device: torch.device | str | None = None,
) -> Callable[..., Tensor]:
    """Wrap a tensor constructor so that results are on one device, and floating results in one dtype.

    Args:
        fn: a constructor such as `torch.empty` or `torch.arange`.
        target_fp_dtype: dtype of floating results; None keeps the dtype of the call.
        target_device: device of the tensors if the caller names none; default: this rank's device.
    """

    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device or get_accelerator().current_device_name()
        tensor = fn(*args, **kwargs)
        if target_fp_dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(target_fp_dtype)
        return tensor

    return construct


@absent_members("runtime.zero.partition_parameters:Init")
class Init(contextlib.AbstractContextManager["Init"]):
    """`Init` is a context in which the parameters of new modules are sharded over the ranks. Contexts may be nested.

    Args:
        module: an existing module, whose parameters are sharded at once; the context then has nothing more to do.
        data_parallel_group: the ranks that share the parameters; default: `mpu`'s data parallel group, else all.
        remote_device: where the shards are kept until `initialize`: "cpu" for host memory, "nvme" for files below
            `offload_param.nvme_path` of the configuration, "none" for this rank's device. Default:
            `offload_param.device` of the configuration, else this rank's device.
        pin_memory: page-lock shards in host memory, as `offload_param.pin_memory` of the configuration does.
        config_dict_or_path: the DeepSpeed configuration, also accepted as `config`; "auto" values do not matter here.
            Without a configuration, parameters keep their dtype.
        enabled: False turns the context off.
        dtype: dtype of the sharded weights; default: the dtype that the configuration enables (bf16, fp16), else
            their own.

    `mem_efficient_linear` is accepted and ignored: no linear layer keeps a gathered weight here.

    Raises:
        ConfigError: if the configuration has a stage other than 3 (nothing would be sharded), if shards on "nvme" have
            no `nvme_path`, or if a parameter is on the meta device and has no values.
    """

    _depth = 0  # contexts that are entered

    def __init__(
        self,
        module: Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self.enabled = enabled
        self._undo = contextlib.ExitStack()
        if not enabled:
            return
        _check_arguments(module, dtype, mpu)
        source = config_dict_or_path if config_dict_or_path is not None else config
        settings = None if source is None else DeepSpeedConfig(read_config(source), batch_required=False)
        self._check(settings)
        offload = _offload_of(settings, remote_device, pin_memory)
        self.dtype = dtype if dtype is not None else _dtype_of(settings)
        #: how weights of new layers are stored until a checkpoint fills them; None: unchanged
        self._stored = None if settings is None else settings.weight_quantization.quantized_initialization
        comm.init_distributed()
        group = data_parallel_group or sequence_data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        self._ranks = comm.group_backend(group)
        self._has_arrived = False  # the first sharded parameter waits for the other ranks
        self._device = torch.device(get_accelerator().current_device_name())
        self._checks_values = settings is not None and settings.zero_optimization.enable_sanity_checks
        aio = settings.aio if settings is not None else AioConfig()
        self._home = choose_shard_home(offload, aio, device=self._device)
        if module is not None:
            if self._stored is not None:
                store_layers(
                    WeightToStore(name, each, weight, self._stored, _STORED_BY)
                    for name, each in list(module.named_modules())
                    for weight in weights_to_store(each)
                    if unit_of(each.get_parameter(weight)) is None
                )
            with freed_memory_returned():
                self._shard(module)

    def _check(self, settings: DeepSpeedConfig | None) -> None:
        """Raise if the context would do nothing with this configuration."""
        if settings is not None and settings.zero_optimization.stage != 3:
            raise ConfigError(
                f"zero.Init: zero_optimization.stage is {settings.zero_optimization.stage}, so no parameter would be "
                "sharded; use stage 3, or enabled=False"
            )

    def __enter__(self) -> "Init":
        if self.enabled:
            Init._depth += 1
            if Init._depth == 1:  # the outermost context shards
                with contextlib.ExitStack() as undo:
                    undo.enter_context(freed_memory_returned())
                    for cls in list(_subclasses(Module)):
                        self._patch_class(undo, cls)
                    _replace(undo, Module, "__init_subclass__", classmethod(self._see_new_class))
                    wrapped = zero_wrapper_for_fp_tensor_constructor(torch.arange, None, target_device="cpu")
                    _replace(undo, torch, "arange", wrapped)
                    self._access = undo.enter_context(WholeOnAccess(self._ranks.group))
                    self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            Init._depth -= 1
            self._undo.__exit__(kind, error, traceback)

    def _see_new_class(self, cls: type[Module], **kwargs: Any) -> None:
        super(Module, cls).__init_subclass__(**kwargs)
        self._patch_class(self._undo, cls)

    def _patch_class(self, undo: contextlib.ExitStack, cls: type[Module]) -> None:
        """Wrap the class's `__init__`: the outermost `__init__` of an object shards its parameters at the end."""
        init = vars(cls).get("__init__")
        if init is None:
            return

        @functools.wraps(init)
        def construct(module: Module, *args: Any, **kwargs: Any) -> None:
            if module.__dict__.get(_UNDER_CONSTRUCTION):
                init(module, *args, **kwargs)
                return
            module.__dict__[_UNDER_CONSTRUCTION] = True
            if isinstance(module, ParametrizationList):  # it compares the dtypes of its argument and of the values
                self._access.gather(*args, *kwargs.values())
            try:
                init(module, *args, **kwargs)
            finally:
                module.__dict__.pop(_UNDER_CONSTRUCTION, None)
            self._access.shard_unreferenced()
            if self._stored is not None and weights_to_store(module):
                stored = await_values(module, self._stored, _STORED_BY, allocates=True)
                stored.dtype = self.dtype or stored.dtype
            self._shard(module)

        _replace(undo, cls, "__init__", construct)

    def _shard(self, module: Module) -> None:
        for name, param in module.named_parameters():
            if unit_of(param) is None and param.numel() > 0:
                refuse_meta([(name, param)], "zero.Init")
                self._arrive()
                dtype = self.dtype if param.is_floating_point() else None
                mark_if_built_as_expert(param)
                with in_call(_NAME):
                    self._create_unit(param, name, self._ranks_of(param), dtype=dtype, from_first_rank=True)
        watch(module)
        for each in module.modules():
            if WITHOUT_ENGINE not in each.__dict__ and any(map(unit_of, each.parameters(recurse=False))):
                each.__dict__[WITHOUT_ENGINE] = each.register_forward_pre_hook(_refuse_without_engine)

    def _arrive(self) -> None:
        """Wait for the other ranks once, before the first collective; a missing rank is named."""
        if not self._has_arrived:
            begin_in(self._ranks.group, _NAME)
            self._ranks.connect()
            self._has_arrived = True

    def _create_unit(self, param: Parameter, name: str, ranks: UnitRanks, **options: Any) -> None:
        unit = ParamUnit([param], [name], ranks, device=self._device, home=self._home, **options)
        unit.source_S = None
        unit.checks_values = self._checks_values
        unit.reshard = self._reshard

    def _reshard(self, param: Parameter, take: Callable[[Tensor], Tensor], group: ProcessGroup) -> None:
        """See `parallel.model_part.reshard`."""
        former = unit_of(param)
        assert former is not None
        if Init._depth > 0:
            raise ConfigError(
                f"zero.Init: asked to divide the parameter {former.names[0]} inside the context, where torch functions "
                "see it whole; divide the model after the with statement"
            )
        former.gather()
        value = take(param.data).clone(memory_format=torch.contiguous_format)
        former.release()
        former.let_go()
        param.data = value
        ranks = comm.group_backend(group)
        ranks.connect()
        self._create_unit(param, former.names[0], UnitRanks.over(ranks))

    def _ranks_of(self, param: Parameter) -> UnitRanks:
        """Return the ranks that hold the parameter: for an expert's parameter, those with the same experts."""
        name = expert_group_of(param)
        if name is None or name == f"{EXPERT_PREFIX}1":
            return UnitRanks.over(self._ranks)
        groups._create_expert_and_data_parallel(int(name.removeprefix(EXPERT_PREFIX)))  # once; all ranks are here
        return UnitRanks.over(comm.group_backend(groups._get_expert_data_parallel_group(name)))


def _refuse_without_engine(module: Module, args: Any) -> None:
    """Raise for a forward that would compute with empty tensors; torch raises about their shapes, or nothing."""
    for name, param in module.named_parameters(recurse=False):
        unit = unit_of(param)
        if unit is None or unit.hooks is not None or unit.status is ZeroParamStatus.AVAILABLE or Init._depth > 0:
            continue
        raise StateError(
            f"zero.Init: the forward of {type(module).__name__} needs its parameter {name}, which is sharded, and no "
            "engine gathers it; call the engine of deepspeed.initialize(model=...), or the model inside "
            "deepspeed.zero.GatheredParameters(list(model.parameters()))"
        )


def is_zero_param(parameter: Any) -> bool:
    """Return whether stage 3 or `zero.Init` manages this parameter."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def _offload_of(settings: DeepSpeedConfig | None, device: str | None, pins: bool) -> OffloadParamConfig:
    """Return the configuration section for the shards, with `device` in place of the section's if `device` is given."""
    section = (settings and settings.zero_optimization.offload_param) or OffloadParamConfig(pin_memory=False)
    device = section.device if device is None else device
    if device not in ("none", "cpu", "nvme"):
        raise ConfigError(
            f'zero.Init: remote_device is {device!r}; give "cpu", "nvme", or "none" for the accelerator\'s memory'
        )
    return section.model_copy(update={"device": device, "pin_memory": pins or section.pin_memory})


def _dtype_of(settings: DeepSpeedConfig | None) -> torch.dtype | None:
    name = settings.weights_dtype if settings is not None else None
    return torch_dtype(name) if name is not None else None


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = set()
    left: list[type] = [cls]
    while left:
        each: type
        for each in type.__subclasses__(left.pop()):
            if each not in seen:
                seen.add(each)
                left.append(each)
                yield each


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute and register how to restore it."""
    former = vars(owner).get(name)
    setattr(owner, name, value)
    if former is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, former)


def _check_arguments(module: Any, dtype: Any, mpu: Any) -> None:
    if module is not None and not isinstance(module, Module):
        found = module.__name__ if isinstance(module, type) else type(module).__name__
        raise ConfigError(f"zero.Init: module is {found}; give a module that was built, or leave it out")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"zero.Init: dtype is {dtype!r}; give a torch.dtype, such as torch.bfloat16")
    if mpu is not None and not callable(getattr(mpu, "get_data_parallel_group", None)):
        raise ConfigError(f"zero.Init: mpu is {mpu!r}; give an object with get_data_parallel_group()")


@absent_members("runtime.zero.mics:MiCS_Init")
class MiCS_Init(Init):
    """`MiCS_Init` is `zero.Init` for MiCS: the configuration must have `zero_optimization.mics_shard_size`.

    Inside it parameters are sharded over all ranks of the group; `initialize` divides them over the shard groups.

    Args:
        args, kwargs: arguments of `zero.Init`, in its order; they must include `config_dict_or_path` or `config`.

    Raises:
        ConfigError: if the configuration or its `mics_shard_size` is missing, or as in `zero.Init`.
    """

    def __init__(
        self,
        module: Module | None = None,
        data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, data_parallel_group or sequence_data_parallel_group, *args, **kwargs)

    def _check(self, settings: DeepSpeedConfig | None) -> None:
        super()._check(settings)
        if settings is None:
            raise ConfigError("MiCS_Init: found no configuration; pass config_dict_or_path=<path or dict>")
        size = settings.zero_optimization.mics_shard_size
        if size < 1:
            raise ConfigError(
                f"MiCS_Init: zero_optimization.mics_shard_size is {size}; give the number of ranks that hold one copy "
                "of the model, or use zero.Init"
            )


@absent_members("utils.init_on_device:OnDevice")
class OnDevice(contextlib.AbstractContextManager["OnDevice"]):
    """`OnDevice` makes torch construct tensors on `device`, and floating tensors in `dtype` by default.

    Used to construct a model without allocating its weights: `with OnDevice(dtype=torch.bfloat16, device="meta")`.

    Args:
        dtype: default floating dtype.
        device: a torch device, or its name.
        enabled: False turns the context off.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "OnDevice":
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._stack.enter_context(torch.device(self.device))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

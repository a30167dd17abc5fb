"""`ParamGathering`: which parameters of one engine are whole at which moment of its steps (stage 3).

It ties the units (`module_units.py`) to what gathers and releases them (`fetcher.py`) and to the hooks that see when
modules use them (`module_hooks.py`). Made by `Stage3`; made again after a group was added to the optimizer.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module, Parameter

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.zero.fetcher import ParamFetcher
from deepspeed.zero.gradient_reduction import GradientReduction
from deepspeed.zero.module_hooks import ModuleHooks
from deepspeed.zero.module_units import ModuleUnits, Stage3Options
from deepspeed.zero.param_unit import ParamUnit, unit_of
from deepspeed.zero.redistribute import load_parts, saved_part, whole_of_parts


class ParamGathering:
    """Args:
    module: the model.
    units: of the engine; those that another engine shards are gathered by the hooks of that one.
    reduction: of the engine's gradients.
    """

    def __init__(
        self, module: Module, units: ModuleUnits, options: Stage3Options, reduction: GradientReduction
    ) -> None:
        self.units = units
        self._module = module
        self._fetcher = ParamFetcher(
            units.all,
            prefetch_numel=options.prefetch_numel,
            max_live_numel=options.max_live_numel,
            max_reuse_numel=options.max_reuse_numel,
            quantizes=options.quantizes_weights,
            reduction=reduction,
        )
        self._lenders = list(dict.fromkeys(units.borrowed.values()))
        self._owns_hooks = bool(units.all) or not self._lenders
        hooks = self._lenders[0] if not self._owns_hooks else ModuleHooks(module, self._fetcher, units)
        self.hooks: ModuleHooks = hooks

    def begin_backward(self, trained: Iterable[ParamUnit]) -> None:
        """`trained`: the units that get gradients."""
        self._fetcher.begin_backward()
        for unit in trained:
            unit.num_missing = unit.num_gradients = len(unit.params)

    def gradient_arrived(self, unit: ParamUnit) -> None:
        """A gradient of `unit` was taken; after the last one it is dropped."""
        unit.num_missing -= 1
        if unit.num_missing == 0 and unit.num_users == 0:
            self._fetcher.drop(unit)

    def end_backward(self) -> None:
        """Drop what no module uses."""
        for unit in self.units.all:
            if unit.num_users == 0:
                self._fetcher.drop(unit)

    def refuse_left_whole(self) -> None:
        """A step begins: refuse changes of parameters that an evaluation left whole."""
        self._fetcher.refuse_left_whole()

    def finish(self) -> None:
        """Wait for the all-gathers in flight."""
        self._fetcher.finish_all()

    def release(self) -> None:
        """Release every unit: the shards are about to change."""
        self._fetcher.release_all()
        self.shards_changed()

    def abandon(self) -> list[tuple[GroupBackend, Work]]:
        """Forget the all-gathers in flight, without waiting for them: the group and the work of each. `shards_changed`
        is to follow."""
        self.hooks.abandon()
        return list(self._fetcher.abandon())

    def shards_changed(self) -> None:
        """The weights of all units change, or ranks may not have gathered the same.

        Raises:
            OSError: what was being written of offloaded shards was not written.
        """
        for unit in self.units.all:
            unit.shards_changed()

    def release_borrowed(self) -> None:
        """As `release`, for the units of other engines that hold parameters of this one."""
        for hooks in dict.fromkeys(unit.hooks for unit in self._borrowed_units()):
            if hooks is not None:
                hooks.param_coordinator.release_all()
        for unit in self._borrowed_units():
            unit.shards_changed()

    def _borrowed_units(self) -> list[ParamUnit]:
        return list(dict.fromkeys(unit for param in self.units.borrowed if (unit := unit_of(param)) is not None))

    def load_parts(self, parts: dict[str, Tensor], backend: GroupBackend) -> None:
        """Load what `saved_part` gave for parameters that no optimizer has, or that of another engine, by name."""
        found: dict[ParamUnit, dict[Parameter, Tensor]] = {}
        for name, param in self._module.named_parameters():
            if name in parts and (unit := unit_of(param)) is not None:
                found.setdefault(unit, {})[param] = parts[name]
        for unit, its in found.items():  # one of another engine may have parameters that this one has not
            load_parts(unit, [its[param] if param in its else saved_part(param) for param in unit.params])
        for name, param in self._module.named_parameters():
            if name in parts and unit_of(param) is None:  # sharded where it was saved
                param.data.copy_(whole_of_parts(parts[name], param.shape, backend))
        self.accept_load()

    def accept_load(self) -> None:
        """`load_state_dict` has copied empty tensors into the released parameters, which is no change of theirs."""
        for unit in (*self.units.all, *self._borrowed_units()):
            unit.accept_changes()

    def remove_hooks(self) -> None:
        """Take the hooks off; those of other engines stay. Idempotent."""
        if self._owns_hooks:
            self._owns_hooks = False
            self.hooks.remove()
            others = {each for param in self._module.parameters() if (unit := unit_of(param)) and (each := unit.hooks)}
            for each in others - {self.hooks}:
                each.install_again()

"""`Sharding`: what happens to gradients and weights in one step, in all stages.

The engine calls, for every micro-batch and then once for the step:

    1. window.open / close       around `loss.backward()`; a plain `loss.backward()` does it through hooks
    2. (hooks, per parameter)    gradient -> bucket; a full bucket is launched (`backward.py`)
    3. reduce()                  every collective done, norm and use of parameters agreed on by all ranks
    4. norm()                    global L2 norm of the gradients as they are (still scaled)
    5. update(scale)             gradients times `scale`, optimizer step, new weights all-gathered
    6. zero_grad()

A stage answers, above all: who owns what and where a bucket's gradients live (`holding.py`), which collective a full
bucket gets (`_reduce`), and what follows the update (`_all_gather_weights`). All that it may answer stands under "what
a stage decides", here, in `backward.py`, `holding.py` and `stateful.py` (what a checkpoint asks of a stage). The
answers of the base classes are stage 0's, except those about the norm and `param.grad`, which `Stage0` overrides.
One step as a walk, with the stages side by side: docs/explanation/one-step.md. ZeRO: arXiv 1910.02054.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.values import check_same
from deepspeed.errors import ConfigError, StateError, counted
from deepspeed.optim import takes_only_sparse
from deepspeed.zero import managed
from deepspeed.zero.backward import BackwardPlan, Reducing, abandons_on_error
from deepspeed.zero.backward_calls import see_calls
from deepspeed.zero.flat_group import FlatGroup
from deepspeed.zero.gradient_reduction import TouchedRows
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.offload.moved_states import reload_states
from deepspeed.zero.outside_changes import OutsideChanges
from deepspeed.zero.shown_gradients import ShownGradients, hint_at_clipping
from deepspeed.zero.step_facts import Scalar, StepFacts, norms_of_own_parts
from deepspeed.zero.synchronize import settings_of
from deepspeed.zero.unit_groups import UnitRanks
from deepspeed.zero.update import OptimizerUpdate, multiply, takes_one_pass


def _add_param_group(sharding: "weakref.ref[Sharding]", optimizer: Optimizer) -> Callable[[dict[str, Any]], None]:
    """`add_param_group` of the user's own optimizer, while the engine lives."""

    def add_param_group(param_group: dict[str, Any]) -> None:
        owner = sharding()
        if owner is None:
            type(optimizer).add_param_group(optimizer, param_group)
        else:
            owner.add_param_group(param_group)

    return add_param_group


def _zero_grad(sharding: "weakref.ref[Sharding]", optimizer: Optimizer) -> Callable[[bool], None]:
    """`zero_grad` of the user's own optimizer: what the buckets hold is forgotten too, while the engine lives."""

    def zero_grad(set_to_none: bool = True) -> None:
        owner = sharding()
        if owner is None:
            type(optimizer).zero_grad(optimizer, set_to_none)
        else:
            owner.zero_grad()

    return zero_grad


class Sharding(Reducing):
    """`Sharding` reduces the gradients and updates the weights of one engine; each stage is a subclass."""

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None = None) -> None:
        super().__init__(options, backend, group)
        self._ranks_by_param: list[UnitRanks] = []
        self._facts = self._create_facts()
        self._module = torch.nn.Module()  # the model
        self._updates: OptimizerUpdate | None = None
        #: parameters of which this rank has set its own elements; other ranks' whole weights follow with the update
        self.set_locally: set[Tensor] = set()

    # ---- what a stage decides -----------------------------------------------------------------------------------

    def _norm_part(self) -> list[Tensor]:
        """The gradients whose squares this rank adds up: those of its shards."""
        return [group.ranks.counted(grads) for group, grads in self._reduced_units()]

    def _counts(self, group: FlatGroup) -> bool:
        """Whether this rank, among those that hold the same gradients of a unit, adds them to the norm."""
        return group.ranks.replicas is None or group.ranks.replicas.rank == 0

    def _prepare(self, module: torch.nn.Module, optimizer: Optimizer | None) -> None:
        """Look at the module before parameters are laid out, and refuse an optimizer that the stage cannot serve."""

    def _after_reduce(self) -> None:
        """Reduced gradients are there; where no rank has whole ones, `param.grad` stays None."""

    # ---- building -----------------------------------------------------------------------------------------------

    def attach(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer | None,
        plan: Callable[[bool], BackwardPlan],
        dropped: Callable[[], None],
        *,
        is_elementwise: bool = True,
    ) -> None:
        """Take over the parameters of `module` that `optimizer` updates (without one: all that require a gradient and
        that no other engine manages).

        The optimizer's groups are changed in place: under sharding they hold fragments instead of parameters.

        Args:
            plan: asked at the beginning of every backward, with True if the user started it.
            dropped: called when a failure has cost the gradients of a step.
            is_elementwise: whether the optimizer's update of an element depends on that element only.

        Raises:
            ConfigError: for a parameter that is not in the module, or on every rank if ranks differ.
        """
        self.optimizer = optimizer
        self._plan, self._dropped = plan, dropped
        self._is_whole = not is_elementwise
        self._module = module
        self._prepare(module, optimizer)
        self._positions = {id(param): place for place, param in enumerate(module.parameters())}
        self.named_parameters = list(module.named_parameters())
        free = [param for param in module.parameters() if not managed.manager_of(param)]
        groups = optimizer.param_groups if optimizer is not None else [{"params": free}]
        self.agree(optimizer, [group["params"] for group in groups])
        if optimizer is not None:
            self._prepare_placement(optimizer)
        for index, param_group in enumerate(groups):
            for param in param_group["params"]:
                self._refuse_foreign(index, param)
        for index, param_group in enumerate(groups):
            self.hold_group(index, param_group["params"])
        self._finish_groups()
        if optimizer is not None and self.stage > 0:
            hint_at_clipping()
        if optimizer is not None:  # a group that only the optimizer knew would train without averaging
            own = weakref.ref(self)  # the user's optimizer does not keep the engine alive
            optimizer.add_param_group = _add_param_group(own, optimizer)  # type: ignore[method-assign, assignment]
            optimizer.zero_grad = _zero_grad(own, optimizer)  # type: ignore[method-assign, assignment]

    def _prepare_placement(self, optimizer: Optimizer) -> None:
        key = 'zero_optimization.offload_optimizer.device: found "nvme"'
        if self.placement.fetches and self.unit_groups.has_replicas:
            raise ConfigError(
                f"{key} with mics_shard_size, or with modules that pipeline stages share: gradients of several copies "
                'of the weights are added up in memory; set device to "cpu", or omit mics_shard_size'
            )
        if self.placement.fetches and takes_only_sparse(optimizer):
            raise ConfigError(
                f"{key} with {type(optimizer).__name__}, which takes sparse gradients only; set device to "
                '"cpu", or use AdamW'
            )
        numel = -(-self._total_numel // self.world_size)
        gradient_dtype = self._accumulation_dtype(torch.float32)
        self.placement.prepare(optimizer, numel, gradient_dtype, max_sub_group_numel=self._batch_numel())

    def _refuse_foreign(self, index: int, param: Tensor) -> None:
        if id(param) in self._positions:
            return
        where = f"optimizer.param_groups[{index}]: a parameter of shape {tuple(param.shape)}"
        if not isinstance(param, Parameter):  # a fragment of a parameter
            raise ConfigError(
                f"{where} is what an engine that was not destroyed left there; call destroy() on that engine, or build "
                "a new optimizer"
            )
        if param.requires_grad:
            raise ConfigError(f"{where} is not in the model given to initialize(); give parameters of that model")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take over one more group; `param_group` as torch's `Optimizer.add_param_group` has it."""
        assert self.optimizer is not None
        if self.window.is_open or any(self.reduction.used) or self._has_gradients():
            raise StateError("add_param_group: found gradients of a step that is not over; call it after step()")
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        self._refuse_attached(len(self.optimizer.param_groups), given)
        added = f"{self._described(given)}; {settings_of(param_group)}"
        check_same({"the added group of parameters": added}, self.group)
        type(self.optimizer).add_param_group(self.optimizer, {**param_group, "params": given})
        last = len(self.optimizer.param_groups) - 1
        self.reduction.remove_hooks()
        self.hold_group(last, self.optimizer.param_groups[last]["params"])
        self._finish_groups()

    def _finish_groups(self) -> None:
        """Buckets, hooks and update batches for all groups; again after a group was added."""
        self.cut_buckets()
        attached = {id(param) for param in self.params}
        self._others = [(name, param) for name, param in self.named_parameters if id(param) not in attached]
        self._used_anywhere = [False] * len(self.params)
        for param in self.params:
            param.grad = None  # of a backward before the engine knew it
        if self.groups:
            self._ranks_by_param = [group.ranks for group in self.groups for _ in group.params]
            self._facts.attach(self._ranks_by_param, self.groups[0].device)
        managed.register(self)
        see_calls(self.window)
        self.outside_changes = OutsideChanges(self._module, self.groups, self._name_of)
        if takes_only_sparse(self.optimizer) and self.params:
            everyone = [self.unit_groups.of(param).everyone for param in self.params]
            self._rows = TouchedRows(self.params, everyone)
        self.reduction = self._create_reduction()
        if self.optimizer is not None:
            self._updates = OptimizerUpdate(self.optimizer, list(self._batches()), self._used_anywhere, self._rows)
        if len(self._gradients) == len(self.groups):
            self._connect_shards()

    def _create_facts(self) -> StepFacts:
        return StepFacts(self.backend, self.options.model_ranks, is_offloaded=self.placement.is_offloaded)

    # ---- one step -----------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Finish every collective, and agree with the other ranks on the norm and on which parameters were used.

        They also agree on which buckets got a gradient after their launch. Such late gradients (of a block that a
        checkpoint runs twice in one backward) are then reduced in a second round, on all ranks alike.
        """
        self.require_states("step")
        self._take_shown()
        if self._norm is not None:
            return
        squares = self._finish_collectives()
        if not (self.options.allows_unused or all(self._used_anywhere)):
            self._refuse_unused()
        if not any(self._used_anywhere):  # no backward: what lies in the gradient memory is of a former step
            squares = 0.0
        self._agree_on_norm(squares)

    @abandons_on_error
    def _agree_on_norm(self, squares: Scalar) -> None:
        self._norm = self._facts.root_over_model(squares) * self._after_sum
        self._after_reduce()

    @abandons_on_error
    def _finish_collectives(self) -> Scalar:
        """Sum of the squares of all gradients, over the ranks, with every bucket reduced."""
        if len(self._gradients) < len(self.groups):
            self._allocate_gradients()
        reduction = self.reduction
        if not reduction.is_launched:  # the boundary was declared after the backward
            reduction.launch_rest()
        while True:
            reduction.finish()
            self.placement.settle()
            squares, used, late = self._facts.agree(self._local_norms(), reduction.used, reduction.late)
            self._used_anywhere[:] = self._facts.agree_over_stages(used, self._ranks_by_param)
            if not any(late):
                break
            reduction.launch_late(late)
        if self._rows is not None:
            self._rows.add_up()
        if self.unit_groups.tied or (self.unit_groups.dense.replicas is not None and any(used)):
            self._replica_sum.add_up(self._reduced_units())
            self.placement.gradients_changed()
            squares = self._facts.sum_squares(self._local_norms())
        return squares

    def _refuse_unused(self) -> None:
        unused = [
            self._name_of(param) for param, used in zip(self.params, self._used_anywhere, strict=True) if not used
        ]
        raise StateError(
            f"zero_optimization.ignore_unused_parameters is false and {counted(len(unused), 'parameter')} got no "
            f"gradient: {', '.join(unused[:10])}; let the loss depend on them, freeze them, or set the key to true"
        )

    @abandons_on_error
    def _take_shown(self) -> None:
        super()._take_shown()
        if not self._shown or self._norm is None:
            return
        were_written = self._shown.were_written()
        if self.unit_groups.stages_divide_experts:  # other ranks do not know whether these were written
            self._norm = self._facts.root_over_model(self._facts.sum_squares(self._local_norms()))
        elif were_written:
            counts_all = self.options.counts_replicated
            own = self.placement.norms(self._reduced) if counts_all else self._norms_of_own_parts(self.groups)
            self._norm = self._facts.root_over_model(self._facts.own_squares(own))

    def _local_norms(self) -> list[Tensor]:
        if self.options.counts_replicated:
            return self.placement.norms(self._norm_part())
        return self._norms_of_own_parts([group for group in self.groups if self._counts(group)])

    def _norms_of_own_parts(self, groups: Sequence[FlatGroup]) -> list[Tensor]:
        return norms_of_own_parts((shard for group in groups for shard in group.shards), self.params)

    def norm(self) -> Scalar:
        """Global L2 norm of the reduced gradients, as scaled as the losses were; inf or nan after an overflow. A 0-D
        tensor where the optimizer updates on a device."""
        assert self._norm is not None, "norm() follows reduce()"
        return self._norm

    def update(self, scale: Scalar = 1.0) -> None:
        """One optimizer step with every gradient multiplied by `scale`; all ranks end with the same weights."""
        assert self._updates is not None
        self._take_before_update()
        managed.note_write()
        self.wait_for_copy()
        gathers: list[tuple[GroupBackend, Work]] = []
        try:
            self.release_gathered()
            scale = scale * self._after_sum
            if isinstance(scale, Tensor) and self.placement.fetches:  # the gradients cannot be multiplied before
                scale = scale.item()
            if isinstance(scale, Tensor) and takes_one_pass(self.optimizer):  # whose kernel takes a number of the host
                for gradients in self._reduced:
                    multiply(gradients, scale)
                scale = 1.0
            for batch in self._updates.step(scale):
                for index in batch.finished:
                    if (work := self._all_gather_weights(index)) is not None:
                        gathers.append((self.groups[index].ranks.shards, work))
            for _, work in gathers:
                work.wait()
        except BaseException as error:
            self.break_by(error)
            self._abandon(*gathers)
            raise
        self.placement.finish_sending()
        self.set_locally.clear()

    @abandons_on_error
    def _take_before_update(self) -> None:
        self.take_outside_changes()

    def retire(self) -> None:
        """Leave the parameters of an engine that only evaluates to one that trains them."""
        self.destroy()

    def destroy(self) -> None:
        """Remove the hooks and drop all buffers and states; the module and the optimizer can then be used without the
        engine, or in another one. Idempotent."""
        self.wait_for_copy()
        reload_states(self, non_blocking=False)
        self.reduction.remove_hooks()
        if self.optimizer is not None:
            vars(self.optimizer).pop("add_param_group", None)
            vars(self.optimizer).pop("zero_grad", None)
            self._give_back(self.optimizer)
        if self.window.is_open:
            self.window.abort()
        elif sys.exc_info()[1] is not None:  # in a `finally` or `except`: this rank failed
            self._abandon()
        else:
            self._finish_and_forget()
        for bucket in self.buckets:
            bucket.release()
        self.placement.release()
        managed.release(self)
        self.optimizer = self._updates = self._rows = None
        self.groups, self.params, self.buckets = [], [], []
        self._module, self.outside_changes = torch.nn.Module(), None
        self._gradients, self._reduced = [], []
        self.reduction = self._create_reduction()
        self._shown, self._facts = ShownGradients(), self._create_facts()

    # ---- asked for between steps --------------------------------------------------------------------------------

    def before_compile(self) -> None:
        """The module is about to be compiled with `torch.compile`."""

    def drop_free_buffers(self) -> None:
        """Give back the buffers that no bucket uses now."""

    def finish_before_moving(self) -> None:
        """Return when nothing is in flight that reads or writes states."""
        self.wait_for_copy()
        self.take_outside_changes()
        self.reduction.finish()
        self.placement.settle()
        self.release_gathered()

    def was_used(self, index: int) -> bool:
        """Whether any rank has a gradient for the attached parameter `index`; known after `reduce()`."""
        return self._used_anywhere[index]

    @property
    def average_factor(self) -> float:
        """The rest of the division by the number of ranks, by which `update` multiplies.

        1.0 where all of the division is done before the sum, that is without `gradient_predivide_factor`.
        """
        return self._after_sum

    def gradient_was_replaced(self, index: int) -> None:
        """The reduced gradient of an attached parameter was written from outside, on all ranks alike."""
        self.reduction.used[index] = True
        self._norm = None
        if self._rows is not None:
            self._rows.note_all(index)
        self.placement.gradients_changed()

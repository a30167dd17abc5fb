"""Leaf modules: those whose parameters stage 3 gathers all at once, without looking at their children.

Called by users and by Accelerate (`transformer_moe_cls_names`) before `initialize`, for modules of which every forward
uses other children, such as experts; `initialize` calls it for `zero_optimization.leaf_module`. The functions only mark
modules; `granularity.py` reads the marks. Stages 0, 1 and 2 hold whole parameters and have no use for them.
"""

from collections.abc import Callable, Sequence

from torch.nn import Module, Parameter

from deepspeed.config.zero import LEAF_CLASSES
from deepspeed.log import logger

_MARK = "_z3_leaf"


def set_z3_leaf_modules(
    model: Module, leaf_module_classes: Sequence[type[Module] | str], raise_if_not_found: bool = True
) -> list[Module]:
    """Mark every module of the given classes; returns them.

    Args:
        leaf_module_classes: classes, or their names, short or with the module ("pkg.mod.Class").
        raise_if_not_found: False lets classes without a module pass.

    Raises:
        ValueError: if no module has one of the classes.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: Module, leaf_module_classes: Sequence[type[Module] | str], raise_if_not_found: bool = True
) -> list[Module]:
    """Take the mark of `set_z3_leaf_modules` back; returns the modules of the given classes."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[Module]:
    """Mark the modules of these names, or with `flag=False` take the marks back; returns them.

    Raises:
        ValueError: if there is no module of a name, unless `raise_if_not_found` is False.
    """
    return _mark_named(model, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[Module]:
    """As `set_z3_leaf_modules_by_name`, for the modules whose names end so."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def set_z3_leaf_module(model: Module, flag: bool) -> None:
    """Mark one module, or with False take the mark back."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: Module) -> list[Module]:
    """Every marked module below `model`, in the order of `model.modules()`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: Module) -> bool:
    """Whether this module is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(parameter: Parameter) -> bool:
    """Whether stage 3 gathers this parameter with a leaf module."""
    return getattr(parameter, "ds_z3_leaf_module", None) is not None


def mark_configured(model: Module, classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str]) -> None:
    """Mark the modules that `zero_optimization.leaf_module` names: by class, by path, by the end of the path.

    What is found nowhere is logged, since one configuration may serve several models.
    """
    for kind, wanted, is_one in (
        ("classes", classes, lambda name, module, each: _is_of(module, each)),
        ("names", names, lambda name, module, each: name == each),
        ("name_suffixes", suffixes, lambda name, module, each: name.endswith(each)),
    ):
        for each in wanted:
            found = [module for name, module in model.named_modules() if is_one(name, module, each)]
            for module in found:
                set_z3_leaf_module(module, True)
            if not found and each not in LEAF_CLASSES:
                logger.warning(
                    f"zero_optimization.leaf_module.{kind}: found no module {each!r} in {type(model).__name__}"
                )


def _mark_named(
    model: Module, names: Sequence[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> list[Module]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"module names: found {type(names).__name__}, wanted a list of names")
    by_name = {each: [module for name, module in model.named_modules() if fits(name, each)] for each in names}
    if raise_if_not_found and (missing := [each for each, found in by_name.items() if not found]):
        raise ValueError(f"module names: found no module {', '.join(missing)} in {type(model).__name__}")
    found = list(dict.fromkeys(module for modules in by_name.values() for module in modules))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _mark(model: Module, classes: Sequence[type[Module] | str], flag: bool, raise_if_not_found: bool) -> list[Module]:
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise TypeError(f"leaf_module_classes: found {type(classes).__name__}, wanted a list of classes or names")
    if (other := next((each for each in classes if not isinstance(each, type | str)), None)) is not None:
        raise TypeError(f"leaf_module_classes: found {other!r} in it, wanted classes or their names")
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    if raise_if_not_found:
        missing = [each for each in classes if not any(_is_of(module, each) for module in found)]
        if missing:
            names = ", ".join(each if isinstance(each, str) else each.__qualname__ for each in missing)
            raise ValueError(f"leaf_module_classes: found no module of class {names} in {type(model).__name__}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: Module, wanted: type[Module] | str) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    cls = type(module)
    return wanted in (cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")

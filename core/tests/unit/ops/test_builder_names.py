"""`deepspeed.ops.op_builder.<X>Builder`, ALL_OPS and __compatible_ops__ mean the current accelerator when used."""

import copy
import inspect
import pickle
import subprocess
import sys

import deepspeed.ops
import pytest
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.errors import OpUnavailable
from deepspeed.ops import op_builder, registry
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder, OpBuilder, all_ops


def test_a_name_imported_long_ago_means_todays_accelerator(builders):
    of_a, of_b = builders.make("fused_adam", "a"), builders.make("fused_adam", "b")
    set_accelerator(builders.accelerator(of_a)())
    assert type(FusedAdamBuilder()) is of_a
    assert FusedAdamBuilder().load() == "a"
    set_accelerator(builders.accelerator(of_b)())
    assert type(FusedAdamBuilder()) is of_b
    assert type(op_builder.ALL_OPS["fused_adam"]) is of_b
    assert type(all_ops.ALL_OPS["fused_adam"]) is of_b


def test_a_name_without_builder_fails_when_it_is_called_and_says_why(builders):
    with pytest.raises(OpUnavailable, match=r"no CPUAdamBuilder .*\(PlainAccelerator\): has no CPUAdamBuilder; host"):
        CPUAdamBuilder()
    assert not hasattr(CPUAdamBuilder, "NAME")
    with pytest.raises(AttributeError, match=r"CPUAdamBuilder.NAME: no CPUAdamBuilder"):
        _ = CPUAdamBuilder.NAME
    assert not isinstance(3, CPUAdamBuilder)
    with pytest.raises(OpUnavailable):

        class Mine(CPUAdamBuilder):
            pass


def test_the_host_extension_stands_behind_a_name(builders):
    kind = builders.make("cpu_adam", "host's")
    builders.plugin("cpu", [kind])
    assert type(CPUAdamBuilder()) is kind
    assert get_accelerator().create_op_builder("CPUAdamBuilder") is None  # the device itself has none


def test_the_one_that_works_here_is_preferred(builders):
    mine, hosts = builders.make("cpu_adam", compatible=False), builders.make("cpu_adam")
    set_accelerator(builders.accelerator(mine)())
    assert type(CPUAdamBuilder()) is mine
    builders.plugin("cpu", [hosts])
    builders.manager.unregister("cpu")  # the failure to find it was remembered
    builders.manager._entries.clear()
    assert type(CPUAdamBuilder()) is hosts
    assert type(op_builder.ALL_OPS["cpu_adam"]) is hosts


def test_a_name_is_used_like_the_class(builders):
    kind = builders.make("fused_adam")
    kind.BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    set_accelerator(builders.accelerator(kind)())
    assert (FusedAdamBuilder.NAME, FusedAdamBuilder.BUILD_VAR) == ("fused_adam", "DS_BUILD_FUSED_ADAM")
    assert FusedAdamBuilder.__name__ == "FusedAdamBuilder"
    assert isinstance(FusedAdamBuilder(), FusedAdamBuilder)
    assert isinstance(FusedAdamBuilder(), OpBuilder)
    assert issubclass(kind, FusedAdamBuilder)
    assert not issubclass(int, FusedAdamBuilder)

    class Mine(FusedAdamBuilder):
        def load(self, verbose=True):
            return "mine"

    assert issubclass(Mine, kind)
    assert Mine().load() == "mine"


def test_a_name_is_an_ordinary_object(builders):
    assert op_builder.FusedAdamBuilder is FusedAdamBuilder
    assert copy.deepcopy(FusedAdamBuilder) is FusedAdamBuilder
    assert pickle.loads(pickle.dumps(FusedAdamBuilder)) is FusedAdamBuilder
    assert repr(FusedAdamBuilder) == "<op builder name deepspeed.ops.op_builder.FusedAdamBuilder>"
    assert inspect.unwrap(FusedAdamBuilder) is FusedAdamBuilder
    assert len({FusedAdamBuilder, CPUAdamBuilder, FusedAdamBuilder}) == 2


@pytest.mark.parametrize("name", [op.builder for op in registry.OPS.values()])
def test_every_documented_name_is_there(builders, name):
    assert getattr(op_builder, name).__name__ == name
    assert name in dir(op_builder)
    assert name in op_builder.__all__


def test_an_unknown_name_is_an_attribute_error_with_a_hint(builders):
    with pytest.raises(AttributeError, match="no attribute 'FusedAdmBuilder'; did you mean 'FusedAdamBuilder'"):
        _ = op_builder.FusedAdmBuilder
    with pytest.raises(AttributeError, match="no attribute 'ALL_OP'; did you mean 'ALL_OPS'"):
        _ = op_builder.ALL_OP
    with pytest.raises(AttributeError, match="no attribute 'zzz'$"):
        _ = op_builder.zzz
    with pytest.raises(ImportError, match="NoSuchBuilder"):
        from deepspeed.ops.op_builder import NoSuchBuilder  # noqa: F401


def test_a_vendors_own_name_is_there_while_its_accelerator_is(builders):
    with pytest.raises(AttributeError):
        _ = op_builder.MyGemmBuilder
    mine = builders.make("my_gemm", class_name="MyGemmBuilder")
    set_accelerator(builders.accelerator(mine)())
    assert type(op_builder.MyGemmBuilder()) is mine
    assert op_builder.ALL_OPS.keys() == {"my_gemm"}


def test_all_ops_and_compatible_ops(builders):
    assert op_builder.ALL_OPS == {}
    assert set(deepspeed.ops.__compatible_ops__) == set(registry.OPS)
    assert not any(deepspeed.ops.__compatible_ops__.values())
    good, bad = builders.make("fused_adam"), builders.make("fused_lamb", compatible=False)
    set_accelerator(builders.accelerator(good, bad)())
    assert {op: type(builder) for op, builder in op_builder.ALL_OPS.items()} == {"fused_adam": good, "fused_lamb": bad}
    answers = deepspeed.ops.__compatible_ops__
    assert answers["fused_adam"] is True
    assert answers["fused_lamb"] is answers["async_io"] is False
    assert good.loads == 0


def test_a_vendor_class_that_cannot_be_made_does_not_hide_the_others(builders):
    class FusedLambBuilder:
        def __init__(self):
            raise OSError("driver gone")

    set_accelerator(builders.accelerator(FusedLambBuilder, builders.make("fused_adam"))())
    assert set(op_builder.ALL_OPS) == {"fused_adam"}


def test_a_vendor_that_answers_from_the_cores_own_package_does_not_turn_in_a_circle(builders):
    class Circular(builders.accelerator()):
        def get_op_builder(self, class_name):
            return getattr(op_builder, class_name, None)

    set_accelerator(Circular())
    with pytest.raises(OpUnavailable, match=r"'sim' \(Circular\): has no FusedAdamBuilder"):
        FusedAdamBuilder()
    assert registry.kernel("fused_adam") is None


def test_naming_a_builder_chooses_no_accelerator():
    code = (
        "from deepspeed.ops.op_builder import FusedAdamBuilder, OpBuilder\n"
        "from deepspeed.accelerator import current\n"
        "assert current._choice is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""A vendor's package, written by the documentation of DeepSpeed alone: its ops build, load, run, and touch no package.

The package is `core/tests/vendor/ds_outsider`: an accelerator class of 2023, builders with a base of their own and
sources in the package, one of them compiled by the vendor's own means.
"""

import pytest
import torch

needs_stable_abi = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="the outsider's operator needs torch 2.10"
)

BUILD_AND_RUN = """
builders = {name: get_accelerator().create_op_builder(name) for name in ("FusedAdamBuilder", "UtilsBuilder")}
adam = builders["FusedAdamBuilder"].load()
utils = builders["UtilsBuilder"].load()
values = torch.tensor([0.0, 1.0, 0.0])
import ctypes
zeros = utils.count_zeros(ctypes.cast(values.data_ptr(), ctypes.c_void_p), ctypes.c_long(3))
again = get_accelerator().create_op_builder("FusedAdamBuilder").load()
unknown = [get_accelerator().create_op_builder("NoSuchBuilder"), get_accelerator().get_op_builder("NoSuchBuilder")]
print(json.dumps([adam.whose(), zeros, again is adam, unknown]))
"""


# What the interface got after 2023; the base answers it for a class of that year.
LATER = set(
    """
use_host_timers resolves_data_dependency handles_memory_backpressure communication_backend_version available_memory
supported_dtypes is_triton_supported is_pinned create_graph capture_to_graph replay_graph export_envs
visible_devices_envs set_visible_devices_envs get_compile_backend set_compile_backend return_freed_memory
is_fp64_supported prefer_triton_grouped_mm is_current_stream_capturing pin_empty pin_empty_like pin_memory_alignment
register_host_memory unregister_host_memory unpin_memory is_graph_supported is_grouped_mm_supported prepare_dtype
""".split()  # noqa: SIM905
)


def test_its_class_has_every_method_of_its_year_and_is_taken_as_it_is(site):
    (missing, is_its_own, later), _ = site.run(
        """
        from deepspeed.accelerator.abstract_accelerator import documented_names
        from ds_outsider.accelerator import XYZ_Accelerator
        mine = XYZ_Accelerator()
        set_accelerator(mine)
        missing = sorted(set(documented_names()) - set(vars(XYZ_Accelerator)))
        later = [get_accelerator().resolves_data_dependency(), get_accelerator().use_host_timers()]
        print(json.dumps([missing, get_accelerator() is mine and type(mine) is XYZ_Accelerator, later]))
        """
    )
    assert set(missing) == LATER
    assert is_its_own
    assert later == [True, True]  # as it says of itself: a synchronized device


def test_its_ops_build_and_run_and_no_package_changes(site):
    before = site.listing()
    answer, _ = site.run(BUILD_AND_RUN)
    assert answer == ["fused_adam of outsider", 2, True, [None, None]]
    assert site.listing() == before
    assert any(name.startswith("fused_adam_") for name in site.built())


def test_the_second_process_compiles_nothing(site):
    if not any(name.startswith("fused_adam_") for name in site.built()):
        site.run(BUILD_AND_RUN)
    times = [path.stat().st_mtime_ns for path in site.ops.rglob("fused_adam_*.so")]
    answer, told = site.run(BUILD_AND_RUN)
    assert answer[0] == "fused_adam of outsider"
    assert [path.stat().st_mtime_ns for path in site.ops.rglob("fused_adam_*.so")] == times
    assert "compiling" not in told


@needs_stable_abi
def test_its_torch_operator_builds_runs_and_has_a_meta_implementation(site):
    before = site.listing()
    answer, _ = site.run(
        """
        op = get_accelerator().create_op_builder("SpatialInferenceBuilder").load()
        x, bias = torch.randn(5, 3), torch.arange(3.0)
        same = torch.equal(op.nhwc_bias_add(x, bias), x + bias)
        torch.library.opcheck(torch.ops.ds_outsider.nhwc_bias_add.default, (x, bias))
        print(json.dumps([same, list(op.nhwc_bias_add(x.to("meta"), bias.to("meta")).shape)]))
        """
    )
    assert answer == [True, [5, 3]]
    assert site.listing() == before


def test_two_packages_with_an_op_of_one_name_do_not_collide(site):
    answer, _ = site.run(
        """
        import ds_outsider.accelerator, ds_stranger.accelerator
        told = []
        for module in (ds_outsider, ds_stranger, ds_outsider):
            set_accelerator(module.accelerator.XYZ_Accelerator())
            told.append(get_accelerator().create_op_builder("FusedAdamBuilder").load().whose())
        print(json.dumps(told))
        """
    )
    assert answer == [f"fused_adam of {vendor}" for vendor in ("outsider", "stranger", "outsider")]


def test_after_set_accelerator_every_name_is_the_new_ones(site):
    answer, _ = site.run(
        """
        from deepspeed.cli import report
        from deepspeed.ops import registry
        from deepspeed.ops.op_builder import FusedAdamBuilder
        import deepspeed.ops.op_builder as op_builder
        import ds_outsider.accelerator, ds_stranger.accelerator
        told = []
        for module in (ds_outsider, ds_stranger):
            set_accelerator(module.accelerator.XYZ_Accelerator())
            rows = {row["op"]: row for row in report.collect()["ops"]}
            told.append([
                type(FusedAdamBuilder()).__module__,
                type(op_builder.ALL_OPS["fused_adam"]).__module__,
                type(registry.resolve("spatial_inference").builder or registry.resolve("utils").builder).__module__,
                rows["fused_adam"]["builder"],
                deepspeed.ops.__compatible_ops__["utils"],
                sorted(op for op, builder in op_builder.ALL_OPS.items() if "ds_ext" not in type(builder).__module__),
            ])
        print(json.dumps(told))
        """
    )
    for vendor, told in zip(("ds_outsider", "ds_stranger"), answer, strict=True):
        assert all(module.startswith(f"{vendor}.op_builder.") for module in told[:4]), told
        assert told[4:] == [True, ["fused_adam", "spatial_inference", "utils"]]


TRAIN = """
from deepspeed.ops import registry
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
config["zero_optimization"] = {"stage": 2}
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
x, y = torch.randn(4, 8), torch.randn(4, 1)
losses = []
for _ in range(5):
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
torch.distributed.destroy_process_group()
adam = registry.kernel("fused_adam")
calls = adam.num_calls() if hasattr(adam, "num_calls") else None
found = registry.resolve("fused_adam")
print(json.dumps([type(get_accelerator()).__module__, losses, [found.source, calls, found.why()]]))
"""
BY_HAND = """
from ds_outsider.accelerator import XYZ_Accelerator
set_accelerator(XYZ_Accelerator())
"""


@pytest.fixture(scope="module")
def reference_losses(site):
    """The losses on the plain device, with no kernel at all."""
    (_, losses, _), _ = site.run(TRAIN, DS_ACCELERATOR="plain", DS_OPS_DISABLE="all")
    return losses


@pytest.mark.parametrize("by_hand", [False, True], ids=["DS_ACCELERATOR", "set_accelerator"])
def test_a_model_trains_on_an_accelerator_of_an_earlier_year_and_its_fused_adam_runs(site, reference_losses, by_hand):
    before = site.listing()
    if by_hand:
        (module, losses, told), _ = site.run(BY_HAND + TRAIN, DS_ACCELERATOR="")
    else:
        (module, losses, told), _ = site.run(TRAIN)
    assert module == "ds_outsider.accelerator"
    assert losses[-1] < losses[0]
    assert told == ["device", 5, ""]  # one call per step: the model is one flat group
    assert site.listing() == before
    assert losses == pytest.approx(reference_losses, abs=1e-6)


def test_it_offloads_and_tells_times_with_the_signatures_of_its_year(site, reference_losses):
    more = """config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
config["wall_clock_breakdown"] = config["memory_breakdown"] = True
engine, optimizer"""
    (_, losses, _), _ = site.run(TRAIN.replace("engine, optimizer", more))
    assert losses == pytest.approx(reference_losses, abs=1e-6)


def test_without_a_compiler_it_trains_and_one_line_says_what_is_missing(site, reference_losses, tmp_path):
    (_, losses, (source, calls, why)), told = site.run(
        TRAIN, PATH=str(tmp_path), CXX="", TORCH_EXTENSIONS_DIR=str(tmp_path), DS_PLUGINS_BLOCK="cpu"
    )
    assert losses == pytest.approx(reference_losses, abs=1e-6)
    assert (source, calls) == ("reference", None)
    assert "not compatible" in why
    assert "compiler" in why
    assert told.count("runs on its torch reference") == 1
    assert told.count("'fused_adam'") >= 1

"""Fabric with its DeepSpeed strategy has the losses that it has with DDP, also after a load."""

import pytest


def test_trains_saves_and_loads(stage_flags, launch, plain, check_losses, tmp_path):
    whole = launch(tmp_path, *stage_flags)
    check_losses(whole["losses"], plain.result["losses"], 5e-3 if "--bf16" in stage_flags else 1e-6)
    resumed = launch(tmp_path, *stage_flags, "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"][8:], rel=1e-6)


def test_parameters_in_host_memory_moved_to_an_indexed_device(launch, plain, check_losses, tmp_path):
    """`setup` calls `module.to("cpu:0")` on a model that `init_module` built inside `zero.Init`."""
    flags = ["--stage", "3", "--offload", "--init-module"]
    whole = launch(tmp_path, *flags)
    check_losses(whole["losses"], plain.result["losses"], 1e-6)
    assert whole["moved_to"] == "cpu:0"
    resumed = launch(tmp_path, *flags, "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"][8:], rel=1e-6)

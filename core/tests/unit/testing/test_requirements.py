"""Requirements: asked when the test runs, skipped with the accelerator's own reason, faults not taken for a no."""

import pytest
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.current import reset_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.testing import requirements


class Peculiar(PlainAccelerator):
    def memory_stats(self, device_index=None):
        raise NotImplementedError("no counters")

    def create_graph(self):
        raise RuntimeError("the driver is gone")


@pytest.fixture(autouse=True)
def _peculiar():
    set_accelerator(Peculiar())
    yield
    reset_accelerator()


def test_a_met_requirement_lets_the_test_run():
    assert requirements.bf16(lambda word: word * 2)("ab") == "abab"


def test_an_unmet_one_skips_with_the_reason():
    with pytest.raises(pytest.skip.Exception, match="streams: is_synchronized_device.. is True"):
        requirements.streams(lambda: 1)()


def test_what_is_not_implemented_is_not_supported():
    assert requirements.memory_statistics.unmet() == "not implemented: no counters"


def test_any_other_error_is_a_fault():
    with pytest.raises(RuntimeError, match="driver is gone"):
        requirements.graphs.check()


def test_an_accelerator_set_by_hand_has_no_ranks_and_no_plugin():
    assert "set_accelerator" in requirements.two_ranks.unmet()
    assert "came from no plugin" in requirements.plugin.unmet()
    set_accelerator(PlainAccelerator())
    assert requirements.two_ranks.unmet() is None  # ranks can have that one


def test_without_a_communication_library_there_are_no_ranks(monkeypatch):
    why = "it names no torch.distributed backend"
    set_accelerator(PlainAccelerator())
    assert requirements.library.unmet() is None
    monkeypatch.setattr(PlainAccelerator, "_communication_backend_name", "")
    assert [each.unmet() for each in (requirements.library, requirements.ranks, requirements.two_ranks)] == [why] * 3


def test_an_op_without_a_kernel_says_why(monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "fused_adam")
    assert requirements.op("fused_adam").unmet() == "environment: disabled by DS_OPS_DISABLE=fused_adam"


def test_names_in_the_report_are_unique():
    names = [each.name for each in requirements.ALL]
    assert len(set(names)) == len(names)

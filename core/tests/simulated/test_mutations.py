"""Does the conformance suite notice? Accelerators with one planted fault each, and the test that has to catch it.

Each runs in the process of the simulated device, which keeps no work secret: it is late, and its memory is its own.
"""

import pytest
from deepspeed.testing.tiers import swept

#: planted fault -> the test of the suite that fails on it, and may be the only one that does
CAUGHT_BY = {
    # devices
    "NamesTheNextDevice": "test_an_index_is_the_device_that_torch_means",
    "NamesOneDeviceForAll": "test_devices_have_names_of_their_own",
    "CountsOneTooMany": "test_device_count_is_where_devices_end",
    "CountsOneTooFew": "test_device_count_is_where_devices_end",
    "IgnoresSetDevice": "test_set_device_is_remembered",
    "LeavesTheDeviceContextOpen": "test_device_context_makes_another_current",
    "OwnsEveryTensor": "test_tensors_lie_on_the_current_device",
    "ForgetsADtype": "test_supported_dtypes_agree_with_the_flags",
    "MakesHalvesOfFloats": "test_constructors_of_old_scripts",
    # random numbers
    "RestoresNoState": "test_a_state_is_restored",
    "RestoresTheStateOfTheFirstDevice": "test_each_device_has_its_own_generator",
    "IgnoresTheSeed": "test_a_seed_repeats_and_another_differs",
    "SeedsOneDeviceOfAll": "test_manual_seed_all_reaches_every_device",
    "SeedsTheHostToo": "test_the_hosts_generator_is_left_alone",
    "RemembersNoSeed": "test_the_seed_is_remembered",
    "GivesTheHostsGenerator": "test_the_default_generator_is_the_one_drawn_from",
    # memory
    "AllocatesNothing": "test_allocated_memory_follows_tensors",
    "CountsTheFirstDeviceOnly": "test_each_device_counts_its_own_memory",
    "KeepsOldStatistics": "test_statistics_are_those_of_torch_by_name",
    "KeepsThePeak": "test_peak_of_allocated_memory_is_kept_and_reset",
    "KeepsThePeakOfReservedMemory": "test_peak_of_reserved_memory_is_kept_and_reset",
    "HasMoreThanThereIs": "test_total_and_available_memory_are_plausible",
    "KeepsItsCache": "test_empty_cache_gives_memory_back",
    "PinsNothing": "test_pinned_tensors_are_equal_and_on_the_host",
    "CallsEverythingPinned": "test_ordinary_memory_is_not_pinned",
    "PinsNothingAndSaysItDid": "test_torch_agrees_that_it_is_pinned",
    "AlignsNothing": "test_alignment_is_kept",
    # order
    "DoesNotSynchronize": "test_synchronize_waits_for_the_current_stream",
    "SynchronizesAnotherDevice": "test_a_copy_to_the_host_is_there_after_a_wait",
    "ClaimsToBeDoneAtOnce": "test_a_synchronized_device_is_done_when_a_call_returns",
    "ClaimsToResolveDependencies": "test_a_device_that_resolves_dependencies_needs_no_wait",
    "IsAlwaysOnTheDefaultStream": "test_a_stream_is_current_inside_its_context",
    "TakesTheCurrentStreamForTheDefaultOne": "test_the_default_stream_stays_while_another_is_current",
    "IgnoresStreams": "test_a_stream_is_current_inside_its_context",
    "WaitsForNoStream": "test_a_side_stream_sees_what_it_waited_for",
    "MeasuresNoTime": "test_events_measure_time_in_order",
    "MeasuresAlwaysTheSame": "test_events_measure_time_in_order",
    "EventsDoNotWait": "test_a_copy_to_the_host_is_there_after_a_wait",
    "ReadsTheHostBeforeItIsDone": "test_a_copy_to_the_host_is_there_after_a_wait",
    "RecordsNothing": "test_a_graph_runs_again_on_new_values",
    "RefusesNoGraph": "test_replaying_no_graph_does_nothing",
    # environment
    "HidesNoDevice": "test_visible_devices_are_written_for_a_rank",
    "ForgetsLateCalls": "test_a_late_call_is_made_once_the_device_is_used",
    "KeepsItsCompiler": "test_the_compile_backend_can_be_chosen",
    "TrustsThatRangesAreOpen": "test_a_range_that_nobody_opened_closes_quietly",
    "NamesNoLibrary": "test_the_communication_library_is_known_to_torch",
    # op builders
    "CorrectsNoBias": "test_optimizer_kernel_equals_its_reference",
    "UpdatesAllButTheLast": "test_optimizer_kernel_equals_its_reference",
    "WritesNoHalfWeights": "test_one_pass_writes_half_weights_beside_fp32_masters",
    "IsSilentlyIncompatible": "test_each_builder_gives_its_op_or_says_why_not",
    "PromisesAnOpAndHasNone": "test_each_builder_gives_its_op_or_says_why_not",
    "GivesABuilderForEveryName": "test_a_builder_is_found_by_its_name",
}
#: one of each kind; the others are a sweep
IN_EVERY_RUN = {
    *("IgnoresSetDevice", "IgnoresTheSeed", "AllocatesNothing", "PinsNothing", "DoesNotSynchronize"),
    *("WaitsForNoStream", "NamesNoLibrary", "CorrectsNoBias", "PromisesAnOpAndHasNone"),
}
#: tests that concern kernels: compared with an honest one, as the simulated device has none of its own
OF_KERNELS = sorted({test for fault, test in CAUGHT_BY.items() if test.startswith(("test_opt", "test_one_pass"))})
HONEST = "HonestAdam"


def test_all_faults_are_listed(sim):
    assert sim(planted_names)[0] == sorted([*CAUGHT_BY, HONEST])
    assert len(CAUGHT_BY) >= 10


def planted_names():
    import planted_faults

    return [name for name in planted_faults.names() if not name.startswith("_")]


def test_the_honest_device_passes_those_tests(on_device, tmp_path):
    found = on_device(None, sorted(set(CAUGHT_BY.values())), str(tmp_path))
    assert set(found) == set(CAUGHT_BY.values())
    wrong = {name: each for name, each in found.items() if {outcome for outcome, _ in each} - {"passed", "skipped"}}
    assert wrong == {}


def test_an_honest_kernel_passes(on_device, tmp_path):
    found = on_device(HONEST, OF_KERNELS, str(tmp_path), "fused_adam")
    assert set(found) == set(OF_KERNELS)
    assert {outcome for each in found.values() for outcome, _ in each} == {"passed"}


@pytest.mark.parametrize(("fault", "test"), swept(CAUGHT_BY.items(), lambda fault, _: fault in IN_EVERY_RUN))
def test_a_planted_fault_is_caught(on_device, tmp_path, fault, test):
    found = on_device(fault, [test], str(tmp_path), "fused_adam" if test in OF_KERNELS else "")
    assert "failed" in {outcome for outcome, _ in found[test]}, found

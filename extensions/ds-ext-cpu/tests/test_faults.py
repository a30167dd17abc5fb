"""Counts of faults that the kernel keeps of a host, read from a tree like /sys."""

import os

from ds_ext_cpu import faults


def test_controllers_and_the_cores_of_this_process_are_added_up(tmp_path):
    system = tmp_path / "sys/devices/system"
    for controller, (corrected, lost) in {"mc0": (3, 0), "mc1": (4, 1)}.items():
        folder = system / "edac/mc" / controller
        folder.mkdir(parents=True)
        (folder / "ce_count").write_text(f"{corrected}\n")
        (folder / "ue_count").write_text(f"{lost}\n")
    own = min(os.sched_getaffinity(0))
    other = max(os.sched_getaffinity(0)) + 1
    for core, times in {own: 2, other: 9}.items():
        folder = system / f"cpu/cpu{core}/thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{times}\n")
    assert faults.count(tmp_path) == {
        "memory errors, corrected": 7,
        "memory errors, not corrected": 1,
        "slowdowns by heat": 2,
    }


def test_what_a_host_does_not_count_is_left_out(tmp_path):
    assert faults.count(tmp_path) == {}
    controller = tmp_path / "sys/devices/system/edac/mc/mc0"
    controller.mkdir(parents=True)
    (controller / "ce_count").write_text("12\n")
    (controller / "ue_count").write_text("busy\n")
    assert faults.count(tmp_path) == {"memory errors, corrected": 12}

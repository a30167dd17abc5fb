"""What the file system says of Intel GPUs, and what the affinity mask leaves of them."""

import pytest
from ds_ext_xpu import devices


@pytest.fixture
def machine(tmp_path):
    """A folder in place of `/`, and a function that puts a render node into it."""

    def put(name, vendor="0x8086", driver="xe", node=True):
        device = tmp_path / "sys/class/drm" / name / "device"
        device.mkdir(parents=True)
        if vendor is not None:
            (device / "vendor").write_text(f"{vendor}\n")
        if driver is not None:
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(tmp_path / "drivers" / driver)
        if node:
            (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
            (tmp_path / "dev/dri" / name).touch()
        return tmp_path

    return put


def test_gpus_of_both_drivers_are_found_in_order(machine):
    machine("renderD130", driver="i915")
    root = machine("renderD129")
    assert devices.present(root) == devices.Gpus(("/dev/dri/renderD129", "/dev/dri/renderD130"), (), ())


@pytest.mark.parametrize(
    "options",
    [{"vendor": "0x10de", "driver": "nvidia"}, {"driver": "vfio-pci"}, {"driver": None}, {"vendor": None}],
    ids=["another vendor", "given to a guest", "no driver", "no PCI device"],
)
def test_what_is_no_usable_intel_gpu_does_not_count(machine, options):
    assert devices.present(machine("renderD128", **options)) == devices.Gpus((), (), ())


def test_a_card_without_render_node_does_not_count(machine):
    assert devices.present(machine("card0")).nodes == ()


def test_a_node_that_is_not_there_is_told_from_one_that_may_not_be_opened(machine, monkeypatch):
    machine("renderD128", node=False)
    root = machine("renderD129")
    absent, shut = "/dev/dri/renderD128", "/dev/dri/renderD129"
    assert devices.present(root) == devices.Gpus((absent, shut), (absent,), ())
    monkeypatch.setattr(devices.os, "access", lambda path, mode: False)  # root may open what nobody may
    assert devices.present(root) == devices.Gpus((absent, shut), (absent,), (shut,))


def test_no_sysfs_is_no_gpu(tmp_path):
    assert devices.present(tmp_path / "nothing") == devices.Gpus((), (), ())


@pytest.mark.parametrize(
    ("mask", "count", "left"),
    [
        (None, 1, True),
        (None, 0, False),
        ("", 1, True),
        ("0", 1, True),
        ("0.1", 1, True),
        ("1", 1, True),  # its second tile, where tiles are devices
        ("2", 1, False),
        ("7, 9.0", 2, False),
        ("7,0", 1, True),
        ("x", 1, True),  # not ours to judge
    ],
)
def test_the_affinity_mask(mask, count, left):
    environment = {} if mask is None else {"ZE_AFFINITY_MASK": mask}
    assert devices.visible(count, environment) is left

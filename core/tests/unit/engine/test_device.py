"""The device of a rank: the one of its local number, or the only one that it is shown."""

import argparse

import pytest
import torch
from deepspeed.accelerator import DeepSpeedAccelerator, set_accelerator
from deepspeed.accelerator import current as choice
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine import device, sharding
from deepspeed.errors import ConfigError


class Gang_Accelerator(DeepSpeedAccelerator):
    """As many devices as a test says; torch parses the name, and nothing is placed there."""

    _name = "meta"

    def __init__(self, count):
        self.count, self.claimed = count, []

    def device_count(self):
        return self.count

    def set_device(self, device_index):
        self.claimed.append(device_index)

    def visible_devices_envs(self):
        return ["GANG_VISIBLE_DEVICES"]


@pytest.fixture
def claim(monkeypatch):
    """The device that a rank claims: `claim(accelerator, LOCAL_RANK or None, **args)`."""
    monkeypatch.setattr(choice, "_choice", None)  # so that the plugin of the process stays active
    monkeypatch.setattr(choice, "installed", None)

    def claim(accelerator, rank, **args):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
        set_accelerator(accelerator)
        return device.claim_device(argparse.Namespace(**args) if args else None)

    return claim


@pytest.mark.parametrize(
    ("count", "rank", "args", "index"),
    [
        (4, 3, {}, 3),
        (4, 0, {}, 0),
        (4, None, {}, 0),
        (1, 3, {}, 0),  # Slurm with one device per task
        (4, None, {"local_rank": 2}, 2),
        (4, None, {"local_rank": -1}, 0),
        (4, 1, {"local_rank": 2}, 1),
        (4, -1, {"local_rank": 2}, 2),
        (4, 1, {"device_rank": 3}, 3),
    ],
)
def test_which_one(claim, count, rank, args, index):
    gang = Gang_Accelerator(count)
    assert claim(gang, rank, **args) == torch.device("meta", index)
    assert gang.claimed == [index]


@pytest.mark.parametrize(
    ("count", "rank", "args", "message"),
    [
        (2, 2, {}, r"LOCAL_RANK=2: this process sees 2 devices of 'meta'.*its own by GANG_VISIBLE_DEVICES"),
        (0, 0, {}, r"LOCAL_RANK=0: device_count\(\) of 'meta' is 0; check the driver, .*\(GANG_VISIBLE_DEVICES\)"),
        (2, "", {}, "LOCAL_RANK must be an integer of at least 0, found ''"),
        (2, "one", {}, "LOCAL_RANK must be an integer of at least 0, found 'one'"),
        (1, 0, {"device_rank": 3}, r"args.device_rank=3: this process sees 1 device of"),
    ],
)
def test_one_that_is_not_there(claim, count, rank, args, message):
    gang = Gang_Accelerator(count)
    with pytest.raises(ConfigError, match=message):
        claim(gang, rank, **args)
    assert gang.claimed == []


class Half_Accelerator(PlainAccelerator):
    def is_fp16_supported(self):
        return False


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused(claim, section, key):
    set_accelerator(Half_Accelerator())

    def check(**keys):
        device.claim_dtypes(sharding.asked_dtypes(DeepSpeedConfig({"train_batch_size": 1, **keys})))

    message = rf"{key}: asks for float16, which the accelerator 'cpu' does not train in; it has bfloat16, float32"
    with pytest.raises(ConfigError, match=message):
        check(**section)
    check(bf16={"enabled": True})
    check(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    check()


def test_ranks_share_the_host(claim):
    plain = PlainAccelerator()
    assert claim(plain, 5) == torch.device("cpu")
    assert plain.current_device() == 5


def test_a_device_that_is_done_when_a_call_returns_has_numbers_all_the_same(claim):
    class Synchronous(Gang_Accelerator):
        def is_synchronized_device(self):
            return True

    with pytest.raises(ConfigError, match="LOCAL_RANK=4: this process sees 4 devices"):
        claim(Synchronous(4), 4)
    assert claim(Synchronous(1), 3).index == 0


def test_a_probe_that_promised_a_device_where_none_is_counted(claim, monkeypatch):
    monkeypatch.setattr(device, "plugin_of", lambda accelerator: "gang")
    with pytest.raises(ConfigError, match=r"ds_probe of 'gang' says available, but device_count\(\) of 'meta' is 0"):
        claim(Gang_Accelerator(0), 0)

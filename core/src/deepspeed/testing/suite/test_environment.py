"""Environment variables, backends, profiler ranges and lazy calls, as launcher, compiler and profilers use them."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.accelerator.current import VARIABLE, explain
from deepspeed.plugins import plugin_manager
from deepspeed.testing import requirements

_COUNT = "from deepspeed.accelerator import get_accelerator; print(get_accelerator().device_count())"


def test_exported_variables_are_prefixes(accelerator: DeepSpeedAccelerator) -> None:
    for prefix in accelerator.export_envs():
        assert prefix
        assert prefix.replace("_", "").isalnum(), prefix


def test_visible_devices_are_written_for_a_rank(accelerator: DeepSpeedAccelerator) -> None:
    variables = accelerator.visible_devices_envs()
    environment = {"UNTOUCHED": "1"}
    accelerator.set_visible_devices_envs(environment, [0, 1])
    assert set(environment) == {"UNTOUCHED", *variables}
    assert environment["UNTOUCHED"] == "1"
    for variable in variables:
        assert [word for word in environment[variable] if word.isdigit()] == ["0", "1"]


@requirements.plugin
@requirements.device_variables
def test_a_process_sees_the_devices_it_is_given(accelerator: DeepSpeedAccelerator) -> None:
    environment = {**os.environ, VARIABLE: str(explain().plugin)}
    accelerator.set_visible_devices_envs(environment, [0])
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "1"


@requirements.counted_faults
def test_faults_of_a_device_are_counted_and_only_grow(accelerator: DeepSpeedAccelerator) -> None:
    for number in range(accelerator.device_count()):
        arguments = str(explain().plugin), "ds_device_faults"
        index = torch.device(accelerator.device_name(number)).index
        (before,), (after,) = (plugin_manager().ask(*arguments, index=index) for _ in range(2))
        for kind, count in before.items():
            assert kind
            assert isinstance(count, int), f"{kind}: found {count!r}; return an int"
            assert 0 <= count <= after.get(kind, -1), f"{kind}: found {count}, then {after.get(kind)}; counts only grow"


@requirements.library
def test_the_communication_library_is_known_to_torch(accelerator: DeepSpeedAccelerator) -> None:
    name = accelerator.communication_backend_name()
    assert torch.distributed.is_backend_available(name), name
    version = accelerator.communication_backend_version()
    assert version is None or str(version)


def test_the_compile_backend_can_be_chosen(accelerator: DeepSpeedAccelerator) -> None:
    before = accelerator.get_compile_backend()
    try:
        accelerator.set_compile_backend("eager")
        assert accelerator.get_compile_backend() == "eager"
        with pytest.raises(ValueError, match="no_such_backend"):
            accelerator.set_compile_backend("no_such_backend")
        assert accelerator.get_compile_backend() == "eager"
    finally:
        get_accelerator().set_compile_backend(before)
    assert accelerator.get_compile_backend() == before


def test_builders_and_wheels_have_a_place(accelerator: DeepSpeedAccelerator) -> None:
    assert accelerator.op_builder_dir().replace(".", "_").isidentifier()
    command = accelerator.build_extension()
    assert callable(command)


def test_profiler_ranges_nest(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    accelerator.range_push("outer")
    accelerator.range_push("inner")
    assert float((torch.ones(2, device=device) + 1).sum()) == 4
    accelerator.range_pop()
    accelerator.range_pop()


def test_a_range_that_nobody_opened_closes_quietly(accelerator: DeepSpeedAccelerator) -> None:
    accelerator.range_pop()
    failures: list[BaseException] = []

    def pop() -> None:
        try:
            accelerator.range_pop()
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            failures.append(error)

    accelerator.range_push("of this thread")
    thread = threading.Thread(target=pop)
    thread.start()
    thread.join()
    accelerator.range_pop()
    assert failures == []


def test_a_late_call_is_made_once_the_device_is_used(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    calls: list[int] = []
    torch.empty(1, device=device)  # initializes the device
    accelerator.lazy_call(lambda: calls.append(1))
    assert calls == [1]

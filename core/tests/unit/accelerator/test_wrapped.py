"""An object with an accelerator's methods and another parent: it is asked first, the base answers the rest."""

import copy

import pytest
import torch
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, set_accelerator
from deepspeed.accelerator.current import explain
from deepspeed.errors import PluginError


class Duck:
    """The methods that every device answers, some more, and names that the base does not know."""

    __slots__ = ("num_streams", "voice")  # so that it could not be changed if anybody tried

    def __init__(self):
        self.voice, self.num_streams = "quack", 0

    def device_name(self, device_index=None):
        return "cpu"

    def current_device_name(self):
        return "cpu"

    def device_count(self):
        return 3

    def is_available(self):
        return True

    def communication_backend_name(self):
        return self.voice

    def is_bf16_supported(self):
        return False

    @property
    def Stream(self):
        self.num_streams += 1
        return "stream class"

    def swim(self):
        return "swims"


def test_the_object_is_asked_and_its_class_is_its_own(shelf):
    duck = Duck()
    set_accelerator(duck)
    accelerator = get_accelerator()
    assert type(duck) is Duck
    assert accelerator is get_accelerator()
    assert isinstance(accelerator, DeepSpeedAccelerator)
    assert (accelerator.device_count(), accelerator.communication_backend_name()) == (3, "quack")
    assert duck.num_streams == 0  # a property may start a device: it is read only when it is asked
    assert accelerator.Stream == "stream class"
    assert accelerator.swim() == "swims"


def test_the_base_answers_what_the_object_lacks_by_the_objects_answers(shelf):
    set_accelerator(Duck())
    accelerator = get_accelerator()
    assert accelerator._name == "cpu"
    assert accelerator.is_synchronized_device() is False
    assert accelerator.supported_dtypes() == [torch.float32, torch.float16]
    accelerator.set_compile_backend("eager")
    assert accelerator.get_compile_backend() == "eager"
    with pytest.raises(AttributeError, match="'Duck' object has no attribute 'fly'"):
        accelerator.fly()


def test_it_carries_the_name_of_the_objects_class(shelf):
    set_accelerator(Duck())
    kind = type(explain().accelerator)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Duck", "Duck", Duck.__module__)


def test_a_name_of_the_object_is_written_to_the_object(shelf):
    class Talker(Duck):
        _compile_backend = "eager"

    talker = Talker()
    set_accelerator(talker)
    assert get_accelerator().get_compile_backend() == "eager"
    get_accelerator().set_compile_backend("inductor")
    assert talker._compile_backend == "inductor"


def test_it_can_be_copied(shelf):
    set_accelerator(Duck())
    assert copy.copy(get_accelerator()).swim() == "swims"


def test_a_plugin_may_build_one(shelf):
    shelf.put("duck", build=Duck)
    assert get_accelerator().swim() == "swims"
    assert explain().plugin == "duck"


def test_op_builders_beside_the_objects_class_are_found(shelf, tmp_path, monkeypatch):
    package = tmp_path / "ducks"
    (package / "op_builder").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "op_builder/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Duck, "__module__", "ducks.accelerator")

    class Diver(Duck):
        pass

    set_accelerator(Diver())
    assert get_accelerator().op_builder_dir() == "ducks.op_builder"


def test_too_few_answers_are_no_accelerator(shelf):
    class Mute:
        device_name = Duck.device_name

    with pytest.raises(PluginError, match="is no accelerator: it lacks current_device_name, device_count"):
        set_accelerator(Mute())

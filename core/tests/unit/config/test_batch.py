import pytest
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.training import MICRO, STEPS, TRAIN, BatchTriple, resolve_batch
from deepspeed.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

size = st.integers(1, 10_000)


@given(micro=size, steps=size, world=size, hidden=st.sampled_from([None, "train", "micro", "steps"]))
def test_any_two_give_the_third(micro, steps, world, hidden):
    whole = {"train": micro * steps * world, "micro": micro, "steps": steps}
    known = {name: None if name == hidden else value for name, value in whole.items()}
    assert resolve_batch(**known, world_size=world) == BatchTriple(**whole)


@given(size=size, world=size)
def test_one_gives_all(size, world):
    assert resolve_batch(None, size, None, world) == BatchTriple(size * world, size, 1)
    assert resolve_batch(size * world, None, None, world) == BatchTriple(size * world, size, 1)


@given(train=st.none() | size, micro=st.none() | size, steps=st.none() | size, world=st.integers(1, 64))
def test_whatever_is_given_holds_or_is_refused(train, micro, steps, world):
    try:
        found = resolve_batch(train, micro, steps, world)
    except ConfigError as error:
        message = str(error)
        found = None
    if found is None:
        assert all(str(value) in message for value in (train, micro) if value is not None)
        return
    assert found.train == found.micro * found.steps * world
    assert min(found.train, found.micro, found.steps) >= 1
    assert train in (None, found.train)
    assert micro in (None, found.micro)
    assert steps in (None, found.steps)


@given(micro=size, steps=size, world=size, off=st.integers(-50, 50).filter(bool))
def test_three_that_disagree_are_refused_with_all_figures(micro, steps, world, off):
    train = micro * steps * world + off
    if train < 1:
        return
    with pytest.raises(ConfigError) as caught:
        resolve_batch(train, micro, steps, world)
    assert f"found {train}," in str(caught.value)
    assert f"{micro} x {steps} x {world} = {train - off}" in str(caught.value)


def test_train_size_that_does_not_divide():
    with pytest.raises(ConfigError, match=rf"^{TRAIN}: found 7, which is not a multiple of {STEPS} x .* = 1 x 2 = 2;"):
        resolve_batch(7, None, None, 2)
    with pytest.raises(ConfigError, match=rf"^{TRAIN}: found 8, which is not a multiple of {MICRO} x .* = 3 x 2 = 6;"):
        resolve_batch(8, 3, None, 2)


@pytest.mark.parametrize(("name", "value"), [(TRAIN, 0), (MICRO, -1), (STEPS, 0)])
def test_sizes_below_one(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}: found {value}; allowed: an integer >= 1$"):
        DeepSpeedConfig({TRAIN: 8, **{name: value}})
    with pytest.raises(ConfigError, match=rf"^{name}: found {value}"):
        resolve_batch(**{"train": 8, "micro": None, "steps": None, _argument(name): value}, world_size=1)


def _argument(name):
    return {TRAIN: "train", MICRO: "micro", STEPS: "steps"}[name]


def test_no_size_at_all():
    with pytest.raises(ConfigError, match=r"^train_batch_size: found neither it, nor .*; give train_batch_size or"):
        DeepSpeedConfig({})
    with pytest.raises(ConfigError, match=r"found only gradient_accumulation_steps \(4\); give train_batch_size or"):
        DeepSpeedConfig({STEPS: 4})
    with pytest.raises(ConfigError, match="world_size: found 0"):
        DeepSpeedConfig({TRAIN: 4}, world_size=0)


def test_auto_counts_as_absent_when_the_others_decide():
    config = DeepSpeedConfig({TRAIN: 16, MICRO: "auto", STEPS: 2}, world_size=4)
    assert config.train_micro_batch_size_per_gpu == 2
    config = DeepSpeedConfig({TRAIN: 16, MICRO: "auto", STEPS: "auto"}, world_size=4)
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 1)
    assert config.unresolved_auto() == []


def test_auto_that_nothing_decides():
    sizes = {TRAIN: "auto", MICRO: "auto", STEPS: 1}
    with pytest.raises(ConfigError, match=r"^train_batch_size: found 'auto', which only Hugging Face's Trainer"):
        DeepSpeedConfig(sizes)
    with pytest.raises(ConfigError, match=r"^train_micro_batch_size_per_gpu: found 'auto'"):
        DeepSpeedConfig({MICRO: "auto"})
    config = DeepSpeedConfig(sizes, batch_required=False)
    assert config.train_batch_size is None
    assert config.unresolved_auto() == [TRAIN, MICRO]


def test_sizes_are_not_compared_where_they_are_not_required():
    filled_for_two_ranks = {TRAIN: 8, MICRO: 2, STEPS: 2}
    assert DeepSpeedConfig(filled_for_two_ranks, batch_required=False).train_batch_size == 8
    with pytest.raises(ConfigError, match="^train_batch_size: found 8"):
        DeepSpeedConfig(filled_for_two_ranks)


def test_world_size_from_the_older_arguments():
    class Mpu:
        def get_data_parallel_world_size(self):
            return 4

    class Mesh:
        mesh_dim_names = ("data_parallel", "sequence_parallel")

        def size(self, axis):
            return (8, 3)[axis]

    assert DeepSpeedConfig({MICRO: 2}, Mpu()).train_batch_size == 8
    assert DeepSpeedConfig({MICRO: 2}, None, Mesh()).train_batch_size == 16
    assert DeepSpeedConfig({MICRO: 2}, Mpu(), world_size=3).train_batch_size == 6
    assert DeepSpeedConfig({MICRO: 2}).world_size == 1

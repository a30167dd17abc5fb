"""The batch that `elasticity` chooses, against results of DeepSpeed's documentation and by trying; wrong sections."""

import itertools
import json
import math
import random

import deepspeed
import pytest
from deepspeed.cli import elastic
from deepspeed.config import training
from deepspeed.elasticity import compute_elastic_config, elasticity_enabled, get_compatible_gpus
from deepspeed.elasticity import config as section
from deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.elasticity.elasticity import (
    HCN_LIST,
    choose_batch,
    get_best_candidates,
    get_candidate_batch_sizes,
    get_valid_gpus,
)
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once

VERSION = deepspeed.__version__
PUBLISHED = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)


def configuration(**changes):
    section = {**PUBLISHED, **changes}
    return {"elasticity": {name: value for name, value in section.items() if value is not None}}


# ---- results of DeepSpeed's documentation ----------------------------------------------------------------------------


def test_the_documented_example():
    batch, valid = compute_elastic_config(configuration(), VERSION)
    assert (batch, len(valid)) == (9792, 23)
    assert get_compatible_gpus(configuration(), VERSION) == (batch, valid)
    assert compute_elastic_config(configuration(), VERSION, world_size=64) == (batch, valid, 17)
    with pytest.raises(
        ElasticityIncompatibleWorldSize, match=r"128 ranks cannot compute a batch of 9792; (.*) .23 in all"
    ):
        compute_elastic_config(configuration(), VERSION, world_size=128)


@pytest.mark.parametrize(
    ("model_parallel_size", "micros", "expected"), [(1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (2, [8], 8)]
)
def test_the_micro_batch_is_that_of_a_data_parallel_rank(monkeypatch, model_parallel_size, micros, expected):
    monkeypatch.setenv("WORLD_SIZE", "16")
    sizes = {"max_train_batch_size": 64, "micro_batch_sizes": micros, "min_gpus": 16, "max_gpus": 16}
    node = {"num_gpus_per_node": 8, "model_parallel_size": model_parallel_size}
    found = compute_elastic_config(configuration(**sizes, **node, version=0.2), VERSION, return_microbatch=True)
    assert found == (64, [16 // model_parallel_size], expected)


def test_no_batch_exceeds_the_limit():
    changes = {"max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7], "min_gpus": 1}
    batch, valid, micro = compute_elastic_config(configuration(**changes), VERSION, world_size=4)
    assert (batch, micro) == (24, 3)
    assert 7 not in valid


# ---- what the choice is, by trying everything --------------------------------------------------------------------


def divisors(number):
    return [each for each in range(1, number + 1) if number % each == 0]


def test_the_numbers_are_highly_composite():
    def prime_factors(number):
        for prime in (2, 3, 5, 7, 11, 13, 17, 19):
            while number % prime == 0:
                yield prime
                number //= prime
        assert number == 1

    counts = []
    for number in HCN_LIST:
        counts.append(math.prod(len(list(group)) + 1 for _, group in itertools.groupby(prime_factors(number))))
    assert counts == sorted(set(counts))
    most, found = 0, []
    for number in range(1, 2521):
        if len(divisors(number)) > most:
            most = len(divisors(number))
            found.append(number)
    assert found == [number for number in HCN_LIST if number <= 2520]


def test_valid_ranks_are_those_that_get_whole_micro_batches():
    rng = random.Random(1)
    for _ in range(200):
        batch, micros = rng.randint(1, 400), rng.sample(range(1, 20), 3)
        low, high = rng.randint(1, 5), rng.randint(5, 400)
        expected = [n for n in range(low, high + 1) if any(batch % (n * micro) == 0 for micro in micros)]
        assert get_valid_gpus(batch, micros, low, high) == expected


@pytest.mark.parametrize("prefer_larger", [True, False])
def test_the_candidate_with_most_valid_ranks_wins(prefer_larger):
    candidates = get_candidate_batch_sizes([2, 3, 6], 100)
    assert candidates == [72, 96]  # 2 x 48, 3 x 24, 6 x 12
    assert get_best_candidates([64, 72, 96], [2], 1, 100, prefer_larger) == (96, [n for n in divisors(48) if n <= 100])
    equal = get_best_candidates([30, 42], [1], 1, 100, prefer_larger)
    assert equal[0] == (42 if prefer_larger else 30)


def test_every_choice_trains_on_every_rank_that_it_calls_valid():
    rng = random.Random(2)
    for _ in range(300):
        node = rng.choice([1, 2, 4, 8])
        section = ElasticityConfig(
            {
                "enabled": True,
                "max_train_batch_size": rng.randint(20, 3000),
                "micro_batch_sizes": rng.sample(range(1, 20), rng.randint(1, 4)),
                "min_gpus": 1,
                "max_gpus": 64,
                "version": 0.2,
                "num_gpus_per_node": node,
                "model_parallel_size": rng.choice(divisors(node)),
                "prefer_larger_batch": rng.random() < 0.5,
            }
        )
        for ranks in range(section.model_parallel_size, 65, section.model_parallel_size):
            if ranks // section.model_parallel_size * min(section.micro_batches) > section.max_acceptable_batch_size:
                with pytest.raises(ElasticityIncompatibleWorldSize, match="exceed max_train_batch_size"):
                    choose_batch(section, ranks)
                continue
            found = choose_batch(section, ranks)
            assert found.train <= section.max_acceptable_batch_size
            assert found.micro in section.micro_batches
            for number in found.valid:
                assert found.train % number == 0
                assert any(found.train // number % micro == 0 for micro in section.micro_batches)
            assert found.train % (found.micro * (ranks // section.model_parallel_size)) == 0


def test_ranks_that_do_not_fit_get_a_batch_of_their_own_in_version_2():
    section = ElasticityConfig({**PUBLISHED, "version": 0.2})
    assert 128 not in choose_batch(section, 0).valid
    own = choose_batch(section, 128)
    assert own.valid == [128]
    assert own.train == max(10000 // (128 * micro) * 128 * micro for micro in PUBLISHED["micro_batch_sizes"])


# ---- wrong questions ---------------------------------------------------------------------------------------------

WRONG = {
    "no limit": ({"max_train_batch_size": None}, r"elasticity\.max_train_batch_size: is missing"),
    "no micro-batches": ({"micro_batch_sizes": None}, r"elasticity\.micro_batch_sizes: is missing"),
    "a negative micro-batch": ({"micro_batch_sizes": [1, 4, -1]}, "allowed: a list of whole numbers"),
    "a number for a list": ({"micro_batch_sizes": 5}, "allowed: a list of whole numbers"),
    "words": ({"micro_batch_sizes": ["a", None, 0.5]}, "allowed: a list of whole numbers"),
    "half a sample": ({"micro_batch_sizes": [2, 0.5, 4]}, "allowed: a list of whole numbers"),
    "nothing": ({"micro_batch_sizes": []}, "allowed: a list of whole numbers"),
    "too large": ({"micro_batch_sizes": [8, 20000]}, r"found 20000, more than max_train_batch_size \(10000\)"),
    "negative ranks": ({"min_gpus": -1}, r"elasticity\.min_gpus: found '-1'"),
    "negative most": ({"max_gpus": -1}, r"elasticity\.max_gpus: found '-1'"),
    "most below fewest": ({"max_gpus": 8}, r"elasticity\.max_gpus: found 8, less than min_gpus \(32\)"),
    "of the future": ({"version": "0.3"}, r"elasticity\.version: found '0.3'; allowed: 0.1 or 0.2"),
    "divided models in version 0.1": ({"model_parallel_size": 4, "num_gpus_per_node": 8}, "data parallelism only"),
    "models over nodes": (
        {"model_parallel_size": 16, "num_gpus_per_node": 8, "version": 0.2},
        r"does not divide num_gpus_per_node \(8\)",
    ),
    "disabled": ({"enabled": False}, r"elasticity\.enabled: found false"),
    "no ranks": ({"max_train_batch_size": 20}, "no number of ranks from min_gpus"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_is_named(case):
    changes, message = WRONG[case]
    with pytest.raises(ElasticityError, match=message):
        compute_elastic_config(configuration(**changes), VERSION)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_train_batchsize", "max_train_batch_size"),
        ("micro_batch_size", "micro_batch_sizes"),
        ("min_gpu", "min_gpus"),
        ("ignore_non_elastic_info", "ignore_non_elastic_batch_info"),
        ("Prefer_Larger_Batch_", "prefer_larger_batch"),
    ],
)
def test_a_mistyped_key_names_the_nearest(written, meant):
    message = f"^elasticity.{written}: found an unknown key; did you mean '{meant}'"
    with pytest.raises(ElasticityConfigError, match=message):
        compute_elastic_config(configuration(**{written: 1}), VERSION)
    with pytest.raises(ConfigError, match=message):  # as in the configuration of an engine
        deepspeed.DeepSpeedConfig({"elasticity": {**configuration()["elasticity"], written: 1}}, world_size=32)


def test_a_key_of_something_else_is_a_warning(lines, monkeypatch):
    expected = compute_elastic_config(configuration(), VERSION)
    warn_once.cache_clear()
    assert compute_elastic_config(configuration(gradient_noise_scale=1), VERSION) == expected
    assert ("WARNING", "elasticity.gradient_noise_scale: unknown config key, ignored") in lines
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    with pytest.raises(ElasticityConfigError, match="elasticity.gradient_noise_scale: found an unknown key; allowed: "):
        compute_elastic_config(configuration(gradient_noise_scale=1), VERSION)
    assert set(section._KEYS) == set(training.ElasticityConfig.model_fields)


def test_a_wrong_question_is_named(monkeypatch):
    with pytest.raises(ElasticityError, match=r"target_deepspeed_version: found 0\.2; .* from 0\.3\.8 on"):
        compute_elastic_config(configuration(), "0.2")
    with pytest.raises(ElasticityConfigError, match="no such section"):
        compute_elastic_config({}, VERSION)
    with pytest.raises(ElasticityConfigError, match="elasticity: found 'None'; give a section"):
        compute_elastic_config({"elasticity": None}, VERSION)
    assert not elasticity_enabled({"elasticity": None})
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE: found ''"):
        compute_elastic_config(configuration(), VERSION, return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE: found 'many'"):
        compute_elastic_config(configuration(version=0.2), VERSION)
    monkeypatch.setenv("WORLD_SIZE", "128")
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute_elastic_config(configuration(), VERSION, return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute_elastic_config(configuration(), VERSION, return_microbatch=True)[2] == 17
    assert issubclass(ElasticityError, ConfigError)
    assert not issubclass(ElasticityIncompatibleWorldSize, ElasticityConfigError)


# ---- the configuration of an engine ------------------------------------------------------------------------------


def test_a_configuration_takes_the_sizes_for_its_ranks():
    config = deepspeed.DeepSpeedConfig(configuration(), world_size=64)
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert sizes == (9792, 17, 9)
    config.check_supported()
    config.resolve_batch(32)  # the same configuration for other ranks
    assert config.train_batch_size == 9792
    assert config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * 32 == 9792


@pytest.mark.parametrize("name", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_sizes_beside_it_are_an_error_unless_they_are_to_be_ignored(name):
    with pytest.raises(ElasticityConfigError, match=rf"{name}: found 2 beside elasticity"):
        deepspeed.DeepSpeedConfig({**configuration(), name: 2}, world_size=64)
    ignoring = configuration(ignore_non_elastic_batch_info=True)
    assert deepspeed.DeepSpeedConfig({**ignoring, name: 2}, world_size=64).train_batch_size == 9792
    assert deepspeed.DeepSpeedConfig({**configuration(), name: "auto"}, world_size=64).train_batch_size == 9792


def test_the_section_stays_what_the_scheduler_was_given(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(PUBLISHED))
    deepspeed.DeepSpeedConfig(configuration(), world_size=64)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(configuration(max_train_batch_size=27)))
    with pytest.raises(ElasticityConfigError, match=r"max_train_batch_size: found 10000, but .* was given 27"):
        deepspeed.DeepSpeedConfig(configuration(), world_size=64)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "{")
    with pytest.raises(ElasticityConfigError, match="DEEPSPEED_ELASTICITY_CONFIG: found '{', which is no JSON"):
        deepspeed.DeepSpeedConfig(configuration(), world_size=64)


# ---- ds_elastic --------------------------------------------------------------------------------------------------


def test_the_command_prints_the_choice(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(configuration()), encoding="utf-8")
    assert elastic.main(["-c", str(path)]) == 0
    out = capsys.readouterr().out
    assert "final_batch_size .... 9792\nvalid_gpus .......... [32, " in out
    assert "micro_batch_size ..." not in out
    assert elastic.main(["-c", str(path), "-w", "64"]) == 0
    out = capsys.readouterr().out
    assert "for world size 64" in out
    assert out.endswith("micro_batch_size .... 17\n")
    assert elastic.main(["-c", str(path), "-w", "128"]) == 2
    assert capsys.readouterr().err.startswith("ds_elastic: elasticity: 128 ranks cannot compute")
    assert elastic.main(["-c", str(tmp_path / "none.json")]) == 2
    assert "is neither a file that exists" in capsys.readouterr().err

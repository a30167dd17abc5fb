"""`ds_config`: files that fit, a file's problems all at once, and a JSON Schema that judges as the code does."""

import json

import deepspeed
import pytest
import torch
from deepspeed.cli import config as command
from deepspeed.config.base import section_of
from deepspeed.config.root import DeepSpeedConfig
from deepspeed.errors import ConfigError
from jsonschema import Draft202012Validator

PROBES = (
    *(True, False, 0, 1, 2, -1, 1.5, 0.5, 10**6, None, [], ["x"], {}, {"no_such_key": 1}),
    *("1", "1e-3", "true", "x", "auto", "cpu", "nvme", "fp16", "bfloat16", "torch.half", "warn", "DEBUG"),
)
# What a schema of single keys does not see: keys that exclude one another, and the bounds of a number in quotes.
BEYOND_THE_SCHEMA = {
    ("bf16.bf16_optimizer_states", True),
    ("bf16.bf16_optimizer_states", "true"),
    ("bf16.bf16_optimizer_states", "1"),
    ("data_types.param_dtype", "fp16"),
    ("data_types.param_dtype", "torch.half"),
    ("zero_optimization.zeropp_loco_param.err_beta", "1"),
}


@pytest.fixture(scope="module")
def schema():
    made = command.make_schema()
    Draft202012Validator.check_schema(made)
    return Draft202012Validator(made)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "ds.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return str(path)

    return write


def keys_of(model, path=()):
    for name, info in model.model_fields.items():
        key = info.alias or name
        yield path, key
        section = section_of(info)
        if section is not None:
            yield from keys_of(section, (*path, key))


def with_key(path, key, value):
    """A configuration with this key alone, and those that its sections must have."""
    whole = inner = {}
    model = DeepSpeedConfig
    for name in path:
        model = section_of(next(info for each, info in model.model_fields.items() if (info.alias or each) == name))
        inner[name] = {info.alias or each: "Adam" for each, info in model.model_fields.items() if info.is_required()}
        inner = inner[name]
    inner[key] = value
    return whole


def is_taken(config):
    try:
        DeepSpeedConfig(config, batch_required=False)
    except ConfigError:
        return False
    return True


def test_the_schema_takes_for_every_key_what_the_code_takes(schema, monkeypatch):
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    differing = set()
    keys = list(keys_of(DeepSpeedConfig))
    assert len(keys) > 400
    for path, key in keys:
        for value in PROBES:
            config = with_key(path, key, value)
            if is_taken(config) != schema.is_valid(config):
                differing.add((".".join((*path, key)), value))
    assert differing == BEYOND_THE_SCHEMA


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 3, "cpu_offload": True}, "bfloat16": {"enabled": "auto"}},  # deprecated keys
        {"zero_optimization": True, "fp32_allreduce": True},
        {"$schema": "./ds.schema.json", "_comment": "mine", "library_key": 1},
        {"optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999]}}, "scheduler": None},
    ],
)
def test_other_spellings_are_in_the_schema(config, schema):
    assert is_taken(config)
    assert schema.is_valid(config)


@pytest.mark.parametrize(
    ("zero", "path", "said"),
    [
        (
            {"offload_optimizer": {"device": "gpu"}},
            "$.zero_optimization.offload_optimizer.device",
            "'gpu' is not one of ['none', 'cpu', 'nvme', 'auto', None]",
        ),
        ({"offload_param": {"device": "cpu", "pin_memory": 7}}, "$.zero_optimization.offload_param.pin_memory", "7 is"),
        ({"stages": 3}, "$.zero_optimization", "Additional properties are not allowed ('stages' was unexpected)"),
        (3, "$.zero_optimization", "3 is not valid"),
    ],
)
def test_the_schema_leads_to_the_key_that_is_wrong(zero, path, said, schema):
    (error,) = schema.iter_errors({"train_batch_size": 8, "zero_optimization": zero})
    assert error.json_path == path
    assert error.message.startswith(said)


def test_the_schema_says_what_a_key_means_and_what_is_not_supported(schema):
    properties = schema.schema["properties"]
    assert properties["train_batch_size"]["description"] == "Samples per update, over all ranks. In samples."
    assert properties["bfloat16"]["deprecated"]
    assert "Not supported: apex" in schema.schema["$defs"]["AmpConfig"]["properties"]["enabled"]["description"]


def test_a_file_without_problems(write, capsys):
    path = write({"train_batch_size": 16, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}})
    assert command.main(["check", path, "--ranks", "4"]) == 0
    assert capsys.readouterr().out == (
        f"{path}: 0 problems, 0 warnings\n"
        "  ZeRO stage 0, bf16; 16 samples a step: micro-batches of 2, 2 a step on each of 4 ranks\n"
    )


def test_all_problems_and_warnings_are_listed_at_once(write, capsys):
    text = """{
    "train_batch_size": 10, "own_key": 1, "clip_grad": 1,
    "zero_optimization": {"stge": 2, "overlap_comm": "maybe", "cpu_offload": "perhaps"},
    "optimizer": {"params": {"lr": "auto"}},
    "amp": {"enabled": true},
    "disable_python_gc": true
}"""
    path = write(text)
    assert command.main(["check", path, "--ranks", "4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: 6 problems, 4 warnings"
    problems = [line.split()[1] for line in lines if line.startswith("  problem")]
    assert sorted(problems) == [
        *("amp.enabled:", "optimizer.type:", "train_batch_size:", "zero_optimization.cpu_offload:"),
        *("zero_optimization.overlap_comm:", "zero_optimization.stge:"),
    ]
    assert "  warning  clip_grad: unknown config key, ignored; here it is 'gradient_clipping'" in lines
    assert any(line.startswith("  warning  disable_python_gc: found true") for line in lines)


def test_what_hugging_face_fills_is_no_problem(write, capsys):
    path = write({"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert command.main(["check", path]) == 0
    assert "train_batch_size, optimizer.params.lr: filled by Hugging Face's Trainer" in capsys.readouterr().out


def test_optimizer_and_schedule_are_looked_at_without_a_model(write, capsys):
    params = {"lr": "1e-4", "beta": [0.9, 0.95], "eps": 1e-8}
    path = write(
        {
            "optimizer": {"type": "AdamW", "params": params},
            "scheduler": {"type": "WarmupCosine", "params": {"warmup_num_steps": 100}},
        }
    )
    assert command.main(["check", path]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: 3 problems")
    assert "problem  optimizer.params.lr: found '1e-4'" in out
    assert 'optimizer.params.beta: AdamW (FusedAdam) has no such parameter. Did you mean "betas"?' in out
    assert "scheduler.type: found 'WarmupCosine', which is not known. Did you mean \"WarmupCosineLR\"?" in out


def test_what_was_not_asked_is_not_said_to_be(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64, **sizes}))
    machine = ["--model", str(tmp_path), "--ranks", "2", "--memory", "1GiB", "--sequence", "64"]
    assert command.main(["write", str(tmp_path / "ds.json"), *machine, "--lr", "3e-4"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "optimizer." in line or "micro_batch" in line]
    assert ["as asked" in row for row in rows] == [False, False, True]
    assert ["the default" in row for row in rows] == [True, True, False]


@pytest.mark.parametrize("kind", ["AdamX", "LBFGS"])
def test_an_optimizer_that_there_is_not(kind, write, capsys):
    assert command.main(["check", write({"optimizer": {"type": kind}})]) == 1
    assert "problem  optimizer.type: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "config",
    [
        *({"optimizer": {"type": kind, "params": {"lr": 1e-3}}} for kind in ("Muon", "OneBitAdam", "Lamb", "SGD")),
        {"optimizer": {"type": "Adam", "params": {"lr": 1, "torch_adam": True}}},
        {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"optimizer": None, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
    ],
)
def test_optimizers_and_schedules_that_are_fine(config, write):
    assert command.main(["check", write(config)]) == 0


def test_values_are_shown_and_secrets_are_not(write, capsys):
    assert command.main(["check", write({"wandb": {"team": "ours"}, "comet": {"api_key": "hush"}}), "--show"]) == 0
    shown = capsys.readouterr().out
    assert "* wandb.team" in shown
    assert "hush" not in shown


def test_as_json(write, capsys):
    path = write({"zero_optimization": {"stage": 7}})
    assert command.main(["check", path, "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)
    assert found["file"] == path
    assert found["problems"] == ["zero_optimization.stage: found 7; allowed: 0 or 1 or 2 or 3"]
    assert command.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"] == command.DIALECT


SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
EIGHT_B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
}


# a model, words of the command, and what they must lead to
SITUATIONS = {
    "a small model on one device": (SMALL, "--ranks 1 --memory 8GiB", {"stage": 0}),
    "in fp32": (SMALL, "--ranks 1 --memory 8GiB --precision fp32", {"stage": 0}),
    "in fp16": (SMALL, "--ranks 1 --memory 8GiB --precision fp16 --lr 3e-4", {"stage": 0}),
    "another optimizer": (SMALL, "--ranks 1 --memory 8GiB --optimizer Lion", {"stage": 0}),
    "accumulated": (SMALL, "--ranks 1 --memory 8GiB --global-batch 4 --micro-batch 2", {"accumulation": 2}),
    "one device that holds the weights, not the optimizer": (
        *(EIGHT_B, "--ranks 1 --memory 40GiB --sequence 1024"),
        {"stage": 1, "offload_optimizer": "cpu", "checkpoints": True},
    ),
    "eight devices of 80 GiB": (EIGHT_B, "--ranks 8 --memory 80GiB --global-batch 256 --sequence 4096", {"stage": 1}),
    "eight devices of 24 GiB": (EIGHT_B, "--ranks 8 --memory 24GiB --sequence 2048", {"stage": 3, "checkpoints": True}),
    "64 devices, by the Trainer": (EIGHT_B, "--ranks 64 --memory 40GiB --hugging-face", {"accumulation": "auto"}),
    "weights in host memory": (
        *(EIGHT_B, "--ranks 2 --memory 8GiB --sequence 512"),
        {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "checkpoints": True},
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_written_configuration_fits_and_trains(situation, tmp_path, capsys, single_rank):
    model, words, expected = SITUATIONS[situation]
    (tmp_path / "config.json").write_text(json.dumps(model))
    path = tmp_path / "ds.json"
    words = words.split()
    assert command.main(["write", str(path), "--model", str(tmp_path), *words]) == 0
    said = capsys.readouterr().out
    written = json.loads(path.read_text())
    zero = written["zero_optimization"]
    found = {
        "stage": zero["stage"],
        "accumulation": written["gradient_accumulation_steps"],
        "checkpoints": "Switch activation checkpointing on" in said,
        **{name: zero[name]["device"] for name in ("offload_optimizer", "offload_param") if name in zero},
    }
    assert {name: found[name] for name in expected} == expected
    offloaded = {"offload_optimizer", "offload_param"}
    assert found.keys() & offloaded == expected.keys() & offloaded
    ranks = words[words.index("--ranks") + 1]
    assert command.main(["check", str(path), "--ranks", ranks]) == 0
    assert " 0 problems, 0 warnings" in capsys.readouterr().out
    if "--hugging-face" in words:
        return
    module = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=written)
    before = engine.get_lr()
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(torch.ones(1, 4, dtype=next(engine.module.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 1
    assert before == [written["optimizer"]["params"]["lr"]]
    engine.destroy()


def test_what_does_not_fit_is_said_and_nothing_is_written(write, tmp_path, capsys):
    path = tmp_path / "new.json"
    words = ["write", str(path), "--model", write(EIGHT_B), "--memory", "2GiB", "--ranks"]
    assert command.main([*words, "1"]) == 1
    assert "does not fit 1 rank of 2.00 GiB: a rank would need" in capsys.readouterr().err
    assert command.main([*words, "8", "--global-batch", "3"]) == 2
    assert "a batch of 3 sequences is no multiple" in capsys.readouterr().err
    assert not path.exists()


def test_a_file_is_not_written_over_and_nobody_waits_for_answers(write, capsys, monkeypatch):
    path = write(SMALL)
    words = ["write", path, "--model", path, "--ranks", "1"]
    assert command.main([*words, "--memory", "8GiB"]) == 2
    assert "exists; give --force" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert command.main(words) == 2
    assert "found no --memory; give them, or start it on a terminal" in capsys.readouterr().err


def test_a_terminal_is_asked(write, tmp_path, capsys, monkeypatch):
    answers = iter([write(SMALL), "two", "1", "8", "8GiB"])
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert command.main(["write", str(tmp_path / "new.json")]) == 0
    said = capsys.readouterr().out
    assert "found 'two'; give a whole number of at least 1" in said
    assert "found '8' without a unit" in said


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1, "a": 2}'])
def test_a_file_that_is_no_configuration(text, write, capsys):
    fine = write({})
    assert command.main(["check", fine]) == 0
    assert command.main(["check", write(text)]) == 2
    assert capsys.readouterr().err.startswith("ds_config: ")


def test_a_missing_file_and_a_wrong_count(capsys):
    assert command.main(["check", "/no/such/ds.json"]) == 2
    assert "/no/such/ds.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command.main(["check", "ds.json", "--ranks", "0"])
    assert ended.value.code == 2

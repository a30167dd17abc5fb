"""Properties of the formulas, and the command."""

import dataclasses
import json

import pytest
from deepspeed.cli import plan as command
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError
from deepspeed.planning import (
    Mesh,
    ModelShape,
    Training,
    count_parameters,
    estimate_memory,
    estimate_traffic,
    plan,
    read_training,
)
from deepspeed.planning.memory import PARTS
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPE = ModelShape(layers=8, hidden_size=512, heads=8, vocab_size=4000, intermediate_size=1024)
EXPERTS = dataclasses.replace(SHAPE, experts=8, experts_per_token=2)
TRAINING = Training(sequence=512, accumulation=8)
GIB = 2**30


def total(mesh, **changes):
    return estimate_memory(SHAPE, mesh, dataclasses.replace(TRAINING, **changes)).total


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_parts_add_up_and_more_ranks_need_no_more(pp, tp, dp, stage):
    training = dataclasses.replace(TRAINING, stage=stage)
    memory = estimate_memory(SHAPE, Mesh(pp=pp, tp=tp, dp=dp), training)
    assert memory.total == sum(getattr(memory, part) for part in PARTS)
    assert min(getattr(memory, part) for part in PARTS) >= 0
    more = estimate_memory(SHAPE, Mesh(pp=pp, tp=2 * tp, dp=dp), training)
    assert more.total <= memory.total


def test_states_follow_the_table_of_zero():
    numel = count_parameters(SHAPE)
    for stage, (weights, gradients, states) in {0: (2, 2, 12), 1: (2, 2, 3), 2: (2, 0, 3), 3: (0.5, 0, 3)}.items():
        memory = estimate_memory(SHAPE, Mesh(dp=4), Training(sequence=512, stage=stage, zero_persistence=0))
        assert memory.weights == pytest.approx(weights * numel, rel=0.01)
        assert memory.master_weights + memory.optimizer == pytest.approx(states * numel, rel=0.01)
        if stage < 2:
            assert memory.gradients == pytest.approx(gradients * numel, rel=0.01)


def test_muon_keeps_the_states_of_adamw_for_what_is_no_matrix_and_needs_room_in_the_update():
    numel = count_parameters(SHAPE)
    rest = 2 * SHAPE.vocab_size * SHAPE.hidden_size
    for stage in (0, 1, 3):
        training = Training(micro_batch=1, sequence=8, stage=stage, precision="fp32", optimizer="muon")
        planned = estimate_memory(SHAPE, Mesh(dp=2), training)
        share = 1 if stage == 0 else 2
        assert planned.optimizer == pytest.approx(4 * (numel + rest) / share, rel=0.02)
        assert planned.moment == ("backward" if stage == 3 else "update")
        largest = max(SHAPE.intermediate_size * SHAPE.hidden_size, SHAPE.hidden_size**2)
        assert stage == 3 or planned.buffers >= 4 * ((numel - rest) / share * 0.95 + 3 * largest)


def test_what_saves_memory_does():
    whole = total(Mesh(dp=4), stage=1, micro_batch=4)
    assert total(Mesh(dp=4), stage=1, micro_batch=4, checkpoints_activations=True) < whole
    assert total(Mesh(dp=4), stage=1, micro_batch=2) < whole
    assert total(Mesh(dp=4), stage=1, micro_batch=4, offloads_optimizer=True) < whole
    assert total(Mesh(dp=4), stage=0, offloads_optimizer=True) == total(Mesh(dp=4), stage=0)  # which offloads nothing
    assert total(Mesh(dp=4), stage=1, micro_batch=4, precision="fp32") > whole
    assert total(Mesh(pp=4), accumulation=8) > total(Mesh(pp=4), accumulation=1)
    assert total(Mesh(dp=2, sp=2), micro_batch=4) < total(Mesh(dp=4), micro_batch=4)


def test_bytes_sent_are_those_of_rings():
    numel = count_parameters(SHAPE)
    sent = {stage: estimate_traffic(SHAPE, Mesh(dp=4), Training(stage=stage)) for stage in range(4)}
    assert sent[0].reduce == pytest.approx(2 * 0.75 * 2 * numel)
    assert sent[0].gather == sent[0].tp == sent[0].pp == sent[0].sp == sent[0].ep == 0
    assert sent[1].total == sent[2].total == pytest.approx(sent[0].total)
    hidden = 512 * 512 * 2
    matrices = 8 * (4 * 512 * 512 + 3 * 512 * 1024)
    for stage, num_bytes in enumerate((4 * 0.75 * matrices, 0, 0, 8 * 0.75 * matrices / 4)):
        muon = estimate_traffic(SHAPE, Mesh(dp=4), Training(stage=stage, optimizer="muon"))
        assert muon.gather - sent[stage].gather == pytest.approx(num_bytes)
    tp = estimate_traffic(SHAPE, Mesh(tp=2), Training(sequence=512)).tp
    assert tp == 0.5 * (2 * (4 * 8 + 1) * hidden + 512 * 4000 * 2)
    pp = estimate_traffic(SHAPE, Mesh(pp=2), TRAINING).pp
    assert pp == 8 * hidden
    ulysses = estimate_traffic(SHAPE, Mesh(sp=2), Training(sequence=512)).sp
    assert ulysses == 8 * 2 * 4 * hidden / 2 * 0.5
    assert estimate_traffic(EXPERTS, Mesh(dp=2, ep=2), Training(sequence=512)).ep == 8 * 4 * 2 * hidden * 0.5


def test_the_best_choice_is_a_configuration():
    found = plan(EXPERTS, ranks=8, memory=2 * GIB, training=TRAINING)
    assert found.best is not None
    assert [each.seconds_per_token for each in found.fitting] == sorted(
        each.seconds_per_token for each in found.fitting
    )
    for choice in found.fitting:
        mesh = choice.mesh
        assert mesh.ranks == 8
        assert choice.memory.total <= 2 * GIB
        assert choice.tokens == 8 * 512
        parsed = DeepSpeedConfig(choice.config(), world_size=mesh.dp)
        assert parsed.train_batch_size == 8
        training, fixed = read_training(choice.config(), sequence=512)
        assert training == choice.training
        assert {"stage": training.stage, **{axis: getattr(mesh, axis) for axis in fixed if axis != "stage"}} == fixed


def test_what_fits_nowhere_gets_advice():
    found = plan(SHAPE, ranks=2, memory=2**27, training=Training(sequence=2048, micro_batch=4), axes={"dp": 2})
    assert not found.fitting
    assert found.others[0].memory.total > 2**27
    assert {"activation checkpointing", "a micro-batch of 1", "all of these", "4 ranks"} <= {
        what for what, _ in found.advice
    }
    assert all(choice.memory.total < found.others[0].memory.total for _, choice in found.advice)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"axes": {"tp": 3}}, "the sizes {'tp': 3} do not divide 8"),
        ({"axes": {"tp": 8, "pp": 1, "ep": 2}}, "ep 2: 0 experts"),
        ({"axes": {"xp": 2}}, "found xp; the axes are"),
        ({"global_batch": 3, "axes": {"dp": 8}}, "a batch of 3 sequences is no multiple of dp x micro-batch 1"),
        ({"stages": [4]}, r"found \[4\]"),
        ({"ranks": 0}, "found ranks 0"),
    ],
)
def test_what_cannot_be_planned_is_named(asked, message):
    with pytest.raises(ConfigError, match=message):
        plan(SHAPE, **{"ranks": 8, "memory": GIB, **asked})


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"layers": 4, "hidden_size": 256, "heads": 4, "vocab_size": 1000}))
    return str(path)


def test_the_command_prints_a_table_and_sections(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert command.main([model, "--ranks", "4", "--memory", "8GiB", "--sequence", "256"]) == 0
    output = capsys.readouterr().out
    assert "4 ranks of 8.00 GiB" in output
    assert "step, estimate" in output
    sections = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert sections["train_micro_batch_size_per_gpu"] == 1


def test_the_command_prints_json(model, tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}))
    arguments = [model, "--ranks", "4", "--memory", "8GiB", "--json", "--config", str(config), "--precision", "bf16"]
    assert command.main([*arguments, "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(each["stage"], each["mesh"]["tp"]) for each in found["choices"]} == {(2, 2), (2, 2)}
    assert all(each["config"]["bf16"] == {"enabled": True} for each in found["choices"])


def test_the_command_says_what_is_wrong(model, capsys):
    assert command.main([model, "--ranks", "4", "--memory", "64MiB"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert command.main([model, "--ranks", "4", "--memory", "1GiB", "--tp", "3"]) == 2
    assert "do not divide 4" in capsys.readouterr().err
    assert command.main([model + "x", "--ranks", "4", "--memory", "1GiB"]) == 2


def test_the_table_fits_a_terminal_and_proposes_no_pipeline(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = [model, "--ranks", "4", "--memory", "8GiB", "--sequence", "256"]
    assert command.main(arguments) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 8
    assert all(len(row) <= 80 and row.rstrip("│ ").endswith(" s") for row in rows)
    assert not any("pp" in row for row in rows)
    assert command.main([*arguments, "--pp", "any", "--top", "99", "--json"]) == 0
    assert {each["mesh"]["pp"] for each in json.loads(capsys.readouterr().out)["choices"]} == {1, 2, 4}
    monkeypatch.setenv("COLUMNS", "400")
    assert command.main([*arguments, "--verbose"]) == 0
    assert "activations" in capsys.readouterr().out


def test_the_title_counts_ranks_and_choices(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert command.main([model, "--ranks", "1", "--memory", "8GiB", "--sequence", "256", "--stages", "0"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "1 rank of 8.00 GiB: 1 of 1 choice fits;" in words


def test_memory_without_a_unit_is_asked_for_one(model, capsys):
    with pytest.raises(SystemExit):
        command.main([model, "--ranks", "4", "--memory", "80"])
    assert "found '80' without a unit; give for example 80GiB" in capsys.readouterr().err


def test_a_model_after_the_stages_is_asked_for_another_place(model, capsys):
    with pytest.raises(SystemExit):
        command.main(["--ranks", "4", "--memory", "8GiB", "--stages", "1", "2", model])
    assert f"--stages: found {model!r}; give numbers of 0 to 3. A model goes before" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path, capsys):
    path = tmp_path / "nope.json"
    assert command.main([str(path), "--ranks", "8", "--memory", "80GiB"]) == command.WRONG
    assert capsys.readouterr().err.startswith(f"ds_plan: {path}: cannot be read (No such file or directory); give a")
    path.write_bytes(b"\xff\xfe")
    assert command.main([str(path), "--ranks", "8", "--memory", "80GiB"]) == command.WRONG
    assert f"{path}: is no JSON" in capsys.readouterr().err

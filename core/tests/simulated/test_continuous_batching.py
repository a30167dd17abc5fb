"""Continuous batching on a device with a memory of its own: the tokens of the host, by one device and by two."""

import torch
from deepspeed.inference.v2 import InferenceEngineV2, Sampling, generate

PROMPTS = [[5], [7] * 17, [3, 4, 5], [9] * 30]
COUNTS = [12, 3, 15, 8]


def tokens_job(tp_size, temperature):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=64, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # logits that are far apart
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    limits = {"kv_block_size": 4, "memory_config": {"mode": "allocate", "size": 12}}
    engine = InferenceEngineV2(model, {"tensor_parallel": {"tp_size": tp_size}, "state_manager": limits})
    sampling = Sampling(temperature, seed=1)
    found = generate(engine, PROMPTS, COUNTS, sampling=sampling, token_budget=9)
    logits = engine.put([0, 1], [torch.tensor(PROMPTS[1]), torch.tensor(PROMPTS[2])])
    return logits.device.type, found, logits.cpu()


def assert_as_on_the_host(answers, expected):
    _, tokens, wanted = expected
    for device, found, logits in answers:
        assert device != "cpu"
        assert found == tokens
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_device_generates_the_tokens_of_the_host(sim, cpu):
    for temperature in (0.0, 0.7):
        assert_as_on_the_host(sim(tokens_job, 1, temperature), cpu(tokens_job, 1, temperature)[0])


def test_two_devices_that_share_a_model_generate_the_tokens_of_the_host(sim_ranks, cpu):
    assert_as_on_the_host(sim_ranks(tokens_job, 2, 0.0), cpu(tokens_job, 1, 0.0)[0])

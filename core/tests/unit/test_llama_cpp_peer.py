"""What `benchmarks/llama_cpp_peer.py` gives llama.cpp: the weights of a transformers model under GGUF's names."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "llama_cpp_peer.py"


@pytest.fixture(scope="module")
def peer():
    spec = importlib.util.spec_from_file_location("llama_cpp_peer", PROGRAM)
    module = sys.modules["llama_cpp_peer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["llama_cpp_peer"]


@pytest.fixture(scope="module")
def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@pytest.fixture(scope="module")
def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4))


def arrays_of(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def turned(x, position, *, neighbors):
    """Rotary positions of one head, which turn the halves of it or its neighbors."""
    angles = position * 10000.0 ** (-np.arange(x.size // 2) / (x.size // 2))
    a, b = (x[0::2], x[1::2]) if neighbors else np.split(x, 2)
    parts = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    return np.stack(parts, 1).ravel() if neighbors else np.concatenate(parts)


def test_scores_of_interleaved_rows_are_those_of_halves(peer):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2 * 16, 8))
    x, y = rng.standard_normal((2, 8))
    for head in range(2):
        rows = slice(head * 16, head * 16 + 16)
        expected = turned(q[rows] @ x, 5, neighbors=False) @ turned(k[rows] @ y, 3, neighbors=False)
        theirs = [peer.interleaved(w, 2)[rows] for w in (q, k)]
        found = turned(theirs[0] @ x, 5, neighbors=True) @ turned(theirs[1] @ y, 3, neighbors=True)
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_a_llama_has_every_weight_once(peer, llama):
    weights = arrays_of(llama)
    made = peer.gguf_arrays(llama.config.to_dict(), weights)
    assert len(made) == len(weights)
    np.testing.assert_array_equal(made["output.weight"], weights["lm_head.weight"])
    np.testing.assert_array_equal(
        made["blk.1.attn_k.weight"], peer.interleaved(weights["model.layers.1.self_attn.k_proj.weight"], 2)
    )
    np.testing.assert_array_equal(made["blk.1.ffn_down.weight"], weights["model.layers.1.mlp.down_proj.weight"])


def test_a_gpt2_is_transposed_and_has_no_second_embedding(peer, gpt2):
    weights = arrays_of(gpt2)
    made = peer.gguf_arrays(gpt2.config.to_dict(), weights)
    assert len(made) == len(weights) - 1
    assert "output.weight" not in made
    np.testing.assert_array_equal(made["blk.0.attn_qkv.weight"], weights["transformer.h.0.attn.c_attn.weight"].T)
    np.testing.assert_array_equal(made["position_embd.weight"], weights["transformer.wpe.weight"])


@pytest.mark.parametrize(("width", "bits", "bound"), [("F32", 32, 0), ("BF16", 16, 2**-8), ("Q8_0", 8.5, 1 / 127)])
def test_a_file_has_the_weights(peer, llama, tmp_path, width, bits, bound):
    gguf = pytest.importorskip("gguf")
    config = llama.config.to_dict()
    arrays = peer.gguf_arrays(config, arrays_of(llama))
    num_bytes = peer.write_gguf(tmp_path / "model.gguf", config, arrays, width)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert read.keys() == arrays.keys()
    for name, value in arrays.items():
        found = gguf.quants.dequantize(read[name].data, read[name].tensor_type).reshape(value.shape)
        assert np.abs(found - value).max() <= bound * np.abs(value).max(), name
    matrices = [value for name, value in arrays.items() if value.ndim == 2 and name != "token_embd.weight"]
    assert num_bytes == sum(value.size for value in matrices) * bits / 8


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama_cpp is installed")
def test_an_environment_without_llama_cpp_is_named(peer, llama):
    with peer.start(sys.executable, llama, batch=1, length=8, threads=1) as found:
        assert isinstance(found, str)
        assert "llama_cpp" in found

"""`enable_cuda_graph`: replayed forwards give what the model gives.

The graphs here record torch's operators on the host and run them again on the same memory, as a device's graph does.
"""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.errors import ConfigError
from deepspeed.inference.engine import MAX_KINDS
from deepspeed.inference.generate import cache_of
from deepspeed.log import logger
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel


class RecordedGraph(TorchDispatchMode):
    """Operators, and where their results lie."""

    def __init__(self):
        super().__init__()
        self.calls, self.num_replays = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        self.num_replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for at, value in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(at, torch.Tensor):
                    at.copy_(value)


class RecordingAccelerator(PlainAccelerator):
    def __init__(self):
        super().__init__()
        self.graphs = []

    def create_graph(self):
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    def capture_to_graph(self, graph, pool=None, stream=None):
        return graph

    def replay_graph(self, graph):
        graph.replay()


@pytest.fixture
def recording():
    before = get_accelerator()
    set_accelerator(RecordingAccelerator())
    yield get_accelerator()
    set_accelerator(before)


def num_replays(recording):
    return sum(graph.num_replays for graph in recording.graphs)


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=50, **sizes)).eval()


def tokens(seed, batch=2, length=7, vocabulary=50):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("inject", [False, True])
def test_replays_equal_the_model(recording, inject):
    model, engine = bert(), None
    engine = deepspeed.init_inference(
        bert(), dtype=torch.float, enable_cuda_graph=True, replace_with_kernel_inject=inject
    )
    kept = []
    for seed in range(4):
        expected = model(tokens(seed)).last_hidden_state
        found = engine(tokens(seed)).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        kept.append((found, found.clone()))
    assert num_replays(recording) == 3
    assert all(torch.equal(found, before) for found, before in kept)  # no replay writes into what a caller holds


def test_each_kind_of_input_has_a_graph(recording):
    model = bert()
    engine = deepspeed.init_inference(bert(), dtype=torch.float, enable_cuda_graph=True)
    for _ in range(2):
        for length in (5, 7):
            ids = tokens(length, length=length)
            torch.testing.assert_close(engine(input_ids=ids).pooler_output, model(input_ids=ids).pooler_output)
            hidden = engine(ids, output_hidden_states=True).hidden_states
            torch.testing.assert_close(hidden, model(ids, output_hidden_states=True).hidden_states)
    assert num_replays(recording) == 4


def test_more_kinds_than_are_kept_run_without(recording):
    engine = deepspeed.init_inference(nn.Linear(3, 2), dtype=torch.float, enable_cuda_graph=True)
    for _ in range(2):
        for rows in range(1, MAX_KINDS + 4):
            x = torch.ones(rows, 3)
            torch.testing.assert_close(engine(x), engine.module(x))
    assert num_replays(recording) == MAX_KINDS


def test_a_forward_that_returns_a_cache_is_not_captured(recording):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0))
    engine = deepspeed.init_inference(model.eval(), dtype=torch.float, enable_cuda_graph=True)
    ids = tokens(0)
    caches = [cache_of(engine(ids)) for _ in range(3)]
    assert None not in caches
    assert num_replays(recording) == 0
    assert caches[0] is not caches[1]
    assert engine.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 11)


def test_changed_weights_count(recording):
    engine = deepspeed.init_inference(nn.Linear(3, 2), dtype=torch.float, enable_cuda_graph=True)
    x = torch.ones(1, 3)
    engine(x)
    with torch.no_grad():
        engine.module.weight.fill_(2.0)
        engine.module.bias.zero_()
    assert engine(x).tolist() == [[6.0, 6.0]]
    assert num_replays(recording) == 1


class ReadsAValue(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


def test_a_forward_that_reads_a_value_is_refused(recording):
    engine = deepspeed.init_inference(ReadsAValue(), dtype=torch.float, enable_cuda_graph=True)
    with pytest.raises(ConfigError, match="cannot be captured: operation not permitted .* enable_cuda_graph at false"):
        engine(torch.ones(2))


def test_times_are_of_the_engines_forwards(recording):
    engine = deepspeed.init_inference(nn.Linear(3, 2), dtype=torch.float, enable_cuda_graph=True)
    engine.profile_model_time()
    for _ in range(3):
        engine(torch.ones(1, 3))
    assert len(engine.model_times()) == 3


def test_without_graphs_it_runs_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr("deepspeed.inference.engine.warn_once", logger.warning)
    logger.addHandler(caplog.handler)
    engine = deepspeed.init_inference(nn.Linear(3, 2), dtype=torch.float, enable_cuda_graph=True)
    logger.removeHandler(caplog.handler)
    assert "the accelerator 'cpu' records no graphs" in caplog.text
    x = torch.ones(1, 3)
    assert torch.equal(engine(x), engine.module(x))

"""The token operators of random layerwise token dropping against torch indexing."""

import pytest
import torch
from ds_ext_cuda.op_builder import RandomLTDBuilder


@pytest.fixture
def ops(load_op):
    return load_op(RandomLTDBuilder)


def _indices(batch, kept, tokens, device):
    generator = torch.Generator().manual_seed(kept)
    rows = [torch.randperm(tokens, generator=generator)[:kept] for _ in range(batch)]
    return torch.stack(rows).to(torch.int32).to(device)


@pytest.mark.parametrize("kept", [0, 1, 7, 600])
def test_sort_equals_torch_and_works_in_place(ops, device, kept):
    indices = torch.stack([_indices(3, kept, 1000, device) for _ in range(2)])
    wanted = indices.sort(dim=-1).values
    ops.token_sort_(indices, 1000)
    assert torch.equal(indices, wanted)


def test_sort_keeps_numbers_that_stand_twice(ops, device):
    indices = torch.tensor([[5, 2, 5, 0, 2]], dtype=torch.int32, device=device)
    ops.token_sort_(indices, 8)
    assert indices.tolist() == [[0, 2, 2, 5, 5]]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("of_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("hidden", "offset"), [(64, 0), (64, 1), (3, 0), (0, 0)])
def test_gather_and_scatter_equal_torch(ops, numbers, device, batch_first, of_dtype, hidden, offset):
    batch, tokens, kept = 3, 20, 7
    shape = (batch, tokens, hidden) if batch_first else (tokens, batch, hidden)
    whole, indices = numbers(*shape, dtype=of_dtype, offset=offset), _indices(batch, kept, tokens, device)
    of_batch = whole if batch_first else whole.transpose(0, 1)
    index = indices.long()[:, :, None].expand(-1, -1, hidden)
    wanted = of_batch.gather(1, index)
    part = ops.token_gather(whole, indices, batch_first)
    assert torch.equal(part if batch_first else part.transpose(0, 1), wanted)

    new = numbers(*part.shape, dtype=of_dtype, seed=1, offset=offset)
    expected = of_batch.scatter(1, index, new if batch_first else new.transpose(0, 1))
    ops.token_scatter_(whole, new, indices, batch_first)
    assert torch.equal(of_batch, expected)


def test_gather_takes_tensors_that_are_not_contiguous(ops, numbers, device):
    whole, indices = numbers(2, 6, 10).transpose(1, 2), _indices(4, 2, 10, device).t()
    assert torch.equal(
        ops.token_gather(whole, indices, True), whole.gather(1, indices.long()[:, :, None].expand(-1, -1, 6))
    )


def test_refuses_wrong_arguments_by_name(ops, numbers, device):
    whole, indices = numbers(2, 5, 4), _indices(2, 3, 5, device)
    sort, gather, scatter = ops.token_sort_, ops.token_gather, ops.token_scatter_
    for match, call in (
        ("indices: found dtype int64, but it must be int32", lambda: sort(indices.long(), 5)),
        ("indices: found 3 indices in a row, but it must be at most num_tokens, 2", lambda: sort(indices, 2)),
        (r"activations: found shape \(5, 4\), but it must be of three", lambda: gather(whole[0], indices, True)),
        (r"indices: found shape \(2, 3\), but it must be shape \(5, kept", lambda: gather(whole, indices, False)),
        ("all_activations: found a tensor that is not", lambda: scatter(whole.mT, whole.mT, indices, True)),
        (r"layer_activations: found shape \(2, 5, 4\), but it", lambda: scatter(whole, whole.clone(), indices, True)),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()


def test_opcheck(ops, numbers, device):
    whole, part, indices = numbers(2, 5, 4), numbers(2, 3, 4), _indices(2, 3, 5, device)
    torch.library.opcheck(ops.token_sort_.default, (indices, 5))
    torch.library.opcheck(ops.token_gather.default, (whole, indices, True))
    torch.library.opcheck(ops.token_scatter_.default, (whole, part, indices, True))


def test_torch_compiles_a_layer_that_drops_tokens(ops, numbers, device):
    def layer(whole, indices):
        ops.token_sort_(indices, whole.shape[1])
        part = ops.token_gather(whole, indices, True)
        ops.token_scatter_(whole, 2 * part, indices, True)
        return whole.sum(1)

    whole, indices = numbers(2, 5, 4), _indices(2, 3, 5, device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        own = whole.clone(), indices.clone()
        results.append((run(*own), *own))
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)
    assert torch.equal(results[1][2], indices.sort(dim=-1).values)

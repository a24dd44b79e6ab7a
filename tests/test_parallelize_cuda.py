"""parallelize on a CUDA card, against the same module in float64: cuDNN itself may round its products to TF32."""

from __future__ import annotations

import copy
import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA card", allow_module_level=True)

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence  # noqa: E402

from pararnn import parallelize  # noqa: E402

KINDS = {
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 8}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def make(kind, **options):
    torch.manual_seed(0)
    cls, own = KINDS[kind]
    return cls(8, 32, batch_first=True, **own, **options)


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs_and_gradients(module, x, lengths=None):
    x = x.detach().clone().requires_grad_()
    given = x if lengths is None else pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, end = module(given)
    made = [out if lengths is None else out.data, *(end if isinstance(end, tuple) else (end,))]
    loss = sum((y * draw(*y.shape, seed=3).to(y)).sum() for y in made)
    return made, torch.autograd.grad(loss, [x, *module.parameters()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", [None, [300, 777, 1]])
def test_same_outputs_and_gradients(kind, dtype, lengths):
    module, x = make(kind, num_layers=2, bidirectional=True).double(), draw(3, 777, 8)
    wanted = outputs_and_gradients(module, x, None if lengths is None else torch.tensor(lengths))
    parallel = parallelize(copy.deepcopy(module)).to("cuda", dtype)
    given = None if lengths is None else torch.tensor(lengths)
    found = outputs_and_gradients(parallel, x.to("cuda", dtype), given)
    for ours, theirs in zip(found, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.is_cuda and a.dtype == dtype
            assert (a.double().cpu() - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()


def test_longer_than_cudnn_takes():
    module, x = make("gru").double(), draw(1, 70_001, 8)
    with torch.no_grad():
        wanted = module(x)[0]
        parallel = parallelize(copy.deepcopy(module)).float().cuda()
        found = parallel(x.float().cuda())[0].double().cpu()
    assert (found - wanted).abs().max() < 1e-5 and parallel.last_stats.path == "segments"


def test_autocast_leaves_the_recurrence_in_the_weights_dtype():
    parallel, x = parallelize(make("gru")).cuda(), draw(2, 500, 8).float().cuda()
    wanted = parallel(x)[0]
    with torch.autocast("cuda", torch.bfloat16):
        found = parallel(x)[0]
        from_half = parallel(x.bfloat16())[0]
    assert torch.equal(found, wanted)
    assert from_half.dtype == torch.float32 and (from_half - wanted).abs().max() < 2e-2


@pytest.mark.skipif("CUBLAS_WORKSPACE_CONFIG" not in os.environ, reason="cuBLAS is deterministic with it only")
def test_packed_gradients_are_deterministic_on_demand():
    parallel, x = parallelize(make("lstm", bidirectional=True)).cuda(), draw(3, 200, 8).float().cuda()
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        runs = [outputs_and_gradients(parallel, x, torch.tensor([3, 200, 77])) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*(part for run in runs for part in [[*run[0], *run[1]]]), strict=True):
        assert torch.equal(a, b)


def test_another_stream():
    parallel, x = parallelize(make("gru")).cuda(), draw(2, 3000, 8).float().cuda()
    wanted = parallel(x)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = parallel(x)[0]
    torch.cuda.current_stream().wait_stream(stream)
    assert (found - wanted).abs().max() < 1e-6

"""On a CUDA device only: compiled kernels at real sizes, and inside CUDA graphs.

Where there is such a device, the other test_08 files run compiled, too: their comparisons
are not repeated here. What the interpreter cannot show is: races, and replays.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (it is for Linux)", allow_module_level=True)
from kernels.mode import INTERPRETED

if INTERPRETED or not torch.cuda.is_available():
    pytest.skip("no CUDA device: kernels ran in the interpreter only", allow_module_level=True)

from test_08_paged_attention import DTYPES, TOLERANCE, Paged

from kernels import settings
from kernels.cache_write import write_cache
from kernels.paged_decode import make_scratch, paged_decode
from kernels.paged_prefill import paged_prefill

LENS = [4096, 1, 777, 30_000, 0, 2048, 15, 512]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 1000])
def test_decode_at_real_sizes(head_dim, dtype, window):
    paged = Paged(LENS, kv_heads=4, group=4, head_dim=head_dim, block_size=16, dtype=dtype)
    paged.assert_equal(paged.decode(window, setting=None), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_prefill_at_real_sizes(head_dim, dtype, window):
    lens, chunks = [1500, 3000, 900, 64], [1500, 500, 1, 64]
    paged = Paged(lens, chunks, 4, 4, head_dim=head_dim, block_size=16, dtype=dtype)
    paged.assert_equal(paged.prefill(window, setting=None), window)


def test_repeats_agree_to_the_last_bit():
    # Splits are joined in a fixed order: a difference would be a race.
    paged = Paged(LENS, kv_heads=8, group=4, head_dim=128, block_size=16, dtype=torch.bfloat16)
    once = paged.decode(setting=None)
    for _ in range(20):
        assert torch.equal(paged.decode(setting=None), once)


@pytest.mark.parametrize("key", settings.TUNED, ids=str)
def test_tuned_settings(key):
    kernel, pad, itemsize, capability = key
    device = torch.device("cuda")
    if capability != settings.capability(device):
        pytest.skip(f"measured on compute capability {capability}")
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    chunks = None if kernel == "decode" else [100, 33]
    paged = Paged([700, 33], chunks, group=4, head_dim=pad, block_size=16, dtype=dtype)
    run = paged.decode if kernel == "decode" else paged.prefill
    paged.assert_equal(run(setting=settings.TUNED[key]))


def capture(function):
    """A CUDA graph of `function`, which is run a few times first, so that nothing is compiled
    while the graph is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def test_a_captured_decode_step_replays_with_other_contents():
    # Captured with contexts of one token; then they grow until they are split.
    paged = Paged([3000, 40, 900], kv_heads=4, group=4, head_dim=64, block_size=16)
    out, scratch = torch.empty_like(paged.q), make_scratch(16, 4, 64, paged.q.device)
    k, v = torch.randn(2, 3, 4, 64, device="cuda")
    slots = torch.full((3,), -1, device="cuda")

    def step():
        write_cache(k, v, paged.kv, slots)
        paged_decode(paged.q, paged.kv, paged.tables, paged.lens, out=out, scratch=scratch)

    graph, dense = capture(step), paged.dense
    for lens in ([1, 1, 1], [500, 0, 899], [3000, 40, 900], [17, 3, 64]):
        paged.lens.copy_(torch.tensor(lens))
        paged.dense = [tokens[:n] for tokens, n in zip(dense, lens, strict=True)]
        paged.q.copy_(torch.randn_like(paged.q))
        out.fill_(float("nan"))
        graph.replay()
        paged.assert_equal(out)

    # Sequence 0 gets another second block, and the replay writes its 17th token there.
    used = set(paged.tables.flatten().tolist())
    free = next(block for block in range(len(paged.kv)) if block not in used)
    paged.tables[0, 1] = free
    slots[0] = free * 16
    graph.replay()
    paged.dense[0] = torch.cat([dense[0][:16], torch.stack([k[0], v[0]])[None]])
    paged.assert_equal(out)


def test_a_captured_prefill_replays_with_other_chunks():
    first = Paged([300, 100], [60, 4], kv_heads=2, group=4, head_dim=64, block_size=16)
    second = Paged([200, 200], [4, 60], kv_heads=2, group=4, head_dim=64, block_size=16, seed=1)
    width = max(first.tables.shape[1], second.tables.shape[1])
    tables = torch.zeros(2, width, dtype=torch.int64, device="cuda")
    kv = torch.cat([first.kv, second.kv])
    q, lens, start = first.q.clone(), first.lens.clone(), first.start.clone()
    out = torch.empty_like(q)
    graph = capture(lambda: paged_prefill(q, kv, tables, lens, start, out=out))
    for paged, offset in ((first, 0), (second, len(first.kv)), (first, 0)):
        tables[:, : paged.tables.shape[1]] = paged.tables + offset
        for mine, theirs in ((q, paged.q), (lens, paged.lens), (start, paged.start)):
            mine.copy_(theirs)
        graph.replay()
        torch.testing.assert_close(out, paged.expected(), **TOLERANCE[q.dtype])

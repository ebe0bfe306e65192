"""Chapter 16's latent attention, against itself, `transformers` and counting."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minikv import BlockPool, BlockTable
from minikv.course.chapters.ch16_newer_models.latent import (
    LatentStore,
    LatentWeights,
    absorbed_attention,
    cache_entry,
    cached_numbers,
    decode,
    multiplications,
    plain_attention,
    queries,
    random_weights,
)

SIZES = dict(heads=4, nope=24, rope=16, value=20, latent=32)


def plain_layer(x, weights):
    positions = torch.arange(len(x))
    entries = cache_entry(x, positions, weights)
    out = plain_attention(queries(x, positions, weights), entries, weights)
    return out.flatten(1) @ weights.out.T


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_absorbed_is_plain(dtype, near, block_size):
    """Decoded one by one over blocks in any order, beside another sequence in the same store."""
    weights = random_weights(**SIZES, dtype=dtype)
    x = torch.randn(2, 37, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    pool = BlockPool(80)
    store = LatentStore(weights, 80, block_size)
    tables = [BlockTable(pool, block_size) for _ in x]
    pairs = list(zip(x, tables, strict=True))
    found = [[decode(one[t], weights, store, table) for one, table in pairs] for t in range(37)]
    for i, one in enumerate(x):
        mine = torch.stack([step[i] for step in found])
        expected = plain_layer(one, weights)
        assert torch.allclose(mine, expected, atol=near * float(expected.abs().max()))


def test_as_in_transformers():
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Attention,
        DeepseekV2RotaryEmbedding,
    )

    heads, nope, value, latent = (SIZES[name] for name in ("heads", "nope", "value", "latent"))
    config = DeepseekV2Config(
        hidden_size=128, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=None,
        kv_lora_rank=latent, qk_nope_head_dim=nope, qk_rope_head_dim=16, v_head_dim=value,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = DeepseekV2Attention(config, 0).eval()
    x, positions = torch.randn(1, 29, 128), torch.arange(29)[None]
    with torch.no_grad():
        layer.kv_a_layernorm.weight.uniform_(0.5, 1.5)
        mask = torch.full((29, 29), -torch.inf).triu(1)[None, None]
        turns = DeepseekV2RotaryEmbedding(config)(x, positions)
        expected = layer(x, attention_mask=mask, position_embeddings=turns)[0][0]
        up_key, up_value = layer.kv_b_proj.weight.view(heads, -1, latent).split([nope, value], 1)
        weights = LatentWeights(
            query=layer.q_proj.weight.view(heads, -1, 128),
            down=layer.kv_a_proj_with_mqa.weight,
            norm=layer.kv_a_layernorm.weight,
            up_key=up_key,
            up_value=up_value,
            out=layer.o_proj.weight,
        )
        assert torch.allclose(plain_layer(x[0], weights), expected, atol=1e-5)
        store, table = LatentStore(weights, 8, 4), BlockTable(BlockPool(8), 4)
        found = torch.stack([decode(one, weights, store, table) for one in x[0]])
    assert torch.allclose(found, expected, atol=1e-5)


def test_bytes_and_products_by_formula_and_by_counting():
    weights, context = random_weights(**SIZES), 64
    store = LatentStore(weights, 16, 4)
    numbers = cached_numbers(**SIZES)
    assert store.blocks.numel() == 16 * 4 * numbers["latents"]
    assert numbers["K and V"] == 4 * (24 + 16) + 4 * 20
    positions = torch.arange(context)
    x = torch.randn(context, 128)
    entries = cache_entry(x, positions, weights)
    [q] = queries(x[-1:], positions[-1:], weights)
    store.slots.copy_(entries)
    formula = multiplications(**SIZES, context=context)
    with FlopCounterMode(display=False) as plain:
        plain_attention(q[None], entries, weights)
    with FlopCounterMode(display=False) as absorbed:
        absorbed_attention(q, store.blocks, list(range(16)), context, weights)
    assert plain.get_total_flops() == 2 * formula["plain"]
    assert absorbed.get_total_flops() == 2 * formula["absorbed"]
    assert formula["plain"] - formula["K and V"] == context * 4 * (24 + 20) * 32


def test_deepseek_v2():
    """The figures of the paper's table: 576 numbers in place of 128 heads."""
    numbers = cached_numbers(heads=128, nope=128, rope=64, value=128, latent=512)
    assert numbers == {"K and V": 40_960, "latents": 576}

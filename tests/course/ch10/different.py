"""Chapter 10: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "10.1": {  # vector by vector
        "quantise_int8": """
def quantise_int8(x):
    vectors = x.float().reshape(-1, x.shape[-1])
    scales = torch.empty(len(vectors), dtype=torch.bfloat16)
    codes = torch.zeros(vectors.shape, dtype=torch.int8)
    for row, vector in enumerate(vectors):
        largest = max(abs(float(number)) for number in vector)
        scales[row] = round_up(torch.tensor(largest / 127))
        if largest > 0:
            codes[row] = torch.round(vector / scales[row].to(torch.float32)).char()
    return codes.reshape(x.shape), scales.reshape(x.shape[:-1])
""",
        "dequantise_int8": """
def dequantise_int8(codes, scale):
    return torch.einsum("...d,...->...d", codes.to(torch.float32), scale.to(torch.float32))
""",
        "logit_bound": """
def logit_bound(q, k_error):
    error = 0
    for channel in range(q.shape[-1]):
        error = error + abs(q[..., channel]) * k_error[..., channel]
    return error / math.sqrt(q.shape[-1])
""",
        "": "import math",
    },
    "10.2": {  # line by line, and a comparison of sums
        "int4_along": """
def int4_along(x, dim):
    read = torch.empty_like(x, dtype=torch.float32)
    for line in range(x.shape[-3 - dim]):
        codes, scale, low = quantise_int4(x.select(-3 - dim, line))
        read.select(-3 - dim, line).copy_(dequantise_int4(codes, scale, low))
    return read
""",
        "better_axis": """
def better_axis(x):
    lost = [torch.linalg.vector_norm(int4_along(x, dim) - x) for dim in (-1, -2)]
    return -1 - int(lost[0] > lost[1])
""",
    },
    "10.3": {  # by arithmetic
        "pack": """
def pack(codes):
    half = codes.shape[-1] // 2
    return codes[..., :half] + 16 * codes[..., half:]
""",
        "unpack": """
def unpack(packed):
    half = packed.shape[-1]
    codes = packed.repeat(*[1] * (packed.dim() - 1), 2)
    codes[..., :half] %= 16
    codes[..., half:] //= 16
    return codes
""",
    },
    "10.4": {  # two rounds: first all scores, then the values; KV head by KV head
        "attend_int8": """
def attend_int8(q, k_codes, k_scale, v_codes, v_scale, block_ids, context_len):
    heads, dim = q.shape
    kv_heads, size = k_codes.shape[1], k_codes.shape[2]
    group, out = heads // kv_heads, torch.zeros(heads, dim)
    places = [(block_ids[at // size], at % size) for at in range(context_len)]
    for kv_head in range(kv_heads):
        queries = q[kv_head * group : (kv_head + 1) * group].float()
        scores = torch.stack(
            [queries @ k_codes[block, kv_head, at].float() * k_scale[block, kv_head, at].float()
             for block, at in places], dim=1
        ) / dim**0.5
        weights = scores.softmax(dim=1)
        for place, (block, at) in enumerate(places):
            value = v_codes[block, kv_head, at].float() * v_scale[block, kv_head, at].float()
            out[kv_head * group : (kv_head + 1) * group] += weights[:, place, None] * value
    return out
""",
    },
    "10.5": {  # writes into the tensor that is there
        "Int8Blocks.copy": """
def copy(self, source, target):
    for part in (*self.codes.values(), *self.scales.values()):
        part[target][:] = part[source]
""",
    },
    "10.6": {  # as typed by hand
        "before_the_crossover": '''
def before_the_crossover():
    """Rounded."""
    return {
        "slowest reading": 5.16, "times at most": 3.88, "times at 4,096": 1.586,
        "crossover at 8": 293, "crossover": 500, "int8 bytes": 1320,
    }
''',
    },
}

"""Chapter 09: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "09.1": {  # whole slices at once, a maximum for each token
        "attend_heads": """
@compiled
def attend_heads(q, kv, block_tables, context_lens, out):
    size, group = kv.shape[1], q.shape[1] // kv.shape[3]
    root = np.float32(math.sqrt(q.shape[2]))
    for s in range(q.shape[0]):
        for h in range(q.shape[1]):
            query, row = q[s, h], out[s, h]
            best, weights = np.float32(-1e30), np.float32(0)
            row[:] = 0
            for p in range(context_lens[s]):
                slot = kv[block_tables[s, p // size], p % size]
                key, value = slot[0, h // group], slot[1, h // group]
                score = np.sum(query * key) / root
                if score > best:
                    shrink = np.float32(math.exp(best - score))
                    weights *= shrink
                    row *= shrink
                    best = score
                weight = np.float32(math.exp(score - best))
                weights += weight
                row += weight * value
            row /= weights
""",
    },
    "09.2": {  # token by token: each key meets all heads of the group
        "attend_groups": """
@compiled
def attend_groups(q, kv, block_tables, context_lens, out, first, last):
    size, heads = kv.shape[1], kv.shape[3]
    group = out.shape[1] // heads
    root = np.float32(math.sqrt(q.shape[2]))
    best, total = np.zeros(group, np.float32), np.zeros(group, np.float32)
    for item in range(first, last):
        s, k = divmod(item, heads)
        queries, rows = q[s, k * group : (k + 1) * group], out[s, k * group : (k + 1) * group]
        best[:] = np.float32(-1e30)
        total[:] = 0
        rows[:] = 0
        for p in range(context_lens[s]):
            slot = kv[block_tables[s, p // size], p % size]
            for g in range(group):
                score = np.float32(0)
                for d in range(q.shape[2]):
                    score += queries[g, d] * slot[0, k, d]
                score /= root
                top = max(best[g], score)
                shrink = np.float32(math.exp(best[g] - top))
                weight = np.float32(math.exp(score - top))
                total[g] = total[g] * shrink + weight
                for d in range(q.shape[2]):
                    rows[g, d] = rows[g, d] * shrink + weight * slot[1, k, d]
                best[g] = top
        for g in range(group):
            for d in range(q.shape[2]):
                rows[g, d] /= total[g]
""",
    },
    "09.3": {  # walks through the items and fills a piece until it has its share
        "share": """
def share(context_lens, kv_heads, num_pieces):
    work = [tokens for tokens in context_lens for _ in range(kv_heads)]
    pieces, first = [], 0
    for left in range(num_pieces, 0, -1):
        last, held, fair = first, 0, sum(work[first:]) / left
        while last < len(work) and (held < fair or left == 1):
            held += work[last]
            last += 1
        pieces.append((first, last))
        first = last
    return pieces
""",
    },
    "09.4": {  # a branch instead of an end, and room that is made for each call
        "attend_piece": """
@compiled
def attend_piece(q, kv, block_tables, context_lens, out, scores, first, last):
    dim, block_size, kv_heads = q.shape[2], kv.shape[1], kv.shape[3]
    group = q.shape[1] // kv_heads
    scale = np.float32(1 / math.sqrt(dim))
    for item in range(first, last):
        s, kv_head = item // kv_heads, item % kv_heads
        context = context_lens[s]
        for g in range(group):
            h = kv_head * group + g
            top, total = np.float32(-np.inf), np.float32(0)
            for p in range(context):
                key = kv[block_tables[s, p // block_size], p % block_size, 0, kv_head]
                score = np.float32(0)
                for d in range(dim):
                    score += q[s, h, d] * key[d]
                scores[g, p] = score * scale
                top = max(top, scores[g, p])
            for d in range(dim):
                out[s, h, d] = 0
            for i in range((context + block_size - 1) // block_size):
                for t in range(block_size):
                    p = i * block_size + t
                    if p < context:
                        weight = np.float32(math.exp(scores[g, p] - top))
                        total += weight
                        value = kv[block_tables[s, i], t, 1, kv_head]
                        for d in range(dim):
                            out[s, h, d] += weight * value[d]
            for d in range(dim):
                out[s, h, d] /= total
""",
        "decode_in_pieces": """
def decode_in_pieces(q, kv, block_tables, context_lens, num_pieces=2, run=in_threads):
    out = torch.zeros(q.shape)
    arrays = [value.numpy() for value in (q.contiguous(), kv, block_tables, context_lens, out)]
    shape = (q.shape[1] // kv.shape[3], block_tables.shape[1] * kv.shape[1])
    calls = []
    for piece in share(context_lens.tolist(), kv.shape[3], num_pieces):
        calls.append((*arrays, np.empty(shape, np.float32), *piece))
    run(attend_piece, calls)
    return out
""",
    },
    "09.5": {  # two rows at a time, and the sum begins with what is there
        "matmul": """
@compiled
def matmul(x, weight, out, add, first, last):
    for o in range(first, last):
        w = weight[o]
        row = 0
        while row + 2 <= len(x):
            left = out[row, o] if add else np.float32(0)
            right = out[row + 1, o] if add else np.float32(0)
            for i in range(len(w)):
                left += w[i] * x[row, i]
                right += w[i] * x[row + 1, i]
            out[row, o], out[row + 1, o] = left, right
            row += 2
        if row < len(x):
            left = out[row, o] if add else np.float32(0)
            for i in range(len(w)):
                left += w[i] * x[row, i]
            out[row, o] = left
""",
    },
    "09.6": {  # sequence by sequence in the small parts, new arrays in each layer
        "decode_step": """
@compiled
def decode_step(token_ids, positions, block_tables, context_lens, slots, weights, kv, logits):
    layers, size, _, kv_heads, dim = kv.shape
    all_blocks = kv.reshape(
        layers, size // weights.block_size, weights.block_size, 2, kv_heads, dim
    )
    x = weights.embedding[token_ids]
    count, hidden = x.shape
    for layer in range(layers):
        normed = np.empty_like(x)
        rms_norm(x, weights.norm_1[layer], weights.eps, normed)
        rows = len(weights.qkv[layer])
        qkv = np.zeros((count, rows), np.float32)
        matmul(normed, weights.qkv[layer], qkv, True, 0, rows)
        qkv = qkv.reshape(count, rows // dim, dim)
        rotate_and_write(qkv, weights.rope, positions, slots, kv[layer], 0, count)
        heads = rows // dim - 2 * kv_heads
        attended = np.empty((count, heads, dim), np.float32)
        for item in range(count * kv_heads):
            attend_groups(
                qkv, all_blocks[layer], block_tables, context_lens, attended, item, item + 1
            )
        more = np.empty_like(x)
        flat = attended.reshape(count, heads * dim)
        matmul(flat, weights.out[layer], more, False, 0, hidden)
        x = x + more
        rms_norm(x, weights.norm_2[layer], weights.eps, normed)
        both = np.empty((count, len(weights.gate_up[layer])), np.float32)
        matmul(normed, weights.gate_up[layer], both, False, 0, both.shape[1])
        mixed = np.empty((count, both.shape[1] // 2), np.float32)
        silu_mul(both, mixed, 0, mixed.shape[1])
        matmul(mixed, weights.down[layer], more, False, 0, hidden)
        x = x + more
    normed = np.empty_like(x)
    rms_norm(x, weights.norm, weights.eps, normed)
    matmul(normed, weights.head, logits, False, 0, len(weights.head))
""",
    },
}

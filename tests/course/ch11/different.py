"""Chapter 11: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "11.1": {  # every beginning in turn
        "Cells.find_slot": """
def find_slot(self, num_tokens):
    if not 1 <= num_tokens <= self.num_cells:
        raise ValueError("no ring of this size holds them")
    is_free = "".join("." if position == FREE else "x" for position in self.positions)
    run = "." * num_tokens
    found = is_free.find(run, self.head)
    if found == -1:
        found = is_free.find(run)
    if found == -1:
        raise OutOfCells(num_tokens, is_free.count("."), self.longest_run)
    return found
""",
    },
    "11.2": {  # as complex numbers
        "turn": """
def turn(k, deltas, frequencies):
    half = k.shape[-1] // 2
    z = torch.complex(k[..., :half].float(), k[..., half:].float())
    angles = torch.outer(deltas.double(), frequencies.double()).unsqueeze(1)
    z = z * torch.polar(torch.ones_like(angles), angles).to(z.dtype)
    return torch.cat((z.real, z.imag), dim=-1).to(k.dtype)
""",
    },
    "11.3": {  # looks at the cells itself; drops by the two operations
        "Cells.drop": """
def drop(self, seq, p0, p1):
    if p1 < p0:
        raise ValueError("reversed")
    rest = self.cells_of(seq, p1)
    for cell in rest:
        if len(self.sequences[cell]) > 1:
            raise ValueError("shared")
    self.seq_rm(seq, p0, p1)
    for cell in rest:
        self.positions[cell] += p0 - p1
        self.shifts[cell] += p0 - p1
""",
        "context_shift": """
def context_shift(cache, n_keep=0, seq=0, n_discard=None):
    rest = cache.seq_pos_max(seq) + 1 - n_keep
    if n_discard is None:
        n_discard = rest // 2
    if n_keep < 0 or rest < 2 or not 0 < n_discard <= rest:
        raise ValueError("there is nothing to discard")
    cache.drop(seq, n_keep, n_keep + n_discard)
    return n_discard
""",
    },
    "11.4": {  # cell by cell, row by row
        "in_window": """
def in_window(query, key, window):
    rows = [
        [k <= q and (window is None or q - window < k) for k in key.tolist()]
        for q in query.tolist()
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(len(query), len(key))
""",
        "RollingCache.held": """
def held(self, size):
    found = {}
    for position in range(max(0, self.num_tokens - size), self.num_tokens):
        found[position % size] = position
    return torch.tensor([found[cell] for cell in sorted(found)], dtype=torch.int64)
""",
        "RollingCache.write": """
def write(self, positions):
    for buffer, chunk in zip(self.kv, self._chunk):
        for row, position in enumerate(positions.tolist()):
            buffer[:, position % buffer.shape[1]] = chunk[:, row]
    self.num_tokens = int(positions[-1]) + 1
    self._chunk = []
""",
    },
    "11.5": {  # two fingers
        "plan_moves": """
def plan_moves(is_used):
    used, moves = sum(map(bool, is_used)), []
    hole, data = 0, used
    while True:
        while hole < used and is_used[hole]:
            hole += 1
        if hole == used:
            return moves
        while not is_used[data]:
            data += 1
        length = 0
        while (
            hole + length < used
            and not is_used[hole + length]
            and data + length < len(is_used)
            and is_used[data + length]
        ):
            length += 1
        moves.append((data, hole, length))
        hole, data = hole + length, data + length
""",
    },
    "11.6": {  # both rules written out
        "Cells.seq_div": """
def seq_div(self, seq, p0, p1, d):
    require_int("d", d, 1)
    chosen = self.cells_of(seq, p0, p1)
    self._require_can_move(seq, {cell: self.positions[cell] // d for cell in chosen})
    for cell in chosen:
        to, rest = divmod(self.positions[cell], d)
        self.shifts[cell] -= self.positions[cell] - to
        self.positions[cell] = to
    return len(chosen)
""",
        "Cells._move": """
def _move(self, seq, p0, p1, moved):
    chosen = self.cells_of(seq, p0, p1)
    where = {cell: moved(self.positions[cell]) for cell in chosen}
    self._require_can_move(seq, where)
    turned_to = {cell: self.positions[cell] - self.shifts[cell] for cell in chosen}
    for cell in chosen:
        self.positions[cell] = where[cell]
        self.shifts[cell] = where[cell] - turned_to[cell]
    return len(chosen)
""",
    },
    "11.7": {  # as complex numbers, cell by cell
        "UnturnedRing.store": """
def store(self, layer, cells, k):
    half = k.shape[-1] // 2
    for row, cell in enumerate(cells):
        z = torch.complex(k[row, :, :half].float(), k[row, :, half:].float())
        z = z * torch.polar(torch.ones(half), -self.positions[cell] * self.frequencies.float())
        self.k[layer, cell] = torch.cat((z.real, z.imag), -1)
""",
        "UnturnedRing.keys": """
def keys(self, layer, num_read):
    at = torch.tensor(self.positions).clamp_min(0)[:num_read, None, None]
    angles = at * self.frequencies
    a, b = self.k[layer][:num_read].float().chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
""",
        "UnturnedRing.apply_shifts": """
def apply_shifts(self):
    for cell in range(self.num_cells):
        self.shifts[cell] = 0
    return 0
""",
    },
}

"""What a KV cache costs, and what reserving it wastes: the arithmetic of chapter 03.

From a config to bytes per token; from bytes to the speed that a decode step cannot exceed; the
slots of a reservation, used or not (the three kinds of waste of Kwon et al., 2023); and memory
that is handed out in contiguous pieces.
"""

from collections.abc import Callable

from minikv.course.chapters.ch03_kv_memory.given import NoHole, Shape, SlotUse
from minikv.course.workloads.workload import Length

# ── Bytes per token ───────────────────────────────────────────────────────────


def kv_bytes_per_token(shape: Shape, bytes_per_number: int = 2) -> int:
    """Bytes that one cached token takes, in all layers together.

    `shape` has num_layers, num_heads (query heads), num_kv_heads, head_dim and latent_dim.
    With MHA, GQA and MQA each KV head keeps a key and a value of `head_dim` numbers, in each
    layer. Multi-head latent attention (latent_dim > 0) keeps one vector of `latent_dim` numbers
    in each layer, from which all heads compute both keys and values. Every number takes
    `bytes_per_number` bytes.

    3 layers, 8 query heads on 2 KV heads, head dim 4, fp16:

        kv_bytes_per_token(Shape(3, 8, 2, 4)) == 96
        kv_bytes_per_token(Shape(3, 8, 8, 4, latent_dim=10)) == 60
    """
    if shape.latent_dim:
        return shape.num_layers * shape.latent_dim * bytes_per_number
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * bytes_per_number


def shape_of(config: dict) -> Shape:
    """The shape that a published config.json describes.

    - A model of text and images has its language model under "text_config".
    - Without "num_key_value_heads" (or with null), every query head has a KV head of its own.
    - "head_dim", or "v_head_dim" in DeepSeek's configs, may be missing or null, too. Then the
      query heads share "hidden_size" evenly. The head dim is an int, as all five numbers are.
    - Multi-head latent attention keeps "kv_lora_rank" numbers and a key of "qk_rope_head_dim"
      numbers that carries the position. In other models these are missing or null.
    """
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or text.get("v_head_dim") or text["hidden_size"] // heads
    latent = text["kv_lora_rank"] + text["qk_rope_head_dim"] if text.get("kv_lora_rank") else 0
    return Shape(text["num_hidden_layers"], heads, kv_heads, head_dim, latent)


# ── Bytes that a step reads ───────────────────────────────────────────────────


def llama_parameters(config: dict) -> int:
    """How many weights a Llama has. A step reads all of them."""
    shape, hidden = shape_of(config), config["hidden_size"]
    attention = 2 * hidden * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    mlp = 3 * hidden * config["intermediate_size"]
    norms = 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    embeddings = tables * config["vocab_size"] * hidden
    return shape.num_layers * (attention + mlp + norms) + hidden + embeddings


def decode_ceiling(
    weight_bytes: float, bandwidth: float, batch: int = 1, kv_bytes: float = 0
) -> float:
    """Tokens per second that decode cannot exceed, all `batch` sequences together.

    A decode step gives each sequence one token. It reads the weights once, whatever the batch,
    and each sequence's own K and V, `kv_bytes` each. `bandwidth` is in bytes per second.

    Weights of 10 bytes, 3 sequences of 5 bytes each, 100 bytes per second: a step reads 25 bytes,
    so there are 4 steps per second, 12 tokens.
    """
    return batch * bandwidth / (weight_bytes + batch * kv_bytes)


# ── Slots of a reservation ────────────────────────────────────────────────────


def slots_at(reserved: int, prompt: int, output: int, step: int) -> SlotUse:
    """How a request uses its `reserved` slots after step `step` of its life.

    Step 1 is the prefill: it stores the prompt and gives the first output token. Each later step
    stores the newest token and gives the next. Step `output` gives the last, which is never
    stored. Raises ValueError if the request needs more slots than it has.

    2,048 slots, a prompt of 7, 4 output tokens:

        step 1    SlotUse(used=7, future=3, internal=2038)
        step 2    SlotUse(used=8, future=2, internal=2038)
        step 4    SlotUse(used=10, future=0, internal=2038)
    """
    final = prompt + output - 1
    if final > reserved:
        raise ValueError(f"{final} slots are needed, {reserved} are reserved")
    used = prompt + step - 1
    return SlotUse(used, final - used, reserved - final)


def shares_over_lives(lengths: list[Length], reserve: Callable[[Length], int]) -> list[float]:
    """Of all slots that these requests hold, in every step of every life: the shares that are
    used, held for the future, and never used. They add up to 1.

    Each `length` has a `prompt` and an `output`, in tokens; `reserve` is a function, and
    `reserve(length)` is the number of slots that such a request gets. A life has the steps 1 to
    `output`. Long requests count for more, because they hold their slots for longer.

    Two requests with 4 slots each, of 1 + 2 and of 3 + 1 tokens, hold 4 slots in 3 steps. Used:
    1 and 2 by the first, 3 by the other, of 12. For the future: 1. Never: 2 + 2 + 1.

        shares_over_lives([Length(1, 2), Length(3, 1)], lambda length: 4) == [6/12, 1/12, 5/12]
    """
    used = future = internal = 0
    for length in lengths:
        steps, reserved = length.output, reserve(length)
        slots = slots_at(reserved, length.prompt, steps, step=1)
        later = steps * (steps - 1) // 2  # 0 + 1 + …: slots that move from `future` to `used`
        used += steps * slots.used + later
        future += steps * slots.future - later
        internal += steps * slots.internal
    held = used + future + internal
    return [used / held, future / held, internal / held]


# ── Memory in contiguous pieces ───────────────────────────────────────────────


class ContiguousMemory:
    """Memory of `size` units, handed out in contiguous pieces by first fit.

    `holes` are the free pieces, (start, size), in the order of their addresses. No two of them
    touch: neighbours are one hole. `pieces` are those handed out, start: size.
    """

    def __init__(self, size: int):
        self.size = size
        self.holes: list[tuple[int, int]] = [(0, size)]
        self.pieces: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self.holes)

    @property
    def largest_hole(self) -> int:
        return max((size for _, size in self.holes), default=0)

    def allocate(self, size: int) -> int:
        """Take `size` units, at least 1, from the beginning of the first hole that is large
        enough; the rest of it stays a hole. Returns where the piece starts. Raises
        NoHole(size, largest_hole, num_free), changing nothing, if no hole is large enough.

        In a memory of 10: allocate(4) is 0, allocate(3) is 4, and `holes` are [(7, 3)].
        """
        for index, (start, room) in enumerate(self.holes):
            if room >= size:
                if room > size:
                    self.holes[index] = (start + size, room - size)
                else:
                    del self.holes[index]
                self.pieces[start] = size
                return start
        raise NoHole(size, self.largest_hole, self.num_free)

    def release(self, start: int) -> None:
        """Give back the piece that starts at `start`. It becomes one hole with the holes that it
        touches, before it and behind it. Raises ValueError, changing nothing, if no piece starts
        there.

        Then, in the same memory: release(0) makes `holes` [(0, 4), (7, 3)], and release(4)
        makes them [(0, 10)].
        """
        if start not in self.pieces:
            raise ValueError(f"no piece starts at {start}")
        self.holes.append((start, self.pieces.pop(start)))
        merged: list[tuple[int, int]] = []
        for begin, size in sorted(self.holes):
            if merged and sum(merged[-1]) == begin:
                begin, before = merged.pop()
                size += before
            merged.append((begin, size))
        self.holes = merged

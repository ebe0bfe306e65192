"""llama.cpp as a peer, if the packages `xllamacpp` and `gguf` are installed.

Its C functions are called, which the wheel exports: the rates have nothing of a server in them, and
logits can be compared. Only on x86-64 Linux: the C structs are taken as they lie in memory there.
"""

import ctypes
import importlib.util
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import minikv
from minikv.checkpoint.files import read_weights
from minikv.speculative.decide import MOST

GONE = "llama.cpp needs two packages more: pip install xllamacpp gguf"


def write_gguf(config: minikv.ModelConfig, state: dict, file: Path, f16: bool = False) -> None:
    """The weights in llama.cpp's format, float32 or the matrices in float16, with a
    tokenizer that writes token 7 as `<7>`."""
    try:
        import gguf
    except ImportError:
        raise ValueError(GONE) from None
    c, writer = config, gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(c.max_context)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_F16 if f16 else kinds.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{i}>" for i in range(c.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    writer.add_token_merges(["< 0"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_layers)
    for source, tensor in state.items():
        if c.tie_embeddings and source == "lm_head.weight":
            continue
        name, weight = names.get_name(source, [".weight"]), tensor.float().numpy()
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # pairs of channels, not halves
            halves = weight.reshape(-1, 2, c.head_dim // 2, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        dtype = np.float16 if f16 and weight.ndim == 2 else np.float32
        writer.add_tensor(name, np.ascontiguousarray(weight, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def server_params(file: Path, num_seqs: int, num_cells: int) -> Any:
    """For its server: `num_seqs` at once, on as many threads as PyTorch has."""
    try:
        import xllamacpp
    except ImportError:
        raise ValueError(GONE) from None
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = str(file), num_seqs, num_cells
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    return params


def serve(num_seqs: int, length: int) -> None:
    """tinypy behind llama.cpp's server, until the input ends: prints its address. Each of
    `num_seqs` sequences may have `length` tokens."""
    import xllamacpp

    lm = minikv.load("tinypy")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_gguf(lm.config, read_weights(minikv.BUNDLED["tinypy"]), path)
        params = server_params(path, num_seqs, num_seqs * length)
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.hostnames, params.port = ["127.0.0.1"], 0
        server = xllamacpp.Server(params)
        print(*server.listening_address.rsplit("/")[-1].rsplit(":", 1), flush=True)
        sys.stdin.read()


# ── Drafts ────────────────────────────────────────────────────────────────────


class Server:
    """llama.cpp's own loop, in this process, greedy, one request at a time. `drafts`: "" for none,
    "NGRAM_SIMPLE" (prompt lookup) or "DRAFT_SIMPLE" (a small model, of the file `draft_file`)."""

    def __init__(self, file: Path, drafts: str, draft_file: Path, num_cells: int):
        params = server_params(file, 1, num_cells)
        import xllamacpp

        params.verbosity, params.warmup = -1, False
        if drafts:
            kinds, chosen = xllamacpp.common_speculative_type, params.speculative
            chosen.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{drafts}")]
            chosen.ngram_simple.size_n, chosen.ngram_simple.size_m = 3, MOST  # as `NgramDrafter`
            if drafts == "DRAFT_SIMPLE":
                chosen.draft.mparams.path = str(draft_file)
        self.server = xllamacpp.Server(params)
        self.drafts = self.accepted = 0

    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int
    ) -> tuple[float, list[list[int]]]:
        """Its seconds for the tokens after the first, and all new tokens."""
        seconds, answers = 0.0, []
        for prompt in prompts:
            answer = self.server.handle_completions(
                dict(prompt=prompt, n_predict=num_tokens, temperature=0, ignore_eos=True,
                     cache_prompt=False)
            )  # fmt: skip
            seconds += answer["timings"]["predicted_ms"] / 1000
            self.drafts += answer["timings"].get("draft_n", 0)
            self.accepted += answer["timings"].get("draft_n_accepted", 0)
            text = answer["choices"][0]["text"]  # token 7 is <7>
            answers.append([int(number) for number in re.findall(r"\d+", text)])
        return seconds, answers


# ── Logits ────────────────────────────────────────────────────────────────────

POINTER, INT = ctypes.c_void_p, ctypes.c_int32


class Params(ctypes.Structure):
    """More room than any of llama.cpp's parameter structs takes; passed by value in memory."""

    _fields_ = (("raw", ctypes.c_uint8 * 512),)

    def put(self, offset: int, value: int, old: int, size: int = 4) -> None:
        """Set a field, which has its default `old` now. Raises ValueError for another default."""
        field = slice(offset, offset + size)
        if int.from_bytes(bytes(self.raw[field]), "little") != old % 2 ** (8 * size):
            raise ValueError("llama.cpp: this build's llama_context_params has another layout")
        self.raw[field] = list(value.to_bytes(size, "little"))


class LlamaBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", INT),
        ("token", ctypes.POINTER(INT)),
        ("embd", POINTER),
        ("pos", ctypes.POINTER(INT)),
        ("n_seq_id", ctypes.POINTER(INT)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(INT))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


SIGNATURES = {
    "llama_model_default_params": (Params, []),
    "llama_context_default_params": (Params, []),
    "llama_model_load_from_file": (POINTER, [ctypes.c_char_p, Params]),
    "llama_model_free": (None, [POINTER]),
    "llama_init_from_model": (POINTER, [POINTER, Params]),
    "llama_free": (None, [POINTER]),
    "llama_get_memory": (POINTER, [POINTER]),
    "llama_batch_init": (LlamaBatch, [INT, INT, INT]),
    "llama_batch_free": (None, [LlamaBatch]),
    "llama_decode": (INT, [POINTER, LlamaBatch]),
    "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [POINTER]),
    "llama_memory_seq_pos_max": (INT, [POINTER, INT]),
    "llama_memory_seq_rm": (ctypes.c_bool, [POINTER, INT, INT, INT]),
    "llama_memory_seq_cp": (None, [POINTER] + [INT] * 4),
    "llama_memory_seq_add": (None, [POINTER] + [INT] * 4),
    "llama_memory_seq_div": (None, [POINTER] + [INT] * 4),
}
KV_TYPES = {"float32": 0, "float16": 1, "q4_0": 2, "q8_0": 8}  # ggml's numbers for them


class Context:
    """A context of llama.cpp, under the names that `minikv.ring.RingCache` has."""

    def __init__(
        self, lib: Any, model: Any, vocab_size: int, kv_type: str, num_cells: int,
        num_seqs: int, num_threads: int, shares_cells: bool,
    ):  # fmt: skip
        self.lib, self.vocab_size = lib, vocab_size
        params = lib.llama_context_default_params()
        params.put(0, num_cells, 512)  # n_ctx
        params.put(4, num_cells, 2048)  # n_batch: more tokens at once would end the process
        params.put(8, num_cells, 512)  # n_ubatch
        params.put(12, num_seqs, 1)  # n_seq_max
        params.put(28, num_threads, 4)  # n_threads
        params.put(32, num_threads, 4)  # n_threads_batch
        params.put(52, int(kv_type.startswith("q")), -1)  # only flash attention reads codes of V
        params.put(104, KV_TYPES[kv_type], 1)  # K, in place of float16
        params.put(108, KV_TYPES[kv_type], 1)  # V
        params.put(141, int(shares_cells), 0, 1)  # one buffer for all sequences
        self.context = lib.llama_init_from_model(model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(num_cells, 0, 1)

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)

    def decode(
        self, token_ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int],
        wanted: Sequence[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The logits (T, V) of T tokens, at these positions of these sequences; if `wanted`, those
        of the tokens with these numbers alone."""
        batch = self.batch
        batch.n_tokens = len(token_ids)
        for i, (token, position, seq) in enumerate(zip(token_ids, positions, seqs, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted is None
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        for i in wanted or ():
            batch.logits[i] = 1
        status = self.lib.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama.cpp: llama_decode returned {status}")
        out = self.lib.llama_get_logits(self.context)
        shape = (len(token_ids) if wanted is None else len(wanted), self.vocab_size)
        return torch.from_numpy(np.ctypeslib.as_array(out, shape).copy())

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens, all prompts at once; they have one length."""
        size, seqs = len(prompts[0]), list(range(len(prompts)))
        for seq in seqs:
            self.seq_rm(seq, 0, None)
        flat = [token for prompt in prompts for token in prompt]
        of_flat = [seq for seq in seqs for _ in range(size)]
        ends = [size * (seq + 1) - 1 for seq in seqs]
        logits = self.decode(flat, list(range(size)) * len(prompts), of_flat, ends)
        found = [logits.argmax(-1).tolist()]
        for position in range(size, size + max_tokens - 1):
            logits = self.decode(found[-1], [position] * len(seqs), seqs)
            found.append(logits.argmax(-1).tolist())
        return [list(row) for row in zip(*found, strict=True)]

    def append(self, token_ids: Sequence[int], seq: int = 0) -> torch.Tensor:
        start = self.seq_pos_max(seq) + 1
        positions = list(range(start, start + len(token_ids)))
        return self.decode(token_ids, positions, [seq] * len(token_ids))

    def seq_pos_max(self, seq: int) -> int:
        return self.lib.llama_memory_seq_pos_max(self.memory, seq)

    def seq_rm(self, seq: int, p0: int, p1: int | None) -> None:
        end = -1 if p1 is None else p1
        if not self.lib.llama_memory_seq_rm(self.memory, seq, p0, end):
            raise RuntimeError(f"llama.cpp: seq_rm({seq}, {p0}, {p1}) was refused")

    def seq_cp(self, src: int, dst: int, p0: int, p1: int | None) -> None:
        self.lib.llama_memory_seq_cp(self.memory, src, dst, p0, -1 if p1 is None else p1)

    def seq_add(self, seq: int, p0: int, p1: int | None, delta: int) -> None:
        self.lib.llama_memory_seq_add(self.memory, seq, p0, -1 if p1 is None else p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int | None, d: int) -> None:
        self.lib.llama_memory_seq_div(self.memory, seq, p0, -1 if p1 is None else p1, d)


@contextmanager
def contexts(config: minikv.ModelConfig, state: dict) -> Iterator[Callable[..., Context]]:
    """make(kv_type="float32", num_cells=256, num_seqs=4, num_threads=1, shares_cells=True) gives a
    context of this model, for as long as the `with` lasts. With shares_cells=False each sequence
    has an equal part of the cells, and attention looks at that alone. Raises ValueError, with the
    reason, where there is no llama.cpp."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(GONE)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ValueError("llama.cpp: its structs are known on x86-64 Linux only")
    [file] = Path(spec.submodule_search_locations[0]).glob("*.so")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_gguf(config, state, path)
        lib = ctypes.CDLL(str(file))
        for name, (result, arguments) in SIGNATURES.items():
            getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)(lambda *_: None)
        lib.llama_log_set(quiet, None)
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model, "llama.cpp did not load its own format"
    made: list[Context] = []

    def make(
        kv_type: str = "float32", num_cells: int = 256, num_seqs: int = 4, num_threads: int = 1,
        shares_cells: bool = True,
    ) -> Context:  # fmt: skip
        more = num_cells, num_seqs, num_threads, shares_cells
        made.append(Context(lib, model, config.vocab_size, kv_type, *more))
        return made[-1]

    try:
        yield make
    finally:
        for context in made:
            context.close()
        lib.llama_model_free(model)
        lib.llama_log_set(None, None)  # `quiet` must live until here


@contextmanager
def generator(
    config: minikv.ModelConfig, peer: Any, batch: int, num_tokens: int
) -> Iterator[Callable]:
    """generate(prompts, max_tokens) -> the new tokens of each, with the weights of `peer`, a model
    of `transformers`; so many prompts, each with its answer of at most `num_tokens`."""
    cells = -(-num_tokens // 256) * 256  # of each sequence
    with contexts(config, peer.state_dict()) as make:
        yield make("float32", batch * cells, batch, torch.get_num_threads(), False).generate


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))

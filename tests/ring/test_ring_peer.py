"""The ring against llama.cpp itself: the same weights, the same operations, the same tokens.

Needs `xllamacpp`, whose wheel exports llama.cpp's C functions, and `gguf`, both on the Python path:

    pip install --target peers xllamacpp gguf
    PYTHONPATH=peers python -m pytest tests/ring/test_ring_peer.py

Only on x86-64 Linux: the C structs are taken as they lie in memory there.
"""

import ctypes
import importlib.util
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import minikv
from minikv.checkpoint import read_weights
from minikv.ring import RingCache, context_shift

if not all(importlib.util.find_spec(name) for name in ("xllamacpp", "gguf")):
    pytest.skip("llama.cpp: xllamacpp and gguf are not installed", allow_module_level=True)
if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("llama.cpp: its structs are known on x86-64 Linux only", allow_module_level=True)

FLOOR = 1e-3  # of a logit's difference; about 2e-5 is seen, after many operations too


def write_gguf(path: Path) -> None:
    """tinypy as llama.cpp reads it, in float32."""
    import gguf

    config, weights = minikv.load("tinypy").config, read_weights(minikv.BUNDLED["tinypy"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")

    def add(name, source, heads=None):
        tensor = weights[source].float().numpy()
        if heads:  # llama.cpp turns neighbours, (2 i, 2 i + 1), not halves
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2)
            tensor = tensor.reshape(-1, tensor.shape[-1])
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor))

    add("token_embd", "model.embed_tokens.weight")
    add("output_norm", "model.norm.weight")
    for i in range(config.num_layers):
        at, to = f"model.layers.{i}.", f"blk.{i}."
        add(to + "attn_norm", at + "input_layernorm.weight")
        add(to + "attn_q", at + "self_attn.q_proj.weight", config.num_heads)
        add(to + "attn_k", at + "self_attn.k_proj.weight", config.num_kv_heads)
        add(to + "attn_v", at + "self_attn.v_proj.weight")
        add(to + "attn_output", at + "self_attn.o_proj.weight")
        add(to + "ffn_norm", at + "post_attention_layernorm.weight")
        for name in ("gate", "up", "down"):
            add(f"{to}ffn_{name}", f"{at}mlp.{name}_proj.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Params(ctypes.Structure):
    """More room than any of llama.cpp's parameter structs takes; passed by value in memory."""

    _fields_ = (("raw", ctypes.c_uint8 * 512),)

    def put(self, offset: int, value: int, old: int, size: int = 4) -> None:
        """Set a field, which has its default now; another default is another layout."""
        field = slice(offset, offset + size)
        if int.from_bytes(bytes(self.raw[field]), "little") != old % 2 ** (8 * size):
            pytest.skip("llama.cpp: this build's llama_context_params has another layout")
        self.raw[field] = list(value.to_bytes(size, "little"))


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class Llama:
    """A context of llama.cpp with K and V in float32, under the names that the ring has."""

    def __init__(self, lib, model, vocab_size: int, num_cells: int = 256):
        self.lib, self.vocab_size = lib, vocab_size
        params = lib.llama_context_default_params()
        params.put(0, num_cells, 512)  # n_ctx
        params.put(8, num_cells, 512)  # n_ubatch
        params.put(12, 4, 1)  # n_seq_max
        params.put(28, 1, 4)  # n_threads
        params.put(32, 1, 4)  # n_threads_batch
        params.put(52, 0, -1)  # no flash attention
        params.put(104, 0, 1)  # K: float32 in place of float16
        params.put(108, 0, 1)  # V
        params.put(141, 1, 0, 1)  # one buffer for all sequences
        self.context = lib.llama_init_from_model(model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(num_cells, 0, 1)

    def decode(self, token_ids, positions, seqs) -> torch.Tensor:
        batch = self.batch
        batch.n_tokens = len(token_ids)
        for i, (token, position, seq) in enumerate(zip(token_ids, positions, seqs, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        assert self.lib.llama_decode(self.context, batch) == 0
        out = self.lib.llama_get_logits(self.context)
        shape = (len(token_ids), self.vocab_size)
        return torch.from_numpy(np.ctypeslib.as_array(out, shape).copy())

    def append(self, token_ids, seq=0) -> torch.Tensor:
        start = self.seq_pos_max(seq) + 1
        positions = list(range(start, start + len(token_ids)))
        return self.decode(token_ids, positions, [seq] * len(token_ids))

    def seq_pos_max(self, seq):
        return self.lib.llama_memory_seq_pos_max(self.memory, seq)

    def seq_rm(self, seq, p0, p1):
        assert self.lib.llama_memory_seq_rm(self.memory, seq, p0, -1 if p1 is None else p1)

    def seq_cp(self, src, dst, p0, p1):
        self.lib.llama_memory_seq_cp(self.memory, src, dst, p0, -1 if p1 is None else p1)

    def seq_add(self, seq, p0, p1, delta):
        self.lib.llama_memory_seq_add(self.memory, seq, p0, -1 if p1 is None else p1, delta)

    def seq_div(self, seq, p0, p1, d):
        self.lib.llama_memory_seq_div(self.memory, seq, p0, -1 if p1 is None else p1, d)


@pytest.fixture(scope="module")
def make_peer(tmp_path_factory):
    spec = importlib.util.find_spec("xllamacpp")
    [file] = Path(spec.submodule_search_locations[0]).glob("*.so")
    lib = ctypes.CDLL(str(file))
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    signatures = {
        "llama_model_default_params": (Params, []),
        "llama_context_default_params": (Params, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, Params]),
        "llama_init_from_model": (pointer, [pointer, Params]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_batch_init": (Batch, [int32, int32, int32]),
        "llama_decode": (int32, [pointer, Batch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
        "llama_memory_seq_pos_max": (int32, [pointer, int32]),
        "llama_memory_seq_rm": (ctypes.c_bool, [pointer, int32, int32, int32]),
        "llama_memory_seq_cp": (None, [pointer] + [int32] * 4),
        "llama_memory_seq_add": (None, [pointer] + [int32] * 4),
        "llama_memory_seq_div": (None, [pointer] + [int32] * 4),
    }
    for name, (result, arguments) in signatures.items():
        getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    path = tmp_path_factory.mktemp("gguf") / "tinypy.gguf"
    write_gguf(path)
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model, "llama.cpp did not load the model"
    yield lambda: Llama(lib, model, 2048)
    lib.llama_log_set(None, None)  # `quiet` must live until here


@pytest.fixture(scope="module")
def text(tinypy):
    return tinypy.lm.encode(Path(minikv.__file__).with_name("engine.py").read_text())[:200]


class Both:
    """The ring and llama.cpp, told the same."""

    def __init__(self, lm, peer):
        self.lm, self.peer = lm, peer
        self.ring = RingCache(lm.config, 256, contiguous=False)

    def append(self, token_ids, seq=0):
        """The greatest difference of a logit; the tokens must be the same."""
        ours, theirs = self.ring.append(self.lm, token_ids, seq), self.peer.append(token_ids, seq)
        top = ours.topk(2, -1).values
        sure = top[:, 0] - top[:, 1] > 2 * FLOOR
        assert torch.equal(ours.argmax(-1)[sure], theirs.argmax(-1)[sure])
        return float((ours - theirs).abs().max())

    def __getattr__(self, name):
        def call(*arguments):
            for cache in (self.ring, self.peer):
                getattr(cache, name)(*arguments)

        return call


@pytest.fixture
def both(tinypy, make_peer):
    return Both(tinypy.lm, make_peer())


def test_the_same_logits_before_any_operation(both, text):
    assert both.append(text[:100]) < FLOOR


def test_the_same_after_a_shift(both, text):
    both.append(text[:60])
    both.seq_rm(0, 4, 12)
    both.seq_add(0, 12, None, -8)
    assert both.append(text[60:100]) < FLOOR


def test_the_same_greedy_tokens_before_and_after_a_context_shift(both, text, tinypy):
    token, rows = text[63], []
    both.append(text[:63])
    for step in range(60):
        if step == 20:
            gone = context_shift(both.ring, n_keep=4)
            both.peer.seq_rm(0, 4, 4 + gone)
            both.peer.seq_add(0, 4 + gone, None, -gone)
        ours = both.ring.append(tinypy.lm, [token])[0]
        theirs = both.peer.append([token])[0]
        rows.append((int(ours.argmax()), int(theirs.argmax())))
        token = rows[-1][0]
    assert all(ours == theirs for ours, theirs in rows)


def test_the_same_after_many_shifts(both, text):
    both.append(text[:60])
    for i in range(20):
        both.seq_rm(0, 4, 6)
        both.seq_add(0, 6, None, -2)
        assert both.append(text[60 + 2 * i : 62 + 2 * i]) < FLOOR


def test_the_same_with_a_shared_prompt(both, text):
    both.append(text[:40], 0)
    both.seq_cp(0, 1, 0, None)
    assert both.append(text[40:60], 0) < FLOOR
    assert both.append(text[100:120], 1) < FLOOR
    both.seq_rm(0, 0, None)
    assert both.append(text[120:130], 1) < FLOOR


def test_what_this_build_makes_of_division(both, text, tinypy):
    """A right build equals the ring. One that turns the wrong way, as that of October 2026 does,
    equals a ring whose shifts have the other sign."""
    both.append(text[:64])
    wrong = RingCache(tinypy.lm.config, 256)
    wrong.append(tinypy.lm, text[:64])
    both.seq_div(0, 0, None, 2)
    wrong.seq_div(0, 0, None, 2)
    wrong.shifts = [-shift for shift in wrong.shifts]
    theirs = both.peer.append(text[64:72])
    right = (both.ring.append(tinypy.lm, text[64:72]) - theirs).abs().max()
    mirrored = (wrong.append(tinypy.lm, text[64:72]) - theirs).abs().max()
    assert min(right, mirrored) < FLOOR, (right, mirrored)

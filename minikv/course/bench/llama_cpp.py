"""llama.cpp as a peer, if the packages `xllamacpp` and `gguf` are installed.

Its server runs in this process, with as many slots as there are prompts, the same float32
weights and torch's number of threads. What it measures is a whole request, as for the others.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch

import minikv

GONE = "`--peer llama.cpp` needs two packages more: pip install xllamacpp gguf"


class LlamaCpp:
    """The model of `lm`, a Llama whose weights `state` has by their names in `transformers`."""

    def __init__(self, lm: minikv.LanguageModel, state: dict, file: Path, slots: int, tokens: int):
        """tokens: of a prompt with its output. Raises ValueError if a package is missing."""
        try:
            import xllamacpp
        except ImportError:
            raise ValueError(GONE) from None
        write_gguf(lm.config, state, file)
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_parallel = slots
        params.n_ctx = slots * (-(-tokens // 256) * 256)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.cache_prompt, params.cache_ram_mib, params.verbosity = False, 0, -1
        self.server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens, all prompts at once."""
        asked = {
            "prompt": prompts, "n_predict": max_tokens, "ignore_eos": True,
            "samplers": ["top_k"], "top_k": 1, "temperature": 0, "cache_prompt": False,
        }  # fmt: skip
        answers: list[str] = []
        self.server.handle_completions(json.dumps(asked), answers.append)
        choices = sorted(json.loads("".join(answers))["choices"], key=lambda one: one["index"])
        return [[int(i) for i in re.findall(r"<(\d+)>", one["text"])] for one in choices]


def write_gguf(config: minikv.ModelConfig, state: dict, file: Path) -> None:
    """The weights in llama.cpp's format, float32, with a tokenizer that writes token 7 as `<7>`."""
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
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{i}>" for i in range(c.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    writer.add_token_merges(["< 0"])
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
             "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip

    def add(name: str, source: str) -> None:
        weight = state[f"{source}.weight"].float().numpy()
        if name.endswith(("attn_q", "attn_k")):  # pairs of channels instead of halves
            halves = weight.reshape(-1, 2, c.head_dim // 2, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(weight))

    add("token_embd", "model.embed_tokens")
    add("output_norm", "model.norm")
    if not c.tie_embeddings:
        add("output", "lm_head")
    for i in range(c.num_layers):
        for source, name in names.items():
            add(f"blk.{i}.{name}", f"model.layers.{i}.{source}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

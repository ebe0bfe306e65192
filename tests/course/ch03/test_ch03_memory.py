"""Chapter 03's own code: the arithmetic of memory, the allocator, workloads, and pictures."""

import json
import math
import statistics
from dataclasses import astuple

import pytest
import torch
from safetensors import safe_open

import minikv
from minikv.course.bench.paging import reserved_waste
from minikv.course.chapters.ch03_kv_memory.answers import judge_claims
from minikv.course.chapters.ch03_kv_memory.claims import figure
from minikv.course.chapters.ch03_kv_memory.given import NoHole, Shape
from minikv.course.chapters.ch03_kv_memory.memory import (
    ContiguousMemory,
    decode_ceiling,
    kv_bytes_per_token,
    llama_parameters,
    shape_of,
    shares_over_lives,
    slots_at,
)
from minikv.course.chapters.ch03_kv_memory.pictures import MemoryFilm, reservation_picture
from minikv.course.chapters.ch03_kv_memory.published import BANDWIDTH, CLAIMS, CONFIGS, MISTAKES
from minikv.course.workloads.workload import Length, TraceRequest, chat_like, read_trace
from minikv.kv_cache import PreallocatedCache

# ── Bytes per token ───────────────────────────────────────────────────────────


def tinypy_config():
    return json.loads((minikv.BUNDLED["tinypy"] / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_a_token_are_those_of_a_cache(lm, dtype):
    cache = PreallocatedCache(lm.config, 7, dtype)
    each = kv_bytes_per_token(shape_of(tinypy_config()), dtype.itemsize)
    assert 7 * each == cache.kv.nbytes
    assert each == lm.config.kv_bytes_per_token(dtype)


def test_parameters_are_those_of_the_file():
    file = minikv.BUNDLED["tinypy"] / "model.safetensors"
    with safe_open(file, "pt") as tensors:
        count = sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    assert llama_parameters(tinypy_config()) == count


# What transformers' own configuration classes say where their defaults are one of the models.
@pytest.mark.parametrize(
    ("name", "owner", "keys"),
    [
        ("meta-llama/Llama-2-7b-hf", "LlamaConfig", ("num_hidden_layers", "hidden_size")),
        ("mistralai/Mistral-7B-v0.1", "MistralConfig", ("num_key_value_heads", "hidden_size")),
        ("deepseek-ai/DeepSeek-V3", "DeepseekV3Config", ("kv_lora_rank", "qk_rope_head_dim")),
    ],
)
def test_published_shapes_agree_with_transformers(name, owner, keys):
    import transformers

    config = getattr(transformers, owner)()
    keys = (*keys, "num_hidden_layers", "num_attention_heads")
    assert {key: CONFIGS[name][key] for key in keys} == {key: getattr(config, key) for key in keys}


def test_the_hybrid_model_agrees_with_transformers():
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    text, config = CONFIGS["Qwen/Qwen3.5-35B-A3B"]["text_config"], Qwen3_5MoeTextConfig()
    every = text["full_attention_interval"]
    assert {key: getattr(config, key) for key in text if key != "full_attention_interval"} == {
        key: value for key, value in text.items() if key != "full_attention_interval"
    }
    assert config.layer_types.count("full_attention") * every == config.num_hidden_layers


def test_the_vision_models_text_agrees_with_transformers():
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    text = CONFIGS["meta-llama/Llama-3.2-11B-Vision"]["text_config"]
    assert text == {key: getattr(MllamaTextConfig(), key) for key in text}


def test_the_figures_that_the_course_names():
    each = {name: kv_bytes_per_token(shape_of(config)) for name, config in CONFIGS.items()}
    assert each["facebook/opt-13b"] == 819_200
    assert f"{2048 * 819_200 / 2**30:.2f} {2048 * 819_200 / 1e9:.2f}" == "1.56 1.68"
    assert each["deepseek-ai/DeepSeek-V3"] == 61 * (512 + 64) * 2
    assert round(figure("7B 4K") / 1e9, 2) == 2.15
    assert round(figure("70B 8K") / 1e9, 1) == 2.7
    llamas = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.2-11B-Vision")
    assert [each[f"meta-llama/{name}"] / 1024 for name in llamas] == [32, 112, 160]
    assert int(figure("1B speed")) == 407
    assert math.ceil(CLAIMS["1B speed"].said / figure("1B speed")) == 5  # "a batch of 5 at least"


@pytest.mark.parametrize("key", [key for key in CLAIMS if key != "1B speed"])
def test_exactly_one_mistake_is_behind_a_wrong_claim(key):
    def gives_the_claim(mistake):
        return abs(figure(key, mistake) / CLAIMS[key].said - 1) <= 0.1

    answer = judge_claims()[key]
    assert gives_the_claim(answer)
    if answer is not None:
        assert [name for name in (None, *MISTAKES) if gives_the_claim(name)] == [answer]


def test_no_mistake_about_bytes_explains_the_speed():
    assert judge_claims()["1B speed"] == "a batch"
    assert (
        figure("1B speed")
        < CLAIMS["1B speed"].said
        < decode_ceiling(
            2 * llama_parameters(CONFIGS[CLAIMS["1B speed"].model]), BANDWIDTH, batch=5
        )
    )


def test_what_makes_four_and_sixteen():  # as the explanation of 03.3 says
    for kv_heads, said in ((64 // 4, 4), (64, 16)):
        shape = Shape(num_layers=64, num_heads=64, num_kv_heads=kv_heads, head_dim=128)
        assert 8 * 1024 * kv_bytes_per_token(shape) == said * 2**30


def test_ceiling_falls_with_context_and_rises_with_batch():
    assert decode_ceiling(10, 100, batch=3, kv_bytes=5) == 12
    speeds = [decode_ceiling(2.5e9, BANDWIDTH, batch, 1e8) for batch in (1, 8, 64, 10**9)]
    assert speeds == sorted(speeds) and speeds[-1] == pytest.approx(BANDWIDTH / 1e8, rel=1e-3)


# ── Reservations ──────────────────────────────────────────────────────────────


def test_shares_are_those_of_every_step_and_of_the_benchmark():
    lengths = [Length(1, 2), Length(3, 1)]
    assert shares_over_lives(lengths, lambda length: 4) == [6 / 12, 1 / 12, 5 / 12]
    lengths = [length for length in chat_like(60) if sum(length) <= 2048]
    uses = [
        slots_at(2048, *length, step) for length in lengths for step in range(1, length.output + 1)
    ]
    sums = [sum(column) for column in zip(*uses, strict=True)]
    found = shares_over_lives(lengths, lambda length: 2048)
    assert found == pytest.approx([count / sum(sums) for count in sums])
    assert 1 - found[0] == pytest.approx(reserved_waste(lengths, 2048))


# ── Contiguous memory ─────────────────────────────────────────────────────────


def test_five_processes():
    memory = ContiguousMemory(20)
    starts = [memory.allocate(4) for _ in range(5)]
    assert starts == [0, 4, 8, 12, 16] and memory.holes == []
    memory.release(4), memory.release(12)
    with pytest.raises(NoHole, match="5 are needed; 8 are free, at most 4 in one piece"):
        memory.allocate(5)
    memory.release(8)
    assert memory.holes == [(4, 12)] and memory.allocate(5) == 4
    with pytest.raises(ValueError, match="no piece starts at 8"):
        memory.release(8)


# ── Pictures ──────────────────────────────────────────────────────────────────


def test_the_reservations_are_said_in_words():
    memory = ContiguousMemory(3072)
    a, gone, b = (memory.allocate(size) for size in (2048, 384, 512))
    memory.release(gone)
    held = {a: ("A", slots_at(2048, 7, 4, 2)), b: ("B", slots_at(512, 3, 3, 2))}
    alt = reservation_picture(memory, held).alt
    for words in ("2,038 never used", "507 never used", "512 are free, 384 of them in one piece"):
        assert words in alt


def test_the_film_copies_and_the_player_steps():
    memory = ContiguousMemory(8)
    film = MemoryFilm(memory, "KB")
    film.snap("nobody", {})
    film.snap("A starts", {"A": memory.allocate(3)}, ("B", 6))
    memory.release(0)
    assert [moment.holes for moment in film.moments] == [((0, 8),), ((3, 5),)]
    player = film.widget()
    assert player.slider.max == player.slider.value == 1  # all steps so far are in the picture
    assert player.caption.value == "A starts: held: A at 0; free: 5 KB at 3."
    first = player.picture.value
    player.slider.value = 0
    assert player.picture.value != first


def test_the_film_says_who_waits_though_enough_is_free():
    memory = ContiguousMemory(12)
    starts = {name: memory.allocate(4) for name in "ABC"}
    memory.release(starts.pop("A")), memory.release(starts.pop("C"))
    film = MemoryFilm(memory, "KB")
    film.snap("D asks", starts, waits=("D", 5))
    memory.release(starts.pop("B"))
    film.snap("B leaves", starts, waits=("D", 5))
    assert [moment.free for moment in film.moments] == [8, 12]
    assert [moment.fits for moment in film.moments] == [False, True]


# ── Workloads ─────────────────────────────────────────────────────────────────


def test_generated_lengths_are_the_same_every_time():
    lengths = chat_like(200)
    assert lengths == chat_like(200) != chat_like(200, seed=1)
    assert 500 < statistics.median(length.prompt for length in lengths) < 1000
    assert all(length.prompt >= 1 and length.output >= 1 for length in lengths)


CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
AZURE = CSV + "2023-11-16 18:15:46.5000000,374,44\r\n2023-11-16 18:15:50.2500000,396,109\r\n"
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    "\n"
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2353]}\n'
)


def test_both_formats_are_read(tmp_path):
    azure, mooncake = tmp_path / "trace.csv", tmp_path / "trace.jsonl"
    azure.write_bytes(AZURE.encode())
    mooncake.write_text(MOONCAKE)
    assert read_trace(azure) == [
        TraceRequest(Length(374, 44), 0.0),
        TraceRequest(Length(396, 109), 3.75),
    ]
    first, second = read_trace(str(mooncake))
    assert first == TraceRequest(Length(6955, 52), 0.0, (46, 47))
    assert second.length == Length(6472, 26) and second.arrival == pytest.approx(3.053)
    unnamed = tmp_path / "trace.txt"
    unnamed.write_text(MOONCAKE)
    assert read_trace(unnamed) == [first, second]


def test_a_trace_may_tell_no_times_and_be_out_of_order(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("ContextTokens,GeneratedTokens\n5,6\n7,8\n")
    assert [request.arrival for request in read_trace(file)] == [0.0, 0.0]
    file.write_text(CSV + "2024-05-12 00:00:09+00:00,5,6\n2024-05-12 00:00:07+00:00,7,8\n")
    assert [request.arrival for request in read_trace(file)] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.csv", None, "cannot be read"),
        ("t.csv", "a,b\n1,2\n", "no column ContextTokens and no column GeneratedTokens"),
        ("t.csv", CSV, "a header and no requests"),
        ("t.csv", CSV + "2023-11-16,5,6\nyesterday,5,6\n", "line 3: TIMESTAMP must be a date"),
        ("t.csv", CSV + "2023-11-16,5,0\n", "line 2: ContextTokens and GeneratedTokens must be"),
        ("t.csv", CSV + "2023-11-16,5\n", "line 2: ContextTokens and GeneratedTokens must be"),
        ("t.csv", CSV + "2023-11-16,1²,3\n", "line 2: ContextTokens and GeneratedTokens must be"),
        ("t.csv", b"\x89PNG\r\n\xff\xfe", "cannot be read"),
        ("t.jsonl", "", "no lines"),
        ("t.jsonl", '{"timestamp": 1,\n', "line 1: not valid json"),
        ("t.jsonl", "[1, 2]\n", "line 1: no input_length and no output_length and no timestamp"),
        ("t.jsonl", MOONCAKE.replace("6472", "0"), "line 3: input_length and output_length must"),
        ("t.jsonl", MOONCAKE.replace("26", "true"), "line 3: input_length and output_length must"),
        ("t.jsonl", MOONCAKE.replace("30535", "NaN"), "line 3: timestamp must be a number"),
        ("t.jsonl", MOONCAKE.replace("[46, 47]", '"46"'), "line 1: hash_ids must be a list"),
    ],
)
def test_a_damaged_trace_is_refused(name, content, said, tmp_path):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        read_trace(file)
    assert str(file) in str(error.value) and said in str(error.value)


def test_shapes_are_plain():
    assert astuple(shape_of(CONFIGS["google/gemma-2b"])) == (18, 8, 1, 256, 0)

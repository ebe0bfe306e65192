"""Sessions: what is restored is what was saved, and nothing else is accepted."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from helpers import RecordingSampler, drain, generate, naively, run_ahead, small
from safetensors.torch import save as to_bytes
from thorough import thorough_after
from tiers_case import damaged, ends

from minikv import Engine, EngineConfig, OutOfBlocks, SamplingParams
from minikv.tiers import load_session, save_session, session
from minikv.tiers.identity import SessionError, check_session, checksum_of, fingerprint, shapes_of

PROMPT = list(range(1, 31))
NAN, INF = float("nan"), float("inf")
GO_ON = SamplingParams(max_tokens=6, ignore_eos=True)


def recorded(engine, prompt):
    """Logits and tokens of a continuation."""
    engine.runner.sampler = RecordingSampler()
    [out] = generate(engine, [prompt], GO_ON)
    return torch.cat(engine.runner.sampler.calls), out.token_ids


@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8", "int4"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_logits_after_loading_are_the_same_bits(engine_of, tmp_path, kv_dtype, block_size):
    config = dict(kv_dtype=kv_dtype, block_size=block_size, num_blocks=64)
    engine, path = engine_of(**config), tmp_path / "s.safetensors"
    [out] = generate(engine, [PROMPT], GO_ON)
    saved = save_session(engine, out, path)
    tokens = PROMPT + out.token_ids
    assert saved[:2] == (36, 35 // block_size) and saved.num_bytes == path.stat().st_size
    assert saved[3:] == (0, 0)
    other = engine_of(**config)
    assert load_session(other, path) == tokens
    other.check()
    assert other.stats().blocks_cached == saved.num_blocks
    theirs, ours = recorded(engine, [*tokens, 7]), recorded(other, [*tokens, 7])
    assert torch.equal(theirs[0], ours[0]) and theirs[1] == ours[1]
    assert other.stats().hit_tokens == 35 // block_size * block_size


@pytest.mark.parametrize("ahead", [False, True])
def test_a_running_request_is_saved_without_stopping_it(llama, tmp_path, ahead):
    engine = Engine(llama.lm, small(attention="torch"))
    if ahead:
        run_ahead(engine)
    request = engine.add_request(PROMPT, GO_ON)
    for _ in range(3):
        [so_far] = engine.step()
    save_session(engine, request, tmp_path / "s")
    expected = naively(llama.lm, PROMPT, 6)
    assert drain(engine)[request].token_ids == expected
    other = Engine(llama.lm, small(attention="torch"))
    tokens = load_session(other, tmp_path / "s")
    assert tokens == PROMPT + expected[: len(tokens) - 30] and len(tokens) >= 32
    assert tokens[30:] == so_far.token_ids
    [out] = generate(other, [tokens], SamplingParams(max_tokens=3, ignore_eos=True))
    assert out.token_ids == expected[len(tokens) - 30 :][:3]
    assert other.stats().hit_tokens == (len(tokens) - 1) // 4 * 4


def test_what_was_evicted_is_computed_again(engine_of, tmp_path):
    engine = engine_of()
    saved = save_session(engine, PROMPT, tmp_path / "s", cache_salt="a")
    assert saved.num_blocks == 29 // 4
    other = engine_of()
    load_session(other, tmp_path / "s", cache_salt="a")
    for salt, hits in (("b", 0), (None, 0), ("a", 28)):
        before = other.stats().hit_tokens
        generate(other, [PROMPT], SamplingParams(max_tokens=1, cache_salt=salt))
        assert other.stats().hit_tokens - before == hits


def test_floats_fit_another_block_size(engine_of, llama, tmp_path):
    save_session(engine_of(block_size=4), PROMPT, tmp_path / "s")
    other = engine_of(block_size=8)
    load_session(other, tmp_path / "s")
    [out] = generate(other, [PROMPT], GO_ON)
    assert out.token_ids == naively(llama.lm, PROMPT, 6)
    assert other.stats().hit_tokens == 24
    larger = engine_of(block_size=64, num_blocks=4)
    load_session(larger, tmp_path / "s")
    assert larger.stats().blocks_cached == 0


def test_text_and_a_real_model(tinypy, tmp_path):
    text = "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n" * 2
    engine = Engine(tinypy.lm, EngineConfig(num_blocks=64, attention="torch"))
    sizes = {}
    for kv_dtype in ("auto", "int8", "int4"):
        path = tmp_path / kv_dtype
        sizes[kv_dtype] = save_session(engine, text, path, kv_dtype=kv_dtype)
        other = Engine(tinypy.lm, EngineConfig(num_blocks=64, attention="torch"))
        tokens = load_session(other, path)
        assert tinypy.lm.decode(tokens) == text
        kv = [one.store.blocks[:, list(one.cache.block_ids())] for one in (engine, other)]
        error = (kv[0] - kv[1]).abs()
        assert error[:, :, :, 0].max() == pytest.approx(sizes[kv_dtype].k_error)
        assert error[:, :, :, 1].max() == pytest.approx(sizes[kv_dtype].v_error)
    assert sizes["int8"].num_bytes < 0.3 * sizes["auto"].num_bytes
    assert sizes["int4"].num_bytes < 0.2 * sizes["auto"].num_bytes
    assert 0 == sizes["auto"].k_error < sizes["int8"].k_error < sizes["int4"].k_error


def test_loading_is_all_or_nothing(engine_of, tmp_path):
    save_session(engine_of(), PROMPT, tmp_path / "s")
    full = engine_of(num_blocks=8)
    request = full.add_request([9, 8, 7, 6, 5], SamplingParams(max_tokens=9))
    full.step()
    with pytest.raises(OutOfBlocks):
        load_session(full, tmp_path / "s")
    full.check()
    assert drain(full)[request].finish_reason
    load_session(full, tmp_path / "s")
    assert full.stats().hit_tokens == 0
    full.check()


def test_loading_what_is_there_takes_nothing(engine_of, tmp_path):
    engine = engine_of()
    save_session(engine, PROMPT, tmp_path / "s")
    before = engine.stats().blocks_cached
    for _ in range(3):
        load_session(engine, tmp_path / "s")
        engine.check()
    assert engine.stats().blocks_cached == before


def test_a_session_goes_to_the_tiers_too(engine_of, tmp_path):
    save_session(engine_of(), PROMPT, tmp_path / "s")
    engine = engine_of(num_blocks=12, host_blocks=32)
    load_session(engine, tmp_path / "s")
    engine.cache.evict(12)
    assert engine.tiers.where(PROMPT)[:6] == ["host"] * 6


# ── Refused ───────────────────────────────────────────────────────────────────


def test_the_error_says_what_differs(engine_of, llama, other_lm, tmp_path):
    path = tmp_path / "s"
    engine = engine_of()
    save_session(engine, PROMPT, path)
    with pytest.raises(SessionError, match=r"model is .* load the model that it was saved with"):
        load_session(engine_of(other_lm), path)
    with pytest.raises(SessionError, match="stored is 'auto', here it is 'int8'"):
        load_session(engine_of(kv_dtype="int8"), path)
    save_session(engine_of(kv_dtype="int8"), PROMPT, path)
    with pytest.raises(SessionError, match="stored is 'int8', here it is 'int4'"):
        load_session(engine_of(kv_dtype="int4"), path)
    with pytest.raises(SessionError, match="block_size is '4', here it is '8'"):
        load_session(engine_of(kv_dtype="int8", block_size=8), path)
    with pytest.raises(SessionError, match="not a whole session file"):
        load_session(engine, tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(SessionError, match="not a whole session file"):
        load_session(engine, tmp_path / "text")
    with pytest.raises(SessionError, match="format is None"):
        (tmp_path / "other").write_bytes(to_bytes({"x": torch.zeros(1)}))
        load_session(engine, tmp_path / "other")
    with pytest.raises(ValueError, match="prefix_cache"):
        load_session(engine_of(prefix_cache=False), path)


def rewritten(path: Path, change) -> None:
    """A session changed by an attacker who knows the format: the checksum fits."""
    header, tensors = session.read_file(path)
    change(header, tensors)
    header["shapes"] = json.dumps(shapes_of(tensors), sort_keys=True)
    header["checksum"] = checksum_of(header, tensors)
    path.write_bytes(to_bytes(tensors, header))


@pytest.mark.parametrize(("change", "message"), [
    (lambda h, t: h.update(version="2"), "version is '2', here it is '1'"),
    (lambda h, t: h.update(num_tokens="31"), "31 tokens are announced, 30 are there"),
    (lambda h, t: t.pop("kv"), "has \\[\\], this engine needs \\['kv'\\]"),
    (lambda h, t: t.update(kv=t["kv"][:, :, :1].contiguous()), "kv is torch.float32"),
    (lambda h, t: t.update(kv=t["kv"].half()), "kv is torch.float16"),
    (lambda h, t: t.update(kv=t["kv"][:1].contiguous()), "kv is torch.float32"),
    (lambda h, t: t.update(kv=t["kv"].repeat(1, 2, 1, 1, 1)), "but 30 tokens"),
    (lambda h, t: t.update(tokens=t["tokens"] + 300), "must be an int"),
    (lambda h, t: t.update(extra=t["tokens"].clone()), "has \\['extra', 'kv'\\]"),
    (lambda h, t: t["kv"].view(-1)[-1:].fill_(NAN), "kv has NaN or infinity"),
    (lambda h, t: t["kv"].view(-1)[:1].fill_(-INF), "kv has NaN or infinity"),
])  # fmt: skip
def test_a_well_made_wrong_session_is_refused(engine_of, tmp_path, change, message):
    path = tmp_path / "s"
    save_session(engine_of(), PROMPT, path)
    rewritten(path, change)
    engine = engine_of()
    with pytest.raises(ValueError, match=message):
        load_session(engine, path)
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("kv_dtype", "part"), [("int8", "k_scale"), ("int4", "v_low"), ("float16", "k_codes")]
)
def test_a_quantised_session_that_is_not_finite_is_refused(engine_of, tmp_path, kv_dtype, part):
    path, engine = tmp_path / "s", engine_of(kv_dtype=kv_dtype)
    save_session(engine, PROMPT, path)
    rewritten(path, lambda h, t: t[part].view(-1)[-1:].fill_(NAN))
    with pytest.raises(SessionError, match=f"{part} has NaN or infinity"):
        load_session(engine, path)
    assert engine_of(kv_dtype=kv_dtype).stats().blocks_used == 0


@pytest.mark.parametrize("kv_dtype", thorough_after(1, ["auto", "int8", "int4"]))
def test_whatever_a_damaged_header_says(engine_of, tmp_path, kv_dtype):
    """Every field and tensor nonsense: one kind of error that names the file, or it is loaded."""
    path, engine = tmp_path / "it.session", engine_of(num_blocks=64)
    save_session(engine, PROMPT, path, kv_dtype=kv_dtype)
    whole = path.read_bytes()
    header, tensors = session.read_file(path)
    changes = [lambda h, t, name=name: h.pop(name) for name in header]
    changes += [
        lambda h, t, name=name, value=value: h.update({name: value})
        for name in header for value in ("", "x", "0", "-1", "1e9", "9" * 5000, "[]", "null", "\0")
    ]  # fmt: skip
    for name in tensors:
        changes.append(lambda h, t, name=name: t.pop(name))
        for shape in ((), (0,), (3,), (2, 0), (1, 2, 3), (2, 9, 2, 2, 8)):
            for dtype in (torch.int32, torch.float32, torch.int8, torch.bool):
                new = torch.zeros(shape, dtype=dtype)
                changes.append(lambda h, t, name=name, new=new: t.update({name: new}))
    refused = 0
    for change in changes:
        path.write_bytes(whole)
        rewritten(path, change)
        try:
            load_session(engine, path)
        except SessionError as error:
            assert "it.session" in str(error)
            refused += 1
        engine.check()
    assert refused > 0.5 * len(changes)


@pytest.mark.parametrize("what", ["fifo", "folder", "device", "a\0b", "long", None, 3, b"s"])
def test_what_is_no_file_is_not_waited_for(engine_of, tmp_path, what):
    path = tmp_path / what if isinstance(what, str) and "\0" not in what else what
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path = "/dev/zero"
    elif what == "long":
        path = "x" * 10_000
    elif what == "a\0b":
        path = f"{tmp_path}/{what}"
    found = []

    def refused():
        for call in (load_session, lambda engine, path: save_session(engine, PROMPT, path)):
            if what not in ("fifo", "device") or call is load_session:
                with pytest.raises(ValueError, match="path: "):
                    call(engine_of(), path)
        found.append(True)

    ends(refused)
    assert found


def test_damaged_sessions_are_refused(tmp_path):
    """Each is refused, or is what was saved. (10,000 of them were tried once, by hand.)"""
    rng = random.Random(0)
    tensors = {"tokens": torch.arange(5, dtype=torch.int32), "kv": torch.rand(1, 4, 2, 1, 2)}
    header = {"format": "minikv session", "version": "1", "num_tokens": "5"}
    header["shapes"] = json.dumps(shapes_of(tensors), sort_keys=True)
    header["checksum"] = checksum_of(header, tensors)
    expected = {"format": "minikv session", "version": "1"}
    whole, path, refused = to_bytes(tensors, header), tmp_path / "s", 0
    for _ in range(1000):
        path.write_bytes(damaged(rng, whole))
        try:
            found, parts = session.read_file(path)
            check_session(found, parts, expected)
        except SessionError:
            refused += 1
        else:
            assert found == header
            assert all(torch.equal(parts[name], tensors[name]) for name in tensors)
    assert refused > 990


def test_what_cannot_be_saved(engine_of, tmp_path):
    engine = engine_of()
    for what, message in ((5, "not an unfinished request"), ([1], "at least 2 tokens"),
                          ([1, 999], "a token id"), (None, "what: must be")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            save_session(engine, what, tmp_path / "s")
    with pytest.raises(ValueError, match="kv_dtype"):
        save_session(engine, PROMPT, tmp_path / "s", kv_dtype="int3")
    with pytest.raises(ValueError, match="K and V are int8 already"):
        save_session(engine_of(kv_dtype="int8"), PROMPT, tmp_path / "s", kv_dtype="int4")
    request = engine.add_request(PROMPT, SamplingParams(n=2))
    with pytest.raises(ValueError, match="n > 1"):
        save_session(engine, request, tmp_path / "s")
    with pytest.raises(SessionError, match="cannot write"):
        save_session(engine, PROMPT, tmp_path / "none" / "s")
    assert not list(tmp_path.iterdir())


def test_fingerprints():
    from minikv import load

    config = load("tinypy").config
    state = {"a": torch.arange(4.0), "b": torch.zeros(2, 2)}
    one = fingerprint(config, state)
    assert one == fingerprint(config, dict(reversed(state.items())))
    changed = [
        state | {"a": torch.arange(4.0).half()}, state | {"b": torch.zeros(4)},
        {"a": state["a"], "c": state["b"]}, state | {"a": torch.arange(4.0) * (1 + 2**-23)},
    ]  # fmt: skip
    assert len({one, *(fingerprint(config, other) for other in changed)}) == 5

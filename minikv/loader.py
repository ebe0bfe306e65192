"""From a name or a folder to a model that runs: `minikv.load`.

The folder has the layout of a `transformers` checkpoint: config.json, one
safetensors file or several with an index, tokenizer.json.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from minikv.config import CheckpointError, read_config, read_json
from minikv.model import Transformer

BUNDLED = {"tinypy": Path(__file__).parent / "models" / "tinypy"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LanguageModel:
    """A transformer with its tokenizer: text in, logits or text out."""

    def __init__(self, name: str, transformer: Transformer, tokenizer: Tokenizer | None):
        self.name = name
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.config = transformer.config
        self.device, self.dtype = transformer.device, transformer.dtype

    def encode(self, text: str) -> list[int]:
        """Text to token ids, with the start token if the checkpoint's tokenizer adds one."""
        return self._tokenizer_or_raise().encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text; special tokens are left out."""
        return self._tokenizer_or_raise().decode(list(token_ids))

    def _tokenizer_or_raise(self) -> Tokenizer:
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.name} has no tokenizer.json: pass token ids instead of text"
            )
        return self.tokenizer

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], cache=None) -> torch.Tensor:
        """Logits after every token: (T, vocab_size) float32.

        Without a cache, naive attention over these tokens: the oracle. With one
        (`ConcatCache`, `PreallocatedCache`), they are the tokens that follow those
        already in it.
        """
        start = 0 if cache is None else cache.num_tokens
        attend = self.transformer.attend_naively if cache is None else cache.attend
        ids = torch.tensor(list(token_ids), device=self.device)
        positions = torch.arange(start, start + len(ids), device=self.device)
        hidden = self.transformer.forward(ids, positions, attend)
        return self.transformer.logits(hidden).float()

    def generate_naively(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens, everything recomputed at every step: the oracle of every chapter.

        Runs exactly `max_tokens` steps, end token or not; returns the new tokens.
        """
        ids = list(token_ids)
        for _ in range(max_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(token_ids) :]


def load(
    name_or_path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Load a Llama, Mistral, Qwen2 or Qwen3 checkpoint.

    `name_or_path`: "tinypy" (bundled), a local folder, or a Hugging Face hub id
    (downloaded once, then cached). `dtype`: float32, float16 or bfloat16.
    Raises CheckpointError (a ValueError) that says what is missing or unsupported.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype: {dtype} is not supported; use one of {', '.join(map(str, DTYPES))}"
        )
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: {device!r} is not a device; use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} asked for, but torch finds no CUDA device; use 'cpu'")
    folder = _find(str(name_or_path))
    config = read_config(folder)
    transformer = Transformer(config, read_weights(folder), device, dtype)
    return LanguageModel(str(name_or_path), transformer, read_tokenizer(folder))


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """tokenizer.json, or None where there is none."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{file}: damaged ({error}); fetch it again") from None


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        files = [single]
    elif index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{index}: has no weight_map; fetch it again")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
    else:
        raise CheckpointError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
    state = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                state |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise CheckpointError(
                f"{file}: the index names this shard, but it is missing"
            ) from None
        except SafetensorError as error:
            raise CheckpointError(
                f"{file}: damaged or cut short ({error}); fetch it again"
            ) from None
    return state


def _find(name: str) -> Path:
    """The folder behind a bundled name, a path or a hub id."""
    if name in BUNDLED:
        return BUNDLED[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{name!r}: no such folder; give a bundled name ({', '.join(BUNDLED)}), "
            "a local folder, or a hub id of the form 'owner/model'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{name!r}: no local folder of that name, and the hub did not give it ({error})"
        ) from error

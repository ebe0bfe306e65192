"""A head on the target's last hidden state that guesses the next ones, and so the next tokens.

    the target's    hidden state h ──┬──> h' = h + silu(h A + t0 B0 + t1 B1 + t2 B2) C ──> draft
    newest tokens   t0, t1, t2 ──────┘              └── the next guess, from h' and the draft …

After the step that drew the newest token t0, the target knows nothing of t0 yet. It will: its next
hidden state depends on what it has now and on t0. That is what EAGLE guesses, with a whole layer
that attends (Li et al., 2024). Here it is a layer that only looks at three tokens, so it has no K
and V that would have to be kept. Embedding and output matrix are the target's own.

The head is trained by `python -m minikv train --draft`.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from minikv.language_model import LanguageModel
from minikv.sequence import Sequence
from minikv.speculative.drafters import Drafter, Proposal, in_a_row

HEADS = {"tinypy": Path(__file__).parents[1] / "models" / "tinypy-head"}


class HeadDrafter(Drafter):
    reads_hidden = True
    DEPTH = 4  # drafts in a row
    LEAST = 0.4  # how sure it must be that all of them are right

    def __init__(self, lm: LanguageModel, folder: Path | str | None = None):
        """Reads head.safetensors of the folder (default: the head that comes with the model):
        from_hidden (hidden_size, N), from_tokens (3, hidden_size, N), to_hidden (N, hidden_size),
        kept (M,): the tokens that can be drafted. Raises ValueError if there is none."""
        folder = HEADS.get(lm.name) if folder is None else Path(folder)
        if folder is None or not (folder / "head.safetensors").exists():
            raise ValueError(
                f"speculative: no head was trained for {lm.name}; use 'suffix', or train one with "
                "`python -m minikv train --draft` and give HeadDrafter its folder"
            )
        state = {n: t.float() for n, t in load_file(folder / "head.safetensors").items()}
        self.kept = state["kept"].long()
        self.from_hidden, self.to_hidden = state["from_hidden"], state["to_hidden"]
        embedding = lm.transformer.embedding.float()
        if len(self.from_hidden) != embedding.shape[1]:
            raise ValueError(f"speculative: the head in {folder} is for another model")
        self.tables = [embedding @ weight for weight in state["from_tokens"]]  # (V, N) each
        head = lm.transformer.head.weight
        self.out = (head.to_dense() if head.is_mkldnn else head).float()[self.kept].T.contiguous()

    def guess(
        self, hidden: torch.Tensor, newest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From hidden states (S, hidden_size) and the newest tokens (S, 3), the newest first: the
        next hidden states, and the chance of each token in `kept`, (S, M)."""
        inner = hidden @ self.from_hidden
        for back, table in enumerate(self.tables):
            inner += table[newest[:, back]]
        hidden = hidden + F.silu(inner) @ self.to_hidden
        return hidden, (hidden @ self.out).softmax(-1)

    @torch.inference_mode()
    def propose_all(
        self, sequences: list[Sequence], most: list[int], hidden: torch.Tensor
    ) -> list[Proposal | None]:
        count, hidden = len(self.tables), hidden.float()
        tokens = [[0] * count + one.token_ids[-count:] for one in sequences]  # or fewer
        last = torch.tensor([ids[: -count - 1 : -1] for ids in tokens])  # (S, 3), newest first

        def guess(depth: int, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal hidden, last
            if depth > 0:
                last = torch.cat([newest[:, None], last[:, :-1]], 1)
            hidden, chances = self.guess(hidden, last)
            p, index = chances.max(-1)
            return p, self.kept[index]

        return in_a_row(guess, most, self.DEPTH, self.LEAST)

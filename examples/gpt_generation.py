"""A small GPT of TransformerLayers: trained in FP8, then writing with a KV cache.

    python examples/gpt_generation.py        # a few seconds on a CPU, where FP8 is emulated; native on a Hopper GPU

The model learns a sentence by heart, letter by letter, in 20 steps; generation then writes it from its first letters.
With the cache each step computes one token, and gives the tokens that the whole forward gives. At last it is frozen:
its weights become FP8 codes, its activations take scales calibrated on a few texts, and so it writes once more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling

TEXT = "the quick brown fox jumps over the lazy dog. "
LETTERS = sorted(set(TEXT))
HIDDEN, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 4, 2, 24, 8, 20


class GPT(nn.Module):
    """Tokens [B, S] -> logits [B, S, letters]; rotary positions, so that there is no longest text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), HIDDEN)
        self.layers = nn.ModuleList(
            octavo.TransformerLayer(
                HIDDEN, 2 * HIDDEN, HEADS, attn_input_format="bshd", activation="swiglu", normalization="RMSNorm"
            )
            for _ in range(LAYERS)
        )
        self.rotary = octavo.RotaryPositionEmbedding(HIDDEN // HEADS)
        self.norm = octavo.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, len(LETTERS), bias=False)

    def forward(self, tokens: Tensor, cache: octavo.KVCache | None = None) -> Tensor:
        """Logits of the token after each; with a cache, `tokens` are those that it does not hold yet."""
        x = self.embedding(tokens)
        angles = self.rotary(2 * LENGTH, device=tokens.device)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles, kv_cache=cache)
        return self.head(self.norm(x))


def batch(device: str) -> Tensor:
    """[BATCH, LENGTH + 1]: the text from random places on."""
    tokens = torch.tensor([LETTERS.index(letter) for letter in TEXT * 2], device=device)
    starts = torch.randint(len(TEXT), (BATCH,)).tolist()
    return torch.stack([tokens[start : start + LENGTH + 1] for start in starts])


def train(model: GPT, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        tokens = batch(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def write(model: GPT, prompt: str, count: int, device: str, cached: bool) -> str:
    """The likeliest `count` letters after `prompt`."""
    cache = octavo.KVCache(1, len(prompt) + count) if cached else None
    tokens = torch.tensor([[LETTERS.index(letter) for letter in prompt]], device=device)
    new = tokens
    for _ in range(count):
        logits = model(new if cached else tokens, cache)
        new = logits[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, new), 1)
    return "".join(LETTERS[token] for token in tokens[0].tolist())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT().to(device)
    report = octavo.convert(model, CurrentScaling(), exclude="head", filter="all")
    print(report)
    with octavo.count_gemms() as counted:
        losses = train(model, device)
    print(f"\n{STEPS} steps: loss {losses[0]:.2f} -> {losses[-1]:.2f}; {counted.fp8} products in FP8")
    model.eval()
    octavo.unconvert(model)  # write in high precision: one scale a tensor would differ between one token and many
    written = write(model, TEXT[:10], 20, device, cached=True)
    print(f"written with the cache: {written!r}")
    same = written == write(model, TEXT[:10], 20, device, cached=False)
    print(f"without the cache, each token from the whole text: {'the same' if same else 'NOT the same'}")
    scales = octavo.calibrate(model, [batch(device)[:, :-1] for _ in range(2)])
    frozen = octavo.freeze(model, "tensor_static", input_scales=scales, exclude="head")
    served = write(model, TEXT[:10], 20, device, cached=True)
    parts = sum(a == b for a, b in zip(served, written, strict=True))
    print(
        f"{len(frozen)} layers frozen to FP8, with the cache: {served!r}, {parts} of {len(written)} letters as before"
    )
    if not same or losses[-1] > losses[0] / 2:
        raise SystemExit("the model did not learn, or the cache changed what it writes")


if __name__ == "__main__":
    main()

"""Convert transformers' GPT-2 to FP8 in place, see what was converted and why, train, and go back.

python examples/convert_gpt2.py             # a small GPT-2 with random weights, some seconds on a CPU
python examples/convert_gpt2.py --full      # GPT-2 small's shape, wants a GPU
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import octavo
from octavo.recipes import DelayedScaling

STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="12 layers of width 768")
    full = parser.parse_args().full
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {} if full else {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    config = GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(device)
    tokens = torch.randint(config.vocab_size, (2, 32), device=device)
    keys = list(model.state_dict())

    # Everything but the head, which shares its weight with the embedding.
    report = octavo.convert(model, recipe=DelayedScaling(amax_history_len=16), exclude=["lm_head"])
    print(report)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        with octavo.count_gemms() as counted, torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        octavo.update_scales(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 0:
            print(f"\nfirst step: {counted.fp8} FP8 products, {counted.high_precision} of converted layers in high")
            print(f"precision; one layer: {counted.by_layer()['transformer.h.0.mlp.c_fc']}")
    print("loss: " + " ".join(f"{value:.3f}" for value in losses))

    octavo.unconvert(model)
    same = list(model.state_dict()) == keys
    print(f"unconverted: {type(model.transformer.h[0].mlp.c_fc).__name__} again, keys as before: {same}")


if __name__ == "__main__":
    main()

"""octavo.LMHead: a Linear and its loss, chunk by chunk, with every recipe."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.measures import sqnr_db
from tests.modules.compositions import RECIPES, under
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.tensor import QuantizedTensor

BF16 = torch.bfloat16
FEATURES, CLASSES, TOKENS, CHUNK = 48, 133, 100, 32
# (dh, dw) in dB on N(0, 1) data of 512 tokens, 256 features, 1000 classes, logits of
# standard deviation 2, as emulated; a test allows 0.5 dB less.
EMULATED = {
    "delayed, measured first": (30.4, 30.4),
    "current": (30.4, 30.4),
    "rowwise": (30.6, 30.6),
    "block": (30.6, 30.6),
    "static": (30.2, 30.4),
}


def head_of(recipe: str = "none", **options: Any) -> octavo.LMHead:
    torch.manual_seed(7)
    options = {"bias": True, "dtype": BF16, "chunk_tokens": CHUNK} | options
    return octavo.LMHead(FEATURES, CLASSES, recipe=RECIPES[recipe], **options)


def batch(dtype: torch.dtype = BF16, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, CLASSES, (2, tokens // 2))
    targets[0, 3] = -100
    return torch.randn(2, tokens // 2, FEATURES).to(dtype).requires_grad_(), targets


def test_parameters_and_logits_are_those_of_a_linear() -> None:
    head, plain = head_of(), nn.Linear(FEATURES, CLASSES, dtype=BF16)
    assert {name: p.shape for name, p in head.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    plain.load_state_dict(head.state_dict())
    head.load_state_dict(plain.state_dict())
    hidden, _ = batch()
    assert torch.equal(head(hidden), plain(hidden))
    torch.manual_seed(1)
    ours = octavo.LMHead(8, 16)
    torch.manual_seed(1)
    assert torch.equal(ours.weight, nn.Linear(8, 16, bias=False).weight)
    assert ours.bias is None
    assert repr(ours) == "LMHead(in_features=8, out_features=16, bias=False, reduction=mean, chunk_tokens=2048)"


def test_a_weight_tied_to_an_embedding_has_both_gradients() -> None:
    torch.manual_seed(3)
    embedding, head = nn.Embedding(CLASSES, FEATURES), octavo.LMHead(FEATURES, CLASSES, chunk_tokens=CHUNK)
    head.weight = embedding.weight
    inputs, targets = torch.randint(0, CLASSES, (2, 50)), torch.randint(0, CLASSES, (2, 50))
    head(embedding(inputs), targets).backward()
    found = embedding.weight.grad.clone()
    assert head.weight.grad is embedding.weight.grad
    embedding.weight.grad = None
    logits = nn.functional.linear(embedding(inputs), embedding.weight)
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(found, embedding.weight.grad)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_chunk_is_an_octavo_linear_and_its_loss_to_the_bit(recipe: str, recompute: bool) -> None:
    """Two steps; with delayed scaling the amaxes of all chunks are gathered, and the second step has their scales."""
    head = head_of(recipe, reduction="sum", recompute=recompute)
    linear = octavo.Linear(FEATURES, CLASSES, dtype=BF16, recipe=RECIPES[recipe])
    linear.load_state_dict(head.state_dict())
    for _ in range(2):
        hidden, targets = batch()
        loss = head(hidden, targets)
        loss.backward()
        leaf, losses, dw = hidden.detach().requires_grad_(), [], torch.zeros(CLASSES, FEATURES)
        db = torch.zeros(CLASSES)
        for h, t in zip(leaf.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True):
            linear.zero_grad()
            losses.append(octavo.cross_entropy(linear(h), t, reduction="none"))
            losses[-1].sum().backward()
            dw, db = dw + linear.weight.grad, db + linear.bias.grad
        assert torch.equal(loss, torch.cat(losses).sum())
        assert torch.equal(hidden.grad, leaf.grad)
        assert torch.equal(head.weight.grad, dw.to(BF16))
        # Here in float32 throughout, where the Linear rounds each chunk's to bfloat16.
        torch.testing.assert_close(head.bias.grad, db.to(BF16), rtol=2**-6, atol=1e-2)
        octavo.update_scales(head)
        octavo.update_scales(linear)
        for a, b in zip(head.delayed_state.operands, linear.delayed_state.operands, strict=True):
            assert torch.equal(a.scale, b.scale)
            assert torch.equal(a.history, b.history)
        head.zero_grad()


def test_the_scale_of_a_gradient_knows_nothing_of_the_loss_gradient() -> None:
    """It is that of p - y, which no loss scaler and no number of tokens changes."""
    hidden, targets = batch()
    amaxes = []
    for reduction, factor in (("mean", 1.0), ("mean", 65536.0), ("sum", 2.0**-20), ("none", 3.0)):
        for recompute in (False, True):
            head = head_of("delayed", reduction=reduction, recompute=recompute)
            (head(hidden, targets) * factor).sum().backward()
            amaxes.append(float(head.delayed_state.grad_output.gathered))
    assert len(set(amaxes)) == 1
    assert 0.9 < amaxes[0] <= 1


def test_probabilities_too_small_for_e4m3_are_kept_by_e5m2() -> None:
    """Beside a target's -1, E4M3 has nothing below 2^-10 / 448 = 2.2e-6, and E5M2 goes on to 2^-17 / 57344 = 1.3e-10.

    By column, and by blocks in which no target stands, the small ones are measured by themselves.
    """
    zeros = {}
    for name, recipe in (
        ("e4m3", CurrentScaling(format=octavo.E4M3)),
        ("hybrid", CurrentScaling()),
        ("rowwise", RowwiseScaling()),
        ("block", BlockScaling()),
    ):
        head = octavo.LMHead(16, 1024, recipe=recipe)
        with torch.no_grad():
            head.weight.zero_()
            head.weight[:10, 0] = 16.0
        hidden, targets = torch.ones(64, 16), torch.arange(64) % 10
        head(hidden, targets).backward()
        # Ten classes have logits of 16, whose probability is a tenth; the others' is e^-16 of that.
        zeros[name] = int((head.weight.grad[128:, 0] == 0).sum())
    assert zeros == {"e4m3": 1024 - 128, "hybrid": 0, "rowwise": 0, "block": 0}


def test_gradients_scale_with_that_of_the_loss_to_the_bit() -> None:
    hidden, targets = batch(torch.float32)
    for reduction in ("mean", "none"):
        head = head_of("current", dtype=torch.float32, reduction=reduction)
        loss, inputs = head(hidden, targets), (hidden, head.weight, head.bias)
        plain = torch.autograd.grad(loss.sum(), inputs, retain_graph=True)
        scaled = torch.autograd.grad((loss * 2.0**-40).sum(), inputs)
        assert all(torch.equal(b, a * 2.0**-40) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("recipe", ["delayed, measured first", "current", "rowwise", "block"])
def test_gradients_of_rows_have_their_own_weights(recipe: str) -> None:
    """Against the same head in float32: within what FP8 costs, and nothing where the weight is 0."""
    head, hidden, targets = head_of(recipe, dtype=torch.float32, reduction="none"), *batch(torch.float32)
    plain = copy.deepcopy(head)
    plain.recipe = None
    weights = torch.randn(targets.shape) * torch.randint(0, 2, targets.shape)
    outcomes = []
    for one in (head, plain):
        outcomes.append(torch.autograd.grad(one(hidden, targets), (hidden, one.weight, one.bias), weights))
    for found, expected in zip(*outcomes, strict=True):
        # E5M2 keeps two bits and E4M3 three: 2^-3 and 2^-4 at most, some 22 dB and more on random data.
        assert sqnr_db(expected, found) > 22
    assert not outcomes[0][0][weights == 0].any()
    (zeros, *_) = torch.autograd.grad(head(hidden, targets), (hidden, head.weight), torch.zeros(targets.shape))
    assert not zeros.any()


def measured(recipe: str, device: str = "cpu") -> tuple[float, ...]:
    """SQNR of (dh, dw) against plain torch in float32."""
    torch.manual_seed(0)
    head = octavo.LMHead(256, 1000, chunk_tokens=200)
    with torch.no_grad():
        head.weight.normal_(std=1 / 8)
    hidden, targets = torch.randn(512, 256), torch.randint(0, 1000, (512,))
    exact = hidden.clone().requires_grad_()
    loss = nn.functional.cross_entropy(nn.functional.linear(exact, head.weight), targets)
    expected = torch.autograd.grad(loss, (exact, head.weight))
    head, hidden, targets = head.to(device), hidden.to(device).requires_grad_(), targets.to(device)
    with under(RECIPES[recipe]):
        found = torch.autograd.grad(head(hidden, targets), (hidden, head.weight))
    return tuple(sqnr_db(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("recipe", EMULATED)
def test_gradients_are_as_close_as_the_page_says(recipe: str) -> None:
    found = measured(recipe)
    assert all(abs(a - b) < 0.5 for a, b in zip(found, EMULATED[recipe], strict=True)), found


def test_contexts_decide_as_for_a_linear() -> None:
    head, (hidden, targets) = head_of("current"), batch()
    head.layer_name = "lm_head"
    with octavo.count_gemms() as n:
        head(hidden, targets).backward()
    chunks = -(-TOKENS // CHUNK)
    assert n.by_layer() == {"lm_head": {f"{gemm} fp8 emulated": chunks for gemm in ("fprop", "dgrad", "wgrad")}}
    with octavo.count_gemms() as n, octavo.autocast(enabled=False):
        off = head(hidden, targets)
    assert n.fp8 == 0
    assert torch.equal(off, head_of()(hidden, targets))
    with octavo.count_gemms() as n, octavo.autocast(recipe=RowwiseScaling(backward="high_precision")):
        head(hidden, targets).backward()
    assert n.fp8 == chunks
    assert n.high_precision == 2 * chunks
    overrides = CurrentScaling(overrides={"head": None})
    with octavo.count_gemms() as n, octavo.autocast(recipe=overrides):
        head(hidden, targets)
    assert n.fp8 == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "delayed, measured first", "current", "rowwise", "block", "none"])
def test_checkpoints_change_no_bit(recipe: str, recompute: bool, use_reentrant: bool) -> None:
    """With delayed scaling, as long as no update comes between forward and recompute: the scale of a gradient is the
    one that stands when it is made."""
    outcomes = []
    for wrapped in (False, True):
        torch.manual_seed(11)
        head = head_of(recipe, recompute=recompute)
        for _ in range(2):
            hidden, targets = batch()
            head.zero_grad()
            if wrapped:
                loss = octavo.checkpoint(head, hidden, targets, use_reentrant=use_reentrant)
            else:
                loss = head(hidden, targets)
            loss.backward()
            octavo.update_scales(head)
        state = [one.history for one in head.delayed_state.operands]
        outcomes.append([loss, hidden.grad, head.weight.grad, head.bias.grad, *state])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_made_again_gradients_survive_an_update_in_between() -> None:
    """A checkpoint in a context that ends a step before the backward: with recompute=True bit for bit."""
    outcomes = []
    for wrapped in (False, True):
        torch.manual_seed(11)
        head = head_of("none", recompute=True)
        for _ in range(3):
            hidden, targets = batch()
            head.zero_grad()
            with octavo.autocast(recipe=DelayedScaling(amax_history_len=2)):
                loss = octavo.checkpoint(head, hidden * 3, targets) if wrapped else head(hidden * 3, targets)
            loss.backward()
        outcomes.append([loss, hidden.grad, head.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_state_saves_and_loads_and_a_copy_goes_on_alike() -> None:
    head, (hidden, targets) = head_of("delayed"), batch()
    head(hidden, targets).backward()
    octavo.update_scales(head)
    assert {"weight", "bias", "input_scale", "grad_output_amax_history"} <= set(head.state_dict())
    assert set(octavo.state_dict(head, plain=True)) == {"weight", "bias"}
    other = head_of("delayed")
    other.load_state_dict(head.state_dict())
    expected = head(hidden, targets)
    for one in (other, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(one(hidden, targets), expected)
    # It can pass for a plain one: its scales then come from the weights and the next batch.
    fresh = head_of("delayed")
    fresh.load_state_dict(octavo.state_dict(head, plain=True), strict=True)
    assert fresh(hidden, targets).isfinite()


def test_weights_that_exist_in_fp8_and_codes_that_are_kept() -> None:
    hidden, targets = batch()
    torch.manual_seed(5)
    with octavo.quantized_init(recipe=CurrentScaling()):
        stored = octavo.LMHead(FEATURES, CLASSES, dtype=BF16, recipe=CurrentScaling(), chunk_tokens=CHUNK)
    assert isinstance(stored.weight, QuantizedTensor)
    plain = octavo.LMHead(FEATURES, CLASSES, dtype=BF16, recipe=CurrentScaling(), chunk_tokens=CHUNK)
    plain.weight.data.copy_(stored.weight.detach().dequantize())
    assert torch.equal(stored(hidden, targets), plain(hidden, targets))
    head = head_of("current")
    inputs = (hidden, head.weight)
    expected = torch.autograd.grad(head(hidden, targets), inputs)
    for mode in ("refresh", "reuse"):
        found = torch.autograd.grad(head(hidden, targets, cached_weight=mode), inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="cached_weight is 'maybe': expected None, 'refresh' or 'reuse'"):
        head(hidden, targets, cached_weight="maybe")


def test_what_is_kept_for_the_backward() -> None:
    """The figures of the page, in bytes; parameters and inputs aside, whatever else is four bytes each."""
    head = octavo.LMHead(64, 320, dtype=BF16, recipe=CurrentScaling(), chunk_tokens=32)
    hidden, targets = torch.randn(96, 64, dtype=BF16, requires_grad=True), torch.randint(0, 320, (96,))
    given = {one.untyped_storage().data_ptr() for one in (hidden, head.weight, targets)}
    for recompute, expected in ((False, 2 * 96 * 64 + 2 * 320 * 64), (True, 4 * 96 + 2 * 96 * 64 + 2 * 320 * 64)):
        head.recompute, kept = recompute, {}

        def note(one: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            loss = head(hidden, targets)
        found = [size for where, size in kept.items() if where not in given]
        assert sum(size for size in found if size > 16) == expected
        loss.backward()


def test_calibration_gathers_what_the_logits_are_made_of() -> None:
    head, (hidden, targets) = head_of(), batch()
    with torch.no_grad(), octavo.autocast(enabled=False, recipe=DelayedScaling(), calibrating=True):
        loss = head(hidden, targets)
    assert torch.equal(loss, head(hidden, targets))
    state, largest = head.delayed_state, hidden.detach().float().abs().amax()
    assert torch.equal(state.input.history.amax(), largest)
    assert torch.equal(state.weight.history.amax(), head.weight.detach().float().abs().amax())


def test_convert_gives_it_a_recipe_and_unconvert_takes_it_back() -> None:
    model, (hidden, targets) = nn.Sequential(head_of()), batch()
    before = model[0](hidden, targets)
    report = octavo.convert(model, recipe=CurrentScaling(), filter="all")
    assert [row.name for row in report.converted] == ["0"]
    assert type(model[0]) is octavo.LMHead
    with octavo.count_gemms() as n:
        model[0](hidden, targets)
    assert n.fp8 == 3 * -(-TOKENS // CHUNK)
    octavo.unconvert(model)
    assert type(model[0]) is octavo.LMHead
    assert torch.equal(model[0](hidden, targets), before)


def test_a_small_model_learns_as_without_fp8() -> None:
    """To name the token it sees, through a tied weight: 30 steps of AdamW, from log 133 = 4.9."""
    losses = {}
    for recipe in ("none", "delayed", "current"):
        torch.manual_seed(2)
        embedding, head = nn.Embedding(CLASSES, FEATURES), octavo.LMHead(FEATURES, CLASSES, chunk_tokens=CHUNK)
        nn.init.normal_(embedding.weight, std=0.1)
        head.weight = embedding.weight
        optimizer = torch.optim.AdamW([embedding.weight], lr=0.02)
        for _ in range(30):
            tokens = torch.randint(0, CLASSES, (TOKENS,))
            with under(RECIPES[recipe]):
                loss = head(embedding(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[recipe] = float(loss.detach())
    assert losses["none"] < 2
    # FP8 moves the products by 4 % at random; the loss follows within as much.
    assert all(abs(losses[name] / losses["none"] - 1) < 0.05 for name in ("delayed", "current")), losses


def test_bad_arguments_are_named() -> None:
    head, (hidden, targets) = head_of(), batch()
    with pytest.raises(ValueError, match="its last dimension must be in_features = 48"):
        head(hidden[..., 1:], targets)
    with pytest.raises(ValueError, match="one target belongs to each row"):
        head(hidden, targets[:, 1:])
    with pytest.raises(ValueError, match="label_smoothing is -1"):
        octavo.LMHead(8, 8, label_smoothing=-1)
    with pytest.raises(ValueError, match="reduction is 'all'"):
        octavo.LMHead(8, 8, reduction="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"chunk_tokens is 2\.0"):
        octavo.LMHead(8, 8, chunk_tokens=2.0)  # type: ignore[arg-type]


def test_the_pages_code_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "layers" / "cross_entropy.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Tensor] = {}
    exec(block, names)
    # Of logits near 0, log 1000 = 6.9; N(0, 1) weights and embeddings have logits of standard deviation 8.
    assert 0 < float(names["y"].detach()) < 100
    assert names["logits"].shape == (8, 1, 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "reduction"),
    [("delayed", "mean"), ("delayed", "none"), ("current", "mean"), ("rowwise", "none"), ("block", "mean"),
     ("none", "none")],
)  # fmt: skip
def test_compiled_code_gives_the_same_bits_in_one_graph(recipe: str, reduction: Any) -> None:
    torch._dynamo.reset()
    heads = [head_of(recipe, reduction=reduction) for _ in range(2)]
    calls = [heads[0], torch.compile(heads[1], fullgraph=True, backend="aot_eager")]
    for tokens in (100, 100, 60):
        hidden, targets = batch(tokens=tokens)
        outcomes = []
        for head, call in zip(heads, calls, strict=True):
            leaf = hidden.detach().requires_grad_()
            loss = call(leaf, targets)
            loss.sum().backward()
            octavo.update_scales(head)
            outcomes.append([loss, leaf.grad, head.weight.grad, head.bias.grad])
            outcomes[-1] += [one.history for one in head.delayed_state.operands]
            head.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.slow
def test_inductor_compiles_a_step_with_its_context_inside() -> None:
    torch._dynamo.reset()
    heads, recipe = [head_of() for _ in range(2)], DelayedScaling(amax_history_len=2)

    def step(head: octavo.LMHead, hidden: Tensor, targets: Tensor) -> Tensor:
        with octavo.autocast(recipe=recipe):
            return head(hidden, targets)

    compiled = torch.compile(step, fullgraph=True)
    for _ in range(2):
        hidden, targets = batch()
        outcomes = []
        for head, call in zip(heads, (step, compiled), strict=True):
            leaf = hidden.detach().requires_grad_()
            loss = call(head, leaf, targets)
            loss.backward()
            outcomes.append((loss.detach(), leaf.grad, head.weight.grad.clone()))
            head.zero_grad()
        for a, b in zip(*outcomes, strict=True):
            # Inductor multiplies in float32 and rounds once, as eager code does; its products are torch's.
            assert sqnr_db(a, b) > 45


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", EMULATED)
def test_on_a_gpu_gradients_are_as_close_as_emulated(recipe: str) -> None:
    found = measured(recipe, "cuda")
    assert all(a > b - 0.5 for a, b in zip(found, EMULATED[recipe], strict=True)), found


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "none"])
def test_on_a_gpu_nothing_waits(recipe: str) -> None:
    """Not for a mean over the tokens that count either."""
    head, (hidden, targets) = head_of(recipe).cuda(), batch()
    hidden, targets = hidden.detach().cuda().requires_grad_(), targets.cuda()
    head(hidden, targets).backward()
    octavo.update_scales(head)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        head(hidden, targets).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_on_a_gpu_inside_a_cuda_graph(recipe: str, reduction: Any) -> None:
    eager = head_of(recipe, reduction=reduction).cuda()
    graphed = copy.deepcopy(eager)
    hidden, targets = (one.detach().cuda() for one in batch())
    graphed = octavo.make_graphed_callables(graphed, (hidden.clone().requires_grad_(), targets.clone()))
    for _ in range(2):
        hidden, targets = (one.detach().cuda() for one in batch())
        outcomes = []
        for head in (eager, graphed):
            leaf = hidden.clone().requires_grad_()
            loss = head(leaf, targets)
            loss.sum().backward()
            outcomes.append([loss.clone(), leaf.grad, head.weight.grad.clone(), head.bias.grad.clone()])
            octavo.update_scales(head)
            head.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))

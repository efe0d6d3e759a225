from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.judging_serving import PrefillExpected, PrefillSpeed, ServedTold, product_rates
from tests.bench import rows as made

LARGE = {"batch": 8, "tokens": 1024}


def ceiling(name: str, rate: float, shape: tuple[int, ...] = (8192, 8192, 8192)) -> dict[str, Any]:
    return {"kind": "ceiling", "name": name, "shape": list(shape), "per_s": rate, "status": "measured"}


@pytest.mark.parametrize(("own", "verdict"), [(10.0, "pass"), (10.01, "miss")])
def test_prefill_is_as_much_faster_in_every_form(own: float, verdict: str) -> None:
    rows = [made.served("bf16", 15.0), made.served("octavo-rowwise", 9.0)]
    rows += [made.served("bf16", 15.0, **LARGE), made.served("octavo-rowwise", own, **LARGE)]
    assert PrefillSpeed("llama", 1.5)(rows).verdict == verdict
    assert PrefillSpeed("llama", 1.5)(rows[:2]).verdict == "pass"


def test_the_fastest_scheme_is_judged_beside_its_own_form_and_the_others_are_named() -> None:
    rows = [made.served("bf16", 15.0), made.served("octavo-rowwise", 12.0), made.served("octavo-tensor_static", 10.0)]
    rows += [made.served("torchao-rowwise", 20.0), made.served("octavo-rowwise", 1.0, graph="")]
    rows += [made.served("octavo-rowwise", 1.0, model="gpt2"), made.served("octavo-rowwise", 1.0, phase="decode")]
    verdict = PrefillSpeed("llama", 1.5)(rows)
    assert verdict.measured == "1 x 2048 1.500x (10 against 15 ms)"
    assert verdict.reason == "1 x 2048: octavo-tensor_static, octavo-rowwise 1.250x, torchao-rowwise 0.750x"


def test_what_lacks_is_named_with_its_reason() -> None:
    rule = PrefillSpeed("llama", 1.5)
    assert rule([]).reason == "the section inference was not asked for in this run"
    rows = [made.served("bf16", 15.0), made.served("octavo-rowwise", None)]
    assert rule(rows).reason == "octavo-rowwise: RuntimeError: no kernel image"
    whole = {"kind": "inference", "model": "llama", "status": "skipped", "reason": "transformers is not installed"}
    assert rule([whole]).reason == "prefill: transformers is not installed"
    assert ServedTold("llama")([whole]).reason == "decode: transformers is not installed"
    assert {rule(found).verdict for found in ([], rows, [whole])} == {"not measured"}


def test_an_expectation_is_told_with_how_far_products_could_carry_it() -> None:
    rows = [made.served("bf16", 10.0, model="gpt2"), made.served("octavo-rowwise", 9.0, model="gpt2")]
    rows += [ceiling("copy", 4e12), ceiling("bf16", 1e15), ceiling("fp8_row", 2e15)]
    verdict = PrefillExpected("gpt2", 1.8)(rows)
    assert verdict.verdict == "reported"
    assert verdict.measured == "not held: 1 x 2048 1.111x (9 against 10 ms)"
    # 4 TFLOP: 4 ms of 10 in BF16, 2 in FP8, and 1 ms for 4 GB of casts: 10 / 9.
    assert "products take 4 of 10 ms" in verdict.reason
    assert "2 at FP8's (2000), casts 1: no more than 1.11x by FP8 alone" in verdict.reason
    assert PrefillExpected("gpt2", 1.1)(rows).measured.startswith("held: ")
    assert PrefillExpected("gpt2", 1.8)(rows[:2]).reason == "the ceilings were not measured in this run"


def test_small_products_are_reckoned_at_the_rates_of_their_size() -> None:
    rows = [ceiling("copy", 4e12), ceiling("bf16", 7e14), ceiling("fp8_row", 13e14), ceiling("fp8_tensor", 13e14)]
    rows += [ceiling("bf16", 6e14, (8192, 768, 3072)), ceiling("fp8_row", 9e14, (8192, 768, 3072))]
    rates = product_rates(rows)
    assert (rates.copy, rates.bf16, rates.fp8_row, rates.fp8_tensor) == (4e12, 6e14, 9e14, 13e14)


def test_decoding_the_first_token_and_loading_are_told() -> None:
    rows = [made.served("bf16", 2.0, "decode"), made.served("octavo-rowwise", 1.6, "decode")]
    rows += [made.served("bf16", 900.0, "loading"), made.served("octavo-rowwise", 600.0, "loading")]
    rows += [made.served("bf16", 20.0, "first token"), made.served("octavo-tensor_static", 16.0, "first token")]
    verdict = ServedTold("llama")(rows)
    assert verdict.verdict == "reported"
    assert verdict.measured == (
        "decode of 1 1.250x (1.6 against 2 ms); first token, replayed 1.250x (16 against 20 ms);"
        " loading 1.500x (600 against 900 ms)"
    )
    assert verdict.reason == "bf16 4 GB, octavo-rowwise 2 GB"

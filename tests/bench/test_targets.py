from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.judging import BeatsPeer, CastRate, HostRatio, LayerSpeed, LinearTime, StepMemory, StepSpeed, WarmUp
from octavo.bench.targets import TARGETS, target_rows
from tests.bench import rows as made

SHAPE = (8192, 768, 3072)


def verdicts(rows: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    return {(row["what"], row["target"]): row["verdict"] for row in target_rows(rows)}


def test_a_record_is_judged_line_by_line() -> None:
    found = verdicts(made.whole())
    name = "Linear M 8192, K 768, N 3072"
    assert found["Cast, transpose and amax", "≥ 90 % of copy, the largest matrix"] == "pass"
    assert found[f"{name}, delayed", "products + casts at 89 % of copy"] == "pass"
    assert found[f"{name}, current", "products + casts at 89 % of copy"] == "miss"
    assert found[f"{name}, delayed", "beats TE's delayed"] == "pass"
    assert found[f"{name}, block", "≥ 1.15x TE's block"] == "not measured"
    assert found["Host, forward and backward, delayed", "≤ 3x nn.Linear"] == "pass"
    # 86 / 70 = 1.229 and 104 / 70 = 1.486; the captured step is no rival of one that is not.
    assert found["ViT-Huge step, batch 32", "≥ 1.22x BF16 compiled"] == "pass"
    assert found["ViT-Huge step, batch 32", "≥ 1.45x BF16 eager"] == "pass"
    assert found["ViT-Huge step, batch 32, peak memory", "≤ 0.80x BF16 compiled"] == "pass"
    assert found["Llama layers step", "≥ 1.40x BF16 compiled"] == "not measured"
    assert found["ViT-Huge, largest batch in 20 GiB", "told"] == "reported"


def test_every_target_has_its_derivation_and_a_line_of_its_own() -> None:
    lines = [(target.what, target.target) for target in TARGETS]
    assert len(set(lines)) == len(lines)
    assert all(target.derivation for target in TARGETS)
    assert found_of(made.whole(), "Llama layers, prefill") == "pass"
    others = [row for row in made.whole() if row["kind"] != "inference"]
    served = [row["what"] for row in target_rows(others) if "section inference was not asked for" in row["reason"]]
    assert served == [
        "Llama layers, prefill",
        "GPT-2 small, prefill",
        "Llama layers, decoding, first token, loading",
        "GPT-2 small, decoding, first token, loading",
    ]


def found_of(rows: list[dict[str, Any]], what: str) -> str:
    return next(row["verdict"] for row in target_rows(rows) if row["what"] == what)


def test_nothing_is_judged_where_fp8_is_emulated() -> None:
    rows = [made.run(native=False), *made.whole()[1:]]
    judged = target_rows(rows)
    assert {row["verdict"] for row in judged} == {"not measured"}
    assert {row["reason"] for row in judged} == {"FP8 is emulated on this device"}


@pytest.mark.parametrize(("ms", "verdict"), [(5.5, "pass"), (5.501, "miss")])
def test_a_time_is_within_its_target_or_not(ms: float, verdict: str) -> None:
    assert LinearTime("octavo-delayed", SHAPE)([made.linear("octavo-delayed", ms, target_ms=5.5)]).verdict == verdict


@pytest.mark.parametrize(
    ("own", "margin", "verdict"), [(5.0, 0.0, "miss"), (4.99, 0.0, "pass"), (4.5, 0.15, "miss"), (4.3, 0.15, "pass")]
)
def test_a_peer_is_beaten_by_the_margin(own: float, margin: float, verdict: str) -> None:
    rows = [made.linear("octavo-block", own), made.linear("te-block", 5.0)]
    assert BeatsPeer("octavo-block", "te-block", SHAPE, margin)(rows).verdict == verdict


def test_figures_of_two_methods_are_not_compared() -> None:
    kernels = {"method": "sum of kernels"}
    rows = [made.linear("octavo-delayed", 1.0), made.linear("te-delayed", 2.0, **kernels)]
    rule = BeatsPeer("octavo-delayed", "te-delayed", SHAPE)
    assert rule(rows).verdict == "not measured"
    assert "two methods" in rule(rows).reason
    # With a twin by the peer's method there is something to compare, and it decides.
    twin = made.linear("octavo-delayed-kernels", 3.0, **kernels)
    assert rule([*rows, twin]).verdict == "miss"


def test_what_lacks_is_named_with_its_reason() -> None:
    rows = [made.linear("te-delayed", None), made.linear("octavo-delayed", 1.0)]
    assert "no kernel image" in BeatsPeer("octavo-delayed", "te-delayed", SHAPE)(rows).reason
    assert "not asked for" in LinearTime("octavo-delayed", SHAPE)([]).reason
    out_of_time = made.linear("bf16", None) | {"status": "skipped", "reason": "time limit"}
    assert LinearTime("octavo-delayed", SHAPE)([out_of_time]).reason == "Linear 8192 x 768 x 3072: time limit"
    assert (
        BeatsPeer("octavo-delayed", "te-delayed", SHAPE)([out_of_time]).reason == "Linear 8192 x 768 x 3072: time limit"
    )
    assert "were not measured" in LinearTime("octavo-delayed", SHAPE)([made.linear("octavo-delayed", 1.0)]).reason
    rule = StepSpeed("vit", "bf16", 1.0)
    assert rule([made.step("octavo-current", 1.0), made.step("bf16", None)]).reason == "bf16: time limit"
    assert rule([made.step("octavo-current", 1.0)]).reason == "bf16 was not asked for in this run"
    assert rule([made.step("octavo-current", None), made.step("bf16", 1.0)]).reason == "Octavo: time limit"
    assert rule([made.step("bf16", 1.0)]).reason == "Octavo was not asked for in this run"


def test_a_step_is_judged_against_the_fastest_reference() -> None:
    rows = [made.step("bf16-compiled", 90.0), made.step("bf16-compiled", 80.0, repeat=True)]
    verdict = StepSpeed("vit", "bf16-compiled", 1.22)([*rows, made.step("octavo-current", 70.0)])
    assert verdict.measured.startswith("1.143x")
    assert verdict.verdict == "miss"


def test_a_captured_step_is_judged_against_the_faster_of_the_reference_and_its_capture() -> None:
    rule = StepSpeed("vit", "bf16-compiled", 1.22)
    rows = [made.step("bf16-compiled", 90.0), made.step("octavo-delayed-compiled-captured", 70.0)]
    assert rule(rows).reason == "octavo-delayed-compiled-captured against bf16-compiled"
    rows += [made.step("bf16-compiled-captured", 84.0), made.step("octavo-current", 80.0)]
    verdict = rule(rows)
    assert (verdict.measured, verdict.verdict) == ("1.200x (70.0 against 84.0 ms)", "miss")
    assert verdict.reason == "octavo-delayed-compiled-captured against bf16-compiled-captured"
    # A graph of BF16's is no reference of what runs without one.
    rows[1] = made.step("octavo-delayed-reduced", 72.0)
    assert rule(rows).measured == "1.250x (72.0 against 90.0 ms)"


def test_memory_is_that_of_the_variant_that_is_judged_by_its_speed() -> None:
    rows = [made.step("bf16-compiled", 90.0), made.step("octavo-current", 80.0, peak_gib=10.0)]
    rows.append(made.step("octavo-delayed-compiled", 70.0, peak_gib=17.0))
    verdict = StepMemory("vit", "bf16-compiled", 0.80, 1.22)(rows)
    assert verdict.measured.startswith("0.850")
    assert verdict.verdict == "miss"
    assert "least octavo-current 10.00" in verdict.reason


def test_memory_is_the_least_of_the_variants_that_are_fast_enough() -> None:
    rows = [made.step("bf16-compiled", 90.0), made.step("octavo-delayed-reduced", 65.0, peak_gib=17.0)]
    rows.append(made.step("octavo-delayed-lean-reduced", 73.0, peak_gib=15.9))
    verdict = StepMemory("vit", "bf16-compiled", 0.80, 1.22)(rows)
    assert (verdict.measured, verdict.verdict) == ("0.795 (15.90 of 20.00 GiB)", "pass")
    assert verdict.reason == "octavo-delayed-lean-reduced in 73.0 ms; least octavo-delayed-lean-reduced 15.90"
    rows[-1] = made.step("octavo-delayed-lean-reduced", 74.0, peak_gib=15.9)
    assert StepMemory("vit", "bf16-compiled", 0.80, 1.22)(rows).measured.startswith("0.850")
    # Under a graph it is as fast as asked where it is so beside BF16's under one.
    rows += [made.step("octavo-delayed-lean-compiled-captured", 68.0, peak_gib=15.8)]
    assert StepMemory("vit", "bf16-compiled", 0.80, 1.22)(rows).measured.startswith("0.790")
    rows += [made.step("bf16-compiled-captured", 80.0, peak_gib=19.0)]
    assert StepMemory("vit", "bf16-compiled", 0.80, 1.22)(rows).measured.startswith("0.850")


def test_where_the_fastest_has_no_peak_the_others_are_judged_by_the_worst_of_them() -> None:
    lacking = made.step("octavo-delayed-reduced", 70.0, peak_gib=None, note="no peak memory: counted too late")
    rows = [made.step("bf16-compiled", 90.0), lacking]
    rule = StepMemory("vit", "bf16-compiled", 0.80, 1.22)
    assert rule(rows).reason == "octavo-delayed-reduced has no peak memory (counted too late)"
    rows += [made.step("octavo-current", 80.0, peak_gib=15.0), made.step("octavo-delayed", 80.0, peak_gib=17.0)]
    verdict = rule(rows)
    assert (verdict.measured, verdict.verdict) == ("0.850 (17.00 of 20.00 GiB)", "miss")
    assert verdict.reason == (
        "octavo-delayed-reduced has no peak memory (counted too late); the most of the others: octavo-delayed 17.00;"
        " least octavo-current 15.00"
    )


def test_without_any_peak_memory_the_row_that_lacks_it_is_named() -> None:
    rule = StepMemory("vit", "bf16-compiled", 0.80, 1.22)
    rows = [made.step("bf16-compiled", 90.0, peak_gib=None), made.step("octavo-delayed", 80.0)]
    assert rule(rows).reason == "bf16-compiled has no peak memory (none is counted on this device)"
    assert rule([*rows, made.step("bf16-compiled", 91.0, repeat=True)]).measured == "1.000 (20.00 of 20.00 GiB)"
    assert rule(rows[1:]).reason == "bf16-compiled was not asked for in this run"
    assert rule(rows[:1]).reason == "Octavo was not asked for in this run"


def test_the_compilation_of_the_variant_that_is_judged_by_its_speed_counts() -> None:
    rows = [made.step("bf16-compiled", 1.0, warm_s=10.0), made.step("octavo-current-compiled", 0.9, warm_s=14.0)]
    assert WarmUp("vit", 1.3)(rows).verdict == "miss"
    verdict = WarmUp("vit", 1.3)([*rows, made.step("octavo-delayed-reduced", 0.8, warm_s=12.0)])
    assert (verdict.verdict, verdict.measured) == ("pass", "1.20x (12.0 against 10.0 s)")
    eager = WarmUp("vit", 1.3)([*rows, made.step("octavo-delayed", 0.8, warm_s=1.0)])
    assert eager.reason == "octavo-delayed, the fastest without CUDA graphs, is not compiled"
    assert WarmUp("vit", 1.3)(rows[:1]).reason == "Octavo was not asked for in this run"
    lacking = made.step("bf16-compiled", None)
    assert WarmUp("vit", 1.3)([lacking, *rows[1:]]).reason == "bf16-compiled: time limit"


def test_a_compilation_that_found_its_blocks_compiled_is_not_judged() -> None:
    rows = [made.step("bf16-compiled", 1.0, warm_s=10.0), made.step("octavo-delayed-compiled", 0.9, warm_s=14.0)]
    rows.append(made.step("octavo-delayed-reduced", 0.8, warm_s=12.0))
    verdict = WarmUp("vit", 1.3)(rows)
    assert verdict.verdict == "not measured"
    assert verdict.reason == "octavo-delayed-reduced: octavo-delayed-compiled had compiled the same blocks before"
    # Those of another model, or of other casts, are other blocks.
    rows[1] = made.step("octavo-delayed-compiled", 0.9, "llama")
    assert WarmUp("vit", 1.3)(rows).verdict == "pass"
    rows[1] = made.step("octavo-delayed-lean-compiled", 0.9)
    assert WarmUp("vit", 1.3)(rows).verdict == "pass"


def test_a_cast_is_judged_at_the_largest_shape_and_told_at_all() -> None:
    rows = [made.cast("delayed", 0.5, (8192, 768)) | {"of_same_copy": 0.97}, made.cast("delayed", 0.92)]
    verdict = CastRate("delayed", 0.90)(rows)
    assert verdict.verdict == "pass"
    assert verdict.measured == "92.0 % of the ceiling (3.68 of 4.00 TB/s) at 16384 x 8192"
    assert verdict.reason == "of a copy of the same matrix: 8192 x 768 97 %, 16384 x 8192 92 %"
    larger = made.cast("delayed", 0.89, (16384, 14336))
    assert CastRate("delayed", 0.90)([*rows, larger]).verdict == "miss"
    assert CastRate("delayed", 0.90)([]).reason == "the cast was not asked for in this run"


def test_host_time_names_the_peers() -> None:
    rows = [made.host("octavo-delayed", 600.0, 3.2), made.host("te-delayed", 1500.0, 7.9)]
    verdict = HostRatio("octavo-delayed", 3.0)(rows)
    assert (verdict.verdict, verdict.reason) == ("miss", "te-delayed 7.9x")


LAYER = (1024, 8, 768, 3072, 12)


def test_a_transformer_layer_is_judged_against_the_faster_of_both_in_bf16() -> None:
    rows = [made.layer("bf16", 17.0), made.layer("bf16-composed", 16.0), made.layer("te-bf16", 15.0)]
    rows += [made.layer("octavo-current", 10.0), made.layer("octavo-delayed", 8.0)]
    # 16 / 8; a graphed one is no rival, and another shape's is none.
    rows += [made.layer("octavo-delayed-graphed", 1.0), made.layer("octavo-block", 1.0, shape=[1, 1, 1, 1, 1])]
    verdict = LayerSpeed(LAYER, least=2.0)(rows)
    assert verdict.verdict == "pass"
    assert verdict.measured == "2.000x (8 against 16 ms)"
    assert verdict.reason.startswith("octavo-delayed against bf16-composed; in ms: bf16 17, te-bf16 15, octavo-current")
    assert LayerSpeed(LAYER, least=2.01)(rows).verdict == "miss"


def test_a_small_layer_beats_the_peers_fp8_and_is_graphed_beside_bf16_graphed() -> None:
    rows = [made.layer("te-bf16", 3.0), made.layer("te-delayed", 8.0), made.layer("te-block", 7.0)]
    assert LayerSpeed(LAYER, peer="te")([*rows, made.layer("octavo-current", 6.9)]).verdict == "pass"
    assert LayerSpeed(LAYER, peer="te")([*rows, made.layer("octavo-current", 7.0)]).verdict == "miss"
    graphed = [made.layer("bf16-graphed", 1.1), made.layer("bf16", 0.1), made.layer("octavo-delayed-graphed", 1.0)]
    assert LayerSpeed(LAYER, "graphed", 1.10)(graphed).verdict == "pass"
    assert LayerSpeed(LAYER, "graphed", 1.11)(graphed).verdict == "miss"


def test_of_a_layer_too_what_lacks_is_named() -> None:
    rule = LayerSpeed(LAYER, peer="te")
    assert rule([]).reason == "the layer was not asked for in this run"
    own = made.layer("octavo-current", 6.0)
    assert rule([own, made.layer("te-delayed", None)]).reason == "te-delayed: time limit"
    assert rule([own, made.layer("te-bf16", 6.0)]).reason == "it has no FP8"


def test_a_step_of_layers_is_judged_against_the_fastest_reference_of_both_models() -> None:
    rule = StepSpeed("vit-layers", "bf16-compiled", 1.30, beside=("vit",))
    rows = [made.step("octavo-delayed-compiled", 60.0, "vit-layers"), made.step("bf16-compiled", 90.0, "vit-layers")]
    assert rule(rows).verdict == "pass"
    verdict = rule([*rows, made.step("bf16-compiled", 75.0), made.step("octavo-delayed-compiled", 10.0)])
    assert (verdict.verdict, verdict.measured) == ("miss", "1.250x (60.0 against 75.0 ms of vit)")

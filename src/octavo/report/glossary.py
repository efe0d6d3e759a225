"""The terms that the page uses, in the words of a reader who has not met FP8."""

from __future__ import annotations

TERMS = [
    ("amax", "The largest absolute value of a tensor (or of a row or block of it). The scale follows from it."),
    (
        "BF16",
        "A 16-bit format with the range of fp32 and 8 bits of precision: what models are usually trained in, "
        "and what everything here is compared with.",
    ),
    (
        "Block scaling",
        "One scale for every 128 values or every 128 by 128 block, so that an outlier spoils only its block.",
    ),
    ("Current scaling", "The scale is computed from the tensor at hand, just before it is cast. Also called dynamic."),
    ("Decode", "Generating tokens one by one after the prompt, each reusing the KV cache."),
    (
        "Delayed scaling",
        "The scale comes from amaxes of earlier steps, so it is known before the tensor is. After a spike it lags.",
    ),
    ("E4M3, E5M2", "The two 8-bit floats: 4 exponent and 3 mantissa bits (finer), or 5 and 2 (wider range)."),
    (
        "Emulated",
        "Computed with the same 8-bit values, but in fp32 arithmetic because the device has no FP8 units. "
        "The results count; the time taken does not.",
    ),
    (
        "First token",
        "The time from a prompt to the first token of the answer; also called time to first token, or TTFT.",
    ),
    ("INT8, INT4", "Eight- and four-bit integers with scales: the usual alternatives to FP8 when serving."),
    ("MXFP8", "FP8 with one power-of-two scale for every 32 values, as the OCP microscaling standard has it."),
    ("Perplexity", "exp of the mean loss per token on text that was not trained on. Lower is better."),
    ("Prefill", "Reading the prompt, all of its tokens at once."),
    ("PTQ", "Post-training quantization: casting a finished model without training it further."),
    (
        "Recovered share",
        "How much of the perplexity lost without training is gone after fine-tuning in FP8: "
        "1 − gap to BF16 after / change before. Both models had the same number of steps.",
    ),
    ("Row-wise scaling", "One scale for each token and for each output channel."),
    ("Saturation", "The share of values beyond the format's largest value; they are set to it."),
    ("Scale", "value = code × scale: the factor between an 8-bit code and the number that it stands for."),
    (
        "SQNR",
        "Signal to quantization noise: 20 dB is an error of 10 % (root mean square), 30 dB of 3 %. Higher is better.",
    ),
    ("Underflow", "The share of non-zero values that become zero in the cast."),
]

"""CUDA graphs and kernel times: the device's side of `timing`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from octavo.bench.timing import KERNELS, Call, Measure

# Where torch does not say how large the L2 is: as large as any has been (Blackwell's 126 MB).
_LARGE_L2 = 126 << 20


class CudaGraphs:
    """Captures calls into a CUDA graph on a stream of their own, and times a replay by events."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """Run each call once outside, then capture all of them in order; what they return is dropped."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in dict.fromkeys(calls):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # A graph that nobody holds any more but a cycle must not be freed while another one is captured.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return graph.replay

    def seconds(self, replay: Call) -> float:
        """Between an event before and one after a replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class KernelTimer:
    """The sum of the times of a call's kernels, for what cannot be captured; gaps between them do not count.

    A call costs a profiler session, and its kernels run on a device that rests between them.
    """

    method = KERNELS

    def __init__(self, repeats: int = 4) -> None:
        self._repeats = repeats

    def prepare(self, calls: Sequence[Call]) -> Measure:
        """Each call `repeats` times under the profiler."""

        def measure() -> float:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=activities, acc_events=True) as profile:
                for _ in range(self._repeats):
                    for call in calls:
                        call()
                torch.cuda.synchronize()
            spent = kernel_microseconds(profile.key_averages())
            if not spent:
                raise RuntimeError("the profiler recorded no kernel: it may lack the permission to trace the device")
            return spent / 1e6 / (self._repeats * len(calls))

        return measure


def kernel_microseconds(events: Sequence[Any]) -> float:
    """The device time of a profile's kernels and copies: entries of the device itself, without annotations.

    An operator's own entry repeats the time of the kernels that it started, so it is left out.
    """
    return float(
        sum(
            event.self_device_time_total
            for event in events
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        )
    )


def l2_bytes(device: torch.device) -> int:
    """The size of the device's L2 cache; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _LARGE_L2))


def num_sets(bytes_of_one: int, cache: int, most: int = 8) -> int:
    """How many sets of inputs must take turns so that none is still in a cache of `cache` bytes when it is next used.

    All of them together are at least twice the cache.
    """
    return max(1, min(most, -(-2 * cache // max(1, bytes_of_one))))

"""Launcher: a variant is compiled once a key and launched by address; keys tell apart whatever Triton does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.kernels.launcher import Key, Launch, Launcher, common_alignment, specialization

NUMBERS = [0, 1, 2, 3, 15, 16, 17, 31, 32, 48, 4096, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 16, 2**40 + 1]


def test_integers_are_told_apart_as_triton_does() -> None:
    triton = pytest.importorskip("triton")
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    def by_triton(number: int) -> object:
        return native_specialize_impl(BaseBackend, number, False, True, True)

    for a, b in product(NUMBERS, repeat=2):
        assert (specialization(a) == specialization(b)) == (by_triton(a) == by_triton(b)), (triton.__version__, a, b)
    assert specialization(16, 1) == (*specialization(16), *specialization(1)) != specialization(1, 16)


def test_the_common_alignment_of_numbers_is_a_power_of_two_that_leaves_none_of_them_as_one() -> None:
    literal = {
        (8184, 8184): 8, (8188, 8188): 4, (8190, 8190): 2, (8191, 8191): 1, (64, 72): 8, (64, 0): 16, (4096, 4096): 16,
        (16, 16): 8, (8, 16): 4, (2, 2): 1, (1, 1): 1, (48, 2**31): 1, (48, 2**31 - 16): 16,
    }  # fmt: skip
    assert {numbers: common_alignment(*numbers) for numbers in literal} == literal
    # A symbol of traced code, say.
    assert common_alignment(64, 64.0) == 1


class Device:
    """Where fake tensors lie, and what is current."""

    current = 0
    visited: list[int]


class FakeKernel:
    """Stands for a function made by `triton.jit`: notes what it compiles and what its variants launch."""

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*arguments: Any, num_warps: int) -> Any:
            number = len(self.compiled)
            self.compiled.append((Device.current, grid, num_warps, arguments))
            if self.interpreted:
                return None

            def run(x: int, y: int, z: int, stream: int, function: str, packed: str, *rest: Any) -> None:
                assert rest[:3] == (None, None, None), "launch metadata and hooks"
                self.launched.append((function, packed, Device.current, stream, (x, y, z), rest[3:]))

            return SimpleNamespace(run=run, function=f"function {number}", packed_metadata=f"metadata {number}")

        return compile_and_run


def fake_tensor(address: int, index: int = 0) -> Any:
    return SimpleNamespace(get_device=lambda: index, data_ptr=lambda: address)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several CUDA devices, each with its stream."""
    Device.current, Device.visited = 0, []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, Device.current = Device.current, index
        Device.visited.append(index)
        yield
        Device.current = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: Device.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)


@pytest.mark.usefixtures("cards")
def test_a_key_compiles_once_and_then_launches_by_address() -> None:
    kernel = FakeKernel()
    launch = Launcher(kernel)
    first = fake_tensor(0x100), fake_tensor(0x200)
    launch(3, "key", first, (5, 7), (True, 64), 4)
    assert kernel.compiled == [(0, (3,), 4, (*first, 5, 7, True, 64))]
    assert kernel.launched == [], "the first call runs through Triton itself"
    launch(9, "key", (fake_tensor(0x300), fake_tensor(0x400)), (6, 8), (True, 64), 4)
    launch(2, "key", first, (5, 7), (True, 64), 4)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [
        ("function 0", "metadata 0", 0, 1000, (9, 1, 1), (0x300, 0x400, 6, 8, True, 64)),
        ("function 0", "metadata 0", 0, 1000, (2, 1, 1), (0x100, 0x200, 5, 7, True, 64)),
    ]


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("scratch", [0, 64])
def test_a_variant_of_tritons_is_entered_with_what_its_own_launcher_hands_on(scratch: int) -> None:
    """Of a kernel that wants scratch memory the launcher itself is called, which allocates it."""
    pytest.importorskip("triton")
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import _allocation

    entered: list[tuple[Any, ...]] = []
    run = CudaLauncher.__new__(CudaLauncher)  # without its C code, which needs a compiler and a driver
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size, run.global_scratch_align = scratch, 16
    run.profile_scratch_size = run.profile_scratch_align = 0
    run.launch = lambda *arguments: entered.append(arguments)
    variant = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    launch = Launcher({(9,): lambda *arguments, num_warps: variant})
    launch(9, "key", (fake_tensor(0x100),), (5,), (True,), 4)
    assert entered == [], "the first call runs through Triton itself"
    before = _allocation._allocator.set(lambda *wanted: wanted)
    try:
        launch(9, "key", (fake_tensor(0x200),), (6,), (True,), 4)
        run(9, 1, 1, 1000, "function", "metadata", None, None, None, 0x200, 6, True)
    finally:
        _allocation._allocator.reset(before)
    ours, theirs = entered
    assert ours == theirs
    assert ours[7] == ((9 * scratch, 16, 1000) if scratch else None)


def test_equal_parts_are_one_key() -> None:
    assert Key.of("bf16", (1, 2)) is Key.of("bf16", (1, 2))
    assert len({Key.of("bf16", 1), Key.of("bf16", 2), Key.of("bf16")}) == 3


@pytest.mark.usefixtures("cards")
def test_two_different_keys_never_share_a_variant() -> None:
    kernel = FakeKernel()
    launch = Launcher(kernel)
    keys = [("bf16", True), ("bf16", False), ("fp16", True), (("bf16", True),), "bf16"]
    calls = list(product(keys, (4, 8), (0, 1)))
    for _ in range(2):
        for key, warps, index in calls:
            launch(1, key, (fake_tensor(16, index),), (1,), (key, warps, index), warps)
    # Each compiled once, on its device, in the first round; each found again in the second.
    assert [(device, warps, arguments[2:]) for device, _, warps, arguments in kernel.compiled] == [
        (index, warps, (key, warps, index)) for key, warps, index in calls
    ]
    assert [(function, device, stream) for function, _, device, stream, *_ in kernel.launched] == [
        (f"function {number}", index, 1000 + index) for number, (_, _, index) in enumerate(calls)
    ]
    assert Device.current == 0
    assert set(Device.visited) == {1}, "the current device is not entered again"


@pytest.mark.usefixtures("cards")
def test_two_launchers_share_nothing() -> None:
    kernels = FakeKernel(), FakeKernel()
    launchers = [Launcher(kernel) for kernel in kernels]
    for launch in launchers * 2:
        launch(1, "key", (fake_tensor(16),), (), (), 4)
    assert [(len(kernel.compiled), len(kernel.launched)) for kernel in kernels] == [(1, 1), (1, 1)]


def test_the_interpreter_runs_every_call_through_triton() -> None:
    kernel = FakeKernel(interpreted=True)
    launch = Launcher(kernel)
    for _ in range(3):
        launch(2, "key", (torch.ones(2),), (5,), (True,), 4)
    assert len(kernel.compiled) == 3
    assert kernel.launched == []


@pytest.mark.usefixtures("cards")
def test_a_launch_asks_its_launcher_once_and_enters_the_variant_then() -> None:
    kernel = FakeKernel()
    launcher = Launcher(kernel)
    launch = Launch(launcher, 0, 5, "key", (7,), ("constant",), 4)
    for address in (16, 32, 48):
        launch((fake_tensor(address),))
    assert len(kernel.compiled) == 1
    # The first ran as it was compiled.
    assert [(grid, rest) for *_, grid, rest in kernel.launched] == [
        ((5, 1, 1), (address, 7, "constant")) for address in (32, 48)
    ]
    # Another of the same key finds what was compiled.
    Launch(launcher, 0, 2, "key", (7,), ("constant",), 4)((fake_tensor(64),))
    assert len(kernel.compiled) == 1
    assert kernel.launched[-1][-2:] == ((2, 1, 1), (64, 7, "constant"))


@pytest.mark.usefixtures("cards")
def test_a_launch_under_the_interpreter_asks_its_launcher_each_time() -> None:
    kernel = FakeKernel(interpreted=True)
    launch = Launch(Launcher(kernel), 0, 5, "key", (), (), 4)
    for _ in range(3):
        launch((fake_tensor(16),))
    assert len(kernel.compiled) == 3

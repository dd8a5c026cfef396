"""Averages by the module of an installed wheel, on the device of the fake driver (tests/cuda) and on the CPU, whose
bits must be equal: updates, swaps, averages on the host, a capture and its replays. `python -S
on_device.py FOLDER...` imports from these folders alone. Prints what compiled the kernels.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

sys.path[:0] = sys.argv[1:]

import numpy as np  # noqa: E402

import shardow  # noqa: E402
from shardow import _core  # noqa: E402

SIZE, STEPS = 1003, 4
#: dtype of weights, of averages, and NumPy's of that size.
DTYPES = [("BF16", "F32"), ("F32", "F32"), ("F16", "F32"), ("BF16", "BF16"), ("F64", "F64")]
Place = tuple[str, int, int]
HOST: Place = ("cpu", 0, 0)
WIDTHS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F64": np.uint64}


class Driver:
    """The fake driver's functions, called as by a user whose thread has device 0 current."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.fake_stream.restype = ctypes.c_void_p
        self.stream = ctypes.c_void_p(self._library.fake_stream(0, 1))
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self._library, name)(*arguments) == 0, name


def bits(dtype: str, seed: int) -> Any:
    """Returns numbers in (-1, 1) of that dtype, as integers of its size."""
    values = np.random.default_rng(seed).uniform(-1, 1, SIZE)
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]).view(WIDTHS[dtype])


class Still:
    """Weights that stay where they are, of one rank."""

    def places(self, strict: bool) -> list[Any]:
        return []

    def scatter(self) -> None:
        pass

    def written(self) -> None:
        pass


class Training:
    """One weight and its average, each in a place: device, index, stream."""

    def __init__(self, dtypes: tuple[str, str], weight_on: Place, average_on: Place) -> None:
        self._dtype = dtypes[0]
        self.weight, self.average = bits(dtypes[0], 0), np.zeros(SIZE, WIDTHS[dtypes[1]])
        self.views = [
            _core.TensorView("p", dtype, _core.Region.whole([SIZE]), memory.ctypes.data, *place)
            for dtype, memory, place in zip(dtypes, (self.weight, self.average), (weight_on, average_on), strict=True)
        ]
        rounding = _core.Rounding.stochastic if dtypes[1] == "BF16" else _core.Rounding.nearest
        options = _core.AverageOptions(
            schedules=[shardow.schedules.constant(0.9)], dtype=dtypes[1], rule=_core.Rule.lerp, rounding=rounding,
            non_finite=_core.NonFinite.hold, update_every=1, start_step=0, seed=7, num_threads=1,
        )  # fmt: skip
        self.ema = _core.Average([self.views[0]], [[self.views[1]]], options)
        self.ema.reset()
        self.ema.wait()

    def step(self, number: int) -> None:
        self.ema.finish_reading()
        self.weight[:] = bits(self._dtype, number)
        self.ema.update()
        self.ema.wait()

    def swapped(self) -> tuple[bytes, bytes]:
        """Returns weights and averages in the middle of a swap."""
        ranks = _core.SwapRanks(_core.solo(), False, 60.0, "")
        self.ema.swap_in(self.ema.prepare_swap(0), Still(), ranks)
        middle = (self.weight.tobytes(), self.average.tobytes())
        self.ema.swap_out(Still(), ranks, "swap_out()")
        return middle


def main() -> None:
    driver = Driver()
    device = ("cuda", 0, driver.stream.value or 0)
    for dtypes in DTYPES:
        of_cpu = Training(dtypes, HOST, HOST)
        trainings = [Training(dtypes, device, average_on) for average_on in (device, HOST)]
        for number in range(1, STEPS):
            for training in (of_cpu, *trainings):
                training.step(number)
        middle = of_cpu.swapped()
        for training in trainings:
            assert training.average.tobytes() == of_cpu.average.tobytes(), dtypes
            assert training.swapped() == middle, dtypes
            assert training.weight.tobytes() == of_cpu.weight.tobytes(), dtypes
        replay(driver, of_cpu, trainings[0])
    print(*_core.cuda_compiler()[:2])


def replay(driver: Driver, of_cpu: Training, of_device: Training) -> None:
    """Captures an update, and replays it for steps that the CPU makes one by one."""
    graph, launched = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuStreamBeginCapture_v2", driver.stream, 0)
    of_device.ema.update()
    driver.call("cuStreamEndCapture", driver.stream, ctypes.byref(graph))
    driver.call("cuGraphInstantiateWithFlags", ctypes.byref(launched), graph, ctypes.c_ulonglong(0))
    for number in range(STEPS, 2 * STEPS):
        of_cpu.step(number)
        of_device.weight[:] = of_cpu.weight
        of_device.ema.prepare_replay()
        driver.call("cuGraphLaunch", launched, driver.stream)
    assert of_device.average.tobytes() == of_cpu.average.tobytes()


main()

"""Rules of the emulated driver without which other tests would pass whatever the code does."""

from __future__ import annotations

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import NVML_ERROR_GPU_IS_LOST as LOST
from tests.emulation.node import EmulatedNode
from tests.emulation.programs import NVML, Program, run

CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901


def test_a_lost_device_does_not_affect_others_and_stays_lost_in_open_sessions(node: EmulatedNode) -> None:
    code = """
handle = nvml.nvmlDeviceGetHandleByIndex(0)
def look():
    say([code(nvml.nvmlDeviceGetMemoryInfo, handle), code(nvml.nvmlDeviceGetHandleByIndex, 0), code(memory, 1),
         nvml.nvmlDeviceGetCount()]); wait()
look(); look(); look()
nvml.nvmlShutdown(); nvml.nvmlInit()
look()
"""
    with Program(node, code, NVML) as program:
        assert program.heard() == [0, 0, 0, 2]
        node.lose_device(0)
        program.go()
        assert program.heard() == [LOST, LOST, 0, 2]
        node.heal_device(0)
        program.go()
        assert program.heard() == [LOST, LOST, 0, 2]
        program.go()
        assert program.heard() == [0, 0, 0, 2]


def test_unsafe_calls_of_any_thread_fail_and_invalidate_a_capture(node: EmulatedNode) -> None:
    code = """
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
def capture(mode, meanwhile):
    cuda.cudaStreamBeginCapture(stream, mode)
    thread = threading.Thread(target=meanwhile); thread.start(); thread.join()
    status = ctypes.c_int(); cuda.cudaStreamIsCapturing(stream, ctypes.byref(status))
    return status.value, cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
answers = []
allocate = lambda: answers.append(malloc(2 << 20)[0])
GLOBAL, LOCAL = 0, 1
captures = [capture(GLOBAL, lambda: None), capture(GLOBAL, allocate), capture(LOCAL, allocate)]
say([captures, answers, malloc(2 << 20)[0]])
"""
    assert run(node, code) == [[[1, 0], [2, CAPTURE_INVALIDATED], [1, 0]], [CAPTURE_UNSUPPORTED, 0], 0]


def test_torch_divides_the_work_of_topk_among_blocks(start_torch: StartTorch) -> None:
    """It takes the limits of the device for that, and never ends where one of them is 0."""
    code = "result = [list(torch.topk(torch.empty(4, size, device='cuda'), 20).values.shape) for size in (128, 50_000)]"
    assert start_torch().exec(code) == [[4, 20], [4, 20]]

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpumem_client.allocator.oom_message import parse_oom_message
from gpumem_client.hooks.out_of_memory import is_out_of_memory
from gpumem_toolkit.oom.advice import advise
from gpumem_toolkit.oom.diagnosis import NOTE_PREFIX, OomDiagnosis
from gpumem_toolkit.oom.growth import BlockHistory
from gpumem_toolkit.oom.guard import clear_frames, oom_guard
from gpumem_toolkit.oom.known_causes import CAUSES, Cause
from gpumem_toolkit.oom.phase import Place, origin_of, phase_of
from gpumem_toolkit.oom.values import OomValues

GIB, MIB = 1 << 30, 1 << 20

NOW = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 1 has a total capacity of 7.75 GiB of which 2.00 GiB is free."
    " Process 99999 has 1024.00 MiB memory in use. Process 5 has 17179869184.00 GiB memory in use."
    " Including non-PyTorch memory, this process has 4.75 GiB memory in use. 5.42 GiB allowed;"
    " Of the allocated memory 4.25 GiB is allocated by PyTorch, with 12.00 MiB allocated in private pools"
    " (e.g., CUDA Graphs), and 960.00 KiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is"
    " large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_all_values_of_the_text_are_parsed() -> None:
    read = parse_oom_message(NOW)
    assert (read.device, read.requested_bytes, read.total_bytes) == (1, 4 * GIB, int(7.75 * GIB))
    assert (read.free_bytes, read.process_bytes, read.allowed_bytes) == (2 * GIB, int(4.75 * GIB), round(5.42 * GIB))
    assert read.allocated_bytes == int(4.25 * GIB)
    assert read.reserved_bytes == int(4.25 * GIB) + 960 * 1024
    assert read.private_pools_bytes == 12 * MIB
    assert read.other_processes == ((99999, GIB),), "an impossible value is ignored"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("NCCL Error 1: unhandled cuda error, out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("DataLoader worker is killed: out of memory"), False),
        (MemoryError("CUDA out of memory"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


STEP, FORWARD = Place("__main__", "train_step"), Place("torch.nn.modules.module", "_call_impl")
BACKWARD = [Place("torch._tensor", "backward"), Place("torch.autograd.graph", "_engine_run_backward")]
OPTIMIZER = [Place("torch.optim.optimizer", "wrapper"), Place("torch.optim.adam", "_init_group")]


@pytest.mark.parametrize(
    ("places", "source_line", "expected"),
    [
        ([STEP, FORWARD, Place("torch.nn.modules.linear", "forward")], "x = linear(y)", ("forward", False)),
        ([STEP, *BACKWARD], "x = run_backward(y)", ("backward", False)),
        (
            [STEP, *BACKWARD, Place("torch.utils.checkpoint", "unpack_hook"), FORWARD],
            "x = linear(y)",
            ("backward", True),
        ),
        ([STEP, *OPTIMIZER], "x = zeros_like(y)", ("optimizer", False)),
        ([STEP, *BACKWARD, Place("__main__", "hook"), *OPTIMIZER], "x = zeros_like(y)", ("optimizer", False)),
        ([STEP, *OPTIMIZER, Place("__main__", "closure"), FORWARD], "x = linear(y)", ("forward", False)),
        ([STEP, Place("torch.optim.lr_scheduler", "step")], "x = step(y)", ("", False)),
        ([STEP], "x = x.to(device)", ("data transfer", False)),
        ([STEP], "x = x.half().cuda(non_blocking=True)", ("data transfer", False)),
        ([STEP], "x = y.sum(z.to)", ("", False)),
        ([STEP, FORWARD], "x = x.to(device)", ("forward", False)),
        (
            [STEP, Place("torch.nn.modules.module", "cuda"), Place("torch.nn.modules.module", "_apply")],
            "model.cuda()",
            ("model transfer", False),
        ),
        ([STEP], "x = empty(y)", ("", False)),
    ],
)
def test_frames_show_the_phase(places: list[Place], source_line: str, expected: tuple[str, bool]) -> None:
    assert phase_of(places, source_line) == expected


BASE = OomValues(requested=GIB, free=GIB // 2, total=8 * GIB, allocated=6 * GIB, reserved=6 * GIB, reclaimable=0)


def _with(**more: Any) -> OomValues:
    return replace(BASE, **more)


ADAMW = {"phase": "optimizer", "optimizer": "AdamW", "parameters": 2 * GIB}
RIGHT = [
    ("the cache would do", _with(reserved=7 * GIB, reclaimable=GIB), "clear"),
    ("the fraction forbids what is free", _with(free=4 * GIB, allowed=6 * GIB), "memory_fraction"),
    ("more than the device has", _with(requested=20 * GIB, phase="forward", batch_size=64, grown=GIB), "split_request"),
    ("half of the device in a model", _with(requested=5 * GIB, allocated=GIB, phase="forward"), "smaller_batch"),
    ("half of the device elsewhere", _with(requested=5 * GIB, allocated=GIB, phase=""), "split_request"),
    ("a sure leak", _with(leaked=3 * GIB, leak_per_step=MIB, other_processes=((9, 2 * GIB),)), "leak"),
    ("another process", _with(other_processes=((9, 2 * GIB),), phase="forward"), "other_process"),
    ("free memory in pieces", _with(reserved=7 * GIB, fragmented=GIB, phase="forward"), "expandable_segments"),
    (
        "forward, measured",
        _with(phase="forward", batch_size=64, grown=4 * GIB, batch_growth=6 * GIB, bytes_per_item=96 * MIB),
        "smaller_batch",
    ),
    ("forward, nothing measured", _with(phase="forward", batch_size=64, grown=4 * GIB), "smaller_batch"),
    (
        "backward, batch of one",
        _with(phase="backward", batch_size=1, grown=4 * GIB, gradients=True),
        "checkpointing",
    ),
    ("the optimizer's state", _with(**ADAMW, optimizer_state=GIB, optimizer_state_missing=3 * GIB), "optimizer_state"),
    ("on eight ranks", _with(**ADAMW, optimizer_state=GIB, optimizer_state_missing=3 * GIB, ranks=8), "shard"),
    ("the optimizer's temporaries", _with(**ADAMW, optimizer_state=4 * GIB), "optimizer_temporaries"),
    ("a batch on its way", _with(phase="data transfer", requested=5 * GIB), "pieces"),
    ("a model on its way", _with(phase="model transfer", parameters=12 * GIB), "half_precision"),
]


@pytest.mark.parametrize(("values", "kind"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT])
def test_the_first_advice_fits_the_values(values: OomValues, kind: str) -> None:
    advice = advise(values)
    assert advice[0].kind == kind
    ranks = [0 if each.enough else 1 if each.enough is None else 2 for each in advice]
    assert ranks == sorted(ranks), "advice that is enough comes first"
    text = str(OomDiagnosis(values, advice))
    assert text.startswith(NOTE_PREFIX)
    assert f"1. {advice[0]}" in text


@pytest.mark.parametrize(
    ("optimizer", "proposed", "enough"),
    [
        ({"optimizer": "AdamW", "optimizer_foreach": True, "batch_growth": 0}, "fused=True", True),
        ({"optimizer": "AdamW"}, "fused=True", None),
        ({"optimizer": "RMSprop", "optimizer_foreach": True}, "foreach=False", None),
        ({"optimizer": "AdamW", "optimizer_fused": True}, None, None),
        ({"optimizer": "RMSprop"}, None, None),
    ],
)
def test_no_optimizer_is_advised_to_work_as_it_works_already(
    optimizer: dict[str, Any], proposed: str | None, enough: bool | None
) -> None:
    values = _with(phase="optimizer", parameters=2 * GIB, optimizer_state=4 * GIB, **optimizer)
    advice = [each for each in advise(values) if each.kind == "optimizer_temporaries"]
    assert [each.enough for each in advice] == ([enough] if proposed else [])
    assert all(proposed in each.text for each in advice if proposed)


def test_small_fragmentation_or_a_small_process_ranks_after_a_smaller_batch() -> None:
    for more in ({"fragmented": 600 * MIB, "reserved": 8 * GIB}, {"other_processes": ((1, 600 * MIB),)}):
        values = _with(phase="forward", batch_size=64, grown=4 * GIB, **more)
        kinds = [each.kind for each in advise(values)]
        assert kinds[0] == "smaller_batch"
        assert {"expandable_segments", "other_process"} & set(kinds)


def test_the_expected_growth_of_the_block_counts_if_it_is_more_than_the_request() -> None:
    # this request lacked half a GiB, and the block needed four GiB more
    values = _with(
        phase="forward",
        other_processes=((1, GIB),),
        batch_size=64,
        grown=GIB,
        batch_growth=5 * GIB,
        bytes_per_item=80 * MIB,
    )
    assert values.short == int(3.5 * GIB)
    advice = advise(values)
    assert advice[0].kind == "smaller_batch"
    assert next(each for each in advice if each.kind == "other_process").enough is False


@pytest.mark.parametrize(
    ("batch", "enough", "first"),
    [
        ({}, None, "pieces"),
        ({"batch_size": 1 << 20}, None, "pieces"),
        ({"batch_size": 1 << 20, "batch_growth": 16 * GIB, "bytes_per_item": 16 << 10}, True, "pieces"),
        ({"batch_size": 1 << 20, "batch_growth": 240 * GIB, "bytes_per_item": 240 << 10}, False, "smaller_batch"),
    ],
    ids=["no batch", "nothing measured", "the request is all", "the rest does not fit"],
)
def test_a_change_of_one_operation_is_enough_only_if_the_rest_of_the_batch_fits(
    batch: dict[str, Any], enough: bool | None, first: str
) -> None:
    values = _with(phase="data transfer", requested=16 * GIB, free=7 * GIB, allocated=GIB // 4, grown=0, **batch)
    advice = advise(values)
    assert next(each for each in advice if each.kind == "pieces").enough is enough
    assert advice[0].kind == first


def test_advice_is_enough_only_if_earlier_runs_of_the_block_show_its_need() -> None:
    for values, kind in [row[1:] for row in RIGHT]:
        assert values.batch_growth is not None or not any(each.enough for each in advise(values)), kind


WITH_GRAPH = {"checkpointing", "mixed_precision", "offload", "accumulation", "shard"}


@pytest.mark.parametrize("phase", ["", "forward", "backward", "evaluate", "data transfer"])
def test_without_a_graph_nothing_is_advised_that_needs_one(phase: str) -> None:
    values = _with(phase=phase, batch_size=64, grown=4 * GIB, ranks=2)
    assert not {each.kind for each in advise(values)} & WITH_GRAPH
    if phase != "data transfer":
        assert {each.kind for each in advise(replace(values, gradients=True))} >= WITH_GRAPH


def test_expandable_segments_name_the_variable_that_every_release_reads() -> None:
    (advice,) = [each for each in advise(_with(reserved=7 * GIB, fragmented=GIB)) if each.kind == "expandable_segments"]
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in advice.text
    assert "PYTORCH_ALLOC_CONF" in advice.text.partition("PYTORCH_CUDA_ALLOC_CONF")[2]


class _Sized:
    """Stands for a tensor or a layer."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def _called(code: str, **variables: Any) -> list[Cause]:
    """Return the causes of an error in a function that has this module, name and these arguments."""
    module, function = code.split(":")
    namespace: dict[str, Any] = {"__name__": module}
    exec(f"def {function}({', '.join(variables)}): raise RuntimeError", namespace)
    with pytest.raises(RuntimeError) as caught:
        namespace[function](**variables)
    return list(origin_of(caught.value.__traceback__).causes)


KNOWN = [
    ("copy:deepcopy", {}, "host_copy"),
    ("torch.serialization:load", {}, "host_load"),
    ("safetensors.torch:load_file", {}, "host_load"),
    ("torch.optim.optimizer:load_state_dict", {}, "host_load"),
    ("torch.nn.modules.module:load_state_dict", {}, "assign"),
    ("transformers.modeling_utils:from_pretrained", {}, "load_dtype"),
    ("transformers.modeling_utils:cuda", {}, ""),
    ("torchmetrics.metric:wrapped_func", {}, "metric_on_host"),
    ("transformers.trainer:evaluation_loop", {}, "predictions_on_host"),
    ("transformers.trainer:training_step", {}, ""),
    ("diffusers.models.autoencoders.autoencoder_kl:_decode", {}, "tiling"),
    (
        "transformers.models.llama.modeling_llama:eager_attention_forward",
        {"query": _Sized(1, 8, 512, 64)},
        "fused_attention",
    ),
    ("transformers.models.llama.modeling_llama:eager_attention_forward", {"query": _Sized(1, 8, 1, 64)}, ""),
    ("torch.nn.functional:softmax", {"input": _Sized(2, 2048, 2048)}, "fused_attention"),
    ("torch.nn.functional:softmax", {"input": _Sized(2048, 10)}, ""),
    ("torch.nn.functional:cross_entropy", {"input": _Sized(2048, 50_000)}, "chunked_loss"),
    ("torch.nn.functional:cross_entropy", {"input": _Sized(2048, 1_000)}, ""),
    ("transformers.loss.loss_utils:ForCausalLMLoss", {}, "chunked_loss"),
    ("torch.nn.modules.linear:forward", {"self": _Sized(50_000, 64)}, "chunked_loss"),
    ("torch.nn.modules.linear:forward", {"self": _Sized(64, 50_000)}, ""),
    ("transformers.generation.utils:generate", {}, "cache_length"),
    ("vllm.v1.worker.gpu_model_runner:execute_model", {}, "cache_length"),
    ("torch.nn.modules.module:_call_impl", {"kwargs": {"past_key_values": object()}}, "cache_length"),
    ("torch.nn.modules.module:_call_impl", {"kwargs": {"past_key_values": None}}, ""),
]


@pytest.mark.parametrize(("code", "variables", "kind"), KNOWN)
def test_code_with_a_known_remedy_is_recognized(code: str, variables: dict[str, Any], kind: str) -> None:
    assert [cause.kind for cause in _called(code, **variables)] == [kind] * bool(kind)


def test_every_known_cause_is_recognized_and_has_a_text_of_its_own() -> None:
    assert {cause.kind for cause in CAUSES} == {kind for _, _, kind in KNOWN if kind}
    for cause in CAUSES:
        values = _with(phase=cause.phase or "forward", causes=(cause,))
        assert [each.text for each in advise(values) if each.kind == cause.kind] == [cause.text]


def test_expected_growth_is_a_line_through_measured_batches() -> None:
    history = BlockHistory()
    assert history.growth(8) is history.bytes_per_item() is None
    history.measured(10, 600)
    assert history.growth(20) == 1200
    history.measured(20, 1100)
    assert (history.growth(40), history.bytes_per_item()) == (2100, 50)
    history.measured(20, 1120)
    assert history.growth(20) == 1120, "the last measurement of a size counts"
    history.bounded(20, 1110, close=False)
    history.bounded(20, 5000, close=True)
    assert history.growth(20) == 1110, "the lowest bound of a size counts"


def test_a_distant_bound_counts_only_until_there_is_a_close_one() -> None:
    history = BlockHistory()
    history.bounded(8, 8000, close=False)
    history.bounded(4, 8000, close=False)
    assert (history.growth(16), history.bytes_per_item()) == (16000, 1000)
    history.bounded(4, 2000, close=True)
    assert (history.growth(16), history.bytes_per_item()) == (8000, 500)


def test_the_peak_of_a_larger_batch_is_not_predicted_from_sizes_whose_peak_is_the_optimizers() -> None:
    history = BlockHistory()
    for size, growth in ((1024, 1024), (2048, 512), (4096, 768), (8192, 1536), (16384, 3072)):
        history.measured(size, growth * MIB)
    assert history.growth(32768) == 6144 * MIB


def test_growth_from_run_to_run_is_a_leak_after_sixteen_runs() -> None:
    leaking, steady = BlockHistory(), BlockHistory()
    for run in range(30):
        leaking.started(GIB + run * 50 * MIB)
        steady.started(GIB + (run % 4) * 50 * MIB)
        assert run >= 18 or leaking.leaked() is None
    found = leaking.leaked()
    assert found is not None
    assert found[0] == 26 * 50 * MIB
    assert found[1] == 50 * MIB
    assert steady.leaked() is None


def test_without_cuda_a_guard_adds_no_note() -> None:
    guard = oom_guard()
    error = RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
    with pytest.raises(RuntimeError) as caught, guard:
        raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert guard.diagnosis is None


def _raises(held: object) -> None:
    raise RuntimeError(str(held)[:1])


def test_ended_frames_are_cleared_and_running_frames_are_not() -> None:
    mine = object()
    before = sys.getrefcount(mine)

    def fails(kept: object) -> None:
        _raises(kept)

    try:
        fails(mine)
    except RuntimeError as error:
        assert sys.getrefcount(mine) > before
        clear_frames(error.__traceback__)
        assert sys.getrefcount(mine) == before
        frame = error.__traceback__.tb_frame if error.__traceback__ else None
        assert frame is not None
        assert frame.f_locals["mine"] is mine


def test_a_suspended_generator_continues_after_its_error_was_cleared() -> None:
    def worker() -> Iterator[Any]:
        try:
            _raises("x")
        except RuntimeError as error:
            kept = error
        yield kept
        yield "still here"

    running = worker()
    error = next(running)
    clear_frames(error.__traceback__)
    assert next(running) == "still here"


def test_a_cache_of_which_nothing_is_known_is_not_called_fragmented() -> None:
    unknown, known = (
        str(OomDiagnosis(_with(reserved=8 * GIB, **more), ()))
        for more in ({"reclaimable": None}, {"reclaimable": GIB, "fragmented": GIB})
    )
    assert "2.0 GiB cache, may be released" in unknown
    assert "fragmented" not in unknown
    assert "1.0 GiB fragmented" in known

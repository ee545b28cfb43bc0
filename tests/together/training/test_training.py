"""The toolkit's functions for training scripts: the scenarios of programs that run in processes with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import GIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.torch_release import with_the_planners_kernels

SHORT_END, MIXED = [4, 4, 4, 4, 4, 4, 4, 3], [4, 1, 3, 2, 4, 4, 1]
WINDOWS: tuple[tuple[str, list[int], list[int]], ...] = (
    ("sgd", SHORT_END, []),
    ("adamw", MIXED, []),
    ("sgd", [4] * 6, [0, 5]),
    ("adamw", SHORT_END, [7]),
)
"""An optimizer, the sizes of the micro batches, and the micro batches that are left out."""
ON_THE_CPU = {
    "accumulated_steps": (
        "a_step_that_the_scaler_skips_is_counted_as_skipped",
        "errors_name_the_accepted_values",
        "a_failed_or_abandoned_window_does_not_affect_the_next",
        "every_public_name_can_be_imported",
    ),
    "models_in_use": (
        "inference_restores_each_mode_and_logs_that_there_is_no_cuda",
        "changed_weights_are_measured_and_arguments_without_effect_are_rejected",
    ),
    "searched_batches": ("without_cuda_nothing_is_tried_and_invalid_arguments_are_rejected",),
    "saved_checkpoints": (
        "training_resumes_with_the_same_losses",
        "tied_weights_views_and_strides_are_saved_as_torch_saves_them",
        "after_any_error_only_the_previous_checkpoint_exists",
        "a_link_and_the_permissions_of_a_replaced_file_stay",
        "a_part_of_a_sharded_tensor_is_refused",
        "a_model_whose_state_all_ranks_gather_is_refused_without_waiting",
    ),
}
SAVED_ON_A_DEVICE = (
    "a_signal_handler_can_save_while_another_checkpoint_is_written",
    "threads_that_save_at_once_share_one_tagger_which_is_removed_with_the_last_save",
)
ON_A_DEVICE = {
    "searched_batches": (
        "the_found_size_trains_the_next_one_does_not_and_no_statistic_is_reset",
        "the_found_size_is_tried_until_its_memory_stops_growing",
        "the_advice_of_a_guard_is_measured_although_the_search_had_a_higher_peak",
        "a_search_ends_with_an_error_of_the_step_without_a_fitting_size_or_at_its_limits",
    ),
    "checkpointed_steps": (
        "the_longest_list_of_blocks_of_one_class_is_recomputed_and_without_cuda_no_peak_is_known",
        "an_allocation_failure_of_a_library_counts_as_out_of_memory",
        "results_that_differ_are_named",
        "blocks_selections_and_batches_can_be_chosen",
        "errors_name_the_accepted_values",
        "peaks_are_of_the_step_alone_and_fall_with_more_checkpoints",
        "a_variant_that_runs_out_of_memory_is_reported_and_the_others_are_measured",
    ),
    "models_in_use": ("on_a_device_bytes_and_peaks_equal_the_allocators",),
}
TOTAL_BYTES = {"searched_batches": 2 * GIB}


def scenarios(of_programs: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(program, scenario) for program, names in of_programs.items() for scenario in names]


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[Callable[[str], TorchProcess]]:
    """Return a function that returns the process of a program, on a node of its own."""
    with ExitStack() as stack:

        @cache
        def started(program: str) -> TorchProcess:
            folder = tmp_path_factory.mktemp("node") / "node"
            node = stack.enter_context(EmulatedNode(folder, 1, TOTAL_BYTES.get(program, 8 * GIB)))
            process = stack.enter_context(TorchProcess(node, {"PYTORCH_CUDA_ALLOC_CONF": None}))
            process.exec("torch.set_num_threads(1); torch.cuda.init()")
            return process

        yield started


@pytest.mark.parametrize(("program", "scenario"), scenarios(ON_THE_CPU))
def test_on_the_cpu(process: TorchProcess, tmp_path: Path, program: str, scenario: str) -> None:
    process.call_program(program, scenario, **({"folder": str(tmp_path)} if program == "saved_checkpoints" else {}))


@pytest.mark.parametrize("clip", [None, 0.05], ids=["not clipped", "clipped"])
@pytest.mark.parametrize(("name", "sizes", "left_out"), WINDOWS)
def test_a_window_of_accumulated_gradients(
    process: TorchProcess, clip: float | None, name: str, sizes: list[int], left_out: list[int]
) -> None:
    given = {"name": name, "sizes": sizes, "clip": clip, "left_out": left_out}
    process.call_program("accumulated_steps", "a_window_steps_like_one_batch_of_its_samples", **given)


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
def test_accumulation_under_autocast(process: TorchProcess, dtype_name: str) -> None:
    scenario = "under_autocast_a_step_equals_accumulation_by_hand"
    process.call_program("accumulated_steps", scenario, dtype_name=dtype_name)


@pytest.mark.parametrize("scenario", SAVED_ON_A_DEVICE)
def test_a_checkpoint_of_a_device(start_torch: StartTorch, tmp_path: Path, scenario: str) -> None:
    start_torch().call_program("saved_checkpoints", scenario, folder=str(tmp_path))


def test_saving_takes_no_device_memory_and_host_memory_for_the_largest_tensor(
    process: TorchProcess, on_device: Callable[[str], TorchProcess], tmp_path: Path
) -> None:
    scenario = "saving_takes_no_device_memory_and_host_memory_for_the_largest_tensor"
    on_device("saved_checkpoints").call_program("saved_checkpoints", scenario, folder=str(tmp_path))
    process.call_program("saved_checkpoints", "read_without_a_device", folder=str(tmp_path))


@pytest.mark.parametrize(("program", "scenario"), scenarios(ON_A_DEVICE))
def test_on_a_device(on_device: Callable[[str], TorchProcess], program: str, scenario: str) -> None:
    process = on_device(program)
    process.exec("import gc; gc.collect(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()")
    process.call_program(program, scenario)


@pytest.mark.parametrize("failing", [False, True], ids=["over", "failed on its way"])
def test_a_comparison_changes_nothing(on_device: Callable[[str], TorchProcess], failing: bool) -> None:
    on_device("checkpointed_steps").call_program("checkpointed_steps", "a_comparison_changes_nothing", failing=failing)


@with_the_planners_kernels
@pytest.mark.parametrize(
    ("scenario", "given"),
    [
        ("planned_allocations_are_those_of_the_device", {"precision": "fp32"}),
        ("planned_allocations_are_those_of_the_device", {"precision": "bf16"}),
        ("recurrent_networks_are_planned_as_cuda_runs_them_without_cudnn", {}),
        ("a_sharded_plan_is_close_to_fully_shard", {}),
        ("the_planned_batch_trains_and_a_quarter_more_does_not", {}),
    ],
)
def test_a_plan_and_the_training(make_node: MakeNode, scenario: str, given: dict[str, str]) -> None:
    with TorchProcess(make_node(devices=1, total_bytes=2 * GIB)) as process:
        process.call_program("planned_training", scenario, **given)


@pytest.mark.slow
def test_two_ranks_agree_on_the_smaller_batch_size(
    make_node: MakeNode, start_torch: StartTorch, tmp_path: Path
) -> None:
    node = make_node(total_bytes=[2 * GIB, 3 * GIB])
    processes = [start_torch(node) for _ in range(2)]
    code = "from tests.programs import training_ranks\nresult = training_ranks.run(rank, store)"
    numbers = [
        process.send("exec", code=code, rank=rank, store=str(tmp_path / "store"))
        for rank, process in enumerate(processes)
    ]
    small, large = (process.receive(number, 200) for process, number in zip(processes, numbers, strict=True))
    assert small["alike"] == large["alike"]
    assert small["together"] == small["apart"] < large["apart"]
    assert 0 in small["out of memory"]

from __future__ import annotations

import pytest

from gpumem_client.allocator.settings import environment_limit


@pytest.mark.parametrize(
    ("environ", "index", "limit"),
    [
        ({}, 0, None),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}, 0, 3000 << 20),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}, 1, None),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "2G", "CUDA_DEVICE_MEMORY_LIMIT_1": "1g"}, 0, 2 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "2G", "CUDA_DEVICE_MEMORY_LIMIT_1": "1g"}, 1, 1 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT_1": "1g", "CUDA_VISIBLE_DEVICES": "1"}, 0, 1 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "CUDA_VISIBLE_DEVICES": "GPU-1234"}, 0, 1 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "0"}, 0, None),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "much"}, 0, None),
        ({"GPU_MEMORY_LIMIT": "1073741824"}, 0, 1 << 30),
        ({"GPU_MEMORY_LIMIT": "1073741824", "CUDA_DEVICE_MEMORY_LIMIT_0": "512m"}, 0, 512 << 20),
    ],
)
def test_the_limits_that_hami_and_kai_set(environ: dict[str, str], index: int, limit: int | None) -> None:
    assert environment_limit(environ, index) == limit

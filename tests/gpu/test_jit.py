"""A CUDA source through the loader, as a plugin would do it."""

from pathlib import Path

import pytest
import torch

from minisgl.kernel.jit import JitLoader

pytestmark = pytest.mark.gpu

SOURCE = """
#include <torch/extension.h>
__global__ void twice(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
void run(torch::Tensor x) {
    twice<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), x.numel());
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &run); }
"""


@pytest.mark.slow
def test_a_kernel_is_compiled_and_runs(tmp_path: Path) -> None:
    source = tmp_path / "twice.cu"
    source.write_text(SOURCE)
    loader = JitLoader(torch.device("cuda"), tmp_path / "cache")
    x = torch.arange(1000.0, device="cuda")
    loader.load("twice", [source]).twice(x)
    torch.testing.assert_close(x, 2 * torch.arange(1000.0, device="cuda"))

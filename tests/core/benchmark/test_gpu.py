"""What only a card can show: traces of real graphs, and times inside of one."""

import json

import pytest
import torch

from minisgl.benchmark.step_profiler import StepProfiler
from minisgl.benchmark.timing import measure_ceilings, num_copies, time_calls
from minisgl.benchmark.trace import summarize_file
from minisgl.cli import main
from minisgl.llm import GenerationProgress
from support.tiny_models import build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_each_replay_of_a_graph_is_a_step(tmp_path):
    """Catches: traces of this torch in which a graph's kernels lack the id of its launch."""
    a = torch.randn(512, 512, device="cuda")
    out = torch.empty_like(a)

    def work():
        torch.matmul(a, a, out=out)
        out.relu_()
        out.sin_()

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    path = tmp_path / "trace.json"
    profiler = StepProfiler(path, 6, on_gpu=True)
    progress = GenerationProgress(num_prompts=1, num_started=1, num_done=0)
    on_host = torch.ones(8).pin_memory()
    on_device = on_host.cuda()
    for _ in range(25):
        on_device.copy_(on_host, non_blocking=True)
        graph.replay()
        profiler(progress)
    profiler.close()
    summary = summarize_file(path)
    assert summary.num_steps >= 5
    assert min(summary.idle_us) >= 0
    assert summary.span_median_us is not None
    assert 0 < summary.span_median_us < 10_000
    calls = [kernel.calls for kernel in summary.kernels]
    assert sum(calls) >= 4, "three kernels of the graph, and the copy before it"


def test_calls_are_timed_inside_of_a_graph():
    device = torch.device("cuda")
    buffers = [torch.ones(2**22, device=device) for _ in range(num_copies(2**24, device))]
    in_graph = time_calls([b.neg_ for b in buffers], device, graph=True)
    in_loop = time_calls([b.neg_ for b in buffers], device, graph=False)
    assert (in_graph.clock, in_loop.clock) == ("graph", "events")
    assert in_graph.seconds < 1.2 * in_loop.seconds
    ceilings = measure_ceilings(device, torch.bfloat16, size=0.25)
    assert 0.2 < 2 * 2**24 / in_graph.seconds / ceilings.read_bytes_per_s < 1.3


def test_offline_and_kernels_run_on_the_card(tmp_path):
    folder = tmp_path / "Tiny"
    folder.mkdir()
    shape = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}  # FlashInfer's
    config = build_tiny_model("Qwen3ForCausalLM", **shape).config.to_dict() | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "out.json"
    line = ["bench", "offline", "--model", str(folder), "--load-format", "dummy", "--num-prompts"]
    line += ["3", "--input-len", "9", "--output-len", "80", "--max-token-id", "200"]
    line += ["--seeds", "0,1"]
    line += ["--num-pages", "100", "--profile", str(tmp_path / "trace.json"), "--json", str(path)]
    assert main(line) == 0
    record = json.loads(path.read_text())
    assert record["device"]["name"] == torch.cuda.get_device_name()
    assert 0 < record["profile"]["pause_median_us"] <= record["profile"]["pause_p90_us"]
    line = ["bench", "kernels", "--quick", "--model", str(folder), "--rows", "4", "--cases"]
    assert main([*line, "decode:8x100-200:16/8x128:p16", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    failed = {
        f"{one['case']} by {one['implementation']}": one["reason"]
        for one in record["ops"]
        if one["us"] is None
    }
    assert failed == {}
    by_triton = {one["case"] for one in record["ops"] if one["implementation"] == "triton"}
    assert by_triton == {one["case"] for one in record["ops"]}


def test_every_backend_attends_rightly_in_the_grid_of_a_card(tmp_path):
    """Catches: outputs of a replayed graph that are not those of its last replay."""
    path = tmp_path / "grid.json"
    line = ["bench", "kernels", "--attention", "--quick", "--models", "Qwen3-0.6B,Qwen3-14B"]
    line += ["--page-sizes", "16,64", "--rows", "1,33", "--contexts", "700", "--prompts"]
    assert main([*line, "1x300,2x100+256", "--json", str(path)]) == 0
    cells = json.loads(path.read_text())["cells"]
    bad = {
        f"{one['case']} by {one['backend']}": one["reason"]
        for one in cells
        if one["status"] in ("wrong", "failed")
    }
    assert bad == {}
    measured = [one for one in cells if one["backend"] == "minisgl-core:triton"]
    assert [one["status"] for one in measured] == ["ok"] * 16
    assert {one["clock"] for one in measured if one["phase"] == "decode"} == {"graph"}
    assert all(one["error"] > 0 for one in measured)
    line = ["bench", "kernels", "--attention", "--quick", "--json", str(path), "--cases"]
    assert main([*line, "decode:64x256+2048:16/8x128:p16,decode:5x30+64:32/4x128:p64"]) == 0
    cells = json.loads(path.read_text())["cells"]
    assert [one for one in cells if one["status"] in ("wrong", "failed")] == []

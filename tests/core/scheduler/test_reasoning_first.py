"""Rows that reason before a text of a given form: free at first, then the grammar's."""

import pytest

from minisgl.request import GrammarSpec, ReasoningTags
from support.fake_engine import EOS
from support.scheduling import Harness
from support.toy_grammar import TAGS, WORDS, allowed


def reasons_first(tokens: list[int], seed: int, length: int) -> tuple[str, list[int]]:
    """The reasoning of an answer, and the text behind it, which must be the grammar's."""
    names = {token: name for name, token in WORDS.items()}
    said = ""
    for place, token in enumerate(tokens):
        assert token in names
        assert token != EOS
        said += names[token]
        if said.endswith(TAGS.end):
            behind = tokens[place + 1 :]
            for at, one in enumerate(behind):
                assert one in allowed(seed, length, behind[:at])
            return said.removesuffix(TAGS.end), behind
        assert TAGS.end not in said
    return said, []


@pytest.mark.parametrize("num_pages", [400, 24])
@pytest.mark.parametrize("overlap", [True, False])
def test_reasoning_is_free_and_the_grammar_rules_from_its_closing_tag_on(
    overlap: bool, num_pages: int
) -> None:
    """With few pages some requests are retracted on the way."""
    harness = Harness(overlap=overlap, rows=4, budget=40, num_pages=num_pages)
    num_asks = 40
    for uid in range(num_asks):
        grammar = GrammarSpec("grammar", f"{uid + 7}:3")
        prompt, limit = [2, 3, uid % 9 + 2], 14 if uid % 5 else 1
        harness.submit(uid, prompt, max_tokens=limit, grammar=grammar, reasoning=TAGS)
    harness.finish()
    texts = []
    for uid in range(num_asks):
        client = harness.clients[uid]
        thought, text = reasons_first(client.tokens, uid + 7, 3)
        assert "#/" not in thought
        texts.append((bool(thought), len(text)))
    assert any(thought and length >= 3 for thought, length in texts)
    assert any(thought and not length for thought, length in texts), "cut off while it thought"


@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_may_open_its_reasoning_or_begin_with_its_text(overlap: bool) -> None:
    tags = ReasoningTags(TAGS.begin, TAGS.end)
    opened = 0
    harness = Harness(overlap=overlap, rows=4, budget=40, num_pages=400)
    for uid in range(60):
        grammar = GrammarSpec("grammar", f"{uid + 7}:3")
        prompt = [uid % 9 + 2, uid // 9 + 2]
        harness.submit(uid, prompt, max_tokens=12, grammar=grammar, reasoning=tags)
    harness.finish()
    for uid in range(60):
        tokens = harness.clients[uid].tokens
        if tokens[:1] == [WORDS[tags.begin]]:
            opened += 1
            reasons_first(tokens[1:], uid + 7, 3)
        else:
            assert all(token in allowed(uid + 7, 3, tokens[:at]) for at, token in enumerate(tokens))
    assert 0 < opened < 60

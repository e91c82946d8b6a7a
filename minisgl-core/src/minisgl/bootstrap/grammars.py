"""From settings and plugins to what compiles the grammars of requests."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.engine.info import EngineInfo
from minisgl.plugins.decisions import log_decisions
from minisgl.plugins.grammar_selection import GrammarSelection
from minisgl.plugins.host import PluginHost
from minisgl.settings import Settings
from minisgl.structured.compiler import GrammarCompiler
from minisgl.structured.interface import GrammarContext
from minisgl.structured.reasoning import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_compiler(
    settings: Settings, host: PluginHost, chosen: GrammarSelection, info: EngineInfo
) -> GrammarCompiler:
    """Return what compiles grammars; the engine itself is made with the first of them.

    Args:
        settings: everything.
        host: the loaded plugins.
        chosen: the engine.
        info: of the model's engine.
    """
    log_decisions(chosen.table)
    record, timeout_s = chosen.record, settings.structured.compile_timeout_s
    if record is None:
        return GrammarCompiler(None, off=chosen.off)
    if settings.model.skip_tokenizer_init:
        return GrammarCompiler(None, off="it needs a tokenizer (model.skip_tokenizer_init is set)")
    reference = settings.model.tokenizer or settings.model.path
    assert reference is not None, "settings without a model have been refused"
    path = host.resolve_checkpoint(reference, settings.model.cache_dir)
    context = GrammarContext(
        tokenizer=partial(tokenizer_at, path),
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        compile_timeout_s=timeout_s,
    )
    return GrammarCompiler(
        partial(record.create, context, chosen.settings),
        timeout_s,
        load_vocabulary=partial(load_vocabulary, context),
    )


def load_vocabulary(context: GrammarContext) -> Vocabulary:
    """Return the tokens of a model, for the tags of its reasoning."""
    tokenizer = context.tokenizer()
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Vocabulary(tokenizer.get_vocab(), special, context.vocab_size)


def tokenizer_at(path: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer; a module's own function, so that other processes can call it."""
    from minisgl.tokenizer.loading import load_tokenizer

    return load_tokenizer(path)

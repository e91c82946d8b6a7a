"""Text to token ids and back: ``PromptEncoder``, ``Detokenizer``, and the processes around them."""

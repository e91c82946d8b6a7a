"""Typed messages between processes, and their msgpack codec.

Frontend -> tokenizer worker: ``TokenizeRequest``. Tokenizer -> scheduler: ``GenerateRequest``.
Frontend or detokenizer -> scheduler: ``AbortRequest``, ``StopFound``, ``Shutdown``.
Scheduler -> detokenizer: ``TokenBatch``. Detokenizer or tokenizer -> frontend: ``Reply``s.
Nothing here is ever pickled; bytes that do not decode to the expected type raise ``DecodeError``.
"""

from minisgl.message.backend import (
    AbortRequest,
    BackendMessage,
    GenerateRequest,
    Ping,
    Shutdown,
    StopFound,
)
from minisgl.message.codec import Codec, DecodeError
from minisgl.message.frontend import ErrorReply, FrontendMessage, Pong, ReplyBatch, TextReply
from minisgl.message.tokenizer import (
    DetokenizerMessage,
    Failure,
    StreamStart,
    TokenBatch,
    TokenizeRequest,
    TokenizerMessage,
)

__all__ = [
    "AbortRequest",
    "BackendMessage",
    "Codec",
    "DecodeError",
    "DetokenizerMessage",
    "ErrorReply",
    "Failure",
    "FrontendMessage",
    "GenerateRequest",
    "Ping",
    "Pong",
    "ReplyBatch",
    "Shutdown",
    "StopFound",
    "StreamStart",
    "TextReply",
    "TokenBatch",
    "TokenizeRequest",
    "TokenizerMessage",
]

"""Typed messages between processes, and their msgpack codec.

Frontend -> tokenizer worker: ``TokenizeRequest``, ``ForgetRequests``.
Tokenizer -> scheduler: ``GenerateRequest``.
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
from minisgl.message.frontend import (
    ErrorReply,
    FrontendMessage,
    Pong,
    PromptEcho,
    ReplyBatch,
    TextReply,
    TokenLogprob,
    TokensReply,
    TopLogprob,
)
from minisgl.message.tokenizer import (
    DetokenizeOnly,
    DetokenizerMessage,
    Failure,
    ForgetRequests,
    LogprobBatch,
    PromptLogprobs,
    StreamStart,
    TokenBatch,
    TokenizeOnly,
    TokenizeRequest,
    TokenizerMessage,
)

__all__ = [
    "AbortRequest",
    "BackendMessage",
    "Codec",
    "DecodeError",
    "DetokenizeOnly",
    "DetokenizerMessage",
    "ErrorReply",
    "Failure",
    "ForgetRequests",
    "FrontendMessage",
    "GenerateRequest",
    "LogprobBatch",
    "Ping",
    "Pong",
    "PromptEcho",
    "PromptLogprobs",
    "ReplyBatch",
    "Shutdown",
    "StopFound",
    "StreamStart",
    "TextReply",
    "TokenBatch",
    "TokenLogprob",
    "TokenizeOnly",
    "TokenizeRequest",
    "TokenizerMessage",
    "TokensReply",
    "TopLogprob",
]

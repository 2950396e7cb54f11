"""Which failures end a request, and which end the process.

After a CUDA error every later call in this process fails too, or worse, hangs: the context is lost. Running out of
memory is told apart, since torch recovers from it.
"""

from __future__ import annotations

import torch

from shared.errors import EngineOverloaded, InternalError, SluiceError

#: What the messages of errors say that poison the process; torch raises most of them as plain RuntimeError.
_FATAL = (
    "cuda error",
    "cublas_status",
    "cublas error",
    "cudnn error",
    "cusparse error",
    "nccl error",
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "hip error",
)


#: What says that there was no memory, in the words of CUDA, of torch's allocator on the CPU, and of the package's loader.
#: None of them breaks the context: what needs less can still be computed.
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "insufficient vram",
    "insufficient space in device allocation",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for it; the process can go on."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | ValueError | AssertionError) and any(sign in text for sign in _NO_MEMORY)


def is_fatal(error: BaseException) -> bool:
    """Whether this process can compute nothing more."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _FATAL)


def as_answer(error: BaseException) -> SluiceError:
    """What a client is told of an error that ended its request."""
    if is_out_of_memory(error):
        return EngineOverloaded("The engine is out of memory for this request.")
    return error if isinstance(error, SluiceError) else InternalError()

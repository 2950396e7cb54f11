"""Q4_1 models become Q8_0 files in the cache, once: llama.cpp has no batched AVX2 kernel for Q4_1.

Measured with SmolLM2-135M on 2 cores: 16 lanes gain 1.0-1.6x from batching as Q4_1 and 2-2.5x as Q8_0. The
conversion adds no error of its own worth naming (8 bits hold what 4 bits said), and costs memory, so large models
stay as they are. Knows nothing of engines.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

#: `general.file_type` of files that are mostly Q4_1, and of those that are mostly Q8_0.
_MOSTLY_Q4_1, _MOSTLY_Q8_0 = 3, 7
#: Larger files (bytes) are not converted: twice the memory is no longer a bargain.
LARGEST = 1 << 30

#: Part done (0..1).
Report = Callable[[float], None]


def fastest_form(model: Path, identity: str, cache_dir: Path, report: Report) -> Path:
    """The file to load for `model`: itself, or its Q8_0 form in `cache_dir`, made if it is not there yet.

    `identity` tells this file's content from any other's. If the conversion fails, the reason is logged and the
    model itself is returned. Two processes may call this at once: one converts, the other waits for it.
    """
    if model.stat().st_size > LARGEST or not _is_mostly_q4_1(model):
        return model
    target = cache_dir / "converted" / f"{model.stem.removesuffix('.Q4_1')}-{identity[:12]}.Q8_0.gguf"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_suffix(".lock")):
            for stale in target.parent.glob(f"{target.name}.*.partial"):
                stale.unlink()  # of a process that died: nobody else writes while we hold the lock
            if not target.is_file():
                _convert(model, target, report)
        return target
    except (ImportError, LookupError, MemoryError, NotImplementedError, OSError, TypeError, ValueError) as error:
        log.warning("Could not convert %s to Q8_0, so it runs as Q4_1, slower: %s", model.name, error)
        return model


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `lock`; the kernel lets go of it if this process dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_mostly_q4_1(model: Path) -> bool:
    """Looks for `general.file_type` near the head of the file: parsing a GGUF whole takes seconds."""
    key = b"general.file_type"
    with model.open("rb") as file:
        head = file.read(1 << 16)
    at = head.find(key)
    if at < 0 or len(head) < at + len(key) + 8:
        return False
    kind, value = struct.unpack_from("<II", head, at + len(key))
    return bool(kind == 4 and value == _MOSTLY_Q4_1)  # 4: uint32


def _convert(model: Path, target: Path, report: Report) -> None:
    """Writes `target` under another name and renames it: a file under its own name is always whole."""
    import gguf  # numpy, yaml and tqdm with it: only for who converts

    log.info("Converting %s to Q8_0, once.", model.name)
    began = time.monotonic()
    reader = gguf.GGUFReader(model)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    try:
        for name, field in reader.fields.items():
            # The writer makes GGUF.* and the architecture itself.
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            value = _MOSTLY_Q8_0 if name == "general.file_type" else field.contents()
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], item)
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        for number, tensor in enumerate(reader.tensors):
            if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                writer.add_tensor(tensor.name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
            else:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            report((number + 1) / len(reader.tensors))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    log.info("Converted %s in %.1f s.", model.name, time.monotonic() - began)

"""llama.cpp's C API, as much of it as this engine uses, through cffi in ABI mode.

Declared after include/llama.h of tag b11549, the one that the pinned xllamacpp wheel is built from. Knows of no
requests: it opens a library, proves that the library fits the declarations, and routes its log.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cffi

log = logging.getLogger(__name__)

#: The wheel is built for AVX2; on an older CPU its first vector instruction would end the process.
CPU_FLAGS = ("avx2", "fma", "f16c")

#: Spins of a waiting OpenMP thread before it sleeps. By default libgomp spins for milliseconds, which keeps other
#: processes from the core without helping: 1000 and 300,000 spins are equally fast on idle cores.
SPIN_COUNT = "5000"

# By-value structs end in spare room: a later library may append fields, and it copies its own size both ways.
_DECLARATIONS = """
typedef int32_t llama_pos;
typedef int32_t llama_token;
typedef int32_t llama_seq_id;
typedef struct llama_vocab llama_vocab;
typedef struct llama_model llama_model;
typedef struct llama_context llama_context;
typedef struct llama_memory_i * llama_memory_t;

typedef bool (*llama_progress_callback)(float progress, void * user_data);
typedef void (*ggml_log_callback)(int level, const char * text, void * user_data);

typedef struct llama_batch {
    int32_t n_tokens;
    llama_token * token;
    float * embd;
    llama_pos * pos;
    int32_t * n_seq_id;
    llama_seq_id ** seq_id;
    int8_t * logits;
} llama_batch;

typedef struct llama_model_params {
    void * devices;
    const void * tensor_buft_overrides;
    int32_t n_gpu_layers;
    int split_mode;
    int load_mode;
    int lazy_mode;
    int32_t main_gpu;
    const float * tensor_split;
    llama_progress_callback progress_callback;
    void * progress_callback_user_data;
    const void * kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
    char later_fields[256];
} llama_model_params;

typedef struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    int ctx_type;
    int rope_scaling_type;
    int pooling_type;
    int attention_type;
    int flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void * cb_eval;
    void * cb_eval_user_data;
    int type_k;
    int type_v;
    size_t moe_cache_size;
    void * abort_callback;
    void * abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    void * samplers;
    size_t n_samplers;
    void * ctx_other;
    char later_fields[256];
} llama_context_params;

const char * llama_version(void);
llama_model_params llama_model_default_params(void);
llama_context_params llama_context_default_params(void);
void llama_log_set(ggml_log_callback log_callback, void * user_data);
void llama_backend_init(void);

llama_model * llama_model_load_from_file(const char * path_model, llama_model_params params);
void llama_model_free(llama_model * model);
llama_context * llama_init_from_model(llama_model * model, llama_context_params params);
void llama_free(llama_context * ctx);

bool llama_model_has_encoder(const llama_model * model);
bool llama_model_has_decoder(const llama_model * model);
bool llama_model_is_recurrent(const llama_model * model);
int32_t llama_model_n_swa(const llama_model * model);
bool llama_model_is_hybrid(const llama_model * model);
int32_t llama_model_n_ctx_train(const llama_model * model);
int32_t llama_model_meta_val_str(const llama_model * model, const char * key, char * buf, size_t buf_size);
const char * llama_model_chat_template(const llama_model * model, const char * name);
const llama_vocab * llama_model_get_vocab(const llama_model * model);

int llama_vocab_type(const llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const llama_vocab * vocab);
llama_token llama_vocab_bos(const llama_vocab * vocab);
llama_token llama_vocab_eos(const llama_vocab * vocab);
llama_token llama_vocab_pad(const llama_vocab * vocab);
int llama_vocab_get_attr(const llama_vocab * vocab, llama_token token);
bool llama_vocab_get_add_bos(const llama_vocab * vocab);
const char * llama_vocab_get_text(const llama_vocab * vocab, llama_token token);
bool llama_vocab_is_control(const llama_vocab * vocab, llama_token token);
bool llama_vocab_is_eog(const llama_vocab * vocab, llama_token token);
int32_t llama_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                       int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const llama_vocab * vocab, llama_token token, char * buf, int32_t length,
                             int32_t lstrip, bool special);

uint32_t llama_n_ctx(const llama_context * ctx);
uint32_t llama_n_batch(const llama_context * ctx);
llama_memory_t llama_get_memory(const llama_context * ctx);
void llama_memory_clear(llama_memory_t mem, bool data);
bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0,
                         llama_pos p1);
void llama_set_n_threads(llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);
int32_t llama_decode(llama_context * ctx, llama_batch batch);
float * llama_get_logits(llama_context * ctx);
"""

#: Default values that tell whether the structs above are laid out as this library lays them out: fields from
#: the beginning, the middle and the end of each.
_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "main_gpu": 0, "use_extra_bufts": True}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max_per_seq": 1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
}

#: ggml_log_level; 5 continues the line before.
_WARN, _ERROR, _CONTINUE = 3, 4, 5


class LoadError(OSError):
    """The library or the model cannot be used; the message says what to do."""


class Library:
    """An opened llama.cpp library. `lib` holds its functions, `ffi` makes the values they take.

    `path`: a libllama, or None for the one in the xllamacpp wheel. Raises LoadError.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(_DECLARATIONS)
        if path is None:
            path = _wheel_library()
            _check_cpu()
        # Read by libgomp when it is loaded, so it has to stand before dlopen; a user's own value stays.
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        try:
            self.lib: Any = self.ffi.dlopen(str(path))
        except OSError as error:
            raise LoadError(_dlopen_advice(path, str(error))) from None
        self._check_layout(path)
        self.version = self._version()
        self._errors: deque[str] = deque(maxlen=8)
        self._callback = self.ffi.callback("ggml_log_callback", self._take_log)
        self.lib.llama_log_set(self._callback, self.ffi.NULL)
        self.lib.llama_backend_init()

    def last_errors(self) -> str:
        """What llama.cpp last said at level error, for messages about a call that only returned NULL."""
        return " ".join(self._errors) or "llama.cpp gave no reason."

    def progress_callback(self, report: Callable[[float], None]) -> Any:
        """`report` as a C callback; the caller keeps it alive while it may be called."""

        def call(part: float, _: Any) -> bool:
            report(part)
            return True

        return self.ffi.callback("llama_progress_callback", call, error=True)

    def close(self) -> None:
        """Gives the log back to the library: our callback must not be called once this object is gone."""
        self.lib.llama_log_set(self.ffi.NULL, self.ffi.NULL)

    def _version(self) -> str:
        name = self.ffi.string(self.lib.llama_version()).decode()
        try:
            return f"{name} (xllamacpp {version('xllamacpp')})"
        except PackageNotFoundError:
            return str(name)

    def _check_layout(self, path: Path) -> None:
        """A struct whose layout differs would not fail but crash or compute nonsense, so it is proven first."""
        try:
            model = self.lib.llama_model_default_params()
            context = self.lib.llama_context_default_params()
        except AttributeError as error:
            raise LoadError(f"{path} is not a llama.cpp library that fits: {error}") from None
        for struct, expected in ((model, _MODEL_DEFAULTS), (context, _CONTEXT_DEFAULTS)):
            for name, value in expected.items():
                found = getattr(struct, name)
                if found != value:
                    raise LoadError(
                        f"{path}: the default of {name} is {found}, not {value}, so this llama.cpp lays out its "
                        "parameters differently. Install the pinned one (`pip install -r requirements.txt`) and "
                        "unset SLUICE_LIBLLAMA, or point it at a libllama built from tag b11549."
                    )

    def _take_log(self, level: int, text: Any, _: Any) -> None:
        line = self.ffi.string(text).decode("utf-8", "replace").strip()
        if level == _ERROR:
            self._errors.append(line)
            log.error("llama.cpp: %s", line)
        elif level == _WARN:
            log.warning("llama.cpp: %s", line)
        elif level != _CONTINUE and line:
            log.debug("llama.cpp: %s", line)


def _wheel_library() -> Path:
    """The library inside the xllamacpp package, found without importing (and so initialising) the package."""
    spec = find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("xllamacpp*.so")):
            return path
    raise LoadError("The llamacpp engine needs the xllamacpp package: `pip install -r requirements.txt`.")


def _check_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), None)
    missing = [flag for flag in CPU_FLAGS if flags is not None and flag not in flags]
    if missing:
        raise LoadError(
            f"This CPU lacks {', '.join(missing)}, which the prebuilt llama.cpp needs. Build llama.cpp (tag b11549) "
            "on this machine and set SLUICE_LIBLLAMA to its libllama.so."
        )


def _dlopen_advice(path: Path, error: str) -> str:
    for library, package in (("libgomp", "libgomp1"), ("libstdc++", "libstdc++6")):
        if library in error and "cannot open shared object file" in error:
            return f"llama.cpp needs {library}: `apt-get install {package}` (or your system's package for it). {error}"
    return f"Cannot open the llama.cpp library {path}: {error}"

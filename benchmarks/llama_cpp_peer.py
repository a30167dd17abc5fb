"""llama.cpp as a peer of `inference.py`: writes a model's weights as GGUF files, and generates in a process.

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python gguf

Install this in any environment, and pass its interpreter to `inference.py --llama-python PYTHON`. Some virtual machines
and sandboxes report AMX but trap it: with 8 and 4 bits, the process ends with -4, an illegal instruction. There, build
with "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" in CFLAGS and CXXFLAGS.

The benchmark starts this file as a program in that environment, and sends and receives lines of JSON. The program needs
numpy, gguf and llama_cpp, but not torch. It calls the C functions of llama.cpp, because only they accept a batch of
several sequences. Norms, biases and positions stay fp32, as in files of llama.cpp's converter. All other matrices have
the file's width, embedding and output included. The timed runs use llama.cpp's defaults: keys and values in fp16, and
flash attention, which computes in fp16. The comparison of logits uses neither.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: the widths of the files, and our variant that each is compared with
WIDTHS = {"F32": "fp32", "BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4"}
#: model type -> part of a parameter name in transformers -> its name in GGUF
NAMES = {
    "llama": {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    "gpt2": {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
}
Arrays = dict[str, np.ndarray]


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of a query or key: llama.cpp rotates neighbors, transformers rotates the halves of a head."""
    return rows.reshape(num_heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_arrays(config: dict[str, Any], weights: Arrays) -> Arrays:
    """Return a model's weights with the names and layout of GGUF, without a tied output."""
    names = NAMES[config["model_type"]]
    made: Arrays = {}
    for name, value in weights.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        stem, end = name.rsplit(".", 1)
        layer = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", stem)
        place = f"blk.{layer[1]}.{names[layer[2]]}" if layer else names[stem]
        if ".c_" in stem and value.ndim == 2:  # a Conv1D of GPT-2 is (in, out)
            value = value.T
        elif place.endswith("attn_q"):
            value = interleaved(value, config["num_attention_heads"])
        elif place.endswith("attn_k"):
            value = interleaved(value, config["num_key_value_heads"])
        made[f"{place}.{end}"] = np.ascontiguousarray(value)
    return made


def write_gguf(path: Path, config: dict[str, Any], arrays: Arrays, width: str) -> int:
    """Write a file, and return the bytes of the matrices that a token reads completely."""
    import gguf

    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")  # token ids go in and come out
    if kind == "llama":
        head = config["hidden_size"] // config["num_attention_heads"]
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    num_bytes = 0
    for name, value in arrays.items():
        dtype = gguf.GGMLQuantizationType.F32
        if value.ndim == 2 and name != "position_embd.weight":
            dtype = gguf.GGMLQuantizationType[width]
        data = gguf.quants.quantize(value, dtype)
        writer.add_tensor(name, data, raw_dtype=dtype)
        only_looked_up = name == "token_embd.weight" and "output.weight" in arrays
        if value.ndim == 2 and name != "position_embd.weight" and not only_looked_up:
            num_bytes += data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_bytes


class Context:
    """A file loaded by llama.cpp, with a cache for `batch` sequences."""

    def __init__(
        self, path: Path, *, batch: int, length: int, threads: int, vocabulary: int, exact: bool = False
    ) -> None:
        """Load the file. `exact`: keys, values and attention in fp32."""
        import llama_cpp

        self.api, self.vocabulary = llama_cpp, vocabulary
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = batch * length
        options.n_seq_max = batch
        options.n_threads = options.n_threads_batch = threads
        if exact:
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp does not load {path}: its lines are above")
        self.tokens = llama_cpp.llama_batch_init(batch * length, 0, 1)

    def decode(self, rows: list[list[int]], at: int) -> np.ndarray:
        """Append a row to each sequence at position `at`. Return the logits of the last tokens: (batch, words)."""
        batch, last, count = self.tokens, [], 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                batch.token[count], batch.pos[count] = token, at + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = offset == len(row) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if code := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode of {count} tokens at position {at} returned {code}")
        found = [self.api.llama_get_logits_ith(self.context, index) for index in last]
        return np.stack([np.ctypeslib.as_array(each, (self.vocabulary,)) for each in found])

    def close(self) -> None:
        """Free the memory of llama.cpp."""
        self.api.llama_batch_free(self.tokens)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def forget(self) -> None:
        """Empty the cache."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)

    def generate(self, prompt: list[list[int]], count: int) -> list[list[int]]:
        """Return `count` greedy tokens after each row."""
        self.forget()
        made = [self.decode(prompt, 0).argmax(-1)]
        for step in range(count - 1):
            made.append(self.decode(made[-1][:, None].tolist(), len(prompt[0]) + step).argmax(-1))
        return np.stack(made, 1).tolist()

    def last_logits(self, prompt: list[list[int]]) -> list[list[float]]:
        """Return the logits of each row's last token. It is decoded in a second call, as in generation."""
        self.forget()
        self.decode([row[:-1] for row in prompt], 0)
        return self.decode([row[-1:] for row in prompt], len(prompt[0]) - 1).tolist()


class Peer:
    """The benchmark's connection to the process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def ask(self, **question: Any) -> Any:
        """Send a question, and return the answer."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer of the process."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of llama.cpp ended with {self.process.wait()}: its lines, if any, are above, and "
                f"{Path(__file__).name} says how it is built"
            )
        return json.loads(line)


@contextlib.contextmanager
def start(python: str, model: Any, **sizes: int) -> Iterator[Peer | str]:
    """Start a process for a transformers model. Yield its `Peer`, or the names of packages that `python` lacks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, folder, json.dumps(sizes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            peer = Peer(process)
            if missing := peer.answer()["missing"]:
                yield missing
            else:
                np.savez(f"{folder}/weights.npz", **{k: v.float().numpy() for k, v in model.state_dict().items()})
                Path(folder, "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
                yield peer
            process.stdin.close()


def quiet() -> Any:
    """Print only errors of llama.cpp while the returned callback exists."""
    import llama_cpp

    @llama_cpp.llama_log_callback
    def say(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            sys.stderr.write(text.decode(errors="replace"))

    llama_cpp.llama_log_set(say, ctypes.c_void_p(0))
    return say


def serve(folder: Path, *, batch: int, length: int, threads: int) -> None:
    """Send the missing packages. Then answer `load` (bytes by width, logits of a prompt) and `time` (seconds)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of libraries out of the answers

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    missing = [name for name in ("gguf", "llama_cpp") if importlib.util.find_spec(name) is None]
    answer({"missing": " and ".join(missing)})
    contexts: dict[str, Context] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if question["want"] == "load":
            _kept = quiet()
            config = json.loads((folder / "config.json").read_text())
            with np.load(folder / "weights.npz") as weights:
                arrays = gguf_arrays(config, dict(weights))
            (folder / "weights.npz").unlink()
            num_bytes = {each: write_gguf(folder / f"{each}.gguf", config, arrays, each) for each in WIDTHS}
            sizes = {"batch": batch, "length": length, "threads": threads, "vocabulary": config["vocab_size"]}
            exact = Context(folder / "F32.gguf", exact=True, **sizes)
            logits = exact.last_logits(question["prompt"])
            exact.close()
            contexts = {each: Context(folder / f"{each}.gguf", **sizes) for each in WIDTHS}
            answer({"bytes": num_bytes, "logits": logits})
        else:
            start_s = time.perf_counter()
            contexts[question["width"]].generate(question["prompt"], question["count"])
            answer(time.perf_counter() - start_s)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), **json.loads(sys.argv[2]))

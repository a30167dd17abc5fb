"""Milliseconds of a prompt and of each further token: `init_inference` against transformers, in turn, in one run.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/inference.py
    OMP_NUM_THREADS=2 python benchmarks/inference.py --models "Llama 125 M" --batch 8 --compile
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/inference.py --llama-python ~/llama/bin/python

Models have random weights. "prompt" is the time to the first new token. "token" is the mean time of `--tokens` further
tokens. The floor of a token is the bytes of all weights it reads (linear layers in their dtype, with scales) divided by
the speed of a dot product of two large fp32 vectors in numpy (OpenBLAS' sdot), measured in every round. Ratios are of
medians. The variants swap places from round to round, and the first round is dropped.

llama.cpp gets the same weights as GGUF files. It runs in a process of the environment that has `llama-cpp-python` and
`gguf` (`llama_cpp_peer.py`), and takes turns with the other variants. Its fp32 logits are first compared with those of
transformers. If llama.cpp is not installed, the output says so.
"""

import argparse
import contextlib
import copy
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import llama_cpp_peer
import numpy as np
import torch
import transformers
from deepspeed.inference.quantized import PackedLinear

LLAMA = {"max_position_embeddings": 512, "vocab_size": 8192, "pad_token_id": 0, "eos_token_id": None}
GPT2 = {"n_positions": 512, "vocab_size": 8192, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
#: name -> (config class, model class, sizes)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 25 M": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**LLAMA, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 5, "num_attention_heads": 8},
    ),
    "Llama 125 M": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**LLAMA, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 12},
    ),
    "GPT-2 25 M": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_embd": 512, "n_layer": 7, "n_head": 8}),
    "GPT-2 125 M": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_embd": 768, "n_layer": 16, "n_head": 12}),
}
#: With the output layer, as in llama.cpp's files. One scale per row; llama.cpp has one per 32 numbers.
INT8, INT4 = ({"weight": {"num_bits": bits, "output_num_bits": bits}} for bits in (8, 4))
X8 = {"activation": {"num_bits": 8}}  # llama.cpp also rounds inputs to 8 bits
LOGITS_BOUND = 1e-3  #: maximum difference of llama.cpp and transformers in fp32
Seconds = Callable[[int], float]  #: number of tokens -> seconds
Variants = dict[str, tuple[Seconds, int]]  #: name -> (function, bytes that a token reads)


def create(name: str) -> Any:
    """Create a model in evaluation mode."""
    config_class, model_class, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()


def variants(plain: Any, prompt: torch.Tensor, *, compiles: bool) -> Variants:
    """Return the variants of transformers and ours."""
    keys = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    made: dict[str, Any] = {"eager fp32": copy.deepcopy(plain), "eager bf16": copy.deepcopy(plain).bfloat16()}
    options: dict[str, dict[str, Any]] = {}
    if compiles:
        made["static, compiled fp32"] = copy.deepcopy(plain)
        options["static, compiled fp32"] = {"cache_implementation": "static"}
    injected = {"replace_with_kernel_inject": True, "max_out_tokens": 512}
    for name, dtype in (("ours fp32", torch.float), ("ours bf16", torch.bfloat16)):
        made[name] = deepspeed.init_inference(copy.deepcopy(plain), dtype=dtype, **injected)
    packed = {"ours int8": INT8, "ours int4": INT4, "ours int8, x int8": INT8 | X8, "ours int4, x int8": INT4 | X8}
    for name, quant in packed.items():
        made[name] = deepspeed.init_inference(
            copy.deepcopy(plain).bfloat16(), dtype=torch.int8, quant=quant, **injected
        )

    def of(name: str) -> Seconds:
        def seconds(count: int) -> float:
            start_s = time.perf_counter()
            made[name].generate(prompt, max_new_tokens=count, min_new_tokens=count, **keys, **options.get(name, {}))
            return time.perf_counter() - start_s

        return seconds

    return {name: (of(name), bytes_read(model)) for name, model in made.items()}


def llama_cpp_variants(plain: Any, prompt: torch.Tensor, peer: llama_cpp_peer.Peer) -> Variants:
    """Return llama.cpp's variants, one per width, after a check that its logits match."""
    rows = prompt.tolist()
    loaded = peer.ask(want="load", prompt=rows)
    with torch.no_grad():
        expected = plain(prompt).logits[:, -1]
    off = (torch.tensor(loaded["logits"]) - expected).abs().max().item()
    if not off <= LOGITS_BOUND:
        raise SystemExit(
            f"llama.cpp computes another model: its logits in fp32 are up to {off:.2g} from transformers', and "
            f"{LOGITS_BOUND} is allowed; see the names and layouts in llama_cpp_peer.py"
        )

    def of(width: str) -> Seconds:
        return lambda count: peer.ask(want="time", width=width, prompt=rows, count=count)

    return {f"llama.cpp {width}": (of(width), size) for width, size in loaded["bytes"].items()}


def bytes_read(model: Any) -> int:
    """Return the bytes of the linear layers' weights, which each token reads."""
    total = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            total += module.packed.num_bytes
        elif isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            total += module.weight.numel() * module.weight.element_size()
    return total


def bandwidth(left: np.ndarray, right: np.ndarray) -> float:
    """Return the bytes per second of a dot product."""
    start_s = time.perf_counter()
    np.dot(left, right)
    return (left.nbytes + right.nbytes) / (time.perf_counter() - start_s)


def measure(name: str, args: argparse.Namespace) -> None:
    """Print the rows of one model."""
    plain = create(name)
    prompt = torch.randint(1, 8192, (args.batch, args.prompt), generator=torch.Generator().manual_seed(1))
    sizes = {"batch": args.batch, "length": args.prompt + args.tokens + 1, "threads": torch.get_num_threads()}
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(llama_cpp_peer.start(args.llama_python, plain, **sizes))
        cases = variants(plain, prompt, compiles=args.compile)
        if isinstance(peer, str):
            print(f"llama.cpp is skipped: {args.llama_python} has no {peer} (pip install llama-cpp-python gguf)")
        else:
            cases |= llama_cpp_variants(plain, prompt, peer)
        report(name, cases, args)


def report(name: str, cases: Variants, args: argparse.Namespace) -> None:
    """Time the variants in turn, and print the results."""
    left, right = np.ones(2**25, np.float32), np.ones(2**25, np.float32)
    prompts: dict[str, list[float]] = {each: [] for each in cases}
    tokens: dict[str, list[float]] = {each: [] for each in cases}
    rates = []
    orders = random.Random(0)
    for _ in range(1 + args.rounds):
        rates.append(bandwidth(left, right))
        for each in orders.sample(list(cases), len(cases)):
            first_s, all_s = (cases[each][0](count) for count in (1, 1 + args.tokens))
            prompts[each].append(first_s)
            tokens[each].append((all_s - first_s) / args.tokens)
    rate = statistics.median(rates[1:])
    medians = {each: statistics.median(values[1:]) for each, values in tokens.items()}
    of_prompts = {each: statistics.median(values[1:]) for each, values in prompts.items()}
    print(f"{name}, batch {args.batch}, {torch.get_num_threads()} threads, reading at {rate / 1e9:.1f} GB/s")
    for each, (_, num_bytes) in cases.items():
        kept = tokens[each][1:]
        print(
            f"  {each:<22}prompt {1e3 * of_prompts[each]:8.2f} ms   token "
            f"{1e3 * medians[each]:7.2f} ({1e3 * min(kept):.2f} {1e3 * max(kept):.2f}) ms   "
            f"{medians[each] / medians['eager fp32']:5.2f} of eager fp32   "
            f"{medians[each] / (num_bytes / rate):5.2f} of the floor ({num_bytes / 1e6:.1f} MB)"
        )
    for width, dtype in llama_cpp_peer.WIDTHS.items():
        pair = f"ours {dtype}", f"llama.cpp {width}"
        if pair[1] in cases:
            print(
                f"  {pair[0]:<10}to {pair[1]:<16}prompt {of_prompts[pair[0]] / of_prompts[pair[1]]:5.2f}   "
                f"token {medians[pair[0]] / medians[pair[1]]:5.2f}"
            )


def main() -> None:
    """Print rows for every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compile", action="store_true", help="transformers with a static cache and torch.compile, too"
    )
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        help="the interpreter of an environment with llama-cpp-python and gguf",
    )
    args = parser.parse_args()
    if shutil.which(args.llama_python) is None:
        parser.error(f"--llama-python: {args.llama_python} is no program; name the environment's python")
    for name in args.models:
        measure(name, args)


if __name__ == "__main__":
    main()

"""Milliseconds of a prompt and of each token after it: `init_inference` beside transformers, in turn, in one run.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/inference.py
    OMP_NUM_THREADS=2 python benchmarks/inference.py --models "Llama 125 M" --batch 8 --compile

Models are made from a configuration with random weights. A prompt is the time to the first new token; a token is the
time of `--tokens` more, by one. The floor of a token is the bytes of all weights that it reads (of linear layers, in
their type, with scales) over the speed at which torch sums a large tensor of fp32, measured in every round. Ratios are
of medians; the variants swap places from round to round, and the first round is dropped.
"""

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import deepspeed
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
INT4 = {"weight": {"num_bits": 4, "q_groups": 1}}
Generate = Callable[[int], object]


def create(name: str) -> Any:
    """A model in evaluation mode."""
    config_class, model_class, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()


def variants(plain: Any, prompt: torch.Tensor, *, compiles: bool) -> dict[str, tuple[Generate, Any]]:
    """By name what generates so many tokens, and the module that it reads."""
    keys = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    made: dict[str, Any] = {"eager fp32": copy.deepcopy(plain), "eager bf16": copy.deepcopy(plain).bfloat16()}
    options: dict[str, dict[str, Any]] = {}
    if compiles:
        made["static, compiled fp32"] = copy.deepcopy(plain)
        options["static, compiled fp32"] = {"cache_implementation": "static"}
    injected = {"replace_with_kernel_inject": True, "max_out_tokens": 512}
    for name, dtype in (("ours fp32", torch.float), ("ours bf16", torch.bfloat16)):
        made[name] = deepspeed.init_inference(copy.deepcopy(plain), dtype=dtype, **injected)
    made["ours int8"] = deepspeed.init_inference(copy.deepcopy(plain).bfloat16(), dtype=torch.int8, **injected)
    made["ours int4"] = deepspeed.init_inference(
        copy.deepcopy(plain).bfloat16(), dtype=torch.int8, quant=INT4, **injected
    )

    def of(name: str) -> Generate:
        return lambda count: made[name].generate(
            prompt, max_new_tokens=count, min_new_tokens=count, **keys, **options.get(name, {})
        )

    return {name: (of(name), model) for name, model in made.items()}


def bytes_read(model: Any) -> int:
    """Of the weights of linear layers: what a token has to read."""
    total = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            total += module.packed.num_bytes
        elif isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            total += module.weight.numel() * module.weight.element_size()
    return total


def bandwidth(big: torch.Tensor) -> float:
    """Bytes per second."""
    start_s = time.perf_counter()
    big.sum()
    return big.numel() * 4 / (time.perf_counter() - start_s)


def measure(name: str, args: argparse.Namespace) -> None:
    """Print the rows of one model."""
    plain = create(name)
    prompt = torch.randint(1, 8192, (args.batch, args.prompt), generator=torch.Generator().manual_seed(1))
    cases = variants(plain, prompt, compiles=args.compile)
    big = torch.ones(2**26)
    prompts: dict[str, list[float]] = {each: [] for each in cases}
    tokens: dict[str, list[float]] = {each: [] for each in cases}
    rates = []
    orders = random.Random(0)
    for _ in range(1 + args.rounds):
        rates.append(bandwidth(big))
        for each in orders.sample(list(cases), len(cases)):
            generate = cases[each][0]
            times = []
            for count in (1, 1 + args.tokens):
                start_s = time.perf_counter()
                generate(count)
                times.append(time.perf_counter() - start_s)
            prompts[each].append(times[0])
            tokens[each].append((times[1] - times[0]) / args.tokens)
    rate = statistics.median(rates[1:])
    medians = {each: statistics.median(values[1:]) for each, values in tokens.items()}
    print(f"{name}, batch {args.batch}, {torch.get_num_threads()} threads, reading at {rate / 1e9:.1f} GB/s")
    for each, (_, model) in cases.items():
        kept, floor_s = tokens[each][1:], bytes_read(model) / rate
        of_eager = medians[each] / medians["eager fp32"]
        print(
            f"  {each:<22}prompt {1e3 * statistics.median(prompts[each][1:]):8.2f} ms   token "
            f"{1e3 * medians[each]:7.2f} ({1e3 * min(kept):.2f} {1e3 * max(kept):.2f}) ms   {of_eager:5.2f} of eager "
            f"fp32   {medians[each] / floor_s:5.2f} of the floor"
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
    args = parser.parse_args()
    for name in args.models:
        measure(name, args)


if __name__ == "__main__":
    main()

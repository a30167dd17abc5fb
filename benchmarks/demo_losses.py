"""Losses of the demo when it is trained with less communication or less computation, beside Adam's.

    python benchmarks/demo_losses.py                                       # every kind, 600 steps
    python benchmarks/demo_losses.py --steps 300 --only OneBitAdam random_ltd

Each kind trains `examples/train_gpt.py` on two ranks, in fp32 at stage 0 without weight decay, from the same weights on
the same batches. A first phase takes a third of the steps, and a schedule of tokens two thirds. The table has the
validation loss at the end, its ratio to Adam's, and the share of the layers' tokens that training has computed.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
#: LAMB scales an update to the size of its weights, so its lr is the relative change in a step
LAMB = {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "min_coeff": 0.001}
PARAMS = {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8}
LAYERS, SEQUENCE_LENGTH = 4, 128


def changes(kind: str, steps: int, theta: float) -> dict[str, Any]:
    """Return the sections of the configuration by which `kind` differs from Adam."""
    first = steps // 3
    ltd = {
        **{"enabled": True, "total_layer_num": LAYERS, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2]},
        **{"model_mask_name": None, "model_type": "decoder", "hidden_state_order": "batch_seq_dim"},
        "random_ltd_schedule": {
            **{"min_value": SEQUENCE_LENGTH // 2, "max_value": SEQUENCE_LENGTH, "schedule_type": "fixed_linear"},
            "schedule_config": {"require_steps": 2 * first, "seq_per_step": 8},
        },
    }
    intervals = {"var_update_scaler": 16, "local_step_scaler": 1000, "local_step_clipper": 4}
    return {
        "Adam": {},
        "OneBitAdam": {"optimizer": {"type": "OneBitAdam", "params": {**PARAMS, "freeze_step": first}}},
        "ZeroOneAdam": {
            "optimizer": {"type": "ZeroOneAdam", "params": {**PARAMS, "var_freeze_step": first, **intervals}}
        },
        "Lamb": {"optimizer": {"type": "Lamb", "params": LAMB}},
        "OneBitLamb": {"optimizer": {"type": "OneBitLamb", "params": {**LAMB, "freeze_step": first}}},
        "local_sgd": {"local_sgd": {"enabled": True, "sync_every": max(1, steps // 60)}},
        "layer_drop": {"progressive_layer_drop": {"enabled": True, "theta": theta, "gamma": 0.6 / steps}},
        "random_ltd": {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}},
    }[kind]


KINDS = ("Adam", "OneBitAdam", "ZeroOneAdam", "Lamb", "OneBitLamb", "local_sgd", "layer_drop", "random_ltd")


def config_of(kind: str, steps: int, theta: float) -> dict[str, Any]:
    """Return the configuration of `kind`: that of the demo in fp32, at stage 0, without weight decay."""
    config = json.loads((EXAMPLES / "ds_config.json").read_text())
    del config["bf16"]
    config["zero_optimization"]["stage"] = 0
    config["optimizer"] = {"type": "Adam", "params": PARAMS}
    config["scheduler"]["params"].update(total_num_steps=steps, warmup_num_steps=max(1, steps // 15))
    return {**config, **changes(kind, steps, theta)}


@contextmanager
def counted_tokens() -> Iterator[dict[str, int]]:
    """Count the tokens that layers compute in training, and those that they would compute if none was dropped."""
    from deepspeed.testing.models import GPT, Block
    from torch.nn.modules.module import register_module_forward_pre_hook

    counts = {"computed": 0, "all": 0}

    def count(module: Any, inputs: tuple[Any, ...]) -> None:
        if module.training and isinstance(module, Block):
            counts["computed"] += inputs[0].shape[0] * inputs[0].shape[1]
        elif module.training and isinstance(module, GPT):
            counts["all"] += inputs[0].numel() * LAYERS

    handle = register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def train(kind: str) -> None:
    """Run the demo as one rank, with the model that `kind` needs."""
    sys.path.insert(0, str(EXAMPLES))
    import deepspeed
    import torch
    import train_gpt  # type: ignore[import-not-found]
    from deepspeed.testing import models
    from torch import Tensor
    from torch.nn.functional import cross_entropy

    class DroppingGPT(models.GPT):
        """A GPT that leaves out layers, the deeper the more often (arXiv 2010.13369, equation 6)."""

        def forward(
            self,
            tokens: Tensor,
            targets: Tensor | None = None,
            *,
            progressive_layer_drop: bool = False,
            pld_theta: float = 1.0,
        ) -> Tensor:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for depth, block in enumerate(self.blocks, start=1):
                drops = progressive_layer_drop and self.training
                kept = 1 - depth / len(self.blocks) * (1 - pld_theta) if drops else 1.0
                if kept == 1.0 or torch.rand(()) < kept:
                    x = x + (block(x) - x) / kept
            logits = self.head(self.norm(x))
            return logits if targets is None else cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if kind == "layer_drop":
        train_gpt.GPT = DroppingGPT
    if kind == "random_ltd":
        from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd

        initialize = deepspeed.initialize

        def converted(**arguments: Any) -> Any:
            engine, *rest = initialize(**arguments)
            return convert_to_random_ltd(engine, models.Block), *rest

        train_gpt.deepspeed.initialize = converted
    with counted_tokens() as counts:
        train_gpt.main()
    if os.environ["RANK"] == "0":
        print(json.dumps(counts), flush=True)


def run(kind: str, steps: int, theta: float, folder: Path) -> tuple[float, float]:
    """Train on two ranks, and return the last validation loss and the share of layers' tokens that was computed."""
    file, output = folder / f"{kind}.json", folder / kind
    file.write_text(json.dumps(config_of(kind, steps, theta)))
    words = ["--train", kind, "--deepspeed", "--deepspeed_config", str(file), "--output", str(output)]
    words += ["--save-every", str(steps + 1), "--sample-bytes", "10"]
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", __file__, *words]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    counts = next(json.loads(line) for line in printed.splitlines() if line.startswith('{"computed"'))
    with (output / "metrics.csv").open() as rows:
        last = list(csv.DictReader(rows))[-1]
    return float(last["validation_loss"]), counts["computed"] / counts["all"]


def main() -> None:
    """Train every kind and print the table."""
    if "--train" in sys.argv:  # a rank of `run`
        place = sys.argv.index("--train")
        kind = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        train(kind)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    parser.add_argument("--theta", type=float, default=0.5, help="least share of layers that layer_drop keeps")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    options = parser.parse_args()
    print(f"{'':14}{'loss':>8}{'to Adam':>9}{'computed':>10}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        adam: float | None = None
        for kind in sorted(options.only, key=KINDS.index):
            loss, share = run(kind, options.steps, options.theta, Path(folder))
            adam = loss if kind == "Adam" else adam
            ratio = f"{loss / adam:9.3f}" if adam is not None else f"{'':9}"
            print(f"{kind:14}{loss:8.3f}{ratio}{share:10.2f}", flush=True)


if __name__ == "__main__":
    main()

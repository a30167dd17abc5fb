"""Train a small byte-level GPT on the source of Python's standard library, with ZeRO-2 on two ranks.

    deepspeed --num_accelerators 2 examples/train_gpt.py            # about two minutes on two cores
    deepspeed --num_accelerators 2 examples/train_gpt.py --resume   # continue from the last checkpoint
    python examples/train_gpt.py                                    # one rank, no launcher

ds_config.json has the training options, stdlib_text.py the corpus, and training_log.py the progress bar and the plot.
"""

import argparse
import time
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.testing.models import GPT, GPTConfig
from stdlib_text import Corpus, draw_batch
from training_log import Metrics, TrainingLog

SEQUENCE_LENGTH = 128
VALIDATION_BATCHES = 8
MEBIBYTE = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--steps", type=int, help="stop at this step (default: the scheduler's total_num_steps)")
    parser.add_argument("--output", type=Path, default=Path("runs/gpt"))
    parser.add_argument("--check-every", type=int, default=100, help="steps between validation losses")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--sample-bytes", type=int, default=400, help="length of the text written at the end")
    parser.add_argument("--text-megabytes", type=float, help="train on so much of the text (default: all)")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed=True, deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, sequence_length=SEQUENCE_LENGTH, num_layers=4, num_heads=4, width=256))
    engine, _, _, _ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    corpus = Corpus(arguments.text_megabytes)

    first_step = resume(engine, arguments)
    last_step = arguments.steps or engine.config["scheduler"]["params"]["total_num_steps"]
    if first_step >= last_step:
        last_step = first_step + max(1, last_step // 4)  # the run was complete: train a quarter more at the last rate
    arguments.output.mkdir(parents=True, exist_ok=True)
    steps = range(first_step + 1, last_step + 1)
    if dist.get_rank() == 0:
        entropy = corpus.unigram_entropy()
        describe(engine, corpus, entropy, steps)
        with TrainingLog(arguments.output, first_step, last_step) as log:
            train(engine, corpus, arguments, steps, log)
        conclude(arguments, entropy, log, sample(engine, arguments.sample_bytes))
    else:
        train(engine, corpus, arguments, steps, log=None)
        sample(engine, arguments.sample_bytes)
    dist.barrier()
    dist.destroy_process_group()


def resume(engine: deepspeed.DeepSpeedEngine, arguments: argparse.Namespace) -> int:
    """Load the last checkpoint if `--resume` is set, and return the number of finished steps."""
    if not arguments.resume:
        return 0
    path, _ = engine.load_checkpoint(str(arguments.output / "checkpoint"))
    if path is None:
        raise SystemExit(f"--resume: no checkpoint in {arguments.output / 'checkpoint'}; run once without --resume")
    return engine.global_steps


def train(
    engine: deepspeed.DeepSpeedEngine,
    corpus: Corpus,
    arguments: argparse.Namespace,
    steps: range,
    log: TrainingLog | None,
) -> None:
    """Run the training loop with regular validation losses and checkpoints."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batch = engine.train_micro_batch_size_per_gpu()
    for step in steps:
        start_s = time.perf_counter()
        tokens, targets = draw_batch(corpus.train, batch, SEQUENCE_LENGTH, seed=step * num_ranks + rank)
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        elapsed_s = time.perf_counter() - start_s

        mean_loss, memory_mib = report_from_all_ranks(loss)
        validation_loss = None
        if step % arguments.check_every == 0 or step == steps[-1]:
            validation_loss = validate(engine, corpus)
        if step % arguments.save_every == 0 or step == steps[-1]:
            engine.save_checkpoint(str(arguments.output / "checkpoint"))
        if log is not None:
            log.add(
                Metrics(
                    step=step,
                    loss=mean_loss,
                    validation_loss=validation_loss,
                    learning_rate=engine.get_lr()[0],
                    gradient_norm=float(engine.get_global_grad_norm() or 0),
                    tokens_per_s=num_ranks * tokens.numel() / elapsed_s,
                    memory_mib=" ".join(f"{mib:.0f}" for mib in memory_mib),
                )
            )


def report_from_all_ranks(loss: torch.Tensor) -> tuple[float, list[float]]:
    """Return the mean loss and each rank's memory in MiB, with one small all-gather."""
    mine = torch.tensor([loss.item(), get_accelerator().memory_allocated() / MEBIBYTE], device=loss.device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    losses, memory_mib = torch.stack(everyones).T.tolist()
    return sum(losses) / len(losses), memory_mib


@torch.no_grad()
def validate(engine: deepspeed.DeepSpeedEngine, corpus: Corpus) -> float:
    """Return the loss on fixed validation windows, which are distributed over the ranks.

    ZeRO-3 needs the same number of forwards on each rank. Extra forwards past the last window do not count.
    """
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for first in range(0, VALIDATION_BATCHES, dist.get_world_size()):
        number = first + dist.get_rank()
        tokens, targets = draw_batch(corpus.validation, 16, SEQUENCE_LENGTH, seed=number)
        loss = engine(tokens.to(engine.device), targets.to(engine.device)).float()
        if number < VALIDATION_BATCHES:
            total += loss
    dist.all_reduce(total)
    engine.train()
    return total.item() / VALIDATION_BATCHES


@torch.no_grad()
def sample(engine: deepspeed.DeepSpeedEngine, num_bytes: int) -> str:
    """Generate text byte by byte. All ranks must call it, because ZeRO-3 shards the weights."""
    start = torch.tensor([list(b"def ")], device=engine.device)
    text = engine.module.sample(start, num_bytes, temperature=0.7, generator=torch.Generator().manual_seed(0))
    return bytes(text[0].tolist()).decode("utf-8", errors="replace")


def describe(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, entropy: float, steps: range) -> None:
    """Print a summary of the run in three lines."""
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    megabytes = (len(corpus.train) + len(corpus.validation)) / 1e6
    stage = engine.zero_optimization_stage()
    print(f"GPT of {numel / 1e6:.1f} M parameters, {dist.get_world_size()} ranks on {engine.device}, ZeRO-{stage}")
    print(f"text: {megabytes:.1f} MB of {corpus.num_files} files; unigram entropy {entropy:.3f} nats per byte")
    print(
        f"{'training from the start' if steps[0] == 1 else f'resuming after step {steps[0] - 1}'}, to step {steps[-1]}"
    )


def conclude(arguments: argparse.Namespace, entropy: float, log: TrainingLog, text: str) -> None:
    """Print the final losses, the entropy, generated text and the paths of all results."""
    final = log.rows[-1]
    print(
        f"\nloss {final.loss:.3f}, validation {final.validation_loss:.3f}, unigram entropy {entropy:.3f} nats per byte"
    )
    print(f"\n--- the model writes ---\n{text}\n------------------------\n")
    print(f"checkpoint: {arguments.output / 'checkpoint'} (go on with --resume)")
    print(f"metrics:    {arguments.output / 'metrics.csv'}")
    print(f"picture:    {log.draw(entropy).resolve()}")


if __name__ == "__main__":
    main()

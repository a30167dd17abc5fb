"""What the recipes train: a tiny GPT-2 with random weights that learns to count."""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH = 32, 16


def parse(description: str) -> argparse.ArgumentParser:
    """The arguments that every recipe has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--stage", choices=("none", "0", "1", "2", "3"), required=True, help="none: plain torch, with DDP"
    )
    parser.add_argument("--folder", type=Path, required=True, help="gets the losses (result.json) and checkpoints")
    parser.add_argument("--bf16", action="store_true")
    return parser


def create_model(dropout: float = 0.0) -> GPT2LMHeadModel:
    """The same random weights in every call. Its output layer is tied to its embedding."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(create_config(dropout))


def create_config(dropout: float = 0.0) -> GPT2Config:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    rates = {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout}
    return GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)


def create_samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Counting upwards from anywhere: the next token can be learned."""
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": tokens, "labels": tokens} for tokens in (starts + torch.arange(LENGTH)) % VOCABULARY]

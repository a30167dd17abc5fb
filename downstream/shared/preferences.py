"""Text for TRL: words that count, and pairs of which the counting one is preferred. Nothing is downloaded."""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset
from task import LENGTH, VOCABULARY, create_samples
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}


def create_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, in the model's vocabulary."""
    words = [*SPECIAL.values(), *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **SPECIAL)


def _words(count: int) -> list[list[str]]:
    num_words = VOCABULARY - len(SPECIAL)
    return [[f"w{int(token) % num_words}" for token in sample["input_ids"][:12]] for sample in create_samples(count)]


def create_texts(count: int) -> Dataset:
    """For supervised fine-tuning."""
    return Dataset.from_list([{"text": " ".join(words)} for words in _words(count)])


def create_pairs(count: int, cache: Path) -> Dataset:
    """For preferences: the chosen completion counts up, the rejected one counts down. The ranks share `cache`."""
    return Dataset.from_generator(_pairs, cache_dir=str(cache), gen_kwargs={"count": count})


def _pairs(count: int) -> Iterator[dict[str, str]]:
    for words in _words(count):
        yield {
            "prompt": " ".join(words[:4]),
            "chosen": " " + " ".join(words[4:]),
            "rejected": " " + " ".join(reversed(words[4:])),
        }


def create_prompts(count: int) -> Dataset:
    """For trainers that generate the completions."""
    return Dataset.from_list([{"prompt": " ".join(words[:4])} for words in _words(count)])

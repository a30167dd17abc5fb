"""Text for TRL: words that count, and pairs of which the counting one is preferred. Nothing is downloaded."""

from datasets import Dataset
from task import LENGTH, VOCABULARY, create_samples
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<unk>"]


def create_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, in the model's vocabulary."""
    words = SPECIAL + [f"w{number}" for number in range(VOCABULARY - len(SPECIAL))]
    model = models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=LENGTH
    )


def _words(count: int) -> list[list[str]]:
    num_words = VOCABULARY - len(SPECIAL)
    return [[f"w{int(token) % num_words}" for token in sample["input_ids"][:12]] for sample in create_samples(count)]


def create_texts(count: int) -> Dataset:
    """For supervised fine-tuning."""
    return Dataset.from_list([{"text": " ".join(words)} for words in _words(count)])


def create_pairs(count: int) -> Dataset:
    """For preferences: the chosen completion counts up, the rejected one counts down."""
    return Dataset.from_list(
        [
            {
                "prompt": " ".join(words[:4]),
                "chosen": " " + " ".join(words[4:]),
                "rejected": " " + " ".join(reversed(words[4:])),
            }
            for words in _words(count)
        ]
    )

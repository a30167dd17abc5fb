"""examples/serve.py, as a server of its own and a client over HTTP: the tokens of the plain model, streamed."""

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import GPT, GPTConfig

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(300)
BROKEN = "\a"  # a character after which all numbers are NaN
SIZES = GPTConfig(vocab_size=256, sequence_length=64, num_layers=2, num_heads=2, width=32)


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Its "host:port"."""
    command = [sys.executable, str(ROOT / "examples/serve.py"), "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:  # ends where the server does
            if line.startswith("serving at http://"):
                address = line.strip().removeprefix("serving at http://")
                break
        try:
            assert address, "the server ended before it served"
            yield address
        finally:
            process.terminate()


@contextmanager
def asked(address: str, **order: Any) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection(address)) as connection:
        connection.request("POST", "/generate", json.dumps(order), {"content-type": "application/json"})
        with connection.getresponse() as response:
            yield response


def answer(address: str, **order: Any) -> list[dict[str, Any]]:
    with asked(address, **order) as response:
        assert response.status == 200
        return [json.loads(line) for line in response]


def refusal(address: str, **order: Any) -> str:
    with asked(address, **order) as response:
        assert response.status == 422
        return str(json.load(response)["detail"])


def health(address: str) -> dict[str, int]:
    with closing(http.client.HTTPConnection(address)) as connection:
        connection.request("GET", "/health")
        found: dict[str, int] = json.load(connection.getresponse())
        return found


def trained(folder: str) -> None:
    torch.manual_seed(0)
    model = GPT(SIZES)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not 0 and 1, logits that are far apart
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.tokens.weight[ord(BROKEN)] = float("nan")
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.save_checkpoint(folder)
    torch.save(engine.module.state_dict(), f"{folder}/plain.pt")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, GPT]]:
    """The address of a server of the demo's checkpoint, and the model."""
    folder = tmp_path_factory.mktemp("demo")
    run_ranks(1, trained, str(folder))
    plain = GPT(SIZES)
    plain.load_state_dict(torch.load(folder / "plain.pt"))
    with server("--checkpoint", str(folder), "--num-heads", "2") as address:
        yield address, plain


def test_the_demos_checkpoint_is_served_to_many_clients_at_once(demo: tuple[str, GPT]) -> None:
    address, plain = demo
    prompts = ["def ", "a", "import os, sys\n", "zw\u00f6lf"]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: answer(address, prompt=prompt, max_new_tokens=20), prompts))
    for prompt, lines in zip(prompts, answers, strict=True):
        given = list(prompt.encode())
        wanted = plain.sample(torch.tensor([given]), 20, temperature=0)[0, len(given) :].tolist()
        assert [line["token"] for line in lines] == wanted
        assert "".join(line["text"] for line in lines) == bytes(wanted).decode(errors="replace")
        assert [line["finish"] for line in lines] == [""] * 19 + ["length"]


def test_wrong_requests_are_answered_with_the_reason(demo: tuple[str, GPT]) -> None:
    address, _ = demo
    assert "max_context is 64" in refusal(address, prompt="x" * 60, max_new_tokens=20)
    assert "top_p is above 0" in refusal(address, prompt="a", top_p=0)
    assert "max_tokens" in refusal(address, prompt="x", max_tokens=3)
    assert "seed is an integer from" in refusal(address, prompt="x", temperature=1.0, seed=2**64)
    assert "temperature is a number of 0 or more" in refusal(address, prompt="x", temperature=-1)
    for temperature in (float("nan"), "warm", None):
        assert "temperature" in refusal(address, prompt="x", temperature=temperature)
    assert health(address) == {"running": 0, "waiting": 0}


def test_a_request_that_fails_is_answered_with_the_reason_and_harms_no_other(demo: tuple[str, GPT]) -> None:
    address, plain = demo
    prompts = ["def ", f"x{BROKEN}", "a"]
    orders = [{"prompt": prompt, "max_new_tokens": 20, "temperature": 1e-40} for prompt in prompts]
    with ThreadPoolExecutor(len(orders)) as clients:
        answers = list(clients.map(lambda order: answer(address, **order), orders))
    (failed,) = answers.pop(1)
    assert "the greatest logit of its next token is nan" in failed["error"]
    for prompt, lines in zip(("def ", "a"), answers, strict=True):
        given = list(prompt.encode())
        wanted = plain.sample(torch.tensor([given]), 20, temperature=0)[0, len(given) :].tolist()
        assert [line["token"] for line in lines] == wanted
    assert health(address) == {"running": 0, "waiting": 0}
    assert len(answer(address, prompt="a", max_new_tokens=3)) == 3


def test_a_seed_gives_the_same_text_again(demo: tuple[str, GPT]) -> None:
    address, _ = demo
    order = {"prompt": "a", "temperature": 1.0, "max_new_tokens": 9}
    first, again, other = (answer(address, seed=seed, **order) for seed in (3, 3, 4))
    assert first == again != other


def test_a_client_that_goes_away_ends_its_request(demo: tuple[str, GPT]) -> None:
    address, _ = demo
    with asked(address, prompt="a", max_new_tokens=63) as response:
        assert json.loads(response.readline())["finish"] == ""
    while health(address)["running"]:  # until the server has seen it; the test's own limit ends this
        pass
    assert len(answer(address, prompt="a", max_new_tokens=5)) == 5


def test_without_the_demos_checkpoint_it_says_how_to_make_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/serve.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "there is no folder runs/gpt/checkpoint; make it by `make demo`, or give --model" in ended.stderr


def test_a_folder_of_transformers_is_served_with_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "one", "two", "three", "four", "five", "six", "seven"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, eos_token_id=None, **sizes))
    model.save_pretrained(tmp_path)
    wanted = model.eval().generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"state_manager": {"memory_config": {"mode": "allocate", "size": 4}}}))
    with server("--model", str(tmp_path), "--engine-config", str(config)) as address:
        lines = answer(address, prompt="one two three", max_new_tokens=6)
    assert [line["token"] for line in lines] == wanted
    assert "".join(line["text"] for line in lines) == " ".join(words[token] for token in wanted)

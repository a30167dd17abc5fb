"""Serve a model over HTTP with streamed tokens: the checkpoint of train_gpt.py, or a transformers folder.

    python examples/serve.py                                    # runs/gpt/checkpoint, written by train_gpt.py
    python examples/serve.py --model folder --port 8000         # a causal language model of transformers
    curl -N http://127.0.0.1:8000/generate -d '{"prompt": "def "}' -H 'content-type: application/json'

Needs fastapi and uvicorn. All requests share the forwards of one process (docs/howto/serve-many-requests.md). The
example shows how to drive an engine. It is not a production server: no rate limits, authentication or metrics.
"""

import argparse
import asyncio
import codecs
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager

import torch
import uvicorn
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.errors import ConfigError
from deepspeed.inference.v2 import InferenceEngineV2, NewToken, RequestError, Sampling, Scheduler, build_hf_engine
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict


class Driver:
    """Runs scheduler steps while there is work. Only one thread uses the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._thread = ThreadPoolExecutor(1, "scheduler")
        self._streams: dict[int, asyncio.Queue[NewToken | RequestError | None]] = {}
        self._has_work = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the step loop during the life of the server."""
        self._steps = asyncio.create_task(self._run())
        yield
        self._steps.cancel()
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._has_work.wait()
                for new in await loop.run_in_executor(self._thread, self._step):
                    if (stream := self._streams.get(new.uid)) is not None:  # None: the request was cancelled
                        stream.put_nowait(new)
                if not self.scheduler.has_work:
                    self._has_work.clear()
        finally:  # a step failed or the server ends: end all requests
            for stream in self._streams.values():
                stream.put_nowait(None)

    def _step(self) -> Sequence[NewToken | RequestError]:
        """Run a step. The error of a request goes only to its client."""
        try:
            return self.scheduler.step()
        except RequestError as error:
            return [error]

    async def stream(self, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> AsyncGenerator[NewToken]:
        """Submit a request to the scheduler, and return an iterator over its tokens.

        Raises:
            ConfigError: see `Scheduler.submit`.
            HTTPException: an earlier step failed.
        """
        if self._steps is None or self._steps.done():
            raise HTTPException(503, "a step of the scheduler failed; see the server's log")
        arrived: asyncio.Queue[NewToken | RequestError | None] = asyncio.Queue()

        def submit() -> int:
            uid = self.scheduler.submit(prompt, max_new_tokens, sampling=sampling)
            self._streams[uid] = arrived
            return uid

        uid = await asyncio.get_running_loop().run_in_executor(self._thread, submit)
        self._has_work.set()
        return self._tokens(uid, arrived)

    async def _tokens(
        self, uid: int, arrived: asyncio.Queue[NewToken | RequestError | None]
    ) -> AsyncGenerator[NewToken]:
        try:
            while (new := await arrived.get()) is not None:
                if isinstance(new, RequestError):
                    raise new
                yield new
                if new.finish:
                    return
        finally:  # the client may disconnect before the last token
            del self._streams[uid]
            self._thread.submit(self.scheduler.cancel, uid)


# ----- text and tokens -----------------------------------------------------------------------------------------------


class ByteText:
    """The text encoding of train_gpt.py: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decoder(self) -> Callable[[int, bool], str]:
        """Return a function (token, whether it is the last token) -> new complete characters."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token, is_last: decoder.decode(bytes([token]), is_last)


class TokenizerText:
    """The text encoding of a transformers folder with a tokenizer."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text).input_ids
        return tokens

    def decoder(self) -> Callable[[int, bool], str]:
        """Return a function as in `ByteText`. It returns no text while the last character is incomplete."""
        tokens: list[int] = []
        given = ""

        def decode(token: int, is_last: bool) -> str:
            nonlocal given
            tokens.append(token)
            text = self.tokenizer.decode(tokens)
            if text.endswith("\N{REPLACEMENT CHARACTER}") and not is_last:
                return ""
            new, given = text[len(given) :], text
            return str(new)

        return decode


# ----- HTTP ----------------------------------------------------------------------------------------------------------


class Order(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")
    prompt: str
    max_new_tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def create_app(driver: Driver, text: ByteText | TokenizerText) -> FastAPI:
    """Create the app: POST /generate streams a line of JSON per token or error, GET /health returns request counts."""
    app = FastAPI(title="examples/serve.py", lifespan=lambda _: driver.running())

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"running": driver.scheduler.num_running, "waiting": driver.scheduler.num_waiting}

    @app.post("/generate")
    async def generate(order: Order) -> StreamingResponse:
        try:
            sampling = Sampling(order.temperature, order.top_k, order.top_p, order.seed)
            tokens = await driver.stream(text.encode(order.prompt), order.max_new_tokens, sampling)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from error
        return StreamingResponse(lines(tokens), media_type="application/x-ndjson")

    async def lines(tokens: AsyncGenerator[NewToken]) -> AsyncIterator[str]:
        decode, finish = text.decoder(), ""
        reason = "the server ended, or a step of the scheduler failed; see its log"
        try:
            async with aclosing(tokens):
                async for new in tokens:
                    said, finish = decode(new.token, bool(new.finish)), new.finish
                    yield json.dumps({"token": new.token, "text": said, "finish": finish}) + "\n"
        except RequestError as error:
            reason = str(error)
        if not finish:
            yield json.dumps({"error": reason}) + "\n"

    return app


# ----- the model -----------------------------------------------------------------------------------------------------


def demo_model(checkpoint: str, num_heads: int) -> torch.nn.Module:
    """Load the GPT of train_gpt.py as transformers' GPT-2: renamed layers, transposed weights of linear layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint)
    vocabulary, width = state["tokens.weight"].shape
    num_layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=state["positions.weight"].shape[0],
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        activation_function="gelu",
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    names = {"tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
    for layer in range(num_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        names |= {f"{ours}attention_norm": f"{theirs}ln_1", f"{ours}mlp_norm": f"{theirs}ln_2"}
        names |= {f"{ours}attention.qkv": f"{theirs}attn.c_attn", f"{ours}attention.out": f"{theirs}attn.c_proj"}
        names |= {f"{ours}mlp_in": f"{theirs}mlp.c_fc", f"{ours}mlp_out": f"{theirs}mlp.c_proj"}
    weights = {}
    for name, value in state.items():
        module, _, kind = name.rpartition(".")
        is_turned = kind == "weight" and names[module].rpartition(".")[2].startswith("c_")
        weights[f"{names[module]}.{kind}"] = value.t() if is_turned else value
    model = GPT2LMHeadModel(config)
    model.load_state_dict(weights)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--checkpoint", default="runs/gpt/checkpoint", help="of the demo")
    parser.add_argument("--num-heads", type=int, default=4, help="of the demo's model, which its checkpoint lacks")
    parser.add_argument("--model", help="a folder of transformers with its tokenizer, instead of the demo's checkpoint")
    parser.add_argument("--engine-config", help="JSON file with the keys of RaggedInferenceEngineConfig")
    parser.add_argument("--blocks", type=int, default=512, help="of the cache, where --engine-config is not given")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    arguments = parser.parse_args()
    if arguments.model is None and not os.path.isdir(arguments.checkpoint):
        parser.error(
            f"--checkpoint: there is no folder {arguments.checkpoint}; make it by `make demo`, or give --model, a "
            "folder of transformers with its tokenizer"
        )
    blocks = {"state_manager": {"memory_config": {"mode": "allocate", "size": arguments.blocks}}}
    config = arguments.engine_config or blocks
    text: ByteText | TokenizerText = ByteText()
    if arguments.model is None:
        engine = InferenceEngineV2(demo_model(arguments.checkpoint, arguments.num_heads), config)
    else:
        engine, text = build_hf_engine(arguments.model, config), TokenizerText(arguments.model)
    driver = Driver(Scheduler(engine))
    with socket.create_server((arguments.host, arguments.port)) as listener:
        host, port = listener.getsockname()[:2]
        print(f"serving at http://{host}:{port}", flush=True)
        uvicorn.Server(uvicorn.Config(create_app(driver, text), log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()

"""Run the examples of docs/gallery.md and draw their pictures: `python gallery.py [NAME ...] [--check]`.

Each takes two CPU cores and at most a minute and a half of processor time, and leaves its files in runs/gallery. The
seconds of the page, processor time of all processes, are written from the runs. `--check` runs nothing. It holds the
page to its files: there is a card for each example, in this order, whose picture is there and small; links lead
somewhere; the command names files that exist; and the lines of code are in a file that the card links to, which the
tests run.
"""

import argparse
import csv
import http.client
import json
import os
import re
import resource
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gallery.md"
PICTURES = ROOT / "docs/images/gallery"
RUNS = ROOT / "runs/gallery"
MAX_PICTURE_BYTES = 60_000
MEBIBYTE = 2**20
BLUE, ORANGE, GREEN, RED, GREY = "#4c78a8", "#f58518", "#54a24b", "#c44e52", "#8a8a8a"
STYLE = {
    "figure.figsize": (5.6, 3.2),
    "font.size": 9.0,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: small, and a changed number is one changed line
    "svg.hashsalt": "gallery",  # names of clip paths, which are random else
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
sys.path.insert(0, str(ROOT / "benchmarks"))  # here: the ranks that an example spawns import this file too


# ----- the examples: each runs, and returns its figure ---------------------------------------------------------------


def gpt(folder: Path) -> Any:
    """Losses of the demo's first steps."""
    steps = ("--steps", "60", "--check-every", "10", "--sample-bytes", "100")
    _launch("examples/train_gpt.py", *steps, "--output", str(folder))
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    sys.path.insert(0, str(ROOT / "examples"))
    from stdlib_text import Corpus

    entropy = Corpus().unigram_entropy()
    figure, axes = _figure()
    steps_done = [int(row["step"]) for row in rows]
    axes.plot(steps_done, [float(row["loss"]) for row in rows], color=BLUE, label="training batch")
    checked = [(int(row["step"]), float(row["validation_loss"])) for row in rows if row["validation_loss"]]
    axes.plot(*zip(*checked, strict=True), "o", color=ORANGE, label="validation")
    axes.axhline(entropy, color=GREY, linestyle="--", label=f"frequencies of bytes alone: {entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, None), title="GPT of 3.3 M, 2 ranks, ZeRO-2, bf16")
    axes.legend()
    return figure


def lora(folder: Path) -> Any:
    """Losses of adapters under ZeRO-2, and without DeepSpeed."""
    found = {}
    for stage in ("none", "2"):
        place = folder / f"stage_{stage}"
        words = ("--stage", stage, "--lora", "--steps", "48", "--folder", str(place))
        paths = {"PYTHONPATH": f"{ROOT / 'downstream/shared'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        _launch("--no_local_rank", "downstream/recipes/trl/sft.py", *words, **paths)
        found[stage] = json.loads((place / "result.json").read_text())["losses"]
    figure, axes = _figure()
    axes.plot(range(1, 49), found["2"], color=BLUE, label="ds-core, ZeRO-2")
    axes.plot(range(1, 49, 3), found["none"][::3], "o", color=ORANGE, markersize=5, fillstyle="none", label="torch DDP")
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None), title="LoRA of a tiny Llama, SFTTrainer")
    axes.legend()
    return figure


def pipeline(folder: Path) -> Any:
    """Passes of two stages, by two schedules."""
    schedules = {"1f1b": "1F1B", "zero_bubble": "zero bubble"}
    found = _on_ranks(_pipeline_passes, tuple(schedules))
    figure, rows = _figure(len(schedules), sharex=True)
    colors = {"ForwardPass": BLUE, "BackwardPass": ORANGE, "BackwardInput": ORANGE, "BackwardWeight": GREEN}
    for axes, (name, title) in zip(rows, schedules.items(), strict=True):
        passes, on_paper = found[0][name]
        begin, end = min(each[3] for each in passes), max(each[4] for each in passes)
        busy = sum(stop - start for *_, start, stop in passes)
        for stage, kind, micro, start, stop in passes:
            left, width = 1e3 * (start - begin), 1e3 * (stop - start)
            axes.barh(stage, width, left=left, height=0.8, color=colors[kind], edgecolor="white")
            axes.text(left + width / 2, stage, str(micro), ha="center", va="center", color="white", fontsize=8)
        idle = 1 - busy / (2 * (end - begin))
        axes.set(yticks=[0, 1], yticklabels=["stage 0", "stage 1"], ylim=(1.6, -0.6))
        axes.set_title(f"{title}: idle {idle:.0%} of the time, {on_paper:.0%} on paper", loc="left")
    rows[-1].set_xlabel("ms; a number is that of the micro-batch")
    from matplotlib.patches import Patch

    kinds = {"forward": BLUE, "backward (of inputs)": ORANGE, "backward of weights, moved": GREEN}
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in kinds.items()], loc="outside lower center", ncols=3
    )
    return figure


def experts(folder: Path) -> Any:
    """Tokens of each expert, before and after the gate has learned."""
    found = _on_ranks(_expert_counts)
    figure, axes = _figure()
    without, balanced = found[0][0.0], found[0][1.0]
    bars = [("first steps", balanced[:5], GREY), ("step 60, no balance loss", without[-5:], ORANGE)]
    bars.append(("step 60, with it", balanced[-5:], BLUE))
    for place, (label, rows, color) in enumerate(bars):
        means = [sum(row[expert] for row in rows) / len(rows) for expert in range(8)]
        axes.bar([expert + 0.27 * (place - 1) for expert in range(8)], means, width=0.25, color=color, label=label)
    even = sum(balanced[0]) / 8
    axes.axhline(even, color="black", linewidth=1, linestyle="--", label=f"even: {even:.0f}")
    axes.set(xlabel="expert (0 to 3 on rank 0, 4 to 7 on rank 1)", ylabel="tokens in a step", xticks=range(8))
    axes.set_title("8 experts over 2 ranks, 2 for each of 512 tokens")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
    axes.legend(ncols=2, loc="upper left")
    return figure


def sequences(folder: Path) -> Any:
    """Memory that one sequence takes on a rank, which has it all or shares it."""
    lengths = (512, 1024, 2048, 3072, 4096)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"  # what is freed goes back, and the heap has no gaps
    found = _on_ranks(_sequence_peaks, lengths)[0]
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    figure, axes = _figure()
    for label, color, mark in (("one rank has it all", ORANGE, "s-"), ("two ranks share it (Ulysses)", BLUE, "o-")):
        peaks = [found[label, length] / MEBIBYTE for length in lengths]
        axes.plot(lengths, peaks, mark, color=color, label=label)
        axes.annotate(f"{peaks[-1]:.0f}", (lengths[-1], peaks[-1]), (7, -3), textcoords="offset points")
    axes.set(xlabel="tokens of the sequence", ylabel="peak of a rank in a step, MiB", xticks=lengths)
    axes.set(ylim=(0, None), title="2 blocks of width 256, forward, backward and step")
    axes.legend()
    return figure


def nvme(folder: Path) -> Any:
    """Bytes of the optimizer in memory and on the disk, beside the page's formulas."""
    layers = (2, 8, 16, 24, 32, 48)
    found = _on_ranks(_nvme_bytes, layers, str(folder))
    millions = [row[0] / 1e6 for row in found[0]]
    figure, axes = _figure()
    for place, (color, label) in enumerate([(ORANGE, "on the disk"), (BLUE, "in memory")]):
        planned = [row[1 + 2 * place] / MEBIBYTE for row in found[0]]
        measured = [row[2 + 2 * place] / MEBIBYTE for row in found[0]]
        axes.plot(millions, planned, "--", color=color, label=f"{label}, by the formula")
        axes.plot(millions, measured, "o", color=color, label=f"{label}, measured")
    axes.set(xlabel="parameters, millions", ylabel="optimizer of a rank, MiB", ylim=(0, None), xlim=(0, None))
    axes.set_title("ZeRO-2 on 2 ranks, the optimizer in files")
    axes.legend()
    return figure


def server(folder: Path) -> Any:
    """Tokens per second over the number of requests that are under way."""
    checkpoint = RUNS / "gpt/checkpoint"
    if not checkpoint.exists():
        gpt(RUNS / "gpt")
    clients = (1, 2, 4, 8, 16, 32)
    with _serving(checkpoint) as address:
        _answers(address, 2)  # a first one compiles and allocates
        rounds = [[_answers(address, number) for number in clients] for _ in range(6)]
    rates = [max(each) for each in zip(*rounds, strict=True)]  # other jobs of the machine only slow a round
    figure, axes = _figure()
    axes.plot(clients, rates, "o-", color=BLUE)
    for number, rate in zip(clients, rates, strict=True):
        axes.annotate(f"{rate:,.0f}", (number, rate), (-3, 6), textcoords="offset points", ha="right")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="requests at once", ylabel="tokens per second, all together", ylim=(0, 1.1 * max(rates)), xlim=(0.7, 40)
    )
    axes.set(xticks=clients, xticklabels=clients, title="examples/serve.py over HTTP, the GPT of the first card")
    return figure


def extension(folder: Path) -> Any:
    """Outcomes of the conformance suite on the extension that the page renders, by theme."""
    as_session = runpy.run_path(str(ROOT / "docs/tests/test_pages.py"))["as_session"]
    session = as_session(ROOT / "docs/howto/write-an-extension.md", folder)
    whole = re.sub(r'ds_conformance -k "[^"]*"', "ds_conformance", session)
    assert whole != session, "write-an-extension.md: found no ds_conformance -k to take the -k from"
    _run("bash", "-c", whole, folder=folder, CHECKOUT=str(ROOT))
    return _conformance(json.loads((folder / "report.json").read_text())["tests"])


def _conformance(tests: list[dict[str, Any]]) -> Any:
    themes = list(dict.fromkeys(test["theme"] for test in tests))
    counts = Counter((test["theme"], test["outcome"]) for test in tests)
    sums = Counter(test["theme"] for test in tests)
    figure, axes = _figure(figsize=(5.6, 3.6))
    left = [0.0] * len(themes)
    colors = {"passed": GREEN, "skipped": "#cccccc", "expected": ORANGE, "failed": RED, "error": RED}
    for outcome, color in colors.items():
        if number := sum(test["outcome"] == outcome for test in tests):
            shares = [100 * counts[theme, outcome] / sums[theme] for theme in themes]
            label = f"{outcome}: {number}" + (", each with its reason" if outcome == "skipped" else "")
            axes.barh(themes, shares, left=left, color=color, label=label)
            left = [done + share for done, share in zip(left, shares, strict=True)]
    for row, theme in enumerate(themes):
        axes.text(102, row, f"{counts[theme, 'passed']} of {sums[theme]}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set(xlabel="passed, % of a theme's tests", xlim=(0, 118), xticks=range(0, 101, 25))
    figure.suptitle("ds_conformance of ds-ext-acme", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def verify(folder: Path) -> Any:
    """The command's own picture; no figure is drawn here."""
    style = folder / "matplotlibrc"
    style.write_text("".join(f"{key}: {value}\n" for key, value in STYLE.items() if key.startswith("svg.")))
    picture = folder / "verdict.svg"
    _run("ds_verify", "--plot", str(picture), "examples/broken_decay.py", codes=(1,), MATPLOTLIBRC=str(style))
    return picture


EXAMPLES: dict[str, Callable[[Path], Any]] = {
    each.__name__: each for each in (gpt, lora, pipeline, experts, sequences, nvme, server, extension, verify)
}


# ----- what ranks do -------------------------------------------------------------------------------------------------


def _pipeline_passes(schedules: tuple[str, ...]) -> dict[str, Any]:
    """By schedule: (stage, kind, micro-batch, start, stop) of the passes of the fastest of some steps, and the idle
    share on paper."""
    import deepspeed
    import torch
    from deepspeed.pipe.timeline import idle_share, timeline
    from pipeline import Block, PassClock

    num_micros, width, rows = 6, 384, 256
    found = {}
    for name in schedules:
        layers = [deepspeed.pipe.LayerSpec(Block, width) for _ in range(8)]
        loss = torch.nn.functional.mse_loss
        model = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": num_micros,
            "pipeline": {"schedule": name},
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        clock = PassClock(engine, num_micros)
        batch = [(torch.randn(rows, width), torch.randn(rows, width)) for _ in range(num_micros)]
        steps = []
        for _ in range(6):  # other jobs of the machine make most of them longer
            clock.start()
            engine.train_batch(iter(batch))
            steps.append([(each.stage, each.name, each.micro, each.start, each.stop) for each in clock.passes()])
        fastest = min(steps, key=lambda passes: max(each[4] for each in passes) - min(each[3] for each in passes))
        on_paper = idle_share(timeline([engine._schedule_type(num_micros, 2, stage) for stage in range(2)]))
        found[name] = fastest, on_paper
        engine.destroy()
    return found


def _expert_counts() -> dict[float, list[list[int]]]:
    """By the weight of the balance loss: the tokens of each expert in each step, of both ranks, in the first layer of
    the page's model."""
    import deepspeed
    import deepspeed.comm as dist
    import torch

    names = _defined(ROOT / "docs/howto/train-experts.md", 0)
    deepspeed.init_distributed()
    found: dict[float, list[list[int]]] = {}
    center = 2 * torch.randn(16, generator=torch.Generator().manual_seed(1))  # alike tokens go to the same experts
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        model = names["Net"](num_experts=8, ep_size=2)
        counts: list[Any] = []
        for block in model.blocks:
            block.moe.register_forward_hook(lambda _, __, outputs, w=weight: (outputs[0], w * outputs[1], outputs[2]))
        model.blocks[0].moe.register_forward_hook(lambda _, __, outputs, into=counts: into.append(outputs[2].clone()))
        config = {
            "train_micro_batch_size_per_gpu": 256,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 2},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        draw = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(60):
            loss = engine(torch.randn(256, 16, generator=draw) + center)
            engine.backward(loss)
            engine.step()
        total = torch.stack(counts)
        dist.all_reduce(total)
        found[weight] = total.tolist()
        engine.destroy()
    return found


def _sequence_peaks(lengths: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """By who has the sequence and its length: the peak of resident bytes above those before the step."""
    import deepspeed
    import deepspeed.comm as dist
    import resident_memory
    import torch
    from deepspeed.sequence.layer import DistributedAttention
    from sequence import VOCABULARY, Model, engine_step, local

    deepspeed.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    args = argparse.Namespace(width=256, layers=2)
    plain = Model(args, local)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)

    def alone(tokens: Any, labels: Any) -> None:
        if rank == 0:
            plain(tokens, labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    shared = engine_step(Model(args, DistributedAttention(local, dist.get_world_group(), 2, 1)), size)
    found = {}
    for length in lengths:
        tokens = torch.randint(0, VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(0))
        whole = tokens[:, :-1], tokens[:, 1:]
        part = tuple(each.chunk(size, 1)[rank].contiguous() for each in whole)
        for label, step, inputs in (
            ("one rank has it all", alone, whole),
            ("two ranks share it (Ulysses)", shared, part),
        ):
            step(*inputs)  # buffers are made, which stay
            before = resident_memory.resident_bytes()
            resident_memory.reset_peak()
            step(*inputs)
            found[label, length] = resident_memory.peak_bytes() - before
            dist.barrier()
    return found


def _nvme_bytes(layers: tuple[int, ...], folder: str) -> list[tuple[int, float, float, float, float]]:
    """For each depth: elements, bytes on the disk by the page's formula and of the file, and the same in memory."""
    import deepspeed
    import deepspeed.comm as dist
    import torch

    page = ROOT / "docs/howto/offload-to-nvme.md"
    config = _defined(page, 0, until="model = ")["config"]
    planned = _defined(page, 1, until="for _ in range")["optimizer_bytes"]
    deepspeed.init_distributed()
    bucket = 1_000_000
    config["zero_optimization"]["reduce_bucket_size"] = bucket
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = f"{folder}/nvme"
    sub_group = config["zero_optimization"]["sub_group_size"]
    rows = []
    for number in layers:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(number)))
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 512)).square().mean())
            engine.step()
        numel = sum(parameter.numel() for parameter in model.parameters())
        own = numel / dist.get_world_size()
        size = sum(path.stat().st_size for path in Path(folder, "nvme").rglob("*") if path.is_file())
        memory = planned(min(sub_group, own / 3), min(bucket, numel), ranks=dist.get_world_size())
        held = engine.sharding.placement.held_bytes
        rows.append((numel, 16 * own, size / dist.get_world_size(), memory, held))
        dist.barrier()
        engine.destroy()
    return rows


# ----- how they are run ----------------------------------------------------------------------------------------------


def _run(*words: str, folder: Path = ROOT, codes: tuple[int, ...] = (0,), **environment: str) -> None:
    """The command, with one thread per process; its output goes to `log` of its folder of runs.

    Raises:
        SystemExit: it ends with another code than expected.
    """
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)  # noqa: PLW1510
    if done.returncode not in codes:
        sys.exit(
            f"{shlex.join(words)[:200]} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )


def _launch(*words: str, **environment: str) -> None:
    """A script on two ranks, one core each."""
    _run("deepspeed", "--num_accelerators", "2", "--bind_cores_to_rank", *words, **environment)


def _on_ranks(work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(*args)` of two ranks, one core each."""
    import rank_processes

    return rank_processes.run(2, work, *args)


def _processor_s() -> float:
    """Processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _blocks(page: Path, mark: str) -> list[str]:
    """The texts of the page's blocks with that mark."""
    return re.findall(rf"^```{mark}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _defined(page: Path, number: int, until: str = "") -> dict[str, Any]:
    """What the page's Python block of that number defines, above the line that begins with `until`."""
    text = _blocks(page, "python")[number]
    if until:
        assert f"\n{until}" in text, f"{page.name}: found no line that begins with {until!r} in block {number}"
        text = text.partition(f"\n{until}")[0]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "block.py"
        script.write_text(text)
        return runpy.run_path(str(script))


@contextmanager
def _serving(checkpoint: Path) -> Iterator[str]:
    """examples/serve.py while the context is entered: its "host:port"."""
    command = [sys.executable, "examples/serve.py", "--checkpoint", str(checkpoint), "--port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begin = "serving at http://"
        address = next((line.strip().removeprefix(begin) for line in process.stdout if line.startswith(begin)), "")
        try:
            assert address, "examples/serve.py ended before it served"
            yield address
        finally:
            process.terminate()


def _answers(address: str, number: int) -> float:
    """Tokens per second of so many requests at once, 64 tokens each."""

    def ask(client: int) -> int:
        order = {"prompt": f"def f{client}(", "max_new_tokens": 64, "temperature": 0.7, "seed": client}
        with closing(http.client.HTTPConnection(address)) as connection:
            connection.request("POST", "/generate", json.dumps(order), {"content-type": "application/json"})
            return sum("token" in json.loads(line) for line in connection.getresponse())

    with ThreadPoolExecutor(number) as threads:
        start_s = time.perf_counter()
        tokens = sum(threads.map(ask, range(number)))
        return tokens / (time.perf_counter() - start_s)


# ----- pictures ------------------------------------------------------------------------------------------------------


def _figure(*shape: int, **options: Any) -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    from matplotlib import pyplot

    return pyplot.subplots(*shape, layout="constrained", **options)


def _save(name: str, figure: Any) -> None:
    """Write the picture without a date, and beside the run as PNG, to look at."""
    path = PICTURES / f"{name}.svg"
    if isinstance(figure, Path):
        text = figure.read_text()
    else:
        figure.savefig(RUNS / name / "picture.svg", metadata={"Date": None})
        figure.savefig(RUNS / name / "picture.png", dpi=120)
        text = (RUNS / name / "picture.svg").read_text()
    text = re.sub(r"\n *<dc:date>.*?</dc:date>", "", text)
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


# ----- the page ------------------------------------------------------------------------------------------------------


def _cards(page: str) -> list[str]:
    """The texts of the page's cards: a list item each."""
    grid = page.partition('<div class="grid cards" markdown>')[2].partition("</div>")[0]
    return re.split(r"^- (?=\*\*)", grid, flags=re.MULTILINE)[1:]


def with_seconds(page: str, name: str, seconds: float) -> str:
    """The page with the time of an example in its card."""
    card = next(each for each in _cards(page) if f"images/gallery/{name}.svg" in each)
    return page.replace(card, re.sub(r"\b\d+ s\b", f"{seconds:.0f} s", card, count=1))


def faults(page: str) -> Iterator[str]:
    """What the page says that is not so."""
    cards = _cards(page)
    pictures = [re.findall(r"images/gallery/(\w+)\.svg", card) for card in cards]
    if pictures != [[name] for name in EXAMPLES]:
        yield f"cards show the pictures {pictures}; the examples are {list(EXAMPLES)}, in this order"
    there = {path.name for path in PICTURES.iterdir()}
    if there != {f"{name}.svg" for name in EXAMPLES}:
        yield f"{PICTURES} has {sorted(there)}; the examples are {list(EXAMPLES)}"
    for path in PICTURES.glob("*.svg"):
        text = path.read_text()
        if len(text) > MAX_PICTURE_BYTES or "<dc:date>" in text:
            yield f"{path.name}: found {len(text)} bytes; give at most {MAX_PICTURE_BYTES}, without a date"
    for card in cards:
        title = card.splitlines()[0]
        targets = [(PAGE.parent / each.split("#")[0]).resolve() for each in re.findall(r"\]\(([^)\s]+)\)", card)]
        yield from (f"{title}: links to {each}, which is not there" for each in targets if not each.exists())
        sources = "\n".join(each.read_text() for each in targets if each.suffix in (".md", ".py") and each.exists())
        lines = {line.strip() for line in sources.splitlines()}
        fences = re.findall(r"^ *```(.*?)\n(.*?)^ *```$", card, flags=re.MULTILINE | re.DOTALL)
        code = [text for mark, text in fences if mark == "python fragment"]
        commands = [text for mark, text in fences if mark == "sh"]
        if len(code) != 1 or len(commands) != 1 or not re.search(r"\b\d+ s\b", card):
            yield f"{title}: found {len(code)} blocks of code, {len(commands)} commands; give one each, and seconds"
        shown = [line.strip() for text in code for line in text.splitlines()]
        yield from (f"{title}: no file that it links to has {each!r}" for each in shown if each and each not in lines)
        words = shlex.split(" ".join(commands), comments=True)
        files = [word for word in words if word.endswith(".py") and "/" in word]
        yield from (f"{title}: the command names {each}, no file" for each in files if not (ROOT / each).exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXAMPLES)} (default: all)")
    parser.add_argument("--check", action="store_true", help="run nothing; hold the page to its files")
    arguments = parser.parse_args()
    if arguments.check:
        found = list(faults(PAGE.read_text(encoding="utf-8")))
        sys.exit("\n".join(found) or None)
    if unknown := set(arguments.names) - set(EXAMPLES):
        parser.error(f"found {', '.join(sorted(unknown))}; there are {', '.join(EXAMPLES)}")
    for name in arguments.names or EXAMPLES:
        folder = RUNS / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        before_s, start_s = _processor_s(), time.perf_counter()
        figure = EXAMPLES[name](folder)
        seconds, clock_s = _processor_s() - before_s, time.perf_counter() - start_s
        _save(name, figure)
        if PAGE.exists():
            PAGE.write_text(with_seconds(PAGE.read_text(encoding="utf-8"), name, seconds), encoding="utf-8")
        size = (PICTURES / f"{name}.svg").stat().st_size
        print(
            f"{name}: {seconds:.0f} s of processors, {clock_s:.0f} s by the clock, a picture of {size} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()

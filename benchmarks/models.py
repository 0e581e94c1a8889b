"""Measures whole models with random weights: `python -m benchmarks.models`, one JSON line a case.

Training steps on packed rows, prefill of long prompts, decoding of batches; each by our kernels, by plain JAX, and by
transformers with FLA's kernels in PyTorch where these are installed. Every case runs in a process of its own, so that
its peak of memory is its own.
"""

import argparse
import gzip
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lines import RESULTS, source_hash
from benchmarks.timing import quantile

PEAK_FLOPS = 989e12  # dense bf16 of H100 and H200, from the data sheet
IMPLEMENTATIONS = ("cuda", "xla", "torch")
PRESETS = ("qwen3.5-0.8b", "qwen3.5-4b")
REPEATS = 5
NEW_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        preset: Size of the model.
        task: `"train"`, `"prefill"` or `"decode"`.
        batch: Rows.
        length: Tokens of a row; of the prompt, for `"decode"`.
        implementation: Who runs it.
    """

    preset: str
    task: str
    batch: int
    length: int
    implementation: str


def cases(presets: list[str], tasks: list[str], implementations: list[str]) -> list[Case]:
    """What is measured: training at 8k and 32k, prefill at 32k, decoding of 1, 32 and 128 rows."""
    sizes = {"train": ((1, 8192), (1, 32768)), "prefill": ((1, 32768),), "decode": ((1, 1024), (32, 1024), (128, 1024))}
    return [
        Case(preset, task, batch, length, implementation)
        for preset in presets
        for task in tasks
        for batch, length in sizes[task]
        for implementation in implementations
    ]


def documents(length: int) -> list[int]:
    """Lengths of the documents packed into a row: eight, from a 64th of it to a quarter and more."""
    shares = (1, 2, 3, 5, 8, 11, 15)
    first = [share * length // 64 for share in shares]
    return [*first, length - sum(first)]


def tokens_and_ids(case: Case, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens, and the documents that they are in."""
    tokens = np.random.default_rng(0).integers(1, vocab_size, (case.batch, case.length)).astype(np.int32)
    ids = np.repeat(np.arange(1, 9, dtype=np.int32), documents(case.length))
    return tokens, np.broadcast_to(ids, tokens.shape)


def seconds_of(
    step: Callable[[], Any], wait: Callable[[Any], Any], repeats: int = REPEATS
) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of `step`, after two that warm up."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        wait(step())
        if i >= 2:
            times.append(time.perf_counter() - start)
    times.sort()
    return quantile(times, 0.5), quantile(times, 0.2), quantile(times, 0.8)


# Kinds of device work by what their kernels' names contain; the rest is fusions of elementwise work and copies.
KINDS = {
    "gated delta": ("gdn_",),
    "attention": ("cudnn", "flash", "sdpa", "fmha"),
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "xmma"),
}


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel of this name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def device_seconds(events: list[dict[str, Any]]) -> dict[str, float]:
    """Sums the kernels of a trace's streams by kind; a trace without a GPU gives nothing."""
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("ph") == "M" and "name" in e["args"]}
    seconds: dict[str, float] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        process, thread = names.get((event["pid"], None), ""), names.get((event["pid"], event["tid"]), "")
        if "GPU" in process and thread.startswith("Stream"):
            kind = kind_of(event["name"])
            seconds[kind] = seconds.get(kind, 0.0) + event["dur"] / 1e6
    return seconds


def profile(step: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each kind of device work in one call."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step())
        traces = list(Path(folder).rglob("*.trace.json.gz"))
        return device_seconds(json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]) if traces else {}


def run_jax(case: Case) -> dict[str, Any]:
    """Our models, on our kernels or on plain JAX."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jaxqla
    from jaxqla.models import QwenConfig, QwenForCausalLM, next_token_loss

    config = QwenConfig.preset(case.preset)
    training = case.task == "train"
    on_gpu = jax.default_backend() == "gpu"

    def new() -> Any:
        return QwenForCausalLM(
            config,
            dtype=jnp.bfloat16,
            param_dtype=jnp.float32 if training else jnp.bfloat16,
            scan_layers=True,
            remat=training,
            remat_policy=jaxqla.save_residuals if training else None,
            implementation=case.implementation,
            attention_implementation="cudnn" if on_gpu and case.task != "decode" else "xla",
            rngs=nnx.Rngs(params=0),
        )

    graph, params = nnx.graphdef(nnx.eval_shape(new)), jax.jit(lambda: nnx.state(new()))()
    tokens, ids = (jnp.asarray(x) for x in tokens_and_ids(case, config.vocab_size))
    start = time.perf_counter()
    if training:
        optimizer = optax.adamw(1e-4)
        moments = jax.jit(optimizer.init)(params)

        @jax.jit(donate_argnums=(0, 1))
        def step(params: Any, moments: Any) -> Any:
            def loss(params: Any) -> Any:
                return next_token_loss(nnx.merge(graph, params), tokens, segment_ids=ids)[0]

            value, grads = jax.value_and_grad(loss)(params)
            updates, moments = optimizer.update(grads, moments, params)
            return optax.apply_updates(params, updates), moments, value

        held = [params, moments, None]
        del params, moments

        def call() -> Any:
            held[:] = step(held[0], held[1])
            return held[2]

        losses = [float(call())]
        compile_s = time.perf_counter() - start
        timing = seconds_of(call, jax.block_until_ready)
        losses.append(float(held[2]))
        extra: dict[str, Any] = {"losses": losses, "profile": profile(call)}
    elif case.task == "prefill":
        prefill = jax.jit(lambda params: nnx.merge(graph, params)(tokens, logits_to_keep=1))
        jax.block_until_ready(prefill(params))
        compile_s = time.perf_counter() - start
        timing = seconds_of(lambda: prefill(params), jax.block_until_ready)
        extra = {"profile": profile(lambda: prefill(params))}
    else:

        @jax.jit
        def fill(params: Any) -> Any:
            model = nnx.merge(graph, params)
            cache = model.init_cache(case.batch, case.length + NEW_TOKENS)
            hidden, cache = model.hidden_states(tokens, cache=cache)
            return jnp.argmax(model.logits(hidden[:, -1]), axis=-1).astype(jnp.int32), cache

        @jax.jit
        def decode(params: Any, token: Any, cache: Any) -> Any:
            model = nnx.merge(graph, params)

            def next_token(carry: Any, _: None) -> Any:
                token, cache = carry
                logits, cache = model(token[:, None], cache=cache)
                return (jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache), None

            return jax.lax.scan(next_token, (token, cache), None, length=NEW_TOKENS)[0][0]

        token, cache = fill(params)
        jax.block_until_ready(decode(params, token, cache))
        compile_s = time.perf_counter() - start
        timing = seconds_of(lambda: decode(params, token, cache), jax.block_until_ready)
        extra = {"profile": profile(lambda: decode(params, token, cache))}
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return result(case, config, timing, memory, compile_s) | extra


def run_torch(case: Case) -> dict[str, Any]:
    """The model of transformers; it takes FLA's kernels by itself where they are installed."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    from jaxqla.models import QwenConfig

    config = QwenConfig.preset(case.preset)
    training = case.task == "train"
    dtype = torch.float32 if training else torch.bfloat16
    with torch.device("cuda"):
        torch.manual_seed(0)
        hugging_face = Qwen3_5TextConfig(**config.to_hf())
        model = AutoModelForCausalLM.from_config(hugging_face, dtype=dtype, attn_implementation="sdpa")
    tokens, ids = (torch.as_tensor(np.array(x), device="cuda").long() for x in tokens_and_ids(case, config.vocab_size))
    positions = torch.as_tensor(np.concatenate([np.arange(n) for n in documents(case.length)]), device="cuda")[None]
    start = time.perf_counter()
    extra: dict[str, Any] = {"fla": importlib.util.find_spec("fla") is not None}

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    if training:
        model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def call() -> Any:
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
                same = ids[:, 1:] == ids[:, :-1]
                total = 0.0
                for a in range(0, case.length - 1, 2048):
                    piece = slice(a, min(a + 2048, case.length - 1))
                    total = total + torch.utils.checkpoint.checkpoint(
                        _cross_entropy, model.lm_head, hidden[:, piece], tokens[:, 1:][:, piece], same[:, piece],
                        use_reentrant=False,
                    )  # fmt: skip
            loss = total / same.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        losses = [float(call())]
        compile_s = time.perf_counter() - start
        timing = seconds_of(call, wait)
        extra["losses"] = losses
    elif case.task == "prefill":

        @torch.no_grad()
        def call() -> Any:
            return model(input_ids=tokens, logits_to_keep=1, use_cache=False).logits

        wait(call())
        compile_s = time.perf_counter() - start
        timing = seconds_of(call, wait)
    else:

        @torch.no_grad()
        def call() -> Any:
            return model.generate(tokens, max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1, do_sample=False)

        @torch.no_grad()
        def first() -> Any:
            return model.generate(tokens, max_new_tokens=1, do_sample=False)

        wait(call())
        compile_s = time.perf_counter() - start
        before = seconds_of(first, wait, repeats=3)[0]
        timing = tuple(x - before for x in seconds_of(call, wait, repeats=3))
    return result(case, config, timing, torch.cuda.max_memory_allocated(), compile_s) | extra


def _cross_entropy(head: Any, hidden: Any, targets: Any, weights: Any) -> Any:
    import torch

    logits = head(hidden).float().flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def result(case: Case, config: Any, timing: tuple[float, ...], memory: int | None, compile_s: float) -> dict[str, Any]:
    """The common part of a line."""
    median, p20, p80 = timing
    line = {
        "seconds": {"median": median, "p20": p20, "p80": p80},
        "compile_seconds": compile_s,
        "peak_memory_gb": None if memory is None else memory / 1e9,
    }
    if case.task == "decode":
        return line | {"tokens_per_second": case.batch * NEW_TOKENS / median}
    tokens = case.batch * case.length
    lengths = documents(case.length) if case.task == "train" else [case.length]
    pairs = case.batch * sum(n * (n + 1) // 2 for n in lengths)
    work = config.num_flops(tokens, pairs) * (3 if case.task == "train" else 1)
    if case.task == "prefill":
        work -= 2 * config.vocab_size * config.hidden_size * (tokens - case.batch)
    return line | {"tokens_per_second": tokens / median, "mfu": work / median / PEAK_FLOPS}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description="Measure whole models.")
    parser.add_argument("--preset", action="append", default=[], help="a published size, repeatable")
    parser.add_argument("--task", action="append", default=[], choices=("train", "prefill", "decode"))
    parser.add_argument("--implementation", action="append", default=[], choices=IMPLEMENTATIONS)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no new case is started")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a case is given up")
    parser.add_argument("--out", type=Path, default=RESULTS / "models.jsonl")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        case = Case(**json.loads(options.case))
        print(json.dumps(run_torch(case) if case.implementation == "torch" else run_jax(case)))
        return 0
    begin = time.perf_counter()
    chosen = cases(
        options.preset or list(PRESETS),
        options.task or ["train", "prefill", "decode"],
        options.implementation or list(IMPLEMENTATIONS),
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for case in chosen:
            if time.perf_counter() - begin > options.budget:
                print(f"out of time before {case}", file=sys.stderr)
                break
            line = {**asdict(case), "sources": source_hash(), **measured(case, options.timeout)}
            shown = {name: line.get(name) for name in ("tokens_per_second", "mfu", "peak_memory_gb", "error")}
            print(*asdict(case).values(), shown, flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


def measured(case: Case, timeout: float) -> dict[str, Any]:
    """The line of a case, from a process of its own; a failure becomes a line too."""
    command = [sys.executable, "-m", "benchmarks.models", "--case", json.dumps(asdict(case))]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout} s"}
    if run.returncode:
        return {"error": run.stderr[-1500:]}
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())

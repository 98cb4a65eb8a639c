"""Measure single operations of a training step on one GPU.

``python -m tests.benchmarks.measure_operations OUT.csv [--seconds 440] [--only SECTION...] [--tiny]``

Rows are written as they are measured. GPU time of matrix products is that of CUDA graph replays (no launch gaps) over
buffers larger than the L2 cache; other kernels are timed with events around loops that keep the queue full. Host time
is wall time of launches. Data are random: zeros run faster (less power). ``--tiny`` runs all of it on the CPU at toy
sizes, to check this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

COLUMNS = (
    "op", "direction", "variant", "precision", "m", "k", "n", "batch", "seq_len", "heads", "kv_heads", "head_dim",
    "causal", "elements", "mode", "seconds", "iqr_s", "repeats", "flop", "bytes", "tflop_per_s", "gb_per_s",
    "sm_clock_mhz", "power_w",
)  # fmt: skip
L2_BYTES = 60e6  # of an H200
DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
Call = Callable[[int], object]  # the argument counts calls, so that buffers can take turns
Row = dict[str, Any]
Calls = Iterator[tuple[Row, Call, dict[str, Any]]]  # a row, what to time, how
cuda: Any = torch.cuda  # its events have no types


def of(function: Callable[..., object], *arguments: object, **named: object) -> Call:
    """Make a call of the function with these arguments, in every turn."""
    return lambda index: function(*arguments, **named)


def repeat(call: Call, times: int) -> None:
    for index in range(times):
        call(index)


def gradient(out: torch.Tensor, inputs: object, of_out: torch.Tensor | None = None) -> Call:
    """Make a call of the backward pass from ``out``, whose graph stays."""
    return of(torch.autograd.grad, out, inputs, of_out, retain_graph=True)


class Bench:
    """Times calls and writes their rows."""

    def __init__(self, out: Path, seconds: float, tiny: bool) -> None:
        self.deadline = time.monotonic() + seconds
        self.tiny = tiny
        self.device = "cpu" if tiny else "cuda"
        self.file = out.open("w", encoding="utf-8", newline="")
        self.writer = csv.DictWriter(self.file, fieldnames=COLUMNS, lineterminator="\n")
        self.writer.writeheader()

    def size(self, value: int) -> int:
        """Shrink a dimension in a tiny run."""
        return min(value, 64) if self.tiny else value

    def rows(self, section: str, calls: Calls) -> None:
        """Measure and write a section's calls until time runs out; an error ends the section."""
        started, count = time.monotonic(), 0
        try:
            for row, call, how in calls:
                if time.monotonic() > self.deadline:
                    log(f"{section}: out of time")
                    break
                self.write(row, *self.time(call, **how))
                count += 1
        except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
            log(f"{section}: {type(error).__name__} {str(error)[:400]}")
        finally:
            log(f"{section}: {count} rows in {time.monotonic() - started:.1f} s")
            if not self.tiny:
                torch.cuda.empty_cache()

    def write(self, row: dict[str, Any], seconds: list[float], **more: Any) -> None:
        median = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median, median, median]
        row = row | {
            "seconds": f"{median:.4e}", "iqr_s": f"{quartiles[2] - quartiles[0]:.2e}", "repeats": len(seconds),
            "mode": row.get("mode", "warm"),
        } | more  # fmt: skip
        if row.get("flop"):
            row["tflop_per_s"] = f"{row['flop'] / median / 1e12:.4g}"
            row["flop"] = f"{row['flop']:.6g}"
        if row.get("bytes"):
            row["gb_per_s"] = f"{row['bytes'] / median / 1e9:.4g}"
            row["bytes"] = f"{row['bytes']:.6g}"
        self.writer.writerow(row)
        self.file.flush()

    def time(self, call: Call, *, graph: bool = False, host: bool = False, budget_s: float = 0.08) -> list[list[float]]:
        """Measure the seconds of a call several times, each the mean of a batch of calls."""
        if host or self.tiny:
            return [self.host_time(call, budget_s)]
        call(0)
        torch.cuda.synchronize()
        once = max(self.events(partial(repeat, call, 3)) / 3, 1e-6)
        batch = max(1, min(200, math.ceil(0.004 / once)))
        replay: Callable[[], object] = partial(repeat, call, batch)
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                repeat(call, batch)
            replay = captured.replay
        self.events(replay)
        repeats = max(5, min(40, round(budget_s / (once * batch))))
        marks = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in marks:
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) / 1e3 / batch for start, end in marks]]

    def host_time(self, call: Call, budget_s: float) -> list[float]:
        """Measure the host seconds of issuing a call: the mean of 100, without the wait after them."""
        batch, seconds = (2 if self.tiny else 100), []
        end = time.perf_counter() + (0.0 if self.tiny else budget_s)
        for warm in (True, True, False):
            while True:
                self.wait()
                start = time.perf_counter()
                for index in range(batch):
                    call(index)
                taken = (time.perf_counter() - start) / batch
                if not warm:
                    seconds.append(taken)
                if warm or (time.perf_counter() > end and len(seconds) >= 5):
                    break
        return seconds

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def events(self, call: Callable[[], object]) -> float:
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)


def log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# --- matrix products ---

# (k, n) of one linear layer: square, three and four times as wide, the slices that 2 to 8 tensor ranks hold, heads.
WIDTHS = [
    *[(h, h) for h in (512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 8192, 12288, 16384)],
    *[(h, 3 * h) for h in (768, 2048, 5120)],
    *[(h, 4 * h) for h in (512, 768, 1024, 1536, 2048, 3072, 4096, 7168, 8192, 12288)],
    *[(4 * h, h) for h in (512, 768, 1024, 1536, 2048, 3072, 4096, 7168, 8192, 12288)],
    (4096, 14336), (14336, 4096), (1024, 2816), (2816, 1024), (8192, 28672),
    (4096, 512), (512, 4096), (4096, 1024), (1024, 4096), (8192, 1024), (8192, 3584), (3584, 8192), (12288, 1536),
    (1536, 12288), (12288, 6144), (6144, 12288), (2048, 256), (256, 2048), (1024, 384), (128, 1024),
    (768, 50257), (768, 50304), (1024, 30522), (4096, 32000), (2048, 128256), (4096, 128256), (8192, 16032),
]  # fmt: skip
TOKENS = (256, 1024, 2048, 4096, 8192, 16384, 32768)


def product(bench: Bench, direction: str, dtype: torch.dtype, m: int, k: int, n: int) -> Call:
    """Make y = x W^T, dx = dy W or dW = dy^T x, over enough buffers to leave the cache."""
    m, k, n = bench.size(m), bench.size(k), bench.size(n)
    element = torch.tensor([], dtype=dtype).element_size()
    sets = max(1, min(8, math.ceil(3 * L2_BYTES / (element * (m * k + k * n + m * n)))))
    x = [bench.random(m, k, dtype=dtype) for _ in range(sets)]
    w = [bench.random(n, k, dtype=dtype) * 0.02 for _ in range(sets)]
    y = [bench.random(m, n, dtype=dtype) for _ in range(sets)]
    if direction == "forward":
        return lambda i: torch.mm(x[i % sets], w[i % sets].t(), out=y[i % sets])
    if direction == "dgrad":
        return lambda i: torch.mm(y[i % sets], w[i % sets], out=x[i % sets])
    return lambda i: torch.mm(y[i % sets].t(), x[i % sets], out=w[i % sets])


def gemm_row(direction: str, precision: str, m: int, k: int, n: int, element: int) -> dict[str, Any]:
    return {
        "op": "matmul", "direction": direction, "variant": "cublas", "precision": precision, "m": m, "k": k, "n": n,
        "flop": 2.0 * m * k * n, "bytes": float(element * (m * k + k * n + m * n)),
    }  # fmt: skip


def matmuls(bench: Bench, precision: str) -> Calls:
    """Measure linear layers in 16 or 32 bits."""
    dtype = DTYPES[precision]
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    most = {"bf16": 1.5e13, "fp16": 3e12, "tf32": 4e12, "fp32": 6e11}[precision]
    for m in TOKENS:
        for k, n in WIDTHS if precision == "bf16" else WIDTHS[::3] if precision == "tf32" else WIDTHS[::6]:
            if 2.0 * m * k * n > most:
                continue
            all_three = m in (256, 2048, 8192) if precision == "bf16" else m == 4096
            for direction in ("forward", "dgrad", "wgrad") if all_three else ("forward",):
                row = gemm_row(direction, precision, m, k, n, dtype.itemsize)
                yield row, product(bench, direction, dtype, m, k, n), {"graph": True, "budget_s": 0.05}


def scaled_product(bench: Bench, m: int, k: int, n: int, rows: bool, fast: bool) -> Call:
    """Make an fp8 product with one scale a tensor or a row; ``fast`` adds up in fewer bits, as forward passes do."""
    m, k, n = bench.size(m), bench.size(k), bench.size(n)
    sets = max(1, min(8, math.ceil(3 * L2_BYTES / (m * k + k * n + 2 * m * n))))
    x = [bench.random(m, k).to(torch.float8_e4m3fn) for _ in range(sets)]
    w = [bench.random(n, k).to(torch.float8_e4m3fn) for _ in range(sets)]
    shapes: tuple[Any, Any] = ((m, 1), (1, n)) if rows else ((), ())
    scale_a, scale_b = (torch.ones(shape, device=bench.device) for shape in shapes)
    return lambda i: torch._scaled_mm(
        x[i % sets], w[i % sets].t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def fp8(bench: Bench) -> Calls:
    """Measure fp8 products, and their preparation: largest magnitude, scale and cast of a bf16 tensor."""
    for m in (*TOKENS[1::2], 8192):
        for k, n in WIDTHS[::2]:
            if 2.0 * m * k * n > 2e13 or n % 16 or k % 16:
                continue
            row = gemm_row("forward", "fp8", m, k, n, 1) | {"variant": "scaled_mm, tensor scales"}
            row["bytes"] = float(m * k + k * n + 2 * m * n)
            yield row, scaled_product(bench, m, k, n, rows=False, fast=True), {"graph": True, "budget_s": 0.04}

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 448.0 / x.abs().max().float().clamp(min=1e-12)
        return (x.float() * scale).to(torch.float8_e4m3fn), scale

    for m, k in ((8192, 2048), (8192, 8192)):
        x = bench.random(bench.size(m), bench.size(k))
        row = {
            "op": "quantise to fp8",
            "direction": "forward",
            "precision": "bf16",
            "m": m,
            "k": k,
            "bytes": 3.0 * m * k,
        }
        yield row | {"variant": "eager"}, of(quantise, x), {}
        if not bench.tiny:
            compiled = torch.compile(quantise, dynamic=False)
            yield row | {"variant": "compiled"}, of(compiled, x), {}


# Tokens, k and n of linear layers in fp8: of Llamas 1, 2, 3, 4 and 8 thousand wide; and those also compiled.
FP8_LAYERS = [
    (8192, 1024, 2816), (8192, 2816, 1024), (2048, 2048, 8192), (8192, 2048, 2048), (8192, 2048, 8192),
    (8192, 8192, 2048), (32768, 2048, 8192), (4096, 3072, 8192), (8192, 4096, 1024), (2048, 4096, 4096),
    (8192, 4096, 4096), (2048, 4096, 14336), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 4096, 14336),
    (8192, 8192, 28672),
]  # fmt: skip
FP8_COMPILED = ((8192, 2048, 2048), (8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))


def fp8_products(bench: Bench) -> Calls:
    """Measure the three products of FP8_LAYERS in bf16 and in fp8, without casts."""
    for m, k, n in FP8_LAYERS:
        if bench.tiny:
            m, k, n = 32, 64, 32
        sides = {"forward": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}
        for direction, (a, b, c) in sides.items():
            row = gemm_row(direction, "bf16", m, k, n, 2)
            yield row, product(bench, direction, torch.bfloat16, m, k, n), {"graph": True, "budget_s": 0.03}
            row = gemm_row(direction, "fp8", m, k, n, 1) | {"bytes": float(a * b + b * c + 2 * a * c)}
            fast = direction == "forward"
            name = "scaled_mm, tensor scales" + ("" if fast else ", exact sums")
            call = scaled_product(bench, a, b, c, rows=False, fast=fast)
            yield row | {"variant": name}, call, {"graph": True, "budget_s": 0.03}
            if fast and not bench.tiny:
                call = scaled_product(bench, a, b, c, rows=True, fast=True)
                yield row | {"variant": "scaled_mm, row scales"}, call, {"graph": True, "budget_s": 0.03}


def fp8_layers(bench: Bench) -> Calls:
    """Measure linear layers (fp32 weights, bf16 inputs) and their casts: autocast and torchao's float8 training."""
    from torchao import float8  # type: ignore[import-not-found]

    for m, k, n in FP8_LAYERS[:1] if bench.tiny else FP8_LAYERS:
        m, k, n = bench.size(m), bench.size(k), bench.size(n)
        for recipe in ("", "tensorwise", "rowwise"):
            for compiled in (False, True):
                if compiled and (bench.tiny or (m, k, n) not in FP8_COMPILED):
                    continue
                layer: Any = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False)).to(bench.device)
                if recipe:
                    config = float8.Float8LinearConfig.from_recipe_name("tensorwise" if bench.tiny else recipe)
                    float8.convert_to_float8_training(layer, config=config)
                weight = next(layer.parameters())
                if compiled:
                    torch._dynamo.reset()
                    layer = torch.compile(layer, dynamic=False)
                x = bench.random(m, k).requires_grad_()

                def forward(layer: Any = layer, x: torch.Tensor = x) -> torch.Tensor:
                    with torch.autocast(bench.device, torch.bfloat16, cache_enabled=False):
                        return layer(x)  # type: ignore[no-any-return]

                row = gemm_row("forward", "fp8" if recipe else "bf16", m, k, n, 2) | {
                    "op": "linear", "variant": (f"float8 {recipe}" if recipe else "autocast") + " compiled" * compiled,
                    "bytes": float(2 * m * (k + n) + 4 * k * n),
                }  # fmt: skip
                yield row, of(forward), {"budget_s": 0.04}
                out = forward()
                backward = row | {"direction": "backward", "flop": 2.0 * row["flop"], "bytes": 2.0 * row["bytes"]}
                yield backward, gradient(out, (x, weight), torch.randn_like(out)), {"budget_s": 0.04}
                del out


def experts(bench: Bench) -> Calls:
    """Measure grouped products of a mixture of experts, tokens spread evenly."""
    for count, m, k, n in (
        (8, 8192, 4096, 14336),
        (8, 16384, 1024, 4096),
        (64, 32768, 2048, 1408),
        (64, 8192, 2048, 1408),
    ):
        m, k, n = bench.size(m), bench.size(k), bench.size(n)
        x, w = bench.random(m, k), bench.random(count, k, n)
        ends = torch.arange(1, count + 1, device=bench.device, dtype=torch.int32) * (m // count)
        row = gemm_row("forward", "bf16", m, k, n, 2) | {"op": "grouped matmul", "batch": count}
        yield row, of(torch._grouped_mm, x, w, offs=ends), {}


def sustained(bench: Bench) -> None:
    """Measure a product after a rest (its first 20 ms) and at the end of 2.5 s of nothing else."""
    cases: list[tuple[dict[str, Any], Call]] = []
    for precision, m, k, n in (
        ("bf16", 8192, 8192, 8192), ("bf16", 16384, 4096, 14336), ("bf16", 8192, 1024, 4096),
        ("fp16", 8192, 8192, 8192), ("tf32", 8192, 8192, 8192), ("fp32", 4096, 4096, 4096),
    ):  # fmt: skip
        dtype = DTYPES[precision]
        cases.append(
            (gemm_row("forward", precision, m, k, n, dtype.itemsize), product(bench, "forward", dtype, m, k, n))
        )
    cases.append((gemm_row("forward", "fp8", 8192, 8192, 8192, 1) | {"variant": "scaled_mm, tensor scales"},
                  scaled_product(bench, 8192, 8192, 8192, rows=False, fast=True)))  # fmt: skip
    q, k_, v = (bench.random(4, 16, bench.size(8192), 128) for _ in range(3))
    cases.append(({
        "op": "attention", "direction": "forward", "variant": "flash", "precision": "bf16", "batch": 4, "seq_len": 8192,
        "heads": 16, "kv_heads": 16, "head_dim": 128, "causal": 1, "flop": 2.0 * 4 * 16 * 8192**2 * 128,
    }, lambda i: functional.scaled_dot_product_attention(q, k_, v, is_causal=True)))  # fmt: skip
    big = bench.random(bench.size(2**15) * bench.size(2**15))
    out = torch.empty_like(big)
    cases.append(({"op": "copy", "direction": "forward", "precision": "bf16", "bytes": 4.0 * big.numel()},
                  lambda i: out.copy_(big)))  # fmt: skip
    for row, call in cases:
        torch.backends.cuda.matmul.allow_tf32 = row["precision"] == "tf32"
        if bench.tiny:
            bench.write(row | {"mode": "cold"}, *bench.time(call))
            continue
        call(0)
        torch.cuda.synchronize()
        time.sleep(1.2)
        start = time.monotonic()
        marks = [cuda.Event(enable_timing=True)]
        marks[0].record()
        clocks: list[tuple[float, float]] = []
        batch = max(1, round(0.01 / (bench.events(partial(repeat, call, 3)) / 3)))
        while time.monotonic() < start + 2.5:
            repeat(call, batch)
            mark = cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)
            if len(marks) > 4:
                marks[-4].synchronize()
            if len(marks) % 40 == 0:
                clocks.append((torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3))
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) / 1e3 / batch for a, b in itertools.pairwise(marks[1:])]
        last = clocks[-max(1, len(clocks) // 3) :]
        bench.write(row | {"mode": "cold"}, times[:3])
        clock, power = (round(statistics.mean(column)) for column in zip(*last, strict=True))
        bench.write(row | {"mode": "sustained"}, times[-len(times) // 3 :], sm_clock_mhz=clock, power_w=power)


# --- attention ---


def attention(bench: Bench) -> Calls:
    """Measure scaled dot-product attention, forward and backward, by backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends: dict[str, Any] = {
        "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "default": None, "unfused": SDPBackend.MATH,
    }  # fmt: skip
    cases: list[tuple[str, str, int, int, int, int, int, bool]] = []
    for seq in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        for heads, dim in ((16, 128), (32, 64)):
            for causal in (True, False):
                if seq <= 32768 or causal:
                    cases.append(("flash", "bf16", max(1, 16384 // seq), seq, heads, heads, dim, causal))
    cases += [("default", "bf16", b, s, 32, 32, d, True) for b, s, d in ((8, 2048, 64), (8, 2048, 128), (2, 8192, 128))]
    cases += [("cudnn", "bf16", b, s, 16, 16, 128, True) for b, s in ((8, 2048), (2, 8192), (1, 32768))]
    cases += [("efficient", "bf16", b, s, 16, 16, 128, True) for b, s in ((8, 2048), (2, 8192))]
    cases += [
        ("efficient", "fp32", b, s, 16, 16, 64, c) for b, s in ((32, 512), (8, 2048), (2, 8192)) for c in (True, False)
    ]
    cases += [("flash", "fp16", 8, 2048, 16, 16, 128, True), ("flash", "bf16", 8, 2048, 32, 8, 128, True)]
    cases += [("flash", "bf16", b, 2048, 16, 16, 128, True) for b in (1, 2, 32)]
    cases += [("flash", "bf16", 1, 512, 12, 12, 64, True), ("flash", "bf16", 64, 128, 16, 16, 64, False)]
    cases += [("flash", "bf16", 8, 2048, 16, 16, d, True) for d in (32, 80, 96, 256)]
    cases += [("unfused", "bf16", max(1, 8192 // s), s, 16, 16, 64, True) for s in (128, 512, 1024, 2048, 4096)]
    cases += [("unfused", "fp32", max(1, 8192 // s), s, 16, 16, 64, True) for s in (512, 2048)]
    for name, precision, batch, seq, heads, kv_heads, dim, causal in cases:
        seq = bench.size(seq)
        shapes = [(batch, seq, count, dim) for count in (heads, kv_heads, kv_heads)]
        # In the layout that a linear layer leaves: tokens outside heads.
        leaves = [bench.random(*shape, dtype=DTYPES[precision]).requires_grad_() for shape in shapes]
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
        gqa = heads != kv_heads

        def forward(
            q: Any = q, k: Any = k, v: Any = v, c: bool = causal, g: bool = gqa, name: str = name
        ) -> torch.Tensor:
            if backends[name] is None or bench.tiny:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=c, enable_gqa=g)
            with sdpa_kernel(backends[name]):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=c, enable_gqa=g)

        row = {
            "op": "attention", "variant": name, "precision": precision, "batch": batch, "seq_len": seq, "heads": heads,
            "kv_heads": kv_heads, "head_dim": dim, "causal": int(causal),
        }  # fmt: skip
        flop = 4.0 * batch * heads * seq * seq * dim * (0.5 if causal else 1.0)
        yield row | {"direction": "forward", "flop": flop}, of(forward), {}
        out = forward()
        grad = torch.randn_like(out)
        yield (
            row | {"direction": "backward", "flop": 2.5 * flop},
            gradient(out, leaves, grad),
            {},
        )
        del out


def eager_attention(bench: Bench) -> Calls:
    """Measure attention as written out: two products, scale, mask, softmax in fp32, dropout."""
    for batch, seq in ((64, 128), (32, 512), (8, 1024), (8, 2048), (2, 4096)):
        seq = bench.size(seq)
        heads, dim = 16, 64
        q, k, v = (bench.random(batch, heads, seq, dim).requires_grad_() for _ in range(3))
        mask = torch.full((seq, seq), float("-inf"), device=bench.device, dtype=torch.bfloat16).triu(1)

        def forward(q: Any = q, k: Any = k, v: Any = v, mask: Any = mask) -> torch.Tensor:
            scores = torch.matmul(q, k.transpose(2, 3)) * 0.125 + mask
            weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            return torch.matmul(functional.dropout(weights, 0.1), v)

        row = {
            "op": "attention", "variant": "written out", "precision": "bf16", "batch": batch, "seq_len": seq,
            "heads": heads, "kv_heads": heads, "head_dim": dim, "causal": 1,
        }  # fmt: skip
        flop = 4.0 * batch * heads * seq * seq * dim
        yield row | {"direction": "forward", "flop": flop}, of(forward), {}
        out = forward()
        grad = torch.randn_like(out)
        yield (
            row | {"direction": "backward", "flop": 2 * flop},
            gradient(out, [q, k, v], grad),
            {},
        )


# --- element-wise ---


def hugging_face_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * cos


def elementwise(bench: Bench, compiled: bool) -> Calls:
    """Measure norms, activations, dropout, sums, rotary positions; bytes count each input and output once."""
    # name, inputs that are read, function of the inputs
    functions: list[tuple[str, int, Callable[..., torch.Tensor]]] = [
        ("layer norm", 1, lambda x: functional.layer_norm(x, x.shape[-1:])),
        ("rms norm", 1, lambda x: functional.rms_norm(x, x.shape[-1:])),
        ("rms norm written out", 1, lambda x: hugging_face_rms_norm(x, x[0].detach())),
        ("gelu", 1, lambda x: functional.gelu(x)),
        ("gelu tanh", 1, lambda x: functional.gelu(x, approximate="tanh")),
        ("swiglu", 2, lambda x, y: functional.silu(x) * y),
        ("dropout", 1, lambda x: functional.dropout(x, 0.1)),
        ("residual sum", 2, lambda x, y: x + y),
        ("rotary", 1, lambda x: rotate(x, x[0].detach())),
        (
            "dropout, sum, layer norm",
            2,
            lambda x, y: functional.layer_norm(functional.dropout(x, 0.1) + y, x.shape[-1:]),
        ),
        ("sum, rms norm written out", 2, lambda x, y: hugging_face_rms_norm(x + y, x[0].detach())),
    ]
    shapes = (
        [(8192, 1024), (16384, 4096)]
        if compiled
        else [(512, 768), (8192, 1024), (16384, 2048), (16384, 4096), (4096, 8192)]
    )
    for precision in ("bf16",) if compiled else ("bf16", "fp32"):
        for tokens, width in shapes:
            for name, count, function in functions:
                run = torch.compile(function, dynamic=False) if compiled else function
                inputs = [
                    bench.random(bench.size(tokens), bench.size(width), dtype=DTYPES[precision]).requires_grad_()
                    for _ in range(count)
                ]
                row = {
                    "op": name, "variant": "compiled" if compiled else "eager", "precision": precision, "m": tokens,
                    "k": width, "elements": tokens * width,
                }  # fmt: skip
                least = float(tokens * width * DTYPES[precision].itemsize)
                yield (
                    row | {"direction": "forward", "bytes": least * (count + 1)},
                    of(run, *inputs),
                    {"budget_s": 0.03},
                )
                out = run(*inputs)
                grad = torch.randn_like(out)
                yield (
                    row | {"direction": "backward", "bytes": least * (1 + 2 * count)},
                    gradient(out, inputs, grad),
                    {"budget_s": 0.03},
                )


def losses(bench: Bench, compiled: bool) -> Calls:
    """Measure cross-entropy over large vocabularies from 16-bit logits, and embedding tables."""

    def upcast(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.float(), labels)

    for tokens, vocab in ((4096, 32000), (8192, 50257), (8192, 50304), (4096, 128256), (2048, 256000)):
        if compiled and vocab not in (32000, 128256):
            continue
        tokens, vocab = bench.size(tokens), bench.size(vocab)
        logits = bench.random(tokens, vocab).requires_grad_()
        labels = torch.randint(vocab, (tokens,), device=bench.device)
        run = torch.compile(upcast, dynamic=False) if compiled else upcast
        row = {
            "op": "cross-entropy", "variant": "compiled" if compiled else "eager", "precision": "bf16", "m": tokens,
            "n": vocab, "elements": tokens * vocab,
        }  # fmt: skip
        yield (
            row | {"direction": "forward", "bytes": 2.0 * tokens * vocab},
            of(run, logits, labels),
            {},
        )
        loss = run(logits, labels)
        yield (
            row | {"direction": "backward", "bytes": 4.0 * tokens * vocab},
            gradient(loss, logits),
            {},
        )
    if compiled:
        return
    for tokens, vocab, width in ((8192, 50257, 768), (8192, 128256, 4096)):
        tokens, vocab, width = bench.size(tokens), bench.size(vocab), bench.size(width)
        table = bench.random(vocab, width, dtype=torch.float32).requires_grad_()
        indices = torch.randint(vocab, (tokens,), device=bench.device)
        row = {"op": "embedding", "variant": "eager", "precision": "fp32", "m": tokens, "k": width, "n": vocab}
        yield (
            row | {"direction": "forward", "bytes": 8.0 * tokens * width},
            of(functional.embedding, indices, table),
            {},
        )
        out = functional.embedding(indices, table)
        grad = torch.randn_like(out)
        yield (
            row | {"direction": "backward", "bytes": 4.0 * vocab * width + 12.0 * tokens * width},
            gradient(out, table, grad),
            {},
        )


def optimizers(bench: Bench) -> Calls:
    """Measure optimizer steps on fp32 parameters in many tensors, and clipping of gradients."""
    for tensors, each in ((64, 16_777_216), (148, 840_000), (400, 65_536)):
        each = bench.size(each)
        parameters = [bench.random(each, dtype=torch.float32).requires_grad_() for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        total = tensors * each
        made: list[tuple[str, float, torch.optim.Optimizer]] = [
            ("adamw fused", 28.0, torch.optim.AdamW(parameters, fused=not bench.tiny)),
            ("adamw foreach", 28.0, torch.optim.AdamW(parameters, foreach=True)),
            ("sgd momentum foreach", 20.0, torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)),
            ("sgd momentum fused", 20.0, torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=not bench.tiny)),
        ]
        row = {"op": "optimizer step", "precision": "fp32", "batch": tensors, "elements": total, "direction": "step"}
        for name, moved, optimizer in made:
            yield row | {"variant": name, "bytes": moved * total}, of(optimizer.step), {}
            optimizer.state.clear()
        yield (
            row | {"op": "clip of gradients", "variant": "foreach", "bytes": 12.0 * total},
            of(torch.nn.utils.clip_grad_norm_, parameters, 1.0, foreach=True),
            {},
        )


def movement(bench: Bench) -> Calls:
    """Measure copies on the GPU and between host and GPU, and casts of weights."""
    for elements in (2**20, 2**26, 2**30):
        elements = bench.size(elements)
        wide, narrow = bench.random(elements, dtype=torch.float32), bench.random(elements)
        row = {"direction": "forward", "elements": elements, "precision": "fp32", "variant": "eager"}
        other = torch.empty_like(wide)
        yield row | {"op": "copy", "bytes": 8.0 * elements}, of(other.copy_, wide), {}
        yield row | {"op": "fill", "bytes": 4.0 * elements}, of(other.zero_), {}
        yield row | {"op": "cast to bf16", "bytes": 6.0 * elements}, of(narrow.copy_, wide), {}
        yield row | {"op": "cast to fp32", "bytes": 6.0 * elements}, of(wide.copy_, narrow), {}
    for elements in (2**18, 2**24, 2**28):
        elements = bench.size(elements)
        for pinned in (True, False):
            if not pinned and elements > 2**24:
                continue
            host = torch.randn(elements).pin_memory() if pinned and not bench.tiny else torch.randn(elements)
            there = torch.empty(elements, device=bench.device)
            row = {
                "elements": elements, "precision": "fp32", "variant": "pinned" if pinned else "pageable",
                "bytes": 4.0 * elements,
            }  # fmt: skip
            to = {"op": "copy host to GPU", "direction": "forward"}
            back = {"op": "copy GPU to host", "direction": "forward"}
            yield row | to, of(there.copy_, host, non_blocking=True), {}
            yield row | back, of(host.copy_, there, non_blocking=True), {}


def launches(bench: Bench) -> Calls:
    """Measure the host time of operations on tensors so small that the host is always the slower side."""
    small = bench.random(64, 64)
    wide = bench.random(64, 64, dtype=torch.float32)
    linear = torch.nn.Linear(64, 64, device=bench.device)
    norm = torch.nn.LayerNorm(64, device=bench.device)
    kind = "cpu" if bench.tiny else "cuda"
    row = {"op": "launch", "mode": "host", "precision": "bf16"}
    cases: list[tuple[str, str, Call]] = [
        ("add", "forward", lambda i: small + small),
        ("matmul", "forward", lambda i: small @ small),
        ("layer norm module, fp32", "forward", lambda i: norm(wide)),
        ("linear module, fp32", "forward", lambda i: linear(wide)),
    ]
    for name, direction, call in cases:
        with torch.no_grad():
            yield row | {"variant": name + ", no grad", "direction": direction}, call, {"host": True}
    for name, direction, call in cases:
        yield row | {"variant": name, "direction": direction}, call, {"host": True}
    with torch.autocast(kind, torch.bfloat16):
        yield (
            row | {"variant": "linear module, autocast, cached cast", "direction": "forward"},
            lambda i: linear(wide),
            {"host": True},
        )
    layer = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, device=bench.device)
    sample = bench.random(1, 8, 64, dtype=torch.float32)

    def forward(i: int) -> torch.Tensor:
        with torch.autocast(kind, torch.bfloat16):
            output: torch.Tensor = layer(sample)
        return output

    yield row | {"variant": "TransformerEncoderLayer, autocast", "direction": "forward"}, forward, {"host": True}
    yield (
        row | {"variant": "TransformerEncoderLayer, autocast", "direction": "forward and backward"},
        lambda i: torch.autograd.backward(forward(i).sum()),
        {"host": True},
    )
    if bench.tiny:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(100):
            small + small
    yield row | {"variant": "CUDA graph of 100 adds", "mode": "GPU"}, lambda i: graph.replay(), {"budget_s": 0.05}
    yield row | {"variant": "synchronize", "direction": "forward"}, lambda i: torch.cuda.synchronize(), {"host": True}
    yield row | {"variant": "item()", "direction": "forward"}, lambda i: small[0, 0].item(), {"host": True}


def convolutions(bench: Bench) -> Calls:
    """Measure ResNet-50's convolutions (channels in, out, kernel, stride, side), batch 128, forward and backward."""
    layers = (
        (3, 64, 7, 2, 224),
        (64, 64, 3, 1, 56),
        (64, 256, 1, 1, 56),
        (128, 128, 3, 1, 28),
        (256, 1024, 1, 1, 14),
        (512, 512, 3, 1, 7),
    )
    for precision in ("bf16", "tf32"):
        torch.backends.cudnn.allow_tf32 = True
        for channels, out_channels, kernel, stride, side in layers:
            for layout in (torch.contiguous_format, torch.channels_last):
                batch = bench.size(128)
                x = bench.random(batch, channels, side, side, dtype=DTYPES[precision]).to(memory_format=layout)
                w = bench.random(out_channels, channels, kernel, kernel, dtype=DTYPES[precision]).to(
                    memory_format=layout
                )
                x.requires_grad_()
                w.requires_grad_()
                pad = kernel // 2
                out = functional.conv2d(x, w, stride=stride, padding=pad)
                flop = 2.0 * out.numel() * channels * kernel * kernel
                row = {
                    "op": f"convolution {kernel}x{kernel}/{stride}", "precision": precision, "batch": batch,
                    "variant": "channels_last" if layout == torch.channels_last else "contiguous",
                    "m": side, "k": channels, "n": out_channels,
                }  # fmt: skip
                how = {"budget_s": 0.03}
                yield (
                    row | {"direction": "forward", "flop": flop},
                    of(functional.conv2d, x, w, stride=stride, padding=pad),
                    how,
                )
                grad = torch.randn_like(out)
                yield (
                    row | {"direction": "backward", "flop": 2 * flop},
                    gradient(out, (x, w), grad),
                    how,
                )


def main() -> None:
    """Measure every section, the most useful first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.out, options.seconds, options.tiny)
    torch.manual_seed(0)
    log(f"torch {torch.__version__}, {'CPU' if bench.tiny else torch.cuda.get_device_name()}")
    sections: dict[str, Callable[[], object]] = {
        "bf16": lambda: bench.rows("bf16", matmuls(bench, "bf16")),
        "launch": lambda: bench.rows("launch", launches(bench)),
        "sustained": lambda: sustained(bench),
        "attention": lambda: bench.rows("attention", attention(bench)),
        "tf32": lambda: bench.rows("tf32", matmuls(bench, "tf32")),
        "elementwise": lambda: bench.rows("elementwise", elementwise(bench, compiled=False)),
        "loss": lambda: bench.rows("loss", losses(bench, compiled=False)),
        "optimizer": lambda: bench.rows("optimizer", optimizers(bench)),
        "movement": lambda: bench.rows("movement", movement(bench)),
        "eager attention": lambda: bench.rows("eager attention", eager_attention(bench)),
        "fp8": lambda: bench.rows("fp8", fp8(bench)),
        "fp8 products": lambda: bench.rows("fp8 products", fp8_products(bench)),
        "fp8 layers": lambda: bench.rows("fp8 layers", fp8_layers(bench)),
        "fp32": lambda: bench.rows("fp32", matmuls(bench, "fp32")),
        "fp16": lambda: bench.rows("fp16", matmuls(bench, "fp16")),
        "convolution": lambda: bench.rows("convolution", convolutions(bench)),
        "experts": lambda: bench.rows("experts", experts(bench)),
        "loss compiled": lambda: bench.rows("loss compiled", losses(bench, compiled=not bench.tiny)),
        "elementwise compiled": lambda: bench.rows("elementwise compiled", elementwise(bench, compiled=not bench.tiny)),
    }
    for name, section in sections.items():
        if (not options.only or name in options.only) and time.monotonic() < bench.deadline:
            section()


if __name__ == "__main__":
    main()

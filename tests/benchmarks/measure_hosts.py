"""Measure the host time of a layer on one GPU: ``python -m tests.benchmarks.measure_hosts OUT.csv``.

Needs CUDA and transformers. Models so narrow that the GPU waits for the host (width 64, 8 tokens) train with 2 and with
10 layers; the difference is the host's time for 8 layers. ResNets of 18 to 152 layers, two images a step, wait for the
host too. Steps as in measure_steps: fp32 weights, bf16 autocast, fused AdamW (SGD for ResNets).
Writes a row a model: seconds of a step with either number of layers, and of a layer.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.measure_steps import SHAPES, Configuration, log, prepare, run_steps

FEW, MANY = 2, 10
COLUMNS = (
    "model", "experts", "experts_implementation", "checkpointing", "precision", "step_s_of_2_layers",
    "step_s_of_10_layers", "host_s_per_layer", "fastest_host_s_per_layer", "step_s_of_2_images", "torch", "gpu",
)  # fmt: skip


def narrow(architecture: str, layers: int, experts: int = 0) -> str:
    """Add a narrow model to SHAPES and return its name."""
    name = f"{architecture} of {layers} layers" + (f", {experts} experts" if experts else "")
    SHAPES[name] = (architecture, layers, 64, 128, 2, 2, 256, experts, min(experts, 2))
    return name


def seconds_of_steps(run: Configuration, device: str, *, quick: bool) -> list[float]:
    """Measure a model that is made for it and dropped."""
    step, _ = prepare(run, device, 1)
    _, seconds = run_steps(step, quick)
    del step
    gc.collect()
    return seconds


def seconds_by_layers(run: Configuration, architecture: str, device: str, experts: int = 0) -> list[list[float]]:
    """Measure narrow models of FEW and of MANY layers; one step each on the CPU."""
    return [
        seconds_of_steps(replace(run, model=narrow(architecture, layers, experts)), device, quick=device == "cpu")
        for layers in (FEW, MANY)
    ]


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, a step each")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    base = Configuration(model="", micro_batch=1, seq_len=8)
    cases: list[tuple[str, int, Configuration]] = [
        (architecture, 0, replace(base, checkpointing=checkpointing, precision=precision))
        for architecture in ("encoder", "decoder", "llama")
        for checkpointing, precision in (("none", "bf16"), ("full", "bf16"), ("none", "tf32"))
    ]
    cases += [
        ("llama", experts, replace(base, experts=how)) for how in ("eager", "grouped_mm") for experts in (4, 8, 16)
    ]
    cases.append(("llama", 8, replace(base, experts="eager", checkpointing="full")))
    with options.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        software = {"torch": torch.__version__, "gpu": "none" if options.tiny else torch.cuda.get_device_name()}
        for architecture, experts, run in cases:
            seconds = seconds_by_layers(run, architecture, device, experts)
            medians, fastest = [statistics.median(each) for each in seconds], [min(each) for each in seconds]
            each = (medians[1] - medians[0]) / (MANY - FEW)
            writer.writerow(
                {
                    "model": architecture,
                    "experts": experts,
                    "experts_implementation": run.experts if experts else "",
                    "checkpointing": run.checkpointing,
                    "precision": run.precision,
                    "step_s_of_2_layers": f"{medians[0]:.4e}",
                    "step_s_of_10_layers": f"{medians[1]:.4e}",
                    "host_s_per_layer": f"{each:.4e}",
                    "fastest_host_s_per_layer": f"{(fastest[1] - fastest[0]) / (MANY - FEW):.4e}",
                }
                | software
            )
            file.flush()
            log(f"{architecture} {experts} {run.experts} {run.checkpointing} {run.precision}: {each * 1e3:.3f} ms")
        for resnet in ("resnet18", "resnet50", "resnet152"):
            for precision in ("bf16", "tf32"):
                run = Configuration(model=resnet, micro_batch=2, precision=precision)
                each = statistics.median(seconds_of_steps(run, device, quick=options.tiny))
                writer.writerow(
                    {"model": resnet, "precision": precision, "step_s_of_2_images": f"{each:.4e}"} | software
                )
                file.flush()
                log(f"{resnet} {precision}: {each * 1e3:.3f} ms a step")


if __name__ == "__main__":
    main()

"""Measure images a second and vCPU that the trainer's loader prepares: ``python -m tests.benchmarks.measure_images``.

Writes JPEG files of ImageNet's usual size (500 x 375, about 110 kB: https://www.image-net.org/about.php gives 400 x 350
on average) and prepares each as a training run does: decode, random crop, resize, flip. One JSON object a worker count.
CPU seconds are of the worker processes, so other load changes them little; wall seconds need a quiet machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from torchvision.io import write_jpeg

from bootstrap.trainer.data.images import ImageFolder
from bootstrap.trainer.data.loader import Loader

IMAGES, MICRO_BATCH, STEPS = 256, 32, 40
HEIGHT, WIDTH, QUALITY = 375, 500, 93


def write_images(folder: Path) -> float:
    """Write images with detail at all scales; returns their mean kB."""
    generator = torch.Generator().manual_seed(0)
    (folder / "a").mkdir()
    sizes = []
    for number in range(IMAGES):
        picture = torch.zeros(3, HEIGHT, WIDTH)
        for scale in (4, 16, 64, 256):
            noise = torch.randn(1, 3, HEIGHT * scale // 512 + 2, WIDTH * scale // 512 + 2, generator=generator)
            resized = torch.nn.functional.interpolate(noise, (HEIGHT, WIDTH), mode="bicubic")[0]
            picture += resized * 60 / scale**0.4
        picture += torch.randn(3, HEIGHT, WIDTH, generator=generator) * 14
        path = folder / "a" / f"{number}.jpg"
        write_jpeg((picture + 128).clamp(0, 255).to(torch.uint8), str(path), quality=QUALITY)
        sizes.append(path.stat().st_size / 1e3)
    return sum(sizes) / len(sizes)


def main() -> None:
    """Measure one worker, and one a vCPU."""
    with tempfile.TemporaryDirectory() as name:
        kilobytes = write_images(Path(name))
        data = ImageFolder(Path(name), image_size=224, classes=1, augment=True, seed=0)
        for workers in (1, len(os.sched_getaffinity(0))):
            with Loader(
                data,
                lambda step: (torch.arange(MICRO_BATCH) + step * MICRO_BATCH) % IMAGES,
                micro_batch=MICRO_BATCH,
                device=torch.device("cpu"),
                workers=workers,
            ) as loader:
                for step in range(4):  # workers start
                    list(loader.step(step))
                started = time.perf_counter()
                for step in range(4, 4 + STEPS):
                    for _ in loader.step(step):
                        pass
                wall_s = time.perf_counter() - started
            row = {
                "workers": workers,
                "image_kb": round(kilobytes, 1),
                "images_per_s": round(STEPS * MICRO_BATCH / wall_s),
            }
            sys.stdout.write(json.dumps(row) + "\n")
        torch.set_num_threads(1)
        data.fetch(torch.arange(16), step=0, device=torch.device("cpu"))
        before = resource.getrusage(resource.RUSAGE_SELF)
        data.fetch(torch.arange(IMAGES), step=1, device=torch.device("cpu"))
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        sys.stdout.write(json.dumps({"images_per_cpu_s": round(IMAGES / cpu_s)}) + "\n")


if __name__ == "__main__":
    main()

"""Endpoint for Prometheus on this node: ``http://localhost:9835/metrics``, the last minute's values.

Only on the loopback address, where a Session Manager session arrives: `gpufleet port-forward RANK 9835`.
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bootstrap.contract.gpus import GpuMinute, NodeMinute

logger = logging.getLogger(__name__)

ADDRESS = ("127.0.0.1", 9835)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GIB, MB = 2.0**30, 1e6
# Prometheus wants base units: https://prometheus.io/docs/practices/naming/#base-units
GPU_GAUGES = (
    ("utilization_ratio", "busy_percent", 0.01, "Share of time in which a kernel ran"),
    ("memory_used_bytes", "memory_used_gib", GIB, "Used GPU memory, highest of the minute"),
    ("memory_total_bytes", "memory_total_gib", GIB, "GPU memory"),
    ("power_watts", "power_w", 1, "Power drawn"),
    ("temperature_celsius", "temperature_celsius", 1, "Temperature of the GPU, highest of the minute"),
    ("sm_clock_hertz", "sm_clock_mhz", 1e6, "Clock of the SMs"),
    ("ecc_corrected_errors", "ecc_corrected", 1, "Corrected memory errors since the driver was loaded"),
    ("ecc_uncorrected_errors", "ecc_uncorrected", 1, "Uncorrected memory errors since the driver was loaded"),
    ("pcie_receive_bytes_per_second", "pcie_rx_mb_per_s", MB, "PCIe traffic into the GPU"),
    ("pcie_transmit_bytes_per_second", "pcie_tx_mb_per_s", MB, "PCIe traffic out of the GPU"),
    ("nvlink_receive_bytes_per_second", "nvlink_rx_mb_per_s", MB, "NVLink traffic into the GPU"),
    ("nvlink_transmit_bytes_per_second", "nvlink_tx_mb_per_s", MB, "NVLink traffic out of the GPU"),
)


def exposition(minute: NodeMinute | None, tokens_per_second: float | None) -> str:
    """Format the values as Prometheus reads them; a value that nobody measured is left out."""
    if minute is None:
        return ""
    return "".join(f"{line}\n" for line in _lines(minute, tokens_per_second))


def _lines(minute: NodeMinute, tokens_per_second: float | None) -> Iterator[str]:
    for name, attribute, factor, about in GPU_GAUGES:
        yield from _gauge(f"gpu_{name}", about, _by_gpu(minute.gpus, attribute, factor))
    throttled = {
        f'{{gpu="{gpu}",reason="{reason}"}}': share
        for gpu, one in minute.gpus.items()
        for reason, share in one.throttled.items()
    }
    yield from _gauge("gpu_throttled_ratio", "Share of the minute in which the GPU was slowed down", throttled)
    xids = {f'{{xid="{number}"}}': float(count) for number, count in minute.xids.items()}
    yield from _gauge("xid_messages", "Xid messages of the kernel since boot", xids)
    node = (
        ("efa_receive_bytes_per_second", "EFA traffic into the node", minute.efa_rx_mb_per_s, MB),
        ("efa_transmit_bytes_per_second", "EFA traffic out of the node", minute.efa_tx_mb_per_s, MB),
        ("tokens_per_second", "Speed of the whole job, on the node of rank 0", tokens_per_second, 1.0),
    )
    for name, about, value, factor in node:
        yield from _gauge(name, about, {} if value is None else {"": value * factor})


def _by_gpu(gpus: dict[str, GpuMinute], attribute: str, factor: float) -> dict[str, float]:
    found = {gpu: getattr(one, attribute) for gpu, one in gpus.items()}
    return {f'{{gpu="{gpu}"}}': value * factor for gpu, value in found.items() if value is not None}


def _gauge(name: str, about: str, values: dict[str, float]) -> Iterator[str]:
    if values:
        yield f"# HELP gpufleet_{name} {about}"
        yield f"# TYPE gpufleet_{name} gauge"
    for labels, value in values.items():
        yield f"gpufleet_{name}{labels} {value:.10g}"


class Exporter:
    """Serves the newest values from a thread of its own."""

    def __init__(self, address: tuple[str, int] = ADDRESS) -> None:
        self._text = b""
        self.port = 0
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(exporter._text)))
                self.end_headers()
                self.wfile.write(exporter._text)

            def log_message(self, format: str, *args: object) -> None:
                """Write nothing: Prometheus asks every few seconds."""

        try:
            server = ThreadingHTTPServer(address, Handler)
        except OSError as error:
            logger.warning("no Prometheus endpoint on %s:%d: %s", *address, error)
            return
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()

    def show(self, minute: NodeMinute, tokens_per_second: float | None) -> None:
        """Serve these values from now on."""
        self._text = exposition(minute, tokens_per_second).encode()

"""``pulumi-resource-aws``: print the port of a gRPC server for Pulumi's engine and serve until ended by a signal.

Environment: GPUFLEET_AWS_PROVIDER (the provider's binary), AWS_ENDPOINT_URL (the emulated AWS), and optionally
GPUFLEET_ENGINE_LOG (a file that gets the provider's standard error).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import grpc
from pulumi.runtime.proto import provider_pb2_grpc

from tests.engine.plugin.provider import AwsProvider, require_emulated_aws
from tests.engine.plugin.terraform import UNLIMITED_MESSAGES, TerraformProvider

# The engine asks for as many resources at once as it has cores; calls that wait must not hold up the others.
THREADS = 32


def main() -> None:
    """Serve one engine."""
    require_emulated_aws()
    with Path(os.environ.get("GPUFLEET_ENGINE_LOG", os.devnull)).open("ab") as log:
        terraform = TerraformProvider(Path(os.environ["GPUFLEET_AWS_PROVIDER"]), log)
        server = grpc.server(ThreadPoolExecutor(THREADS), options=UNLIMITED_MESSAGES)
        provider_pb2_grpc.add_ResourceProviderServicer_to_server(AwsProvider(terraform, version("pulumi_aws")), server)
        port = server.add_insecure_port("127.0.0.1:0")

        def stop(number: int, frame: FrameType | None) -> None:
            terraform.close()
            sys.exit(0)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        server.start()
        print(port, flush=True)
        engine = os.getppid()
        while os.getppid() == engine:  # an engine that was killed leaves no orphan here
            time.sleep(1)
        terraform.close()


if __name__ == "__main__":
    main()

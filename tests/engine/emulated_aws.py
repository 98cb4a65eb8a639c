"""An AWS of this machine only: moto's server with our extension, as a process of its own.

``python -m tests.engine.emulated_aws`` prints its URL and serves until its standard input closes, so it cannot outlive
the test that started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def emulated_aws(scratch: Path, images: Mapping[str, str]) -> Iterator[str]:
    """Run the server; yields its URL.

    Args:
        scratch: gets the server's log and list of machine images.
        images: the machine images Amazon publishes there: CPU architecture by name.
    """
    log, image_list = scratch / "moto.log", scratch / "images.json"
    image_list.write_text(json.dumps([amazon_image(*image) for image in images.items()]), encoding="utf-8")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.emulated_aws"],
            cwd=REPOSITORY,
            # Documented settings of moto: https://docs.getmoto.org/en/latest/docs/services/ec2.html and .../iam.html
            env={**os.environ, "MOTO_AMIS_PATH": str(image_list), "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), f"the emulated AWS did not start; see {log}"
            try:
                yield url
            finally:
                process.stdin.close()


def amazon_image(name: str, architecture: str) -> dict[str, Any]:
    """One public machine image of Amazon's, as moto's list of them holds it."""
    return {
        "ami_id": f"ami-{hashlib.sha256(name.encode()).hexdigest()[:17]}",
        "name": name,
        "description": name,
        "owner_id": "898082745236",  # Amazon's account for Deep Learning AMIs
        "public": True,
        "virtualization_type": "hvm",
        "architecture": architecture,
        "state": "available",
        "platform": None,
        "image_type": "machine",
        "hypervisor": "xen",
        "root_device_name": "/dev/sda1",
        "root_device_type": "ebs",
        "sriov": "simple",
    }


def dlami_name(parameter: str) -> str:
    """Name of the emulated image whose id is in an SSM parameter of Deep Learning AMIs."""
    _, _, architecture, image, _, _ = parameter.removeprefix("/aws/service/").split("/")
    return f"Deep Learning {architecture} {image} 20261009"


def main() -> None:
    """Serve until standard input closes."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    from tests.engine import moto_extension
    from tests.engine.faults import Refusing
    from tests.engine.recording import Recording
    from tests.engine.replay import Replaying

    moto_extension.install()
    application = Replaying(Recording(Refusing(DomainDispatcherApplication(create_backend_app))))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()

"""An AWS of this machine only: moto's server with our extension, as a process of its own.

``python -m tests.engine.emulated_aws`` loads moto, which takes most of a server's seconds, and forks a server for each
line of its standard input: JSON of the machine images and the log's path. The server's URL and process id are answered.
When the input closes, all end: no server outlives the tests that started it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def emulated_aws(scratch: Path, images: Mapping[str, str]) -> Iterator[str]:
    """Run the server; yields its URL.

    Args:
        scratch: gets the server's log.
        images: the machine images Amazon publishes there: CPU architecture by name.
    """
    published = [amazon_image(*image) for image in images.items()]
    with _ALONE:
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps([published, str(scratch / "moto.log")]) + "\n")
        parent.stdin.flush()
        url, _, process = parent.stdout.readline().strip().partition(" ")
    assert url.startswith("http://127.0.0.1:"), f"the emulated AWS did not start; see {scratch / 'moto.log'}"
    # Its parent reaps it at once: should it end early, its number may be another process's.
    handle = os.pidfd_open(int(process))
    try:
        yield url
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        os.close(handle)


# Tests run in threads too.
_ALONE = threading.Lock()


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """Process that forks the servers."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.emulated_aws"],
        cwd=REPOSITORY,
        # https://docs.getmoto.org/en/latest/docs/services/iam.html
        env={**os.environ, "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


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
    """Fork servers until standard input closes."""
    from moto.iam.models import iam_backends

    from tests.engine import moto_extension

    moto_extension.install()
    iam_backends["123456789012"]["aws"]  # reads AWS's managed policies
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        images, log = json.loads(line)
        if not os.fork():
            serve(images, Path(log))


def serve(images: list[dict[str, Any]], log: Path) -> NoReturn:
    """Serve an empty AWS with these machine images until ended by a signal, or with the parent."""
    from moto.ec2.models import amis
    from moto.moto_api._internal import mock_random
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    from tests.engine.faults import Refusing
    from tests.engine.recording import Recording
    from tests.engine.replay import Replaying

    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    mock_random.seed()
    # Read while moto is imported: https://docs.getmoto.org/en/latest/docs/services/ec2.html
    os.environ["MOTO_AMIS_PATH"], amis.AMIS = "set", images
    application = Replaying(Recording(Refusing(DomainDispatcherApplication(create_backend_app))))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port} {os.getpid()}", flush=True)
    # The tests read one line, the address; moto prints to the log from here on.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main()

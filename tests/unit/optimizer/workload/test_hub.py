"""Ids of the Hugging Face Hub, asked of a server on this machine."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from optimizer.contract.errors import DataMissingError, InvalidInputError
from optimizer.workload import hub
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.workload.test_resolve import CONFIGS

pytest.importorskip("huggingface_hub")
CONSTANTS = importlib.import_module("huggingface_hub.constants")

COMMIT = "b968826d9c46dd6066d109eabc6255188de91218"
CONFIG, PARAMETERS = CONFIGS["qwen3-8b"]


class _Hub(BaseHTTPRequestHandler):
    """The Hub's answers to a download (https://huggingface.co/docs/hub/api): status and x-error-code by repository."""

    files: ClassVar = {"Qwen/Qwen3-8B": json.dumps(CONFIG), "org/broken": "{"}
    errors: ClassVar = {
        "org/gated": (403, "GatedRepo"),
        "org/unknown": (401, "RepoNotFound"),
        "org/weights-only": (404, "EntryNotFound"),
        "org/down": (503, ""),
    }

    def do_GET(self) -> None:
        assert self.path.endswith("/config.json"), self.path
        repository = "/".join(self.path.split("/")[1:3])
        if repository == "org/slow":
            time.sleep(0.5)
        revision = self.path.split("/")[4]
        status, code = self.errors.get(repository, (200, ""))
        if repository in self.files and revision not in ("main", COMMIT):
            status, code = 404, "RevisionNotFound"
        body = self.files.get(repository, "").encode() if status == 200 else b""
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(body)):040x}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


def ask(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Point huggingface_hub to another Hub, as HF_ENDPOINT does when it is imported."""
    monkeypatch.setattr(CONSTANTS, "ENDPOINT", address)
    monkeypatch.setattr(CONSTANTS, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    ask(monkeypatch, address)
    monkeypatch.setattr(CONSTANTS, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield address
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_id_is_read_kept_and_its_commit_named(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model("Qwen/Qwen3-8B")
    assert (model.name, model.parameters) == ("Qwen3-8B", PARAMETERS)
    assert model.revision == f"Qwen/Qwen3-8B@{COMMIT}"
    assert COMMIT in model.source
    ask(monkeypatch, "http://127.0.0.1:9")
    assert resolve_model(f"Qwen/Qwen3-8B@{COMMIT}") == model


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("org/gated", "gated repository"),
        ("org/unknown", "no such repository"),
        ("Qwen/Qwen3-8B@nowhere", "no revision nowhere"),
        ("org/weights-only", "no config.json"),
        ("org/broken", "is not JSON"),
    ],
)
def test_an_id_that_gives_no_model_says_why(endpoint: str, text: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says) as error:
        resolve_model(text)
    assert error.value.next_step


def test_a_hub_that_does_not_answer_says_how_to_go_on(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.1)
    for address, name in ((endpoint, "org/slow"), ("http://127.0.0.1:9", "org/away")):
        ask(monkeypatch, address)
        with pytest.raises(DataMissingError, match="cannot be asked") as error:
            resolve_model(name)
        assert f"https://huggingface.co/{name}/resolve/main/config.json" in error.value.next_step


def test_without_huggingface_hub_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataMissingError, match=r"gpufleet\[hub\]"):
        resolve_model("Qwen/Qwen3-8B")


@pytest.mark.parametrize("text", ["./org/name", "org/name/more", "org/", "a b/c", "~/name"])
def test_a_path_is_no_id(text: str) -> None:
    assert not hub.is_hub_id(text)
    with pytest.raises(InvalidInputError, match="is unknown"):
        resolve_model(text)

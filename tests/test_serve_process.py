"""`eggpu serve` as a process: several clients that read streams at once, and one that leaves."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from model_files import tiny_folder

from eggpu.cli import main

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 4000, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("served") / "model", context=4096, ends=False)
    flags = ["--port", "0", "--max-sequences", "3", "--context", "4096", "--name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", "eggpu", "serve", "--model", str(folder), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1 \(3 texts at once, 4096", line)
        assert found, line + process.stderr.read()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def request(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    return connection, connection.getresponse()


def answer(port, method, path, body=None):
    connection, response = request(port, method, path, body)
    try:
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def streamed(port, body):
    """The text of a stream, and how many events it came in."""
    connection, response = request(port, "POST", COMPLETIONS, {**body, "stream": True})
    assert response.status == 200
    texts = []
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            break
        if data:
            texts.append(json.loads(data)["choices"][0]["text"])
    connection.close()
    return "".join(texts), len(texts)


def running(port):
    return answer(port, "GET", "/health")[1]["running"]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.timeout(240)
def test_clients_that_stream_at_once_and_one_that_leaves(server):
    _, port = server
    bodies = [
        {"prompt": "p" * (k + 1), "max_tokens": 25, "temperature": 0.7 * (k % 2), "seed": k}
        for k in range(5)
    ]
    want = [answer(port, "POST", COMPLETIONS, b)[1]["choices"][0]["text"] for b in bodies]
    # a client takes a slot, reads a little and leaves while the others are being served
    connection, response = request(port, "POST", COMPLETIONS, {**LONG, "stream": True})
    assert response.readline().startswith(b"data: ")
    assert running(port) == 1
    with ThreadPoolExecutor(5) as pool:
        found = [pool.submit(streamed, port, b) for b in bodies]
        time.sleep(0.1)
        response.close()
        connection.close()
        texts = [f.result() for f in found]
    assert [text for text, _ in texts] == want
    assert all(count > 3 for _, count in texts)
    until(lambda: running(port) == 0)


@pytest.mark.timeout(240)
def test_a_client_that_does_not_wait_for_its_answer(server):
    _, port = server
    body = json.dumps(LONG)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    until(lambda: running(port) == 1)
    connection.close()
    until(lambda: running(port) == 0)
    assert answer(port, "GET", "/v1/models")[0] == 200


@pytest.mark.timeout(240)
def test_oversized_and_broken_requests_leave_the_server_well(server):
    _, port = server
    status, told = answer(port, "POST", COMPLETIONS, {"prompt": "a" * (2 << 20)})
    assert [status, told["error"]["message"]] == [413, "the body has more than 1048576 bytes"]
    status, told = answer(port, "POST", COMPLETIONS, {"prompt": "a" * 5000})
    assert [status, told["error"]["code"]] == [400, "context_length_exceeded"]
    half = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    half.putrequest("POST", COMPLETIONS)
    half.putheader("Content-Type", "application/json")
    half.putheader("Content-Length", "1000")
    half.endheaders(b'{"prompt":')
    half.close()  # in the middle of its body
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    assert answer(port, "POST", COMPLETIONS, body)[1]["usage"]["completion_tokens"] == 2


@pytest.mark.timeout(240)
def test_ctrl_c_ends_it_and_tells_who_waits(server):
    process, port = server
    seen = {}

    def waits():
        seen["answer"] = answer(port, "POST", COMPLETIONS, LONG)

    thread = threading.Thread(target=waits)
    thread.start()
    until(lambda: running(port) == 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (0, 130)
    thread.join(60)
    written = process.stderr.read()
    assert "Traceback" not in written, written
    status, told = seen["answer"]
    assert [status, told["error"]["message"]] == [500, "the server is stopping"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port needs a number up to 65535"),
        (["--max-sequences", "0"], "--max-sequences needs a number of at least 1, got 0"),
        (["--context", "1"], "--context needs at least 2 positions"),
        (["--host", "203.0.113.7", "--port", "0"], "cannot listen at 203.0.113.7"),
        (["--model", "/nowhere", "--port", "0"], "no file or folder /nowhere"),
    ],
)
def test_what_cannot_be_served(flags, message, capsys):
    assert main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_packages_that_are_missing_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    assert "pip install 'eggpu[serve]'" in capsys.readouterr().err

"""The server on a small random model: OpenAI's forms, streams, limits, mistakes of clients."""

import json
import threading
import time
from dataclasses import replace

import pytest
from model_files import tiny_folder
from starlette.testclient import TestClient

from eggpu.generate import Generator, Sampling, load_language_model
from eggpu.generate.batching import Batcher
from eggpu.serve import Engine, application, requests

pytestmark = pytest.mark.timeout(300)  # the first test waits for all plans
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return load_language_model(str(tiny_folder(tmp_path_factory.mktemp("tiny") / "model")))


@pytest.fixture(scope="module")
def batcher(language):
    made = Batcher(language.model, slots=3, context=96, sizes=(16,), waiting=8)
    made.warm()
    return made


@pytest.fixture(scope="module")
def client(language, batcher):
    engine = Engine(language, batcher)
    app = application(engine, "tiny", most_tokens=60, most_body=4096)
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


@pytest.fixture(scope="module")
def generator(language):
    return Generator(language.model, context=96, sizes=(1, 16))


def events(response):
    """The data of a stream's events; the last is [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def expected(language, generator, ids, most, **sampling):
    pieces = language.stream(generator, ids, Sampling(**sampling), most=most)
    return "".join(p.text for p in pieces)


def ask(client, path=COMPLETIONS, status=200, **body):
    given = {"prompt": "hello"} if path == COMPLETIONS else {"messages": HELLO}
    response = client.post(path, json={"model": "tiny", "max_tokens": 8, **given, **body})
    assert response.status_code == status, response.text
    return response


def test_a_chat(client, language, generator):
    found = ask(client, CHAT, temperature=0, max_tokens=12).json()
    want = expected(language, generator, language.prompt(HELLO), 12)
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": want, "refusal": None}
    assert [found["object"], found["model"]] == ["chat.completion", "tiny"]
    assert found["id"].startswith("chatcmpl-")
    assert choice["finish_reason"] in ("length", "stop")
    usage = found["usage"]
    assert usage["prompt_tokens"] == len(language.prompt(HELLO))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    message = {"role": "user", "content": parts}
    again = ask(client, CHAT, temperature=0, max_tokens=12, messages=[message]).json()
    assert again["choices"][0]["message"]["content"] == want


def test_a_chat_in_a_stream(client):
    whole = ask(client, CHAT, temperature=0.8, seed=7).json()["choices"][0]
    response = ask(
        client, CHAT, temperature=0.8, seed=7, stream=True, stream_options={"include_usage": True}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    told = [c["choices"][0] for c in chunks if c["choices"]]
    assert "".join(c["delta"].get("content", "") for c in told) == whole["message"]["content"]
    assert [c["finish_reason"] for c in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_completions_of_several_prompts(client, language, generator):
    prompts = ["one", "two and three"]
    found = ask(client, prompt=prompts, temperature=0).json()
    assert [c["index"] for c in found["choices"]] == [0, 1]
    for prompt, choice in zip(prompts, found["choices"]):
        ids = language.tokenizer.encode(prompt)
        assert choice["text"] == expected(language, generator, ids, 8)
        by_ids = ask(client, prompt=ids, temperature=0).json()
        assert by_ids["choices"][0]["text"] == choice["text"]
    assert found["object"] == "text_completion"


def test_choices_seeds_and_options(client, language, generator):
    options = {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    found = ask(client, n=3, seed=5, repetition_penalty=1.1, **options).json()["choices"]
    for k, choice in enumerate(found):
        sampling = {**options, "repetition_penalty": 1.1, "seed": 5 + k}
        ids = language.tokenizer.encode("hello")
        assert choice["text"] == expected(language, generator, ids, 8, **sampling)
    assert len({c["text"] for c in found}) > 1
    texts = {ask(client, temperature=1.5).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1  # without a seed each answer is its own


def test_what_a_request_leaves_open_is_the_models_own_choice():
    own = Sampling(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    for read, body in (
        (requests.chat, {"messages": HELLO}),
        (requests.completion, {"prompt": "x"}),
    ):
        left_open = read({**body, "seed": 0}, own).request.sampling
        assert left_open == own
        given = read({**body, "seed": 0, "temperature": 0, "top_p": 1}, own).request.sampling
        assert given == replace(own, temperature=0.0, top_p=1.0)
        # as OpenAI has it, where the model has no settings
        assert read({**body, "seed": 0}, Sampling()).request.sampling == Sampling(temperature=1.0)


def test_stop_strings(client):
    whole = ask(client, temperature=0, max_tokens=30).json()["choices"][0]["text"]
    stop = whole[5:8]
    found = ask(client, temperature=0, max_tokens=30, stop=[stop, "\u2603"]).json()["choices"][0]
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"
    streamed = events(ask(client, temperature=0, max_tokens=30, stop=stop, stream=True))
    text = "".join(c["choices"][0]["text"] for c in streamed)
    assert text == found["text"]


def test_logprobs(client):
    found = ask(client, CHAT, temperature=0, logprobs=True, top_logprobs=3).json()["choices"][0]
    content = found["logprobs"]["content"]
    assert "".join(t["token"] for t in content) == found["message"]["content"]
    for token in content:
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["token"] == token["token"]
        assert token["logprob"] == pytest.approx(token["top_logprobs"][0]["logprob"], abs=1e-4)
        assert bytes(token["bytes"]).decode() == token["token"]
    old = ask(client, temperature=0, logprobs=2).json()["choices"][0]["logprobs"]
    assert len(old["tokens"]) == len(old["token_logprobs"]) == 8
    assert all(len(t) == 2 for t in old["top_logprobs"])
    assert old["text_offset"] == list(range(8))
    chunks = events(ask(client, CHAT, temperature=0, logprobs=True, stream=True))
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert sum(len(t["content"]) for t in told) == 8


def test_models_and_health(client):
    listed = client.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json() == listed["data"][0]
    assert client.get("/v1/models/huge").status_code == 404
    health = client.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert [health.json()[k] for k in ("slots", "context")] == [3, 96]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is no JSON"),
        (b"\xff\xfe", 400, "the body is no JSON"),
        (b"[" * 3000, 400, "the body is no JSON"),
        (b'{"prompt": NaN}', 400, "NaN is no number of JSON"),
        (b"[1]", 400, "needs a JSON object, got a list"),
        (b"{}", 400, "'prompt' needs a string"),
        ({"prompt": 3}, 400, "'prompt' needs a string"),
        ({"prompt": []}, 400, "'prompt' needs a string"),
        ({"prompt": [[1], []]}, 400, "'prompt' needs a string"),
        ({"prompt": [True]}, 400, "'prompt' needs a string"),
        ({"prompt": "\ud800"}, 400, "'prompt' holds text that is not Unicode"),
        ({"prompt": ["a"] * 65}, 400, "takes at most 64 texts"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": [99999]}, 400, "a token is a number from 0 to"),
        ({"prompt": [-1]}, 400, "a token is a number from 0 to"),
        ({"prompt": "a" * 97}, 400, "maximum context length is 96 tokens, the prompt has 97"),
        ({"prompt": "a", "n": 9}, 400, "9 texts are asked for; at most 8"),
        ({"prompt": "a", "n": 17}, 400, "'n' needs an integer from 1 to 16, got 17"),
        ({"prompt": "a", "temperature": "hot"}, 400, "'temperature' needs a number, got a string"),
        ({"prompt": "a", "temperature": True}, 400, "'temperature' needs a number, got a boolean"),
        ({"prompt": "a", "temperature": 3}, 400, "'temperature' needs a number from 0 to 2"),
        ({"prompt": "a", "max_tokens": 0}, 400, "'max_tokens' needs an integer from 1"),
        ({"prompt": "a", "max_tokens": 1.5}, 400, "'max_tokens' needs an integer, got a number"),
        ({"prompt": "a", "stop": ["a"] * 5}, 400, "'stop' takes at most 4"),
        ({"prompt": "a", "stop": {}}, 400, "'stop' needs a string or a list of strings"),
        ({"prompt": "a", "stream": 1}, 400, "'stream' needs true or false, got an integer"),
        ({"prompt": "a", "wings": 2}, 400, "Unrecognized request arguments supplied: wings"),
        ({"prompt": "a", "suffix": "b"}, 400, "'suffix' is not supported"),
        ({"prompt": "a", "echo": True}, 400, "'echo' is not supported"),
        ({"prompt": "a", "presence_penalty": 1}, 400, "'presence_penalty' is not supported"),
        ({"prompt": "a", "seed": 2**70}, 400, "'seed' needs an integer from"),
        ({"prompt": "a", "model": "other"}, 404, "The model 'other' does not exist"),
        ({"prompt": "a" * 5000}, 413, "the body has more than 4096 bytes"),
    ],
)  # fmt: skip
def test_mistakes_of_completions(client, body, status, message):
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = client.post(
        COMPLETIONS, content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'messages' needs a list of at least one message"),
        ({"messages": []}, "'messages' needs a list"),
        ({"messages": ["hi"]}, "'messages[0]' needs an object"),
        ({"messages": [{"role": "user"}]}, "'messages[0].content' needs a string"),
        ({"messages": [{"role": "king", "content": ""}]}, "'messages[0].role' is one of"),
        ({"messages": [{"role": 1, "content": ""}]}, "'messages[0].role' needs a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'messages[0].content[0]' needs a part of the type text",
        ),
        ({"messages": HELLO, "top_logprobs": 2}, "'top_logprobs' needs 'logprobs'"),
        ({"messages": HELLO, "tools": [{}]}, "'tools' is not supported"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "not supported"),
        ({"messages": HELLO, "stream_options": {"x": 1}}, "supplied: stream_options.x"),
        ({"messages": [{**HELLO[0], "x": 1}]}, "supplied: messages[0].x"),
    ],
)
def test_mistakes_of_chats(client, body, message):
    response = client.post(CHAT, json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_other_mistakes(client):
    for method, path, status in (
        ("get", CHAT, 405), ("post", "/v1/models", 405), ("get", "/v2", 404),
    ):  # fmt: skip
        response = getattr(client, method)(path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    response = client.post(
        COMPLETIONS, content='{"prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert response.status_code == 415
    assert "needs to be application/json" in response.json()["error"]["message"]
    # mistakes cost no slot and lose nothing
    assert ask(client, temperature=0).json()["usage"]["completion_tokens"] == 8


def test_more_at_once_than_slots_and_more_than_may_wait(client, batcher, language, generator):
    programs, answers = batcher.programs, {}

    def one(k):
        body = {"prompt": "x" * (k + 1), "max_tokens": 20, "temperature": 0}
        answers[k] = client.post(COMPLETIONS, json=body)

    threads = [threading.Thread(target=one, args=(k,)) for k in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, response in answers.items():
        if response.status_code == 429:  # only where eight were waiting at that moment
            assert response.headers["retry-after"] == "1"
            continue
        ids = language.tokenizer.encode("x" * (k + 1))
        assert response.json()["choices"][0]["text"] == expected(language, generator, ids, 20)
    assert sum(r.status_code == 200 for r in answers.values()) >= 8
    assert batcher.programs == programs
    assert [batcher.running, batcher.waiting] == [0, 0]


def test_a_full_queue_is_told(client, batcher, monkeypatch):
    monkeypatch.setattr(batcher, "most_waiting", 1)
    long = threading.Thread(target=ask, args=(client,), kwargs={"n": 1, "max_tokens": 60})
    monkeypatch.setattr(batcher, "step", lambda: time.sleep(0.01) or True)  # nothing goes on
    long.start()
    while not batcher.waiting:
        time.sleep(0.01)
    response = ask(client, status=429)
    error = response.json()["error"]
    assert [error["type"], error["code"]] == ["rate_limit_error", "busy"]
    monkeypatch.undo()
    long.join()
    ask(client)


def test_a_step_that_fails_ends_its_texts_and_no_others(client, batcher, monkeypatch):
    original, failures = batcher._decode, []

    def fails(*_):
        failures.append(1)
        monkeypatch.undo()
        raise RuntimeError("the device was lost\nwith details")

    monkeypatch.setattr(batcher, "_decode", fails)
    response = ask(client, status=500)
    assert response.json()["error"] == {
        "message": "the device was lost", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip
    assert failures
    assert batcher._decode is original
    assert ask(client, temperature=0).json()["usage"]["completion_tokens"] == 8
    assert client.get("/health").status_code == 200

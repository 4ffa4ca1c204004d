"""A server of language models with OpenAI's endpoints, over continuous batching."""

from eggpu.serve.app import application as application
from eggpu.serve.engine import Engine as Engine

"""Training of small models through the compiled runtime."""

from eggpu.train.gpt import GPTConfig as GPTConfig
from eggpu.train.gpt import train_gpt as train_gpt
from eggpu.train.mlp import MLPConfig as MLPConfig
from eggpu.train.mlp import train_mlp as train_mlp
from eggpu.train.run import Result as Result
from eggpu.train.run import Run as Run
from eggpu.train.run import TrainingError as TrainingError

"""Training of small models through the compiled runtime."""

from eggpu.train.bert import BERTConfig as BERTConfig
from eggpu.train.bert import train_bert as train_bert
from eggpu.train.callbacks import Best as Best
from eggpu.train.callbacks import Callback as Callback
from eggpu.train.callbacks import CSVLog as CSVLog
from eggpu.train.callbacks import EarlyStopping as EarlyStopping
from eggpu.train.callbacks import Moment as Moment
from eggpu.train.callbacks import TensorBoard as TensorBoard
from eggpu.train.diffusion import DiffusionConfig as DiffusionConfig
from eggpu.train.diffusion import train_diffusion as train_diffusion
from eggpu.train.gpt import GPTConfig as GPTConfig
from eggpu.train.gpt import train_gpt as train_gpt
from eggpu.train.images import AutoencoderConfig as AutoencoderConfig
from eggpu.train.images import CNNConfig as CNNConfig
from eggpu.train.images import ResNetConfig as ResNetConfig
from eggpu.train.images import ViTConfig as ViTConfig
from eggpu.train.images import train_images as train_images
from eggpu.train.lora import LoRAConfig as LoRAConfig
from eggpu.train.lora import train_lora as train_lora
from eggpu.train.mlp import MLPConfig as MLPConfig
from eggpu.train.mlp import train_mlp as train_mlp
from eggpu.train.nans import find_not_finite as find_not_finite
from eggpu.train.run import Result as Result
from eggpu.train.run import Run as Run
from eggpu.train.run import TrainingError as TrainingError
from eggpu.train.trainer import Trainer as Trainer

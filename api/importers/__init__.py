"""Model files: safetensors, GGUF and Hugging Face folders, checked before anything is read."""

from eggpu.importers.folder import Folder as Folder
from eggpu.importers.folder import open_folder as open_folder
from eggpu.importers.gguf_file import GGUF as GGUF
from eggpu.importers.gguf_file import open_gguf as open_gguf
from eggpu.importers.safetensors_file import open_safetensors as open_safetensors
from eggpu.importers.tensors import ModelFileError as ModelFileError
from eggpu.importers.tensors import Tensor as Tensor
from eggpu.importers.tensors import Weights as Weights

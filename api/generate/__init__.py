"""Generation with pretrained language models."""

from eggpu.generate.generator import GenerationError as GenerationError
from eggpu.generate.generator import Generator as Generator
from eggpu.generate.language import LanguageModel as LanguageModel
from eggpu.generate.language import Piece as Piece
from eggpu.generate.language import load_language_model as load_language_model
from eggpu.generate.sampling import Sampling as Sampling

"""Data to train on: batches by number, readers of files, text, and handwritten digits."""

from eggpu.data.batches import ArrayRows as ArrayRows
from eggpu.data.batches import Batch as Batch
from eggpu.data.batches import Batches as Batches
from eggpu.data.batches import Rows as Rows
from eggpu.data.batches import Source as Source
from eggpu.data.batches import TokenBatches as TokenBatches
from eggpu.data.batches import in_order as in_order
from eggpu.data.digits import Digits as Digits
from eggpu.data.digits import digits as digits
from eggpu.data.errors import DataError as DataError
from eggpu.data.files import ImageFolder as ImageFolder
from eggpu.data.files import read_idx as read_idx
from eggpu.data.files import read_npz as read_npz
from eggpu.data.files import read_tokens as read_tokens
from eggpu.data.files import write_tokens as write_tokens
from eggpu.data.prefetch import Prefetch as Prefetch
from eggpu.data.text import CHARACTERS as CHARACTERS
from eggpu.data.text import LIBRARY as LIBRARY
from eggpu.data.text import UNKNOWN as UNKNOWN
from eggpu.data.text import Corpus as Corpus
from eggpu.data.text import Vocabulary as Vocabulary
from eggpu.data.text import batch as batch
from eggpu.data.text import corpus as corpus
from eggpu.data.text import even_batches as even_batches
from eggpu.data.text import standard_library as standard_library

"""SeqIO tasks as a dataset: `class Mine(SeqioTask, GPT126M)`."""

import fiddle as fdl

from paxlite.cli.user_modules import import_named
from paxlite.config.attribute_kinds import Training
from paxlite.config.templates import config
from paxlite.contrib.seqio_tasks import SeqioSource
from paxlite.core.errors import UserError
from paxlite.data.streams import StreamRows
from paxlite.experiments.rows import FromTfds, Splits


class SeqioTask(FromTfds, Splits, subject='Data'):
  """A SeqIO task or mixture over TFDS datasets (needs the extra seqio).

  If the attributes are empty, the environment's VOCAB_PATH and TFDS_DATA_DIR are used.
  """

  SEQIO_TASK: Training[str] = ''  # SeqIO task or mixture
  SEQIO_MODULES: Training[list[str]] = []  # Python modules that register SeqIO tasks
  SEQIO_ROWS: Training[StreamRows] = 'stream'  # how documents of a SeqIO task become sequences

  @property
  def dataset(self) -> str:
    return f'SeqIO {self.SEQIO_TASK}'

  def train_input(self) -> fdl.Config:
    return self.leaving_out(self._seqio(self.TRAIN_SPLIT, self.batch_size))

  def eval_inputs(self) -> dict[str, fdl.Config]:
    if self.EVAL_SPLIT is None:
      return {}
    return {self.EVAL_SPLIT: self._seqio(self.EVAL_SPLIT, self.eval_batch_size)}

  def _seqio(self, split: str, batch_size: int) -> fdl.Config:
    if not self.SEQIO_TASK:
      raise UserError('SEQIO_TASK=NAME is missing: a SeqIO task or mixture')
    for module in self.SEQIO_MODULES:
      try:
        import_named(module)
      except ImportError as e:
        raise UserError(f'SEQIO_MODULES: {module} cannot be imported: {e}') from None
    source = config(
      SeqioSource, task=self.SEQIO_TASK, split=split, vocab_path=self.tokenizer_path,
      tfds_data_dir=self.TFDS_DATA_DIR, start_id=self.START_ID,
    )  # fmt: skip
    return self.stream(source, self.SEQIO_ROWS, batch_size)

"""Makes Orbax's CheckpointManager as paxlite uses it."""

import logging
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from paxlite.checkpointing import save_errors
from paxlite.checkpointing.checksums import ITEMS, PREFIX
from paxlite.checkpointing.save_barrier import SaveBarrier

if TYPE_CHECKING:
  import orbax.checkpoint as ocp


def new_manager(
  directory: pathlib.Path,
  max_to_keep: int,
  cleans: bool,
  own_disks: bool,
  before_commit: Callable[[], None],
  barrier: SaveBarrier,
) -> 'ocp.CheckpointManager':
  """Returns a manager of the checkpoints in a folder.

  Args:
    directory: The folder.
    max_to_keep: Number of checkpoints to keep; older ones are deleted.
    cleans: Whether temporary folders of killed saves are removed.
    own_disks: Whether each process has a disk of its own, and so a part of each checkpoint.
    before_commit: Called when all files of a step are written, before its folder is renamed.
    barrier: Where the processes wait for each other while they write.
  """
  import orbax.checkpoint as ocp

  # Orbax logs dozens of lines per save, and hundreds for a failed one, which we log ourselves.
  logging.getLogger('absl').setLevel(logging.CRITICAL)
  save_errors.quieten()
  processes = ocp.options.MultiprocessingOptions(primary_host=None if own_disks else 0)
  # Weights do not compress, and without OCDBT a variable is a plain zarr folder.
  state = ocp.PyTreeCheckpointHandler(
    use_ocdbt=False, use_compression=False, multiprocessing_options=processes
  )
  data = ocp.JsonCheckpointHandler(multiprocessing_options=processes)
  return ocp.CheckpointManager(
    directory,
    item_names=ITEMS,
    item_handlers={'state': state, 'data': data},
    options=ocp.CheckpointManagerOptions(
      max_to_keep=max_to_keep,
      step_name_format=ocp.path.step.standard_name_format(
        step_prefix=PREFIX, step_format_fixed_length=8
      ),
      cleanup_tmp_directories=cleans,
      multiprocessing_options=processes,
      async_options=ocp.AsyncOptions(
        post_finalization_callback=before_commit,
        barrier_sync_fn=barrier,
        # Otherwise a process writes as soon as any process has made its folders, not only itself.
        create_directories_asynchronously=not own_disks,
      ),
    ),
  )

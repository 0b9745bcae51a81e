"""python -m tests.support.distributed PROCESS PROCESSES PORT MODULE FLAGS…

Runs a module as one of several processes.
"""

import importlib
import sys

import jax

from paxlite.cli import command_line

if __name__ == '__main__':
  process, processes, port, module, *sys.argv[1:] = sys.argv[1:]
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(f'127.0.0.1:{port}', int(processes), int(process))
  command_line.run(importlib.import_module(module).main)

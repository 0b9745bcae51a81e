"""The extension for proofs: its commands, --mode=verify, and VERIFY_EVERY_N_STEPS."""

from paxlite.core.extension import Command, Extension


def _command(name: str, purpose: str, group: str, is_run: bool = False) -> Command:
  return Command(name, purpose, f'paxlite.proof.{name}', group, is_run)


EXTENSION = Extension(
  'proof',
  needs=('eval', 'run_data', 'weights'),
  commands=(
    _command('verify', 'replay steps of a run and compare every bit', 'Runs', is_run=True),
    _command('bisect', 'the first step and array where two runs differ', 'Runs'),
    _command('prove', 'check that an export or a server has the same model', 'Models'),
  ),
  parts=('paxlite.proof.attributes:Verification',),
  callbacks=('paxlite.proof.callbacks:callbacks',),
  hooks={
    'verify': 'paxlite.proof.verification:verify_as_asked',
    'export --proof': 'paxlite.proof.export_proof:proof_of',
  },
)

"""The faults that a start of a run gets, and when."""

import dataclasses
import random
import re
import signal
from collections.abc import Callable, Collection, Sequence

from benchmarks.chaos.places import Run, Started

_IN_BUCKETS = 's3', 'gs'
_ANYWHERE = 'folder', *_IN_BUCKETS, 'devices', 'processes'
# by the places where they occur
KINDS = {
  'SIGKILL': _ANYWHERE,
  'SIGTERM': _ANYWHERE,
  'SIGSTOP, SIGCONT': _ANYWHERE,
  'full disk': _ANYWHERE,
  'bit of a checkpoint': _ANYWHERE,
  'bit of a copy in the bucket': _IN_BUCKETS,
  'slow store': _IN_BUCKETS,
  'broken store': _IN_BUCKETS,
  'SIGSTOP, another machine goes on': _IN_BUCKETS,
  'lost process': ('processes',),
  'bit of the parameters': ('devices',),
  'bit of the moments': ('devices',),
  'bit of the batch': ('devices',),
  'bit of the gradients': ('devices',),
  'device that computes wrong': ('devices',),
}
# what flipped_main calls the flip, and what the run must say of it
FLIPS = {
  'bit of the parameters': ('params', r'copies differ: params/\S+ on device {device}: it is wrong'),
  'bit of the moments': ('opt_state', r'copies differ: opt_state/\S+ on device {device}: it is w'),
  'bit of the batch': (
    'batch',
    r'the batch of step {step} differs from the data, on device {device}\.',
  ),
  'bit of the gradients': ('product', r'step {step} gave other bits when it was repeated'),
  'device that computes wrong': ('products', r'gave other bits on other devices: device {device}:'),
}
AT_REST = 'bit of a checkpoint', 'bit of a copy in the bucket'  # before a start
_STORE = 'slow store', 'broken store'
_BROKEN = '503', '429', 'reset', 'silent', 'third', 'conflict', 'page'


@dataclasses.dataclass
class Event:
  """Something that happens to a start.

  Attributes:
    seconds: When, after the start.
    act: Does it.
    kind: The fault that it begins; None: it ends one.
    needs_all: Whether it waits until all processes of the run have met.
  """

  seconds: float
  act: Callable[[Started], object]
  kind: str | None = None
  needs_all: bool = False


@dataclasses.dataclass
class Plan:
  """The faults of one start.

  Attributes:
    machine: Where the run is started.
    flags: Flags of the start.
    environment: Environment of its processes.
    events: What happens.
    happened: The kinds of faults that have happened so far.
    flip: The kind, the device and the step of a bit that is flipped in memory.
    is_abandoned: Whether the start is left stopped, and another one begins elsewhere.
  """

  machine: str
  flags: tuple[str, ...] = ()
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  events: list[Event] = dataclasses.field(default_factory=list)
  happened: list[str] = dataclasses.field(default_factory=list)
  flip: tuple[str, int, int] | None = None
  is_abandoned: bool = False

  def note_flip(self, printed: str) -> None:
    """Notes that the flip has happened, if it has."""
    if self.flip is not None and ' flipped on device ' in printed:
      self.happened.append(self.flip[0])

  def names_flip(self, printed: str) -> bool:
    """Whether the run has found the flip, and says the right place."""
    assert self.flip is not None
    kind, device, step = self.flip
    return re.search(FLIPS[kind][1].format(device=device, step=step), printed) is not None


class Draws:
  """Draws faults.

  Args:
    rng: Where the draws come from.
    kinds: The kinds of faults.
  """

  def __init__(self, rng: random.Random, kinds: Sequence[str]):
    self._rng = rng
    self._kinds = kinds
    self._decks: dict[str, list[str]] = {}

  def of_place(self, place: str, missing: Collection[str] = ()) -> list[str]:
    """Returns none to three kinds, each kind of a place once before any of them comes again.

    If some are `missing`, they are one to three of these. A place that has none of the kinds gets
    none.
    """
    (count,) = self._rng.choices((0, 1, 2, 3), (0, 1, 2, 3) if missing else (1, 4, 3, 2))
    deck = [] if missing else self._decks.setdefault(place, [])
    kinds = [kind for kind in missing or self._kinds if place in KINDS[kind]]
    drawn: list[str] = []
    while kinds and len(drawn) < count:
      if not deck:
        deck += kinds
        self._rng.shuffle(deck)
      kind = deck[-1]
      if kind in drawn or (kind in FLIPS and FLIPS.keys() & drawn):
        break  # two bits in one start would hide each other's message; the next start gets it
      drawn.append(deck.pop())
    return drawn


def plan(
  run: Run, machine: str, kinds: Sequence[str], good: Sequence[int], rng: random.Random,
  moment: Callable[[], float],
) -> Plan:  # fmt: skip
  """Returns what happens to the next start of a run; bits of files are flipped at once.

  Args:
    run: The run.
    machine: Where it is started.
    kinds: The faults.
    good: The checkpoints from which it could continue.
    rng: Where the draws come from.
    moment: Draws seconds after the start.
  """
  made = Plan(machine)
  several = run.place.processes > 1
  for kind in kinds:
    at = moment()
    which = rng.randrange(run.place.processes)
    add = lambda seconds, act, **rest: made.events.append(Event(seconds, act, **rest))
    if kind == 'SIGKILL':
      add(at, lambda s: s.signal(signal.SIGKILL), kind=kind)
    elif kind == 'lost process':
      add(at, lambda s, i=which: s.signal(signal.SIGKILL, i), kind=kind, needs_all=True)
    elif kind == 'SIGTERM':
      add(at, lambda s, i=which: s.signal(signal.SIGTERM, i), kind=kind, needs_all=several)
    elif kind == 'SIGSTOP, SIGCONT':
      add(at, lambda s, i=which: s.signal(signal.SIGSTOP, i), kind=kind)
      add(at + rng.uniform(0.5, 6), lambda s: s.signal(signal.SIGCONT))
    elif kind == 'SIGSTOP, another machine goes on':
      add(at, lambda s: _abandon(made, s), kind=kind)
    elif kind == 'full disk':
      add(at, lambda s: run.is_full.touch(), kind=kind)
      add(at + rng.uniform(0.5, 6), lambda s: run.is_full.unlink())
    elif kind in _STORE:
      between, mode = run.place.between, rng.choice(_BROKEN)
      assert between is not None
      delay = rng.uniform(0.05, 0.5)
      if kind == 'slow store':
        add(at, lambda s, b=between, d=delay: setattr(b, 'delay', d), kind=kind)
        add(at + rng.uniform(2, 10), lambda s, b=between: setattr(b, 'delay', 0.0))
      else:
        add(at, lambda s, b=between, m=mode: setattr(b, 'mode', m), kind=kind)
        add(at + rng.uniform(0.5, 6), lambda s, b=between: setattr(b, 'mode', 'forward'))
    elif kind in FLIPS:
      step = min(max(good, default=0) + 1 + rng.randrange(40), run.steps)
      made.flip = kind, rng.randrange(run.place.devices), step
  if run.place.name == 'devices':
    # A bit of a batch or a product is found only in a verified step. A bit of a parameter is found
    # in the next one, but a stop before that would save it. The last bit of a moment is rounded
    # away by some updates, and changed some parameters before that by others.
    every = 5
    if made.flip is not None:
      what, device, step = FLIPS[made.flip[0]][0], *made.flip[1:]
      made.environment['FLIPS'] = f'{what}:{device}:{step}'
      every = 5 if what == 'params' and 'SIGTERM' not in kinds else 1
    made.flags = (f'--fdl.VERIFY_EVERY_N_STEPS={every}',)
  made.events.sort(key=lambda event: event.seconds)
  return made


def _abandon(made: Plan, started: Started) -> None:
  started.signal(signal.SIGSTOP)
  made.is_abandoned = True


def repair(run: Run) -> None:
  """Ends the faults that outlive the processes of a start."""
  run.is_full.unlink(missing_ok=True)
  if run.place.between is not None:
    run.place.between.mode, run.place.between.delay = 'forward', 0.0


# They have no checksums, and nothing of a run is read from them.
_NOTES = '_CHECKPOINT_METADATA', 'commit_success.txt'


def flip_file(run: Run, machine: str, step: int, rng: random.Random) -> None:
  """Flips a bit of a file of a checkpoint on a machine, but not of Orbax's notes about it."""
  folder = run.checkpoint(machine, step)
  files = (p for p in folder.rglob('*') if p.is_file() and p.stat().st_size)
  path = rng.choice(sorted(p for p in files if p.name not in _NOTES))
  path.write_bytes(_flipped(path.read_bytes(), rng))


def flip_object(run: Run, step: int, rng: random.Random) -> None:
  """Flips a bit of an object of a checkpoint in the bucket, but not of the list of checksums."""
  store = run.store()
  below = f'checkpoints/{run.checkpoint("a", step).name}'
  keys = sorted(o.name for o in store.below(below) if o.size and '/state/' in o.name)
  key = rng.choice(keys)
  store.write(key, _flipped(store.read(key), rng))


def _flipped(content: bytes, rng: random.Random) -> bytes:
  at = rng.randrange(len(content))
  changed = bytearray(content)
  changed[at] ^= 1 << rng.randrange(8)
  return bytes(changed)

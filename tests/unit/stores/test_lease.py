"""The lease of a run in an object store, by a server that enforces preconditions."""

import json
import threading
import time

import pytest

from paxlite.core.errors import UserError
from paxlite.stores.lease import Lease, LeaseView, Times
from paxlite.stores.object_store import ObjectStore
from tests.support import gcs_server as gcs_server_module
from tests.support.proxy import proxy

RUN = 'gs://bkt/run'
QUICK = Times(renew=0.05, expires=0.6, sure=0.4, look=0.02)
DEAD = Times(renew=1000, expires=0.6, sure=0.4, look=0.02)  # never renews, as if it was killed


def lease(times=QUICK, lost=None):
  return Lease(RUN, (lambda why: None) if lost is None else lost.append, times)


def test_a_second_run_is_refused_and_learns_who_holds_it(gcs):
  first, second = lease(), lease()
  assert first.acquire(None) is None
  assert first.is_sure
  with pytest.raises(UserError, match=r'gs://bkt/run is in use by another run \(process \d+ on '):
    second.acquire(None)
  first.release()
  assert not first.is_sure
  assert second.acquire(None) == first.attempt
  second.release()


def test_an_abandoned_lease_is_taken_over(gcs):
  dead, other = lease(DEAD), lease()
  dead.acquire(None)
  began = time.monotonic()
  assert other.acquire(None) == dead.attempt
  assert time.monotonic() - began >= QUICK.expires
  assert not dead.is_sure
  other.release()
  dead.release()
  content = json.loads(ObjectStore(RUN).read('lease.json'))
  assert content['attempt'] == other.attempt, 'a lost lease is not released'


@pytest.mark.skipif(not hasattr(time, 'CLOCK_BOOTTIME'), reason='only Linux has this clock')
def test_the_time_of_a_suspended_machine_counts(gcs, monkeypatch):
  holder = lease(DEAD)
  holder.acquire(None)
  assert holder.is_sure
  clock = time.clock_gettime
  asleep = lambda which: clock(which) + 600 * (which == time.CLOCK_BOOTTIME)
  monkeypatch.setattr(time, 'clock_gettime', asleep)
  assert not holder.is_sure
  holder.release()


def test_the_next_start_on_the_same_machine_does_not_wait(gcs):
  dead, other = lease(DEAD), lease(Times(renew=0.05, expires=1000, sure=1, look=0.02))
  dead.acquire(None)
  assert other.acquire(dead.attempt) == dead.attempt
  other.release()


def test_only_one_of_several_takes_over(gcs):
  dead = lease(DEAD)
  dead.acquire(None)
  leases = [lease() for _ in range(4)]
  won, refused = [], []

  def acquire(one):
    try:
      one.acquire(None)
      won.append(one)
    except UserError:
      refused.append(one)

  threads = [threading.Thread(target=acquire, args=(one,)) for one in leases]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert (len(won), len(refused)) == (1, 3)
  won[0].release()


def test_a_lost_lease_is_noticed(gcs):
  why = []
  loser = lease(lost=why)
  loser.acquire(None)
  store = ObjectStore(RUN)
  store.write('lease.json', json.dumps({'attempt': 'x', 'host': 'h', 'process': 3}).encode())
  until = time.monotonic() + 10
  while not why and time.monotonic() < until:
    time.sleep(0.01)
  assert 'taken over by another run (process 3 on h' in why[0]
  assert not loser.is_sure
  loser.release()


def test_a_silent_store_makes_the_lease_unsure_and_is_no_loss(gcs, monkeypatch):
  with proxy(gcs.endpoint) as between:
    monkeypatch.setenv('GOOGLE_BASE_URL', between.endpoint)
    why = []
    held = lease(lost=why)
    held.acquire(None)
    between.mode = 'silent'
    until = time.monotonic() + 10
    while held.is_sure:
      assert time.monotonic() < until
      time.sleep(0.01)
    between.mode = 'forward'
    while not held.is_sure:
      assert time.monotonic() < until
      time.sleep(0.01)
    assert why == []
    held.release()


def test_a_store_that_answers_409_to_writes_that_race(gcs, monkeypatch):
  """S3 may do so, and asks for the write to be repeated."""
  with proxy(gcs.endpoint, mode='conflict') as between:
    monkeypatch.setenv('GOOGLE_BASE_URL', between.endpoint)
    why = []
    held = lease(lost=why)
    threading.Timer(0.1, lambda: setattr(between, 'mode', 'forward')).start()
    held.acquire(None)
    between.mode = 'conflict'
    until = time.monotonic() + 10
    while held.is_sure and time.monotonic() < until:
      time.sleep(0.01)
    assert not held.is_sure, 'an answer that renews nothing does not count'
    between.mode = 'forward'
    while not held.is_sure and time.monotonic() < until:
      time.sleep(0.01)
    assert held.is_sure
    assert not why
    held.release()


def test_a_damaged_lease_is_watched_as_any_other(gcs):
  """It may be a page of a proxy in its place."""
  ObjectStore(RUN).write('lease.json', b'[1')
  held, began = lease(), time.monotonic()
  assert held.acquire(None) is None
  assert time.monotonic() - began >= QUICK.expires
  held.release()


@pytest.mark.parametrize(
  'content', [b'{"attempt": "a", "released": true}', b'{"attempt": "a"}', None]
)
def test_a_lease_that_cannot_be_replaced_is_told_after_a_while(gcs, monkeypatch, content):
  """It is tried again with pauses, and not for ever."""
  if content is not None:
    ObjectStore(RUN).write('lease.json', content)
  with proxy(gcs.endpoint, mode='412') as between:
    monkeypatch.setenv('GOOGLE_BASE_URL', between.endpoint)
    with pytest.raises(UserError, match=r'gs://bkt/run/lease\.json can be read but not replaced'):
      lease(Times(renew=1, expires=0.4, sure=1, look=0.1)).acquire(None)
    assert between.requests < 40


def test_a_lease_that_may_not_be_replaced_is_told_at_once(gcs, monkeypatch):
  ObjectStore(RUN).write('lease.json', b'{"attempt": "a", "released": true}')
  with proxy(gcs.endpoint, mode='403') as between:
    monkeypatch.setenv('GOOGLE_BASE_URL', between.endpoint)
    with pytest.raises(UserError, match=r'refuses these credentials \(AccessDenied\)'):
      lease().acquire(None)
    assert between.requests < 5


def test_why_the_lease_is_not_sure_is_told(gcs, monkeypatch):
  with proxy(gcs.endpoint) as between:
    monkeypatch.setenv('GOOGLE_BASE_URL', between.endpoint)
    held = lease()
    held.acquire(None)
    held.check()
    between.mode = '403'
    until = time.monotonic() + 10
    while held.is_sure and time.monotonic() < until:
      time.sleep(0.01)
    with pytest.raises(OSError, match=r'not be renewed in time \(the store refuses these creden'):
      held.check()
    between.mode = 'forward'
    held.release()


def test_a_store_that_ignores_conditions_is_refused(gcs, monkeypatch):
  put = gcs_server_module._Handler._put

  def ignore(self, *args):
    del self.headers['x-goog-if-generation-match']
    put(self, *args)

  monkeypatch.setattr(gcs_server_module._Handler, '_put', ignore)
  with pytest.raises(UserError, match='gs://bkt/run: the store ignores conditional writes'):
    lease().acquire(None)


def test_a_lease_that_was_removed_is_lost(gcs):
  why = []
  loser = lease(lost=why)
  loser.acquire(None)
  del gcs.objects['bkt']['run/lease.json']
  until = time.monotonic() + 10
  while not why and time.monotonic() < until:
    time.sleep(0.01)
  assert why == ['gs://bkt/run lost its lease: it was removed']
  loser.release()


def test_another_process_of_the_run_sees_whether_its_lease_is_renewed(gcs):
  held = lease()
  held.acquire(None)
  view = LeaseView(RUN, held.attempt, QUICK)
  for _ in range(5):
    view.check()
    time.sleep(0.1)
  held._stop.set()  # as if its machine was suspended
  held._thread.join()
  time.sleep(QUICK.sure)
  with pytest.raises(OSError, match='could not be renewed in time'):
    view.check()
  other = lease()
  other.acquire(held.attempt)
  time.sleep(QUICK.renew)  # the view reads the lease once for each third of that time
  with pytest.raises(OSError, match=r'\(the lease belongs to process \d+ on '):
    view.check()
  LeaseView(RUN, other.attempt, QUICK).check()
  other.release()
  with pytest.raises(OSError, match='in time'):
    LeaseView(RUN, other.attempt, QUICK).check()

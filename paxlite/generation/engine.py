"""The generation engine: requests join and leave its batch at any step.

Each answer has a row of the cache while it is generated. `step` reads parts of the prompts that
have a row and are not read yet, and then lets all others grow by some tokens. A row that ends makes
room for the next request. The programs are compiled for a number of rows and slots, which grow with
what is asked for.
"""

import collections
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paxlite.config.generation import GREEDY, Sampling
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.data.tokenizer import Tokenizer
from paxlite.generation import options
from paxlite.generation.cache import Pages
from paxlite.generation.cache_pool import KVCachePool, Sizes, steady_sizes
from paxlite.generation.chunks import chunk_of
from paxlite.generation.engine_limits import EngineLimits
from paxlite.generation.job import Job, Phase
from paxlite.generation.module_drafts import ModuleDrafts
from paxlite.generation.ngram_drafts import NgramDrafts
from paxlite.generation.paged_cache import PagedCachePool, PagedScheduler
from paxlite.generation.programs import DecodeLimits, Programs, layout_of, vocab_size
from paxlite.generation.request import Completion, Request
from paxlite.generation.scheduler import Scheduler
from paxlite.generation.spelling import Mark
from paxlite.generation.tokens import ScoredTokens
from paxlite.layers.attention import cache_encoding
from paxlite.layers.language_model import TransformerLm
from paxlite.parallel import partitioning

MOST_ROWS = 32
_LENGTHS = 16, 64, 128, 256  # of parts of prompts
STEADY_LENGTHS = 64, 256  # the same of a steady engine; prompts that are scored have the last one
MOST_STEPS = 32  # tokens of a row in one call


class Engine:
  """Continues prompts with a model.

  Args:
    model: The model, repeated or unrolled. An unrolled one is faster, because a scan copies the
      weights of every layer.
    params: Its parameters, on the mesh; None: they are set before each use.
    max_length: The most tokens of prompt and answer: the model's number of positions.
    sampling: How tokens are chosen, where a request does not say it; None: the likeliest ones.
    ends: Token ids that end an answer, likewise.
    is_token: Whether each id has a token [n]. Others, and those from n on, are never chosen, as
      where a vocabulary was rounded up. None: all ids have one.
    tokenizer: What makes text of tokens; None: answers have none, and no text ends them.
    mesh: The mesh over which rows and weights are split; None means one device.
    rules: The mapping of logical axes to mesh axes.
    most_rows: The most answers that are generated at a time.
    slots: The cache always has so many slots for each of `most_rows` rows, so that the same
      programs compute an answer whatever else is generated, and its numbers are the same to the
      last bit on one device; None: it grows as needed, and numbers differ by rounding.
    steady: Whether there are few sizes, and rows have tables from the start, so that
      warm_up.warm_up compiles all programs that requests need, whatever their options.
    drafts: Whether tokens are proposed by the model's first prediction module, or without one by
      what a row has said; see speculative.
    tracks_experts: Whether scores have a number of the experts that the model has chosen; not with
      drafts.
    kv_cache_dtype: What keys and values are stored in: int8 or float8_e4m3fn; None: the model's
      own dtype.
    pages: The cache has so many pages, which all rows share, and answers wait for room; not with
      slots, rows that the mesh splits, or several processes. None: each row has slots of its own.

  Attributes:
    num_steps: How many times the model was computed for new tokens, beside those of prompts.
    num_tokens: How many tokens were chosen, with those that ended an answer.
  """

  def __init__(
    self,
    model: TransformerLm,
    params: PyTree | None,
    max_length: int,
    sampling: Sampling | None = None,
    ends: Sequence[int] = (),
    is_token: np.ndarray | None = None,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    rules: partitioning.Rules = partitioning.DEFAULT_RULES,
    most_rows: int = MOST_ROWS,
    slots: int | None = None,
    steady: bool = False,
    drafts: bool = False,
    tracks_experts: bool = False,
    kv_cache_dtype: str | None = None,
    pages: Pages | None = None,
  ):
    assert not (drafts and tracks_experts)
    assert not (slots and pages), 'a cache has slots or pages'
    if kv_cache_dtype not in (None, *cache_encoding.DTYPES):
      known = ' or '.join(cache_encoding.DTYPES)
      raise UserError(f'kv_cache_dtype={kv_cache_dtype!r} is unknown; use {known}')
    self._model, self._params = model, params
    self.max_length = max_length
    self.sampling = GREEDY if sampling is None else sampling
    self.ends, self.tokenizer = tuple(ends), tokenizer
    self._is_token, self._tracks_experts = is_token, tracks_experts
    self._kv_cache_dtype, self._pages = kv_cache_dtype, pages
    self._mesh, self._rules = mesh, rules
    self._shards = 1 if mesh is None else partitioning.num_shards(mesh.shape, rules, 'batch')
    if pages is not None and pages.count * pages.size < max_length:
      raise UserError(
        f'KV_CACHE_TOKENS has {pages.count * pages.size:,} tokens, and one answer with its prompt '
        f'may have {max_length:,}: raise it, or lower MAX_SEQ_LEN'
      )
    if pages is not None and (self._shards > 1 or jax.process_count() > 1):
      raise UserError(
        f'KV_CACHE_TOKENS needs one process, and devices that all have all rows; this run has '
        f'{jax.process_count()}, and its mesh splits rows over {self._shards}: give the devices to '
        'the axis mdl'
      )
    self.most_rows = self._whole(most_rows)
    self._fixed_slots, self._steady, self._drafts = slots, steady, drafts
    self._programs: Programs | None = None
    self._its_pool: KVCachePool | None = None
    self._was_idle = True
    # numbers may depend on the call; a module has read the token after each one
    self._has_module = drafts and bool(model.prediction_tpls)
    share = slots is None, int(self._has_module)
    self._scheduler = Scheduler(*share) if pages is None else PagedScheduler(pages, *share)
    self.num_steps = self.num_tokens = 0
    self._queue: collections.deque[Job] = collections.deque()
    self._any_token: dict[int, jax.Array] = {}  # by the number of rows

  @property
  def params(self) -> PyTree | None:
    """The parameters; new ones make the engine forget what it has read."""
    return self._params

  @params.setter
  def params(self, params: PyTree | None) -> None:
    self._params = params
    self._scheduler.clear(len(self._scheduler))
    for job in [job for job in self._queue if job.saved is not None]:
      self.cancel(job)  # its row has what other parameters have made
    if params is None and self._its_pool is not None:
      self._its_pool.clear()  # room for what the parameters are needed for

  def generate(
    self, requests: Sequence[Request], report: Callable[[int, int], None] = lambda done, total: None
  ) -> list[Completion]:
    """Returns the answer to each request, in their order.

    Raises UserError if a prompt is empty, contains invalid ids, or is longer than the model takes.

    Args:
      report: Called with the number of answers, and the number of requests.
    """
    found: list[Completion | None] = [None] * len(requests)
    for done, (i, answer) in enumerate(self.answers(requests), 1):
      found[i] = answer
      report(done, len(requests))
    return [answer for answer in found if answer is not None]

  def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
    """Yields answers as they are complete, with the numbers of their requests; see `generate`."""
    for i, request in enumerate(requests):
      self.check(request, f'prompt {i}')
    jobs = {i: self.add(request) for i, request in enumerate(requests)}
    try:
      while jobs:
        self.step(while_reading=0)
        for i, job in [*jobs.items()]:
          if job.answer is not None:
            job.check()
            del jobs[i]
            yield i, job.answer
    finally:
      for job in jobs.values():
        self.cancel(job)

  def continuations(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int = 0,
    samples: Sequence[int] | None = None,
  ) -> list[list[int]]:
    """Returns the new token ids of each prompt, by the engine's sampling and ends.

    Args:
      prompts: Token ids of each prompt.
      max_new_tokens: The most new tokens of each, as far as the model has room.
      seed: Of what is drawn at random.
      samples: The number of each prompt for this; None: 0, 1, 2 ….

    Raises:
      UserError: See `generate`, or max_new_tokens is less than 1.
    """
    numbers = range(len(prompts)) if samples is None else samples
    asked = [
      self.request(p, max_new_tokens, seed, i, f'prompt {n}')
      for n, (p, i) in enumerate(zip(prompts, numbers, strict=True))
    ]
    return [answer.ids for answer in self.generate(asked)]

  def stream(self, prompt: Sequence[int], max_new_tokens: int, seed: int = 0) -> Iterator[int]:
    """Yields the tokens of one continuation as they are generated; see `continuations`."""
    job = self.add(self.request(prompt, max_new_tokens, seed))
    try:
      while job.answer is None:
        self.step(most=1)
        for token, _ in job.taken():
          yield token
      job.check()
    finally:
      self.cancel(job)

  def texts(self, prompt: Sequence[int], max_new_tokens: int, seed: int = 0) -> Iterator[str]:
    """Yields the pieces of the text of one continuation; see `continuations`."""
    parts = self.parts(prompt, max_new_tokens, seed)
    return (part for part in parts if not isinstance(part, Mark))

  def parts(self, prompt: Sequence[int], max_new_tokens: int, seed: int = 0) -> Iterator[str]:
    """Yields these pieces, with Marks in the places of special tokens."""
    job = self.add(self.request(prompt, max_new_tokens, seed))
    try:
      while job.answer is None:
        self.step(most=1)
        yield from job.parts()
      job.check()
    finally:
      self.cancel(job)

  def request(
    self,
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int = 0,
    sample: int = 0,
    what: str = 'the prompt',
  ) -> Request:
    """Returns a request for as many of these tokens as the model has room for."""
    if max_new_tokens < 1:
      raise UserError(f'max_new_tokens={max_new_tokens} must be at least 1')
    self._limits.check_prompt(prompt, what)
    most = min(max_new_tokens, self.max_length - len(prompt))
    return Request(prompt, most, self.sampling, seed, sample, ends=self.ends)

  def _whole(self, rows: int) -> int:
    """Returns a number of rows that the mesh can divide evenly."""
    return -(-rows // self._shards) * self._shards

  def add(self, request: Request) -> Job:
    """Queues a request; `step` works on it until the job has an answer.

    Raises:
      UserError: See `generate`.
    """
    self.check(request, 'the prompt')
    job = Job(request, self.tokenizer)
    self._queue.append(job)
    return job

  def cancel(self, job: Job) -> None:
    """Ends a job, if it has no answer yet, with what there is."""
    if job in self._queue:
      self._queue.remove(job)
    if job.answer is None:
      job.cancel()

  def reset(self) -> None:
    """Ends all jobs and frees the cache, as after a program has failed."""
    for job in [*self._queue, *self._scheduler.busy]:
      job.cancel()
    self._queue.clear()
    self._scheduler.clear(len(self._scheduler))
    if self._its_pool is not None:
      self._its_pool.clear()

  @property
  def num_active(self) -> int:
    """The number of answers that are being generated."""
    return len(self._scheduler.busy)

  def cache_bytes(self, rows: int, slots: int) -> int:
    """Returns the size of a cache on all devices, with what drafts need."""
    cache = self._compiled.layout.abstract(rows, slots)
    drafts = jax.eval_shape(lambda: self._compiled.no_drafts(rows))
    return sum(x.size * x.dtype.itemsize for x in [*cache.values(), *jax.tree.leaves(drafts)])

  def step(self, most: int = MOST_STEPS, while_reading: int = 1) -> bool:
    """Reads parts of prompts, and then generates up to `most` tokens of each row.

    Args:
      most: The most tokens.
      while_reading: The most tokens where rows have prompts that are not read. A row takes the same
        time whether it waits or grows, so that all grow together soonest if none grows before.

    Returns:
      Whether there is more to do.
    """
    if self._queue:
      room = self.most_rows - len(self._scheduler.busy)
      self._pool.admit(self._queue, room, may_shrink=self._was_idle)
    reading = [job for job in self._scheduler.busy if job.phase is Phase.READING]
    reading.sort(key=lambda job: job.number)  # so that none waits for ever
    if reading:
      self._read(reading)
    writing = [job for job in self._scheduler.busy if job.phase is Phase.WRITING]
    if any(job.phase is Phase.READING for job in self._scheduler.busy):
      most = min(most, while_reading)
    if writing and most:
      new = MOST_STEPS * (1 + self._compiled.most_drafts)
      if max(len(job.known) for job in writing) + new > self._pool.slots:
        self._pool.fit([], may_shrink=False)
      if not self._queue and not reading and self._platform == 'cpu':
        self._pool.shrink()
      if ready := self._pool.with_room(writing, new, self._queue):
        self._write(ready, min(most, MOST_STEPS))
    self._was_idle = not self._queue and not self._scheduler.busy
    return not self._was_idle

  # programs

  @property
  def _compiled(self) -> Programs:
    if self._programs is None:
      layout = layout_of(
        self._model, self._params, self._mesh, self._rules, self._has_module,
        self._kv_cache_dtype, self._pages,
      )  # fmt: skip
      if layout.has_states:
        self._scheduler.shares = False
      given = self._model, layout, self._is_token, self._mesh, self._rules
      if self._has_module:
        self._programs = ModuleDrafts(*given)
      elif self._drafts:
        self._programs = NgramDrafts(*given, max_length=self.max_length)
      else:
        self._programs = Programs(*given, self._tracks_experts)
    return self._programs

  @property
  def _pool(self) -> KVCachePool:
    if self._its_pool is None:
      pool = KVCachePool if self._pages is None else PagedCachePool
      self._its_pool = pool(
        self._compiled, self._scheduler, self._vocab_size, self.most_rows, self._shards,
        self._fixed_slots, self._sizes, self._steady,
      )  # fmt: skip
    return self._its_pool

  @property
  def _sizes(self) -> Sizes:
    is_cpu = self._platform == 'cpu'
    if not self._steady:
      return Sizes(row_growth=2 if is_cpu else 4)
    size = lambda slots: self._compiled.layout.bytes_of_slots(self.most_rows, slots)
    return steady_sizes(self.max_length, self.most_rows, is_cpu, size)

  @property
  def row_levels(self) -> list[int]:
    """The numbers of rows that the cache may have."""
    return self._pool.row_levels

  def hold_rows(self, rows: int) -> None:
    """Keeps at least `rows` rows, even if there are fewer answers."""
    self._pool.least_rows = rows

  def lowered(self, rows: int, slots: int) -> jax.stages.Lowered:
    """Returns the decoding loop of greedy rows, for inspection.

    Neither the devices nor the values of the parameters need to be there.
    """
    everywhere = self._compiled.layout.everywhere
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
    limits = DecodeLimits(like(np.int32(1)), like(np.bool_(False)), like(np.bool_(False)), None)
    state, is_active = self._pool.shapes(rows, slots), like(np.ones(rows, bool))
    return self._compiled.decode.lower(self._params, state, is_active, limits, MOST_STEPS, False)

  def _read(self, jobs: Sequence[Job]) -> None:
    """Reads the next part of the prompts of some jobs, those that fit into one call."""
    length, is_scored = self._part_length(jobs[0]), jobs[0].is_scored
    size = 1 if self._reads_one else min(max(1, self._part_tokens // length), len(self._scheduler))
    is_alike = lambda j: self._part_length(j) == length and j.is_scored == is_scored
    batch = [job for job in jobs if is_alike(job)][:size]
    is_fixed = self._fixed_slots is not None
    is_single = len(batch) == 1 and not is_fixed
    count = self._whole(1 if is_single else size)
    parts = [job.part(length) for job in batch]
    # one row costs the same in both variants
    full = options.needs_full([job.request for job in batch]) or (self._steady and is_single)
    is_allowed = full and self._pool.tables
    allowed = self._allowed(batch, range(len(batch)), count) if is_allowed else None
    chunk = chunk_of(batch, parts, (count, length), len(self._scheduler), self._vocab_size, allowed)
    is_free = not (is_fixed or self._steady or self._pages)
    is_first = is_free and all(job.num_read == 0 for job in batch)
    self._pool.prepare(batch)
    assert self._pool.state is not None
    self._pool.state, read = self._compiled.read(
      self._params, self._pool.state, chunk, is_first, full
    )
    chosen, scores = jax.device_get(read)
    most = max(len(part.places) for part in parts)
    found, of_prompts = ScoredTokens(chosen), ScoredTokens(scores, most)
    for i, (job, part) in enumerate(zip(batch, parts, strict=True)):
      if job.answer is not None:  # its grammar has failed
        continue
      tops = max(1, job.request.top_log_probs)
      job.was_read(part, of_prompts.scores(i, tops))
      if job.phase is Phase.WRITING:
        job.alone(job.wrote, *found.at(i, job.request.top_log_probs))
        self.num_tokens += 1

  def _allowed(self, jobs: Sequence[Job], rows: Sequence[int], count: int) -> jax.Array:
    """Returns which tokens may come next in each row."""
    if all(job.request.grammar is None for job in jobs):
      if count not in self._any_token:
        self._any_token[count] = jnp.asarray(np.ones((count, self._vocab_size), bool))
      return self._any_token[count]
    allowed = np.ones((count, self._vocab_size), bool)
    for job, row in zip(jobs, rows, strict=True):
      job.alone(job.restrict, allowed[row])
    return jnp.asarray(allowed)

  def _part_length(self, job: Job) -> int:
    left, lengths = job.num_unread, STEADY_LENGTHS if self._steady else _LENGTHS
    if self._steady and job.is_scored:
      return lengths[-1]
    return next((n for n in lengths if n >= left), lengths[-1])

  @property
  def _reads_one(self) -> bool:
    """Whether prompts are read one by one, which on a CPU takes as long, and fewer programs."""
    return self._steady and self._platform == 'cpu'

  @property
  def _part_tokens(self) -> int:
    return 512 if self._platform == 'cpu' else 4096

  @property
  def _platform(self) -> str:
    return (jax.devices()[0] if self._mesh is None else self._mesh.devices.flat[0]).platform

  def _write(self, jobs: Sequence[Job], most: int) -> None:
    """Generates some tokens of these jobs."""
    rows, count = [job.row for job in jobs], len(self._scheduler)
    is_active = np.zeros(count, bool)
    is_active[rows] = True
    full = options.needs_full([job.request for job in jobs])
    has_grammar = any(job.request.grammar is not None for job in jobs)
    allowed = self._allowed(jobs, rows, count) if full and self._pool.tables else None
    steps = 1 if has_grammar else min(most, max(job.num_left for job in jobs))
    # a steady engine has one program for rows that draw and others
    draws = full or self._steady or any(job.request.sampling.temperature > 0 for job in jobs)
    limits = DecodeLimits(
      np.int32(steps), np.bool_(len(self._queue) > 0), np.bool_(has_grammar), allowed,
      np.bool_(True) if draws else None,
    )  # fmt: skip
    self._pool.prepare(jobs)
    assert self._pool.state is not None
    self._pool.state, *found = self._compiled.decode(
      self._params, self._pool.state, is_active, limits, MOST_STEPS, full
    )
    chosen, counts, taken = jax.device_get(found)
    self.num_steps += int(taken)
    tokens = ScoredTokens(chosen, int(counts.max()))
    for job in jobs:
      for i in range(int(counts[job.row])):
        if job.answer is None:
          job.alone(job.wrote, *tokens.at((job.row, i), job.request.top_log_probs))
          self.num_tokens += 1

  @property
  def _vocab_size(self) -> int:
    assert self._params is not None
    return vocab_size(self._params)

  @property
  def _limits(self) -> EngineLimits:
    has_tokenizer = self.tokenizer is not None
    return EngineLimits(self.max_length, self._fixed_slots, self._vocab_size, has_tokenizer)

  def check(self, request: Request, what: str = 'the prompt') -> None:
    """Raises UserError if the request cannot be answered; see `generate`."""
    self._limits.check(request, what)

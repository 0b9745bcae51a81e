"""Tasksets of verifiers: one turn, tools with a state, and tasks that cannot run here."""

import verifiers.v1 as vf


class Counted(vf.State):
  calls: int = 0


class Data(vf.TaskData):
  answer: str = ''


class Adder(vf.Toolset[vf.ToolsetConfig, Counted]):
  @vf.tool
  def add(self, a: int, b: int) -> int:
    """Adds two numbers."""
    self.state.calls += 1
    if a > 99:
      raise ValueError('too large')
    return a + b


class Sums(vf.Task[Data, Counted, vf.TaskConfig]):
  @classmethod
  def toolsets(cls, config):
    return [Adder(vf.ToolsetConfig())]

  @vf.stop
  async def enough(self, trace: vf.Trace) -> bool:
    return trace.state.calls >= 2

  @vf.reward(weight=2.0)
  async def exact(self, task: Data, trace: vf.Trace) -> float:
    return float(trace.last_reply.endswith(task.answer))

  @vf.reward(weight=0.1)
  async def used(self, trace: vf.Trace) -> float:
    return float(trace.state.calls)

  @vf.metric
  async def turns(self, trace: vf.Trace) -> float:
    return trace.num_turns


class Words(vf.Task[Data, vf.State, vf.TaskConfig]):
  @vf.reward
  async def share(self, task: Data, trace: vf.Trace) -> float:
    return len(task.answer) / max(1, len(trace.last_reply))


class Boxed(Words):
  @vf.reward
  async def file(self, runtime) -> float:
    return 1.0


class Config(vf.TasksetConfig):
  kind: str = 'sums'
  system: str | None = None


class Tasks(vf.Taskset[vf.Task, Config]):
  INFINITE = True

  def load(self):
    kind = {'sums': Sums, 'words': Words, 'boxed': Boxed}[self.config.kind]
    number = 0
    while True:
      data = Data(prompt=f'{number} + 2', answer=f'{number + 2}', system_prompt=self.config.system)
      yield kind(data, self.config.task)
      number += 1


__all__ = ['Tasks']

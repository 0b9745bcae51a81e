"""A taskset whose Env is the user: it opens the talk, draws, answers guesses and adds rewards."""

import random

import verifiers.v1 as vf


class Data(vf.TaskData):
  number: int


class Guess(vf.Task[Data]):
  @vf.reward
  async def found(self, task: Data, trace: vf.Trace) -> float:
    return float(trace.last_reply == str(task.number))


class Tasks(vf.Taskset[Guess, vf.TasksetConfig]):
  def load(self):
    for number in (3, 8, 5):
      yield Guess(Data(number=number, system_prompt='Say a number.'), self.config.task)


class Config(vf.EnvConfig):
  player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[Config]):
  async def run(self, task, agents):
    guesses = 0
    async with agents.player.interaction(task) as talk:
      said = f'Guess a number below {random.randint(10, 1000)}.'
      while True:
        try:
          segment = await talk.turn(said)
        except Exception as e:
          raise RuntimeError('what ends a replay must not look like an error') from e
        if segment.terminated or segment.last_reply == str(task.data.number):
          break
        guesses += 1
        above = int(segment.last_reply) > task.data.number
        said = [{'role': 'user', 'content': 'Smaller.' if above else 'Larger.'}]
    talk.trace.record_reward('few', 1 / (1 + guesses), 0.5)

  async def finalize(self, task, episode):
    (trace,) = episode.traces
    trace.record_reward('stopped', float(trace.stop_condition == 'user_closed'), 0.25)


__all__ = ['Game', 'Tasks']
